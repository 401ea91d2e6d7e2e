"""The engine: the loop, its stops and limits, its errors. Tiny random models and scripted ones; no downloads."""

import gc
import logging
import threading
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_folder import BOS, END, EOS, START, TEMPLATE, byte_level_library, write_tiny_folder

from llm_engine import Chat, Engine, EngineError, SamplingParams
from llm_engine.attention import CACHES, KV, NoCache
from llm_engine.config import ModelConfig
from llm_engine.engine import (
    DECODERS,
    StopMatcher,
    check_prompt,
    pick_device,
    pick_dtype,
    unseen,
    why_finished,
)
from llm_engine.sampler import LogitsError, Sample
from llm_engine.tokenizer import Tokenizer, _JsonBackend
from llm_engine.transformer import RUNNERS, TorchRunner, Transformer

V = 264  # 260 tokens and four spare rows
SPARE = 260
CONTEXT = 64


def byte_tokenizer(**config) -> Tokenizer:
    """A token for each byte, four special ones, no BOS unless asked for: any text, any split of a character."""
    templates = {"default": TEMPLATE}
    backend = _JsonBackend(byte_level_library())
    return Tokenizer(backend, bos_id=BOS, eos_ids=(EOS,), chat_templates=templates, **config)


def tiny_config(**changes) -> ModelConfig:
    sizes = {
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "eos_token_ids": (END,),
    }
    return ModelConfig(**{**sizes, **changes})


def tiny_engine(**options) -> Engine:
    config = options.pop("config", tiny_config())
    tokenizer = options.pop("tokenizer", byte_tokenizer())
    model = Transformer(config).eval().requires_grad_(False)
    return Engine(model, tokenizer, **{"cache": "none", "runner": "torch", **options})


@pytest.fixture(scope="module")
def tiny() -> Engine:
    return tiny_engine()


class Script:
    """A runner that makes the likeliest next token whatever comes next in `ids`, counted from the prompt's end."""

    def __init__(self, ids, prompt_length=1):
        self.ids, self.prompt_length, self.positions_computed = list(ids), prompt_length, 0

    def logits(self, batch, cache, rows):
        self.positions_computed += batch.ids.numel()
        out = torch.zeros(*rows.shape, V)
        for b, r in torch.cartesian_prod(*map(torch.arange, rows.shape)).tolist():
            at = int(batch.pos[b, rows[b, r]]) + 1 - self.prompt_length
            out[b, r, self.ids[at]] = 9.0
        return out


class Dice:
    """A runner whose logits are random numbers that depend on the last token and its position: fast, and never dull."""

    def __init__(self, model):
        self.positions_computed = 0

    def logits(self, batch, cache, rows):
        self.positions_computed += batch.ids.numel()
        seed = int(batch.ids[0, -1]) * 1000 + int(batch.pos[0, -1])
        return 3 * torch.randn(*rows.shape, V, generator=torch.Generator().manual_seed(seed))


def scripted(text_or_ids, **options) -> Engine:
    """An engine that, greedy, continues any one-token prompt with this text (or these ids)."""
    ids = list(text_or_ids.encode()) if isinstance(text_or_ids, str) else list(text_or_ids)
    return tiny_engine(runner=lambda model: Script([*ids, *[ord("~")] * 80]), **options)


class Growing:
    """A cache by concatenation, as simple as the protocol allows: Part 2's are better."""

    def __init__(self, config, batch_size, device, dtype):
        self.seen = torch.zeros(batch_size, dtype=torch.long)
        self.layers, self.staged = {}, {}
        self.evicted = False

    def append(self, layer, k, v, batch):
        new = KV(k, v, batch.pos)
        old = self.layers.get(layer)
        kv = (
            new
            if old is None
            else KV(*(torch.cat(p, -2 + (p[0].ndim == 2)) for p in zip(old, new, strict=True)))
        )
        self.staged[layer], self.count = kv, batch.ids.shape[1]
        return kv

    def commit(self, keep=None):
        self.layers.update(self.staged)
        self.seen += self.count
        self.staged = {}

    def truncate(self, seen):
        if self.evicted:
            raise ValueError("these positions were evicted")
        self.staged, self.seen[:] = {}, seen
        self.layers = {
            i: KV(kv.k[:, :, :seen], kv.v[:, :, :seen], kv.pos[:, :seen])
            for i, kv in self.layers.items()
        }


