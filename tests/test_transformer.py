"""The whole model: invariants that need no reference, the runner, loading, and the formulas."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from llm_engine.attention import CACHES, Batch, single
from llm_engine.config import read_llama
from llm_engine.transformer import (
    ARCHITECTURES,
    RUNNERS,
    Runner,
    TorchRunner,
    Transformer,
    count_flops,
    count_parameters,
    load_model,
)

RAW = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def build(seed=0, **changes) -> Transformer:
    return Transformer(read_llama({**RAW, **changes})).reset(seed).requires_grad_(False)


def no_cache(model, rows=1):
    weight = model.embed.weight
    return CACHES["none"](model.config, rows, weight.device, weight.dtype)


def run(model, batch, rows):
    return TorchRunner(model).logits(batch, no_cache(model, len(batch.ids)), torch.tensor(rows))


def padded(prompts, side):
    """One batch of prompts of different lengths; padding has id 0 and position -1."""
    width = max(map(len, prompts))
    ids, pos = [], []
    for prompt in prompts:
        gap = width - len(prompt)
        left, right = (gap, 0) if side == "left" else (0, gap)
        ids.append([0] * left + prompt + [0] * right)
        pos.append([-1] * left + list(range(len(prompt))) + [-1] * right)
    return Batch(torch.tensor(ids), torch.tensor(pos))


PROMPTS = [[7, 3, 11, 2, 8], [5, 9], [1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_batched_with_padding_equals_alone(side):
    model = build()
    batch = padded(PROMPTS, side)
    last = [[7] if side == "left" else [len(p) - 1] for p in PROMPTS]
    together = run(model, batch, last)
    for i, prompt in enumerate(PROMPTS):
        torch.testing.assert_close(
            together[i : i + 1], run(model, single(prompt), [[len(prompt) - 1]])
        )
    assert torch.isfinite(together).all()


def test_padding_positions_are_finite_too():
    model = build()
    hidden = model(padded(PROMPTS, "left"), no_cache(model, 3))
    assert torch.isfinite(hidden).all()


def test_each_sequence_gets_its_own_rows():
    """An index for one sequence, used for all (`hidden[:, rows[0]]`), is right in every test with one prompt."""
    model = build()
    batch = Batch(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.arange(4).repeat(2, 1))
    every = run(model, batch, [[0, 1, 2, 3]] * 2)
    picked = run(model, batch, [[3, 0], [1, 2]])
    torch.testing.assert_close(picked[0], every[0, [3, 0]])
    torch.testing.assert_close(picked[1], every[1, [1, 2]])
    assert (picked[1] - every[1, [3, 0]]).abs().max() > 0.1


def test_logits_of_the_last_position_equal_those_of_all():
    model = build()
    ids = list(range(1, 20))
    every = run(model, single(ids), [list(range(19))])
    torch.testing.assert_close(run(model, single(ids), [[18]]), every[:, 18:])


def test_later_tokens_do_not_change_earlier_logits():
    model = build()
    long = run(model, single([4, 8, 15, 16, 23, 42]), [[0, 1, 2]])
    short = run(model, single([4, 8, 15]), [[0, 1, 2]])
    torch.testing.assert_close(long, short)


def test_the_head_sees_the_asked_rows_only():
    model = build()
    seen = []
    model.lm_head.register_forward_hook(lambda m, args, out: seen.append(tuple(args[0].shape)))
    run(model, padded(PROMPTS, "right"), [[4], [1], [7]])
    assert seen == [(3, 1, 48)]


def test_positions_are_counted_without_padding():
    model = build()
    runner = TorchRunner(model)
    runner.logits(padded(PROMPTS, "left"), no_cache(model, 3), torch.tensor([[7], [7], [7]]))
    assert runner.positions_computed == 5 + 2 + 8
    runner.logits(single([1, 2, 3]), no_cache(model), torch.tensor([[2]]))
    assert runner.positions_computed == 18


def test_logits_can_be_written_into():
    """A user's processor may do `logits[token] = -inf`; tensors made in inference mode forbid that."""
    logits = run(build(), single([1, 2, 3]), [[2]])
    logits[0, 0, 5] = -torch.inf
    assert not logits.requires_grad and logits[0, 0, 5] == -torch.inf


