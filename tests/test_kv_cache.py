"""The caches: what they hold against a plain dictionary, cached against uncached, limits, errors, counters, the real model."""

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parity import PROMPTS, VARIANTS, random_ids
from tiny_folder import write_tiny_folder
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from llm_engine import CacheError, Chat, Engine, SamplingParams
from llm_engine.attention import CACHES, Batch, Cache, NoCache, single
from llm_engine.config import ModelConfig, RopeConfig, read_llama
from llm_engine.kv_cache import (
    ConcatCache,
    GrowingCache,
    SlotCache,
    Stage,
    StaticCache,
    cache_bytes,
    grown,
)
from llm_engine.transformer import TorchRunner, Transformer, load_model
from llm_engine.verify import load_reference, tiny_model

CONTEXT = 40
V = 99
SLOTS = ["static", "growing"]
KINDS = ["concat", *SLOTS]


def config(**changes) -> ModelConfig:
    sizes = {
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
    }
    return ModelConfig(**{**sizes, **changes})


def make(kind, rows=1, like=None, look=True, dtype=torch.float32):
    """A cache by name. `look=False`: it behaves as on a GPU, where it may not look at numbers."""
    cache = CACHES[kind](like or config(), rows, torch.device("cpu"), dtype)
    if not look and kind != "concat":
        cache._may_look = False
    return cache


MODEL = Transformer(config()).eval().requires_grad_(False)


def logits_of(batch, cache, model=MODEL):
    """Logits [B, T, V] of one pass, committed or not by the caller."""
    every = torch.arange(batch.ids.shape[1]).expand_as(batch.ids)
    return TorchRunner(model).logits(batch, cache, every)


def uncached(ids, model=MODEL):
    """Logits [T, V] of a text, computed at once."""
    none = NoCache(model.config, 1, "cpu", model.embed.weight.dtype)
    return logits_of(single(list(ids)), none, model)[0]


def feed(ids, cache, start=0, model=MODEL):
    out = logits_of(single(list(ids), start), cache, model)[0]
    cache.commit()
    return out


def padded(rows, starts, side="right", width=None):
    """Rows of different length in one batch."""
    width = width or max(1, *map(len, rows))
    ids, pos = torch.full((2, len(rows), width), -1)
    ids += 8  # padding is some token, too
    for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
        at = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[b, at], pos[b, at] = torch.tensor(row, dtype=torch.long), torch.arange(len(row)) + start
    return Batch(ids, pos)


# ---- against a dictionary: whatever is done, each row holds what it should


@st.composite
def histories(draw):
    """A number of rows and what is done to them: passes with padding, partly kept ones, abandoned ones, rollbacks."""
    rows, steps = draw(st.integers(1, 3)), []
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["pass", "pass", "pass", "keep", "abandon", "truncate"]))
        if kind == "truncate":
            each = st.integers(0, CONTEXT)
            to = draw(each | st.lists(each, min_size=rows, max_size=rows))
            steps.append((kind, to))
        else:
            counts = draw(st.lists(st.integers(0, 6), min_size=rows, max_size=rows))
            kept = [draw(st.integers(0, n)) for n in counts]
            steps.append((kind, counts, draw(st.sampled_from(["left", "right"])), kept))
    return rows, steps


def numbers(batch, salt):
    """Keys and values [2, L = 2, B, K = 2, T, D = 8] that differ for every layer, row, head, pass and place."""
    B, T = batch.ids.shape
    return torch.arange(2 * 2 * B * 2 * T * 8).view(2, 2, B, 2, T, 8) + 100_000.0 * (salt + 1)


