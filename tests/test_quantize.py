"""Quantized weights: what a scheme stores, how far it may be off, the edges of float16, layers and whole models, W8A8."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from llm_engine import quantize as module
from llm_engine.attention import NoCache, single
from llm_engine.config import ModelConfig
from llm_engine.engine import Engine
from llm_engine.quantize import (
    DynamicLinear,
    QuantizationError,
    Quantized,
    QuantizedEmbedding,
    QuantizedLinear,
    Scheme,
    check_scales,
    dequantize,
    float16_scale,
    int_product,
    pack_nibbles,
    quantize_model,
    quantize_rows,
    round_to_nearest,
    unpack_nibbles,
)
from llm_engine.sampler import SamplingParams
from llm_engine.tokenizer import Tokenizer
from llm_engine.transformer import Transformer, load_model

torch.set_grad_enabled(False)

NAMES = ["int8", "int8-asym", "int8-g32", "int8-g7-asym", "int4", "int4-asym", "int4-g32", "int4-g64-asym"]  # fmt: skip
SCHEMES = [Scheme.parse(name) for name in NAMES]
INT8 = Scheme(8)


def each_scheme(function):
    return pytest.mark.parametrize("scheme", SCHEMES, ids=NAMES)(function)


def codes_of(q: Quantized, scheme: Scheme, columns: int):
    """q of every stored column, padding included, computed apart from `dequantize`."""
    if scheme.bits == 8:
        return q.packed.int()
    group, out = scheme.group(columns), []
    for row in q.packed.tolist():
        line = []
        for first in range(0, len(row), group // 2):
            part = row[first : first + group // 2]
            line += [byte % 16 for byte in part] + [byte // 16 for byte in part]
        out.append(line)
    return torch.tensor(out, dtype=torch.int32) - (8 if scheme.symmetric else 0)


def steps(q: Quantized, scheme: Scheme, columns: int):
    """The size of a step at every column."""
    return q.scale.float().abs().repeat_interleave(scheme.group(columns), 1)[:, :columns]


@st.composite
def matrices(draw, smallest=1e-30, largest=1e4):
    """Random matrices with rows of very different sizes, some with an outlier, some constant, some zero."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    matrix = torch.randn(rows, columns, generator=generator)
    for row in matrix:
        kind = draw(st.sampled_from(["plain", "outlier", "zero", "constant", "positive"]))
        if kind == "outlier":
            row[draw(st.integers(0, columns - 1))] *= 1000
        elif kind == "zero":
            row.zero_()
        elif kind == "constant":
            row.fill_(row[0].item())
        elif kind == "positive":
            row.abs_()
        exponents = torch.tensor([smallest, largest]).log10()
        row *= 10 ** draw(st.floats(*exponents.tolist()))
    return matrix


# ---- schemes


@given(
    st.sampled_from([4, 8]),
    st.one_of(st.none(), st.integers(1, 500).map(lambda n: 2 * n)),
    st.booleans(),
)
def test_a_scheme_and_its_name_say_the_same(bits, group, symmetric):
    scheme = Scheme(bits, group, symmetric)
    assert Scheme.parse(scheme.name) == scheme


def test_names_are_those_of_the_files():
    assert Scheme().name == "int8"
    assert Scheme(8, 32).name == "int8-g32"
    assert Scheme(4, 64, symmetric=False).name == "int4-g64-asym"


@pytest.mark.parametrize(
    "name", ["", "INT8", "int", "fp8", "int8-", "int8-g", "int8-g-3", "int4-asym-g64", "int8 ", "int8-g1e3"]
)  # fmt: skip
def test_a_name_that_is_no_scheme_is_refused(name):
    with pytest.raises(QuantizationError, match="written int8, int8-g32"):
        Scheme.parse(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "4 or 8, not 3"),
        ((16,), "4 or 8, not 16"),
        ((8, 0), "at least 1 column, not 0"),
        ((8, -32), "None takes the whole row"),
        ((4, 33), "take an even group, 34"),
    ],
)
def test_a_scheme_that_does_not_exist_is_refused_when_it_is_made(arguments, message):
    with pytest.raises(QuantizationError, match=message):
        Scheme(*arguments)
    if len(arguments) == 2 and arguments[1] > 0:
        with pytest.raises(QuantizationError, match=message):
            Scheme.parse(f"int{arguments[0]}-g{arguments[1]}")


def test_groups_are_counted_by_ceiling():
    """Regression, vllm-ascend pull request 9159: 4304 columns in groups of 32 are 134.5 groups, so 135 and not 134."""
    assert Scheme(4, 32).groups(4304) == 135
    assert Scheme(4, 32).width(4304) == 4320
    weight = torch.randn(2, 4304)
    q = round_to_nearest(weight, Scheme(4, 32))
    assert q.scale.shape == (2, 135) and q.packed.shape == (2, 2160)
    assert (dequantize(q, Scheme(4, 32), 4304)[:, -16:] != 0).any(), "the last half group is there"


