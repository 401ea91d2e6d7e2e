"""quality: the texts, perplexity, distances between predictions, decibels."""

import json
import math
import pydoc_data.topics
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_folder import write_tiny_folder
from typer.testing import CliRunner

from llm_engine.config import ModelConfig, load_config
from llm_engine.engine import Engine
from llm_engine.quality import (
    calibration_text,
    compare_logits,
    held_out_text,
    measure,
    perplexity,
    sqnr,
    window_logits,
    windows,
)
from llm_engine.quantize import Scheme
from llm_engine.tokenizer import Tokenizer
from llm_engine.transformer import Transformer

CONFIG = ModelConfig(
    model_type="llama", vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128, rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return Transformer(CONFIG).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tokenizer(default_folder):
    return Tokenizer.from_folder(default_folder)


# ---- texts


def test_the_halves_share_nothing(tokenizer):
    held_out, calibration = held_out_text(), calibration_text()
    assert held_out == held_out_text() != calibration
    lines = [{x for x in t.split("\n\n") if len(x) > 80} for t in (held_out, calibration)]
    assert min(map(len, lines)) > 50
    # a few topics are printed twice by Python, under two names
    assert len(lines[0] & lines[1]) <= 3
    for text in (held_out, calibration):
        assert len(tokenizer.encode(text)) > 6000


def test_a_new_topic_moves_no_other(monkeypatch):
    before = held_out_text(), calibration_text()
    more = dict(pydoc_data.topics.topics, aaa="A new topic.\n\nMore.")
    monkeypatch.setattr(pydoc_data.topics, "topics", more)
    after = held_out_text(), calibration_text()
    assert sum(a == b for a, b in zip(before, after)) == 1
    assert sorted(len(a) - len(b) for a, b in zip(after, before)) == [0, len("A new topic.\n\n")]


def test_windows(tokenizer):
    text = held_out_text()
    four = windows(tokenizer, text, 16, 4)
    assert four.shape == (4, 16)
    assert (
        four.flatten().tolist() == tokenizer.encode(text, add_bos=False, special_tokens="text")[:64]
    )
    all_of_it = windows(tokenizer, text, 512)
    assert all_of_it.shape[0] >= 9 and torch.equal(all_of_it.flatten()[:64], four.flatten())
    with pytest.raises(ValueError, match="not enough for 3 windows of 100"):
        windows(tokenizer, "A short text.", 100, 3)


def test_special_tokens_in_a_text_are_text(tokenizer):
    """A text about chats is read as its characters: no token that ends an answer is in a window."""
    text = "A turn ends with <|im_end|>, and the next begins with <|im_start|>user. " * 4
    ids = windows(tokenizer, text, 64, 1).flatten().tolist()
    assert ids == tokenizer.encode(text, add_bos=False, special_tokens="text")[:64]
    assert not set(ids) & set(tokenizer.encode("<|im_end|><|im_start|>", add_bos=False))


@pytest.mark.parametrize(
    ("length", "count", "says"),
    [(0, None, "length.* 2.* 0"), (1, 4, "length.* 2.* 1"), (16, 0, "count.* 1.* 0"), (16, -1, "count")],
)  # fmt: skip
def test_windows_in_which_nothing_is_predicted_are_refused(tokenizer, length, count, says):
    with pytest.raises(ValueError, match=says):
        windows(tokenizer, held_out_text(), length, count)


# ---- perplexity


@pytest.fixture
def saying():
    """A model that always gives these probabilities."""

    def make(*probabilities):
        class Head(torch.nn.Module):
            def forward(self, hidden):
                return torch.tensor(probabilities).log().expand(*hidden.shape[:-1], -1)

        model = Transformer(CONFIG).eval().requires_grad_(False)
        model.lm_head = Head()
        return model

    return make


def test_perplexity_of_known_models(saying):
    ids = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
    assert perplexity(saying(0.25, 0.25, 0.25, 0.25), ids) == pytest.approx(4)
    # the first token of a window is given: 1, 2, 3 and 2, 1, 0 are predicted
    logs = [math.log(p) for p in (0.2, 0.1, 0.1, 0.1, 0.2, 0.6)]
    assert perplexity(saying(0.6, 0.2, 0.1, 0.1), ids) == pytest.approx(math.exp(-sum(logs) / 6))


def test_measure_is_what_it_says(model):
    ids = torch.randint(0, 60, (3, 20), generator=torch.Generator().manual_seed(0))
    logits = torch.stack(list(window_logits(model, ids)))
    nll = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    found = measure(model, ids, logits)
    assert found.tokens == 57
    assert found.perplexity == pytest.approx(math.exp(nll), rel=1e-5)
    assert found.kl == pytest.approx(0, abs=1e-6) and found.top1 == 1
    alone = measure(model, ids)
    assert math.isnan(alone.kl) and math.isnan(alone.top1) and alone.perplexity == found.perplexity


def test_a_reference_belongs_to_the_windows_or_is_refused(model):
    ids = torch.randint(0, 60, (3, 20), generator=torch.Generator().manual_seed(0))
    logits = list(window_logits(model, ids))
    for other in ([], logits[:2], iter(logits[:2]), [*logits, logits[0]]):
        with pytest.raises(ValueError, match="reference.*3 windows"):
            measure(model, ids, other)
    assert measure(model, ids, iter(logits)) == measure(model, ids, logits)
    for nothing in (ids[:0], ids[:, :1]):
        with pytest.raises(ValueError, match="nothing to predict"):
            perplexity(model, nothing)


def test_windows_do_not_see_each_other(model):
    ids = torch.randint(0, 60, (2, 20), generator=torch.Generator().manual_seed(1))
    together, alone = list(window_logits(model, ids)), list(window_logits(model, ids[1:]))
    torch.testing.assert_close(together[1], alone[0])


@pytest.mark.parametrize("cache", ["none", "growing"])
def test_an_engine_reads_with_its_own_cache(model, tokenizer, cache):
    class Watched(Engine):
        made = 0

        def new_cache(self):
            self.made += 1
            return super().new_cache()

    ids = torch.randint(0, 60, (2, 20), generator=torch.Generator().manual_seed(2))
    engine = Watched(model, tokenizer, cache=cache, runner="torch")
    assert perplexity(engine, ids) == pytest.approx(perplexity(model, ids), rel=1e-5)
    assert engine.made == 2


# ---- distances


def test_compare_logits_of_known_distributions():
    p, q = (
        torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]),
        torch.tensor([[0.2, 0.4, 0.4], [0.1, 0.8, 0.1]]),
    )
    wanted = (0.5 * math.log(0.5 / 0.2) + 2 * 0.25 * math.log(0.25 / 0.4)) / 2
    found = compare_logits(p.log(), q.log() + 3)  # a constant changes nothing
    assert found.kl == pytest.approx(wanted, rel=1e-5) and found.top1 == 0.5
    assert compare_logits(q.log(), p.log()).kl != pytest.approx(wanted, rel=1e-2)


