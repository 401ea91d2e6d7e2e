"""Attention: the mask from positions, heads and groups, kernels, what plugs in later, and parity with transformers."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from llm_engine.attention import (
    ATTENTION_KERNELS,
    CACHES,
    KV,
    Attention,
    Batch,
    Cache,
    NoCache,
    join_heads,
    repeat_kv,
    single,
    split_heads,
    visible,
)
from llm_engine.config import ModelConfig

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def tiny(heads=6, kv_heads=2, head_dim=8, hidden=40, bias=False) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=50,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=128,
        attention_bias=bias,
    )


def attention_with(config: ModelConfig, dtype=torch.float32, **options) -> Attention:
    torch.manual_seed(0)
    attention = Attention(config, 0, **options).eval()
    for p in attention.parameters():
        nn.init.normal_(p, std=0.3)
    return attention.to(dtype).requires_grad_(False)


def run(attention: Attention, x, batch: Batch, cache=None):
    return attention(x, batch, cache or no_cache(len(x), x.dtype))


def no_cache(rows=1, dtype=torch.float32) -> NoCache:
    return NoCache(tiny(), rows, "cpu", dtype)


def batch_at(*rows: list[int], tree=None) -> Batch:
    pos = torch.tensor(rows)
    return Batch(torch.zeros_like(pos), pos, tree)


def inputs(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Slots:
    """A cache for tests: keeps everything, hands the slots out in an order of its own, with empty ones between."""

    def __init__(self, order: int = 0, empty: int = 0):
        self.parts, self.order, self.empty = [], order, empty
        self.seen = torch.zeros(1, dtype=torch.long)

    def append(self, layer, k, v, batch):
        self.parts.append((k, v, batch.pos))
        k, v = (torch.cat([p[i] for p in self.parts], 2) for i in (0, 1))
        pos = torch.cat([p[2] for p in self.parts], 1)
        k, v = (nn.functional.pad(t, (0, 0, 0, self.empty), value=7.0) for t in (k, v))
        pos = nn.functional.pad(pos, (0, self.empty), value=-1)
        if self.order:
            places = torch.randperm(
                pos.shape[1], generator=torch.Generator().manual_seed(self.order)
            )
            k, v, pos = k[:, :, places], v[:, :, places], pos[:, places]
        return KV(k, v, pos)

    def commit(self, keep=None):
        self.seen = self.seen + self.parts[-1][2].shape[1]

    def truncate(self, seen):
        raise NotImplementedError


# --- who sees whom ---------------------------------------------------------------------------------------------------


@st.composite
def situations(draw):
    rows, new, old = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(0, 5))
    numbers = st.integers(-1, 9)
    pos = [draw(st.lists(numbers, min_size=new, max_size=new)) for _ in range(rows)]
    past = [draw(st.lists(numbers, min_size=old, max_size=old)) for _ in range(rows)]
    tree = None
    if draw(st.booleans()):
        bits = draw(st.lists(st.booleans(), min_size=rows * new * new, max_size=rows * new * new))
        tree = torch.tensor(bits).view(rows, new, new)
    kv_pos = [p + q for p, q in zip(past, pos, strict=True)]
    window = draw(st.none() | st.integers(1, 6))
    return (
        Batch(torch.zeros(rows, new).long(), torch.tensor(pos), tree),
        kv_pos,
        window,
        draw(st.integers(0, 3)),
    )


@given(situation=situations())
def test_visible_against_a_loop(situation):
    batch, kv_pos, window, sinks = situation
    mask = visible(batch, torch.tensor(kv_pos), window, sinks)
    new = batch.pos.shape[1]
    for b, slots in enumerate(kv_pos):
        for t, query in enumerate(batch.pos[b].tolist()):
            for s, key in enumerate(slots):
                nth_new = s - (len(slots) - new)
                sees = key <= query
                if batch.tree is not None and nth_new >= 0:
                    sees = bool(batch.tree[b, t, nth_new])
                if window is not None and key <= query - window and key >= sinks:
                    sees = False
                if key == -1 or query == -1:
                    sees = False
                assert mask[b, t, s].item() == sees, (b, t, s)


def test_visible_leaves_its_arguments_alone():
    batch = batch_at([3, 4], tree=torch.eye(2, dtype=torch.bool)[None])
    before = batch.tree.clone()
    kv_pos = torch.tensor([[0, 1, 2, 3, 4]])
    visible(batch, kv_pos, window=2)
    assert torch.equal(batch.tree, before)
    assert kv_pos.tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_later_token_changes_nothing_before_it(kernel):
    attention = attention_with(tiny())
    attention.kernel = kernel
    x, batch = inputs(1, 6, 40), batch_at(list(range(6)))
    before = run(attention, x, batch)
    x[0, 4] += 1
    after = run(attention, x, batch)
    assert torch.equal(before[0, :4], after[0, :4])
    assert ((before - after)[0, 4:].abs().amax(-1) > 1e-3).all(), (
        "and every token from there on notices"
    )


@pytest.mark.parametrize("sinks", [0, 2])
def test_window_and_sinks(sinks):
    """Token 9 with a window of 3 sees 7, 8, 9, and the first tokens if they are sinks."""
    attention = attention_with(tiny(), window=3, sinks=sinks)
    batch, x = batch_at(list(range(10))), inputs(1, 10, 40)
    before = run(attention, x, batch)[0, 9]
    for changed in range(10):
        other = x.clone()
        other[0, changed] += 1
        noticed = not torch.equal(run(attention, other, batch)[0, 9], before)
        assert noticed == (changed >= 7 or changed < sinks), changed


# --- what plugs in later ---------------------------------------------------------------------------------------------


@settings(max_examples=6)
@given(order=st.integers(1, 10_000), empty=st.integers(0, 4))
def test_the_order_of_slots_does_not_matter(order, empty):
    """Pages, rings, evictions and static buffers put slots anywhere; only their positions count."""
    attention, batch, x = attention_with(tiny()), batch_at(list(range(7))), inputs(1, 7, 40)
    torch.testing.assert_close(
        run(attention, x, batch, Slots(order, empty)), run(attention, x, batch)
    )


@settings(max_examples=8)
@given(cuts=st.lists(st.integers(1, 8), max_size=4, unique=True), order=st.sampled_from([0, 5]))
def test_cached_equals_uncached_however_it_is_cut(cuts, order):
    attention, x = attention_with(tiny()), inputs(1, 9, 40)
    whole = run(attention, x, batch_at(list(range(9))))
    cache, pieces = Slots(order, empty=order), []
    edges = [0, *sorted(cuts), 9]
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        pieces.append(run(attention, x[:, start:end], batch_at(list(range(start, end))), cache))
        cache.commit()
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert cache.seen.item() == 9


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_rows_equal_rows_alone_and_padding_gives_zero(dtype, kernel):
    attention = attention_with(tiny(), dtype)
    attention.kernel = kernel
    x = inputs(3, 5, 40, dtype=dtype)
    left, right, whole = [-1, -1, 0, 1, 2], [0, 1, 2, -1, -1], [0, 1, 2, 3, 4]
    heads = []
    attention.heads.register_forward_hook(lambda module, args, out: heads.append(out))
    out = run(attention, x, batch_at(left, right, whole))
    assert out.dtype == dtype and out.isfinite().all()
    assert (heads[0][0, :, :2] == 0).all() and (heads[0][1, :, 3:] == 0).all()
    for b, real in ((0, slice(2, 5)), (1, slice(0, 3)), (2, slice(0, 5))):
        pos = list(range(real.stop - real.start))
        alone = run(attention, x[b : b + 1, real], batch_at(pos))[0]
        torch.testing.assert_close(
            out[b, real], alone, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_tree_of_drafts_equals_each_branch_alone(kernel):
    """Prefix 0 1 2, then two drafts: 3a -> 4a and 3b -> 4b, in one pass. Each branch must not notice the other."""
    attention = attention_with(tiny())
    attention.kernel = kernel
    prefix, branch_a, branch_b = (
        inputs(1, 3, 40),
        inputs(1, 2, 40, seed=2),
        inputs(1, 2, 40, seed=3),
    )
    nodes = torch.cat([branch_a[:, :1], branch_b[:, :1], branch_a[:, 1:], branch_b[:, 1:]], 1)
    parents = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]).bool()[None]
    cache = Slots()
    run(attention, prefix, batch_at([0, 1, 2]), cache)
    out = run(attention, nodes, batch_at([3, 3, 4, 4], tree=parents), cache)
    for branch, places in ((branch_a, [0, 2]), (branch_b, [1, 3])):
        alone = run(attention, torch.cat([prefix, branch], 1), batch_at([0, 1, 2, 3, 4]))
        torch.testing.assert_close(out[:, places], alone[:, 3:])


def test_half_the_heads_on_each_side_add_up():
    """Tensor parallel: each part holds some heads and the matching columns of o_proj; the parts' outputs are summed."""
    config = tiny(heads=8, kv_heads=4)
    whole, x, batch = attention_with(config), inputs(1, 5, 40), batch_at(list(range(5)))
    total = 0
    for half in (0, 1):
        part = attention_with(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(part, name).weight
            getattr(part, name).weight = nn.Parameter(weight.chunk(2, 0)[half], requires_grad=False)
        part.o_proj.weight = nn.Parameter(part.o_proj.weight.chunk(2, 1)[half], requires_grad=False)
        total = total + run(part, x, batch)
    torch.testing.assert_close(total, run(whole, x, batch))


def test_a_projection_can_be_any_module_and_runs_once():
    """Quantized layers replace nn.Linear: only their forward may be used, and not twice."""

    class Counted(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.calls, self.product = 0, inner.weight.T.clone()

        def forward(self, x):
            self.calls += 1
            return x @ self.product

    attention, x, batch = attention_with(tiny()), inputs(1, 5, 40), batch_at(list(range(5)))
    wanted = run(attention, x, batch)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    for name in names:
        setattr(attention, name, Counted(getattr(attention, name)))
    torch.testing.assert_close(run(attention, x, batch), wanted)
    assert [getattr(attention, name).calls for name in names] == [1, 1, 1, 1]


def test_q_and_k_norms_are_applied_to_each_head_before_the_rotation():
    attention, x, batch = attention_with(tiny()), inputs(1, 3, 40), batch_at([0, 1, 2])
    attention.q_norm, attention.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)
    seen = {}
    for name in ("q_rotated", "k_rotated"):
        getattr(attention, name).register_forward_hook(
            lambda m, a, out, name=name: seen.update({name: out})
        )
    run(attention, x, batch)
    for name, heads in (("q_rotated", 6), ("k_rotated", 2)):
        torch.testing.assert_close(
            seen[name].square().mean(-1), torch.ones(1, heads, 3), rtol=1e-4, atol=0
        )


# --- heads and groups ------------------------------------------------------------------------------------------------


def test_heads_are_cut_from_the_width_and_joined_back():
    x = torch.arange(2 * 3 * 8).float().view(2, 3, 8)
    heads = split_heads(x, 4)
    assert heads.shape == (2, 2, 3, 4)
    assert torch.equal(heads[1, 1, 2], x[1, 2, 4:])
    assert torch.equal(join_heads(heads), x)


def test_repeat_kv_puts_copies_side_by_side():
    x = torch.arange(3.0).view(1, 3, 1, 1)
    assert repeat_kv(x, 2).flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert repeat_kv(x, 1).flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_grouped_heads_equal_full_heads_with_repeated_weights(kv_heads, kernel):
    grouped = attention_with(tiny(kv_heads=kv_heads))
    full = attention_with(tiny(kv_heads=6))
    full.q_proj, full.o_proj = grouped.q_proj, grouped.o_proj
    for name in ("k_proj", "v_proj"):
        weight = getattr(grouped, name).weight.view(kv_heads, 8, 40)
        copies = [weight[n // (6 // kv_heads)] for n in range(6)]
        getattr(full, name).weight.data = torch.cat(copies)
    grouped.kernel = kernel
    x, batch = inputs(1, 5, 40), batch_at(list(range(5)))
    torch.testing.assert_close(run(grouped, x, batch), run(full, x, batch))


def test_head_dim_is_not_hidden_over_heads():
    """entrenar#262: with H 2560, N 32, K 8 and D 128, q_proj is [4096, 2560], not [2560, 2560]."""
    with torch.device("meta"):
        attention = Attention(tiny(heads=32, kv_heads=8, head_dim=128, hidden=2560), 0)
    assert attention.q_proj.weight.shape == (4096, 2560)
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (1024, 2560)
    assert attention.o_proj.weight.shape == (2560, 4096)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 8), (4, 1, 32)])
