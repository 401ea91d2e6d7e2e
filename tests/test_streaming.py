"""Streaming: text that is never broken, never taken back and never too much; iterator, async iterator and callback; closing."""

import asyncio
import gc
import itertools
import signal
import threading
import weakref
from contextlib import closing

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import (
    CONTEXT,
    Script,
    dice_engine,
    reference_stop,
    scripted,
    tiny_config,
    tiny_engine,
)
from tiny_folder import write_tiny_folder
from tokenizers import decoders, models, normalizers
from typer.testing import CliRunner

import llm_engine.streaming as streaming
from llm_engine import Chat, Chunk, Engine, EngineError, SamplingParams, astream, stream_to
from llm_engine.cli import app, read_rest, take_back
from llm_engine.engine import StopMatcher
from llm_engine.sampler import LogitsError
from llm_engine.streaming import (
    LiveStats,
    StopStreaming,
    Stream,
    between_steps,
    by_lines,
    by_words,
    for_terminal,
    percentile,
    regroup,
)
from llm_engine.tokenizer import IncrementalDetokenizer, Tokenizer, _JsonBackend

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
SCRIPT = "Der Fuchs 🦊 sagt 你好!\n\nUser: more"
LONG = SamplingParams(max_new_tokens=CONTEXT - 1, ignore_eos=True)


# ---------------------------------------------------------------- from tokens to text


class AnyBytes:
    """A vocabulary of whatever byte strings a test needs, one token each; the tokenizer around it is the real one."""

    kind, missing, special, strips_space = "byte-level", frozenset(), {}, False

    def __init__(self, tokens, strips_space=False):
        self.tokens, self.size, self.strips_space = list(tokens), len(tokens), strips_space

    def spelling(self, id):
        return repr(self.tokens[id])

    def piece(self, id, previous):
        return self.tokens[id]