# ---- the feed rule


@given(st.lists(st.integers(0, V - 1), min_size=1, max_size=9), st.integers(0, 12))
def test_unseen_feeds_all_that_is_new_and_never_nothing(ids, seen):
    new, start = unseen(ids, seen)
    assert ids[:start] + new == ids
    assert new, "without a token there are no logits"
    assert start == seen or (start == len(ids) - 1 and seen >= len(ids))


def test_without_a_cache_every_step_computes_the_whole_sequence(tiny):
    before = tiny.runner.positions_computed
    done = tiny.generate([65, 66, 67], SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert done.positions_computed == 3 + 4 + 5 + 6 + 7
    assert tiny.runner.positions_computed - before == done.positions_computed


@pytest.mark.parametrize("chunk", [None, 1, 3, 50])
def test_a_cache_that_remembers_gives_the_same_tokens_for_fewer_positions(tiny, chunk):
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    prompt = list(b"seven letters")
    cached = Engine(tiny.model, tiny.tokenizer, cache=Growing, runner="torch", prefill_chunk=chunk)
    done = cached.generate(prompt, params)
    assert done.token_ids == tiny.generate(prompt, params).token_ids
    assert done.positions_computed == len(prompt) + 4
    assert cached.runner.positions_computed == done.positions_computed


def test_feed_gives_logits_at_the_last_positions_across_pieces(tiny):
    ids = list(b"pieces of three")
    chunked = Engine(tiny.model, tiny.tokenizer, cache=Growing, runner="torch", prefill_chunk=3)
    for last in (1, 5, len(ids)):
        logits, computed = chunked.feed(ids, chunked.new_cache(), last)
        assert computed == len(ids)
        torch.testing.assert_close(logits, tiny.logits(ids)[-last:])
    cache = chunked.new_cache()
    chunked.feed(ids, cache)
    logits, computed = chunked.feed(ids, cache, 4)  # all of it was seen: go back four
    assert computed == 4 and int(cache.seen[0]) == len(ids)
    torch.testing.assert_close(logits, tiny.logits(ids)[-4:])


def test_a_prompt_in_pieces_needs_a_cache_that_remembers(tiny):
    engine = Engine(tiny.model, tiny.tokenizer, cache="none", runner="torch", prefill_chunk=4)
    with pytest.raises(EngineError, match="prefill_chunk.*cache that remembers"):
        engine.generate(list(range(9)))
    assert engine.generate([65, 66], SamplingParams(max_new_tokens=1)).token_ids  # short enough
    with pytest.raises(EngineError, match="prefill_chunk must be at least 1"):
        tiny_engine(prefill_chunk=0)


# ---- stop strings


def reference_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first stop string to be complete, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


ab = st.text("abc ", max_size=24)


@settings(max_examples=300)
@given(ab, st.lists(st.text("abc ", min_size=1, max_size=5), max_size=4), st.data())
def test_stop_matcher_however_the_text_is_cut(text, stops, data):
    matcher, shown, rest = StopMatcher(stops), "", text
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        shown += matcher.push(rest[:n])
        rest = rest[n:]
        expected, _ = reference_stop(text[: len(text) - len(rest)], stops)
        assert expected.startswith(shown), "a part of a stop string, or what comes after it, leaked"
        if matcher.matched is None:
            assert len(shown) + len(matcher.held) == len(text) - len(rest)
            assert len(matcher.held) < max(map(len, stops), default=1)
    expected, stop = reference_stop(text, stops)
    assert (shown + matcher.flush(), matcher.matched) == (expected, stop)


def test_stop_matcher_by_hand():
    matcher = StopMatcher(["</end>"])
    assert [matcher.push(p) for p in ("one <", "two </e", "nd", "> three")] == [
        "one ",
        "<two ",
        "",
        "",
    ]
    assert matcher.matched == "</end>" and matcher.flush() == ""
    assert StopMatcher("stop").stops == ("stop",)
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_a_stop_string_over_several_tokens_never_leaks_its_prefix():
    """vllm#3574: with a stop string of several tokens, its beginning had been streamed out before it was complete."""
    engine = scripted("The answer is 4.\n\nQuestion: next")
    chunks = list(engine.stream([65], SamplingParams(stop=("\n\nQuestion:",))))
    assert "".join(c.text for c in chunks) == "The answer is 4."
    done = chunks[-1].completion
    assert (done.text, done.finish_reason, done.stop_reason) == (
        "The answer is 4.",
        "stop",
        "\n\nQuestion:",
    )
    assert (
        bytes(done.token_ids).decode() == "The answer is 4.\n\nQuestion:"
    )  # every token that was computed


def test_held_back_text_comes_out_when_it_becomes_harmless_or_the_end_comes():
    params = SamplingParams(stop=("abcd",), max_new_tokens=6)
    assert [c.text for c in scripted("xabcxy").stream([65], params)] == [
        "x",
        "",
        "",
        "",
        "abcx",
        "y",
    ]
    done = scripted("xxxabc").generate([65], params)
    assert (done.text, done.finish_reason, done.stop_reason) == ("xxxabc", "length", None)
    done = scripted([*b"ab", EOS]).generate([65], params)
    assert (done.text, done.finish_reason, done.stop_reason) == ("ab", "stop", EOS)


def test_a_stop_string_completed_by_the_last_broken_character():
    done = scripted([*b"ab", 0xF0, 0x9F]).generate(
        [65], SamplingParams(max_new_tokens=4, stop=("b\ufffd",))
    )
    assert (done.text, done.finish_reason, done.stop_reason) == ("a", "stop", "b\ufffd")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop"):
        SamplingParams(stop=("",))


# ---- stop tokens and limits


@pytest.mark.parametrize(
    ("token", "matched", "new", "expected"),
    [
        (7, None, 3, (None, None)),
        (7, None, 5, ("length", None)),
        (7, "x", 3, ("stop", "x")),
        (7, "x", 5, ("stop", "x")),
        (2, None, 3, ("stop", 2)),
        (2, None, 5, ("stop", 2)),
        (2, "x", 5, ("stop", 2)),
        (7, None, 6, ("length", None)),
    ],
)
def test_why_finished(token, matched, new, expected):
    assert why_finished(token, matched, new, 5, frozenset({2})) == expected


@pytest.mark.parametrize("eos", [EOS, END], ids=["tokenizer's", "config's"])
def test_the_end_tokens_of_tokenizer_and_config_both_stop(eos):
    engine = scripted([*b"ok", eos, *b"more"])
    done = engine.generate([65])
    assert (done.text, done.token_ids) == ("ok", [*b"ok", eos])
    assert (done.finish_reason, done.stop_reason) == ("stop", eos)
    done = engine.generate([65], SamplingParams(ignore_eos=True, max_new_tokens=5))
    assert (done.text, done.finish_reason) == ("okmo", "length")
    done = engine.generate(
        [65], SamplingParams(ignore_eos=True, max_new_tokens=5, skip_special_tokens=False)
    )
    assert done.text == "ok" + engine.tokenizer.decode([eos], skip_special_tokens=False) + "mo"


def test_stop_token_ids_end_the_answer_and_stay_out_of_the_text():
    done = scripted("one, two").generate([65], SamplingParams(stop_token_ids=(ord(","),)))
    assert (done.text, done.token_ids, done.stop_reason) == ("one", [*b"one,"], ord(","))
    with pytest.raises(EngineError, match="stop_token_ids names token 9999"):
        scripted("x").generate([65], SamplingParams(stop_token_ids=(9999,)))


def test_a_special_token_as_a_stop_string_means_its_id():
    done = scripted([*b"ok", START, *b"more"]).generate([65], SamplingParams(stop="<|im_start|>"))
    assert (done.text, done.token_ids, done.stop_reason) == ("ok", [*b"ok", START], START)


@pytest.mark.parametrize("prompt_length", [1, CONTEXT - 5, CONTEXT - 1])
def test_generation_ends_exactly_at_the_context_limit(prompt_length):
    done = dice_engine().generate(
        [65] * prompt_length, SamplingParams(max_new_tokens=1000, ignore_eos=True)
    )
    assert len(done.token_ids) == CONTEXT - prompt_length
    assert (done.finish_reason, done.stop_reason) == ("length", None)


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 9])
def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(tiny, length):
    with pytest.raises(
        EngineError, match=f"{length} tokens.*context of {CONTEXT}.*at most {CONTEXT - 1}"
    ):
        tiny.generate([65] * length)


