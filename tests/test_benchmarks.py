"""benchmarks/: the comparison is run with engines that only pretend, and the GGUF files it writes are read back. No time is judged."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_folder import write_tiny_folder
from typer.testing import CliRunner

from llm_engine.config import load_config
from llm_engine.engine import Engine
from llm_engine.hub import convert_gguf, unpermute

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import compare
import contestants
import gguf_file
import report
import workers

# What a worker process loads instead of an engine: it answers at once, and notes who was asked what in a file.
FAKES = """
import os, sys, time

class Fake:
    def __init__(self, spec, threads):
        self.spec = spec
        print("a library that prints at start")
        os.write(1, b"even to the file descriptor\\n")
        if spec.get("fails_at") == "load":
            raise ValueError("no weights\\nat all")
        self.held = bytearray(spec.get("megabytes", 0) << 20)
        self.turns = 0
    def made(self):
        return {"versions": {"fake": "1"}, "weight_bytes": 1000, "token_bytes": 10}
    def note(self, what):
        with open(self.spec["diary"], "a") as file:
            file.write(f"{self.spec['name']} {what}\\n")
    def tune(self, prompt, forced, long, search):
        return {"chosen": {"decode": {"how": 1}, "prefill": {}}, "trials": []}
    def greedy(self, prompt, count):
        return [1] * count
    def check(self, prompt, forced, reference, save):
        said = self.spec.get("said", 1)
        return {"said": [said] * (len(forced) + 1), "gaps": [5.0] * (len(forced) + 1), "logits_apart": 0.5}
    def measure(self, prompt, forced, long):
        self.note("measure")
        self.turns += 1
        if self.spec.get("fails_at") == "measure" and self.turns == 2:
            raise RuntimeError("out of luck")
        if self.spec.get("fails_at") == "die" and self.turns == 2:
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        speed = self.spec.get("speed", 1.0) * self.turns
        return {"first": 0.1, "loop": speed, "generate": speed / 2, "prefill": 100 * speed}
    def bandwidth(self):
        self.note("bandwidth")
        return 1e6
    def sleep(self, seconds):
        time.sleep(seconds)
    def echo(self, text):
        return text
    def environ(self, name):
        return os.environ.get(name)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A function that makes the spec of a pretended engine."""
    (tmp_path / "fakes.py").write_text(FAKES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(compare, "SETTLE", 0.0)

    def make(name, **more):
        runner, _, precision = name.rpartition("-")
        peers = {"llama.cpp": "llama.cpp", "transformers": "transformers"}
        family = peers.get(runner, "llm-engine")
        spec = {"name": name, "class": "fakes:Fake", "diary": str(tmp_path / "diary")}
        return spec | {"family": family, "precision": precision or "float32", **more}

    make.diary = tmp_path / "diary"
    monkeypatch.setattr(compare, "BANDWIDTH", make("bandwidth"))
    return make


@pytest.fixture
def run(fake, tmp_path, monkeypatch):
    """The whole comparison with pretended engines."""
    folder = write_tiny_folder(tmp_path / "model")
    monkeypatch.setattr(compare, "prepare_gguf", lambda *_: None)
    monkeypatch.setattr(compare, "missing", lambda spec: spec.get("missing"))

    def go(*specs, rounds=3):
        work = {"rounds": rounds, "threads": 1, "prompt": 8, "tokens": 4, "prefill": 16}
        specs = {spec["name"]: spec for spec in specs}
        return compare.compare(specs, folder, "tiny", **work, strict=True, tune=True)

    return go


# ---- workers


def test_what_a_library_prints_does_not_get_between_the_answers(fake):
    worker = workers.Worker(fake("a-float32"), 1)
    assert worker.ask("echo", text="ünï\ncode") == "ünï\ncode"
    worker.close()
    assert worker.process.poll() == 0


def test_threads_are_limited_and_waiting_is_left_to_the_libraries(fake, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    worker = workers.Worker(fake("a-float32"), 3)
    found = [worker.ask("environ", name=n) for n in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")]
    assert [*found, worker.ask("environ", name="OMP_WAIT_POLICY")] == ["3", "3", None]
    worker.close()


def test_an_error_is_one_line_and_the_worker_lives_on(fake):
    worker = workers.Worker(fake("a-float32"), 1)
    with pytest.raises(workers.EngineFailed, match="AttributeError: .*no attribute 'nonsense'"):
        worker.ask("nonsense")
    assert worker.ask("echo", text="still here") == "still here"
    worker.close()


def test_a_dead_worker_is_reported_with_its_last_words(fake):
    worker = workers.Worker(fake("a-float32", fails_at="die"), 1)
    worker.ask("measure", prompt=[], forced=[], long=[])
    with pytest.raises(workers.EngineFailed, match="exit status 3 during 'measure': last words"):
        worker.ask("measure", prompt=[], forced=[], long=[])
    killed = workers.Worker(fake("a-float32"), 1)
    killed.process.kill()
    with pytest.raises(workers.EngineFailed, match="signal 9, as when memory runs out"):
        killed.ask("echo", text="x")


def test_a_worker_that_hangs_is_ended(fake):
    worker = workers.Worker(fake("a-float32"), 1)
    worker.timeout = 0.2
    with pytest.raises(workers.EngineFailed, match="no answer to 'sleep'"):
        worker.ask("sleep", seconds=60)
    assert worker.process.poll() is not None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_the_workers_own(fake):
    """`ru_maxrss` would begin with the size of the process that started it, and this one holds torch and more."""
    ballast = bytearray(os.urandom(1) * (200 << 20))
    small, large = (workers.Worker(fake(f"{n}-float32", megabytes=n), 1) for n in (1, 80))
    a, b = small.ask("memory")["peak"], large.ask("memory")["peak"]
    assert 70 << 20 < b - a < 90 << 20
    assert a < 100 << 20 < len(ballast)
    small.close(), large.close()


def test_a_worker_that_waits_uses_no_cpu(fake):
    worker = workers.Worker(fake("a-float32"), 1)
    before = worker.cpu_seconds()
    time.sleep(0.3)
    assert before > 0
    assert worker.cpu_seconds() - before <= 0.01
    worker.close()


# ---- rounds


def test_engines_take_turns_and_bandwidth_is_read_in_every_round(run, fake):
    result = run(fake("torch-float32"), fake("llama.cpp-float32"), fake("torch-bf16"))
    lines = [line for line in fake.diary.read_text().splitlines() if "bandwidth" not in line]
    assert lines == ["torch-float32 measure", "llama.cpp-float32 measure", "torch-bf16 measure"] * 3
    assert fake.diary.read_text().count("bandwidth bandwidth") == 3 * (3 + 1)
    decode = result["engines"]["torch-float32"]["decode"]
    assert decode.values == [1.0, 2.0, 3.0]
    assert decode[:3] == (2.0, 1.0, 3.0)
    assert result["engines"]["torch-float32"]["way"] == "loop"
    # 1000 bytes of weights, and 10 for each of 8 + 2.5 tokens; 2 tokens/s; 10^6 bytes/s
    assert result["engines"]["torch-float32"]["share"].median == pytest.approx(1105 * 2 / 1e6)


@pytest.mark.parametrize(
    "fails_at, reason",
    [
        ("load", "ValueError: no weights at all"),
        ("measure", "RuntimeError: out of luck"),
        ("die", "its process ended with exit status 3 during 'measure': last words"),
    ],
)
def test_an_engine_that_fails_is_shown_and_the_others_go_on(run, fake, fails_at, reason):
    result = run(fake("torch-float32"), fake("transformers-float32", fails_at=fails_at), fake("torch-bf16"))  # fmt: skip
    assert result["engines"]["transformers-float32"] == {"failed": reason}
    assert result["engines"]["torch-bf16"]["decode"].values == [1.0, 2.0, 3.0]
    text = report.markdown(result)
    assert "| transformers-float32 | failed | – | – | – | – | – |" in text
    assert f"transformers-float32 failed: {reason}" in text
    assert json.loads(json.dumps(report.as_json(result)))["engines"]["transformers-float32"]["failed"] == reason  # fmt: skip


def test_a_peer_that_is_not_installed_is_named_with_the_line_that_installs_it(
    fake, run, monkeypatch
):
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    monkeypatch.setattr(compare, "missing", missing)
    result = run(fake("torch-float32"), fake("llama.cpp-bf16"), fake("transformers-bf16"), rounds=1)
    assert "decode" in result["engines"]["torch-float32"]
    for name, package in (("llama.cpp", "llama-cpp-python"), ("transformers", "transformers")):
        reason = result["engines"][f"{name}-bf16"]["failed"]
        assert f"{package} is not installed. python -m pip install -c constraints.txt -e '.[bench]'" in reason  # fmt: skip


missing = compare.missing  # before a fixture replaces it


def test_another_model_under_the_same_name_stops_the_run(run, fake):
    with pytest.raises(compare.NotTheSameModel, match="llama.cpp-float32 does not run the same model .* token 7 instead of 1"):  # fmt: skip
        run(fake("torch-float32"), fake("llama.cpp-float32", said=7))
    assert not fake.diary.exists(), "nothing was measured"
    run(fake("torch-float32"), fake("llama.cpp-q4_0", said=7), rounds=1)  # rounding may


def test_a_tie_is_not_another_model():
    spec, reference = {"precision": "float32"}, {"said": [1, 2, 3], "gaps": [5.0, 0.01, 5.0]}
    words = compare.compare_words("x", spec, {"said": [1, 9, 3]}, reference, strict=True)
    assert words == {"same": 2, "of": 3}
    with pytest.raises(compare.NotTheSameModel, match="after 2 new tokens it says token 9 instead of 3"):  # fmt: skip
        compare.compare_words("x", spec, {"said": [1, 9, 9]}, reference, strict=True)


# ---- numbers and text


def spread(*values):
    return report.Spread.of(list(values))


def test_ratios_are_taken_round_by_round():
    """The second round is slow for both, the third for one of them: the medians alone would say 1.0."""
    ours, peer = spread(60.0, 30.0, 40.0), spread(40.0, 20.0, 50.0)
    assert report.ratio(ours, peer) == (1.5, 0.8, 1.5, [1.5, 1.5, 0.8])


def test_the_better_way_to_decode_is_reported():
    made = {"weight_bytes": 100, "token_bytes": 0}
    rounds = [{"first": 1.0, "loop": a, "generate": b} for a, b in ((5, 6), (9, 7), (5, 8))]
    found = report.summarize(made, rounds, [1000.0, 1000.0, 2000.0], 10)
    assert (found["way"], found["decode"].median) == ("generate", 7)
    assert found["share"].values == [0.6, 0.7, 0.4]


def test_goals_compare_with_the_right_peer_and_are_left_out_without_one():
    engines = {
        "torch-float32": {"decode": spread(10.0), "prefill": spread(90.0), "share": spread(0.3)},
        "numba-float32": {"decode": spread(40.0), "prefill": spread(80.0), "share": spread(0.9)},
        "transformers-float32": {"decode": spread(20.0), "prefill": spread(60.0)},
        "llama.cpp-float32": {"failed": "not here"},
    }
    specs = {
        name: {"precision": "float32", "family": "llm-engine" if name[0] in "tn" and "former" not in name else "peer"}
        for name in engines
    }  # fmt: skip
    found = {g["measure"]: g for g in report.reach(report.GOALS, engines, specs)}
    assert set(found) == {"decode", "share", "prefill"}
    assert found["decode"]["ours"] == "numba-float32"
    assert found["decode"]["value"].median == 2.0
    assert found["decode"]["reached"] is False  # 3.5 is asked for
    assert found["share"]["reached"] is True
    assert (found["prefill"]["ours"], found["prefill"]["peer"]) == ("torch-float32", "transformers-float32")  # fmt: skip


def test_tables_have_as_many_cells_as_headers(run, fake):
    result = run(fake("torch-float32"), fake("transformers-float32"))
    headers, cells = report.rows(result)
    assert "prefill of 16, tok/s" in headers
    assert all(len(row) == len(headers) for row in cells)
    assert report.rich_table(result).row_count == 2
    first, rule, *_ = report.markdown(result).splitlines()
    assert first.count("|") == rule.count("|") == len(headers) + 1
    assert "2.0 (1.0–3.0)" in report.markdown(result)
    assert any("decode: torch-float32 / transformers-float32 = 1.00" in n for n in report.notes(result))  # fmt: skip
    assert "says 5 of 5 tokens as the reference" in report.settings(result)[0]


def test_the_command_writes_json_and_prints_markdown(run, fake, tmp_path, monkeypatch):
    result = run(fake("torch-float32"), rounds=1)
    asked = {}
    monkeypatch.setattr(compare, "compare", lambda specs, *_, **more: asked.update(more, names=[*specs]) or result)  # fmt: skip
    path = tmp_path / "out.json"
    options = ["--model", str(tmp_path / "model"), "--engines", "torch", "--engines", "llama.cpp-bf16", "--rounds", "7"]  # fmt: skip
    done = CliRunner().invoke(compare.app, [*options, "--threads", "1", "--json", str(path), "--markdown"])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert asked["names"] == ["torch-float32", "torch-bf16", "llama.cpp-bf16"]
    assert (asked["rounds"], asked["threads"], asked["tokens"]) == (7, 1, 64)
    assert done.output.startswith("| engine | decode tok/s |")
    written = json.loads(path.read_text())
    assert written["engines"]["torch-float32"]["decode"]["median"] == 1.0
    assert {"date", "machine", "threads", "quiet", "bandwidth", "goals"} <= written.keys()


def test_an_unknown_engine_is_refused_with_those_there_are():
    done = CliRunner().invoke(compare.app, ["--engines", "vllm"], env={"COLUMNS": "500"})
    assert done.exit_code == 2
    assert "no engine 'vllm'. Known: torch-float32" in done.output


# ---- how an engine is measured


class Counting(contestants.Contestant):
    """Says the number of tokens it has seen, and keeps a list of what it was asked."""

    settings = ({"speed": "slow"}, {"speed": "fast"}, {"speed": "broken"})

    def load(self):
        self.asked, self.seen = [], 0

    def use(self, setting):
        self.setting = setting

    def reset(self, room):
        self.seen = 0

    def feed(self, ids):
        if self.setting["speed"] == "broken":
            raise RuntimeError("cannot")
        time.sleep(0.002 if self.setting["speed"] == "slow" else 0)
        self.asked.append(ids)
        self.seen += len(ids)
        return self.seen

    def last_logits(self):
        return np.arange(4, dtype=np.float32) * self.seen

    def generate(self, ids, count):
        self.reset(0)
        token = self.feed(list(ids))
        for _ in range(count):
            yield token
            token = self.feed([token])


@pytest.fixture
def counting():
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    yield Counting({}, 1)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)


def test_the_fastest_setting_is_found_and_broken_ones_are_noted(counting):
    found = counting.tune([1, 2], [3, 4], [5] * 8, search=True)
    assert found["chosen"] == {"decode": {"speed": "fast"}, "prefill": {"speed": "fast"}}
    assert found["trials"][2]["error"] == "RuntimeError: cannot"
    assert counting.tune([1], [2], [3], search=False)["chosen"]["decode"] == {"speed": "slow"}


def test_every_engine_is_fed_the_same_tokens_whatever_it_says(counting):
    counting.use({"speed": "fast"})
    done = counting.loop([7, 8, 9], [1, 1, 2])
    assert counting.asked == [[7, 8, 9], [1], [1], [2]]
    assert done["said"] == [3, 4, 5, 6]
    assert counting.greedy([7, 8], 3) == [2, 3, 4]
    assert counting.asked[-2:] == [[2], [3]]
    own = counting.own([7, 8], 3)
    assert own["said"] == [2, 3, 4, 5]
    found = counting.check([7, 8], [1], None, None)
    assert (found["said"], found["gaps"]) == ([2, 3], [2.0, 3.0])


def test_a_library_that_stops_early_is_not_measured(counting):
    counting.use({"speed": "fast"})
    counting.generate = lambda ids, count: iter([1, 2])
    with pytest.raises(RuntimeError, match="2 tokens instead of 5"):
        counting.own([1], 4)


def test_this_engine_counts_the_bytes_a_token_reads(tmp_path, counting):
    """A table that is only looked up in does not count, one that is also the LM head does."""
    folder = write_tiny_folder(tmp_path / "untied")
    spec = {"folder": str(folder), "precision": "float32", "runner": "torch"}
    ours = contestants.Ours(spec, 1)
    stored = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    assert ours.weight_bytes() == stored - 260 * 32 * 4
    assert (
        ours.token_bytes() == 2 * 2 * 2 * 8 * 4
    )  # k and v, 2 layers, 2 heads of 8 numbers of 4 bytes
    path = gguf_file.write_gguf(folder, tmp_path / "untied.gguf")
    assert gguf_file.read_bytes(path) == ours.weight_bytes()
    found = ours.measure([1, 2, 3], [4, 5], [6] * 20)
    assert found.keys() == {"first", "loop", "generate", "prefill"}
    assert all(value > 0 for value in found.values())
    text = ours.profile([1, 2, 3], 4)
    for part in ("ms a step", "the sampler", "aten::"):
        assert part in text


# ---- GGUF


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 3))
def test_rows_go_to_their_new_place_and_back(heads, half, columns):
    weight = torch.arange(heads * 2 * half * columns).reshape(-1, columns)
    there = gguf_file.permute(weight, heads)
    assert unpermute(there, heads).equal(weight)
    head = there.reshape(heads, 2 * half, columns)[0, :, 0].tolist()
    assert head[:2] == [0, half * columns]  # 0, D/2, 1, …: the two that are rotated together


def tokenizer_only(path, tokens=260):
    """A GGUF file from which a tokenizer can be copied."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["t", "1", "t1", *(f"<{i}>" for i in range(3, tokens))])
    writer.add_token_types([1] * (tokens - 1) + [3])
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(7)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_comes_back_from_gguf_as_it_was(tmp_path, tied):
    """Written here, read by the loader of chapter 12, which knows nothing of the writer."""
    folder = write_tiny_folder(tmp_path / "model", attention_bias=True, mlp_bias=True)
    if tied:
        weights = load_file(folder / "model.safetensors")
        del weights["lm_head.weight"]
        from safetensors.torch import save_file

        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
        (folder / "config.json").write_text(json.dumps(config))
    source = tokenizer_only(tmp_path / "tokenizer.gguf")
    path = gguf_file.write_gguf(folder, tmp_path / "made.gguf", "float32", source)
    back = convert_gguf(path, tmp_path / "back")
    wanted, found = (load_file(f / "model.safetensors") for f in (folder, back))
    assert wanted.keys() == found.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0, msg=name)
    a, b = load_config(folder), load_config(back)
    for field in ("hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope", "tie_word_embeddings", "attention_bias"):  # fmt: skip
        assert getattr(a, field) == getattr(b, field), field
    assert list(tmp_path.glob("*.part")) == []
    fields = GGUFReader(path).fields
    assert fields["tokenizer.ggml.tokens"].contents()[259] == "<259>"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 7