@pytest.mark.parametrize(
    ("ids", "pos", "rows", "words"),
    [
        ([[1, 2, 3]], [[0, 1]], [[0]], "batch.pos"),
        ([[1, 2, 3]], [[0, 1, 2]], [[3]], r"0\.\.2"),
        ([[1, 2, 3]], [[0, 1, 2]], [[-1]], "T - 1, not -1"),
        ([[1, 2, 3]], [[0, 1, 2]], [[0], [0]], "B = 1"),
        ([[], []], [[], []], [[0], [0]], "at least one token"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_before_any_work(ids, pos, rows, words):
    model = build()
    runner = TorchRunner(model)
    batch = Batch(torch.tensor(ids, dtype=torch.long), torch.tensor(pos, dtype=torch.long))
    with pytest.raises(ValueError, match=words):
        runner.logits(batch, no_cache(model, len(ids)), torch.tensor(rows))
    assert runner.positions_computed == 0


def test_batch_and_rows_follow_the_model_to_its_device():
    """The meta device stands in for a GPU: mixing it with tensors of the CPU raises, as mixing in a GPU would."""
    model = build().to("meta")
    cache = CACHES["none"](model.config, 3, torch.device("meta"), torch.float32)
    logits = TorchRunner(model).logits(padded(PROMPTS, "left"), cache, torch.tensor([[7]] * 3))
    assert logits.device.type == "meta" and logits.shape == (3, 1, 50)


def test_a_tree_of_the_wrong_size_is_refused():
    model = build()
    batch = single([1, 2, 3])._replace(tree=torch.ones(1, 2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="batch.tree"):
        run(model, batch, [[2]])


def test_torch_runner_is_a_runner_and_known_by_name():
    assert RUNNERS["torch"] is TorchRunner
    assert isinstance(TorchRunner(build()), Runner)


def test_reset_depends_on_the_seed_only():
    one, same, other = build(3), build(3), build(4)
    for (name, a), b, c in zip(
        one.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name
    fresh = Transformer(read_llama(RAW))
    assert all(
        torch.equal(a, b) for a, b in zip(fresh.parameters(), build().parameters(), strict=True)
    )


def test_a_random_model_is_a_demanding_one():
    """Attention far from uniform, logits far from equal, norms not 1: faults in these places show."""
    from llm_engine.trace import Trace

    model = build()
    with Trace(model, keep="layers.0.attn.probs") as trace:
        logits = run(model, single(list(range(16))), [[15]])
    last = trace.tensors["layers.0.attn.probs"][0, :, -1]
    assert last.max() > 3 / 16
    assert logits.std() > 0.3
    assert (model.norm.weight - 1).abs().mean() > 0.03


def test_tied_head_is_one_tensor():
    tied, untied = build(tie_word_embeddings=True), build()
    assert tied.lm_head.weight is tied.embed.weight
    assert untied.lm_head.weight is not untied.embed.weight
    count = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert count == 50 * 48


VARIANTS = [
    {},
    {"tie_word_embeddings": True},
    {"attention_bias": True, "mlp_bias": True},
    {"num_key_value_heads": 6, "head_dim": 12},
    {"num_key_value_heads": 1},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_parameters_by_formula(changes):
    model = build(**changes)
    parts = count_parameters(model.config)
    assert sum(parts.values()) == sum(p.numel() for p in model.parameters())
    assert parts["ffn"] == sum(p.numel() for n, p in model.named_parameters() if ".ffn." in n)


@pytest.mark.parametrize("changes", VARIANTS)
def test_flops_by_formula_equal_those_torch_counts(changes):
    model = build(**changes)
    with FlopCounterMode(display=False) as counter:
        run(model, single([1, 2, 3, 4, 5, 6, 7]), [[5, 6]])
    assert sum(count_flops(model.config, T=7, S=7, rows=2).values()) == counter.get_total_flops()


def save(folder, model, raw):
    """A Hugging Face folder as others write it: their tensor names, no lm_head if tied."""
    names = {
        "embed.": "model.embed_tokens.",
        "norm.": "model.norm.",
        "lm_head.": "lm_head.",
    }
    parts = {
        "attn_norm": "input_layernorm",
        "attn.": "self_attn.",
        "ffn_norm": "post_attention_layernorm",
        "ffn.": "mlp.",
    }
    tensors = {}
    for name, parameter in model.named_parameters():
        for ours, theirs in names.items():
            if name.startswith(ours):
                tensors[name.replace(ours, theirs)] = parameter.detach().clone()
        if name.startswith("layers."):
            for ours, theirs in parts.items():
                name = name.replace("." + ours, "." + theirs)
            tensors["model." + name] = parameter.detach().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **raw}))
    return folder


LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("changes", [*VARIANTS, LLAMA3])
def test_load_model_gives_the_model_that_was_saved(tmp_path, changes):
    raw = {**RAW, **changes}
    model = build(seed=5, **changes)
    loaded = load_model(save(tmp_path, model, raw))
    ids = list(range(1, 40))
    torch.testing.assert_close(
        run(loaded, single(ids), [[38]]), run(model, single(ids), [[38]]), rtol=0, atol=0
    )
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    assert not any(t.is_meta for t in [*loaded.parameters(), *loaded.buffers()])
    if raw.get("tie_word_embeddings"):
        assert loaded.lm_head.weight is loaded.embed.weight


def test_loaded_rope_is_that_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = save(tmp_path, build(seed=6, **LLAMA3), {**RAW, **LLAMA3})
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(range(1, 50))
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits
    torch.testing.assert_close(run(load_model(folder), single(ids), [list(range(49))]), expected)


def test_weights_take_the_asked_dtype_and_rope_stays_exact(tmp_path):
    """Frequencies in bf16 would put positions past 256 on the wrong angle."""
    folder = save(tmp_path, build(), RAW)
    loaded = load_model(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded.layers[0].attn.rope.frequencies.dtype == torch.float32
    assert run(loaded, single([1, 2, 3]), [[2]]).dtype == torch.bfloat16


def test_a_model_that_hides_a_weight_from_the_checkpoint_is_refused(tmp_path):
    class Odd(Transformer):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("forgotten", torch.empty(3), persistent=False)

    folder = save(tmp_path, build(), RAW)
    before = ARCHITECTURES["llama"]
    ARCHITECTURES["llama"] = Odd
    try:
        with pytest.raises(ValueError, match="forgotten"):
            load_model(folder)
    finally:
        ARCHITECTURES["llama"] = before


def test_unknown_architecture_is_refused_by_name(tmp_path):
    folder = save(tmp_path, build(), {**RAW, "model_type": "llamma"})
    with pytest.raises(ValueError, match="llamma"):
        load_model(folder)
