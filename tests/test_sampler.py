"""The sampler: every row of chapter 17's table, invariants over random logits, parity with transformers."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from llm_engine.sampler import (
    RANGES,
    Greedy,
    LogitBias,
    LogitsError,
    MinP,
    PresenceFrequencyPenalty,
    RepetitionPenalty,
    Sampler,
    SamplingContext,
    SamplingError,
    SamplingParams,
    Temperature,
    TopK,
    TopP,
    build_processors,
    check_logits,
    draw,
)

NOTHING = SamplingContext()
INF = math.inf
ROWS: set[int] = set()  # rows of the chapter's table that have a test


def row(*numbers: int):
    """Says which rows of the table "Every corner" a test is for."""
    ROWS.update(numbers)
    return lambda test: test


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def support(scores: torch.Tensor) -> set[int]:
    """Ids that a processor left in."""
    return {i for i, score in enumerate(scores.tolist()) if score > -INF}


def distribution(logits, context=NOTHING, **params) -> torch.Tensor:
    return Sampler(SamplingParams(**{"temperature": 1.0, **params})).distribution(logits, context)


def tokens(count: int, logits, **params) -> list[int]:
    sampler = Sampler(SamplingParams(**params))
    return [sampler(logits).token_id for _ in range(count)]


# Logits as a model gives them: finite, some of them equal.
finite = st.floats(-30, 30, width=32)
logit_lists = st.lists(finite, min_size=1, max_size=40)
distinct_lists = st.lists(finite, min_size=1, max_size=40, unique=True)
probability = st.floats(0, 1)


# ---------------------------------------------------------------- parameters


@row(23)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, bad) for name in RANGES for bad in (True, "1", float("nan"), [1], 1j)],
        *[(name, None) for name in RANGES if name not in ("seed", "logprobs")],
        *[(name, 1.5) for name, (whole, _, _) in RANGES.items() if whole],
        *[(name, INF) for name in RANGES],
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("top_k", -1),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("min_p", 1.01),
        ("min_tokens_to_keep", 0),
        ("max_new_tokens", 0),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", -1),
        ("seed", 2**63),
        ("logprobs", -1),
    ],
)
def test_a_value_out_of_range_names_parameter_value_and_range(name, value):
    with pytest.raises(SamplingError) as error:
        SamplingParams(**{name: value})
    _, lowest, highest = RANGES[name]
    assert str(error.value).startswith(f"{name} must be ")
    assert str(lowest) in str(error.value) and repr(value) in str(error.value)
    assert highest == INF or str(highest) in str(error.value)


@pytest.mark.parametrize("name", RANGES)
def test_both_ends_of_every_range_are_allowed(name):
    whole, lowest, highest = RANGES[name]
    for value in (lowest, 10**9 if highest == INF else highest):
        assert getattr(SamplingParams(**{name: value}), name) == value
        if not whole:
            assert isinstance(getattr(SamplingParams(**{name: value}), name), float)


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), logit_bias={np.int32(2): 1}
    )
    assert (params.temperature, params.top_k, params.logit_bias) == (0.5, 3, {2: 1.0})
    assert type(params.top_k) is int and type(next(iter(params.logit_bias))) is int


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("stop", "", "stop must hold texts that are not empty, not ''"),
        ("stop", ["a", ""], "stop must hold texts that are not empty, not ''"),
        ("stop", [b"a"], "stop must hold texts"),
        ("stop", None, "stop must be a list or tuple"),
        ("stop_token_ids", 5, "stop_token_ids must be a list or tuple of token ids, not 5"),
        ("stop_token_ids", [-1], "a token id in stop_token_ids must be a whole number"),
        ("stop_token_ids", [True], "a token id in stop_token_ids must be a whole number"),
        ("ignore_eos", 1, "ignore_eos must be True or False, not 1"),
        ("skip_special_tokens", None, "skip_special_tokens must be True or False"),
        ("processors", (None,), "processors must hold functions"),
        ("processors", lambda logits, context: logits, "processors must be a list or tuple"),
        ("logit_bias", [1], "logit_bias must map token ids to numbers"),
        ("logit_bias", {-1: 1}, "a token id in logit_bias must be a whole number of at least 0"),
        ("logit_bias", {"1": 1}, "a token id in logit_bias must be a whole number"),
        ("logit_bias", {1: 101}, "logit_bias[1] must be a number from -100 to 100, not 101"),
        ("logit_bias", {1: INF}, "logit_bias[1] must be a number from -100 to 100, not inf"),
        ("logit_bias", {1: float("nan")}, "logit_bias[1] must be a number"),
        ("logit_bias", {1: None}, "logit_bias[1] must be a number"),
    ],
)
def test_other_parameters_are_checked_too(name, value, message):
    with pytest.raises(SamplingError, match=re.escape(message)):
        SamplingParams(**{name: value})


def test_one_stop_text_needs_no_list_and_lists_are_copied():
    bias, stops = {3: 1}, ["b"]
    params = SamplingParams(stop="end", logit_bias=bias)
    assert params.stop == ("end",)
    bias[3] = 50
    assert params.logit_bias == {3: 1.0}
    params = SamplingParams(stop=stops)
    stops.append("c")
    assert params.stop == ("b",)


@row(1, 2)
def test_the_chain_has_the_documented_order_and_only_what_is_on():
    mine = lambda logits, context: logits  # noqa: E731
    everything = SamplingParams(
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        min_tokens_to_keep=2,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={1: 2},
        processors=(mine,),
    )
    start = [
        LogitBias({1: 2.0}),
        RepetitionPenalty(1.1),
        PresenceFrequencyPenalty(0.5, 0.25),
        mine,
    ]
    assert build_processors(everything) == [
        *start,
        Temperature(0.5),
        TopK(5, 2),
        TopP(0.9, 2),
        MinP(0.1, 2),
    ]
    cold = SamplingParams(**{**vars(everything), "temperature": 0})
    assert build_processors(cold) == [*start, Greedy()]
    assert build_processors(SamplingParams()) == [Greedy()]
    assert build_processors(SamplingParams(temperature=1)) == []


@row(1, 16)
def test_bias_comes_before_the_penalties():
    """A token of the prompt at logit 0, bias 3, penalty 1.5: (0 + 3) / 1.5 = 2, not 0 / 1.5 + 3."""
    sampler = Sampler(SamplingParams(temperature=1, logit_bias={0: 3}, repetition_penalty=1.5))
    scores = sampler.scores(torch.zeros(2), SamplingContext([0]))
    torch.testing.assert_close(scores, torch.tensor([2.0, 0.0]))


@row(1)
def test_penalties_come_before_the_users_processors_and_these_before_temperature():
    seen = []
    params = SamplingParams(
        temperature=0.5,
        presence_penalty=1,
        processors=(lambda logits, context: seen.append(logits.tolist()) or logits,),
    )
    Sampler(params).scores(torch.tensor([4.0, 2.0]), SamplingContext([], [0]))
    assert seen == [[3.0, 2.0]]


@row(11)
def test_min_p_looks_at_the_distribution_after_temperature():
    """0.6 and 0.3: at temperature 1 the second is half as likely as the first, at 0.5 a quarter."""
    logits = logits_of(0.6, 0.3, 0.1)
    assert support(distribution(logits, min_p=0.4).log()) == {0, 1}
    assert support(distribution(logits, min_p=0.4, temperature=0.5).log()) == {0}


# ---------------------------------------------------------------- temperature


@row(2)
@given(logit_lists, st.integers(0, 50), probability, probability)
def test_temperature_0_is_the_argmax_whatever_the_rest_says(values, top_k, top_p, min_p):
    """litgpt#2238: with temperature 0 and top_p at its default of 1, tokens were still drawn at random."""
    logits = torch.tensor(values)
    got = distribution(logits, temperature=0, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = torch.zeros(len(values))
    expected[values.index(max(values))] = 1
    assert torch.equal(got, expected)


def test_temperature_0_with_top_p_1_always_draws_the_argmax():
    """litgpt#2238, as reported: the third token is the best, and only it may come out."""
    logits = torch.tensor([0.5, -1.2, 3.1, 0.8, -0.3, 2.7, -0.9, 1.4])
    assert tokens(20, logits, temperature=0.0, top_p=1.0) == [2] * 20


@row(2)
def test_temperature_0_follows_bias_penalties_and_processors():
    logits = torch.tensor([5.0, 4.0, 3.0, 2.0])
    context = SamplingContext([0], [1])

    def best(**params):
        return Sampler(SamplingParams(**params))(logits, context).token_id

    assert best() == 0
    assert best(logit_bias={3: 10}) == 3
    assert best(repetition_penalty=2) == 2
    assert best(presence_penalty=1.5, logit_bias={0: -INF}) == 2
    assert best(processors=(lambda logits, context: -logits,)) == 3


@row(3)
def test_equally_good_tokens_at_temperature_0_give_the_lowest_id():
    logits = torch.zeros(50_000)
    logits[[40_000, 7, 123]] = 1.0
    assert tokens(1, logits) == [7]
    assert tokens(1, torch.zeros(50_000)) == [0]


@row(4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-45, 5e-324])
def test_tiny_temperatures_do_not_overflow(dtype, temperature):
    """vllm PR#890: a float16 logit divided by 1e-5 is infinite, and the softmax then NaN."""
    logits = torch.tensor([30.0, -20.0, 31.0, -INF], dtype=dtype)
    got = distribution(logits, temperature=temperature)
    assert torch.equal(got, torch.tensor([0.0, 0, 1, 0], dtype=got.dtype))


