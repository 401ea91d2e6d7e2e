"""Trace: sees what happened, names the module that made the first NaN, and leaves nothing behind."""

import pytest
import torch
from torch import nn

from llm_engine.attention import CACHES, single
from llm_engine.config import read_llama
from llm_engine.trace import Trace, TraceRow
from llm_engine.transformer import TorchRunner, Transformer

RAW = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
IDS = [3, 1, 4, 1, 5, 9]


@pytest.fixture
def model():
    return Transformer(read_llama(RAW)).requires_grad_(False)


def logits(model, ids=IDS, rows=(-1,)):
    dtype = model.embed.weight.dtype
    cache = CACHES["none"](model.config, 1, torch.device("cpu"), dtype)
    index = torch.tensor([[r % len(ids) for r in rows]])
    return TorchRunner(model).logits(single(list(ids)), cache, index)


def hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def poison(parameter, index=0):
    parameter.view(-1)[index] = torch.nan


# What is planted, and the one module that must be named for it.
WEIGHTS = [
    "embed",
    "layers.0.attn_norm",
    "layers.0.attn.q_proj",
    "layers.1.attn.k_proj",
    "layers.1.attn.v_proj",
    "layers.1.attn.o_proj",
    "layers.1.ffn_norm",
    "layers.2.ffn.gate_proj",
    "layers.2.ffn.up_proj",
    "layers.2.ffn.down_proj",
    "norm",
    "lm_head",
]


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_nan_weight_is_named_exactly(model, name):
    weight = model.get_submodule(name).weight
    poison(weight, index=3 * weight.shape[-1] if name == "embed" else 5)
    with Trace(model) as trace:
        logits(model)
    row = trace.first_nonfinite()
    assert row.name == name
    assert row.nonfinite_weights == 1 and row.nonfinite_in == 0
    assert name in trace.explain() and "weights" in trace.explain()


def test_a_nan_in_an_embedding_row_that_is_not_looked_up_is_no_fault(model):
    poison(model.embed.weight, index=7 * 32)
    assert 7 not in IDS
    with Trace(model) as trace:
        model(single(IDS), CACHES["none"](model.config, 1, torch.device("cpu"), torch.float32))
    assert trace.first_nonfinite() is None
    assert "finite" in trace.explain()


def test_overflowing_attention_scores_are_named_although_only_a_probe_sees_them(model):
    """q @ k happens between modules. `scores` is the probe that names its result."""
    model.half()
    attn = model.layers[1].attn
    attn.scale = 1.0
    attn.q_proj.weight *= 200
    attn.k_proj.weight *= 200
    with Trace(model) as trace:
        logits(model)
    row = trace.first_nonfinite()
    assert row.name == "layers.1.attn.scores"
    finite = trace.select("layers.1.attn.q_rotated", "layers.1.attn.k_rotated")
    assert [r.nonfinite for r in finite] == [0, 0]


def test_an_overflowing_gate_is_named(model):
    model.half()
    model.layers[2].ffn.gate_proj.weight *= 300
    model.layers[2].ffn.up_proj.weight *= 300
    with Trace(model) as trace:
        logits(model)
    assert trace.first_nonfinite().name == "layers.2.ffn.gated"


def test_an_overflowing_residual_is_laid_to_the_block(model):
    """The sum of stream and attention is no module's output: the block around it is named, not the norm after it."""
    model.half()
    model.embed.weight.fill_(60000.0)
    poisoned = model.layers[0].attn.o_proj.weight
    poisoned.zero_()
    model.layers[0].attn.o_proj.bias = nn.Parameter(torch.full((32,), 60000.0).half(), False)
    with Trace(model) as trace:
        logits(model)
    assert trace.first_nonfinite().name == "layers.0"
    assert trace.first_nonfinite().kind == "Block"


def test_a_masked_score_is_no_fault(model):
    """-inf stands in the masked scores of every causal model; the trace must not cry at it."""
    with Trace(model) as trace:
        logits(model)
    assert trace.first_nonfinite() is None
    assert not any(row.nonfinite for row in trace.rows)


def test_a_rope_gone_wrong_is_named(model):
    model.layers[1].attn.rope.frequencies.fill_(torch.inf)
    with Trace(model) as trace:
        logits(model)
    assert trace.first_nonfinite().name.startswith("layers.1.attn.rope")