def test_bf16_files_hold_the_rounding_that_torch_does(tmp_path):
    folder = write_tiny_folder(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    path = gguf_file.write_gguf(folder, tmp_path / "made.gguf", "bf16")
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    gate = tensors["blk.1.ffn_gate.weight"]
    assert gate.tensor_type == GGMLQuantizationType.BF16
    found = torch.from_numpy(np.array(gate.data)).view(torch.bfloat16)
    assert found.equal(weights["model.layers.1.mlp.gate_proj.weight"].bfloat16())
    q = torch.from_numpy(np.array(tensors["blk.0.attn_q.weight"].data)).view(torch.bfloat16)
    assert unpermute(q, 4).equal(weights["model.layers.0.self_attn.q_proj.weight"].bfloat16())
    norm = tensors["output_norm.weight"]
    assert norm.tensor_type == GGMLQuantizationType.F32
    assert np.array_equal(norm.data, weights["model.norm.weight"].numpy())


def test_what_gguf_cannot_say_is_refused_and_leaves_no_file(tmp_path):
    folder = write_tiny_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="rope type 'linear'"):
        gguf_file.write_gguf(folder, tmp_path / "made.gguf")
    with pytest.raises(ValueError, match=r"tensor 'model.layers.0.moe.weight' is not known"):
        gguf_file.gguf_name("model.layers.0.moe.weight")
    assert not list(tmp_path.glob("made*"))