def test_tiny_temperatures_leave_exact_ties_even():
    got = distribution(torch.tensor([9.0, 9.0, 8.0]), temperature=1e-20)
    assert got.tolist() == [0.5, 0.5, 0.0]


def test_temperature_survives_banned_tokens():
    """vllm PR#22261: a negative stand-in for temperature 0 turned -inf into +inf."""
    got = Temperature(100)(torch.tensor([-INF, 1.0, 0.0]), NOTHING)
    assert got[0] == -INF and got[1:].isfinite().all()


def test_temperature_divides():
    logits = torch.tensor([1.0, 2.0, 4.0])
    for temperature in (0.5, 1.0, 2.0):
        torch.testing.assert_close(
            distribution(logits, temperature=temperature), (logits / temperature).softmax(-1)
        )


@given(distinct_lists)
def test_towards_temperature_0_the_distribution_becomes_greedy(values):
    logits = torch.tensor(values)
    best = int(logits.argmax())
    weights = [float(distribution(logits, temperature=t)[best]) for t in (2, 1, 0.5, 0.1, 1e-38)]
    assert all(a <= b + 1e-6 for a, b in itertools.pairwise(weights))
    gap = torch.tensor(sorted(values)[-2:]).diff()
    if len(gap) and float(gap) > 1e-6:
        assert weights[-1] == 1.0


