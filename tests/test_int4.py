"""int4: packing, scales by least squares, what is listened to, GPTQ."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from llm_engine.config import ModelConfig
from llm_engine.int4 import (
    collect_inputs,
    decode_groups,
    fit_scales,
    gptq,
    least_squares,
    nearest_codes,
    random_tokens,
    solve_scales,
    weighted,
)
from llm_engine.quality import sqnr
from llm_engine.quantize import (
    QuantizationError,
    QuantizedLinear,
    Scheme,
    dequantize,
    pack_nibbles,
    quantize_model,
    round_to_nearest,
    unpack_nibbles,
)
from llm_engine.transformer import Transformer, load_model

SCHEMES = ["int4-g64", "int4-g64-asym", "int4-g32-asym", "int4", "int4-asym", "int8", "int8-asym"]


def decode(q, scheme, columns):
    return dequantize(q, scheme, columns)


def noise(seed, rows, columns, scale=1.0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


def correlated(columns, count=512, seed=0):
    """Inputs whose columns have something in common, one of them loud."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) * 0.3 + torch.eye(columns)
    x = torch.randn(count, columns, generator=generator) @ mixing
    x[:, 3] *= 20
    return x


METHODS = {
    "least squares": lambda columns: least_squares,
    "weighted": lambda columns: weighted({"m": correlated(columns).square().mean(0)}),
    "gptq": lambda columns: gptq({"m": correlated(columns).T @ correlated(columns) / 512}),
}


# ---- packing


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 40), st.integers(0, 9))
def test_packing_loses_nothing(rows, groups, half, seed):
    group = 2 * half
    codes = torch.randint(
        0, 16, (rows, groups * group), generator=torch.Generator().manual_seed(seed)
    )
    packed = pack_nibbles(codes.to(torch.uint8), group)
    assert packed.shape == (rows, groups * half)
    assert torch.equal(unpack_nibbles(packed, group), codes.to(torch.uint8))