def test_max_new_tokens_is_exact():
    for n in (1, 2, 9):
        done = dice_engine().generate("abc", SamplingParams(max_new_tokens=n, ignore_eos=True))
        assert len(done.token_ids) == n and done.finish_reason == "length"


# ---- prompts that cannot be


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty.*no BOS"),
        ([], "no tokens"),
        ([1, V], f"token id {V} \\(item 1\\).*0..{V - 1}"),
        ([-1], "token id -1"),
        ([1, 2.0], r"item 1 is 2\.0 \(float\)"),
        ([True], r"item 0 is True \(bool\)"),
        (["a", "b"], "item 0 is 'a'.*one call for each"),
        ([[1, 2]], "one call for each"),
        (None, "not NoneType"),
        (5, "a str or a list of token ids, not int"),
        (b"bytes", "not bytes"),
        ({"role": "user"}, "not dict"),
        (torch.tensor(3), "not int"),
        (torch.tensor([[1, 2]]), "one call for each"),
    ],
)
def test_prompts_that_cannot_be_are_refused_in_words(tiny, prompt, message):
    before = tiny.runner.positions_computed
    with pytest.raises(EngineError, match=message):
        tiny.start(prompt)
    assert tiny.runner.positions_computed == before


def test_a_bos_token_makes_an_empty_prompt_possible():
    engine = tiny_engine(tokenizer=byte_tokenizer(add_bos=True))
    done = engine.generate("", SamplingParams(max_new_tokens=2))
    assert done.prompt_ids == [BOS]
    assert engine.generate("a", SamplingParams(max_new_tokens=2)).prompt_ids == [BOS, ord("a")]
    assert engine.generate([97], SamplingParams(max_new_tokens=2)).prompt_ids == [
        97
    ]  # ids: as they are