# ---------------------------------------------------------------- top-k, top-p, min-p


def test_top_k_keeps_the_k_best():
    assert support(TopK(2)(torch.tensor([1.0, 3.0, 2.0, 0.0]), NOTHING)) == {1, 2}


@row(5)
def test_top_k_over_the_vocabulary_is_all_of_it():
    """sendnn-inference#542: a request with top_k of 9999999 took the server down."""
    logits = torch.randn(10, generator=torch.Generator().manual_seed(0))
    for top_k in (0, 10, 11, 9_999_999):
        torch.testing.assert_close(distribution(logits, top_k=top_k), logits.softmax(-1))


@row(6)
def test_top_k_keeps_what_ties_with_the_kth():
    assert support(TopK(2)(torch.tensor([1.0, 2.0, 1.0, 0.0]), NOTHING)) == {0, 1, 2}


def test_top_k_1_is_greedy_without_ties():
    logits = torch.tensor([0.1, 0.7, 0.2])
    assert tokens(20, logits, temperature=5, top_k=1) == [1] * 20


def test_top_k_never_brings_back_a_banned_token():
    logits = torch.tensor([1.0, -INF, -INF, 0.0])
    assert support(TopK(3)(logits, NOTHING)) == {0, 3}


@row(7)
@pytest.mark.parametrize(
    ("p", "kept"),
    [(0, {1}), (0.3, {1}), (0.49, {1}), (0.51, {1, 3}), (0.79, {1, 3}), (0.9, {0, 1, 3})],
)
def test_top_p_keeps_the_token_that_crosses_p(p, kept):
    """Best first, the sums are 0.5, 0.8, 0.95, 1: the one that reaches p is in, the next is out."""
    assert support(TopP(p)(logits_of(0.15, 0.5, 0.05, 0.3), NOTHING)) == kept