def test_bits_per_weight_count_scales_offsets_and_padding():
    assert Scheme(8).bits_per_weight(576, 576) == 8 + 16 / 576
    assert Scheme(8, 32).bits_per_weight(10, 64) == 8.5
    assert Scheme(4, 64).bits_per_weight(10, 64) == 4.25
    assert Scheme(4, 32, symmetric=False).bits_per_weight(10, 64) == 5.0
    assert Scheme(4, 64).bits_per_weight(10, 65) == pytest.approx(2 * 64 * 4.25 / 65)
    assert Scheme(4).bytes(3, 7) == 3 * (4 + 2), "a row of 7 is padded to 8 nibbles"


@each_scheme
@pytest.mark.parametrize("columns", [1, 2, 7, 32, 33, 64, 129])
def test_as_many_bytes_are_stored_as_the_scheme_says(scheme, columns):
    q = round_to_nearest(torch.randn(3, columns), scheme)
    assert sum(part.nbytes for part in q if part is not None) == scheme.bytes(3, columns)
    assert q.packed.shape[1] * 8 == scheme.width(columns) * scheme.bits
    assert q.scale.shape == (3, scheme.groups(columns))
    assert q.packed.dtype == (torch.int8 if scheme.bits == 8 else torch.uint8)
    assert q.scale.dtype == torch.float16
    assert (q.offset is None) == scheme.symmetric
    assert q.packed.is_contiguous()


# ---- rounding


@given(matrices(), st.sampled_from(SCHEMES))
@settings(max_examples=100)
def test_no_weight_is_off_by_more_than_half_a_step(weight, scheme):
    q = round_to_nearest(weight, scheme)
    columns = weight.shape[1]
    decoded, step = dequantize(q, scheme, columns), steps(q, scheme, columns)
    error, allowed = (decoded - weight).abs(), step / 2
    if scheme.bits == 4 and scheme.symmetric:
        # -8 … 7: the largest is -8 times the scale; what is as large with the other sign is cut to 7, a step less.
        scale = q.scale.float().repeat_interleave(scheme.group(columns), 1)[:, :columns]
        over = weight / torch.where(scale == 0, 1, scale) > 7.5
        allowed = torch.where(over, step * (1 + 8 * 2**-11), allowed)
    assert (error <= allowed + weight.abs() * 1e-6 + step * 1e-4).all()


@given(matrices(smallest=1.0), st.sampled_from(SCHEMES))
@settings(max_examples=40)
def test_what_was_quantized_stays_as_it_is(weight, scheme):
    """Decoded and quantized again: the same numbers. (Asymmetric: where the scale is not lost beside the offset.)"""
    if not scheme.symmetric:
        weight = torch.cat([weight - weight.mean(1, keepdim=True)] * 2, 1)
        weight[:, ::2] *= -1
    columns = weight.shape[1]
    once = dequantize(round_to_nearest(weight, scheme), scheme, columns)
    twice = dequantize(round_to_nearest(once, scheme), scheme, columns)
    if scheme.symmetric:
        assert torch.equal(once, twice)
    else:
        assert_close(once, twice, rtol=0, atol=1e-6 * float(weight.abs().max() + 1e-30))


@given(matrices(smallest=1e-2, largest=10.0), st.sampled_from(SCHEMES), st.integers(-3, 5))
def test_twice_the_weights_are_twice_the_result(weight, scheme, power):
    columns, factor = weight.shape[1], 2.0**power
    plain = dequantize(round_to_nearest(weight, scheme), scheme, columns)
    scaled = dequantize(round_to_nearest(weight * factor, scheme), scheme, columns)
    if scheme.symmetric:
        # float16 has less precision below 6e-5; a scale there is another number
        normal = steps(round_to_nearest(weight * min(factor, 1), scheme), scheme, columns) > 1e-4
        assert torch.equal(scaled[normal], (plain * factor)[normal])
    else:
        assert (scaled - plain * factor).abs().max() <= weight.abs().max() * factor * 0.15


@given(matrices(), st.sampled_from(["int8", "int8-g32"]))
def test_symmetric_means_symmetric(weight, name):
    scheme = Scheme.parse(name)
    q, negated = round_to_nearest(weight, scheme), round_to_nearest(-weight, scheme)
    assert torch.equal(q.packed, -negated.packed) and torch.equal(q.scale, negated.scale)
    assert q.packed.min() >= -127


@given(matrices(), st.sampled_from(SCHEMES))
def test_codes_lie_on_the_grid_and_padding_is_zero(weight, scheme):
    columns = weight.shape[1]
    q = round_to_nearest(weight, scheme)
    codes = codes_of(q, scheme, columns)
    low, high = scheme.levels
    assert codes.min() >= low and codes.max() <= high
    assert (codes[:, columns:] == 0).all()
    # and dequantize reads exactly these
    decoded = codes.double() * q.scale.double().repeat_interleave(scheme.group(columns), 1)
    if q.offset is not None:
        decoded += q.offset.double().repeat_interleave(scheme.group(columns), 1)
    assert_close(dequantize(q, scheme, columns).double(), decoded[:, :columns], rtol=1e-6, atol=1e-38)  # fmt: skip