@st.composite
def cut(draw, text):
    """Pieces, none of them empty, that join to `text` (a str, or bytes)."""
    places = draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=len(text)))
    places = sorted({0, len(text), *(place for place in places if place < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def pushed(tokenizer, ids, prompt_ids=()):
    streamed = IncrementalDetokenizer(tokenizer, prompt_ids)
    return [*(streamed.push(id) for id in ids), streamed.flush()]


@settings(max_examples=200)
@given(st.data())
def test_text_cut_into_any_tokens_streams_as_it_is(data):
    """Tokens that end anywhere inside characters: what comes out after each is exactly the characters that are complete."""
    text = data.draw(TEXT)
    parts = data.draw(cut(text.encode()))
    pieces = pushed(Tokenizer(AnyBytes(parts)), range(len(parts)))
    assert "".join(pieces) == text and pieces[-1] == ""
    for n in range(len(parts) + 1):
        complete = b"".join(parts[:n]).decode("utf-8", errors="ignore")
        assert "".join(pieces[:n]) == complete


@settings(max_examples=200)
@given(st.data())
def test_any_bytes_stream_as_they_decode_and_nothing_is_taken_back(data):
    """Also what is no UTF-8 at all: at every step the text so far is a beginning of the final text."""
    tokens = data.draw(st.lists(st.binary(min_size=1, max_size=5), min_size=1, max_size=8))
    fallback = data.draw(st.booleans())
    tokenizer = Tokenizer(AnyBytes([*tokens, b" ", b"\xe4\xbd", b"\xf0\x9f\xa6"], fallback))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    pieces, whole = pushed(tokenizer, ids), tokenizer.decode(ids)
    assert "".join(pieces) == whole
    for n, so_far in enumerate(itertools.accumulate(pieces, initial="")):
        assert whole.startswith(so_far), n
        shorter = tokenizer.decode(ids[:n])
        assert shorter.startswith(so_far)  # what is held back is at most one unfinished character
        assert len(shorter) - len(so_far) <= 3


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece's way: U+2581 for a space, one put in front, and bytes for what the vocabulary lacks."""
    words = ["\u2581", "\u2581cat", "c", "a", "t", "\u2581c", "\u2581ca"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    library = tokenizers.Tokenizer(
        models.BPE(
            {piece: id for id, piece in enumerate(vocabulary)},
            [("\u2581", "c"), ("\u2581c", "a"), ("\u2581ca", "t")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(_JsonBackend(library), eos_ids=(2,))


FALLBACK = byte_fallback_tokenizer()


@given(st.text(st.sampled_from("cat ä你🦊\n"), max_size=20))
def test_byte_fallback_streams_text_and_every_leading_space(text):
    ids = FALLBACK.encode(text)
    assert FALLBACK.decode(ids) == text == FALLBACK.backend.library.decode(ids)
    pieces = pushed(FALLBACK, ids)
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    # After a prompt nothing is taken from the answer's beginning.
    prompt = FALLBACK.encode("cat")
    assert "".join(pushed(FALLBACK, FALLBACK.encode(text)[0:], prompt)) == (
        " " + text if text else ""
    )


@given(st.lists(st.integers(0, FALLBACK.vocab_size - 1), max_size=16), st.data())
def test_byte_fallback_of_any_ids_and_any_prompt(ids, data):
    at = data.draw(st.integers(0, len(ids)))
    whole = FALLBACK.decode(ids)
    assert "".join(pushed(FALLBACK, ids)) == whole
    after = "".join(pushed(FALLBACK, ids[at:], ids[:at]))
    assert whole.endswith(after)
    before = IncrementalDetokenizer(FALLBACK)
    assert "".join(before.push(id) for id in ids[:at]) + after == whole


def test_a_special_token_inside_a_character_does_not_break_it():
    fox = FALLBACK.encode("🦊")[-4:]
    ids = [*fox[:2], 2, *fox[2:]]
    assert pushed(FALLBACK, ids) == ["", "", "", "", "🦊", ""]
    assert FALLBACK.decode(ids) == "🦊"


# ---------------------------------------------------------------- stop strings


@settings(max_examples=400)
@given(st.data())
def test_stop_matcher_against_brute_force_for_any_cut(data):
    """What is shown after each piece is known by brute force: the text before the first stop string to be complete; else
    all but the longest tail that begins one. Not a character more, and not one less."""
    letters = data.draw(st.sampled_from(["ab", "abc", "a你\n", "a🦊\ufffd"]))
    text = data.draw(st.text(letters, max_size=24))
    stops = data.draw(st.lists(st.text(letters, min_size=1, max_size=6), max_size=4))
    matcher, shown, come = StopMatcher(stops), "", ""
    for piece in data.draw(cut(text)):
        shown += matcher.push(piece)
        come += piece
        expected, stop = reference_stop(come, stops)
        assert matcher.matched == stop
        if stop is None:
            tails = [come[at:] for at in range(len(come))]
            held = next((t for t in tails if any(s.startswith(t) for s in stops)), "")
            expected = come[: len(come) - len(held)]
            assert matcher.held == held
        assert shown == expected
    expected, stop = reference_stop(text, stops)
    assert shown + matcher.flush() == expected and matcher.held == ""


@pytest.mark.parametrize("stop", ["\n\nUser:", "!\n\nUser", "🦊", "你好", "z", "more", "more!"])
def test_no_beginning_of_a_stop_string_is_ever_streamed(stop):
    """vllm#3574: the tokens of a stop string had been streamed before the string was complete. Here on every way out."""
    params = SamplingParams(max_new_tokens=len(SCRIPT.encode()), stop=stop)
    expected, matched = reference_stop(SCRIPT, [stop])
    texts = {way: "".join(c.text for c in way(params)) for way in (iterated, called_back, awaited)}
    assert set(texts.values()) == {expected}
    for way in texts:
        done = way(params)[-1].completion
        assert done.text == expected
        assert (done.finish_reason, done.stop_reason) == (
            ("stop", matched) if matched else ("length", None)
        )
        so_far = ""
        for chunk in way(params):
            so_far += chunk.text
            assert expected.startswith(so_far)


# ---------------------------------------------------------------- iterator, callback, async iterator


def iterated(params, engine=None):
    with Stream(engine or scripted(SCRIPT), [65], params) as chunks:
        return list(chunks)


def called_back(params, engine=None):
    chunks = []
    done = stream_to(engine or scripted(SCRIPT), [65], params, chunks.append)
    assert (
        done.token_ids == chunks[-1].completion.token_ids
        and done.text == chunks[-1].completion.text
    )
    return chunks


def awaited(params, engine=None):
    async def read():
        return [chunk async for chunk in astream(engine or scripted(SCRIPT), [65], params)]

    return asyncio.run(read())


def plain(chunks):
    """Chunks without the seconds, which are never the same."""
    last = chunks[-1].completion
    return (
        [c[:3] for c in chunks],
        last.text,
        last.token_ids,
        last.logprobs,
        last.positions_computed,
    )


@settings(max_examples=12)
@given(
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.0, 1.2]),
    new=st.integers(1, 12),
    stops=st.lists(st.text("abeo \x00", min_size=1, max_size=2), max_size=2),
)
def test_all_ways_give_the_same_chunks(seed, temperature, new, stops):
    params = SamplingParams(
        max_new_tokens=new, seed=seed, temperature=temperature, stop=tuple(stops), logprobs=1
    )
    engine = dice_engine()
    expected = plain(list(engine.stream([65], params)))
    for way in (iterated, called_back, awaited):
        assert plain(way(params, engine)) == expected
    assert engine.generate([65], params).text == expected[1]


def test_a_prompt_is_checked_when_the_stream_is_made():
    engine = tiny_engine()
    for way in (
        lambda: Stream(engine, []),
        lambda: astream(engine, [], None),  # not awaited, not even iterated
        lambda: stream_to(engine, [], None, print),
    ):
        with pytest.raises(EngineError, match="no tokens"):
            way()
    assert engine.runner.positions_computed == 0


def test_record_and_after_are_handed_on():
    engine = tiny_engine(cache="growing")
    params = SamplingParams(max_new_tokens=3, temperature=1.0, seed=1, ignore_eos=True)
    first = Stream(engine, [65, 66, 67, 68], params, record=2)
    assert len([*first][-1].completion.steps[0].best) == 2
    second = astream(engine, [65, 66, 67, 70], params, after=first.request, record=3)

    async def read():
        return [chunk async for chunk in second]

    done = asyncio.run(read())[-1].completion
    assert done.positions_computed == 1 + 2 and len(done.steps[0].best) == 3
    assert len(stream_to(engine, [65], params, print, record=2).steps) == 3


# ---- closing


def test_closing_stops_the_work_and_tells_how_far_it_came():
    engine = tiny_engine()
    with Stream(engine, [65, 66, 67], LONG) as chunks:
        assert engine.runner.positions_computed == 0
        next(chunks), next(chunks)
    assert engine.runner.positions_computed == 3 + 4
    assert list(chunks) == [] and engine.runner.positions_computed == 3 + 4
    done = chunks.completion
    assert (len(done.token_ids), done.finish_reason, done.positions_computed) == (2, None, 7)
    with pytest.raises(RuntimeError, match="mine"), Stream(engine, [65], LONG) as chunks:
        for _ in chunks:
            raise RuntimeError("mine")
    assert next(chunks, "over") == "over" and engine.runner.positions_computed == 7 + 1


def test_a_stream_that_is_over_stays_over():
    with Stream(scripted("ab"), [65], SamplingParams(max_new_tokens=2)) as chunks:
        assert [c.text for c in chunks] == ["a", "b"]
        assert list(chunks) == []
    assert chunks.completion.finish_reason == "length"


class Faulty(Script):
    """Fails at the third step."""

    def logits(self, batch, cache, rows):
        if batch.ids.shape[1] == 3:
            raise LogitsError("broken at step three")
        return super().logits(batch, cache, rows)


def faulty():
    return tiny_engine(runner=lambda model: Faulty(b"abcdef"))


def test_an_error_in_a_step_reaches_the_reader_of_every_kind_and_ends_the_stream():
    with pytest.raises(LogitsError, match="step three"):
        stream_to(faulty(), [65], None, print)
    chunks = Stream(faulty(), [65])
    assert [next(chunks).text, next(chunks).text] == ["a", "b"]
    with pytest.raises(LogitsError, match="step three"):
        next(chunks)
    assert list(chunks) == [] and chunks.completion.text == "ab"

    async def read():
        seen, chunks = [], astream(faulty(), [65])
        with pytest.raises(LogitsError, match="step three"):
            async for chunk in chunks:
                seen.append(chunk.text)
        assert [chunk async for chunk in chunks] == []
        return seen

    assert asyncio.run(read()) == ["a", "b"]


def test_a_callback_stops_by_raising_and_by_nothing_else():
    engine, texts = scripted("abcdef"), []

    def until_c(chunk):
        texts.append(chunk.text)
        if chunk.text == "c":
            raise StopStreaming

    done = stream_to(engine, [65], LONG, until_c)
    assert (texts, done.text, done.finish_reason) == (["a", "b", "c"], "abc", None)
    assert engine.runner.positions_computed == 1 + 2 + 3
    # What callbacks return by accident means nothing: 0 characters written, False, None.
    for value in (0, False, None, True):
        done = stream_to(
            scripted("abc"), [65], SamplingParams(max_new_tokens=3), lambda c, value=value: value
        )
        assert (done.text, done.finish_reason) == ("abc", "length")


def test_an_error_of_the_callback_reaches_the_caller_and_stops_the_work():
    engine = scripted("abcdef")

    def fail(chunk):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        stream_to(engine, [65], LONG, fail)
    assert engine.runner.positions_computed == 1

    async def coroutine(chunk):
        pass

    with pytest.raises(TypeError, match="astream"):
        stream_to(engine, [65], LONG, coroutine)
    assert engine.runner.positions_computed == 1


# ---- async: the loop stays free, cancelling stops the work


class Gate(Script):
    """A runner whose every step waits to be let through."""

    def __init__(self, ids):
        super().__init__(ids)
        self.begun, self.go, self.steps, self.threads = (
            threading.Event(),
            threading.Semaphore(0),
            0,
            set(),
        )
        self.running = 0

    def logits(self, batch, cache, rows):
        self.running += 1
        assert self.running == 1, "two steps at the same time"
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.go.acquire(timeout=20)
        self.steps += 1
        self.running -= 1
        return super().logits(batch, cache, rows)


def gated(ids=b"abcdefghijkl"):
    runner = Gate(ids)
    return tiny_engine(runner=lambda model: runner), runner


async def begun(runner):
    while not runner.begun.is_set():
        await asyncio.sleep(0)
    runner.begun.clear()


def test_the_event_loop_runs_while_a_step_is_computed():
    engine, runner = gated()

    async def read():
        stream = astream(engine, [65], SamplingParams(max_new_tokens=2))
        first = asyncio.create_task(anext(stream))
        await begun(runner)
        for _ in range(50):  # the loop turns, and the step is still at work
            await asyncio.sleep(0)
        assert not first.done() and runner.steps == 0
        runner.go.release(2)
        assert (await first).text == "a"
        assert threading.current_thread().name not in runner.threads
        return [chunk.text async for chunk in stream]

    assert asyncio.run(read()) == ["b"]
    assert len(runner.threads) == 1


def test_nothing_runs_ahead_of_the_reader():
    engine, runner = gated()
    runner.go.release(100)

    async def read():
        async for _ in astream(engine, [65], LONG):
            break
        await asyncio.sleep(0.05)

    asyncio.run(read())
    assert runner.steps == 1


def test_cancelling_stops_after_the_step_that_runs_and_waits_for_it():
    engine, runner = gated()

    async def read():
        stream = astream(engine, [65], LONG)

        async def consume():
            async for _ in stream:
                pass

        task = asyncio.create_task(consume())
        runner.go.release()
        await begun(runner)  # step one
        while runner.steps < 1:
            await asyncio.sleep(0)
        await begun(runner)  # step two is running
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done(), "the step still writes into the cache"
        runner.go.release(100)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert runner.steps == 2 and runner.running == 0
        await asyncio.sleep(0.05)
        assert runner.steps == 2
        assert [chunk async for chunk in stream] == []
        assert stream.completion.finish_reason is None and stream.completion.text == "ab"

    asyncio.run(read())


def test_a_timeout_is_a_cancellation():
    engine, runner = gated()

    async def read():
        stream = astream(engine, [65], LONG)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                task = asyncio.get_running_loop().call_later(0.1, runner.go.release, 100)
                await anext(stream)
        task.cancel()
        assert await anext(stream, "over") == "over"

    asyncio.run(read())
    assert runner.steps == 1


def test_a_second_cancellation_does_not_wait_and_still_stops_the_work(caplog):
    engine, runner = gated()

    async def read():
        task = asyncio.create_task(anext(astream(engine, [65], LONG)))
        await begun(runner)
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(read())
    assert runner.steps == 0
    runner.go.release(100)
    after = streaming._worker(engine).submit(lambda: runner.steps).result(timeout=20)
    assert after == 1 and not caplog.records


@pytest.mark.parametrize("again", ["aclose", "async with", "anext"])
def test_after_a_second_cancellation_closing_still_waits_for_the_step(again, caplog):
    """Who closes may then free the cache: nothing must be writing into it any more."""
    engine, runner = gated()

    async def read():
        stream = astream(engine, [65], LONG)
        task = asyncio.create_task(anext(stream))
        await begun(runner)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert runner.running == 1, "the step goes on"

        async def close():
            if again == "anext":
                assert await anext(stream, "over") == "over"
            elif again == "aclose":
                await stream.aclose()
            else:
                async with stream:
                    pass

        closing = asyncio.create_task(close())
        await asyncio.sleep(0.05)
        assert not closing.done(), "the step still writes into the cache"
        impatient = asyncio.create_task(stream.aclose())  # this too may be cancelled
        await asyncio.sleep(0.01)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        assert not closing.done() and runner.running == 1
        runner.go.release(100)
        await closing
        assert runner.running == 0 and runner.steps == 1
        await stream.aclose()  # once more does no harm

    asyncio.run(read())
    assert runner.steps == 1 and not caplog.records


def test_a_step_that_waits_in_the_queue_never_begins_when_cancelled():
    engine, runner = gated()

    async def read():
        first = asyncio.create_task(anext(astream(engine, [65], LONG)))
        await begun(runner)
        second = asyncio.create_task(anext(astream(engine, [65], LONG)))
        await asyncio.sleep(0.02)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second  # at once, although the first is still at work
        assert runner.steps == 0
        runner.go.release(100)
        await first

    asyncio.run(read())
    assert runner.steps == 1


def test_aclose_from_another_task_ends_the_stream_after_the_step():
    engine, runner = gated()

    async def read():
        stream = astream(engine, [65], LONG)

        async def consume():
            return [chunk.text async for chunk in stream]

        task = asyncio.create_task(consume())
        await begun(runner)
        with pytest.raises(RuntimeError, match="another task"):
            await anext(stream)
        closing_task = asyncio.create_task(stream.aclose())
        await asyncio.sleep(0.02)
        assert not closing_task.done()
        runner.go.release(100)
        await closing_task
        assert await task == ["a"] and runner.steps == 1

    asyncio.run(read())


def test_async_with_closes(caplog):
    engine = tiny_engine()

    async def read():
        async with astream(engine, [65, 66, 67], LONG) as chunks:
            async for _ in chunks:
                break
        assert [chunk async for chunk in chunks] == []
        with pytest.raises(KeyError):
            async with astream(engine, [65], LONG) as chunks:
                raise KeyError
        assert await anext(chunks, "over") == "over"

    asyncio.run(read())
    assert engine.runner.positions_computed == 3 and not caplog.records


def test_an_error_in_a_step_that_was_cancelled_is_not_reported_as_overlooked(caplog):
    engine, runner = gated()

    async def read():
        task = asyncio.create_task(anext(astream(engine, [65], LONG)))
        await begun(runner)
        task.cancel()
        runner.ids = []  # the step will fail
        runner.go.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        gc.collect()

    asyncio.run(read())
    assert not caplog.records


def test_async_streams_of_one_engine_take_turns_in_one_thread():
    engine, runner = gated()
    runner.go.release(100)
    order = []

    async def consume(name, stream):
        async for _ in stream:
            order.append(name)

    async def read():
        params = SamplingParams(max_new_tokens=5)
        await asyncio.gather(*(consume(name, astream(engine, [65], params)) for name in "xyz"))

    asyncio.run(read())
    assert "".join(order) == "xyz" * 5
    assert len(runner.threads) == 1 and runner.steps == 15


def test_interleaved_streams_of_all_kinds_give_what_each_gives_alone():
    engine = tiny_engine(cache="growing")
    asked = [
        SamplingParams(max_new_tokens=6, temperature=1.3, seed=seed, ignore_eos=True)
        for seed in range(4)
    ]
    alone = [engine.generate("abc", params).token_ids for params in asked]

    async def read():
        first = [astream(engine, "abc", params) for params in asked[:2]]
        other = [Stream(engine, "abc", params) for params in asked[2:]]
        for _ in range(6):
            for stream in first:
                await anext(stream)
            for stream in other:
                next(stream)
        return [s.completion.token_ids for s in (*first, *other)]

    assert asyncio.run(read()) == alone


def test_the_worker_thread_ends_with_its_engine():
    engine, runner = gated()
    runner.go.release(100)

    async def read():
        return await anext(astream(engine, [65], LONG))

    asyncio.run(read())
    asyncio.run(read())  # another event loop, the same thread
    thread = next(iter(streaming._workers[engine]._threads))
    assert thread.is_alive() and len(runner.threads) == 1
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None
    thread.join(timeout=10)
    assert not thread.is_alive()


# ---------------------------------------------------------------- other pieces


@given(st.data())
def test_words_and_lines_do_not_depend_on_the_cut_and_join_to_the_text(data):
    text = data.draw(st.text(st.sampled_from("ab \n\t你好，。カナ한국🦊é\u0301。"), max_size=30))
    pieces = data.draw(cut(text))
    for group in (by_words, by_lines):
        groups = list(group(pieces))
        assert "".join(groups) == text and "" not in groups
        assert groups == list(group(list(text))) == list(group([text]))
    assert list(by_lines(pieces)) == [
        line for line in text.replace("\n", "\n\0").split("\0") if line
    ]
    for word in by_words(pieces):
        assert len(word.split()) <= 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" Paris.\n\nThe end", [" Paris.", "\n\nThe", " end"]),
        ("你好，世界。ok 再见", ["你", "好，", "世", "界。", "ok", " 再", "见"]),
        ("한국어 문장", ["한국어", " 문장"]),
        ("a👩\u200d👩\u200d👧b  ", ["a👩\u200d👩\u200d👧b", "  "]),
        ("ひらがな", list("ひらがな")),
        ("", []),
    ],
)
def test_words(text, words):
    assert list(by_words(text)) == words


def test_a_piece_comes_as_soon_as_it_is_certain():
    came = []

    def pieces():
        for text in ("one ", "tw", "o", "\n", "three"):
            came.append(text)
            yield text

    words = by_words(pieces())
    assert next(words) == "one" and came == ["one "]
    assert next(words) == " two" and came == ["one ", "tw", "o", "\n"]
    lines = by_lines(iter(["a\nb", "\n", "c"]))
    assert list(lines) == ["a\n", "b\n", "c"]
    assert list(regroup(["abcde"], lambda t: 2 if len(t) >= 2 else 0)) == ["ab", "cd", "e"]


def test_closing_a_grouping_closes_the_stream():
    engine = scripted("one two three four")
    chunks = Stream(engine, [65], LONG)
    with closing(by_words(chunks)) as words:
        assert next(words) == "one"
    assert chunks.closed and engine.runner.positions_computed == 1 + 2 + 3 + 4
    chunks = Stream(engine, [65], LONG)
    with closing(by_words(LiveStats().watch(chunks))) as words:
        assert next(words) == "one" and not chunks.closed
    assert chunks.closed and engine.runner.positions_computed == 10 + 10
    assert list(LiveStats().watch([Chunk("a", (1,))])) == [Chunk("a", (1,))]
    stream = engine.stream([65], LONG)
    words = by_lines(stream)
    words.close()  # not begun: nothing was computed, nothing will be
    assert engine.runner.positions_computed == 20


def test_control_characters_do_not_reach_a_terminal():
    assert for_terminal("a\tb\n\x1b[2J\r\x07\x9b\x7f é🦊") == "a\tb\n␛[2J␍␇<U+009B><U+007F> é🦊"
    assert all(c in "\n\t" or ord(c) >= 32 for c in for_terminal("".join(map(chr, range(0x300)))))


# ---------------------------------------------------------------- timings


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.integers(0, 100))
def test_percentile_is_the_nearest_rank(values, percent):
    assert percentile(values, percent) == np.percentile(values, percent, method="inverted_cdf")


def test_percentile_by_hand_and_what_it_refuses():
    hundred = list(range(1, 101))
    assert [percentile(hundred, p) for p in (0, 1, 7, 50, 95, 100)] == [1, 1, 7, 50, 95, 100]
    assert percentile([3.0, 1.0], 50) == 1.0 and percentile([3.0, 1.0], 51) == 3.0
    for values, percent in (([], 50), ([1.0], -1), ([1.0], 101)):
        with pytest.raises(ValueError, match="percentile"):
            percentile(values, percent)


def test_live_stats_on_a_clock_of_ours():
    now = [100.0]
    live = LiveStats(lambda: now[0])
    assert str(live) == "no token yet"
    assert live.tokens_per_second is None and live.latency() is None

    def arrives(after, text, tokens):
        now[0] += after
        live.add(Chunk(text, tuple(range(tokens))))

    arrives(2.0, "", 1)
    assert str(live) == "first token after 2.000 s" and live.first_text_seconds is None
    arrives(0.5, "你", 1)
    arrives(0.25, "x", 1)
    arrives(0.5, "yz", 2)  # two at once: each waited half of it
    arrives(1.0, "", 0)  # nothing new
    assert (live.first_token_seconds, live.first_text_seconds, live.tokens) == (2.0, 2.5, 5)
    assert live.gaps == [0.5, 0.25, 0.25, 0.25]
    assert live.tokens_per_second == pytest.approx(4 / 1.25)
    assert (live.latency(), live.latency(95)) == (0.25, 0.5)
    assert str(live) == (
        "first token after 2.000 s, then 3.2 tokens/s (between tokens: p50 250.0 ms, p95 500.0 ms)"
    )


def test_watching_a_stream_changes_nothing_and_counts_all():
    engine = scripted("abcdef")
    live = LiveStats()
    chunks = list(live.watch(engine.stream([65], SamplingParams(max_new_tokens=4))))
    assert [c.text for c in chunks] == list("abcd")
    assert live.tokens == 4 and len(live.gaps) == 3
    assert 0 < live.first_token_seconds == live.first_text_seconds
    work = chunks[-1].completion.timings
    assert live.first_token_seconds >= sum(work.step_seconds[:1])


# ---------------------------------------------------------------- Ctrl-C


def test_between_steps_the_first_ctrl_c_waits_and_the_second_does_not():
    before = signal.getsignal(signal.SIGINT)
    with between_steps() as asked:
        assert not asked.is_set()
        signal.raise_signal(signal.SIGINT)
        assert asked.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyError), between_steps():
        raise KeyError
    assert signal.getsignal(signal.SIGINT) is before


