"""The compiled parts of the fast CPU runner, each against the plain torch it stands for."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm_engine import kernels
from llm_engine.config import ModelConfig
from llm_engine.kernels import Team, share, team_of
from llm_engine.norm import RMSNorm
from llm_engine.numba_runner import ONE_THREAD, use_huge_pages
from llm_engine.prefill import (
    Widened,
    as_array,
    attend_block,
    by_numpy,
    by_torch,
    divide,
    matmul,
    quickest_product,
)
from llm_engine.roofline import Machine, matmul_speed, read_bandwidth, token_bytes
from llm_engine.rope import rotate
from llm_engine.transformer import Transformer

NO_BIAS = np.empty(0, np.float32)


def line(weight, bias=None):
    """A weight's line of the table."""
    kind = kernels.FLOAT32 if weight.dtype == torch.float32 else kernels.BFLOAT16
    columns = weight.shape[-1]
    return np.array(
        [weight.data_ptr(), bias.data_ptr() if bias is not None else 0, kind, len(weight), columns]
    )


def in_turn(size, function, *arguments):
    """Every worker of a team, one after the other: good for kernels that do not meet."""
    for me in range(size):
        function(*arguments, me, size)


@given(st.integers(0, 50), st.integers(1, 7))
def test_shares_cover_everything_once_in_order(rows, team):
    ends = [share(rows, me, team) for me in range(team)]
    assert [i for first, last in ends for i in range(first, last)] == list(range(rows))
    assert max(b - a for a, b in ends) - min(b - a for a, b in ends) <= 1


@kernels.kernel
def _widen_all(stored, out):
    for i in range(len(stored)):
        out[i] = kernels.widen(stored[i])


@kernels.kernel
def _narrow_all(x, out):
    for i in range(len(x)):
        out[i] = kernels.narrow(x[i], out[i])


@kernels.kernel
def _exp_all(x, out):
    for i in range(len(x)):
        out[i] = kernels.fast_exp(x[i])


def test_every_bfloat16_is_widened_as_torch_does():
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out = np.empty(65536, np.float32)
    _widen_all(as_array(every), out)
    np.testing.assert_array_equal(out, every.float().numpy())


def test_float32_is_rounded_to_bfloat16_as_torch_does():
    bits = torch.randint(-(2**31), 2**31, (500_000,), generator=torch.Generator().manual_seed(0))
    ties = (torch.arange(65536) << 16) + 0x8000  # exactly between two
    x = torch.cat([bits, ties, ties - 1, ties + 1]).to(torch.int32).view(torch.float32)
    out = np.empty(len(x), np.uint16)
    _narrow_all(x.numpy(), out)
    ours, theirs = torch.from_numpy(out).view(torch.bfloat16), x.bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])