def test_a_nan_that_came_in_with_the_input_blames_the_input():
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with Trace(layer) as trace, torch.no_grad():
        layer(torch.full((1, 4), torch.nan))
    assert trace.first_nonfinite().name == ""
    assert trace.first_nonfinite().nonfinite_in == 4
    assert "input" in trace.explain()


def test_the_step_of_the_first_nan_is_told(model):
    with Trace(model) as trace:
        logits(model)
        logits(model)
        poison(model.layers[0].ffn.up_proj.weight)
        logits(model)
    assert (trace.first_nonfinite().step, trace.first_nonfinite().name) == (
        2,
        "layers.0.ffn.up_proj",
    )


def test_a_nan_is_named_even_if_the_pass_then_stops_with_an_error(model):
    poison(model.layers[0].ffn.up_proj.weight)
    with Trace(model) as trace, pytest.raises(RuntimeError, match="gone"):
        model.layers[2].attn.forward = lambda *a: (_ for _ in ()).throw(RuntimeError("gone"))
        logits(model)
    assert trace.first_nonfinite().name == "layers.0.ffn.up_proj"
    assert [row.name for row in trace.rows if row.note == "raised"] == [
        "layers.2.attn",
        "layers.2",
        "",
    ]


def test_a_value_made_in_a_module_that_then_raises_is_laid_to_it():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            self.inner(x / 0)
            raise RuntimeError("too late")

    model = nn.Sequential(nn.Linear(2, 2), Odd())
    with Trace(model) as trace, pytest.raises(RuntimeError, match="too late"), torch.no_grad():
        model(torch.ones(1, 2))
    assert trace.first_nonfinite().name == "1"


def test_outputs_are_bit_for_bit_those_without_a_trace(model):
    before = logits(model, rows=range(6))
    with Trace(model, keep="*"):
        during = logits(model, rows=range(6))
    assert torch.equal(before, during) and torch.equal(before, logits(model, rows=range(6)))


def test_nothing_is_left_behind(model):
    assert hooks(model) == 0
    with Trace(model):
        assert hooks(model) > 0
    assert hooks(model) == 0
    with pytest.raises(KeyError), Trace(model):
        raise KeyError("anything")
    assert hooks(model) == 0


def test_nested_traces_see_the_same_and_end_one_by_one(model):
    with Trace(model) as outer:
        with Trace(model) as inner:
            logits(model)
        logits(model)
    assert [r.name for r in outer.rows if r.step == 0] == [r.name for r in inner.rows]
    assert {r.step for r in outer.rows} == {0, 1} and {r.step for r in inner.rows} == {0}
    assert hooks(model) == 0


def test_one_trace_cannot_be_entered_twice_at_once(model):
    with Trace(model) as trace:
        with pytest.raises(RuntimeError, match="already"), trace:
            pass
        logits(model)
    assert trace.rows and hooks(model) == 0
    with trace:
        logits(model)
    assert {row.step for row in trace.rows} == {0}, "a trace entered again starts afresh"


def test_parts_stand_before_the_whole_in_execution_order(model):
    with Trace(model) as trace:
        logits(model)
    names = [row.name for row in trace.rows]
    order = [
        "embed",
        "layers.0.attn_norm",
        "layers.0.attn.q_proj",
        "layers.0.attn.q_rotated",
        "layers.0.attn.scores",
        "layers.0.attn.probs",
        "layers.0.attn.heads",
        "layers.0.attn.o_proj",
        "layers.0.attn",
        "layers.0.ffn_norm",
        "layers.0.ffn.gated",
        "layers.0.ffn",
        "layers.0",
        "layers.1.attn_norm",
        "layers.2",
        "norm",
        "",
        "lm_head",
    ]
    assert [name for name in names if name in order] == order
    assert len(names) == len(set(names))


def test_shapes_come_with_checked_letters(model):
    with Trace(model) as trace:
        logits(model, rows=(2, 5))
    letters = {row.name: (row.letters, row.shape) for row in trace.rows}
    assert letters["embed"] == ("B T H", (1, 6, 32))
    assert letters["layers.1.attn.k_proj"] == ("B T K*D", (1, 6, 16))
    assert letters["layers.1.attn.scores"] == ("B N T S", (1, 4, 6, 6))
    assert letters["layers.1.ffn.gated"] == ("B T F", (1, 6, 56))
    assert letters["lm_head"] == ("B R V", (1, 2, 40))
    assert all(text for text, _ in letters.values())
    table = trace.table("lm_head")
    assert table.splitlines()[0].split()[:4] == ["module", "kind", "shape", "letters"]
    assert len(table.splitlines()) == 2 and "[1, 2, 40]" in table and "B R V" in table
    assert trace._repr_html_().count("<tr>") == len(trace.rows) + 1