def test_ids_may_come_as_tensors_arrays_or_tuples(tiny):
    for ids in (torch.tensor([1, 2]), torch.tensor([1, 2]).numpy(), (1, 2), range(1, 3)):
        assert check_prompt(ids, V) == [1, 2]
    assert all(type(i) is int for i in check_prompt(torch.tensor([1]), V))


def test_everything_is_checked_when_the_stream_is_made_not_at_its_first_chunk(tiny):
    with pytest.raises(EngineError, match="no tokens"):
        tiny.stream([])
    with pytest.raises(ValueError, match="logit_bias"):
        tiny.stream("a", SamplingParams(logit_bias={V: 1.0}))


# ---- streams


@settings(max_examples=50)
@given(
    prompt=st.text(st.characters(codec="utf-8"), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    new=st.integers(1, 14),
    stops=st.lists(st.text("abeo \x00\x80", min_size=1, max_size=2), max_size=3),
)
def test_streamed_text_is_the_whole_text(prompt, seed, temperature, new, stops):
    engine = dice_engine()
    params = SamplingParams(
        max_new_tokens=new, seed=seed, temperature=temperature, top_k=40, stop=tuple(stops)
    )
    chunks = list(engine.stream(prompt, params))
    done = engine.generate(prompt, params)
    assert "".join(c.text for c in chunks) == done.text
    assert [i for c in chunks for i in c.token_ids] == done.token_ids
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [done.finish_reason]
    assert [c.completion for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    # The decoded tokens, cut at the first stop string that became complete, if any did.
    kept = done.token_ids[:-1] if isinstance(done.stop_reason, int) else done.token_ids
    both = engine.tokenizer.decode([*done.prompt_ids, *kept])
    before = engine.tokenizer.decode(done.prompt_ids)
    if both.startswith(before):
        expected, stop = reference_stop(both[len(before) :], stops)
        assert done.text == expected
        assert stop == (done.stop_reason if isinstance(done.stop_reason, str) else None)


@cache
def dice_engine() -> Engine:
    """One engine for all examples of a property."""
    return tiny_engine(runner=Dice)


def test_characters_of_several_tokens_stream_whole():
    engine = scripted("né 日本 🙂!")
    params = SamplingParams(max_new_tokens=len("né 日本 🙂!".encode()))
    pieces = [c.text for c in engine.stream([65], params)]
    assert "".join(pieces) == "né 日本 🙂!" and not any("\ufffd" in p for p in pieces)
    cut = scripted("🙂").generate([65], SamplingParams(max_new_tokens=2))
    assert (cut.text, cut.finish_reason) == (
        "\ufffd",
        "length",
    )  # half a character is not lost without a trace


def test_closing_the_iterator_stops_the_work(tiny):
    stream = tiny.stream("abc", SamplingParams(max_new_tokens=50, ignore_eos=True))
    next(stream), next(stream)
    count = tiny.runner.positions_computed
    stream.close()
    assert list(stream) == [] and tiny.runner.positions_computed == count
    caches = []

    def factory(*args):
        caches.append(NoCache(*args))
        return caches[-1]

    engine = Engine(tiny.model, tiny.tokenizer, cache=factory, runner="torch")
    for chunk in engine.stream("abc", SamplingParams(max_new_tokens=50, ignore_eos=True)):
        if len(caches) == 1 and chunk.token_ids:
            break
    assert engine.runner.positions_computed == 3
    assert not [
        o for o in gc.get_objects() if type(o).__name__ == "Request" and o.cache is caches[0]
    ]


def test_nothing_is_computed_before_the_first_chunk_is_asked_for(tiny):
    count = tiny.runner.positions_computed
    stream = tiny.stream("abc")
    assert tiny.runner.positions_computed == count
    next(stream)
    assert tiny.runner.positions_computed == count + 3


@pytest.mark.parametrize("cache", ["none", Growing], ids=["none", "growing"])
def test_streams_of_one_engine_do_not_disturb_each_other(tiny, cache):
    engine = Engine(tiny.model, tiny.tokenizer, cache=cache, runner="torch")
    asked = [
        ("first", SamplingParams(max_new_tokens=4, temperature=1.0, seed=1, ignore_eos=True)),
        ("the second", SamplingParams(max_new_tokens=6, temperature=1.3, seed=2, ignore_eos=True)),
        ("3", SamplingParams(max_new_tokens=5, ignore_eos=True, frequency_penalty=1.0)),
    ]
    alone = [engine.generate(*a) for a in asked]
    streams, last = [engine.stream(*a) for a in asked], [None] * 3
    while any(s is not None for s in streams):
        for i, stream in enumerate(streams):
            chunk = next(stream, None) if stream is not None else None
            last[i], streams[i] = (chunk or last[i]), stream if chunk else None
    for chunk, done in zip(last, alone, strict=True):
        assert chunk.completion.token_ids == done.token_ids
        assert chunk.completion.positions_computed == done.positions_computed


def test_threads_may_share_an_engine(tiny):
    params = [
        SamplingParams(max_new_tokens=4, temperature=1.0, seed=s, ignore_eos=True) for s in range(3)
    ]
    alone = [tiny.generate("abc", p).token_ids for p in params]
    found = [None] * 3

    def work(i: int):
        found[i] = tiny.generate("abc", params[i]).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert found == alone


# ---- sampling


def test_the_same_seed_gives_the_same_answer():
    def ids(seed):
        params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=seed, ignore_eos=True)
        return tuple(dice_engine().generate("abc", params).token_ids)

    assert ids(1) == ids(1)
    assert len({ids(s) for s in range(4)}) == 4


def test_without_params_the_engine_is_greedy_whatever_the_generation_config_says():
    made = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "max_new_tokens": 7}
    engine = tiny_engine(config=tiny_config(generation=made), runner=Dice)
    ids = engine.generate("abc").token_ids
    expected = list(b"abc")
    for token in ids:
        assert token == int(engine.step(expected)[:SPARE].argmax())
        expected.append(token)
    params = engine.default_params(top_k=3)
    assert (params.temperature, params.top_p, params.top_k, params.max_new_tokens) == (
        0.6,
        0.9,
        3,
        7,
    )


