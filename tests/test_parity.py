"""The same numbers as `transformers`, from the same folder: random models of every variant, and the default model."""

import json

import pytest
import torch

from llm_engine.attention import CACHES, Batch
from llm_engine.config import load_config
from llm_engine.hub import DEFAULT_MODEL
from llm_engine.tokenizer import Tokenizer
from llm_engine.transformer import TorchRunner, load_model
from llm_engine.verify import (
    compare_models,
    load_reference,
    record_engine,
    record_reference,
    side_by_side,
    tiny_model,
)

# What a variant changes in the tiny model (H 48, N 6, K 2, D 8, F 80, L 3, V 99; see `tiny_model`).
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "gqa": {},
    "gqa, D 16": {"head_dim": 16},
    "mha": {"num_key_value_heads": 6},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "tied mqa with biases": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "head_dim above H/N": {"head_dim": 20},
    "head_dim below H/N": {"head_dim": 4, "num_key_value_heads": 3},
    "one layer": {"num_hidden_layers": 1},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 2},
    "odd sizes": {
        "vocab_size": 101,
        "hidden_size": 35,
        "intermediate_size": 53,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 14,
    },
    "large epsilon": {"rms_norm_eps": 0.3},
    "high theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "gelu": {"hidden_act": "gelu"},
    "gelu, tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "relu": {"hidden_act": "relu"},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}},
    "dynamic": {
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
    },
    "llama3": {"rope_parameters": LLAMA3, "head_dim": 16},
    "yarn": {"rope_parameters": YARN, "head_dim": 16},
    "yarn, all fields": {
        "rope_parameters": {
            **YARN,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.4,
            "truncate": False,
        },
        "head_dim": 16,
    },
    "yarn, attention factor": {
        "rope_parameters": {**YARN, "attention_factor": 1.3},
        "head_dim": 16,
    },
}
LONG = 70  # tokens: past the 32 positions that the scaled variants were "trained" on


