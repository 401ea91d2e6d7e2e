"""The verifier is a measuring instrument: it must see each known fault, name its place, and be silent on a sound model."""

import dataclasses
import json
import math
import re
import shutil
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import llm_engine.attention
from llm_engine.cli import app
from llm_engine.config import CONFIG_READERS
from llm_engine.engine import Engine
from llm_engine.hub import HubError
from llm_engine.transformer import load_model
from llm_engine.verify import (
    FAULTS,
    KNOWN_ANSWERS,
    NEED_TRANSFORMERS,
    Check,
    Report,
    VerifyError,
    batch_difference,
    causal_difference,
    compare,
    compare_models,
    expected_shapes,
    first_divergence,
    load_reference,
    plant,
    record_engine,
    record_reference,
    relative_difference,
    self_test,
    side_by_side,
    tiny_model,
)

VARIANTS = {
    "mha": {"num_key_value_heads": 6},
    "gqa": {},
    "mqa, biases, tied": {
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
}
ROWS = [[5, 17, 3, 88, 41, 9, 9, 62, 30, 71, 12], [44, 2, 90], [7, 7, 51, 23, 64]]
PLACES = {  # where each fault of layer i first shows, inside that layer
    "no 1/sqrt(D)": "attn.scores",
    "rope pairs interleaved": "attn.q_rotated",
    "epsilon outside the root": "attn_norm",
    "KV heads in the wrong order": "attn.scores",
    "mask off by one": "attn.probs",
    "head and batch axes mixed up": "attn.heads",
    "q and k swapped": "attn.q_proj",
    "heads split without a transpose": "attn.q_rotated",
    "heads joined without a transpose": "attn.o_proj",
    "wrong activation": "ffn.gated",
    "residual left out": "",
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """name of a variant -> (our model, what transformers computes for ROWS), from the same folder; made once."""
    made = {}

    def pair(name):
        if name not in made:
            folder = tiny_model(tmp_path_factory.mktemp("tiny"), seed=3, **VARIANTS[name])
            reference = load_reference(folder)
            made[name] = load_model(folder), [record_reference(reference, row) for row in ROWS]
        return made[name]

    return pair


def shows(fault: str, variant: str) -> bool:
    """Whether the fault changes anything in this variant."""
    if fault == "q and k swapped":  # with fewer k heads the shapes differ: a test of its own
        return variant == "mha"
    return not (fault == "KV heads in the wrong order" and variant != "gqa")


# --- the finder


def test_every_fault_has_a_place():
    assert set(PLACES) == set(FAULTS)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault, variant, layer, pairs):
    """The first divergence is where the fault is, in the first layer or in a later one; all before it is sound."""
    if not shows(fault, variant):
        pytest.skip("changes nothing here, or is tested by itself")
    model, reference = pairs(variant)
    with plant(model, fault, layer):
        report = compare_models(model, reference, ROWS)
    found = first_divergence(report.rows, report.tolerance)
    assert found is not None, "not seen at all"
    assert found.name == f"layers.{layer}.{PLACES[fault]}".rstrip(".")
    assert found is report.first and not report.ok
    assert found.relative > 3 * report.tolerance and "look at" in found.note
    assert all(row.ok for row in report.rows[: report.rows.index(found)])
    assert not report["lm_head"].ok, "a fault that the logits do not notice"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sound_model_diverges_nowhere(variant, pairs):
    """Also after faults were planted and taken out again: nothing of them stays."""
    model, reference = pairs(variant)
    before, _ = record_engine(model, side_by_side(ROWS), ["lm_head"])
    names = [name for name, _ in model.named_modules()]
    for fault in FAULTS:
        with plant(model, fault, 1):
            pass
    after, _ = record_engine(model, side_by_side(ROWS), ["lm_head"])
    assert torch.equal(before["lm_head"], after["lm_head"])
    assert names == [name for name, _ in model.named_modules()]
    report = compare_models(model, reference, ROWS)
    assert report.ok and report.first is None
    assert first_divergence(report.rows, report.tolerance) is None
    assert [row.name for row in report.rows] == list(expected_shapes(model.config, 1, 1))


def test_a_fault_is_taken_out_after_an_error(pairs):
    model, _ = pairs("gqa")
    before, _ = record_engine(model, side_by_side(ROWS), ["lm_head"])
    for fault in FAULTS:
        with pytest.raises(KeyError), plant(model, fault):
            raise KeyError
    after, _ = record_engine(model, side_by_side(ROWS), ["lm_head"])
    assert torch.equal(before["lm_head"], after["lm_head"])


def test_two_faults_the_earlier_one_is_named(pairs):
    model, reference = pairs("gqa")
    with plant(model, "residual left out", 0), plant(model, "mask off by one", 1):
        assert compare_models(model, reference, ROWS).first.name == "layers.0"
    with plant(model, "residual left out", 1), plant(model, "mask off by one", 0):
        assert compare_models(model, reference, ROWS).first.name == "layers.0.attn.probs"


def test_a_batch_of_one_hides_mixed_axes(pairs):
    """Why `compare_models` asks for two rows."""
    model, reference = pairs("gqa")
    with plant(model, "head and batch axes mixed up"):
        assert compare_models(model, reference[:1], ROWS[:1]).ok
        assert not compare_models(model, reference[:2], ROWS[:2]).ok


def test_what_equal_head_counts_hide(pairs):
    """The wrong order of KV heads changes nothing where there is one each, or one for all: test with GQA."""
    for variant in ("mha", "mqa, biases, tied"):
        model, reference = pairs(variant)
        with plant(model, "KV heads in the wrong order"):
            assert compare_models(model, reference, ROWS).ok


def test_a_fault_that_ends_in_an_error_is_named_too(pairs):
    """q and k swapped on a GQA model: the shape of q_proj is wrong, and the pass dies later on. The report says both."""
    model, reference = pairs("gqa")
    with plant(model, "q and k swapped", 1):
        report = compare_models(model, reference, ROWS)
    assert report.first.name == "layers.1.attn.q_proj"
    assert report.first.note == "shape [3, 11, 16], expected [3, 11, 48]"
    assert report.first.relative == math.inf


def test_a_pass_that_stops_says_where(pairs, monkeypatch):
    model, reference = pairs("gqa")

    def broken(x):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(llm_engine.attention, "join_heads", broken)
    report = compare_models(model, reference, ROWS)
    assert report.first.name == "layers.0.attn.o_proj"
    assert "not reached: RuntimeError: out of luck" in report.first.note
    assert report.rows[-1] is report.first  # nothing is claimed about the rest


def test_not_a_number_is_a_divergence(pairs):
    """NaN is not above any tolerance; it must not pass for that."""
    model, reference = pairs("gqa")
    weight = model.layers[1].ffn.up_proj.weight
    kept = weight[4, 4].item()
    try:
        with torch.no_grad():
            weight[4, 4] = math.nan
        assert compare_models(model, reference, ROWS).first.name == "layers.1.ffn.up_proj"
    finally:
        with torch.no_grad():
            weight[4, 4] = kept


def test_a_fused_kernel_is_looked_at_step_by_step(pairs, monkeypatch):
    """A model that runs the fused kernel never forms scores; while it is compared, it runs step by step."""
    model, reference = pairs("gqa")
    for layer in model.layers:
        monkeypatch.setattr(layer.attn, "kernel", "sdpa")
    report = compare_models(model, reference, ROWS)
    assert report.ok and report["layers.2.attn.probs"].ok
    assert all(layer.attn.kernel == "sdpa" for layer in model.layers)


def test_layers_only_and_the_reference_is_left_as_it_was(tmp_path):
    folder = tiny_model(tmp_path)
    model, reference = load_model(folder), load_reference(folder)
    before = reference.config._attn_implementation
    report = compare_models(model, reference, ROWS, inside=False)
    wanted = ["embed", "layers.0", "layers.1", "layers.2", "norm", "lm_head"]
    assert [row.name for row in report.rows] == wanted and report.ok
    with pytest.raises(IndexError):
        record_reference(reference, [10**6])  # no such token
    assert reference.config._attn_implementation == before
    assert not any(module._forward_hooks for module in reference.modules())
    assert not any(module._forward_pre_hooks for module in reference.modules())


# --- the measure


def test_relative_difference_by_hand():
    a = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert relative_difference(a, a) == 0
    assert relative_difference(a + torch.tensor([[0.0, 0.5], [0.0, 0.0]]), a) == pytest.approx(0.1)
    assert relative_difference(torch.zeros(2, 2), torch.zeros(2, 2)) == 0
    assert relative_difference(torch.ones(1, 2), torch.zeros(1, 2)) == math.inf
    assert relative_difference(torch.zeros(0, 4), torch.zeros(0, 4)) == 0


def test_a_large_vector_does_not_hide_a_small_one():
    """The first token of a real model carries values of thousands: the others must count all the same."""
    expected = torch.tensor([[5000.0, 0.0], [0.1, 0.1]])
    found = expected.clone()
    found[1, 0] = 0.11
    assert relative_difference(found, expected) > 0.05
    assert (
        found - expected
    ).abs().max() / expected.abs().max() < 1e-5  # the global measure sees nothing


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_no_number_is_infinitely_far(value, side):
    pair = [torch.ones(3, 4), torch.ones(3, 4)]
    pair[side][1, 2] = value
    assert relative_difference(*pair) == math.inf
    pair[1 - side][1, 2] = value  # even where both agree
    assert relative_difference(*pair) == math.inf


@given(
    st.integers(0, 10**6), st.integers(-12, 12), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_relative_difference_has_no_unit(seed, power, dtype):
    """Both sides times 2^n: the same relative difference."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(3, 5, generator=generator).to(dtype) for _ in "ab")
    assert relative_difference(a * 2.0**power, b * 2.0**power) == pytest.approx(
        relative_difference(a, b), rel=1e-12
    )


def test_first_divergence_takes_the_first_not_the_worst():
    rows = [
        Check("a", True, relative=1e-7),
        Check("words only", False),
        Check("b", False, relative=3e-5),
        Check("c", False, relative=9.0),
    ]
    assert first_divergence(rows, 1e-5).name == "b"
    assert first_divergence(rows, 1e-4).name == "c"
    assert first_divergence(rows, 10.0) is None
    assert first_divergence([], 1e-5) is None
    assert first_divergence([Check("edge", True, relative=1e-5)], 1e-5) is None
    assert first_divergence([Check("nan", False, relative=math.nan)], 1e-5).name == "nan"


# --- reports


def test_a_report_reads_like_a_table():
    rows = (
        Check("x", True, (1, 2), 1e-7, 2e-7),
        Check("longer.name", False, (3,), 0.5, 0.25, "look at x"),
    )
    report = Report("two places", rows, 1e-5)
    lines = report.table().splitlines()
    assert lines[0] == "two places"
    assert lines[1].split() == [
        "check",
        "shape",
        "max",
        "|difference|",
        "relative",
        "note",
        "verdict",
    ]
    assert lines[3].split() == ["x", "[1,", "2]", "1.0e-07", "2.0e-07", "ok"]
    assert lines[4].endswith("look at x  FAILED")
    assert str(report) == report.table() and report.first.name == "longer.name"
    assert report["x"].ok
    with pytest.raises(KeyError, match=r"'y' was not checked\. Checked: x, longer\.name"):
        report["y"]


def test_an_empty_report_is_no_success():
    assert not Report("nothing", ()).ok


def test_side_by_side():
    batch = side_by_side([[4, 5, 6], [7]])
    assert batch.ids.tolist() == [[4, 5, 6], [7, 0, 0]]
    assert batch.pos.tolist() == [[0, 1, 2], [0, -1, -1]]
    for rows in ([], [[1], []]):
        with pytest.raises(ValueError, match="at least one"):
            side_by_side(rows)


# --- shapes


def read(**fields):
    raw = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        **fields,
    }
    return CONFIG_READERS["llama"](raw)


def test_expected_shapes_of_llama_3_2_1b():
    shapes = expected_shapes(read(), 1, 7)
    assert len(shapes) == 3 + 16 * 16
    assert shapes["layers.15.attn.q_proj"] == (1, 7, 2048)
    assert shapes["layers.15.attn.k_proj"] == (1, 7, 512)
    assert shapes["layers.0.attn.k_rotated"] == (1, 8, 7, 64)
    assert shapes["layers.0.attn.probs"] == (1, 32, 7, 7)
    assert shapes["lm_head"] == (1, 7, 128256)


def test_expected_shapes_where_heads_times_d_is_not_h():
    """A model with H 2560, N 32 and D 128 has a q_proj of [4096, 2560]; taking H for N * D gave a wrong shape (public
    report entrenar#262)."""
    shapes = expected_shapes(read(hidden_size=2560, head_dim=128), 2, 3)
    assert shapes["layers.0.attn.q_proj"] == (2, 3, 4096)
    assert shapes["layers.0.attn.o_proj"] == (2, 3, 2560)


# --- the tiny models


def test_a_tiny_model_depends_on_its_seed_only(tmp_path):
    a, b, c = (load_file(tiny_model(tmp_path / n, seed=s) / "model.safetensors") for n, s in
               (("a", 1), ("b", 1), ("c", 2)))  # fmt: skip
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a)


def test_a_tiny_model_hides_nothing(tmp_path):
    """Norm weights away from 1, biases away from 0."""
    tensors = load_file(
        tiny_model(tmp_path, attention_bias=True, mlp_bias=True) / "model.safetensors"
    )
    norms = [t for name, t in tensors.items() if name.endswith("norm.weight")]
    biases = [t for name, t in tensors.items() if name.endswith("bias")]
    assert len(norms) == 7 and all((t - 1).abs().mean() > 0.1 for t in norms)
    assert len(biases) == 3 * 7 and all(t.abs().mean() > 0.1 for t in biases)


# --- without transformers


@pytest.fixture
def no_transformers(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "transformers", None
    )  # what an import of a missing package does


def test_without_transformers_comparing_says_what_to_install(no_transformers, tmp_path):
    for call in (
        lambda: compare(tmp_path, [[1, 2]]),
        lambda: load_reference(tmp_path),
        lambda: tiny_model(tmp_path),
    ):
        with pytest.raises(VerifyError, match=r'pip install "transformers==\d+\.\d+\.\*"'):
            call()


def test_the_pip_line_names_the_version_that_the_book_pins():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf8"))
    extras = chain(*project["project"]["optional-dependencies"].values())
    (wanted,) = {line for line in extras if re.match(r"transformers\b", line)}
    assert f'"{wanted}"' in NEED_TRANSFORMERS


def test_a_model_that_transformers_does_not_know(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(VerifyError, match="can't load"):
        load_reference(tmp_path)


# --- invariants: what needs no reference


def test_a_sound_model_keeps_the_invariants(pairs):
    for variant in VARIANTS:
        model, _ = pairs(variant)
        assert causal_difference(model, ROWS[0]) < 1e-5
        assert batch_difference(model, ROWS) < 1e-5


def test_invariants_see_what_breaks_them(pairs):
    model, _ = pairs("gqa")
    with plant(model, "mask off by one"):
        assert causal_difference(model, ROWS[0]) > 1e-2
    with plant(model, "head and batch axes mixed up"):
        assert batch_difference(model, ROWS) > 1e-2


# --- the self-test


@pytest.fixture(scope="module")
def tiny_with_text(tmp_path_factory, default_folder):
    """A tiny random model with the default model's tokenizer."""
    folder = tiny_model(
        tmp_path_factory.mktemp("text"),
        vocab_size=49152,
        tie_word_embeddings=True,
        eos_token_id=2,
        num_hidden_layers=2,
    )
    for file in default_folder.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def test_the_default_model_passes(default_folder, capsys):
    """The command prints the table of all three tests and exits with 0."""
    result = CliRunner().invoke(app, ["verify", "--cache", "none", "--runner", "torch"])
    assert result.exit_code == 0, result.output
    assert "FAILED" not in result.output
    for test in ("shapes", "logits", "text"):
        assert re.search(rf"^{test} ", result.output, re.M)
    assert "'The capital of France is' -> ' Paris." in result.output
    assert "every module equals transformers" in result.output


def test_another_model_passes_and_random_weights_are_told_apart(tiny_with_text):
    report = self_test(tiny_with_text, trained=False)
    assert report.ok, report.table()
    assert [row.test for row in report.rows] == sorted(
        (row.test for row in report.rows), key=["shapes", "logits", "text"].index
    )
    assert report["the text transformers generates"].ok
    strict = self_test(tiny_with_text, reference=False)
    assert strict.first.name == "English is likelier than noise" and not strict.ok


def test_without_transformers_the_rest_is_tested(tiny_with_text, no_transformers):
    report = self_test(tiny_with_text, trained=False)
    assert report.ok, report.table()
    assert "pip install" in report["compared with transformers"].note
    assert report["later tokens change nothing before"].ok
    with pytest.raises(KeyError):
        report["every module equals transformers"]


@pytest.mark.parametrize("fault", ["repeat_kv", "rotate"])
def test_a_bug_in_the_code_fails_the_self_test(fault, tiny_with_text, monkeypatch):
    """What a reader sees after breaking a cell: exit code 1, and the name of the place."""
    wrong = {
        "repeat_kv": lambda x, groups: x.repeat(1, groups, 1, 1),
        "rotate": lambda x, cos, sin: x,
    }
    place = {"repeat_kv": "layers.0.attn.scores", "rotate": "layers.0.attn.q_rotated"}
    monkeypatch.setattr(llm_engine.attention, fault, wrong[fault])
    result = CliRunner().invoke(app, ["verify", str(tiny_with_text), "--untrained"])
    assert result.exit_code == 1
    assert f"first: {place[fault]}; look at" in result.output


def damaged(folder: Path, to: Path, change) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, to)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {k: v.contiguous() for k, v in tensors.items()}, to / "model.safetensors", {"format": "pt"}
    )
    return to


def swap_layers(tensors):
    """Every weight in its place and of the right shape, but two layers' FFN outputs exchanged."""
    for a, b in ((0, 17), (1, 20), (2, 25)):
        one, two = (f"model.layers.{i}.mlp.down_proj.weight" for i in (a, b))
        tensors[one], tensors[two] = tensors[two], tensors[one]


def test_swapped_weights_fail(default_folder, tmp_path):
    """A folder whose shapes are all right and whose numbers are not: transformers reads the same wrong numbers, so that
    only the text tells."""
    folder = damaged(default_folder, tmp_path / "swapped", swap_layers)
    result = CliRunner().invoke(app, ["verify", str(folder), "--no-reference"])
    assert result.exit_code == 1
    assert re.search(r"English is likelier than noise .*FAILED", result.output), result.output


def test_swapped_weights_under_the_default_name_fail(
    tiny_with_text, default_folder, tmp_path, monkeypatch
):
    """The same damage in the cache, under the name whose answers are known."""
    target = tmp_path / "smollm2-135m"
    shutil.copytree(tiny_with_text, target)
    monkeypatch.setattr("llm_engine.verify.cache_dir", lambda: tmp_path)
    report = self_test(target, reference=False)
    assert report.first.name == "likeliest next tokens"
    assert not report["known answer"].ok and "expected ' Paris.'" in report["known answer"].note


def test_weights_that_are_no_numbers_fail(tiny_with_text, tmp_path):
    def poison(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = math.nan

    report = self_test(damaged(tiny_with_text, tmp_path / "nan", poison), trained=False)
    assert report.first.name == "weights"
    assert report.first.note == "NaN or infinity in layers.1.ffn.up_proj.weight"


def test_a_folder_that_does_not_load_fails(tiny_with_text, tmp_path):
    def shorten(tensors):
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name][:-1]

    report = self_test(damaged(tiny_with_text, tmp_path / "short", shorten))
    assert [row.name for row in report.rows] == ["the folder loads"] and not report.ok
    assert "up_proj" in report.first.note


def test_an_unknown_name_is_an_error_not_a_finding():
    with pytest.raises(HubError, match="neither a folder nor a known model"):
        self_test("no-such-model")
    result = CliRunner().invoke(app, ["verify", "no-such-model"])
    assert result.exit_code == 1


def test_compare_takes_texts_and_ids(tiny_with_text):
    report = compare(tiny_with_text, ["two words", [3, 4, 5]])
    assert report.ok and "2 prompts" in report.title
    half = compare(tiny_with_text, ["two words", [3, 4, 5]], dtype=torch.bfloat16, inside=False)
    assert half.ok and half.tolerance > report.tolerance


def test_the_stored_answers_are_the_models(engine):
    """What is stored of the default model is what the engine computes; and it is computed from what is stored."""
    known = KNOWN_ANSWERS["smollm2-135m"]
    logits = engine.step(engine.encode(known.prompt))
    top = logits.topk(len(known.logits))
    assert top.indices.tolist() == list(known.logits)
    for value, stored in zip(top.values.tolist(), known.logits.values(), strict=True):
        assert value == pytest.approx(stored, abs=0.006)
    assert isinstance(engine, Engine) and dataclasses.is_dataclass(known)