@pytest.mark.parametrize(
    ("made", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"temperature": 0.6}, 0.6),
    ],
)
def test_default_params_reads_do_sample(made, temperature):
    engine = tiny_engine(config=tiny_config(generation=made))
    assert engine.default_params().temperature == temperature


def test_logprobs_are_those_of_the_model(tiny):
    params = SamplingParams(
        max_new_tokens=5, temperature=2.0, top_k=5, seed=3, logprobs=3, ignore_eos=True
    )
    done = tiny.generate("abc", params)
    every = tiny.logits([*done.prompt_ids, *done.token_ids])[
        len(done.prompt_ids) - 1 :, :SPARE
    ].log_softmax(-1)
    assert [e.token_id for e in done.logprobs] == done.token_ids
    for row, entry in zip(every, done.logprobs, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-5)
        assert list(entry.top)[:3] == row.topk(3).indices.tolist()
    assert tiny.generate("abc", SamplingParams(max_new_tokens=2)).logprobs is None


def test_steps_record_what_could_have_been(tiny):
    params = SamplingParams(max_new_tokens=4, temperature=0.8, top_k=6, seed=3, ignore_eos=True)
    done = tiny.generate("abc", params, record=4)
    for step, token in zip(done.steps, done.token_ids, strict=True):
        assert (step.temperature, step.kept, len(step.best)) == (0.8, 6, 4)
        probabilities = [p for _, p in step.best]
        assert probabilities == sorted(probabilities, reverse=True) and sum(probabilities) <= 1.0001
        assert token < SPARE
    assert tiny.generate("abc", params).steps is None


