"""The planner: every part of it against what is measured, the question and its answers, the command."""

import dataclasses
import gc
import inspect
import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quantized_files import model_folder, run

from llm_engine.attention import CACHES, single
from llm_engine.config import ConfigError, ModelConfig, load_config
from llm_engine.engine import Engine
from llm_engine.hub import HubError
from llm_engine.memory import (
    CACHE_BYTES,
    Ledger,
    Need,
    PlanError,
    fast_working_bytes,
    parse_size,
    plan,
    show_size,
    skeleton,
    weight_bytes,
    working_bytes,
)
from llm_engine.quantize import Scheme
from llm_engine.quantized_files import find_recipe, save_quantized
from llm_engine.transformer import TorchRunner, Transformer, load_model
from llm_engine.weights import open_checkpoint


def config(**changes):
    sizes = {
        "model_type": "llama", "vocab_size": 99, "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
        "max_position_embeddings": 256,
    }  # fmt: skip
    return ModelConfig(**{**sizes, **changes})


# ---- weights: exactly


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "int4", "int4-g16-asym"])
def test_weights_as_planned_and_as_loaded(tmp_path, name, tied):
    folder = model_folder(tmp_path / "m", tied, attention_bias=True, hidden_size=40)
    recipe = None if "int" not in name else find_recipe(name)
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    model = load_model(folder, dtype=dtype, quantize=recipe)
    planned = weight_bytes(skeleton(load_config(folder)), recipe, dtype)
    assert planned == sum(weight.nbytes for weight in model.parameters())
    if recipe is not None:
        written = save_quantized(model, tmp_path / "q", folder, recipe.name)
        bare = skeleton(load_config(folder))
        assert open_checkpoint(written).stored_bytes(bare, dtype) == planned


def test_a_skeleton_takes_no_memory():
    huge = config(hidden_size=16384, intermediate_size=65536, vocab_size=10**6)
    assert all(weight.is_meta for weight in skeleton(huge).parameters())
    assert weight_bytes(skeleton(huge), None, torch.float32) > 60e9


# ---- the cache: exactly


@pytest.mark.parametrize("name", sorted(CACHE_BYTES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_as_planned_and_as_filled(name, dtype):
    c = config(max_position_embeddings=64)
    for tokens in (1, 15, 16, 40, 64):
        cache, zeros = CACHES[name](c, 3, "cpu", dtype), torch.zeros(3, 2, tokens, 12, dtype=dtype)
        batch = single([0] * tokens)
        batch = batch._replace(ids=batch.ids.expand(3, -1), pos=batch.pos.expand(3, -1))
        for layer in range(2):
            cache.append(layer, zeros, zeros, batch)
        cache.commit()
        assert CACHE_BYTES[name](c, tokens, 3, dtype) == getattr(cache, "bytes", 0)


def test_every_cache_of_the_engine_can_be_planned():
    ours = {name for name, cache in CACHES.items() if cache.__module__.startswith("llm_engine")}
    assert ours == CACHE_BYTES.keys() & ours, "a chapter that adds a cache adds a line"


# ---- intermediate results: exactly, by the ledger


def peak_of_a_pass(c, tokens, past, batch, dtype, cache, recipe=None):
    model = Transformer(c).to(dtype).eval().requires_grad_(False)
    if recipe:
        from llm_engine.quantize import quantize_model

        quantize_model(model, recipe, skip=())
    runner, held = TorchRunner(model), CACHES[cache](c, batch, "cpu", dtype)

    def rows(n, start):
        one = single([5] * n, start)
        return one._replace(ids=one.ids.repeat(batch, 1), pos=one.pos.repeat(batch, 1))

    last = torch.zeros(batch, 1, dtype=torch.long)
    if past:
        runner.logits(rows(past, 0), held, last)
        held.commit()
    new = rows(tokens, past)
    if cache != "none":
        held.stage(new)  # a growing cache grows here
    last += tokens - 1
    gc.collect()
    with Ledger() as ledger:
        runner.logits(new, held, last)
    return ledger.peak


SHAPES = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "wide ffn": {"intermediate_size": 600},
    "large vocabulary": {"vocab_size": 20_000},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache", ["growing", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_intermediate_results_to_the_byte(shape, cache, dtype):
    c = config(**SHAPES[shape])
    for tokens, past, batch in ((1, 200, 1), (100, 0, 1), (30, 70, 2), (200, 0, 3)):
        planned = working_bytes(c, tokens, past + tokens, batch, dtype, cache=cache)
        measured = peak_of_a_pass(c, tokens, past, batch, dtype, cache)
        # what rounding the new tokens takes on its way is left out of the formula
        assert measured == planned or (cache == "int8" and abs(measured / planned - 1) < 0.02)


@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(4, 16), Scheme(4, 16, False)])
def test_quantized_weights_need_room_for_a_slice(scheme):
    c = config(hidden_size=1024, head_dim=256, intermediate_size=4096, num_hidden_layers=1)
    for tokens in (1, 100):
        planned = working_bytes(c, tokens, tokens, decoded=True)
        measured = peak_of_a_pass(c, tokens, 0, 1, torch.float32, "growing", scheme)
        assert 0.5 * planned < measured <= planned * 1.02