def test_between_steps_in_another_thread_leaves_signals_alone():
    before, found = signal.getsignal(signal.SIGINT), []

    def work():
        with between_steps() as asked:
            found.append((signal.getsignal(signal.SIGINT) is before, asked.is_set()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(True, False)]


# ---------------------------------------------------------------- the command `chat`


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(
        write_tiny_folder(tmp_path_factory.mktemp("chat") / "tiny", max_position_embeddings=512)
    )


def chat(folder, *lines, arguments=("-n", "3")):
    plain = ("--model", folder, "--device", "cpu", "--cache", "growing", "--runner", "torch")
    return CliRunner().invoke(app, ["chat", *plain, *arguments], input="\n".join([*lines, ""]))


@pytest.fixture
def asked(monkeypatch):
    """The prompts that are started, as text."""
    prompts, start = [], Engine.start

    def noted(self, prompt, *args, **options):
        request = start(self, prompt, *args, **options)
        prompts.append(self.tokenizer.decode(request.prompt_ids))
        return request

    monkeypatch.setattr(Engine, "start", noted)
    return prompts


def questions(prompt):
    """What the user said, in the tiny folder's template."""
    return [part.split("\n")[0] for part in prompt.split("user\n")[1:]]


def test_undo_retry_reset_and_system(folder, asked):
    run = chat(folder, "/undo", "/retry", "one", "two", "/undo", "three", "/retry", "/reset", "four",
               "/system be brief", "five", "/system", "/reset", "six", "/nonsense", "/system off", "seven", "/quit", "never")  # fmt: skip
    assert run.exit_code == 0, run.output
    assert [questions(prompt) for prompt in asked] == [
        ["one"], ["one", "two"], ["one", "three"], ["one", "three"], ["four"], ["four", "five"], ["six"],
        ["six", "seven"],
    ]  # fmt: skip
    assert ["system\nbe brief" in prompt for prompt in asked] == [False] * 5 + [True] * 2 + [False]
    for note in ("nothing to take back", "no question to ask", "taken back: two", "system: be brief",
                 "no command /nonsense", "same question has the same answer"):  # fmt: skip
        assert note in run.stderr and note not in run.stdout
    assert "never" not in run.output


def test_an_option_gives_the_instructions_and_reset_keeps_them(folder, asked):
    chat(folder, "one", "/reset", "two", arguments=("-n", "2", "--system", "be kind"))
    assert all("system\nbe kind" in prompt for prompt in asked) and len(asked) == 2


def test_a_model_without_a_template_is_refused_before_the_first_question(tmp_path):
    bare = write_tiny_folder(tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text("{}")
    run = chat(str(bare), "hi")
    assert run.exit_code == 1 and "has no chat template" in run.stderr and "> " not in run.stdout
    refusing = "{\"chat_template\": \"{{ raise_exception('no system here') if messages[0].role == 'system' }}x\"}"
    (bare / "tokenizer_config.json").write_text(refusing)
    run = chat(str(bare), "hi", arguments=("--system", "be brief"))
    assert run.exit_code == 1 and "no system here" in run.stderr
    assert chat(str(bare), "hi", arguments=("-n", "1")).exit_code == 0


def test_messages_of_several_lines_and_of_any_beginning(folder, asked):
    chat(
        folder,
        '"""',
        "first",
        "",
        "/second",
        '"""',
        "a\\",
        "b\\",
        "c",
        ' """one line"""  ',
        " /slash",
        "",
    )
    last = asked[-1]
    for message in ("user\nfirst\n\n/second", "user\na\nb\nc", "user\none line", "user\n/slash"):
        assert message in last
    assert len(asked) == 4


def test_the_end_of_the_input_inside_a_message_leaves(folder, asked):
    assert chat(folder, '"""', "half").exit_code == 0 and not asked


def test_stats_tell_what_came_from_the_cache(folder):
    run = chat(folder, "one", "/stats", "two", "/retry", "/stats", "three")
    lines = [line for line in run.stderr.splitlines() if line.startswith("[prompt")]
    assert len(lines) == 2 and run.stderr.count("first token after") == 2
    total, cached = _two(lines[0])
    assert 0 < cached < total
    total_again, cached_again = _two(lines[1])
    assert (total_again, cached_again) == (
        total,
        total - 1,
    )  # the same prompt: only its last token is fed
    assert "3 new, ended by length" in lines[0] and f"context {total + 3} of 512" in lines[0]


def _two(line):
    words = line.replace("[", " ").split()
    return int(words[1]), int(words[3])


def test_the_prefix_really_comes_from_the_cache(folder, monkeypatch):
    made, start = [], Engine.start

    def noted(self, *args, **options):
        made.append((self, start(self, *args, **options)))
        return made[-1][1]

    monkeypatch.setattr(Engine, "start", noted)
    chat(folder, "one", "two", "/reset", "one")
    engine, (first, second, third) = made[0][0], [request for _, request in made]
    assert engine.runner.positions_computed == sum(r.positions_computed for _, r in made)
    shared = len([*itertools.takewhile(lambda p: p[0] == p[1], zip(first.ids, second.prompt_ids))])
    assert shared >= len(first.prompt_ids)
    kept = min(shared, len(first.ids) - 1)  # the last token of an answer was never fed
    assert second.positions_computed == len(second.prompt_ids) - kept + 2
    assert third.positions_computed == 1 + 2 and third.ids == first.ids


def test_a_full_context_is_explained_and_the_chat_goes_on(folder, tmp_path, asked):
    small = write_tiny_folder(tmp_path / "small", max_position_embeddings=64)
    lines = ["x" * 40, "/undo", "x" * 100, "y" * 40]
    run = chat(str(small), *lines, arguments=("-n", "500"))
    assert run.exit_code == 0
    assert "the context of 64 tokens is full: /undo takes" in run.stderr
    assert (
        "error: the prompt has" in run.stderr
        and "/reset begins anew" in run.stderr.split("error:")[1]
    )
    assert [questions(prompt) for prompt in asked] == [["x" * 40], ["y" * 40]]
    assert "cut off after 3 tokens: -n" in chat(folder, "hi").stderr


def test_control_characters_of_an_answer_are_shown_as_signs(folder, monkeypatch):
    def advance(self, request):
        chunk = Chunk("\x1b[31mred", (65,), "stop", request.completion())
        request.finish_reason = "stop"
        return chunk

    monkeypatch.setattr(Engine, "advance", advance)
    assert "␛[31mred\n" in chat(folder, "hi").stdout


def test_ctrl_c_at_the_prompt_does_not_leave(folder, monkeypatch, asked):
    lines = iter([KeyboardInterrupt, "hi", '"""', KeyboardInterrupt, "yo", EOFError])

    def typed(prompt=""):
        line = next(lines)
        if line in (KeyboardInterrupt, EOFError):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    run = chat(folder)
    assert run.exit_code == 0 and run.stderr.count("/quit leaves") == 2
    assert [questions(prompt) for prompt in asked] == [["hi"], ["hi", "yo"]]


def test_ctrl_c_ends_the_answer_after_the_step_and_keeps_its_cache(folder, monkeypatch, asked):
    """A real SIGINT during the second step."""
    advance, steps = Engine.advance, []

    def interrupted(self, request):
        steps.append(request)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGINT)
        return advance(self, request)

    monkeypatch.setattr(Engine, "advance", interrupted)
    run = chat(folder, "hi", "yo", arguments=("-n", "5", "--stats"))
    assert run.exit_code == 0 and run.stdout.count(" …") == 1
    first, second = dict.fromkeys(map(id, steps)), [r for r in steps if r is not steps[0]]
    assert len(first) == 2 and len(steps) - len(second) == 2
    assert "2 new, ended by interruption" in run.stderr and "5 new, ended by length" in run.stderr
    assert second[0].positions_computed < len(second[0].prompt_ids)
    assert questions(asked[1]) == ["hi", "yo"]


def test_ctrl_c_in_the_middle_of_a_step_leaves_no_torn_cache_behind(monkeypatch):
    """Half of the layers have the new token and half have not; the next answer must not notice."""
    from llm_engine.cli import answer

    engine = tiny_engine(cache="growing", config=tiny_config(max_position_embeddings=512))
    plain = Engine(engine.model, engine.tokenizer, cache="none", runner="torch")
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    talk, calls = Chat(engine, params=params), []
    ffn = engine.model.layers[0].ffn
    forward = ffn.forward

    def interrupted(x):
        calls.append(1)
        if (
            len(calls) == 5
        ):  # the second step of the second answer, after its keys and values were stored
            raise KeyboardInterrupt
        return forward(x)

    monkeypatch.setattr(ffn, "forward", interrupted)
    answer(talk, "a")
    answer(talk, "b")
    assert len(talk.last.output_ids) == 1
    assert talk.last.cache is None  # whatever the kind of cache: not to be trusted
    answer(talk, "c")
    last = talk.last
    assert [m["content"] for m in talk.messages][::2] == ["a", "b", "c"]
    assert plain.generate(last.prompt_ids, params).token_ids == last.output_ids


def test_an_answer_stopped_before_its_first_word_was_not_asked(folder, monkeypatch, asked):
    advance, steps = Engine.advance, []

    def interrupted(self, request):
        steps.append(request)
        if len(steps) == 1:
            raise KeyboardInterrupt
        return advance(self, request)

    monkeypatch.setattr(Engine, "advance", interrupted)
    run = chat(folder, "hi", "yo")
    assert "not asked" in run.stderr and questions(asked[1]) == ["yo"]


def test_an_error_in_the_middle_of_an_answer_takes_the_question_back(folder, monkeypatch, asked):
    advance, steps = Engine.advance, []

    def failing(self, request):
        steps.append(request)
        if len(steps) == 2:
            raise LogitsError("not finite")
        return advance(self, request)

    monkeypatch.setattr(Engine, "advance", failing)
    run = chat(folder, "hi", "yo")
    assert "error: not finite" in run.stderr and questions(asked[1]) == ["yo"]


def test_generate_stopped_by_ctrl_c_keeps_what_there_is(folder, monkeypatch):
    advance, steps = Engine.advance, []

    def interrupted(self, request):
        steps.append(request)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return advance(self, request)

    monkeypatch.setattr(Engine, "advance", interrupted)
    run = CliRunner().invoke(
        app,
        [
            "generate",
            "abc",
            "-n",
            "9",
            "--model",
            folder,
            "--stats",
            "--cache",
            "growing",
            "--runner",
            "torch",
        ],
    )
    assert run.exit_code == 130 and "new: 2 tokens, ended by interruption" in run.stderr
    assert run.stdout == steps[0].text + "\n"


def test_the_parts_of_the_chat_by_hand(monkeypatch):
    lines = iter(["b\\", "c"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    assert read_rest("a\\") == "a\nb\nc"
    assert read_rest('"""x"""') == "x" and read_rest(" y ") == "y"
    talk = Chat(tiny_engine(), system="s")
    assert take_back(talk) is None and len(talk.messages) == 1
    talk.messages += [{"role": r, "content": r + n} for n in "12" for r in ("user", "assistant")]
    assert take_back(talk) == "user2" and talk.messages[-1]["content"] == "assistant1"