def test_spare_rows_of_a_padded_matrix_never_win():
    engine = tiny_engine()
    engine.model.lm_head.weight[SPARE:] *= 50
    for seed in range(3):
        params = SamplingParams(max_new_tokens=4, temperature=1.5, seed=seed, ignore_eos=True)
        assert max(engine.generate("abc", params).token_ids) < SPARE


def test_a_tokenizer_larger_than_the_model_is_said(caplog):
    with caplog.at_level(logging.WARNING, "llm_engine"):
        engine = tiny_engine(config=tiny_config(vocab_size=258))
    assert "260 tokens, the model only 258" in caplog.text
    with pytest.raises(EngineError, match=f"token id {START}"):
        engine.generate("<|im_start|>")


# ---- step, logits, timings


def test_step_is_the_last_row_of_logits_and_can_use_a_cache_of_yours(tiny):
    ids = list(b"a loop of one's own")
    torch.testing.assert_close(tiny.step(ids), tiny.logits(ids)[-1])
    assert tiny.logits(ids).shape == (len(ids), V)
    cache, before = Growing(tiny.config, 1, tiny.device, tiny.dtype), tiny.runner.positions_computed
    for n in range(1, len(ids) + 1):
        row = tiny.step(ids[:n], cache)
    assert tiny.runner.positions_computed - before == len(ids)
    torch.testing.assert_close(row, tiny.logits(ids)[-1])
    row[0] = 1.0  # an ordinary tensor
    with pytest.raises(EngineError, match="no tokens"):
        tiny.step([])


def test_timings_are_of_the_work_and_add_up(tiny):
    done = tiny.generate("abc", SamplingParams(max_new_tokens=6, ignore_eos=True))
    t = done.timings
    assert (t.prompt_tokens, t.new_tokens, len(t.step_seconds)) == (3, 6, 6)
    assert 0 < t.first_token_seconds < t.total_seconds
    assert t.decode_tokens_per_second == pytest.approx(5 / sum(t.step_seconds[1:]))
    assert t.prefill_tokens_per_second == pytest.approx(3 / t.step_seconds[0])
    one = tiny.generate("abc", SamplingParams(max_new_tokens=1)).timings
    assert one.decode_tokens_per_second is None


def test_a_request_that_is_over_cannot_be_advanced(tiny):
    request = tiny.start("abc", SamplingParams(max_new_tokens=1))
    assert tiny.advance(request).finish_reason == "length"
    with pytest.raises(EngineError, match="over"):
        tiny.advance(request)


# ---- parts by name