def test_letters_are_left_out_where_a_size_contradicts_them(model):
    model.layers[0].ffn.gated = nn.Linear(56, 57)
    model.layers[0].ffn.down_proj = nn.Linear(57, 32)
    with Trace(model) as trace:
        logits(model)
    letters = {row.name: row.letters for row in trace.rows}
    assert letters["layers.0.ffn.gated"] == ""
    assert letters["layers.1.ffn.gated"] == "B T F"


def test_kept_tensors_are_copies_of_each_call(model):
    with Trace(model, keep=("layers.*.attn.probs", "embed")) as trace:
        logits(model, [3, 1, 4])
        logits(model, IDS)
    assert sorted(trace.tensors) == ["embed", *(f"layers.{i}.attn.probs" for i in range(3))]
    assert [t.shape[-1] for t in trace.steps["layers.1.attn.probs"]] == [3, 6]
    assert trace.tensors["layers.1.attn.probs"].shape == (1, 4, 6, 6)
    torch.testing.assert_close(trace.tensors["layers.0.attn.probs"].sum(-1), torch.ones(1, 4, 6))

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Identity()

        def forward(self, x):
            return self.first(x * 1).zero_()

    with Trace(InPlace(), keep="first") as trace:
        trace.model(torch.ones(3))
    assert trace.tensors["first"].tolist() == [1, 1, 1]


def test_a_pattern_that_matches_nothing_is_refused(model):
    with (
        pytest.raises(ValueError, match="attention.probs"),
        Trace(model, keep="layers.*.attention.probs"),
    ):
        pass
    assert hooks(model) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_do_not_overflow_in_16_bits(dtype):
    with Trace(nn.Identity()) as trace:
        trace.model(torch.full((4096,), 60000.0, dtype=dtype))
    row = trace.rows[0]
    value = torch.tensor(60000.0, dtype=dtype).item()
    assert (row.min, row.max, row.mean, row.nonfinite) == (value, value, value, 0)
    assert row.dtype == dtype


def test_statistics_are_those_of_the_finite_values():
    x = torch.tensor([1.0, torch.nan, -3.0, torch.inf, 5.0, -torch.inf])
    with Trace(nn.Identity()) as trace:
        trace.model(x)
        trace.model(torch.full((2,), torch.nan))
        trace.model(torch.empty(0, 3))
        trace.model(torch.arange(4))
        trace.model(torch.ones(2, device="meta"))
    rows = trace.rows
    assert (rows[0].min, rows[0].max, rows[0].mean, rows[0].nonfinite) == (-3.0, 5.0, 1.0, 3)
    assert rows[1].nonfinite == 2 and rows[1].mean != rows[1].mean
    assert rows[2].shape == (0, 3) and rows[2].nonfinite == 0
    assert (rows[3].min, rows[3].max, rows[3].mean) == (0, 3, 1.5)
    assert rows[4].shape == (2,)
    assert [row.step for row in rows] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_of_any_float_type_can_be_watched(model, dtype):
    with Trace(model.to(dtype)) as trace:
        logits(model)
    assert {r.dtype for r in trace.rows} == {dtype}
    assert all(r.min <= r.mean <= r.max for r in trace.rows)


def test_several_outputs_and_dictionaries():
    class Two(nn.Module):
        def forward(self, x):
            return {"a": x, "b": (x, x + torch.inf), "c": None, "d": "text"}

    with Trace(Two()) as trace:
        trace.model(torch.zeros(2))
    assert [(r.name, r.nonfinite) for r in trace.rows] == [("[a]", 0), ("[b][0]", 0), ("[b][1]", 2)]
    assert isinstance(trace.first_nonfinite(), TraceRow)
    assert trace.first_nonfinite().name == "[b][1]"


def test_a_transformers_model_can_be_watched_too():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**RAW)).eval()
    with Trace(theirs) as trace, torch.no_grad():
        out = theirs(torch.tensor([IDS]))
    names = {row.name for row in trace.rows}
    assert {"model.embed_tokens", "model.layers.2.self_attn.q_proj", "lm_head", "[logits]"} <= names
    last = next(row for row in trace.rows if row.name == "[logits]")
    assert last.max == pytest.approx(out.logits.max().item())
