"""The int8 cache: rounding and its bounds, against a float cache that holds the same rounded numbers, bytes, the real model."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_kv_cache import (
    CONTEXT,
    MODEL,
    TREE,
    V,
    config,
    feed,
    histories,
    logits_of,
    padded,
    path_to,
    tree_batch,
    uncached,
)
from test_parity import random_ids
from torch.testing import assert_close

from llm_engine import CacheError, Engine, SamplingParams
from llm_engine.attention import CACHES, Cache, single
from llm_engine.int8_cache import (
    int8_cache_bytes,
    quantize_tokens,
    restore_tokens,
    round_up,
)
from llm_engine.kv_cache import ConcatCache, SlotCache, cache_bytes
from llm_engine.transformer import TorchRunner, Transformer


def make(rows=1, look=True, like=None, dtype=torch.float32):
    cache = CACHES["int8"](like or config(), rows, torch.device("cpu"), dtype)
    if not look:
        cache._may_look = False  # as on a GPU
    return cache


def rounded(x):
    return restore_tokens(*quantize_tokens(x), x.dtype)


class RoundedConcat(ConcatCache):
    """The reference: floats, but those that the int8 cache should give."""

    def append(self, layer, k, v, batch):
        return super().append(layer, rounded(k), rounded(v), batch)


def reference(ids, model=MODEL):
    """Logits [T, V] of a text at once, with rounded keys and values."""
    return feed(ids, RoundedConcat(model.config, 1, "cpu", torch.float32), model=model)


# ---- rounding


@settings(max_examples=200)
@given(st.floats(0, 2.0**127, width=32))
@example(0.0)
@example(1.0)
@example(1.0 + 2**-23)
@example(math.inf)
@example(math.nan)
@example(2.0**-140)  # subnormal
def test_a_scale_is_rounded_up_to_the_next_bfloat16(number):
    up = round_up(torch.tensor([number]))
    if math.isnan(number):
        assert up.isnan()
        return
    assert float(up) >= number
    if 0 < float(up) < math.inf:
        below = torch.nextafter(up, torch.zeros_like(up))
        assert float(below) < number, "and no further"


numbers = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-4, 4, width=32)


@settings(max_examples=100)
@given(st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=1, max_size=5))
@example([[0, 0, 0, 0], [1e-30, -1e-30, 0, 0], [1e-42, 0, 0, 0], [3e38, -3e38, 1, 0]])
def test_no_number_is_off_by_more_than_half_a_scale(rows):
    x = torch.tensor(rows)
    q, scale = quantize_tokens(x)
    assert q.dtype == torch.int8 and scale.dtype == torch.bfloat16 and scale.shape == (len(rows),)
    assert int(q.min()) >= -127, "never -128, which has no counterpart"
    back = restore_tokens(q, scale, torch.float64)
    assert back.isfinite().all()
    half = scale.double()[:, None] / 2
    assert ((back - x.double()).abs() <= half * (1 + 1e-6) + 1e-44).all()
    # the scale is no more than one step of a bfloat16 above what is needed
    assert (scale.double() <= x.double().abs().amax(1) / 127 * (1 + 2**-7) + 1e-40).all()


def test_a_bfloat16_row_uses_its_exact_maximum():
    """Divided in bfloat16, 1.0 / 127 becomes too small, and 1.0 would be the 128th step, which int8 does not have."""
    x = torch.linspace(0.5, 2, 400).to(torch.bfloat16)[:, None].expand(-1, 4)
    q, scale = quantize_tokens(x)
    assert (q > 0).all() and (q.float() * scale.float()[:, None] - x.float()).abs().max() < 0.01


def test_zero_rows_and_what_is_not_finite():
    q, scale = quantize_tokens(torch.tensor([[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]]))
    assert q[0].tolist() == [0, 0] and float(scale[0]) == 0
    back = restore_tokens(q, scale, torch.float32)
    assert back[0].tolist() == [0, 0]
    assert back[1].isnan().any() and not back[2].isfinite().all(), "a broken model still shows"


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001])
def test_every_nan_still_shows(bits):
    """CUDA makes a NaN of ones only; adding to its bits carries into the sign."""
    nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert nan.isnan() and round_up(nan).isnan()
    row = torch.cat([torch.ones(3), nan])
    assert restore_tokens(*quantize_tokens(row), torch.float32).isnan().all()


def test_each_token_and_head_has_a_scale_of_its_own():
    x = torch.ones(1, 2, 3, 4) * torch.tensor([1.0, 100.0]).view(1, 2, 1, 1)
    x[0, 0, 1] = 1e6
    _, scale = quantize_tokens(x)
    assert scale.shape == (1, 2, 3)
    assert len(set(scale.flatten().tolist())) == 3
    assert_close(rounded(x), x, rtol=1 / 250, atol=0)


# ---- it holds what it should


@pytest.mark.parametrize("look", [True, False], ids=["cpu", "as on a gpu"])
@settings(max_examples=40)
@given(history=histories())
def test_each_row_holds_its_rounded_tokens(look, history):
    """Passes with padding, partly kept ones, abandoned ones, rollbacks: numbers and scales stay together."""
    B, steps = history
    cache = make(B, look)
    held = [torch.zeros(2, 2, 2, 0, 8)] * B
    for salt, (what, *how) in enumerate(steps):
        lengths = [row.shape[3] for row in held]
        if what == "truncate":
            to = how[0] if isinstance(how[0], list) else [how[0]] * B
            cache.truncate(torch.tensor(to) if isinstance(how[0], list) else how[0])
            held = [row[:, :, :, :n] for row, n in zip(held, to, strict=True)]
            continue
        counts, side, kept = how
        counts = [min(n, CONTEXT - m) for n, m in zip(counts, lengths, strict=True)]
        kept = [min(n, m) for n, m in zip(kept, counts, strict=True)]
        batch = padded([[1] * n for n in counts], lengths, side)
        shape = (2, 2, B, 2, batch.ids.shape[1], 8)
        new = torch.randn(shape, generator=torch.Generator().manual_seed(salt))
        new *= torch.tensor([0.01, 1.0, 100.0])[torch.randint(3, shape[:-1])][..., None]
        passed = [
            torch.cat([row, rounded(new[:, :, b, :, batch.pos[b] >= 0])], 3)
            for b, row in enumerate(held)
        ]
        for layer in (0, 1):
            kv = cache.append(layer, *new[:, layer], batch)
            assert kv.k.dtype == torch.float32 and kv.k.isfinite().all() and kv.v.isfinite().all()
            for b, row in enumerate(passed):
                n = row.shape[3]
                assert kv.pos[b, :n].tolist() == list(range(n)) and (kv.pos[b, n:] == -1).all()
                assert torch.equal(kv.k[b][:, :n], row[0, layer])
                assert torch.equal(kv.v[b][:, :n], row[1, layer])
        if what == "keep":
            keep = torch.full((B, max(1, *kept)), -1)
            for b, n in enumerate(kept):
                first = int((batch.pos[b] < 0).sum()) if side == "left" else 0
                keep[b, :n] = first + torch.arange(n)
            cache.commit(keep)
            held = [row[:, :, :, : m + n] for row, m, n in zip(passed, lengths, kept, strict=True)]
        elif what != "abandon":
            cache.commit()
            held = passed
    assert cache.seen.tolist() == [row.shape[3] for row in held]
    for b, row in enumerate(held):
        n = row.shape[3]
        for numbers, scales, want in (
            (cache.keys, cache.key_scale, row[0]),
            (cache.values, cache.value_scale, row[1]),
        ):
            got = restore_tokens(numbers[:, b, :, :n], scales[:, b, :, :n], torch.float32)
            assert torch.equal(got, want)


@settings(max_examples=10)
@given(
    length=st.integers(1, CONTEXT),
    cuts=st.sets(st.integers(1, CONTEXT - 1), max_size=6),
    look=st.booleans(),
)
def test_where_a_text_is_cut_makes_no_difference(length, cuts, look):
    """New tokens are handed out rounded too: else a prompt at once and in pieces would be two different texts.

    A number that lies between two steps may fall on either side when a product adds in another order, hence the tolerance.
    """
    ids = random_ids(length, V)
    edges = [0, *sorted(c for c in cuts if c < length), length]
    cache = make(look=look)
    pieces = [feed(ids[a:b], cache, a) for a, b in zip(edges, edges[1:], strict=False)]
    assert_close(torch.cat(pieces), reference(ids), rtol=0, atol=2e-3)


def test_ragged_rows_equal_the_rows_alone():
    texts = [random_ids(n, V, seed=n) for n in (9, 4, 12)]
    for side in ("left", "right"):
        cache = make(3)
        batch = padded(texts, [0, 0, 0], side)
        out = logits_of(batch, cache)
        cache.commit()
        for b, text in enumerate(texts):
            assert_close(out[b, batch.pos[b] >= 0], reference(text), rtol=0, atol=2e-3)
        assert cache.seen.tolist() == [9, 4, 12]


@pytest.mark.parametrize("padding", [0, 1])
def test_a_tree_of_drafts_takes_its_scales_along(padding):
    texts, nodes = [random_ids(n, V, seed=n) for n in (9, 4)], random_ids(len(TREE), V, seed=77)
    cache = make(2)
    logits_of(padded(texts, [0, 0]), cache)
    cache.commit()
    out = logits_of(tree_batch([9, 4], nodes, padding), cache)
    for b, text in enumerate(texts):
        for node in range(len(TREE)):
            alone = reference(text + [nodes[i] for i in path_to(node)])
            assert_close(out[b, padding + node], alone[-1], rtol=0, atol=2e-3)
    kept = [path_to(5), path_to(2)]
    keep = torch.tensor([[*(padding + i for i in p), *[-1] * (3 - len(p))] for p in kept])
    cache.commit(keep)
    texts = [text + [nodes[i] for i in p] for text, p in zip(texts, kept, strict=True)]
    more = random_ids(3, V, seed=5)
    out = logits_of(padded([more] * 2, [len(t) for t in texts]), cache)
    for b, text in enumerate(texts):
        assert_close(out[b], reference(text + more)[-3:], rtol=0, atol=2e-3)


def test_moved_tokens_keep_their_scales():
    """One head, drafts of very different size: the kept path is 1000, 1e6, and their scales have to come along."""
    cache = make(1, like=config(num_hidden_layers=1, num_key_value_heads=1))
    batch = tree_batch([0], [1] * len(TREE))
    sizes = 10.0 ** torch.arange(len(TREE))
    k = sizes.view(1, 1, -1, 1).expand(1, 1, -1, 8)
    cache.append(0, k, -k, batch)
    cache.commit(torch.tensor([path_to(5)]))  # nodes 1, 3, 5
    kv = cache.append(0, k[:, :, :1], k[:, :, :1], single([3], 3))
    assert_close(kv.k[0, 0, :4, 0], torch.tensor([1e1, 1e3, 1e5, 1.0]), rtol=0.01, atol=0)
    assert_close(kv.v[0, 0, :3, 0], -torch.tensor([1e1, 1e3, 1e5]), rtol=0.01, atol=0)


def test_roll_back_and_go_on():
    ids = random_ids(20, V)
    cache = make()
    feed(ids[:15], cache)
    cache.truncate(6)
    other = ids[:6] + random_ids(9, V, seed=3)
    assert_close(feed(other[6:], cache, 6), reference(other)[6:], rtol=0, atol=2e-3)
    with pytest.raises(CacheError, match="has seen 15 tokens"):
        feed([1], cache, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """It hands out what the model computes in, and is off from the float cache by less than a percent."""
    model = Transformer(config(head_dim=16)).to(dtype).requires_grad_(False)
    ids, cache = random_ids(30, V), make(like=model.config, dtype=dtype)
    pieces = [feed(ids[a:b], cache, a, model) for a, b in ((0, 9), (9, 10), (10, 30))]
    whole = uncached(ids, model).double()
    assert pieces[0].dtype == dtype and cache.keys.dtype == torch.int8
    assert (torch.cat(pieces).double() - whole).norm() / whole.norm() < 2e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_numbers_come_back_finite(dtype):
    """The scale of 65504 is rounded up, and 127 of it are more than float16 holds."""
    largest = min(torch.finfo(dtype).max, 1e38)
    row = torch.tensor([[largest, -largest, largest / 3]], dtype=dtype)
    back = rounded(row)
    assert back.isfinite().all() and back.dtype == dtype
    assert ((back.double() - row.double()).abs() <= largest / 127).all()
    assert rounded(torch.tensor([[math.inf, 1.0]], dtype=dtype)).isnan().any(), "and shows"


def test_padding_and_gradients():
    cache = make(2)
    k = torch.full((2, 2, 3, 8), math.nan, requires_grad=True)
    pos = torch.full((2, 3), -1)
    batch = padded([[], []], [0, 0], width=3)
    assert batch.pos.equal(pos)
    kv = cache.append(0, k, k, batch)
    cache.commit()
    assert not kv.k.requires_grad
    kv = cache.append(0, torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8), padded([[1], [1]], [0, 0]))
    assert kv.k.isfinite().all(), "padding lies where nobody looks, NaN or not"


# ---- bytes


def test_bytes_by_formula_and_as_measured():
    c = config()
    assert int8_cache_bytes(c, 1) == 2 * 2 * 2 * (8 + 2), "2 · layers · heads · (D + 2)"
    assert int8_cache_bytes(c, 10, 3) == 30 * int8_cache_bytes(c, 1)
    cache = make(3)
    assert isinstance(cache, SlotCache) and isinstance(cache, Cache)
    for tokens in (5, 20):
        cache.truncate(0)
        logits_of(padded([random_ids(tokens, V)] * 3, [0] * 3), cache)
        cache.commit()
        parts = (cache.keys, cache.values, cache.key_scale, cache.value_scale)
        assert cache.bytes == sum(x.untyped_storage().nbytes() for x in parts)
        assert cache.bytes == int8_cache_bytes(c, cache.capacity + 1, 3)
    assert cache.key_scale.shape == cache.keys.shape[:-1]


def test_growth_counts_what_it_moves():
    cache, c = make(), config()
    feed(random_ids(10, V), cache)
    assert cache.bytes_copied == 0
    feed(random_ids(10, V), cache, 10)  # 15 slots become 31
    assert cache.bytes_copied == int8_cache_bytes(c, 10)


def test_a_quarter_of_float32(default_folder):
    from llm_engine.config import load_config

    real = load_config(default_folder)
    assert int8_cache_bytes(real, 1) == 11_880
    assert int8_cache_bytes(real, 1) / cache_bytes(real, 1, torch.float32) == 66 / 256


# ---- the engine and the real model


def test_perplexity_of_the_real_model_within_half_a_percent(engine):
    """The gate of chapter 32, on pieces of Python's documentation.

    One text of 250 tokens alone moves by up to 0.7 %, up as often as down: rounding is noise, so several are averaged.
    """
    from pydoc_data.topics import topics

    losses = {"growing": 0.0, "int8": 0.0}
    for topic in ("import", "function", "for", "if", "atom-identifiers"):
        ids = engine.tokenizer.encode(topics[topic])[:200]
        every = torch.arange(len(ids))[None]
        for name in losses:
            cache = CACHES[name](engine.config, 1, "cpu", torch.float32)
            logits = TorchRunner(engine.model).logits(single(ids), cache, every)[0]
            losses[name] += torch.nn.functional.cross_entropy(
                logits[:-1], torch.tensor(ids[1:])
            ).item()
    change = math.exp((losses["int8"] - losses["growing"]) / 5) - 1
    assert 0 < abs(change) < 5e-3


def test_the_engine_takes_it_by_name(engine):
    fast = Engine(engine.model, engine.tokenizer, cache="int8", runner="torch")
    done = fast.generate("The capital of France is", SamplingParams(max_new_tokens=6))
    assert done.text.startswith(" Paris.")
    assert done.positions_computed == len(done.prompt_ids) + len(done.token_ids) - 1


def test_what_the_default_runner_does_with_it(engine):
    """By kernels of its own or by torch: the text is the same."""
    both = []
    for runner in ("torch", "auto"):
        other = Engine(engine.model, engine.tokenizer, cache="int8", runner=runner)
        both.append(other.generate("2, 4, 6, 8,", SamplingParams(max_new_tokens=5)).token_ids)
    assert both[0] == both[1]