def test_the_numbers_by_hand():
    weight = torch.tensor([[1.0, -0.5, 0.26, 127 / 64]])
    q = round_to_nearest(weight, INT8)
    assert q.scale.item() == 1 / 64
    assert q.packed.tolist() == [[64, -32, 17, 127]]
    q = round_to_nearest(torch.tensor([[4.0, 1.1, -3.9, 0.26]]), Scheme(4))
    assert q.scale.item() == -0.5, "the largest number becomes -8, so here the scale is negative"
    assert codes_of(q, Scheme(4), 4).tolist() == [[-8, -2, 7, -1]], "-3.9 would be 7.8: cut to 7"
    q = round_to_nearest(torch.tensor([[10.0, 13.0, 25.0, 11.4]]), Scheme(4, symmetric=False))
    assert (q.scale.item(), q.offset.item()) == (1.0, 10.0), "the range begins at 10, not at 0"
    assert codes_of(q, Scheme(4, symmetric=False), 4).tolist() == [[0, 3, 15, 1]]


def test_halves_go_to_the_even_code():
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert round_to_nearest(weight, INT8).packed.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_padding_does_not_change_the_last_group():
    """All numbers lie far from 0; were the padding counted with zeros, an asymmetric range would begin there."""
    weight = torch.linspace(100, 101, 40)[None]
    scheme = Scheme(8, 32, symmetric=False)
    q = round_to_nearest(weight, scheme)
    assert q.scale.max() < 0.01
    assert (dequantize(q, scheme, 40) - weight).abs().max() < 0.005


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("columns", [1, 10, 33, 63])
def test_a_group_larger_than_the_row_is_the_row(bits, columns):
    """Nothing is filled up to a group that no row reaches: 64 columns or many millions, a row is what is stored."""
    weight = torch.randn(2, columns)
    whole = round_to_nearest(weight, Scheme(bits))
    for group in (64, 99_999_998):
        scheme = Scheme(bits, group)
        q = round_to_nearest(weight, scheme)
        assert q.offset is None and torch.equal(q.packed, whole.packed)
        assert torch.equal(q.scale, whole.scale)
        assert torch.equal(dequantize(q, scheme, columns), dequantize(whole, Scheme(bits), columns))
        assert scheme.bytes(2, columns) == Scheme(bits).bytes(2, columns)
        layer = QuantizedLinear(columns, 2, scheme)
        assert layer.packed.shape == q.packed.shape and layer.scale.shape == (2, 1)
    assert Scheme(bits, 64).groups(65) == 2, "one column more begins a second group"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@each_scheme
def test_weights_of_any_float_type(scheme, dtype):
    weight = torch.randn(3, 40, dtype=dtype)
    a, b = round_to_nearest(weight, scheme), round_to_nearest(weight.float(), scheme)
    assert all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@each_scheme
def test_the_weight_is_left_alone(scheme):
    weight = torch.randn(3, 64)
    before = weight.clone()
    round_to_nearest(weight, scheme)
    assert torch.equal(weight, before)


# ---- the edges


@each_scheme
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, -1e-30, 1e-45, 1e-8])
def test_rows_of_nothing_give_no_nan(scheme, value):
    """Regression, llama.cpp pull request 7313: a block of zeros or of 1e-30 gave a scale that is NaN or infinite."""
    weight = torch.randn(3, 64)
    weight[1] = value
    q = round_to_nearest(weight, scheme)
    decoded = dequantize(q, scheme, 64)
    assert q.scale.isfinite().all() and decoded.isfinite().all()
    assert (decoded[1] - value).abs().max() <= 3.1e-8, "half of the smallest step of float16"
    if value == 0:
        assert (decoded[1] == 0).all() and (q.scale[1] == 0).all()
    layer = QuantizedLinear.from_quantized(q, scheme, 64)
    assert layer(torch.randn(5, 64)).isfinite().all()


@each_scheme
def test_small_rows_lose_no_more_than_half_a_step_where_float16_is_coarse(scheme):
    """Scales below 6e-5 are subnormal; the nearest one may be half of what is needed, and would cut the row off."""
    for size in (1e-3, 1e-4, 1e-5, 3e-6, 1e-6, 1e-7):
        weight = torch.linspace(-1, 0.87, 64)[None] * size
        q = round_to_nearest(weight, scheme)
        error = (dequantize(q, scheme, 64) - weight).abs()
        assert (error <= steps(q, scheme, 64) * 0.501).all(), size


