"""Quantized weights and caches in the fast runner: against what torch computes from the decoded numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear

from llm_engine.attention import CACHES, single
from llm_engine.config import ModelConfig
from llm_engine.kernels import (
    half,
    place_of,
    put_in_order,
    quantized_product,
    whole_inputs,
    widen_rows,
)
from llm_engine.numba_runner import NumbaRunner, quantized_line, why_not
from llm_engine.prefill import Widened, linears
from llm_engine.quantize import QuantizedLinear, Scheme, quantize_model
from llm_engine.roofline import token_bytes
from llm_engine.runners import fastest_runner
from llm_engine.transformer import TorchRunner, Transformer
from llm_engine.verify import side_by_side

NAMES = ["int8", "int8-asym", "int8-g32", "int8-g64-asym", "int8-g128",
         "int4", "int4-asym", "int4-g32", "int4-g32-asym", "int4-g64", "int4-g64-asym", "int4-g128-asym"]  # fmt: skip


def layer(name, rows=37, columns=256, bias=False, seed=0):
    torch.manual_seed(seed)
    made = torch.nn.Linear(columns, rows, bias=bias).requires_grad_(False)
    return QuantizedLinear.from_linear(made, Scheme.parse(name))


def table_line(module):
    return np.array(quantized_line(module), np.int64)


def product(module, x, team=1, add=False, out=None):
    out = torch.full((len(x), module.out_features), 7.0) if out is None else out
    for me in range(team):
        quantized_product(table_line(module), x.numpy(), out.numpy(), add, me, team)
    return out


def assert_near(found, wanted, x, module):
    """Each input is rounded to 1/32767 of the largest that it shares a factor with: so far may each product be off."""
    group, nibbles = module.scheme.group(module.in_features), module.scheme.bits == 4
    numbers, factor, _ = whole_inputs(x.numpy(), group, nibbles)
    # the factor of each column: what is put in order with the columns' numbers tells where each of them went
    order = np.zeros(numbers.shape[1], np.float32)
    put_in_order(np.arange(1, x.shape[1] + 1, dtype=np.float32), group, nibbles, order)
    steps = torch.zeros(len(x), x.shape[1])
    for place, column in enumerate(order.astype(int)):
        if column:
            steps[:, column - 1] = torch.from_numpy(factor[:, place // 64])
    room = steps / 2 @ module.weight.abs().T + 1e-5 * wanted.abs().max() + 1e-5
    assert ((found - wanted).abs() <= room).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_product(name, rows):
    module, x = layer(name, bias=rows == 3), torch.randn(rows, 256)
    x[0, :64] *= 100  # another chunk's inputs must not suffer from it
    wanted = linear(x, module.weight, module.bias)
    assert_near(product(module, x, team=3), wanted, x, module)
    base = torch.randn(rows, 37)
    assert_near(product(module, x, add=True, out=base.clone()), base + wanted, x, module)


@pytest.mark.parametrize("name", NAMES)
def test_a_large_input_spoils_only_its_own_chunk(name):
    if name in ("int4", "int4-asym"):
        pytest.skip("nibbles of a whole row meet inputs from both of its halves")
    module, x = layer(name), torch.randn(1, 256)
    x[0, 130] = 1e6
    others = x.clone()
    others[0, 128:] = 0
    with_it, alone = product(module, x), product(module, others)
    rest = x.clone()
    rest[0, :128] = 0
    far = product(module, rest)
    # the first two chunks add the same, whatever stands in the third
    torch.testing.assert_close(with_it - far, alone, rtol=0, atol=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_stay_visible(name):
    module = layer(name)
    for bad in (torch.nan, torch.inf):
        for rows in (1, 4):
            x = torch.randn(rows, 256)
            x[0, 70] = bad
            out = product(module, x)
            assert not out[0].isfinite().any() and out[1:].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_zero_rows_and_tiny_numbers(name):
    torch.manual_seed(1)
    made = torch.nn.Linear(128, 6, bias=False).requires_grad_(False)
    made.weight[0], made.weight[1] = 0, 1e-30
    made.weight[2] *= 1e-5
    module = QuantizedLinear.from_linear(made, Scheme.parse(name))
    x = torch.randn(2, 128)
    x[1] = 1e-38  # too small for a factor: taken as 0
    out = product(module, x)
    assert (
        out.isfinite().all()
        and out[0, 0] == 0
        and out[0, 1].abs() < 1e-8
        and (out[1].abs() < 1e-30).all()
    )
    wanted = linear(x, module.weight)
    torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_widened_rows_are_the_decoded_ones(name):
    module = layer(name, columns=192 if "128" not in name else 256)
    wide = torch.full((37, module.in_features), 7.0)
    widen_rows(table_line(module), 5, 30, wide.numpy())
    assert torch.equal(wide[5:30], module.weight[5:30])
    assert (wide[:5] == 7).all() and (wide[30:] == 7).all()


def test_an_incomplete_last_group():
    """192 columns in groups of 128: the second group is padded. Rows are as wide as they are stored."""
    for name in ("int8-g128", "int4-g128", "int4-g128-asym"):
        module, x = layer(name, columns=192), torch.randn(5, 192)
        assert_near(product(module, x), linear(x, module.weight), x, module)
        wide = torch.empty(37, 192)
        widen_rows(table_line(module), 0, 37, wide.numpy())
        assert torch.equal(wide, module.weight)


def test_half():
    every = np.arange(1 << 16, dtype=np.uint16)
    finite = every[np.isfinite(every.view(np.float16))]
    found = np.array([half(bits) for bits in finite[::7]], np.float32)
    assert np.array_equal(found, finite[::7].view(np.float16).astype(np.float32))
    assert half(np.uint16(1)) == np.float32(2.0**-24), "the smallest there is"


@given(st.sampled_from([32, 64, 128, 192]), st.integers(1, 3))
def test_every_input_has_one_place_for_nibbles(group, groups):
    width = group * groups * (2 if group == 32 else 1)
    x = np.arange(1, width + 1, dtype=np.float32)[None]
    numbers, factor, sums = whole_inputs(x, group, True)
    back = numbers[0] * np.repeat(factor[0], 64)
    assert np.allclose(np.sort(back), x[0], rtol=1e-3)
    assert np.allclose(sums[0], x[0].reshape(-1, group).sum(1))
    places = [place_of(byte) + high for byte in range(width // 2) for high in (0, 16)]
    assert sorted(places) == list(range(width))


# ---- whole models


def make(seed=0, **changes):
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}  # fmt: skip
    config = ModelConfig(**{"model_type": "llama", **sizes, **changes})
    return Transformer(config).reset(seed).eval().requires_grad_(False)


def quantized(name="int8", head="int8", **changes):
    model = make(**changes)
    return quantize_model(model, Scheme.parse(name), skip=(), mixed={"lm_head": Scheme.parse(head)})


def feed(runner, model, ids, sizes, cache=None):
    cache = cache or CACHES["growing"](model.config, 1, "cpu", torch.float32)
    logits, at = [], 0
    for size in sizes:
        rows = torch.arange(size)[None]
        logits.append(runner.logits(single(ids[at : at + size], at), cache, rows)[0])
        cache.commit()
        at += size
    return torch.cat(logits)


IDS = torch.randint(3, 99, (30,), generator=torch.Generator().manual_seed(3)).tolist()
NEAR = {"rtol": 1e-3, "atol": 2e-3}  # inputs are rounded to 16 bits


@pytest.mark.parametrize("name", ["int8", "int8-g32", "int4-g32-asym", "int4-g64", "int4-g64-asym"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_rows", [8, 0])
def test_models_in_any_piece(name, tied, max_rows):
    model = quantized(name, tie_word_embeddings=tied, attention_bias=tied)
    wanted = feed(TorchRunner(model), model, IDS, [30])
    runner = NumbaRunner(model, max_rows=max_rows)
    torch.testing.assert_close(feed(runner, model, IDS, [12, 1, 5, 1, 11]), wanted, **NEAR)
    assert runner.torch.positions_computed == 0, "the kernels did it"


def test_mixed_schemes_and_float_layers_in_one_model():
    model = make()
    mixed = {"lm_head": None, "layers.0.*": None, "layers.1.ffn.*": Scheme(8)}
    quantize_model(model, Scheme(4, 64, False), mixed=mixed)
    wanted = feed(TorchRunner(model), model, IDS, [30])
    for max_rows in (8, 0):
        found = feed(NumbaRunner(model, max_rows=max_rows), model, IDS, [20, 1, 1, 8])
        torch.testing.assert_close(found, wanted, **NEAR)


def test_rows_of_a_batch_are_what_each_is_alone():
    model = quantized("int4-g64-asym")
    rows = [IDS[:2], IDS[5:12], IDS[20:24]]
    for max_rows in (32, 0):
        runner = NumbaRunner(model, max_rows=max_rows)
        last = torch.tensor([[len(row) - 1] for row in rows])
        cache = CACHES["growing"](model.config, 3, "cpu", torch.float32)
        together = runner.logits(side_by_side(rows), cache, last)
        for row, ids in enumerate(rows):
            alone = feed(runner, model, ids, [len(ids)])[-1]
            torch.testing.assert_close(together[row, 0], alone, **NEAR)


@pytest.mark.parametrize("max_rows", [8, 0])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_cache_in_8_bits(max_rows, threads):
    model = make()
    caches = [CACHES["int8"](model.config, 1, "cpu", torch.float32) for _ in range(2)]
    wanted = feed(TorchRunner(model), model, IDS, [12, 1, 6, 11], caches[0])
    runner, before = NumbaRunner(model, max_rows=max_rows), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = feed(runner, model, IDS, [12, 1, 6, 11], caches[1])
    finally:
        torch.set_num_threads(before)
    assert runner.torch.positions_computed == 0
    # a number near the middle between two codes may go the other way
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    for part in ("keys", "values"):
        a, b = (getattr(cache, part)[0, :, :, :30].int() for cache in caches)
        assert (a - b).abs().max() <= 1 and (a != b).float().mean() < 0.02
    for part in ("key_scale", "value_scale"):
        a, b = (getattr(cache, part)[0, :, :, :30].float() for cache in caches)
        torch.testing.assert_close(a, b, rtol=0.01, atol=0)


def test_a_cache_in_8_bits_shows_nan():
    model = make()
    model.layers[0].attn.v_proj.weight[0] = torch.nan
    cache = CACHES["int8"](model.config, 1, "cpu", torch.float32)
    assert feed(NumbaRunner(model), model, IDS, [4], cache).isnan().all()


@pytest.mark.parametrize(
    "name, changes, reason",
    [
        ("int8", {"hidden_size": 72}, "72 columns as int8"),
        ("int4-g48", {}, "64 columns as int4-g48"),
        ("int4-g16", {}, "64 columns as int4-g16"),
    ],
)
def test_what_the_kernels_cannot_read_torch_runs(name, changes, reason, caplog):
    model = quantized(name, **changes)
    assert reason in why_not(model)
    with caplog.at_level("INFO", "llm_engine"):
        assert isinstance(fastest_runner(model), TorchRunner)
    assert reason in caplog.text
    with pytest.raises(ValueError, match="Use runner='torch'"):
        NumbaRunner(model)


def test_a_bias_of_another_type():
    model = quantized(attention_bias=True).bfloat16()
    assert "bias of a quantized layer is torch.bfloat16" in why_not(model)


def test_bytes_of_a_token():
    for tied in (True, False):
        model = quantized("int4-g64", tie_word_embeddings=tied)
        layers = sum(
            Scheme(4, 64).bytes(m.out_features, m.in_features)
            for b in model.layers
            for m in linears(b)
        )
        norms = 4 * 64 * 7
        head = Scheme(8).bytes(99, 64)
        spare = 0 if tied else model.embed.weight[:1].nbytes
        assert token_bytes(model, 0) == layers + norms + head + spare
        assert token_bytes(model, 10) - token_bytes(model, 0) == 2 * 3 * 2 * 16 * 4 * 10


def test_prefill_widens_what_is_quantized_and_takes_the_rest_as_it_is():
    model = make()
    quantize_model(model, Scheme(8), mixed={"layers.*.attn.*": None, "lm_head": None})
    layer = linears(model.layers[1])
    found = Widened(layer).of(1, layer, 0, 1)
    for wide, module in zip(found, layer, strict=True):
        assert torch.equal(wide, module.weight)
    assert found[0] is layer[0].weight