def test_layer_equals_transformers(heads, kv_heads, head_dim, bias, kernel):
    config = tiny(heads, kv_heads, head_dim, hidden=36, bias=bias)
    ours = attention_with(config)
    ours.kernel = kernel
    theirs_config = LlamaConfig(
        hidden_size=36,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        attention_bias=bias,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    theirs = LlamaAttention(theirs_config, 0).eval()
    theirs.load_state_dict(ours.state_dict())
    assert len(theirs.state_dict()) == (8 if bias else 4), "biases on q, k, v and o"
    x, pos = inputs(2, 12, 36), torch.arange(12)[None].repeat(2, 1)
    mask = torch.full((12, 12), -torch.inf).triu(1)[None, None]
    wanted, wanted_probs = theirs(x, LlamaRotaryEmbedding(theirs_config)(x, pos), mask)
    probs = []
    ours.probs.register_forward_hook(lambda module, args, out: probs.append(out))
    torch.testing.assert_close(run(ours, x, Batch(pos, pos)), wanted)
    if kernel == "eager":
        torch.testing.assert_close(probs[0], wanted_probs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_agree(dtype):
    attention, x = attention_with(tiny(), dtype, window=3), inputs(2, 6, 40, dtype=dtype)
    batch = batch_at([-1, 0, 1, 2, 3, 4], list(range(6)))
    outs = []
    for name in sorted(ATTENTION_KERNELS):
        attention.kernel = name
        outs.append(run(attention, x, batch))
    assert len(outs) >= 2
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_probes_see_scaled_scores_before_the_mask_and_probabilities_after(dtype):
    attention, x = attention_with(tiny(), dtype), inputs(2, 5, 40, dtype=dtype)
    batch, seen = batch_at(list(range(5)), [-1, 0, 1, 2, 3]), {}
    for name in ("q_rotated", "k_rotated", "scores", "probs", "heads"):
        getattr(attention, name).register_forward_hook(
            lambda m, a, out, name=name: seen.update({name: out})
        )
    run(attention, x, batch)
    assert list(seen) == ["q_rotated", "k_rotated", "scores", "probs", "heads"], (
        "in the order of execution"
    )
    assert all(t.dtype == dtype for t in seen.values())
    q, k = seen["q_rotated"].double(), repeat_kv(seen["k_rotated"].double(), 3)
    torch.testing.assert_close(
        seen["scores"].double(), q @ k.mT / math.sqrt(8), atol=0.02, rtol=TOLERANCE[dtype]
    )
    sums = seen["probs"].double().sum(-1)
    sees = torch.ones(2, 6, 5).double()
    sees[1, :, 0] = 0  # the padding row
    torch.testing.assert_close(sums, sees, atol=TOLERANCE[dtype], rtol=0)
    assert (seen["probs"][0].triu(1) == 0).all()


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_scaling_before_the_product_keeps_float16_finite(kernel):
    """64 products of 40 * 40 are 102400, beyond the largest float16; an eighth of it is not."""
    config = tiny(heads=1, kv_heads=1, head_dim=64, hidden=64)
    attention = attention_with(config, torch.float16)
    q = torch.full((1, 1, 2, 64), 40.0, dtype=torch.float16)
    assert (q @ q.mT).isinf().all()
    kv = KV(q, inputs(1, 1, 2, 64, dtype=torch.float16), torch.arange(2)[None])
    mask = torch.ones(1, 2, 2, dtype=torch.bool)
    out = ATTENTION_KERNELS[kernel](attention, q, kv, mask)
    wanted = kv.v.float().mean(2, keepdim=True).expand(1, 1, 2, 64)
    torch.testing.assert_close(out.float(), wanted, atol=2e-3, rtol=2e-3)


def test_probabilities_of_a_long_row_are_not_summed_in_float16():
    """70,000 equal exponentials sum to more than float16 can hold; in float32 each gets its 70,000th."""
    attention = attention_with(tiny(heads=1, kv_heads=1, head_dim=2, hidden=2), torch.float16)
    S = 70_000
    kv = KV(torch.zeros(1, 1, S, 2).half(), torch.ones(1, 1, S, 2).half(), torch.arange(S)[None])
    out = attention.attend(torch.ones(1, 1, 1, 2).half(), kv, torch.ones(1, 1, S, dtype=torch.bool))
    torch.testing.assert_close(out.float(), torch.ones(1, 1, 1, 2), atol=1e-2, rtol=0)


def test_fused_kernels_that_give_nan_for_blind_rows_do_no_harm(monkeypatch):
    """Which of its kernels PyTorch chooses, and what that one makes of a row without a visible slot, varies."""
    fused = nn.functional.scaled_dot_product_attention

    def careless(q, k, v, attn_mask, **options):
        out = fused(q, k, v, attn_mask=attn_mask, **options)
        return out.masked_fill(~attn_mask.any(-1, keepdim=True), torch.nan)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", careless)
    attention, x, batch = attention_with(tiny()), inputs(1, 3, 40), batch_at([-1, 0, 1])
    wanted = run(attention, x, batch)
    attention.kernel = "sdpa"
    torch.testing.assert_close(run(attention, x, batch), wanted)


# --- small parts -----------------------------------------------------------------------------------------------------


def test_single_numbers_positions_from_its_start():
    batch = single([7, 8, 9], start=5)
    assert (
        batch.ids.tolist() == [[7, 8, 9]]
        and batch.pos.tolist() == [[5, 6, 7]]
        and batch.tree is None
    )


def test_no_cache_remembers_nothing():
    assert CACHES["none"] is NoCache
    cache = CACHES["none"](tiny(), 2, torch.device("cpu"), torch.float32)
    assert isinstance(cache, Cache)
    for _ in range(2):
        batch = batch_at([0, 1], [0, 1])
        kv = cache.append(0, inputs(2, 2, 2, 8), inputs(2, 2, 2, 8), batch)
        cache.commit()
        assert kv.pos is batch.pos and kv.k.shape[2] == 2
        assert cache.seen.tolist() == [0, 0]


def test_an_unknown_kernel_is_named():
    attention = attention_with(tiny())
    attention.kernel = "flash"
    with pytest.raises(ValueError, match=r"attention kernel 'flash'.*eager, sdpa"):
        run(attention, inputs(1, 2, 40), batch_at([0, 1]))


def test_something_that_is_no_cache_is_refused_by_the_shape_checks():
    with pytest.raises(Exception, match="cache"):
        attention_with(tiny())(inputs(1, 2, 40), batch_at([0, 1]), SimpleNamespace(seen=1))