@given(st.floats(0, 60000, width=32), st.floats(0, 60000, width=32))
def test_a_scale_is_the_nearest_float16_or_large_enough(scale, needed):
    found = float16_scale(torch.tensor([[-scale]]), torch.tensor([[needed]])).item()
    nearest = torch.tensor(-scale).half().item()
    if abs(nearest) >= needed:
        assert found == nearest
    else:
        assert abs(found) >= needed and (found < 0 or found == 0)
        below = torch.tensor(abs(found)).half().view(torch.int16) - 1
        assert below.view(torch.float16).item() < needed, "and no larger than it must be"


@pytest.mark.parametrize(
    ("scheme", "value", "what"),
    [
        (Scheme(8), 1e7, "scale"),
        (Scheme(4), 6e5, "scale"),
        (Scheme(8, symmetric=False), 3e38, "offset"),
        (Scheme(4, 32), -3e38, "scale"),
    ],
)
def test_a_scale_too_large_for_float16_is_named(scheme, value, what):
    weight = torch.randn(3, 64)
    weight[1, 40] = value
    group = scheme.groups(41) - 1
    with pytest.raises(QuantizationError, match=rf"my\.name: the {what} of row 1, group {group} "):
        round_to_nearest(weight, scheme, "my.name")


def test_an_offset_too_large_for_float16_is_named():
    scheme = Scheme(4, symmetric=False)
    with pytest.raises(QuantizationError, match="the offset of row 0, group 0 is too large"):
        round_to_nearest(torch.tensor([[1e5, 1e5 + 100]]), scheme, "x")
    check_scales(torch.zeros(1, 1).half(), torch.zeros(1, 1).half())


@each_scheme
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_with_their_place(scheme, value):
    weight = torch.randn(3, 64)
    weight[2, 5] = value
    with pytest.raises(QuantizationError, match=rf"blk holds {value} in row 2, column 5"):
        round_to_nearest(weight, scheme, "blk")


def test_the_largest_float32_numbers_are_finite_and_still_too_large():
    weight = torch.tensor([[3e38, -3e38]])
    with pytest.raises(QuantizationError, match="too large for float16"):
        round_to_nearest(weight, Scheme(8), "x")


def test_what_has_no_numbers_is_refused():
    with pytest.raises(QuantizationError, match="meta device"):
        round_to_nearest(torch.empty(3, 4, device="meta"), INT8)
    with pytest.raises(QuantizationError, match=r"not \[0, 4\]"):
        round_to_nearest(torch.empty(0, 4), INT8)
    with pytest.raises(QuantizationError, match=r"not \[3, 4\] of torch.int64"):
        module.check_weight(torch.ones(3, 4, dtype=torch.long))


# ---- nibbles


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 20), st.integers(0, 2**31))
def test_packing_and_back(rows, groups, half, seed):
    width = groups * 2 * half
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, width), generator=generator, dtype=torch.uint8)
    packed = pack_nibbles(codes, 2 * half)
    assert packed.shape == (rows, width // 2)
    assert torch.equal(unpack_nibbles(packed, 2 * half), codes)


def test_where_a_nibble_lies():
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=torch.uint8)
    assert pack_nibbles(codes, 8).tolist() == [[0x51, 0x62, 0x73, 0x84]]
    assert pack_nibbles(codes, 4).tolist() == [[0x31, 0x42, 0x75, 0x86]]


# ---- rows asked for


@each_scheme
def test_some_rows_are_those_of_the_whole(scheme):
    q = round_to_nearest(torch.randn(6, 40), scheme)
    whole = dequantize(q, scheme, 40)
    for rows in (slice(1, 4), slice(None), slice(0, 0), [5, 0, 0], torch.tensor([3, 3, 1])):
        assert torch.equal(dequantize(q, scheme, 40, rows), whole[rows])


# ---- layers


@each_scheme
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(40,), (1, 40), (2, 3, 40), (0, 40), (2, 1, 3, 40)])
def test_a_layer_computes_what_its_decoded_weight_says(scheme, bias, shape):
    linear = nn.Linear(40, 9, bias=bias)
    layer = QuantizedLinear.from_linear(linear, scheme)
    x = torch.randn(shape)
    wanted = F.linear(
        x, dequantize(round_to_nearest(linear.weight, scheme), scheme, 40), linear.bias
    )
    assert_close(layer(x), wanted)
    assert torch.equal(layer.weight, layer.dequantized())
    assert (layer(x) - linear(x)).abs().max() < (1.5 if scheme.bits == 4 else 0.1) if x.numel() else True  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_answer_has_the_type_of_the_question(dtype):
    linear = nn.Linear(40, 9)
    layer = QuantizedLinear.from_linear(linear, INT8)
    x = torch.randn(4, 40)
    out = layer(x.to(dtype))
    assert out.dtype == dtype
    assert_close(out.float(), layer(x), rtol=0.02, atol=0.02)


