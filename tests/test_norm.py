"""RMSNorm: the definition, where epsilon stands, what is computed in float32, and where the cast back happens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from llm_engine.norm import RMSNorm


def norm_with(weight: Tensor, eps: float = 1e-5) -> RMSNorm:
    norm = RMSNorm(len(weight), eps)
    norm.weight.data = weight
    return norm


def by_definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1e-6, 1e-3, 1.0, 1e3, 1e9]))
def test_definition(seed, scale):
    torch.manual_seed(seed)
    x, weight = torch.randn(2, 3, 24) * scale, torch.randn(24)
    torch.testing.assert_close(
        norm_with(weight)(x), by_definition(x, weight, 1e-5).float(), rtol=1e-5, atol=1e-6
    )


@given(
    seed=st.integers(0, 10_000),
    factor=st.floats(0.5, 1e6),
    rows=st.sampled_from([(), (3,), (2, 3, 4)]),
)
def test_length_is_forgotten_and_direction_kept(seed, factor, rows):
    torch.manual_seed(seed)
    x = torch.randn(*rows, 16)
    norm = norm_with(torch.ones(16), eps=1e-12)
    torch.testing.assert_close(norm(x * factor), norm(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm(-x), -norm(x))
    rms = norm(x).square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones(rows), rtol=1e-4, atol=0)


def test_epsilon_is_added_to_the_mean_square():
    """Where the vector is about as small as sqrt(eps), every other place for epsilon gives another number."""
    x, weight, eps = torch.tensor([[3e-3, -1e-3, 2e-3, 1e-3]]), torch.ones(4), 1e-5
    ours = norm_with(weight, eps)(x)
    torch.testing.assert_close(ours, by_definition(x, weight, eps).float())
    mean_square = x.square().mean(-1, keepdim=True)
    outside = x / (mean_square.sqrt() + eps)
    to_the_input = (x + eps) / (x + eps).square().mean(-1, keepdim=True).sqrt()
    assert (ours - outside).abs().max() > 0.1
    assert (ours - to_the_input).abs().max() > 0.1


def test_zeros_stay_zeros():
    assert torch.equal(norm_with(torch.ones(8))(torch.zeros(2, 8)), torch.zeros(2, 8))


def test_squares_do_not_overflow_in_float16():
    """300 squared is 90000, and the largest float16 is 65504."""
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    assert torch.equal(norm_with(torch.ones(8).half())(x), torch.ones(1, 8).half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cast_order_is_the_reference_one(dtype):
    """NVIDIA/TransformerEngine#1132: multiplying by the weight before the cast back rounds once less, so bfloat16
    results differ from the reference in the last bit. Ours must be the reference's, bit for bit."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 64, 512).to(dtype), torch.randn(512).to(dtype)
    reference = LlamaRMSNorm(512, 1e-5)
    reference.weight.data = weight
    ours = norm_with(weight)(x)
    assert ours.dtype == dtype
    assert torch.equal(ours, reference(x))
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    cast_last = (wide * weight.float()).to(dtype)
    share = (ours != cast_last).float().mean().item()
    assert (share > 0.1) == (dtype != torch.float32), (
        "the two orders agree only where nothing is rounded"
    )