def test_other_weights_get_another_file(tmp_path):
    folder = write_tiny_folder(tmp_path / "model")
    before = gguf_file.cached_gguf(folder, "bf16")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert gguf_file.cached_gguf(folder, "bf16") != before
    assert before.name.endswith("-bf16.gguf")


def test_random_weights_of_a_shape_run(tmp_path, default_folder, monkeypatch):
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    large = compare.SHAPES["llama-3.2-1b"]
    monkeypatch.setitem(compare.SHAPES, "small", large | small | heads | {"vocab_size": 49152})
    folder = _random_folder(tmp_path, default_folder, monkeypatch)
    engine = Engine.from_pretrained(folder, device="cpu", dtype="bf16")
    assert engine.step([1, 2, 3]).isfinite().all()
    assert engine.config.rope.rope_type == "llama3"
    assert _random_folder(tmp_path, default_folder, monkeypatch) == folder  # once


def _random_folder(tmp_path, default_folder, monkeypatch):
    from llm_engine import hub

    monkeypatch.setattr(hub, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(hub, "resolve", lambda *_: default_folder)
    return compare.random_folder("small")


# ---- the real llama.cpp, where it is installed

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{}, {"head_dim": 16, "attention_bias": True, "mlp_bias": True}, {"rope_parameters": LLAMA3}],
    ids=["plain", "wide heads and biases", "scaled positions"],
)
def test_llama_cpp_computes_the_same_from_our_file(tmp_path, counting, changes):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (extra bench)")
    folder = write_tiny_folder(tmp_path / "model", **changes)
    spec = {"folder": str(folder), "precision": "float32", "runner": "torch", "context": 128}
    spec["gguf"] = str(gguf_file.write_gguf(folder, tmp_path / "made.gguf"))
    ours, theirs = contestants.Ours(spec, 1), contestants.LlamaCpp(spec, 1)
    prompt = list(range(60, 125))
    assert theirs.greedy(prompt, 12) == ours.greedy(prompt, 12)
    assert (
        np.abs(theirs.last_logits() - ours.last_logits()).max() < 0.05
    )  # keys and values in float16
    theirs.tune(prompt, [1, 2], prompt, search=True)
    assert theirs.own(prompt, 4)["said"] == ours.own(prompt, 4)["said"]