def test_the_ledger_counts_what_is_there_at_one_time():
    x = torch.ones(1000)
    with Ledger() as ledger:
        y = x + 1
        z = y.view(10, 100).T  # the same memory
        assert ledger.now == 4000
        x.add_(1)  # nothing new
        del y
        assert ledger.now == 4000, "the view keeps it"
        del z
        assert ledger.now == 0
        for _ in range(5):
            x * 2
    assert ledger.peak == 4000
    w = torch.ones(9)
    assert ledger.peak == 4000 and w.sum() == 9, "outside nothing is counted"


# ---- the whole, in a process of its own


@pytest.mark.parametrize(("precision", "tokens"), [("float32", 1500), ("int8", 300)])
def test_a_process_stays_within_its_plan(default_folder, precision, tokens):
    """The most memory of a process that loads, reads a prompt and answers: no more than planned, and not much less."""
    code = """
import sys, resource, torch
torch.set_num_threads(1)
from llm_engine import Engine, SamplingParams
folder, precision, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
quantize = None if precision == "float32" else precision
engine = Engine.from_pretrained(folder, quantize=quantize)
engine.generate(list(range(100, 96 + tokens)), SamplingParams(max_new_tokens=4, ignore_eos=True))
try:  # Linux; its ru_maxrss would include what the parent process had
    lines = open("/proc/self/status").read().splitlines()
    print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024)
except OSError:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(default_folder), precision, str(tokens)],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
    )  # fmt: skip
    made = plan(default_folder, context=tokens, device="cpu", runner="numba", memory="64GB")
    need = next(need for need in made.needs if need.name == precision)
    assert 0.6 * need.total < int(done.stdout) < 1.1 * need.total


def test_the_fast_formula_follows_what_it_depends_on():
    c = config()
    base = fast_working_bytes(c, 100, 100)
    assert fast_working_bytes(c, 100, 200) > base, "more slots"
    assert fast_working_bytes(c, 100, 100, 2) > 1.5 * base, "more rows"
    assert fast_working_bytes(c, 100, 100, threads=4) > base, "scores for each thread"
    assert fast_working_bytes(c, 100, 100, dtype=torch.bfloat16) > base, "two widened layers"
    assert fast_working_bytes(c, 1, 100) < base


# ---- sizes in words


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9), ("8 gb", 8 * 10**9), ("8G", 8 * 10**9), ("8GiB", 8 * 2**30), ("7.5 GiB", 15 * 2**29),
        ("512M", 512 * 10**6), ("1 KiB", 1024), ("123", 123), (10**6, 10**6), ("1T", 10**12), ("5 B", 5),
    ],
)  # fmt: skip
def test_sizes_are_understood(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "8 gigabytes", "8XB", "1e9", "8GBB", "8 i"])
def test_what_is_no_size(text):
    with pytest.raises(PlanError, match="is not a size of memory. Write 8GB"):
        parse_size(text)


def test_sizes_in_three_digits():
    assert [show_size(n) for n in (0, 1_234_567, 85_000_000, 538_060_032, 999_600_000)] == [
        "0.00 MB", "1.23 MB", "85.0 MB", "538 MB", "1.00 GB",
    ]  # fmt: skip
    assert show_size(61_800_000_000) == "61.8 GB" and show_size(123_456_000_000_000) == "123,456 GB"


# ---- plans


def test_a_plan_of_the_default_model(default_folder):
    made = plan(default_folder, context=2048, memory="8GB", device="cpu")
    needs = {need.name: need for need in made.needs}
    assert [*needs] == ["float32", "bfloat16", "int8", "int4"]
    assert needs["float32"].weights == 538_060_032 == 2 * needs["bfloat16"].weights
    assert needs["int8"].weights == 135_029_760 and 80e6 < needs["int4"].weights < 90e6
    assert 8 < needs["int8"].bits < 8.1 and 5.2 < needs["int4"].bits < 5.3
    assert needs["float32"].cache == 46_080 * 4096, "2,048 tokens: the next power of two"
    assert made.advice == ("The most precise that fits: float32 (--dtype float32).",)
    text = str(made)
    assert "134,515,008 weights" in text and "context 2,048, batch 1" in text
    assert len({len(line) for line in text.splitlines()[3:8]}) == 1, (
        "columns stand under each other"
    )


def big(**changes):
    """The shape of Llama-3.2-1B."""
    sizes = {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131_072, "tie_word_embeddings": True, "dtype": "bfloat16",
    }  # fmt: skip
    return config(**{**sizes, **changes})


def need_of(made, name):
    return next(need for need in made.needs if need.name == name)


def test_what_is_advised_is_true():
    """Each change that is said to fit fits when it is asked for; one more token than the longest context does not."""
    question = {"context": 8192, "memory": "4GB", "device": "cpu", "cache": "growing"}
    made = plan(big(), **question)
    assert made.fits(need_of(made, "float32")) == "no"
    for name in ("bfloat16", "int8", "int4"):
        longest = need_of(made, name).longest
        again = plan(big(), **{**question, "context": longest})
        assert again.fits(need_of(again, name)) != "no"
        again = plan(big(), **{**question, "context": longest + 1})
        assert again.fits(need_of(again, name)) == "no"
    assert need_of(made, "float32").longest == 0, "its weights alone are too much"
    changes = [
        (r"a context of ([\d,]+) \(plan --context\): ", "context"),
        (r"a batch of ([\d,]+) \(plan --batch\): ", "batch"),
        (r"keys and values in (8) bits \(--cache int8\): ", "cache"),
        (r"the prompt (512) tokens at a time \(--prefill-chunk 512\): ", "prefill_chunk"),
    ]  # fmt: skip
    seen = set()
    for asked in (
        question,
        {**question, "context": 131_072, "batch": 4, "memory": "9GB"},
        {**question, "batch": 40, "context": 500, "memory": "7GB"},
    ):
        made = plan(big(), **asked)
        best = next((need.name for need in made.needs if made.fits(need) != "no"), None)
        assert (best is not None) == made.advice[0].startswith(
            f"The most precise that fits: {best} (--"
        )
        wanted = "int4" if best is None else "float32"
        for line in made.advice:
            for pattern, option in changes:
                if found := re.match("  - " + pattern, line):
                    value = "int8" if option == "cache" else int(found[1].replace(",", ""))
                    then = plan(big(), **{**asked, option: value})
                    need = need_of(then, wanted)
                    assert f": {show_size(need.total)}, " in line
                    assert line.endswith("fits") == (then.fits(need) != "no")
                    seen.add((option, line.endswith("fits")))
    assert {("context", True), ("batch", True), ("cache", False), ("prefill_chunk", False)} <= seen


def test_each_change_is_told_with_what_it_brings():
    made = plan(big(), context=131_072, batch=4, memory="6GB", device="cpu")
    text = "\n".join(made.advice)
    assert "int4 needs" in text and "more than there is" in text
    longest = need_of(made, "int4").longest
    assert f"a context of {longest:,} (plan --context): 6.00 GB, fits" in text
    then = plan(big(), context=131_072, batch=4, memory="6GB", device="cpu", cache="int8")
    assert f"(--cache int8): {show_size(need_of(then, 'int4').total)}, not enough alone" in text


def test_nothing_is_advised_that_was_asked_for():
    """Who reads a prompt 128 tokens at a time into an int8 cache is not told to do so, nor to take larger pieces."""
    question = {"context": 65536, "batch": 16, "memory": "3GB", "device": "cuda"}
    for asked, left in (
        ({"cache": "int8", "prefill_chunk": 128}, None),
        ({"cache": "int8", "prefill_chunk": 512}, None),
        ({"cache": "int8"}, "--prefill-chunk 512"),
        ({"prefill_chunk": 128}, "--cache int8"),
    ):
        made = plan(big(), **question, **asked)
        text = "\n".join(made.advice)
        assert "together" not in text and "both" not in text
        assert ("--cache int8" in text) == (left == "--cache int8")
        assert ("--prefill-chunk 512" in text) == (left == "--prefill-chunk 512")
        longest = need_of(made, "int4").longest
        assert (f"a context of {longest:,} (plan --context)" in text) == (longest > 0)
        most = re.search(rf"  - {left}: a context of ([\d,]+) fits", text)
        assert bool(most) == (left == "--cache int8"), "the other one brings no token more"
        if most:
            most = int(most[1].replace(",", ""))
            then = plan(big(), **{**question, **asked, "cache": "int8", "context": most})
            assert then.fits(need_of(then, "int4")) != "no" and most > longest
    many = plan(big(), **{**question, "batch": 40_000}, cache="int8", prefill_chunk=128)
    assert many.advice[-1].startswith("  - --batch 1: a context of")


def test_when_nothing_helps():
    made = plan(big(), memory="300MB", device="cpu")
    assert all(made.fits(need) == "no" and need.longest == 0 for need in made.needs)
    assert "take a smaller model, or a machine with more memory" in made.advice[-1]
    assert " -\n" in str(made) or str(made).split("int4")[1].split("\n")[0].endswith("-")


def test_changes_together_when_none_is_enough_alone():
    question = {"memory": "3GB", "device": "cuda", "cache": "int8", "prefill_chunk": 512}
    for batch, alone in ((16, 16), (40_000, 1)):
        made = plan(big(), context=65536, batch=batch, memory="3GB", device="cuda")
        text = made.advice[-1]
        assert ("and --prefill-chunk 512 together: a context of" in text) == (batch == alone)
        assert ("and --batch 1: a context of" in text) == (batch != alone)
        most = int(text.split("context of ")[1].split(" ")[0].replace(",", ""))
        for context, verdict in ((most, "barely"), (most + 1, "no")):
            again = plan(big(), context=context, batch=alone, **question)
            assert again.fits(need_of(again, "int4")) == verdict


@settings(max_examples=15)
@given(
    context=st.integers(1, 4096), more=st.integers(0, 4096), batch=st.integers(1, 8),
    cache=st.sampled_from(["growing", "int8", "static", "none", "concat"]), torch_runner=st.booleans(),
)  # fmt: skip
def test_more_tokens_never_take_less(context, more, batch, cache, torch_runner):
    runner = "torch" if torch_runner else "numba"
    shape = config(max_position_embeddings=8192)
    options = {"batch": batch, "cache": cache, "runner": runner, "memory": "1GB", "device": "cpu"}
    few, many = (
        plan(shape, context=context, **options),
        plan(shape, context=context + more, **options),
    )
    for a, b in zip(few.needs, many.needs, strict=True):
        assert a.total <= b.total and a.longest == b.longest


def test_the_prompt_in_pieces_takes_less():
    whole = need_of(plan(big(), context=8192, memory="1TB", device="cuda"), "int4").working
    pieces = need_of(
        plan(big(), context=8192, memory="1TB", device="cuda", prefill_chunk=512), "int4"
    ).working
    assert pieces < whole / 10


def test_quantized_models_compute_in_the_dtype_of_the_device():
    """float32 on the CPU, what the config says elsewhere: the cache follows."""
    here, card = (plan(big(), memory="1TB", device=device) for device in ("cpu", "cuda"))
    assert need_of(here, "int8").cache == 2 * need_of(card, "int8").cache
    half = plan(big(), memory="1TB", device="cpu", dtype="bfloat16")
    assert need_of(half, "int8").cache == need_of(card, "int8").cache
    assert need_of(half, "int8").weights < need_of(here, "int8").weights, "norms"


def test_a_quantized_folder_is_planned_as_stored(tmp_path):
    folder = model_folder(tmp_path / "m")
    model = load_model(folder, quantize="int4")
    written = save_quantized(model, tmp_path / "q", folder, "int4")
    made = plan(written, context=64, device="cpu")
    (need,) = made.needs
    assert need.name == "as stored"
    assert need.weights == sum(weight.nbytes for weight in model.parameters())


def test_a_cache_that_moves_is_there_twice_for_a_while():
    """One token at a time needs little, but the smaller cache stays until all it held has been moved."""
    options = {"context": 4096, "prefill_chunk": 1, "memory": "64GB", "device": "cuda"}
    for cache in ("growing", "int8", "static", "concat"):
        need = need_of(plan(big(), cache=cache, **options), "bfloat16")
        moves = cache in ("growing", "int8")
        assert (need.working >= need.cache // 2) == moves, cache


def test_loading_needs_slices_beside_the_tensor(tmp_path):
    """As measured: while the largest matrix is rounded, it is there, its codes, and slices of it in float32."""
    folder = model_folder(tmp_path / "m", vocab_size=60_000)
    made = plan(folder, context=16, memory="8GB", device="cpu", cache="none")
    largest = max(
        info.dtype.itemsize * math.prod(info.shape)
        for info in open_checkpoint(folder).tensors.values()
    )
    assert need_of(made, "float32").loading == largest
    need = need_of(made, "int4")
    with Ledger() as ledger:
        load_model(folder, quantize="int4")
    assert need.weights + largest < ledger.peak <= need.weights + need.loading


def test_loading_may_be_the_most(tmp_path):
    """A table as large as all the rest: while it is read, there is it, and what came of it."""
    made = plan(big(num_hidden_layers=1), context=16, memory="64GB", device="cpu", cache="none")
    need = need_of(made, "int4")
    assert need.loading > need.cache + need.working
    assert need.total == need.runtime + need.weights + need.loading


def test_a_config_is_enough(tmp_path, default_folder):
    folder = tmp_path / "only-config"
    folder.mkdir()
    (folder / "config.json").write_text((default_folder / "config.json").read_text("utf8"), "utf8")
    whole = plan(default_folder, memory="8GB", device="cpu").needs
    for asked in (folder / "config.json", folder, str(folder / "config.json")):
        made = plan(asked, memory="8GB", device="cpu")
        assert [n.weights for n in made.needs] == [n.weights for n in whole]


def test_of_a_model_on_the_hub_only_the_config_is_fetched(monkeypatch, default_folder):
    import huggingface_hub

    asked = []

    def fake(repo, name):
        asked.append((repo, name))
        return str(default_folder / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake)
    made = plan("somebody/something", memory="8GB", device="cpu")
    assert asked == [("somebody/something", "config.json")]
    assert made.title.startswith("somebody/something: 134,515,008 weights")

    def offline(repo, name):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(
        HubError,
        match=r"somebody/something: its config.json could not be fetched .*llm-engine plan path",
    ):
        plan("somebody/something")


def test_what_cannot_be_asked():
    with pytest.raises(PlanError, match="made for 1 to 131,072"):
        plan(big(), context=200_000)
    with pytest.raises(PlanError, match="batch must be at least 1"):
        plan(big(), batch=0)
    with pytest.raises(PlanError, match="prefill_chunk must be at least 1"):
        plan(big(), prefill_chunk=0)
    with pytest.raises(ConfigError, match="unknown cache 'paper'"):
        plan(big(), cache="paper")
    bare = inspect.unwrap(plan)  # as it is without the type checks of these tests
    for what, number in (("context", 1.5), ("batch", 2.0), ("prefill_chunk", True)):
        with pytest.raises(PlanError, match=f"{what} must be a whole number, not {number}"):
            bare(big(), **{what: number})
    for size in ("1" + "0" * 400, "9" * 30 + "GB"):
        with pytest.raises(PlanError, match="more memory than there is"):
            parse_size(size)
    with pytest.raises(PlanError, match="not a size"):
        plan(big(), memory="much")
    with pytest.raises(ValueError, match="unknown device"):
        plan(big(), device="toaster", memory="8GB")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no device 'cuda' here"):
            plan(big(), device="cuda")


def test_the_default_context_is_what_people_use():
    """A planner that takes the whole context of a model of today says that nothing fits (llmfit #302)."""
    assert "context 4,096" in plan(big(), memory="8GB", device="cpu").question
    assert "context 256" in plan(config(), memory="8GB", device="cpu").question


def test_barely():
    need = Need("x", 8.0, 60, 0, 25, 6, 0, 1)
    made = dataclasses.replace(plan(config(), memory="1GB", device="cpu"), memory=100)
    assert need.total == 91 and made.fits(need) == "barely"
    assert made.fits(dataclasses.replace(need, weights=59)) == "yes"
    assert made.fits(dataclasses.replace(need, weights=70)) == "no"


# ---- the command


def test_the_command(tmp_path):
    folder = str(model_folder(tmp_path / "m"))
    shown = run(
        "plan", folder, "--context", "64", "--batch", "2", "--memory", "2GB", "--device", "cpu"
    )
    assert shown.exit_code == 0, shown.output
    assert "context 64, batch 2, cache growing, prompt at once; 2.00 GB on cpu" in shown.stdout
    assert "The most precise that fits: float32" in shown.stdout
    asked = run(
        "plan", folder, "--memory", "2GB", "--json", "--cache", "int8", "--prefill-chunk", "8"
    )
    page = json.loads(asked.stdout)
    assert page["memory"] == 2 * 10**9 and [n["name"] for n in page["needs"]][:2] == [
        "float32",
        "bfloat16",
    ]
    assert page["needs"][0]["fits"] == "yes" and page["needs"][0]["total"] > 0
    wrong = run("plan", folder, "--memory", "plenty")
    assert wrong.exit_code == 1 and "error: 'plenty' is not a size" in wrong.stderr


# ---- the runner


def working(made, name):
    return next(need.working for need in made.needs if need.name == name)


def test_what_the_kernels_cannot_run_is_planned_for_torch_as_loading_would_do_it(tmp_path):
    """A float16 model was planned for kernels that read float32 and bfloat16 only."""
    ask = {"context": 256, "device": "cpu", "memory": "1TB"}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    torch_alone = plan(config(**sizes), dtype="float16", runner="torch", **ask)
    auto = plan(config(**sizes), dtype="float16", runner="auto", **ask)
    assert working(auto, "int8") == working(torch_alone, "int8")
    assert working(auto, "float32") != working(torch_alone, "float32"), "these the kernels do run"
    assert working(auto, "float32") == working(
        plan(config(**sizes), runner="numba", **ask), "float32"
    )
    notes = [line for line in auto.advice if line.startswith("Note")]
    assert len(notes) == 1 and "cannot run int8 and int4: the weights are torch.float16" in notes[0]
    assert "torch stands in" in notes[0]
    assert not [
        line for line in plan(config(**sizes), runner="auto", **ask).advice if "Note" in line
    ]
    # 48 columns are no whole number of the kernels' blocks
    odd = plan(config(), runner="auto", **ask)
    assert "cannot run" in odd.advice[0] and "48 columns" in odd.advice[0]
    assert working(odd, "int4") == working(plan(config(), runner="torch", **ask), "int4")
    # in the very words of loading
    folder = model_folder(tmp_path / "m")
    with pytest.raises(
        ValueError, match=re.escape(notes[0].partition("int4: ")[2].partition(";")[0])
    ):
        Engine.from_pretrained(folder, device="cpu", dtype="float16", runner="numba")


def test_a_model_that_the_kernels_do_not_know():
    other = config(hidden_act="gelu")
    made = plan(other, device="cpu", memory="1TB")
    assert "the activation is gelu" in made.advice[0] and "torch stands in" in made.advice[0]
    assert made.needs == plan(other, device="cpu", memory="1TB", runner="torch").needs
    with pytest.raises(PlanError, match="cannot run float32 and .*gelu.*runner='torch'"):
        plan(other, device="cpu", memory="1TB", runner="numba")


def test_without_numba_the_plan_is_one_for_torch(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    made = plan(config(), device="cpu")
    assert "numba is not installed" in made.advice[0]
    assert [n.working for n in made.needs] == [
        n.working for n in plan(config(), device="cpu", runner="torch").needs
    ]
    assert "not installed" not in plan(config(), device="cpu", memory="1GB").advice[0], (
        "another machine"
    )


def test_runners_that_cannot_be_had():
    with pytest.raises(ValueError, match="unknown runner 'x'. Known: "):
        plan(config(), runner="x")
    with pytest.raises(PlanError, match="'cuda-graph' needs a model on a CUDA device, not cpu"):
        plan(config(), device="cpu", runner="cuda-graph")
    with pytest.raises(PlanError, match="works on the CPU, not on cuda"):
        plan(config(), device="cuda", memory="8GB", runner="numba")
    assert plan(config(), device="cuda", memory="8GB", runner="cuda-graph").needs