def test_a_large_layer_is_decoded_slice_by_slice(monkeypatch):
    layer = QuantizedLinear.from_linear(nn.Linear(40, 101), Scheme(4, 8))
    x = torch.randn(2, 3, 40)
    whole, decoded = layer(x), []
    for slices in (1, 40, 41, 400, 40 * 100):
        monkeypatch.setattr(module, "SLICE", slices)
        assert_close(layer(x), whole)
    real = module.dequantize
    monkeypatch.setattr(module, "SLICE", 400)
    monkeypatch.setattr(module, "dequantize", lambda *a: decoded.append(real(*a)) or decoded[-1])
    layer(x)
    assert max(part.numel() for part in decoded) == 400 and sum(map(len, decoded)) == 101


def test_a_change_of_type_leaves_the_stored_weight_alone():
    layer = QuantizedLinear.from_linear(nn.Linear(40, 9, dtype=torch.float64), Scheme(8, 8, False))
    before = [part.clone() for part in layer.quantized]
    for change in (
        lambda m: m.to(torch.bfloat16),
        lambda m: m.double(),
        lambda m: m.half(),
        lambda m: m.float(),
        lambda m: nn.Sequential(m).to(torch.bfloat16),
    ):
        change(layer)
        for part, kept in zip(layer.quantized, before, strict=True):
            assert part.dtype == kept.dtype and torch.equal(part, kept)
    assert layer.bias.dtype == torch.bfloat16, "the bias is an ordinary number and follows"
    layer.to("meta", torch.float32)
    assert all(part.is_meta for part in layer.parameters()), "but devices are followed by all"
    assert layer.scale.dtype == torch.float16 and layer.bias.dtype == torch.float32


@each_scheme
def test_an_empty_layer_can_be_filled_from_a_state_dict(scheme):
    made = QuantizedLinear.from_linear(nn.Linear(40, 9), scheme)
    empty = QuantizedLinear(40, 9, scheme, bias=True)
    assert (empty(torch.randn(2, 40)) == 0).all()
    empty.load_state_dict(made.state_dict())
    x = torch.randn(2, 40)
    assert torch.equal(empty(x), made(x))
    assert set(made.state_dict()) == {"packed", "scale", "bias"} | ({"offset"} if not scheme.symmetric else set())  # fmt: skip
    assert not any(p.requires_grad for p in empty.parameters())
    assert scheme.name in repr(made)


def test_tensors_that_do_not_fit_the_scheme_are_refused():
    q = round_to_nearest(torch.randn(3, 64), Scheme(8, 32))
    with pytest.raises(QuantizationError, match=r"scale does not fit int8 .* \[3, 1\], got .* \[3, 2\]"):  # fmt: skip
        QuantizedLinear.from_quantized(q, INT8, 64)
    with pytest.raises(QuantizationError, match=r"packed does not fit int4-g32 .* torch.uint8 \[3, 32\]"):  # fmt: skip
        QuantizedLinear.from_quantized(q, Scheme(4, 32), 64)
    with pytest.raises(QuantizationError, match="offset does not fit int8-g32-asym .* got none"):
        QuantizedLinear.from_quantized(q, Scheme(8, 32, False), 64)
    with pytest.raises(QuantizationError, match="packed does not fit int8-g32 with 65 columns"):
        QuantizedLinear.from_quantized(q, Scheme(8, 32), 65)
    assert QuantizedLinear.from_quantized(q, Scheme(8, 32), 64).packed.data_ptr() == q.packed.data_ptr()  # fmt: skip
    for bias, what in (
        (torch.zeros(4), r"torch.float32 \[4\] on cpu"),
        (torch.zeros(3, 1), r"torch.float32 \[3, 1\] on cpu"),
        (torch.zeros(3, device="meta"), r"torch.float32 \[3\] on meta"),
    ):
        with pytest.raises(QuantizationError, match=rf"bias does not fit: expected \[3\] on cpu, got {what}"):  # fmt: skip
            QuantizedLinear.from_quantized(q, Scheme(8, 32), 64, bias)
    assert QuantizedLinear.from_quantized(q, Scheme(8, 32), 64, torch.ones(3)).bias.shape == (3,)


# ---- models