def test_parts_come_from_the_registries(monkeypatch):
    monkeypatch.setitem(CACHES, "growing", Growing)
    monkeypatch.setattr(CACHES, "default", "growing")
    engine = tiny_engine(cache=None)
    assert isinstance(engine.new_cache(), Growing)
    assert isinstance(tiny_engine().new_cache(), NoCache)
    with pytest.raises(ValueError, match="unknown cache 'nosuch'.*growing.*none"):
        tiny_engine(cache="nosuch")
    with pytest.raises(ValueError, match="unknown runner 'nosuch'"):
        tiny_engine(runner="nosuch")
    assert RUNNERS.default in RUNNERS and DECODERS.default == "one-by-one"


def test_a_decoder_may_bring_several_tokens_a_step_and_a_stop_cuts_them():
    def by_threes(engine, request):
        _, computed = engine.feed(request.ids, request.cache)
        request.positions_computed += computed
        at = len(request.output_ids)
        whole = torch.zeros(V)
        return [Sample(t, None, None, whole, 0.0) for t in engine.runner.ids[at : at + 3]]

    engine = scripted("abcdefg", decoder=by_threes)
    chunks = list(engine.stream([65], SamplingParams(max_new_tokens=5)))
    assert [c.text for c in chunks] == ["abc", "de"] and chunks[-1].finish_reason == "length"
    chunks = list(engine.stream([65], SamplingParams(stop="bc")))
    assert [c.text for c in chunks] == ["a"] and chunks[0].completion.token_ids == [*b"abc"]


def test_tracing_selects_the_torch_runner_and_says_so(tiny, caplog):
    engine = scripted("abc")
    with engine.trace() as trace:
        assert isinstance(engine.runner, TorchRunner)
        engine.step([65])
    assert "torch runner stands in for Script" in caplog.text
    assert isinstance(engine.runner, Script) and trace.rows
    with pytest.raises(RuntimeError), engine.trace():
        raise RuntimeError
    assert isinstance(engine.runner, Script)


# ---- numbers that are none


def test_nan_logits_say_where_they_first_appeared():
    engine = tiny_engine()
    engine.model.layers[0].ffn.up_proj.weight[3, 4] = torch.nan
    with pytest.raises(
        LogitsError, match=r"layers\.0\.ffn\.up_proj.*weights are not finite.*sound checkpoint"
    ):
        engine.generate("abc")


def test_overflow_in_half_precision_says_where_and_what_to_do():
    engine = tiny_engine()
    engine.model.to(torch.float16)
    engine.model.layers[0].ffn.up_proj.weight *= 60000
    with pytest.raises(
        LogitsError, match=r"(?s)layers\.0\.ffn.*dtype='float32' or 'bfloat16'"
    ) as caught:
        engine.generate("abc")
    assert "after token 2" in str(caught.value)


def test_a_faulty_runner_is_told_from_a_faulty_model(tiny):
    class Broken:
        def __init__(self, model):
            self.inner, self.positions_computed = TorchRunner(model), 0

        def logits(self, batch, cache, rows):
            return self.inner.logits(batch, cache, rows) * torch.inf

    engine = Engine(tiny.model, tiny.tokenizer, cache="none", runner=Broken)
    with pytest.raises(LogitsError, match="look at the cache and the runner"):
        engine.generate("abc")


# ---- chat and reuse


def test_chat_goes_through_the_template(tiny):
    messages = [{"role": "user", "content": "hi"}]
    done = tiny.chat(messages, SamplingParams(max_new_tokens=3))
    assert done.prompt_ids == tiny.tokenizer.apply_chat_template(messages)
    assert done.prompt_ids[0] == START


def test_a_request_takes_over_the_cache_of_another(tiny):
    engine = Engine(tiny.model, tiny.tokenizer, cache=Growing, runner="torch")
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    first = engine.start("one two", params)
    list(engine.run(first))
    assert int(first.cache.seen[0]) == 7 + 5 - 1  # the last token was never fed
    for prompt, shared in (
        ([*first.ids, 65, 66], 11),
        (list(b"one tea"), 5),
        (list(b"on"), 1),
        ([9, 9], 0),
    ):
        fresh = engine.generate(prompt, params)
        again = engine.start(list(b"one two"), params)
        list(engine.run(again))
        second = engine.start(prompt, params, after=again)
        assert again.cache is None
        *_, last = engine.run(second)
        assert last.completion.token_ids == fresh.token_ids
        assert last.completion.positions_computed == fresh.positions_computed - shared