@row(8, 12)
def test_top_p_0_keeps_just_min_tokens_to_keep():
    logits = logits_of(0.1, 0.5, 0.25, 0.15)
    for keep, expected in ((1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (99, {0, 1, 2, 3})):
        assert support(distribution(logits, top_p=0, min_tokens_to_keep=keep).log()) == expected


@row(9)
def test_top_p_1_is_off_even_where_the_sum_never_reaches_1():
    """Rounded probabilities of a large vocabulary sum to less than 1: no cut may come of that."""
    flat = torch.zeros(49_152, dtype=torch.float16)
    assert flat.softmax(-1).cumsum(-1)[-1] < 0.9995
    assert int((distribution(flat, top_p=1.0) > 0).sum()) == 49_152
    for p in (0.9999, 1.0):  # the processor itself, too, in the rounded type
        assert len(support(TopP(p)(flat, NOTHING))) == 49_152


@row(10)
def test_top_p_cuts_ties_from_the_highest_id():
    assert support(TopP(0.5)(torch.zeros(4), NOTHING)) == {0, 1}


@row(11)
@pytest.mark.parametrize(
    ("p", "kept"), [(0, 4), (0.2, 4), (0.24, 3), (0.26, 2), (0.49, 2), (0.6, 1), (1, 1)]
)
def test_min_p_compares_with_the_best(p, kept):
    """0.4, 0.3, 0.2, 0.1 are 1, 0.75, 0.5 and 0.25 of the best; here 0.4, 0.2, 0.1 and 0.09."""
    ranked = logits_of(0.4, 0.2, 0.1, 0.09)
    assert support(MinP(p)(ranked, NOTHING)) == set(range(kept))


@row(12)
def test_min_tokens_to_keep_holds_for_each_cut():
    logits = logits_of(0.05, 0.9, 0.03, 0.02)
    for cut in (TopK(1, 3), TopP(0.1, 3), MinP(1, 3)):
        assert support(cut(logits, NOTHING)) == {0, 1, 2}


@row(13)
@pytest.mark.parametrize("cut", [TopK(1), TopP(0.0), TopP(0.9), MinP(1.0), Greedy()])
def test_a_single_candidate_stays(cut):
    """A vocabulary of one, and one that bans left alone: probability 1, never 0/0."""
    assert cut(torch.tensor([-3.0]), NOTHING).softmax(-1).tolist() == [1.0]
    alone = cut(torch.tensor([-INF, 2.0, -INF]), NOTHING)
    assert alone.softmax(-1).tolist() == [0.0, 1.0, 0.0]


@given(logit_lists, probability, probability)
def test_a_larger_p_keeps_a_larger_set(values, p1, p2):
    logits = torch.tensor(values)
    small, large = sorted((p1, p2))
    assert support(TopP(small)(logits, NOTHING)) <= support(TopP(large)(logits, NOTHING))
    assert support(MinP(large)(logits, NOTHING)) <= support(MinP(small)(logits, NOTHING))


@given(logit_lists, st.integers(1, 50), st.integers(1, 50))
def test_a_larger_k_keeps_a_larger_set(values, k1, k2):
    logits = torch.tensor(values)
    small, large = sorted((k1, k2))
    assert support(TopK(small)(logits, NOTHING)) <= support(TopK(large)(logits, NOTHING))
    assert len(support(TopK(small)(logits, NOTHING))) >= min(small, len(values))


@given(logit_lists, st.floats(0, 0.999), st.integers(1, 5))
def test_top_p_is_the_smallest_set_that_reaches_p(values, p, keep):
    logits = torch.tensor(values)
    kept = support(TopP(p, keep)(logits, NOTHING))
    exact = torch.tensor(values, dtype=torch.float64).softmax(-1).tolist()
    mass = sum(exact[i] for i in kept)
    assert mass >= p - 1e-5
    assert len(kept) >= min(keep, len(values))
    assert min(values[i] for i in kept) >= max(
        (v for i, v in enumerate(values) if i not in kept), default=-INF
    )
    if len(kept) > keep:  # without its least likely token, p is not reached
        assert mass - min(exact[i] for i in kept) < p + 1e-5


@given(logit_lists, st.floats(0.1, 3), st.integers(0, 50), probability, probability)
def test_the_distribution_sums_to_1_over_a_subset(values, temperature, top_k, top_p, min_p):
    logits = torch.tensor(values)
    got = distribution(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert abs(float(got.sum()) - 1) < 1e-5
    assert (got >= 0).all() and got[logits.argmax()] > 0
    kept = got > 0  # inside it, ratios are the model's
    full = (logits.double() / temperature).softmax(-1)
    torch.testing.assert_close(
        got[kept].double(), full[kept] / full[kept].sum(), rtol=1e-4, atol=1e-6
    )


CHAINS = [
    {"temperature": 0},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.2, "min_tokens_to_keep": 3},
    {"temperature": 1.5, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
]


@given(distinct_lists, st.randoms(use_true_random=False), st.sampled_from(CHAINS))
def test_renaming_the_tokens_renames_the_result(values, random, params):
    """Only the logit counts, not where in the vocabulary a token stands (ties aside)."""
    assume(len({float(v) for v in torch.tensor(values).softmax(-1)}) == len(values))
    order = list(range(len(values)))
    random.shuffle(order)
    logits = torch.tensor(values)
    got, renamed = distribution(logits, **params), distribution(logits[order], **params)
    assert support(renamed.log()) == {order.index(i) for i in support(got.log())}
    torch.testing.assert_close(renamed, got[order])


@row(24)
@given(st.integers(0, 2**32 - 1), st.sampled_from(CHAINS))
def test_each_row_comes_out_as_it_does_alone(seed, params):
    """The classic mistake: a mask in sorted order, laid over rows that are sorted differently."""
    generator = torch.Generator().manual_seed(seed)
    rows = 3 * torch.randn(2, 3, 30, generator=generator)
    context = SamplingContext([1, 2], [2, 5])
    params = {**params, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {4: 1}}
    together = distribution(rows, context, **params)
    alone = torch.stack([distribution(row, context, **params) for row in rows.reshape(-1, 30)])
    assert torch.equal(together.reshape(-1, 30) > 0, alone > 0)
    torch.testing.assert_close(together.reshape(-1, 30), alone)


# ---------------------------------------------------------------- penalties and bias


@row(14)
def test_repetition_penalty_on_a_negative_logit():
    """transformers#2302: dividing a negative logit by the penalty made the repeated token likelier."""
    got = RepetitionPenalty(1.5)(torch.tensor([-2.0, 1.0, 5.0]), SamplingContext([0], [1]))
    torch.testing.assert_close(got, torch.tensor([-3.0, 1 / 1.5, 5.0]))


@given(logit_lists, st.floats(1, 10), st.data())
def test_a_penalty_above_1_never_helps_and_below_1_never_hurts(values, penalty, data):
    ids = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=5))
    logits, context = torch.tensor(values), SamplingContext(ids)
    assert (RepetitionPenalty(penalty)(logits, context) <= logits).all()
    assert (RepetitionPenalty(1 / penalty)(logits, context) >= logits).all()
    untouched = [i for i in range(len(values)) if i not in ids]
    assert torch.equal(RepetitionPenalty(penalty)(logits, context)[untouched], logits[untouched])