def tiny(tied=True, **changes) -> Transformer:
    sizes = {
        "model_type": "llama",
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    return Transformer(ModelConfig(**{**sizes, **changes})).eval().requires_grad_(False)


def logits_of(model, ids):
    dtype = model.norm.weight.dtype
    return model.lm_head(model(single(ids), NoCache(model.config, 1, "cpu", dtype)))[0]


TEXT = list(range(3, 40))


def kinds(model):
    return {n: type(m) for n, m in model.named_modules() if n}


@pytest.mark.parametrize("tied", [True, False])
@each_scheme
def test_a_quantized_model_computes_what_its_decoded_weights_say(scheme, tied):
    model = tiny(tied, attention_bias=True, mlp_bias=True)
    plain = copy.deepcopy(model)
    for name, part in plain.named_modules():
        if isinstance(part, nn.Linear):
            decoded = dequantize(round_to_nearest(part.weight, scheme), scheme, part.in_features)
            if name == "lm_head" and tied:
                plain.embed.weight.copy_(decoded)
            else:
                part.weight.copy_(decoded)
    before = list(kinds(model))
    assert quantize_model(model, scheme, skip=()) is model
    assert list(kinds(model)) == before, "every module keeps its name and place"
    assert_close(logits_of(model, TEXT), logits_of(plain, TEXT), rtol=1e-4, atol=1e-4)


def test_the_head_and_all_norms_stay_as_they_are():
    model = tiny()
    before = {n: p.clone() for n, p in model.named_parameters() if "norm" in n or "embed" in n}
    quantize_model(model, INT8)
    found = kinds(model)
    assert found["lm_head"] is nn.Linear
    assert model.lm_head.weight is model.embed.weight
    assert sum(kind is QuantizedLinear for kind in found.values()) == 14
    assert all(torch.equal(p, model.get_parameter(n)) for n, p in before.items())
    assert not any(part.training for part in model.modules())


def test_names_left_alone_and_names_with_a_scheme_of_their_own():
    model = tiny()
    calls = []

    def method(weight, scheme, name):
        calls.append((name, scheme.name))
        return round_to_nearest(weight, scheme, name)

    mixed = {"layers.1.ffn.up_proj": None, "*.up_proj": Scheme(8), "lm_head": Scheme(8, 8)}
    quantize_model(model, Scheme(4, 16), skip=("*.attn.*", "lm_head"), mixed=mixed, method=method)
    assert calls == [
        ("layers.0.ffn.gate_proj", "int4-g16"),
        ("layers.0.ffn.up_proj", "int8"),
        ("layers.0.ffn.down_proj", "int4-g16"),
        ("layers.1.ffn.gate_proj", "int4-g16"),
        ("layers.1.ffn.down_proj", "int4-g16"),
        ("lm_head", "int8-g8"),
    ]
    assert kinds(model)["layers.1.ffn.up_proj"] is nn.Linear, (
        "the first pattern that matches counts"
    )
    assert kinds(model)["layers.0.attn.q_proj"] is nn.Linear
    assert model.layers[0].ffn.up_proj.scheme == Scheme(8)


def test_one_name_may_be_given_as_it_is():
    model = quantize_model(tiny(), INT8, skip="layers.*")
    assert [n for n, k in kinds(model).items() if k is QuantizedLinear] == ["lm_head"]


@pytest.mark.parametrize(
    "options",
    [{"skip": ("layers.0.attn.q_proj", "layer.*")}, {"mixed": {"layer.*": None}}, {"skip": ("norm",)}],
)  # fmt: skip
def test_a_pattern_that_matches_nothing_is_refused(options):
    model = tiny()
    with pytest.raises(QuantizationError, match=r"matches no linear module. There are layers.0.attn.q_proj, .*15 in all"):  # fmt: skip
        quantize_model(model, INT8, **options)
    assert QuantizedLinear not in kinds(model).values()


def test_a_model_without_a_head_needs_no_other_arguments():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    quantize_model(model, INT8)
    assert [type(m) for m in model] == [QuantizedLinear] * 2


def test_quantizing_twice_is_refused_and_names_what_is_there():
    model = quantize_model(tiny(), Scheme(4, 16), mixed={"*.down_proj": None})
    before = kinds(model)
    with pytest.raises(QuantizationError, match="layers.0.attn.q_proj is quantized already, as int4-g16"):  # fmt: skip
        quantize_model(model, INT8)
    assert kinds(model) == before
    rest = quantize_model(model, INT8, skip=("*.attn.*", "*.gate_proj", "*.up_proj"))
    assert rest.layers[0].ffn.down_proj.scheme == INT8, "what is left may still be quantized"


def test_nothing_is_changed_when_one_weight_cannot_be_quantized():
    model = tiny()
    model.layers[1].ffn.down_proj.weight[7, 3] = float("nan")
    with pytest.raises(QuantizationError, match=r"layers.1.ffn.down_proj holds nan in row 7, column 3"):  # fmt: skip
        quantize_model(model, INT8)
    assert QuantizedLinear not in kinds(model).values()
    with torch.device("meta"):
        hollow = tiny()
    with pytest.raises(QuantizationError, match="layers.0.attn.q_proj has no numbers yet"):
        quantize_model(hollow, INT8)


@each_scheme
def test_nothing_is_changed_when_the_last_scale_is_too_large_for_float16(scheme):
    model = tiny()
    model.layers[1].ffn.down_proj.weight[7, 3] = 1e8  # 1e8 / 255 is too large with every scheme
    before = kinds(model)
    with pytest.raises(QuantizationError, match=r"layers.1.ffn.down_proj: the \w+ of row 7, group 0 is too large"):  # fmt: skip
        quantize_model(model, scheme)
    assert kinds(model) == before
    spared = quantize_model(model, scheme, mixed={"layers.1.ffn.down_proj": None})
    assert type(spared.layers[1].ffn.down_proj) is nn.Linear


@each_scheme
def test_a_tied_head_is_stored_once_and_both_read_it(scheme):
    model = tiny(tied=True)
    wanted = dequantize(round_to_nearest(model.embed.weight, scheme), scheme, 32)
    quantize_model(model, scheme, skip=())
    assert type(model.embed) is QuantizedEmbedding and type(model.lm_head) is QuantizedLinear
    assert model.embed.packed is model.lm_head.packed and model.embed.scale is model.lm_head.scale
    assert model.embed.offset is model.lm_head.offset and model.embed.scheme == scheme
    ids = torch.tensor([[5, 98, 0], [5, 5, 1]])
    assert torch.equal(model.embed(ids), wanted[ids])
    assert torch.equal(model.embed.weight, wanted)
    names = [n for n, p in model.named_parameters() if p is model.lm_head.packed]
    assert names == ["lm_head.packed"], "counted once"
    with pytest.raises(ValueError, match="token id 99 at"):
        model.embed(torch.tensor([[99]]))


def test_a_tied_head_stays_tied_in_a_copy_and_on_another_device():
    model = copy.deepcopy(quantize_model(tiny(), INT8, skip=()))
    assert model.embed.packed is model.lm_head.packed
    model.lm_head.packed.zero_()
    assert (model.embed(torch.tensor([[3]])) == 0).all()
    model.to(torch.bfloat16)
    assert model.embed(torch.tensor([[3]])).dtype == torch.bfloat16
    assert model.embed.scale.dtype == torch.float16
    model.to("meta")
    assert model.embed.packed is model.lm_head.packed and model.embed.packed.is_meta
    assert model.embed(torch.zeros(1, 1, dtype=torch.long, device="meta")).is_meta


def test_an_embedding_of_its_own_stays_in_float():
    model = tiny(tied=False)
    table = model.embed.weight
    quantize_model(model, INT8, skip=())
    assert model.embed.weight is table and type(model.lm_head) is QuantizedLinear


def test_the_type_of_the_embedding_is_that_of_the_model():
    model = tiny().to(torch.bfloat16)
    quantize_model(model, INT8, skip=())
    assert model.embed(torch.tensor([[1]])).dtype == torch.bfloat16
    assert logits_of(model, TEXT).dtype == torch.bfloat16


def test_each_float_weight_is_gone_before_the_next_is_quantized():
    model = tiny()
    weights = [weakref.ref(m.weight) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]  # fmt: skip
    alive = []

    def method(weight, scheme, name):
        alive.append(sum(ref() is not None for ref in weights))
        return round_to_nearest(weight, scheme, name)

    quantize_model(model, INT8, method=method)
    assert alive == list(range(14, 0, -1))
    assert all(ref() is None for ref in weights)


# ---- activations in 8 bits


def test_rows_of_activations():
    x = torch.tensor([[127.0, -63.5, 0.4], [0.0, 0.0, 0.0], [1e-30, 0.0, -1e-30]])
    codes, scale = quantize_rows(x)
    assert codes.dtype == torch.int8 and scale.tolist()[:2] == [1.0, 0.0]
    assert codes.tolist() == [[127, -64, 0], [0, 0, 0], [127, 0, -127]]
    codes, scale = quantize_rows(torch.randn(2, 3, 5, dtype=torch.bfloat16))
    assert codes.shape == (2, 3, 5) and scale.shape == (2, 3) and scale.dtype == torch.float32
    assert (codes.int().abs().amax(-1) == 127).all()


@given(matrices(smallest=1e-30, largest=1e30))
def test_activations_are_off_by_at_most_half_a_step(x):
    codes, scale = quantize_rows(x)
    assert codes.min() >= -127
    error = (codes.double() * scale[:, None] - x).abs()
    assert (error <= scale[:, None] * 0.5001).all()
    again, same = quantize_rows(codes.float() * scale[:, None])
    assert torch.equal(codes, again)
    assert_close(same, scale)


@given(st.integers(1, 5), st.integers(1, 2100), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=30)
def test_the_integer_product_is_exact(rows, columns, outs, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-128, 128, (n, columns), generator=generator, dtype=torch.int8) for n in (rows, outs))  # fmt: skip
    assert torch.equal(int_product(a, b).long(), a.long() @ b.long().T)