@given(st.integers(0, 50), st.floats(0, 3))
def test_kl_is_never_negative(seed, distance):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(4, 30, generator=generator) * 5
    found = compare_logits(a, a + distance * torch.randn(4, 30, generator=generator))
    assert found.kl >= 0 and 0 <= found.top1 <= 1


# ---- decibels


def test_sqnr_of_known_errors():
    weight = torch.ones(4, 8)
    assert sqnr(weight, weight) == math.inf
    assert sqnr(weight, weight * 0.9) == pytest.approx(20, abs=1e-4)
    assert sqnr(weight, weight * 0.99) == pytest.approx(40, abs=1e-3)
    assert sqnr(torch.zeros(2, 2), torch.ones(2, 2)) == -math.inf
    assert sqnr(torch.zeros(2, 2), torch.zeros(2, 2)) == math.inf


def test_loudness_makes_it_the_sqnr_of_the_products():
    generator = torch.Generator().manual_seed(0)
    weight, error = (
        torch.randn(16, 32, generator=generator),
        torch.randn(16, 32, generator=generator) / 30,
    )
    error[:, 4] *= 10
    loud = torch.rand(32, generator=generator) * 3
    x = torch.randn(20000, 32, generator=generator) * loud.sqrt()
    products = 10 * math.log10((x @ weight.T).square().sum() / (x @ error.T).square().sum())
    assert sqnr(weight, weight + error, loud) == pytest.approx(products, abs=0.1)
    assert abs(sqnr(weight, weight + error) - products) > 0.5, (
        "without loudness it is another number"
    )