@row(14)
def test_repetition_penalty_counts_prompt_and_output_once():
    logits = torch.full((4,), 3.0)
    got = RepetitionPenalty(1.5)(logits, SamplingContext([0, 0], [1, 1, 1, 0]))
    torch.testing.assert_close(got, torch.tensor([2.0, 2.0, 3.0, 3.0]))


@row(15)
def test_presence_and_frequency_ignore_the_prompt():
    """vmlx-swift#295: both were counted over the prompt, so words of the question were shunned from the start."""
    logits = torch.zeros(4)
    penalty = PresenceFrequencyPenalty(0.5, 0.25)
    assert torch.equal(penalty(logits, SamplingContext([0, 0, 1], [])), logits)
    got = penalty(logits, SamplingContext([0, 0, 1], [1, 2, 2, 2]))
    torch.testing.assert_close(got, torch.tensor([0.0, -0.75, -1.25, 0.0]))


@row(17)
@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 0.5},
        {"presence_penalty": -2, "frequency_penalty": -2},
        {"logit_bias": {0: 100}},
        {"temperature": 100},
        {"top_k": 2, "min_tokens_to_keep": 2},
        {"top_p": 0.5, "min_tokens_to_keep": 2},
        {"min_p": 0.5, "min_tokens_to_keep": 2},
    ],
    ids=str,
)
def test_banned_tokens_stay_banned(params):
    logits, context = torch.tensor([-INF, 1.0]), SamplingContext([0], [0])
    assert distribution(logits, context, **params).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("context", [SamplingContext([9]), SamplingContext([], [-1])])
def test_context_ids_outside_the_vocabulary_are_named(context):
    wrong = [*context.prompt_ids, *context.output_ids][0]
    message = f"the context holds token id {wrong}, but the logits have 4 tokens"
    with pytest.raises(SamplingError, match=message):
        Sampler(SamplingParams(repetition_penalty=2, frequency_penalty=1))(torch.zeros(4), context)


@row(16)
def test_logit_bias_adds_and_bans():
    got = LogitBias({0: 2, 2: -INF})(torch.zeros(2, 3), NOTHING)
    assert got.tolist() == [[2.0, 0.0, -INF], [2.0, 0.0, -INF]]


@row(16)
def test_logit_bias_outside_the_vocabulary_is_refused():
    params = SamplingParams(logit_bias={2: 1, 7: 1, 100: 1})
    message = re.escape("logit_bias names token ids [7, 100], but the vocabulary is 0 to 6")
    with pytest.raises(SamplingError, match=message):
        Sampler(params)(torch.zeros(7))
    with pytest.raises(SamplingError, match=message):  # before any work, where V is known
        Sampler(params, vocab_size=7)
    Sampler(params, vocab_size=101)


# ---------------------------------------------------------------- bad logits