@pytest.mark.parametrize("columns", [1023, 1024, 1025, 1536, 5000])
def test_the_integer_product_is_exact_where_it_is_largest(columns):
    a = torch.full((2, columns), -128, dtype=torch.int8)
    b = torch.full((3, columns), -128, dtype=torch.int8)
    b[1] = 127
    b[2, ::2] = 127
    assert torch.equal(int_product(a, b).long(), a.long() @ b.long().T)


@pytest.mark.parametrize("name", ["int8", "int8-asym"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 40), (0, 40)])
def test_a_dynamic_layer_is_the_product_of_what_was_rounded(name, bias, shape):
    scheme = Scheme.parse(name)
    layer = DynamicLinear.from_linear(nn.Linear(40, 9, bias=bias), scheme)
    assert type(layer) is DynamicLinear
    x = torch.randn(shape) if len(shape) > 1 else torch.randn(40)
    codes, scale = quantize_rows(x)
    rounded = codes.double() * scale.double()[..., None]
    wanted = F.linear(rounded, layer.weight.double(), layer.bias.double() if bias else None)
    assert_close(layer(x).double(), wanted, rtol=1e-5, atol=1e-5)
    assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["int8-g32", "int4", "int4-g64-asym"])
def test_a_dynamic_layer_refuses_what_has_no_integer_product(name):
    with pytest.raises(QuantizationError, match=rf"not {name}: take int8 or int8-asym"):
        DynamicLinear.from_linear(nn.Linear(64, 9), Scheme.parse(name))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_activation_is_seen_and_stays_in_its_row(value):
    layer = DynamicLinear.from_linear(nn.Linear(40, 9), INT8)
    x = torch.randn(3, 40)
    good = layer(x)
    x[1, 7] = value
    out = layer(x)
    assert not out[1].isfinite().any(), "nothing that looks like an answer"
    assert torch.equal(out[[0, 2]], good[[0, 2]])