def test_a_cache_that_cannot_go_back_is_left_behind(tiny):
    engine = Engine(tiny.model, tiny.tokenizer, cache=Growing, runner="torch")
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    first = engine.start("one two", params)
    list(engine.run(first))
    first.cache.evicted = True
    second = engine.start("one tea", params, after=first)
    *_, last = engine.run(second)
    assert last.completion.token_ids == engine.generate("one tea", params).token_ids


def test_chat_keeps_history_and_cache(tiny):
    engine = Engine(tiny.model, tiny.tokenizer, cache=Growing, runner="torch", prefill_chunk=8)
    params = SamplingParams(
        max_new_tokens=4,
        temperature=1.0,
        top_k=20,
        seed=5,
        logit_bias=dict.fromkeys(range(128, 260), -100.0),
    )
    talk = Chat(engine, system="s", params=params)
    first = talk.send("hi")
    assert talk.messages[-1] == {"role": "assistant", "content": first.text}
    messages = [*talk.messages, {"role": "user", "content": "yo"}]
    second = talk.send("yo")
    plain = tiny.chat(messages, params)
    assert second.token_ids == plain.token_ids
    assert second.positions_computed < len(second.prompt_ids)
    assert [m["role"] for m in talk.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]


def test_an_answer_cut_short_stays_in_the_history_and_a_refused_one_does_not(tiny):
    talk = Chat(
        tiny,
        params=SamplingParams(max_new_tokens=9, logit_bias=dict.fromkeys(range(128, 260), -100.0)),
    )
    stream = talk.stream("hi")
    text = next(stream).text + next(stream).text
    stream.close()
    assert talk.messages[-1] == {"role": "assistant", "content": text}
    before = list(talk.messages)
    with pytest.raises(EngineError, match="context"):
        talk.stream("x" * CONTEXT)
    assert talk.messages == before
    talk.stream("never read").close()
    assert talk.messages == before


# ---- choices before work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float12"}, "cannot compute in dtype 'float12'.*float32.*bfloat16"),
        ({"dtype": torch.int8}, "torch.int8"),
        ({"device": "quantum"}, "unknown device 'quantum'"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"cache": "nosuch"}, "unknown cache"),
        ({"runner": "nosuch"}, "unknown runner"),
        ({"decoder": "nosuch"}, "unknown decoder"),
    ],
)
def test_bad_choices_are_refused_before_anything_is_fetched(monkeypatch, options, message):
    monkeypatch.setattr("llm_engine.engine.resolve", lambda *a, **k: pytest.fail("fetched"))
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained("whatever", **options)


def test_dtypes_and_devices_by_name():
    cpu = torch.device("cpu")
    for name, dtype in (
        ("bf16", torch.bfloat16),
        ("torch.float16", torch.float16),
        (torch.float32, torch.float32),
    ):
        assert pick_dtype(name, cpu) == dtype
    assert pick_dtype(None, cpu, "bfloat16") == torch.float32
    assert pick_dtype(None, torch.device("cuda"), "bfloat16") == torch.bfloat16
    assert pick_device("cpu") == pick_device(cpu) == cpu
    assert pick_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


# ---- the real model


def test_the_capital_of_france(engine):
    done = engine.generate("The capital of France is", SamplingParams(max_new_tokens=2))
    assert done.text == " Paris."
    assert done.positions_computed == 5 + 6


def test_from_pretrained_logs_what_it_will_take(tmp_path, caplog):
    folder = write_tiny_folder(tmp_path / "tiny")
    with caplog.at_level(logging.INFO, "llm_engine"):
        engine = Engine.from_pretrained(
            folder, device="cpu", dtype="bf16", cache="none", runner="torch"
        )
    assert "weights as bfloat16" in caplog.text
    assert (engine.dtype, engine.device.type, engine.folder) == (
        torch.bfloat16,
        "cpu",
        Path(folder),
    )
    assert (
        len(engine.generate("abc", SamplingParams(max_new_tokens=3, ignore_eos=True)).token_ids)
        == 3
    )