@row(18)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {(1, 3): math.nan, (2, 0): math.nan},
            "2 of 12 logits are NaN, first in row 1 at token id 3",
        ),
        ({(2, 1): INF}, "1 of 12 logits are \\+inf, first in row 2 at token id 1"),
        ({(0, 0): INF, (2, 2): math.nan}, "1 of 12 logits are NaN, first in row 2 at token id 2"),
        ({(1, i): -INF for i in range(4)}, "all 4 logits of row 1 are -inf"),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_unusable_logits_raise_and_say_where(bad, message, temperature):
    logits = torch.zeros(3, 4)
    for place, value in bad.items():
        logits[place] = value
    with pytest.raises(LogitsError, match=f"the model: {message}") as error:
        distribution(logits, SamplingContext([1, 2], [3]), temperature=temperature)
    assert "after 2 prompt and 1 new tokens" in str(error.value)
    assert "llm_engine.trace.Trace" in str(error.value)


@given(st.lists(st.sampled_from([0.0, 1.5, -INF, INF, math.nan]), min_size=1, max_size=6))
def test_logits_are_refused_exactly_when_no_distribution_exists(values):
    logits = torch.tensor(values)
    usable = logits.softmax(-1).isfinite().all()
    if usable:
        check_logits(logits, "the model")
        assert abs(float(distribution(logits).sum()) - 1) < 1e-6
    else:
        with pytest.raises(LogitsError):
            check_logits(logits, "the model")


def test_the_logits_of_all_positions_are_refused():
    """The classic mistake of handing over every position's row: refused with the shape checks off, too."""
    unchecked = Sampler.__call__.__wrapped__
    with pytest.raises(SamplingError, match=r"\[V\], not \[5, 8\]: take the last row"):
        unchecked(Sampler(SamplingParams()), torch.zeros(5, 8))


# ---------------------------------------------------------------- the user's processors


def test_a_processor_of_ones_own_is_one_line():
    params = SamplingParams(processors=(lambda logits, context: logits.roll(1, -1),))
    assert Sampler(params)(torch.tensor([0.0, 5.0, 1.0])).token_id == 2


def test_a_processor_sees_the_requests_tokens():
    params = SamplingParams(
        processors=(
            lambda logits, context: logits.index_fill(-1, torch.tensor(context.output_ids), -INF),
        )
    )
    sampler = Sampler(params)
    assert sampler(torch.tensor([3.0, 2.0, 1.0]), SamplingContext([2], [0, 1])).token_id == 2


def drops_a_token(logits, context):
    return logits[..., :-1]


def forgets_to_return(logits, context):
    logits.mul_(2)


def returns_a_mask(logits, context):
    return logits > 0


def makes_nan(logits, context):
    return logits - INF + INF


def bans_everything(logits, context):
    return torch.full_like(logits, -INF)


@row(19)
@pytest.mark.parametrize(
    ("processor", "kind", "message"),
    [
        (drops_a_token, SamplingError, r"returned torch.float32 \[2\], not .* \[3\]"),
        (forgets_to_return, SamplingError, "returned None, not"),
        (returns_a_mask, SamplingError, r"returned torch.bool \[3\], not"),
        (makes_nan, LogitsError, "3 of 3 logits are NaN"),
        (bans_everything, LogitsError, "all 3 logits of row 0 are -inf"),
    ],
)
def test_a_misbehaving_processor_is_named(processor, kind, message):
    fine = lambda logits, context: logits + 1  # noqa: E731
    sampler = Sampler(SamplingParams(processors=(fine, processor)))
    with pytest.raises(kind, match=f"processor {processor.__name__}.*{message}") as error:
        sampler(torch.tensor([1.0, 2.0, 3.0]))
    assert "Trace" not in str(error.value)  # the model is not to blame


def test_a_processor_may_write_into_its_argument():
    logits = torch.tensor([3.0, 2.0, 1.0])

    def bans_in_place(scores, context):
        scores[0] = -INF
        return scores

    sample = Sampler(SamplingParams(processors=(bans_in_place,), logprobs=1))(logits)
    assert logits.tolist() == [3.0, 2.0, 1.0]
    assert sample.token_id == 1
    assert list(sample.top_logprobs) == [0, 1]  # still the model's own


# ---------------------------------------------------------------- the draw


def test_the_draw_follows_the_distribution():
    """Pearson's statistic over 20 000 draws: for 4 free counts, 99.9 % of fair draws stay under 18.47."""
    probabilities = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.0, 0.09, 0.01])
    count = 20_000
    drawn = draw(probabilities.expand(count, -1), torch.Generator().manual_seed(7))
    counts = drawn.bincount(minlength=7)
    assert counts[1] == counts[4] == 0
    possible = probabilities > 0
    expected = probabilities[possible] * count
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    assert statistic < 18.47