def test_a_byte_holds_two_columns_half_a_group_apart():
    packed = pack_nibbles(torch.arange(8, dtype=torch.uint8)[None], 4)
    assert packed.tolist() == [[0x20, 0x31, 0x64, 0x75]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("columns", [64, 70, 33])
def test_every_method_gives_what_the_scheme_stores(method, name, columns):
    """Group count by ceiling for widths that are no multiple of the group, as in vllm-ascend PR #9159 (4304 / 32 -> 135)."""
    scheme, weight = Scheme.parse(name), noise(1, 6, columns)
    q = METHODS[method](columns)(weight, scheme, "m")
    QuantizedLinear.from_quantized(q, scheme, columns)  # checks shapes and types
    assert q.scale.shape == (6, scheme.groups(columns))
    assert sqnr(weight, decode(q, scheme, columns)) > (5 if scheme.bits == 4 else 25)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym", "int8"])
def test_zero_rows_and_tiny_numbers(method, name):
    """Zero rows and rows of 1e-30 gave NaN scales in llama.cpp (PR #7313)."""
    weight = noise(2, 5, 64)
    weight[0], weight[1], weight[2], weight[3, :32] = 0.0, 1e-30, -1e-30, 0.25
    scheme = Scheme.parse(name)
    q = METHODS[method](64)(weight, scheme, "m")
    back = decode(q, scheme, 64)
    assert q.scale.isfinite().all() and back.isfinite().all()
    assert back[:3].abs().max() < 1e-6
    assert (back[0] == 0).all()
    assert (back[3, :32] - 0.25).abs().max() < 0.04  # a step: GPTQ makes up for other columns here


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_what_no_scale_fits_is_named(method, bad):
    weight = noise(3, 4, 64)
    weight[1, 5] = bad
    with pytest.raises(QuantizationError, match="^m holds|^m: the scale"):
        METHODS[method](64)(weight, Scheme(4, 32), "m")


# ---- scales


@pytest.mark.parametrize("symmetric", [True, False])
@settings(max_examples=20)
@given(seed=st.integers(0, 30))
def test_solved_scales_are_the_minimum(symmetric, seed):
    """Whatever is done to the solution, the error grows."""
    generator = torch.Generator().manual_seed(seed)
    grouped = torch.randn(2, 3, 16, generator=generator)
    codes = torch.randint(-8, 8, (2, 3, 16), generator=generator).float()
    importance = torch.rand(3, 16, generator=generator) + 0.1
    scale, offset = solve_scales(grouped, codes, importance, symmetric)

    def error(scale, offset):
        return ((decode_groups(codes, scale, offset) - grouped) ** 2 * importance).sum()

    least = error(scale, offset)
    assert least < error(scale + 0.01, offset) and least < error(scale - 0.01, offset)
    assert (offset is None) == symmetric
    if offset is not None:
        assert least < error(scale, offset + 0.01) and least < error(scale, offset - 0.01)


@pytest.mark.parametrize("name", SCHEMES)
@settings(max_examples=12)
@given(seed=st.integers(0, 20), scale=st.sampled_from([1e-3, 1.0, 100.0]))
def test_never_worse_than_round_to_nearest(name, seed, scale):
    scheme, weight = Scheme.parse(name), noise(seed, 4, 70, scale)
    loud = torch.rand(70, generator=torch.Generator().manual_seed(seed)) ** 4 + 1e-3
    for method, loudness in ((least_squares, torch.ones(70)), (weighted({"m": loud}), loud)):
        ours = sqnr(weight, decode(method(weight, scheme, "m"), scheme, 70), loudness)
        plain = sqnr(weight, decode(round_to_nearest(weight, scheme), scheme, 70), loudness)
        assert (
            ours >= plain - 0.15
        )  # loudness is damped a little, so the two measures differ a little


def test_the_second_beginning_finds_better_scales(monkeypatch):
    """The search that begins at a part of the range ends in other valleys, and some of them are deeper."""
    weight = noise(7, 256, 64)
    for name in ("int4-g64", "int4-g64-asym"):
        scheme = Scheme.parse(name)
        both = sqnr(weight, decode(least_squares(weight, scheme), scheme, 64))
        with monkeypatch.context() as only:
            only.setattr("llm_engine.int4.SHRUNK", (1.0,))
            one = sqnr(weight, decode(least_squares(weight, scheme), scheme, 64))
        assert both > one + 0.05, "decibels"


def test_columns_that_happened_to_be_silent_count_a_little():
    """What a short text did not make loud may be loud in the next: its groups are fitted, not forgotten."""
    weight, scheme, loudness = noise(8, 64, 128), Scheme(4, 64), torch.ones(128)
    loudness[64:] = 0
    silent = {
        name: sqnr(weight[:, 64:], decode(method(weight, scheme, "m"), scheme, 128)[:, 64:])
        for name, method in {
            "rounded": round_to_nearest,
            "fitted": least_squares,
            "weighted": weighted({"m": loudness}),
            "gptq": gptq({"m": loudness.diag()}),
        }.items()
    }
    assert silent["fitted"] > silent["rounded"] + 0.3
    assert silent["weighted"] == pytest.approx(silent["fitted"], abs=0.05)
    assert silent["gptq"] == pytest.approx(silent["fitted"], abs=0.05)


def test_numbers_on_a_grid_are_found_again():
    """Weights that were rounded once, with the same groups: nothing more is lost, as with a Q4_1 file and groups of 32."""
    codes = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(1)).float()
    codes[:, 5], codes[:, 40] = 0, 15
    weight = codes * 0.125 - 0.75
    scheme = Scheme(4, 64, symmetric=False)
    assert torch.equal(decode(least_squares(weight, scheme), scheme, 64), weight)


def test_a_loud_column_is_rounded_best():
    weight, loud = noise(5, 64, 64), torch.ones(64)
    weight[:, 7] *= 0.02
    loud[7] = 2000.0
    scheme = Scheme(4, 64, symmetric=False)
    plain = decode(least_squares(weight, scheme), scheme, 64)
    ours = decode(weighted({"m": loud})(weight, scheme, "m"), scheme, 64)

    def error(back):
        return (back - weight)[:, 7].square().mean()

    assert error(ours) < error(plain) / 20
    assert sqnr(weight, ours, loud) > sqnr(weight, plain, loud) + 6