# ---- the table


def test_the_table_that_is_stored_meets_its_goals():
    """benchmarks/quantization.json, which chapter 31 and the README show: measured, and worth having."""
    stored = Path(__file__).parent.parent / "benchmarks" / "quantization.json"
    result = json.loads(stored.read_text("utf8"))
    assert result["tokens"] >= 4000
    found = {row["name"]: row["perplexity"] for row in result["rows"]}
    base = found["float32"]
    assert found["int8 random tokens"] / base - 1 <= 0.005
    rtn = found["int4-g64-asym rtn"] - base
    assert rtn > 0
    for method in ("random tokens", "calibrated", "gptq"):
        left = found[f"int4-g64-asym {method}"] - base
        assert left <= rtn / 2, f"{method} recovers less than half"


@pytest.fixture
def benchmark(monkeypatch):
    """benchmarks/quantization.py, on one thread."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import quantization

    threads = torch.get_num_threads()
    yield quantization
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)


def test_the_readme_shows_what_is_stored(benchmark):
    root = Path(__file__).parent.parent
    result = json.loads((root / "benchmarks" / "quantization.json").read_text("utf8"))
    page = (root / "README.md").read_text("utf8")
    assert benchmark.with_table(page, result) == page, "run the command above the table with --into"
    with pytest.raises(ValueError, match="no place for the table"):
        benchmark.with_table("a page", result)


def test_a_table_measured_on_another_text_is_kept(benchmark, tmp_path):
    """Not one row of it goes to make room for a quick try."""
    import typer

    stored = {"model": "m", "tokens": 4088, "window": 512, "text_python": "3.11.7"}
    benchmark.refuse_another_text(None, stored, stored | {"text_python": "3.11.9"})
    for change in ({"window": 64}, {"tokens": 63}, {"model": "n"}, {"text_python": "3.12.7"}):
        with pytest.raises(typer.BadParameter, match=f"{next(iter(change))} .*Name another file"):
            benchmark.refuse_another_text(Path("t.json"), stored, stored | change)


def test_the_table_is_made_and_added_to(benchmark, tmp_path):
    import typer

    app = typer.Typer()
    app.command()(benchmark.main)
    folder, found = write_tiny_folder(tmp_path / "model"), tmp_path / "found.json"

    def run(*options):
        words = [
            "--model",
            str(folder),
            "--quick",
            "--threads",
            "1",
            "--json",
            str(found),
            *options,
        ]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output, json.loads(found.read_text("utf8"))

    table, result = run("--only", "float32", "--only", "int4-g64-asym gptq", "--markdown")
    whole, four = result["rows"]
    assert whole["kl"] == pytest.approx(0, abs=1e-6) and four["kl"] > 0 and four["top1"] <= 1
    assert whole["bits_per_weight"] == 32
    # sizes by hand: 4.5 bits a weight in the layers, 8 in the head, norms in float32
    model = Transformer(load_config(folder))
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    by_hand = sum(
        (Scheme(8) if name == "lm_head" else Scheme(4, 64, False)).bytes(*m.weight.shape)
        for name, m in linear.items()
    ) + sum(p.nbytes for n, p in model.named_parameters() if "norm" in n or "bias" in n)
    if not model.config.tie_word_embeddings:  # a table of its own stays as it is
        by_hand += model.embed.weight.nbytes
    assert four["memory_bytes"] == by_hand
    assert by_hand < four["file_bytes"] < by_hand + 40_000
    assert set(result["speed"]) == {"float32", "int4-g64-asym"}
    assert table.count("\n| ") >= 3 and "int4-g64-asym | gptq" in table
    _, more = run("--only", "int8 rtn", "--no-speed")
    assert [row["name"] for row in more["rows"]] == ["float32", "int8 rtn", "int4-g64-asym gptq"]
    assert more["rows"][0] == whole and more["speed"] == result["speed"]
    with pytest.raises(AssertionError, match="no such row"):
        run("--only", "int3")