def test_a_whole_model_with_integer_products():
    model = tiny()
    reference = logits_of(model, TEXT)
    quantize_model(model, INT8, linear=DynamicLinear)
    assert kinds(model)["layers.1.attn.o_proj"] is DynamicLinear
    assert 0 < (logits_of(model, TEXT) - reference).abs().max() < 0.3


# ---- the real model

ALICE = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing"


@pytest.fixture(scope="module")
def real(default_folder):
    """(model, tokenizer, ids, float32 logits); the model is not to be changed."""
    model, tokenizer = load_model(default_folder), Tokenizer.from_folder(default_folder)
    ids = tokenizer.encode(ALICE)
    return model, tokenizer, ids, logits_of(model, ids)


@pytest.fixture(scope="module")
def small(real):
    """The real model in int8, head and embedding too, and its logits."""
    model = quantize_model(copy.deepcopy(real[0]), INT8, skip=())
    return model, logits_of(model, real[2])


def divergence(reference, logits) -> float:
    """Mean Kullback-Leibler divergence from the float32 model."""
    p, q = reference.log_softmax(-1), logits.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def noise(weight, scheme) -> float:
    """Signal to noise in dB."""
    error = weight - dequantize(round_to_nearest(weight, scheme), scheme, weight.shape[1])
    return float(10 * torch.log10(weight.square().mean() / error.square().mean()))


def test_int8_changes_the_real_model_little(real, small):
    model, tokenizer, _, reference = real
    small, logits = small
    assert 0 < divergence(reference, logits) < 0.02
    agree = (logits.argmax(-1) == reference.argmax(-1)).float().mean()
    assert agree >= 0.9
    engine = Engine(small, tokenizer, cache="none", runner="torch")
    answer = engine.generate("The capital of France is", SamplingParams(max_new_tokens=2))
    assert answer.text == " Paris."
    linears = [m for m in small.modules() if isinstance(m, QuantizedLinear)]
    held = sum(p.nbytes for p in small.parameters())
    wanted = sum(INT8.bytes(m.out_features, m.in_features) for m in linears)
    norms = sum(p.nbytes for n, p in small.named_parameters() if "norm" in n)
    assert held == wanted + norms, "the tied table is held once"
    assert held < sum(p.nbytes for p in model.parameters()) / 3.9


def test_a_block_of_the_files_own_size_decodes_to_the_same_numbers(real):
    """The weights once were Q4_1: an offset and a scale for each 32. The scheme of that shape finds them all again."""
    model = real[0]
    for name in ("layers.0.attn.q_proj", "layers.11.ffn.down_proj", "layers.27.ffn.gate_proj"):
        weight, scheme = model.get_submodule(name).weight, Scheme(4, 32, symmetric=False)
        assert noise(weight, scheme) > 60
        assert noise(weight, Scheme(4, 64, symmetric=False)) < 30


def test_one_number_spoils_the_scale_of_a_tensor_and_not_that_of_a_row(real):
    weight = real[0].layers[27].ffn.gate_proj.weight
    assert divmod(int(weight.abs().argmax()), 576) == (903, 260)
    whole = noise(weight.reshape(1, -1), INT8)
    rows = noise(weight, INT8)
    assert rows - whole > 20
    assert noise(weight, Scheme(8, 32)) > rows


def test_activations_in_8_bits_cost_more_than_weights(real, small):
    model, _, ids, reference = real
    weights = divergence(reference, small[1])
    both = quantize_model(copy.deepcopy(model), INT8, linear=DynamicLinear)
    assert weights * 2 < divergence(reference, logits_of(both, ids)) < 0.3