@pytest.mark.parametrize(
    ("u", "expected"), [(0.0, 1), (0.249, 1), (0.25, 3), (0.5, 3), (1 - 2**-53, 3)]
)
def test_the_ends_of_the_cumulative_sum_never_give_an_impossible_token(monkeypatch, u, expected):
    """u = 0 must skip the impossible first token, and the largest u below 1 must not run past the last."""
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, u, dtype=torch.float64))
    probabilities = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert int(draw(probabilities)) == expected


@row(21)
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 0.3]), min_size=1, max_size=20),
    st.sampled_from([0.0, 1e-300, 0.5, 1 - 2**-53]),
)
def test_a_token_of_probability_0_is_never_drawn(weights, u):
    assume(sum(weights) > 0)
    probabilities = torch.tensor(weights)  # they need not sum to 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, u, dtype=torch.float64))
        assert probabilities[int(draw(probabilities))] > 0


@row(21)
def test_a_sum_that_stays_below_1_does_not_matter():
    """A random number beyond the sum must not fall off the end, nor give an id that does not exist."""
    flat = torch.zeros(49_152, dtype=torch.float16).softmax(-1)
    assert float(flat.double().sum()) < 0.9995  # this is how it comes about; a half shows it better
    half = torch.full((1000,), 0.0005)
    counts = draw(half.expand(2000, -1), torch.Generator().manual_seed(0)).bincount(minlength=1000)
    assert len(counts) == 1000 and int(counts.max()) < 20
    assert 800 < int(counts[500:].sum()) < 1200


@row(20)
def test_the_same_seed_gives_the_same_tokens_whatever_others_do():
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    alone = tokens(20, logits, temperature=1, seed=11)
    mine, other = (Sampler(SamplingParams(temperature=1, seed=s)) for s in (11, 12))
    mixed = []
    for _ in range(20):
        other(logits)
        torch.rand(3)  # torch's global generator is not ours
        mixed.append(mine(logits).token_id)
        other(logits)
    assert mixed == alone
    assert tokens(20, logits, temperature=1, seed=12) != alone


@row(20)
def test_each_token_takes_one_random_number():
    """So the fifth token of a seed is the same draw whatever cut the first four had."""
    sampler = Sampler(SamplingParams(temperature=1, top_p=0.5, seed=5))
    for logits in (torch.tensor([1.0, 2.0]), torch.zeros(1000), torch.zeros(3), torch.zeros(1)):
        sampler(logits)
    expected = torch.Generator().manual_seed(5)
    torch.rand(4, generator=expected, dtype=torch.float64)
    assert torch.equal(sampler.generator.get_state(), expected.get_state())


@row(20)
def test_without_a_seed_each_sampler_is_fresh():
    flat = torch.zeros(50_000)
    torch.manual_seed(0)
    first = tokens(5, flat, temperature=1)
    torch.manual_seed(0)
    assert tokens(5, flat, temperature=1) != first


# ---------------------------------------------------------------- what a sample tells


@row(22)
def test_logprobs_are_the_models_own_and_hold_the_chosen_token():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    raw = logits.log_softmax(-1)
    params = SamplingParams(logit_bias={3: 50}, temperature=0.1, logprobs=2)
    sample = Sampler(params)(logits)
    assert sample.token_id == 3
    assert sample.logprob == pytest.approx(float(raw[3]))
    assert list(sample.top_logprobs) == [0, 1, 3]  # the two best, and the chosen one
    for token, logprob in sample.top_logprobs.items():
        assert logprob == pytest.approx(float(raw[token]))


@row(22)
@pytest.mark.parametrize(("wanted", "got"), [(None, None), (0, [0]), (1, [0]), (99, [0, 1, 2])])
def test_how_many_logprobs(wanted, got):
    sample = Sampler(SamplingParams(logprobs=wanted))(torch.tensor([2.0, 1.0, 0.0]))
    assert (sample.logprob is None) == (wanted is None)
    assert sample.top_logprobs is None if got is None else list(sample.top_logprobs) == got


def test_candidates_are_what_the_chain_left():
    sample = Sampler(SamplingParams(temperature=0.5, top_k=3, seed=0))(torch.tensor([0.0, 3, 1, 2]))
    record = sample.candidates(2)
    assert (record.temperature, record.kept) == (0.5, 3)
    weights = (torch.tensor([3.0, 2.0, 1.0]) / 0.5).softmax(-1).tolist()
    assert [token for token, _ in record.best] == [1, 3]
    assert [p for _, p in record.best] == pytest.approx(weights[:2])
    assert len(sample.candidates(99).best) == 3