def random_ids(length: int, vocab_size: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


def run(model, rows: list[list[int]]):
    """Our logits [B, T, V] for rows side by side."""
    batch = side_by_side(rows)
    cache = CACHES["none"](model.config, len(rows), torch.device("cpu"), model.embed.weight.dtype)
    every = torch.arange(batch.ids.shape[1]).expand_as(batch.ids)
    return TorchRunner(model).logits(batch, cache, every)


def hidden_states(model, ids: list[int]) -> list[torch.Tensor]:
    """The embedding's and every layer's output, the last one after the final norm, as transformers lists them."""
    kept, hooks = [], []
    for module in (model.embed, *model.layers[:-1], model.norm):
        hooks.append(module.register_forward_hook(lambda module, args, out: kept.append(out)))
    run(model, [ids])
    for hook in hooks:
        hook.remove()
    return kept


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name of a variant -> its folder, saved by transformers once."""
    made = {}

    def folder(name):
        if name not in made:
            path = tmp_path_factory.mktemp("variant")
            made[name] = tiny_model(path, seed=len(name), **VARIANTS[name])
        return made[name]

    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_a_random_model_gives_the_reference_numbers(name, folders):
    """Every layer's hidden state and the logits, at `assert_close`'s float32 defaults (rtol 1.3e-6, atol 1e-5); q and k
    after rotation, scores, probabilities, heads and the FFN's parts at the finder's tolerance."""
    folder = folders(name)
    model, reference = load_model(folder), load_reference(folder)
    layers = load_config(folder).num_hidden_layers
    for length in (1, 9, LONG):
        ids = random_ids(length, 99)
        with torch.inference_mode():
            theirs = reference(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        ours = hidden_states(model, ids)
        assert len(ours) == len(theirs.hidden_states) == layers + 1
        for i, (mine, other) in enumerate(zip(ours, theirs.hidden_states, strict=True)):
            torch.testing.assert_close(
                mine,
                other,
                msg=lambda text, i=i, n=length: f"hidden state {i} of {n} tokens: {text}",
            )
        torch.testing.assert_close(run(model, [ids]), theirs.logits)
    report = compare_models(model, reference, [random_ids(n, 99) for n in (LONG, 12)])
    assert report.ok, report.first
    assert len(report.rows) == 3 + 16 * layers  # nothing was left out


@pytest.mark.parametrize("name", ["gqa", "llama3", "yarn", "dynamic"])
def test_the_test_models_can_tell(name, folders):
    """The random models are no weak test: attention is decided, and the variant's rope differs from the default one."""
    folder = folders(name)
    reference = load_reference(folder)
    ids = torch.tensor([random_ids(LONG, 99)])
    with torch.inference_mode():
        out = reference(ids, output_attentions=True)
        probs = torch.stack(out.attentions)[..., LONG // 2 :, :]
        assert probs.amax(-1).mean() > 0.15  # uniform would be below 0.03
        if name != "gqa":
            config = json.loads((folder / "config.json").read_text())
            theta = config["rope_parameters"]["rope_theta"]
            config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
            plain = type(reference)(type(reference.config)(**config)).eval()
            plain.load_state_dict(reference.state_dict())
            assert (plain(ids).logits - out.logits).abs().max() > 0.1


@pytest.mark.parametrize("old", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_older_spellings_of_rope_give_the_same_model(name, old, folders, tmp_path):
    """config.json before transformers 5: `rope_theta` and `rope_scaling`, whose kind is `rope_type` or, older, `type`."""
    folder = folders(name)
    raw = json.loads((folder / "config.json").read_text())
    rope = dict(raw.pop("rope_parameters"))
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = {old: rope.pop("rope_type"), **rope}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert load_config(tmp_path).rope == load_config(folder).rope
    ids = random_ids(40, 99)
    assert torch.equal(run(load_model(tmp_path), [ids]), run(load_model(folder), [ids]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gqa", "gqa, D 16", "tied mqa with biases", "llama3", "yarn"])
def test_half_precision_stays_near_the_reference(name, dtype, folders):
    """In bfloat16 and float16 every layer is within 1e-2 of transformers in the same dtype, relative to its size.

    With D = 8, 1/sqrt(D) is no power of two and rounds: q is scaled before the product here, after it there, so that
    one more rounding (up to 0.4 % in bfloat16) differs in each layer. With D = 16 or 64 the scaling is exact.
    """
    folder = folders(name)
    model, reference = load_model(folder, dtype=dtype), load_reference(folder, dtype)
    ids = random_ids(LONG, 99)
    expected = record_reference(reference, ids, inside=False)
    found, error = record_engine(model, side_by_side([ids]), list(expected))
    assert error is None and list(found) == list(expected)
    limit = 1e-2 if model.config.head_dim in (16, 64) or dtype == torch.float16 else 3e-2
    for place, theirs in expected.items():
        assert found[place].dtype == theirs.dtype == dtype
        off, size = (found[place].double() - theirs.double()).norm(), theirs.double().norm()
        assert off <= limit * size, f"{place}: {off / size:.1e}"


@pytest.mark.parametrize("name", ["gqa", "mha", "mqa", "tied mqa with biases", "llama3", "dynamic"])
def test_rows_of_a_padded_batch_equal_the_rows_alone(name, folders):
    """Three lengths, padded right, then left, then on both sides: every real position has the logits it has alone."""
    model = load_model(folders(name))
    rows = [random_ids(n, 99, seed=n) for n in (LONG, 3, 37)]
    alone = [run(model, [row])[0] for row in rows]
    for left in (0, 1, 2):
        width = LONG + left
        ids = torch.full((3, width), 7)
        pos = torch.full((3, width), -1)
        spans = []
        for i, row in enumerate(rows):
            start = {0: 0, 1: width - len(row), 2: (width - len(row)) // 2}[left]
            spans.append(slice(start, start + len(row)))
            ids[i, spans[i]], pos[i, spans[i]] = torch.tensor(row), torch.arange(len(row))
        cache = CACHES["none"](model.config, 3, torch.device("cpu"), torch.float32)
        every = torch.arange(width).expand(3, -1)
        logits = TorchRunner(model).logits(Batch(ids, pos), cache, every)
        assert logits.isfinite().all()  # padding too: 0 attended, not NaN
        for i, span in enumerate(spans):
            torch.testing.assert_close(logits[i, span], alone[i])


def test_neighbors_change_nothing(folders):
    """With the shape fixed, other rows' tokens have no effect at all: bit for bit."""
    model = load_model(folders("gqa"))
    mine = random_ids(20, 99)
    a = run(model, [mine, random_ids(20, 99, seed=5), random_ids(9, 99, seed=6)])
    b = run(model, [mine, random_ids(20, 99, seed=7), random_ids(9, 99, seed=8)])
    assert torch.equal(a[0], b[0])
    assert not torch.equal(a[1], b[1])


# --- the default model, with its real weights ---

LONG_TEXT = (
    "The lighthouse keeper wrote down the weather every morning before breakfast, as his father had done. "
    "Some days there was little to say: wind from the west, a gray sea, two ships far out. On other days the page was "
    "too small, and he turned the book sideways to finish a sentence in the margin. Nobody had ever asked to read it. "
)
PROMPTS = {
    "one token": "Hi",
    "a fact": "The capital of France is",
    "a sentence": "When the rain stopped, the children ran out into the garden and",
    "Chinese": "今天天气很好,我们一起去公园散步吧。",
    "digits": "3.14159265358979 + 2718281828 = 1,000,000 and 0x1F",
    "code": "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n\nprint(fib(",
    "emoji": "Good morning 🌞☕️ have a nice day 👩‍🚀🇫🇷!",
    "German, accents": "Über den Wolken muß die Freiheit wohl grenzenlos sein — déjà vu, naïve café",
    "spaces and lines": "   a\n\n\tb   c\n",
    "markup": '<p class="x">1 &lt; 2</p> {"key": [1, 2, null]} $\\frac{a}{b}$',
    "long": LONG_TEXT * 7 + "Then, one winter, somebody did.",
}


@pytest.fixture(scope="module")
def both(default_folder):
    """The default model twice, ours and transformers', and its tokenizer; loaded once."""
    return (
        load_model(default_folder),
        load_reference(default_folder),
        Tokenizer.from_folder(default_folder),
    )


@pytest.mark.parametrize("name", PROMPTS)
def test_real_weights_give_the_reference_logits(name, both):
    """Logits within 1e-4 of transformers in float32, and every layer within 1e-5 of its size."""
    model, reference, tokenizer = both
    ids = tokenizer.encode(PROMPTS[name])
    assert len(ids) >= (500 if name == "long" else 1)
    report = compare_models(model, reference, [ids], inside=False, tolerance=1e-5)
    assert report.ok, report.table()
    assert len(report.rows) == 3 + model.config.num_hidden_layers
    assert report["lm_head"].max_abs <= 1e-4


def test_real_weights_agree_inside_every_layer(both):
    """All that is within a layer too, in a batch whose rows differ in length."""
    model, reference, tokenizer = both
    rows = [tokenizer.encode(PROMPTS[name]) for name in ("a fact", "Chinese", "code")]
    report = compare_models(model, reference, rows)
    assert report.ok, report.first
    assert len(report.rows) == 3 + 16 * model.config.num_hidden_layers


def test_the_default_model_is_what_the_book_says():
    assert DEFAULT_MODEL == "smollm2-135m"