def test_exp_is_right_to_two_parts_in_ten_million_and_keeps_nan():
    x = np.linspace(-87, 88, 2_000_001, dtype=np.float32)
    out = np.empty_like(x)
    _exp_all(x, out)
    assert np.abs(out / np.exp(x.astype(np.float64)) - 1).max() < 2e-7
    ends = np.array([-np.inf, -1e30, 0, 1e30, np.inf, np.nan], np.float32)
    out = np.empty_like(ends)
    _exp_all(ends, out)
    assert (out[:2] < 1e-37).all() and (out[:2] >= 0).all() and out[2] == 1
    assert np.isfinite(out[3:5]).all() and (out[3:5] > 1e38).all() and np.isnan(out[5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, columns, R, team", [(7, 33, 1, 1), (64, 48, 3, 2), (1, 5, 2, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_product(dtype, rows, columns, R, team, biased):
    torch.manual_seed(rows)
    w, x = torch.randn(rows, columns).to(dtype), torch.randn(R, columns)
    bias = torch.randn(rows).to(dtype) if biased else None
    wanted = x @ w.float().T + (bias.float() if biased else 0)
    out = torch.full((R, rows), 9.0)
    in_turn(team, kernels.product, line(w, bias), x.numpy(), out.numpy(), False)
    torch.testing.assert_close(out, wanted)
    in_turn(team, kernels.product, line(w, bias), x.numpy(), out.numpy(), True)
    torch.testing.assert_close(out, 2 * wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_touches_its_rows_only(dtype):
    norm = RMSNorm(48, 0.3)
    norm.weight.data.normal_()
    norm.to(dtype)
    x, out = torch.randn(5, 48), torch.full((5, 48), 9.0)
    kernels.rms_norm(line(norm.weight), x.numpy(), np.float32(0.3), out.numpy(), 1, 4)
    wanted = RMSNorm(48, 0.3)
    wanted.weight.data = norm.weight.data.float()
    torch.testing.assert_close(out[1:4], wanted(x[1:4]))
    assert (out[[0, 4]] == 9).all()


def test_turn_leaves_what_partial_rotary_leaves():
    q, angle = torch.randn(3, 16), torch.randn(5)
    out = torch.empty(3, 16)
    kernels.turn(
        q.flatten().numpy(), angle.cos().numpy(), angle.sin().numpy(), np.float32(2), out.numpy()
    )
    wanted = rotate(q[None, :, None], angle.cos()[None, None], angle.sin()[None, None])
    torch.testing.assert_close(out, 2 * wanted[0, :, 0])


def attention(q, keys, values, mask):
    """What the kernels should give: q [N D] scaled, keys and values [K S D], mask [S]."""
    groups = len(q) // len(keys)
    scores = (q.view(len(keys), groups, -1) @ keys.float().mT).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ values.float()).flatten(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("N, K", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("team", [1, 2, 5])
def test_attention_in_parts(dtype, N, K, team):
    torch.manual_seed(team)
    S, D = 13, 8
    q, keys, values = 3 * torch.randn(N, D), torch.randn(K, 20, D), torch.randn(K, 20, D)
    keys, values, mask = keys.to(dtype), values.to(dtype), torch.rand(20) < 0.5
    keys[:, ~mask] = 1e30  # a hidden slot may hold any finite number
    top, total, mixed = torch.empty(team, N), torch.empty(team, N), torch.empty(team, N, D)
    scores, out = np.full((N, S), 7, np.float32), torch.empty(N * D)
    for me in range(team):
        parts = (x[me].numpy() for x in (top, total, mixed))
        cached = as_array(keys), as_array(values), mask.numpy()
        kernels.attend(q.numpy(), *cached, *share(S, me, team), scores, *parts)
    kernels.finish(top.numpy(), total.numpy(), mixed.numpy(), out.numpy())
    wanted = attention(q, keys[:, :S], values[:, :S], mask[:S])
    torch.testing.assert_close(out.view(N, D), wanted)


def test_attention_that_sees_nothing_gives_zero_and_nan_stays_nan():
    q, keys, values = torch.randn(2, 4), torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    top, total, mixed = torch.empty(1, 2), torch.empty(1, 2), torch.empty(1, 2, 4)
    scores, out = np.empty((2, 3), np.float32), torch.empty(8)

    def run(mask):
        parts = (x[0].numpy() for x in (top, total, mixed))
        cached = keys.numpy(), values.numpy(), np.array(mask)
        kernels.attend(q.numpy(), *cached, 0, 3, scores, *parts)
        kernels.finish(top.numpy(), total.numpy(), mixed.numpy(), out.numpy())
        return out

    assert (run([False] * 3) == 0).all()
    keys[0, 1] = torch.nan
    assert run([True] * 3).isnan().all()
    keys[:] = torch.nan
    assert run([True] * 3).isnan().all(), "all scores NaN: not the same as nothing to see"


@pytest.mark.parametrize("T, S", [(1, 1), (7, 7), (5, 12), (9, 9)])
def test_attention_of_a_block(T, S):
    torch.manual_seed(T)
    q, keys, values = torch.randn(T, 6, 8), torch.randn(2, S, 8), torch.randn(2, S, 8)
    mask = torch.arange(S) <= torch.arange(S - T, S)[:, None]
    mask[T // 2] = False  # padding
    keys[:, ~mask.any(0)] = 1e30
    out = attend_block(q, keys, values, mask)
    wanted = torch.stack([attention(q[t], keys, values, mask[t]) for t in range(T)])
    torch.testing.assert_close(out.view(T, 6, 8), wanted)


@given(st.integers(1, 4), st.integers(1, 600), st.integers(1, 4))
def test_pieces_cover_every_token_once_and_share_the_looking_back(B, T, team):
    pieces = divide(B, T, team)
    assert len(pieces) == team
    tokens = sorted(t for mine in pieces for p in mine for t in range(p.first, p.last))
    assert tokens == list(range(B * T))
    assert all(p.row * T <= p.first < p.last <= (p.row + 1) * T for mine in pieces for p in mine)
    if T >= 200 and B == 1:
        work = [sum(p.last**2 - p.first**2 for p in mine) for mine in pieces]
        assert max(work) < 1.4 * min(work)


def test_gate():
    gate, up = torch.randn(5, 9) * 30, torch.randn(5, 9)
    wanted = gate.clone()
    wanted[:, 2:8] = (torch.nn.functional.silu(gate) * up)[:, 2:8]
    kernels.gated(gate.numpy(), up.numpy(), 2, 8)
    torch.testing.assert_close(gate, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_matmul(dtype, biased):
    linear = torch.nn.Linear(6, 11, bias=biased).to(dtype).requires_grad_(False)
    x = torch.randn(3, 6)
    bias = linear.bias.float() if biased else None
    wanted = torch.nn.functional.linear(x, linear.weight.float(), bias)
    torch.testing.assert_close(matmul(x, linear.weight.float(), bias), wanted)


def test_both_products_are_the_same_product():
    a, b = torch.randn(2, 7, 5), torch.randn(2, 6, 5)
    torch.testing.assert_close(by_numpy(a, b.mT), by_torch(a, b.mT))
    assert quickest_product() in (by_torch, by_numpy)


def test_widened_by_a_team():
    layer = [torch.nn.Linear(6, n, bias=False).bfloat16().requires_grad_(False) for n in (11, 3)]
    wide = Widened(layer)
    first, *_ = (wide.of(0, layer, me, 3) for me in range(3))
    for found, linear in zip(first, layer, strict=True):
        assert torch.equal(found, linear.weight.float())
    second = wide.of(1, layer, 0, 1)
    assert second[0].data_ptr() != first[0].data_ptr(), "the next layer must not overwrite this one"
    same = [torch.nn.Linear(6, 4)]
    assert Widened(same).of(0, same, 0, 1)[0] is same[0].weight


def test_huge_pages_change_no_number():
    weights = [torch.randn(3_000_000), torch.randn(5), torch.randn(700, 1000)]
    before = [w.clone() for w in weights]
    use_huge_pages(weights)
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


def test_one_thread_inside_and_the_old_number_after():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ONE_THREAD as threads:
            assert threads == 3 and torch.get_num_threads() == 1
            with ONE_THREAD as inner:
                assert inner == 3 and torch.get_num_threads() == 1
            with ONE_THREAD.lifted():
                assert torch.get_num_threads() == 3
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        with pytest.raises(KeyError), ONE_THREAD:
            raise KeyError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@kernels.kernel
def _relay(me, team, arrivals, expected, places):
    for turn in range(1, len(places)):
        places[turn, me] = places[turn - 1].sum() % 1000 + me
        expected = kernels.meet(arrivals, expected + team)


def relayed(turns, team):
    places = np.zeros((turns, team), np.int64)
    for turn in range(1, turns):
        places[turn] = places[turn - 1].sum() % 1000 + np.arange(team)
    return places


@pytest.mark.parametrize("size", [1, 2, 4])
def test_nobody_starts_before_all_are_done(size):
    team = Team(size)
    for _ in range(5):
        places = np.zeros((30, size), np.int64)
        team.run(_relay, places)
        np.testing.assert_array_equal(places, relayed(30, size))


def test_callers_in_several_threads_take_turns():
    wrong = []

    def call():
        for _ in range(5):
            places = np.zeros((20, 2), np.int64)
            team_of(2).run(_relay, places)
            if not np.array_equal(places, relayed(20, 2)):
                wrong.append(places)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("who", [0, 1])
def test_a_team_survives_an_error(who):
    """Whoever waits for the worker that failed is let go, the error reaches the caller, and the next run is right."""
    team = Team(2)

    def fail(me, team, arrivals, expected):
        if me == who:
            raise MemoryError("no more")
        kernels.meet(arrivals, expected + team)

    for _ in range(3):
        with pytest.raises(MemoryError, match="no more"):
            team.run(fail)
        places = np.zeros((5, 2), np.int64)
        team.run(_relay, places)
        np.testing.assert_array_equal(places, relayed(5, 2))


def test_a_call_that_cannot_be_translated_is_an_error():
    with pytest.raises(Exception, match="object|pyobject"):
        team_of(2).run(_relay, object())
    places = np.zeros((5, 2), np.int64)
    team_of(2).run(_relay, places)
    np.testing.assert_array_equal(places, relayed(5, 2))


def test_roofline_bounds():
    machine = Machine(bytes_per_second=10.0, flops_per_second=40.0)
    assert [machine.bound(i) for i in (0.5, 4, 100)] == [5, 40, 40]
    assert machine.seconds(flops=80, size=10) == 2 and machine.seconds(flops=1, size=30) == 3
    assert read_bandwidth(megabytes=8, rounds=1) > 1e6 and matmul_speed(64, rounds=1) > 1e6


def test_bandwidth_without_numba(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llm_engine.kernels", None)
    assert read_bandwidth(megabytes=8, rounds=1) > 1e6


@pytest.mark.parametrize("tied", [False, True])
def test_token_bytes(tied):
    config = ModelConfig("llama", 50, 24, 40, 2, 6, 2, 4, 64, tie_word_embeddings=tied)
    model = Transformer(config)
    numbers = sum(p.numel() for p in model.parameters()) - (0 if tied else 49 * 24)
    assert token_bytes(model, 0) == 4 * numbers
    assert token_bytes(model, 5) == 4 * numbers + 5 * 2 * 2 * 2 * 4 * 4
    assert token_bytes(model.bfloat16(), 5) * 2 == 4 * numbers + 5 * 2 * 2 * 2 * 4 * 4