def test_padding_counts_for_nothing():
    """The last group has 6 columns of 64; what fills it up must not move its scale."""
    weight, scheme = noise(6, 4, 70), Scheme(4, 64, symmetric=False)
    alone = decode(least_squares(weight[:, 64:].contiguous(), scheme), scheme, 6)
    assert torch.equal(decode(least_squares(weight, scheme), scheme, 70)[:, 64:], alone)


def test_rows_do_not_depend_on_each_other():
    """Loading quantizes some rows at a time and relies on it."""
    weight, scheme = noise(7, 10, 64), Scheme(4, 32)
    for make in METHODS.values():
        method = make(64)
        whole = decode(method(weight, scheme, "m"), scheme, 64)
        parts = [decode(method(weight[a : a + 5], scheme, "m"), scheme, 64) for a in (0, 5)]
        torch.testing.assert_close(torch.cat(parts), whole)


def test_fit_keeps_float16_scales():
    grouped = noise(8, 3, 64).view(3, 2, 32)
    scale, offset = fit_scales(grouped, torch.ones(2, 32), Scheme(4, 32, symmetric=False))
    assert scale.dtype == offset.dtype == torch.float16
    codes = nearest_codes(grouped, scale, offset, Scheme(4, 32, symmetric=False))
    assert codes.min() >= 0 and codes.max() <= 15 and torch.equal(codes, codes.round())


# ---- inputs