@pytest.mark.parametrize("look", [True, False], ids=["cpu", "as on a gpu"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(history=histories())
def test_each_row_holds_what_it_should(kind, look, history):
    B, steps = history
    cache = make(kind, B, look=look)
    held = [torch.zeros(2, 2, 2, 0, 8)] * B  # of each row: keys and values, layer, head, position
    for salt, (what, *how) in enumerate(steps):
        lengths = [row.shape[3] for row in held]
        if what == "truncate":
            to = how[0] if isinstance(how[0], list) else [how[0]] * B
            cache.truncate(torch.tensor(to) if isinstance(how[0], list) else how[0])
            held = [row[:, :, :, :n] for row, n in zip(held, to, strict=True)]
        else:
            counts, side, kept = how
            counts = [min(n, CONTEXT - m) for n, m in zip(counts, lengths, strict=True)]
            kept = [min(n, m) for n, m in zip(kept, counts, strict=True)]
            batch = padded([[1] * n for n in counts], lengths, side)
            new = numbers(batch, salt)
            passed = [
                torch.cat([row, new[:, :, b, :, batch.pos[b] >= 0]], 3)
                for b, row in enumerate(held)
            ]
            for layer in (0, 1):
                kv = cache.append(layer, *new[:, layer], batch)
                check_kv(kv, layer, passed, ordered=kind != "concat")
            if kind == "static":
                assert kv.k.shape[2] == cache.capacity
            if what == "abandon":
                continue
            if what == "keep":
                keep = torch.full((B, max(1, *kept)), -1)
                for b, n in enumerate(kept):
                    first = int((batch.pos[b] < 0).sum()) if side == "left" else 0
                    keep[b, :n] = first + torch.arange(n)
                cache.commit(keep)
                ends = [m + n for m, n in zip(lengths, kept, strict=True)]
                held = [row[:, :, :, :end] for row, end in zip(passed, ends, strict=True)]
            else:
                cache.commit()
                held = passed
        assert cache.seen.tolist() == [row.shape[3] for row in held]
        if kind != "concat":
            check_slots(cache, held)


def check_kv(kv, layer, rows, ordered):
    assert kv.k.shape[2] == kv.v.shape[2] == kv.pos.shape[1]
    assert kv.k.isfinite().all() and kv.v.isfinite().all()
    for b, row in enumerate(rows):
        slots = (kv.pos[b] >= 0).nonzero()[:, 0]
        slots = slots[kv.pos[b, slots].argsort()]  # in the order of positions
        assert kv.pos[b, slots].tolist() == list(range(row.shape[3])), "each position once"
        assert not ordered or slots.tolist() == list(range(row.shape[3]))
        assert torch.equal(kv.k[b][:, slots], row[0, layer])
        assert torch.equal(kv.v[b][:, slots], row[1, layer])


def check_slots(cache, rows):
    """After a commit, slot p holds position p, and there is nothing behind."""
    slots = torch.arange(cache.capacity + 1)
    expected = torch.stack([torch.where(slots < row.shape[3], slots, -1) for row in rows])
    assert torch.equal(cache.pos, expected)
    for b, row in enumerate(rows):
        assert torch.equal(cache.keys[:, b, :, : row.shape[3]], row[0])
        assert torch.equal(cache.values[:, b, :, : row.shape[3]], row[1])


# ---- cached equals uncached


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(
    length=st.integers(1, CONTEXT),
    cuts=st.sets(st.integers(1, CONTEXT - 1), max_size=8),
    look=st.booleans(),
)
def test_chunked_equals_whole_for_any_split(kind, length, cuts, look):
    ids = random_ids(length, V)
    edges = [0, *sorted(c for c in cuts if c < length), length]
    cache = make(kind, look=look)
    pieces = [feed(ids[a:b], cache, a) for a, b in zip(edges, edges[1:], strict=False)]
    assert_close(torch.cat(pieces), uncached(ids))
    assert cache.seen.tolist() == [length]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    steps=st.lists(st.integers(0, 15), max_size=4),
    side=st.sampled_from(["left", "right"]),
    look=st.booleans(),
)
def test_ragged_rows_equal_the_rows_alone(kind, lengths, steps, side, look):
    """A padded prompt, then single tokens, where in each step only some of the rows go on (bits of `steps`)."""
    B = len(lengths)
    texts = [random_ids(n + len(steps), V, seed=b) for b, n in enumerate(lengths)]
    alone = [uncached(text) for text in texts]
    cache, at = make(kind, B, look=look), [0] * B
    for news in [lengths, *([bits >> b & 1 for b in range(B)] for bits in steps)]:
        batch = padded(
            [text[a : a + n] for text, a, n in zip(texts, at, news, strict=True)], at, side
        )
        out = logits_of(batch, cache)
        cache.commit()
        assert out.isfinite().all()
        for b, n in enumerate(news):
            assert_close(out[b, batch.pos[b] >= 0], alone[b][at[b] : at[b] + n])
            at[b] += n
    assert cache.seen.tolist() == at


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(first=st.integers(1, 20), back=st.integers(0, 20), more=st.integers(1, 20))
def test_truncate_then_go_on_equals_a_fresh_start(kind, first, back, more):
    back = min(first, back)
    old, new = random_ids(first, V), random_ids(more, V, seed=2)
    cache = make(kind)
    feed(old, cache)
    cache.truncate(back)
    assert cache.seen.tolist() == [back]
    assert_close(feed(new, cache, back), uncached(old[:back] + new)[back:])


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "dynamic"])
def test_every_random_variant_gives_the_same_logits(name):
    """Head counts, rope types, biases, sizes: within assert_close's float32 defaults, for each cache, chunked."""
    sizes = {"vocab_size": V, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model = Transformer(read_llama({**sizes, **heads, **VARIANTS[name]})).requires_grad_(False)
    ids, edges = random_ids(45, V), (0, 1, 2, 20, 37, 45)
    whole = uncached(ids, model)
    for kind in KINDS:
        cache = make(kind, like=model.config)
        pieces = [feed(ids[a:b], cache, a, model) for a, b in zip(edges, edges[1:], strict=False)]
        assert_close(torch.cat(pieces), whole, msg=lambda text, kind=kind: f"{kind}: {text}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind, dtype):
    """Cached and uncached are both within 1e-2 of the float32 model's logits, and so of each other."""
    model = Transformer(config(head_dim=16)).to(dtype).requires_grad_(False)
    ids = random_ids(30, V)
    cache = make(kind, like=model.config, dtype=dtype)
    pieces = [feed(ids[a:b], cache, a, model) for a, b in ((0, 9), (9, 10), (10, 30))]
    whole = uncached(ids, model)
    assert pieces[0].dtype == dtype
    off = (torch.cat(pieces).double() - whole.double()).norm() / whole.double().norm()
    assert off < 1e-2
    if kind != "concat":
        assert cache.keys.dtype == cache.values.dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_the_sdpa_kernel_goes_with_every_cache(kind):
    ids = random_ids(20, V)
    for layer in MODEL.layers:
        layer.attn.kernel = "sdpa"
    try:
        cache = make(kind)
        pieces = [feed(ids[:11], cache), feed(ids[11:12], cache, 11), feed(ids[12:], cache, 12)]
    finally:
        for layer in MODEL.layers:
            layer.attn.kernel = "eager"
    assert_close(torch.cat(pieces), uncached(ids))


# ---- drafts

TREE = [-1, -1, 0, 1, 1, 3]  # parent of each node; nodes 0 and 1 stand side by side


def tree_batch(starts, ids, padding=0):
    """The nodes of TREE in each row, behind `padding` empty places."""
    T, depth, sees = len(TREE) + padding, [], torch.eye(len(TREE), dtype=torch.bool)
    for node, parent in enumerate(TREE):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        if parent >= 0:
            sees[node] |= sees[parent]
    tree = torch.zeros(len(starts), T, T, dtype=torch.bool)
    tree[:, padding:, padding:] = sees
    pos = torch.full((len(starts), T), -1)
    for b, start in enumerate(starts):
        pos[b, padding:] = torch.tensor(depth) + start
    ids = torch.tensor([[5] * padding + ids] * len(starts))
    return Batch(ids, pos, tree)


def path_to(node):
    return [] if node < 0 else [*path_to(TREE[node]), node]


@pytest.mark.parametrize("look", [True, False], ids=["cpu", "as on a gpu"])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_of_drafts_and_the_path_that_is_kept(kind, padding, look):
    """Each node's logits are those of its own path; after the commit, it is as if only the kept path had been fed."""
    texts = [random_ids(n, V, seed=n) for n in (9, 4, 6)]
    nodes = random_ids(len(TREE), V, seed=77)
    cache = make(kind, 3, look=look)
    logits_of(padded(texts, [0, 0, 0]), cache)
    cache.commit()
    batch = tree_batch([9, 4, 6], nodes, padding)
    out = logits_of(batch, cache)
    for b, text in enumerate(texts):
        for node in range(b, len(TREE), 2):
            alone = uncached(text + [nodes[i] for i in path_to(node)])
            assert_close(out[b, padding + node], alone[-1])
    kept = [path_to(5), path_to(2), []]
    keep = torch.tensor([[*(padding + i for i in p), *[-1] * (3 - len(p))] for p in kept])
    cache.commit(keep)
    texts = [text + [nodes[i] for i in p] for text, p in zip(texts, kept, strict=True)]
    assert cache.seen.tolist() == [len(t) for t in texts] == [12, 6, 6]
    more = random_ids(3, V, seed=5)
    out = logits_of(padded([more] * 3, [12, 6, 6]), cache)
    cache.commit()
    for b, text in enumerate(texts):
        assert_close(out[b], uncached(text + more)[-3:])
    cache.truncate(torch.tensor([10, 5, 6]))
    out = logits_of(padded([more] * 3, [10, 5, 6]), cache)
    for b, text in enumerate(texts):
        assert_close(out[b], uncached(text[: (10, 5, 6)[b]] + more)[-3:])


@pytest.mark.parametrize("kind", SLOTS)
def test_a_chain_may_be_kept_whole(kind):
    """commit() without `keep` after a tree pass keeps all nodes, which is possible when they follow one another."""
    cache, ids = make(kind), random_ids(12, V)
    feed(ids[:5], cache)
    chain = single(ids[5:9], 5)._replace(tree=torch.ones(1, 4, 4).tril().bool())
    assert_close(feed_batch(chain, cache), uncached(ids[:9])[5:])
    assert cache.seen.tolist() == [9]
    assert_close(feed(ids[9:], cache, 9), uncached(ids)[9:])
    cache.truncate(5)
    logits_of(tree_batch([5], random_ids(6, V)), cache)
    with pytest.raises(
        CacheError, match=r"follow one another.*\[\[5, 6, 7, 8, 9, 10\]\], not \[\["
    ):
        cache.commit()


def feed_batch(batch, cache):
    out = logits_of(batch, cache)[0]
    cache.commit()
    return out


@pytest.mark.parametrize("keep", [[[1]], [[0, 2]], [[1, 0]], [[0, 0]]])
@pytest.mark.parametrize("kind", SLOTS)
def test_what_is_kept_must_follow_one_another(kind, keep):
    cache, ids = make(kind), random_ids(6, V)
    feed(ids[:2], cache)
    logits_of(single(ids[2:5], 2), cache)
    with pytest.raises(CacheError, match="kept tokens must follow one another"):
        cache.commit(torch.tensor(keep))
    cache.commit(torch.tensor([[0, -1]]))  # the pass is still there
    assert cache.seen.tolist() == [3]
    assert_close(feed(ids[3:], cache, 3), uncached(ids)[3:])


def test_a_tree_may_go_past_the_context_in_slots_but_not_in_positions():
    cache = make("growing")
    feed(random_ids(CONTEXT - 3, V), cache)
    logits_of(tree_batch([CONTEXT - 3], random_ids(6, V)), cache)  # 6 nodes, depth 3
    assert cache.capacity >= CONTEXT + 3
    cache.commit(torch.tensor([[0, 2]]))
    assert cache.seen.tolist() == [CONTEXT - 1]
    with pytest.raises(CacheError, match=f"position {CONTEXT + 1} .*context of {CONTEXT}"):
        logits_of(tree_batch([CONTEXT - 1], random_ids(6, V)), cache)
    static = StaticCache(config(), 1, "cpu", torch.float32, capacity=10)
    feed(random_ids(5, V), static)
    with pytest.raises(CacheError, match="room for 10 tokens a row, and 11 are needed"):
        logits_of(tree_batch([5], random_ids(6, V)), static)


# ---- passes that do not end


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_was_not_committed_leaves_no_trace(kind):
    cache, ids = make(kind), random_ids(20, V)
    feed(ids[:7], cache)
    logits_of(single(random_ids(9, V, seed=4), 7), cache)  # given up
    assert_close(feed(ids[7:9], cache, 7), uncached(ids[:9])[7:])
    logits_of(single(random_ids(9, V, seed=5), 9), cache)
    cache.truncate(8)
    assert cache.seen.tolist() == [8]
    cache.commit()  # nothing is staged any more
    assert cache.seen.tolist() == [8]
    assert_close(feed(ids[8:], cache, 8), uncached(ids)[8:])


@pytest.mark.parametrize("kind", SLOTS)
def test_an_error_in_the_middle_of_a_pass_can_be_recovered_from(kind):
    cache, ids = make(kind), random_ids(12, V)
    feed(ids[:5], cache)
    hook = MODEL.layers[1].register_forward_pre_hook(lambda *a: 1 / 0)
    batch = single(ids[5:8], 5)
    with pytest.raises(ZeroDivisionError):
        logits_of(batch, cache)
    hook.remove()
    assert_close(feed_batch(batch, cache), uncached(ids[:8])[5:])  # the same batch, once more
    assert_close(feed(ids[8:], cache, 8), uncached(ids)[8:])


def test_padding_never_touches_what_is_seen():
    """Even a NaN in a padding place stays where nobody looks, also when the row is full to the last slot."""
    for kind in SLOTS:
        cache = make(kind, 2)
        k = torch.ones(2, 2, CONTEXT, 8)
        full = padded([[1] * CONTEXT, [1] * 3], [0, 0])
        nan = k.clone()
        nan[1, :, 3:] = torch.nan
        for layer in (0, 1):
            kv = cache.append(layer, nan, nan, full)
            assert kv.k.isfinite().all() and kv.v.isfinite().all()
        cache.commit()
        step = padded([[], [4]], [CONTEXT, 3])
        k = torch.tensor([torch.nan, 2.0]).view(2, 1, 1, 1).expand(2, 2, 1, 8)
        kv = cache.append(0, k, k, step)
        assert torch.equal(kv.k[0, :, :CONTEXT], torch.ones(2, CONTEXT, 8))
        assert kv.pos[1, :5].tolist() == [0, 1, 2, 3, -1] and (kv.k[1, :, 3] == 2).all()
        cache.commit()
        assert cache.seen.tolist() == [CONTEXT, 4]


def test_a_model_with_gradients_can_use_a_cache():
    """Who calls a fresh model without no_grad gets the same numbers, and a cache that holds no graph."""
    model, ids = Transformer(config()), random_ids(9, V)
    for kind in SLOTS:
        cache, none = make(kind), NoCache(config(), 1, "cpu", torch.float32)
        with torch.enable_grad():
            model(single(ids[:8]), cache)
            cache.commit()
            out = model(single(ids[8:], 8), cache)
            assert_close(out[0, -1], model(single(ids), none)[0, -1])
        assert not cache.keys.requires_grad and not cache.values.requires_grad


# ---- for runners that write by themselves


@pytest.mark.parametrize("look", [True, False], ids=["cpu", "as on a gpu"])
@pytest.mark.parametrize("kind", SLOTS)
def test_a_runner_may_stage_and_write_by_itself(kind, look):
    by_hand, appended = make(kind, 2, look=look), make(kind, 2, look=look)
    for lengths, starts in (
        ((5, 3), (0, 0)),
        ((1, 1), (5, 3)),
        ((14, 0), (6, 4)),
        ((1, 1), (20, 4)),
    ):
        batch = padded([[1] * n for n in lengths], starts)
        stage = by_hand.stage(batch)
        assert isinstance(stage, Stage) and torch.equal(stage.slots, batch.pos)
        assert stage.used >= max(a + n for a, n in zip(starts, lengths, strict=True))
        if kind == "growing" and look:
            assert stage.used == max(a + n for a, n in zip(starts, lengths, strict=True))
        for layer in (0, 1):
            k, v = numbers(batch, sum(starts))[:, layer]
            for b, row in enumerate(stage.slots.tolist()):
                for t, slot in enumerate(row):
                    if slot >= 0:
                        by_hand.keys[layer, b, :, slot] = k[b, :, t]
                        by_hand.values[layer, b, :, slot] = v[b, :, t]
            kv = appended.append(layer, k, v, batch)
            assert torch.equal(kv.pos, by_hand.pos[:, : stage.used])
            seen = kv.pos[:, None, :, None] >= 0
            for mine, theirs in ((by_hand.keys, kv.k), (by_hand.values, kv.v)):
                assert torch.equal(mine[layer, :, :, : stage.used] * seen, theirs * seen)
        by_hand.commit(), appended.commit()
        assert torch.equal(by_hand.pos, appended.pos)


def test_the_names_that_runners_ask_for():
    for kind in SLOTS:
        assert isinstance(make(kind), SlotCache) and isinstance(make(kind), Cache)
        assert make(kind).keys.is_contiguous() and make(kind).values.is_contiguous()
    assert isinstance(make("concat"), Cache) and not isinstance(make("concat"), SlotCache)


def test_a_tree_lies_in_the_last_slots_that_are_handed_out():
    for kind in SLOTS:
        cache = make(kind, 2)
        feed_ragged = padded([[1] * 5, [1] * 2], [0, 0])
        logits_of(feed_ragged, cache)
        cache.commit()
        stage = cache.stage(tree_batch([5, 2], [1] * 6, padding=1))
        wanted = [-1, *range(stage.used - 6, stage.used)]
        assert stage.slots.tolist() == [wanted, wanted]
        assert stage.used == {"growing": 5 + 7, "static": CONTEXT}[kind]
        assert cache.pos[1, stage.used - 6 : stage.used].tolist() == [2, 2, 3, 3, 3, 4]


# ---- static: fixed memory, and nothing read


def test_a_static_cache_never_changes_its_tensors():
    cache = make("static", 2)
    names = ("keys", "values", "pos", "seen")
    before = {name: (getattr(cache, name), getattr(cache, name).data_ptr()) for name in names}
    logits_of(padded([[1] * 5, [1] * 2], [0, 0]), cache)
    cache.commit()
    logits_of(tree_batch([5, 2], [1] * 6), cache)
    cache.commit(torch.tensor([[1, 3], [0, -1]]))
    logits_of(padded([[1], []], [7, 3]), cache)
    cache.truncate(torch.tensor([4, 1]))
    cache.truncate(3)
    for name, (tensor, address) in before.items():
        assert getattr(cache, name) is tensor and tensor.data_ptr() == address
    assert cache.bytes_copied == 0


def test_a_static_cache_reads_no_number_of_a_device():
    """On the meta device there are no numbers: a look at one raises. Prefill, single tokens, a tree, and commit()."""
    with torch.device("meta"), torch.no_grad():
        model = Transformer(config())
        cache = StaticCache(config(), 2, "meta", torch.float32)
        for T, tree in (
            (7, None),
            (1, None),
            (1, None),
            (4, torch.ones(2, 4, 4).bool()),
            (1, None),
        ):
            batch = Batch(torch.zeros(2, T).long(), torch.zeros(2, T).long(), tree)
            hidden = model(batch, cache)
            assert hidden.shape == (2, T, 32)
            if tree is None:
                cache.commit()
        with pytest.raises(RuntimeError, match="meta"):
            int(cache.seen[0])  # the test can tell


def test_on_a_device_it_looks_only_when_the_simple_bound_does_not_do(monkeypatch):
    cache = StaticCache(config(), 2, "cpu", torch.float32, capacity=12)
    cache._may_look, looks = False, []
    look = StaticCache._look
    monkeypatch.setattr(StaticCache, "_look", lambda *a: looks.append(1) or look(*a))
    lengths = [0, 0]
    for step in range(14):  # row 0 and row 1 in turn, so no row gets more than 7 tokens
        new = [[1], []] if step % 2 == 0 else [[], [1]]
        logits_of(padded(new, lengths), cache)
        cache.commit()
        lengths[step % 2] += 1
        assert cache.seen.tolist() == lengths
    assert len(looks) == 1  # at the 13th token; then it knows better
    with pytest.raises(CacheError, match="room for 12 tokens a row, and 13 are needed"):
        logits_of(padded([[1] * 6, []], lengths), cache)


def test_a_pass_stages_once_and_then_copies_twice_a_layer():
    """What a pass of one token costs, as a count of torch calls: two copies and no more than a few views a layer."""

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    deep = config(num_hidden_layers=30)
    cache, k = make("growing", like=deep), torch.ones(1, 2, 1, 8)
    for at in range(3):
        batch = single([1], at)
        with Count() as count:
            for layer in range(30):
                cache.append(layer, k, k, batch)
            cache.commit()
    assert count.calls["copy_"] in (60, 61)
    assert count.calls.total() < 60 + 40, count.calls


# ---- memory


def test_bytes_by_formula_and_as_measured():
    like = config()
    assert cache_bytes(like, 1, torch.float32) == 2 * 2 * 2 * 8 * 4
    assert cache_bytes(like, 10, torch.bfloat16, batch_size=3) == 2 * 2 * 3 * 2 * 8 * 10 * 2
    concat = make("concat")
    for n in (0, 5, 17):
        if n:
            feed([1] * (n - int(concat.seen[0])), concat, int(concat.seen[0]))
        kept = [t for kv in concat.kept.values() for t in kv[:2]]
        assert concat.bytes == cache_bytes(like, n, torch.float32)
        assert concat.bytes == sum(t.numel() * 4 for t in kept)
    for kind in SLOTS:
        cache = make(kind, 3, dtype=torch.bfloat16)
        cache.append(0, *torch.ones(2, 3, 2, 9, 8), padded([[1] * 9] * 3, [0] * 3))
        assert cache.bytes == cache_bytes(like, cache.capacity + 1, torch.bfloat16, 3)
        assert cache.keys.shape == (2, 3, 2, cache.capacity + 1, 8) == cache.values.shape
        assert cache.pos.shape == (3, cache.capacity + 1)
    assert cache_bytes(config(num_attention_heads=8), 9, torch.float32) == cache_bytes(
        like, 9, torch.float32
    )


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_growth_holds_what_is_needed_doubles_and_respects_the_context(tokens, context):
    room = grown(tokens, context)
    assert room >= tokens
    assert room <= max(tokens, context)
    if context >= 2 * tokens + 16:
        assert room + 1 in (1 << i for i in range(4, 14))
        assert room <= max(15, 2 * tokens)


def test_a_growing_cache_copies_each_token_about_once():
    like = config(max_position_embeddings=4096)
    cache, one, sizes = make("growing", like=like), cache_bytes(like, 1, torch.float32), []
    assert cache.bytes == one  # the slot for padding, and nothing else
    for at in range(600):
        cache.stage(single([1], at))
        cache.commit()
        if cache.capacity not in sizes:
            sizes.append(cache.capacity)
    assert sizes == [15, 31, 63, 127, 255, 511, 1023]
    assert cache.bytes_copied == one * (15 + 31 + 63 + 127 + 255 + 511)
    whole = make("growing", like=like)
    whole.stage(single([1] * 600))
    assert (whole.capacity, whole.bytes_copied) == (1023, 0)


def test_concatenation_copies_everything_at_each_step():
    cache, one = make("concat"), cache_bytes(config(), 1, torch.float32)
    for at in range(30):
        feed([1], cache, at)
    assert cache.bytes_copied == one * sum(range(30))


def test_a_cache_made_in_inference_mode_works_outside_and_the_other_way_round():
    ids = random_ids(30, V)
    for kind in SLOTS:
        with torch.inference_mode():
            cache = make(kind)
            feed(ids[:3], cache)
        feed(ids[3:20], cache, 3)
        with torch.inference_mode():
            feed(ids[20:25], cache, 20)
            cache.truncate(22)
        assert_close(feed(ids[22:], cache, 22), uncached(ids)[22:])


# ---- limits and errors


@pytest.mark.parametrize("look", [True, False], ids=["cpu", "as on a gpu"])
@pytest.mark.parametrize("kind", SLOTS)
def test_the_context_can_be_filled_to_the_last_position_and_no_further(kind, look):
    """nanochat#520: with a cache, the check of the rope table looked at the new tokens' number and not at where they stand,
    so the last positions failed in an index error, or a table too short by one."""
    ids = random_ids(CONTEXT, V)
    cache = make(kind, look=look)
    pieces = [feed(ids[:-2], cache), feed(ids[-2:-1], cache, CONTEXT - 2)]
    pieces.append(feed(ids[-1:], cache, CONTEXT - 1))
    assert_close(torch.cat(pieces), uncached(ids))
    assert cache.seen.tolist() == [CONTEXT] == [cache.capacity]
    for new in (1, 5):
        with pytest.raises(
            CacheError,
            match=rf"position {CONTEXT + new - 1} is outside.*{CONTEXT} \(0..{CONTEXT - 1}\).*truncate",
        ):
            logits_of(single([1] * new, CONTEXT), cache)
    assert cache.seen.tolist() == [CONTEXT]
    cache.truncate(CONTEXT - 1)
    assert_close(feed(ids[-1:], cache, CONTEXT - 1), uncached(ids)[-1:])


def test_on_a_device_the_context_counts_also_where_there_is_room_for_more():
    cache = StaticCache(config(), 1, "cpu", torch.float32, capacity=CONTEXT + 10)
    cache._may_look = False
    feed(random_ids(CONTEXT, V), cache)
    with pytest.raises(CacheError, match=f"position {CONTEXT} is outside"):
        logits_of(single([1], CONTEXT), cache)


@pytest.mark.parametrize("back", [3, torch.tensor([3])])
@pytest.mark.parametrize("look", [True, False], ids=["cpu", "as on a gpu"])
def test_after_a_rollback_no_more_slots_are_handed_out_than_before(look, back):
    cache = make("growing", look=look)
    feed(random_ids(20, V), cache)
    cache.truncate(back)
    assert cache.stage(single([1], 3)).used == 4


def test_a_small_static_cache_says_what_fits():
    cache = StaticCache(config(), 1, "cpu", torch.float32, capacity=8)
    feed(random_ids(8, V), cache)
    with pytest.raises(CacheError, match="room for 8 tokens a row, and 9 are needed.*growing"):
        logits_of(single([1], 8), cache)
    with pytest.raises(CacheError, match="room for -1"):
        StaticCache(config(), 1, "cpu", torch.float32, capacity=-1)
    assert issubclass(CacheError, ValueError)


@pytest.mark.parametrize("kind", SLOTS)
def test_chunks_must_go_on_where_the_cache_ends(kind):
    """transformers#43082: positions of a chunk were set from the chunk alone, so each but the first was turned wrongly."""
    ids = random_ids(12, V)
    cache = make(kind)
    feed(ids[:4], cache)
    for batch, shown in (
        (single(ids[4:8], 0), "0, 1, 2, 3"),
        (single(ids[4:10], 0), "0, 1, 2, 3, …"),
        (single(ids[4:6], 5), "5, 6"),
        (Batch(torch.tensor([[1, 1]]), torch.tensor([[5, 4]])), "5, 4"),
        (Batch(torch.tensor([[1, 1]]), torch.tensor([[4, 4]])), "4, 4"),
        (tree_batch([3], [1] * 6), "3, 3, 4, 4, …"),
    ):
        with pytest.raises(
            CacheError, match=f"row 0: this cache has seen 4 tokens.*not at {shown}[.]"
        ):
            logits_of(batch, cache)
    assert_close(feed(ids[4:], cache, 4), uncached(ids)[4:])
    two = make(kind, 2)
    with pytest.raises(CacheError, match="row 1: .* seen 0 .*not at 1"):
        logits_of(padded([[1], [1]], [0, 1]), two)
    with pytest.raises(CacheError, match="this cache has 2 rows, the batch has 1"):
        logits_of(single([1]), two)


@pytest.mark.parametrize("kind", SLOTS)
def test_a_rollback_to_less_than_nothing_is_refused(kind):
    cache = make(kind, 2)
    with pytest.raises(CacheError, match="cannot roll back to -1"):
        cache.truncate(-1)
    with pytest.raises(CacheError, match="cannot roll back to -3"):
        cache.truncate(torch.tensor([2, -3]))


# ---- the exception: dynamic NTK


def test_dynamic_ntk_is_exact_up_to_the_original_context_and_then_like_transformers(tmp_path):
    folder = tiny_model(tmp_path, seed=3, **VARIANTS["dynamic"])  # made for 32 positions
    model, reference = load_model(folder), load_reference(folder)
    from transformers import DynamicCache

    longer = dataclasses.replace(model.config, max_position_embeddings=48)
    cache, memory, ids = make("growing", like=longer), DynamicCache(), random_ids(48, V)
    for t, token in enumerate(ids):
        mine = feed([token], cache, t, model)[-1]
        with torch.inference_mode():
            theirs = reference(torch.tensor([[token]]), cache=memory).logits[0, -1]
        assert_close(mine, theirs)
        off = (mine - uncached(ids[: t + 1], model)[-1]).abs().max()
        assert off < 1e-4 if t < 32 else off > 1e-3


# ---- in the engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny model with a tokenizer, and engines around it by the name of their cache."""
    folder = write_tiny_folder(
        tmp_path_factory.mktemp("tiny") / "model", max_position_embeddings=160, eos_token_id=259
    )

    def engine(**options):
        return Engine.from_pretrained(folder, device="cpu", **{"runner": "torch", **options})

    return engine


def test_growing_is_what_the_engine_takes_when_nothing_is_named(tiny):
    assert CACHES.default == "growing"
    assert isinstance(tiny().new_cache(), GrowingCache)
    for name, kind in (("concat", ConcatCache), ("static", StaticCache), ("none", NoCache)):
        assert type(tiny(cache=name).new_cache()) is kind


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_is_really_on(tiny, kind, chunk):
    """LLMs-from-scratch#913 and #981: an optimization that was there and never switched on. Texts cannot show it, counters do."""
    prompt, n = "a prompt of some length", 30
    params = SamplingParams(max_new_tokens=n, ignore_eos=True)
    plain = tiny(cache="none").generate(prompt, params)
    engine = tiny(cache=kind, prefill_chunk=chunk)
    request = engine.start(prompt, params)
    *_, last = engine.run(request)
    P = len(request.prompt_ids)
    assert last.completion.token_ids == plain.token_ids
    assert plain.positions_computed == n * P + n * (n - 1) // 2
    assert last.completion.positions_computed == engine.runner.positions_computed == P + n - 1
    assert request.cache.seen.tolist() == [P + n - 1]
    held = cache_bytes(engine.config, P + n - 1, torch.float32)
    assert held <= request.cache.bytes
    if kind == "concat":
        assert request.cache.bytes == held


def test_the_answer_ends_exactly_at_the_context_limit(tiny):
    engine = tiny()
    request = engine.start([65] * 100, SamplingParams(max_new_tokens=1000, ignore_eos=True))
    *_, last = engine.run(request)
    assert (len(request.output_ids), last.finish_reason) == (60, "length")
    assert request.cache.seen.tolist() == [159]
    assert request.cache.capacity == 160
    # the position that the engine leaves free is there
    row = engine.runner.logits(single(request.ids[-1:], 159), request.cache, torch.tensor([[0]]))
    assert_close(row[0, 0], engine.logits(request.ids)[-1])


def test_a_conversation_computes_what_is_new(tiny):
    engine, params = (
        tiny(),
        SamplingParams(max_new_tokens=4, logit_bias=dict.fromkeys(range(128, 260), -99.0)),
    )
    talk, before = Chat(engine, params=params), None
    for text in ("one", "two", "three"):
        answer = talk.send(text)
        P, n = len(answer.prompt_ids), len(answer.token_ids)
        shared = 0
        if before is not None:
            fed = (before.prompt_ids + before.token_ids)[:-1]
            shared = next(
                (i for i, (a, b) in enumerate(zip(fed, answer.prompt_ids)) if a != b), len(fed)
            )
            assert shared > len(before.prompt_ids)
        assert answer.positions_computed == P + n - 1 - shared
        alone = engine.generate(answer.prompt_ids, params)
        assert alone.token_ids == answer.token_ids and alone.positions_computed == P + n - 1
        before = answer


def test_the_cache_knows_how_many_tokens_and_not_which(tiny):
    """Why requests compare token ids before they take a cache over: without it, an answer to another question."""
    engine = tiny()
    one, other = list(b"one question"), list(b"two answers!")
    cache = engine.new_cache()
    first = engine.step(one, cache)
    assert engine.step([*other[:-1], one[-1]], cache).argmax() == first.argmax()
    cache.truncate(0)
    assert_close(engine.step(other, cache), engine.step(other))


def test_nan_is_traced_to_its_module_with_the_cache_on(tiny):
    engine = tiny()
    weight = engine.model.layers[1].ffn.up_proj.weight
    stream = engine.stream("abc", SamplingParams(max_new_tokens=5, ignore_eos=True))
    next(stream)
    weight[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"after token 3 .*layers\.1\.ffn\.up_proj"):
        next(stream)


# ---- the default model


def test_cached_chunked_and_uncached_write_the_same_tokens(engine):
    """Ten prompts, float32, greedy, real weights."""
    prompts = [text for name, text in PROMPTS.items() if name != "long"]
    assert len(prompts) == 10
    cached = Engine(engine.model, engine.tokenizer, runner="torch")
    chunked = Engine(engine.model, engine.tokenizer, runner="torch", prefill_chunk=7)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    for text in prompts:
        plain = engine.generate(text, params)
        for other in (cached, chunked):
            done = other.generate(text, params)
            assert done.token_ids == plain.token_ids, text
            assert done.positions_computed == len(plain.prompt_ids) + 2


def test_real_logits_through_every_cache(engine):
    ids = engine.tokenizer.encode("The old dog slept by the door because it was tired.")
    whole = engine.logits(ids)
    for kind in KINDS:
        cache = make(kind, like=dataclasses.replace(engine.config, max_position_embeddings=64))
        pieces = [
            feed(ids[a:b], cache, a, engine.model) for a, b in ((0, 6), (6, 7), (7, len(ids)))
        ]
        assert (torch.cat(pieces) - whole).abs().max() < 1e-4


# ---- on a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_static_cache_goes_into_a_cuda_graph():
    device, ids = torch.device("cuda"), random_ids(20, V)
    model = Transformer(config()).to(device).requires_grad_(False)
    cache = StaticCache(config(), 1, device, torch.float32)
    whole = logits_of(single(ids), NoCache(config(), 1, device, torch.float32), model)[0]
    feed(ids[:8], cache, 0, model)
    batch = Batch(
        torch.zeros(1, 1, dtype=torch.long, device=device), torch.full((1, 1), 8, device=device)
    )

    def step():
        hidden = model(batch, cache)
        cache.commit()
        return model.lm_head(hidden)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        step()
    torch.cuda.current_stream().wait_stream(side)
    cache.truncate(8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        out = step()
    cache.truncate(8)
    for at in range(8, 20):
        batch.ids.fill_(ids[at]), batch.pos.fill_(at)
        graph.replay()
        assert_close(out[0, 0], whole[at], rtol=1e-4, atol=1e-4)
    assert cache.seen.tolist() == [20]


def test_rope_types_that_depend_on_the_position_alone_are_exact():
    for rope in (
        RopeConfig("linear", factor=4.0),
        RopeConfig("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
        RopeConfig("yarn", factor=4.0, original_max_position_embeddings=16),
        RopeConfig(partial_rotary_factor=0.5),
    ):  # fmt: skip
        model = Transformer(config(rope=rope)).eval().requires_grad_(False)
        ids, cache = random_ids(30, V), make("growing", like=model.config)
        pieces = [
            feed(ids[:13], cache, 0, model),
            *(feed([ids[i]], cache, i, model) for i in range(13, 30)),
        ]
        assert_close(torch.cat(pieces), uncached(ids, model))