@row(4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_is_widened_and_double_stays(dtype):
    got = distribution(torch.tensor([1.0, 2.0], dtype=dtype), top_k=2, top_p=0.999, min_p=0.001)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_the_distribution_serves_many_rows_at_once():
    """Speculative decoding asks for the distribution at several positions in one call."""
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(SamplingParams(temperature=0.8, top_k=10, top_p=0.9))
    probabilities = sampler.distribution(rows)
    assert probabilities.shape == (4, 50)
    drawn = draw(probabilities, torch.Generator().manual_seed(0))
    assert drawn.shape == (4,)
    assert (probabilities.gather(-1, drawn[:, None]) > 0).all()


# ---------------------------------------------------------------- parity with transformers


def theirs(logits: torch.Tensor, ids: list[int], **params) -> torch.Tensor:
    """What `transformers` makes of the same request, rows of logits [B, V]: its scores, in its order."""
    from transformers.generation import logits_process as hf

    scores, chain = logits.clone(), []
    keep = params.get("min_tokens_to_keep", 1)
    if bias := params.get("logit_bias"):
        chain.append(hf.SequenceBiasLogitsProcessor([[[i], float(b)] for i, b in bias.items()]))
    if "repetition_penalty" in params:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(float(params["repetition_penalty"])))
    if "temperature" in params:
        chain.append(hf.TemperatureLogitsWarper(float(params["temperature"])))
    if params.get("top_k"):
        chain.append(hf.TopKLogitsWarper(params["top_k"], min_tokens_to_keep=keep))
    if "top_p" in params:
        chain.append(hf.TopPLogitsWarper(params["top_p"], min_tokens_to_keep=keep))
    if "min_p" in params:
        chain.append(hf.MinPLogitsWarper(params["min_p"], min_tokens_to_keep=keep))
    rows = torch.tensor([ids] * len(logits))
    for part in chain:
        scores = part(rows, scores)
    return scores


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_p": 0.7},
        {"top_p": 0.05, "min_tokens_to_keep": 4},
        {"min_p": 0.1},
        {"min_p": 0.9, "min_tokens_to_keep": 3},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.8, "logit_bias": {3: 4, 9: -6}},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.03},
        {
            "temperature": 0.8,
            "top_k": 60,
            "top_p": 0.95,
            "min_p": 0.02,
            "repetition_penalty": 1.2,
            "logit_bias": {1: 3},
        },
    ],
    ids=lambda params: " ".join(params),
)
def test_supports_and_probabilities_are_those_of_transformers(params):
    logits = 4 * torch.randn(20, 500, generator=torch.Generator().manual_seed(3))
    ids = [3, 17, 3, 250, 1]
    context = SamplingContext(ids[:3], ids[3:])
    ours = distribution(logits, context, **params)
    expected = theirs(logits, ids, **params)
    assert torch.equal(ours > 0, expected > -INF)
    torch.testing.assert_close(ours, expected.softmax(-1))


@given(
    st.integers(0, 2**32 - 1),
    st.floats(0.2, 3),
    st.integers(1, 60),
    st.floats(0.01, 0.99),
    st.floats(0, 0.5),
    st.integers(1, 4),
)
def test_parity_with_transformers_on_random_requests(seed, temperature, top_k, top_p, min_p, keep):
    logits = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(seed))
    params = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "min_tokens_to_keep": keep,
    }
    ours, expected = distribution(logits, **params), theirs(logits, [0], **params)
    # The two sum in opposite directions, so a sum within rounding of p may fall on either side.
    ranked = logits.double() / temperature
    ranked = ranked.masked_fill(
        ranked < ranked.topk(min(max(top_k, keep), 50)).values[:, -1:], -INF
    )
    sums = ranked.sort(descending=True).values.softmax(-1).cumsum(-1)
    assume(((sums - top_p).abs() > 1e-5).all())
    weights = expected.softmax(-1)
    assert torch.equal(ours > 0, weights > 0)
    torch.testing.assert_close(ours, weights)


# ---------------------------------------------------------------- the chapter's table


def test_every_row_of_the_chapters_table_is_tested():
    notebook = Path(__file__).parents[1] / "chapters" / "17_sampler.ipynb"
    cells = json.loads(notebook.read_text("utf8"))["cells"]
    table = next("".join(cell["source"]) for cell in cells if cell["id"] == "table")
    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", table, re.M)]
    assert rows == list(range(1, len(rows) + 1))
    assert set(rows) == ROWS
