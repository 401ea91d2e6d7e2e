"""The feed-forward layer against `transformers`, and the activations against their definitions."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP

from llm_engine.config import read_llama
from llm_engine.ffn import ACTIVATIONS, FeedForward

RAW = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def filled(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_feed_forward_equals_transformers(name, bias):
    ours = filled(FeedForward(read_llama({**RAW, "hidden_act": name, "mlp_bias": bias})))
    theirs = LlamaMLP(LlamaConfig(**RAW, hidden_act=name, mlp_bias=bias))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_each_activation_is_that_of_transformers_far_from_zero_too(name):
    x = torch.linspace(-30, 30, 2001)
    torch.testing.assert_close(ACTIVATIONS[name](x), ACT2FN[name](x))


def test_activations_differ_where_their_names_do():
    """gelu and its tanh approximation are close, so that a mix-up is easily overlooked: up to 4.7e-4 apart."""
    x = torch.linspace(-5, 5, 10001, dtype=torch.float64)
    exact = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    torch.testing.assert_close(ACTIVATIONS["gelu"](x), exact)
    gap = (ACTIVATIONS["gelu_new"](x) - exact).abs().max()
    assert 4e-4 < gap < 5e-4
    assert (ACTIVATIONS["quick_gelu"](x) - exact).abs().max() > 1e-2


def test_unknown_activation_is_refused_by_name():
    with pytest.raises(ValueError, match="'gelo'") as error:
        ACTIVATIONS["gelo"]
    assert "gelu" in str(error.value) and "silu" in str(error.value)


def test_positions_do_not_see_each_other():
    ffn = filled(FeedForward(read_llama(RAW)))
    x = torch.randn(2, 6, 24, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([ffn(x[:, i : i + 1]) for i in range(6)], dim=1)
    torch.testing.assert_close(ffn(x), alone)


def test_gate_and_up_are_not_interchangeable():
    """silu(gate) * up, not gate * silu(up): a swap in a weight map gives plausible numbers and wrong text."""
    ffn = filled(FeedForward(read_llama(RAW)))
    x = torch.randn(1, 4, 24, generator=torch.Generator().manual_seed(3))
    right = ffn(x)
    expected = (
        torch.nn.functional.silu(x @ ffn.gate_proj.weight.T) * (x @ ffn.up_proj.weight.T)
    ) @ (ffn.down_proj.weight.T)
    torch.testing.assert_close(right, expected)
    ffn.gate_proj, ffn.up_proj = ffn.up_proj, ffn.gate_proj
    assert (ffn(x) - right).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keeps_the_dtype(dtype):
    ffn = filled(FeedForward(read_llama(RAW))).to(dtype)
    x = torch.randn(1, 4, 24, generator=torch.Generator().manual_seed(4))
    out = ffn(x.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), ffn.float()(x), rtol=0.05, atol=0.05)
