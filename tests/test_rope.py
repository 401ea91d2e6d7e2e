"""Rotary positions: every type against transformers, the properties that make them work, and dtypes and devices."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from llm_engine.config import RopeConfig
from llm_engine.rope import ROPE_TYPES, Rope, base_frequencies, rotate

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": LLAMA3,
    "llama3, theta 500000": LLAMA3 | {"rope_theta": 500_000.0},
    "yarn": YARN,
    "yarn, attention factor": YARN | {"attention_factor": 0.7},
    "yarn, mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, equal mscales": YARN | {"mscale": 0.8, "mscale_all_dim": 0.8},
    "yarn, only one mscale": YARN | {"mscale": 0.8},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, betas": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, betas equal": YARN | {"beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
}
MAX_POSITIONS, D = 256, 32


def both(variant: dict) -> tuple[Rope, LlamaConfig]:
    variant = {"rope_theta": 10_000.0} | variant
    theirs = LlamaConfig(
        head_dim=D, max_position_embeddings=MAX_POSITIONS, rope_parameters=dict(variant)
    )
    return Rope(RopeConfig(**variant), D, MAX_POSITIONS), theirs


def turned(x, positions, rope):
    """x [heads, T, D] at `positions` [T]."""
    return rotate(x[None], *rope(positions[None], x.dtype))[0]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_frequencies_are_those_of_transformers(variant):
    ours, config = both(variant)
    if variant["rope_type"] == "default":
        wanted, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        wanted, factor = ROPE_INIT_FUNCTIONS[variant["rope_type"]](config)
    torch.testing.assert_close(ours.frequencies, wanted, rtol=2e-7, atol=0)  # one last bit
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("length", [10, 64, 256, 257, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cos_and_sin_also_past_the_trained_context(variant, length, dtype):
    ours, config = both(variant)
    pos = torch.arange(length)[None]
    wanted = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), pos)
    for got, reference in zip(ours(pos, dtype), wanted, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, reference[..., : D // 2])  # theirs is written out twice


def test_dynamic_looks_at_each_row_alone():
    """A short row must not be stretched because a long one shares its batch, nor because of padding."""
    rope, _ = both(VARIANTS["dynamic"])
    short = torch.cat([torch.arange(100), torch.full((500,), -1)])
    long = torch.arange(600)
    cos, _ = rope(torch.stack([short, long]), torch.float32)
    alone, _ = rope(short[None, :100], torch.float32)
    assert torch.equal(cos[0, :100], alone[0])
    assert torch.equal(cos[1], rope(long[None], torch.float32)[0][0])
    plain, _ = both(VARIANTS["default"])
    assert torch.equal(alone, plain(short[None, :100], torch.float32)[0])
    assert not torch.allclose(cos[1], plain(long[None], torch.float32)[0][0], atol=0.1)


def test_dynamic_stretches_by_the_largest_position_even_when_only_one_token_is_new():
    rope, config = both(VARIANTS["dynamic"])
    last = torch.tensor([[599]])
    wanted, _ = LlamaRotaryEmbedding(config)(torch.zeros(1), last)
    torch.testing.assert_close(rope(last, torch.float32)[0], wanted[..., : D // 2])


def test_llama_3_2_1b_bands():
    """Llama-3.2-1B: pairs 0-14 as trained, 15-17 blended, 18-31 divided by 32."""
    rope = RopeConfig("llama3", 500_000.0, 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    trained = base_frequencies(500_000.0, 64)
    ratio = trained / Rope(rope, 64, 131_072).frequencies
    assert torch.equal(ratio[:15], torch.ones(15))
    assert ((ratio[15:18] > 1) & (ratio[15:18] < 32)).all()
    assert torch.equal(ratio[18:], torch.full((14,), 32.0))


@given(
    seed=st.integers(0, 1000),
    m=st.integers(0, 500),
    n=st.integers(0, 500),
    shift=st.integers(0, 4000),
)
def test_only_the_distance_matters(seed, m, n, shift):
    """The product of a query at m and a key at n is that of m+shift and n+shift."""
    torch.manual_seed(seed)
    rope, _ = both(VARIANTS["default"])
    q, k = torch.randn(2, 1, 1, D)

    def product(m, n):
        at_m, at_n = turned(q, torch.tensor([m]), rope), turned(k, torch.tensor([n]), rope)
        return (at_m * at_n).sum()

    torch.testing.assert_close(product(m, n), product(m + shift, n + shift), rtol=1e-3, atol=5e-3)


@given(seed=st.integers(0, 1000), position=st.integers(0, 10_000))
def test_turning_keeps_lengths_and_position_0_changes_nothing(seed, position):
    torch.manual_seed(seed)
    rope, _ = both(VARIANTS["default"])
    x = torch.randn(3, 1, D)
    torch.testing.assert_close(
        turned(x, torch.tensor([position]), rope).norm(dim=-1), x.norm(dim=-1)
    )
    assert torch.equal(turned(x, torch.tensor([0]), rope), x)


def test_pairs_are_first_half_with_second_half():
    rope, config = both(VARIANTS["default"])
    torch.manual_seed(0)
    q, k, pos = (
        torch.randn(2, 4, 50, D),
        torch.randn(2, 2, 50, D),
        torch.arange(50)[None].repeat(2, 1),
    )
    wanted = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, pos))
    cos, sin = rope(pos, torch.float32)
    assert torch.equal(rotate(q, cos, sin), wanted[0])
    assert torch.equal(rotate(k, cos, sin), wanted[1])
    swapped = q.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)  # neighbors as pairs
    assert not torch.allclose(rotate(swapped, cos, sin), wanted[0], atol=0.1)


def test_partial_rotary_leaves_the_rest_alone():
    rope = Rope(RopeConfig(partial_rotary_factor=0.25), D, MAX_POSITIONS)
    assert rope.frequencies.shape == (4,)
    assert torch.equal(rope.frequencies, base_frequencies(10_000.0, 8))
    x = torch.randn(2, 7, D)
    out = turned(x, torch.arange(7), rope)
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert not torch.allclose(out[:, 1:, :8], x[:, 1:, :8])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_the_model_does_not_round_the_angles(dtype):
    """In bfloat16, 4097 is 4096 and the frequencies have three digits: both would move every far token."""
    rope, _ = both(VARIANTS["default"])
    pos = torch.arange(4090, 4105)[None]
    before = rope(pos, torch.float32)[0].clone()
    rope.to(dtype)
    assert rope.frequencies.dtype == torch.float32
    assert torch.equal(rope(pos, torch.float32)[0], before)
    assert torch.equal(rope(pos, dtype)[0], before.to(dtype))


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_building_on_the_meta_device_keeps_the_frequencies(variant):
    """A model is built without memory and filled afterwards; angles are in no checkpoint to fill them from."""
    wanted, _ = both(variant)
    with torch.device("meta"):
        rope, _ = both(variant)
    assert torch.equal(rope.to_empty(device="cpu").frequencies, wanted.frequencies)
    assert torch.equal(wanted.to("meta").to_empty(device="cpu").frequencies, rope.frequencies)
    assert not rope.state_dict()


def test_unknown_type_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"rope type 'su'.*default.*dynamic.*linear.*llama3.*yarn"):
        Rope(RopeConfig(rope_type="su"), D, MAX_POSITIONS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"low_freq_factor": None}, "low_freq_factor=None"),
        ({"high_freq_factor": None}, "high_freq_factor=None"),
        ({"factor": 0.0}, r"factor=0\.0"),
        ({"high_freq_factor": 1.0}, "high_freq_factor > low_freq_factor"),
    ],
)
def test_llama3_without_its_parameters(changes, message):
    with pytest.raises(ValueError, match=message):
        Rope(dataclasses.replace(RopeConfig(**LLAMA3), **changes), D, MAX_POSITIONS)


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn"])
@pytest.mark.parametrize("factor", [None, 0.0, -2.0])
def test_a_factor_is_needed(rope_type, factor):
    with pytest.raises(ValueError, match=f"'{rope_type}' needs a positive factor"):
        Rope(RopeConfig(rope_type=rope_type, factor=factor), D, MAX_POSITIONS)


def test_yarn_without_a_factor_takes_the_ratio_of_the_contexts():
    ours = Rope(RopeConfig("yarn", factor=None, original_max_position_embeddings=64), D, 256)
    wanted = Rope(RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64), D, 256)
    assert torch.equal(ours.frequencies, wanted.frequencies)
    assert ours.attention_factor == wanted.attention_factor


def test_angles_are_computed_where_the_positions_are():
    """A model built inside `with torch.device(...)` gets its weights there, but frequencies are made on the CPU."""
    rope, _ = both(VARIANTS["dynamic"])
    cos, _ = rope(torch.arange(5, device="meta")[None], torch.float32)
    assert cos.device.type == "meta" and cos.shape == (1, 5, D // 2)


@pytest.mark.parametrize(("head_dim", "share"), [(15, 1.0), (32, 0.1), (8, 0.1)])
def test_pairs_need_an_even_number(head_dim, share):
    with pytest.raises(ValueError, match=f"head_dim {head_dim}"):
        Rope(RopeConfig(partial_rotary_factor=share), head_dim, MAX_POSITIONS)


def test_a_type_can_be_added():
    """As later chapters do: register a function, name it in the config."""

    @ROPE_TYPES.register("halved")
    def halved(rope, rotary_dim, max_positions, lengths=None):
        return base_frequencies(rope.rope_theta, rotary_dim) / 2, 1.0

    try:
        rope = Rope(RopeConfig(rope_type="halved"), D, MAX_POSITIONS)
        assert torch.equal(rope.frequencies, base_frequencies(10_000.0, D) / 2)
    finally:
        del ROPE_TYPES["halved"]