CONFIG = ModelConfig(
    model_type="llama", vocab_size=90, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128, rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return Transformer(CONFIG).eval().requires_grad_(False)


def test_random_tokens_are_the_same_again():
    ids = random_tokens(90, 3, 5)
    assert ids.shape == (3, 5) and ids.min() >= 0 and ids.max() < 90
    assert torch.equal(ids, random_tokens(90, 3, 5))
    assert not torch.equal(ids, random_tokens(90, 3, 5, seed=1))


def test_inputs_are_those_that_the_modules_get(model):
    ids, seen = random_tokens(90, 4, 16), {}
    hook = model.layers[1].ffn.down_proj.register_forward_pre_hook(
        lambda m, x: seen.update(down=x[0].clone())
    )
    loud, products = collect_inputs(model, ids), collect_inputs(model, ids, products=True)
    hook.remove()
    x = seen["down"].flatten(0, 1)
    torch.testing.assert_close(loud["layers.1.ffn.down_proj"], x.square().mean(0))
    torch.testing.assert_close(products["layers.1.ffn.down_proj"], x.T @ x / len(x))
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert set(loud) == set(products) == linears
    q, k = "layers.0.attn.q_proj", "layers.0.attn.k_proj"
    assert products[q] is products[k] and products[q] is not products["layers.0.ffn.up_proj"]
    for name in linears:
        torch.testing.assert_close(products[name].diagonal(), loud[name])


def test_listening_leaves_nothing_behind(model):
    collect_inputs(model, random_tokens(90, 1, 4))
    assert not any(m._forward_pre_hooks for m in model.modules())
    with pytest.raises(ValueError, match="token id 1000 at .* outside the vocabulary"):
        collect_inputs(model, torch.full((1, 4), 1000))
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_quantized_model_can_be_listened_to(model):
    quantized = quantize_model(copy.deepcopy(model), Scheme(8))
    ids = random_tokens(90, 2, 16)
    ours, plain = collect_inputs(quantized, ids), collect_inputs(model, ids)
    assert set(ours) == set(plain)
    for name in plain:
        assert (ours[name] / plain[name]).log().abs().max() < 0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_refused_by_name(bad):
    """A model in float16 that overflows while it is listened to: neither a bare error of torch nor plain rounding."""
    weight, loudness = noise(4, 6, 64), torch.ones(64)
    loudness[7] = bad
    for method in (weighted({"m": loudness}), gptq({"m": loudness.diag()})):
        with pytest.raises(QuantizationError, match="collected for m are not finite.*float32"):
            method(weight, Scheme(4, 32), "m")


def test_a_module_nobody_listened_to_is_named():
    scheme = Scheme(4, 32)
    for make in (weighted, gptq):
        with pytest.raises(QuantizationError, match="layers.7.*skip"):
            make({})(noise(1, 2, 32), scheme, "layers.7")
        with pytest.raises(QuantizationError, match="layers.7 has 32 columns.*16"):
            make({"layers.7": torch.ones(16) if make is weighted else torch.eye(16)})(
                noise(1, 2, 32), scheme, "layers.7"
            )


# ---- GPTQ


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym", "int4-g64-asym", "int4"])
def test_gptq_makes_products_better(name):
    x, weight, scheme = correlated(128), noise(9, 48, 128), Scheme.parse(name)
    products = x.T @ x / len(x)
    fresh = correlated(128, seed=0)[256:]

    def error(method):
        return (
            ((decode(method(weight, scheme, "m"), scheme, 128) - weight) @ fresh.T).square().sum()
        )

    ours = error(gptq({"m": products}))
    assert ours < 0.7 * error(weighted({"m": products.diagonal()}))
    assert ours < 0.7 * error(round_to_nearest)


def test_gptq_without_correlation_is_weighted():
    """With nothing in common between the columns there is nothing to make up for."""
    loud = torch.rand(64, generator=torch.Generator().manual_seed(0)) + 0.1
    weight, scheme = noise(10, 8, 64), Scheme(4, 32, symmetric=False)
    ours = gptq({"m": torch.diag(loud)})(weight, scheme, "m")
    plain = weighted({"m": loud})(weight, scheme, "m")
    for part, (a, b) in zip(ours._fields, zip(ours, plain)):
        assert torch.equal(a, b), part


def test_gptq_with_fewer_tokens_than_columns():
    x, weight, scheme = correlated(64)[:5], noise(11, 8, 64), Scheme(4, 32)
    back = decode(gptq({"m": x.T @ x / 5})(weight, scheme, "m"), scheme, 64)
    assert back.isfinite().all()
    dead = decode(gptq({"m": torch.zeros(64, 64)})(weight, scheme, "m"), scheme, 64)
    assert dead.isfinite().all()


def test_gptq_follows_the_definition():
    """Column by column, written down plainly: round, divide the error, hand it on."""
    columns, scheme = 16, Scheme(4, 8, symmetric=False)
    x = correlated(columns)
    products, weight = x.T @ x / len(x), noise(12, 3, columns)
    q = gptq({"m": products}, damping=0.05)(weight, scheme, "m")

    order = products.diagonal().argsort(descending=True)
    H = products.double()[order][:, order]
    H += 0.05 * products.diagonal().mean() * torch.eye(columns)
    left, wanted = weight.double()[:, order].clone(), torch.zeros(3, columns, dtype=torch.double)
    for j in range(columns):
        column = order[j]
        scale = q.scale[:, column // 8].double()
        offset = q.offset[:, column // 8].double()
        code = ((left[:, j] - offset) / scale).round().clamp(0, 15)
        wanted[:, column] = code * scale + offset
        inverse = torch.linalg.inv(H[j:, j:])  # over the columns that are still free
        error = (left[:, j] - wanted[:, column]) / inverse[0, 0]
        left[:, j:] -= error[:, None] * inverse[0]
    torch.testing.assert_close(decode(q, scheme, columns), wanted.float())


# ---- the real model


def test_real_loud_columns_are_the_models_own(default_folder):
    """What the chapter rests on: random tokens find the same loud columns as text, and v_proj's weights are small there."""
    from llm_engine.quality import calibration_text, windows
    from llm_engine.tokenizer import Tokenizer

    model = load_model(default_folder)
    text = windows(Tokenizer.from_folder(default_folder), calibration_text(), 32, 4)
    heard = [collect_inputs(model, ids) for ids in (text, random_tokens(49152, 4, 32))]
    for layer in (5, 10, 20):
        name = f"layers.{layer}.attn.v_proj"
        a, b = (h[name].argmax() for h in heard)
        assert a == b
        size = model.get_submodule(name).weight.square().mean(0)
        assert size[a] < 0.1 * size.mean()
    # and with them a layer's products become better than round-to-nearest makes them
    name, scheme = "layers.10.attn.v_proj", Scheme(4, 64, symmetric=False)
    weight = model.get_submodule(name).weight
    plain = sqnr(weight, decode(round_to_nearest(weight, scheme), scheme, 576), heard[0][name])
    ours = sqnr(
        weight, decode(weighted(heard[1])(weight, scheme, name), scheme, 576), heard[0][name]
    )
    assert ours > plain + 3
