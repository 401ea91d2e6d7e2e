"""The command llm-engine, on a tiny model folder, and once as a real process on the default model."""

import logging
import os
import re
import subprocess
import sys

import pytest
from tiny_folder import SPECIAL, write_tiny_folder
from typer.testing import CliRunner

from llm_engine import SamplingParams
from llm_engine.cli import app
from llm_engine.engine import Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_folder(tmp_path_factory.mktemp("cli") / "tiny"))


def call(*arguments, **options):
    return CliRunner().invoke(app, list(arguments), **options)


def generate(folder, *arguments, **options):
    plain = ("--model", folder, "--device", "cpu", "--cache", "none", "--runner", "torch")
    return call("generate", *arguments, *plain, **options)


def expected(folder, prompt, **params):
    engine = Engine.from_pretrained(folder, device="cpu", cache="none", runner="torch")
    return engine.generate(prompt, SamplingParams(**params)).text


# ---- generate


def test_generate_prints_the_answer_alone_to_stdout(folder):
    run = generate(folder, "abc", "-n", "5")
    assert run.exit_code == 0
    assert run.stdout == expected(folder, "abc", max_new_tokens=5) + "\n"
    assert "weights as float32" in run.stderr  # what loading takes


def test_quiet_says_nothing_on_stderr(folder):
    run = call("--quiet", "generate", "abc", "-n", "2", "--model", folder)
    assert run.exit_code == 0 and run.stderr == ""


def test_a_command_called_from_python_leaves_its_logging_as_it_was(folder):
    logger = logging.getLogger("llm_engine")
    before = logger.level, list(logger.handlers)
    generate(folder, "abc", "-n", "1")
    assert (logger.level, list(logger.handlers)) == before


def test_every_sampling_option_arrives(folder):
    options = "-n 6 -t 0.9 --top-k 30 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.2 --seed 5"
    run = generate(folder, "abc", *options.split())
    params = {
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
    }
    text = expected(folder, "abc", max_new_tokens=6, seed=5, **params)
    assert run.stdout == text + "\n"
    assert text != expected(folder, "abc", max_new_tokens=6)


def test_stop_options_may_be_repeated_and_hold_escapes(folder, monkeypatch):
    seen = {}

    class Caught(Exception):
        pass

    def start(self, prompt, params, record=0):
        seen.update(prompt=prompt, params=params, record=record)
        raise Caught

    monkeypatch.setattr(Engine, "start", start)
    generate(
        folder, "abc", "--stop", r"\n\n", "--stop", "END", "--logprobs", "2", "--candidates", "3"
    )
    assert seen["params"].stop == ("\n\n", "END")
    assert (seen["params"].logprobs, seen["record"], seen["params"].max_new_tokens) == (2, 3, 64)


def test_stats_and_lists_go_to_stderr(folder):
    plain = generate(folder, "abc", "-n", "3")
    run = generate(folder, "abc", "-n", "3", "--stats", "--logprobs", "2", "--candidates", "2")
    assert run.stdout == plain.stdout
    assert "prompt: 3 tokens" in run.stderr and "new: 3 tokens, ended by length" in run.stderr
    assert "positions computed: 12" in run.stderr  # 3 + 4 + 5
    assert "time to first token:" in run.stderr and "tokens/s" in run.stderr
    assert re.search(r"a step: p50 \d+\.\d ms, p95 \d+\.\d ms", run.stderr)
    assert run.stderr.count("log probability") == 3 and run.stderr.count("1 kept") == 3


def test_the_prompt_may_come_from_stdin(folder):
    assert (
        generate(folder, "-", "-n", "3", input="abc").stdout
        == generate(folder, "abc", "-n", "3").stdout
    )


def test_the_chat_option_goes_through_the_template(folder):
    run = generate(folder, "hi", "--chat", "-n", "2", "--stats")
    engine = Engine.from_pretrained(folder, device="cpu", cache="none", runner="torch")
    ids = engine.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert f"prompt: {len(ids)} tokens" in run.stderr


def test_suggested_values_apply_only_when_asked_for(tmp_path):
    folder = write_tiny_folder(tmp_path / "tiny")
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 3.0, "max_new_tokens": 4}'
    )
    greedy = generate(str(folder), "abc", "-n", "4")
    assert greedy.stdout == expected(str(folder), "abc", max_new_tokens=4) + "\n"
    asked = generate(
        str(folder), "abc", "--suggested", "--seed", "1", "--stats", "--candidates", "1"
    )
    assert "temperature 3" in asked.stderr and "new: 4 tokens" in asked.stderr


# ---- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--model", "./nowhere"], "nowhere"),
        (["generate", "x", "--top-p", "2"], "top_p must be"),
        (["generate", "x", "--stop", ""], "stop"),
        (["generate", "x", "--dtype", "int3"], "cannot compute in dtype 'int3'"),
        (["generate", "x", "--device", "abacus"], "unknown device"),
        (["generate", "x", "--cache", "magic"], "unknown cache 'magic'"),
        (["shapes", "./nowhere"], "nowhere"),
        (["download", "./nowhere"], "nowhere"),
        (["chat", "--model", "./nowhere"], "nowhere"),
    ],
)
def test_errors_are_a_line_and_exit_code_1(arguments, message):
    run = call(*arguments)
    assert run.exit_code == 1 and run.stdout == ""
    assert run.stderr.startswith("error: ") and message in run.stderr
    assert "Traceback" not in run.stderr


def test_an_empty_prompt_is_an_error_too(folder):
    run = generate(folder, "")
    assert run.exit_code == 1 and "nothing to predict from" in run.stderr


def test_debug_shows_the_traceback(monkeypatch):
    run = call("--debug", "generate", "x", "--top-p", "2")
    assert isinstance(run.exception, ValueError) and run.exit_code == 1
    monkeypatch.setattr("llm_engine.cli.resolve", lambda name: {}["key"])
    run = call("download", "x")
    assert run.exit_code == 1 and "unexpected KeyError" in run.stderr and "--debug" in run.stderr


@pytest.mark.parametrize("arguments", [["generate"], ["nonsense"], ["generate", "x", "--nonsense"]])
def test_wrong_usage_is_exit_code_2(arguments):
    run = call(*arguments)
    assert run.exit_code == 2 and "Usage" in run.stderr


# ---- help


def test_help_names_every_command_and_shows_an_example():
    run = call("--help", env={"COLUMNS": "120"})
    assert run.exit_code == 0
    for command in ("generate", "chat", "shapes", "attention", "logits", "download", "verify"):
        assert command in run.stdout
    assert 'llm-engine generate "The capital of France is"' in run.stdout
    run = call("generate", "--help", env={"COLUMNS": "140"})
    for option in (
        "--model",
        "--max-new-tokens",
        "--temperature",
        "--top-k",
        "--top-p",
        "--min-p",
        "--seed",
    ):
        assert option in run.stdout
    assert "--seed 7 --stats" in run.stdout


def test_version():
    assert call("--version").stdout.startswith("llm-engine ")


# ---- shapes, download


def test_shapes_shows_one_layer_where_all_are_alike(folder):
    run = call("shapes", folder, "--prompt", "abc", "--no-picture")
    assert run.exit_code == 0
    assert "layers.0.attn.probs" in run.stdout and "[1, 4, 3, 3]" in run.stdout
    assert "layers.1." not in run.stdout and "Layer 1 has the same" in run.stderr
    assert "lm_head" in run.stdout and "embed" in run.stdout
    run = call("shapes", folder, "--prompt", "abc", "--all", "--no-picture")
    assert "layers.1.attn.probs" in run.stdout


def test_download_prints_the_folder(folder):
    assert call("download", folder).stdout == folder + "\n"


# ---- chat


def chat(folder, lines, *arguments):
    plain = ("--model", folder, "--device", "cpu", "--cache", "none", "--runner", "torch")
    return call("chat", "-n", "3", *plain, *arguments, input=lines)


def test_chat_answers_forgets_and_ends(folder):
    run = chat(folder, "hi\n\n/clear\nhi\n/help\n/exit\nnever\n")
    assert run.exit_code == 0
    answers = [part.strip("\n") for part in run.stdout.split("> ")]
    assert answers[1] == answers[4] != ""  # after /clear the same question begins anew
    assert "never" not in run.stdout and run.stderr.count("/undo") == 1


def test_chat_ends_with_the_input(folder):
    assert chat(folder, "hi\n", "--stats").exit_code == 0


def test_chat_goes_on_after_an_error(folder):
    run = chat(folder, "x" * 300 + "\nhi\n/exit\n")
    assert run.exit_code == 0 and "error: the prompt has" in run.stderr
    assert run.stdout.count("> ") == 3


def test_ctrl_c_stops_the_answer_and_not_the_chat(folder, monkeypatch):
    advance, count = Engine.advance, []

    def interrupted(self, request):
        count.append(1)
        if len(count) == 2:
            raise KeyboardInterrupt
        return advance(self, request)

    monkeypatch.setattr(Engine, "advance", interrupted)
    run = chat(folder, "hi\nyo\n/exit\n", "--stats")
    assert run.exit_code == 0 and " …" in run.stdout
    assert "ended by interruption" in run.stderr and "ended by length" in run.stderr


def test_special_tokens_typed_in_a_chat_are_text(folder, monkeypatch):
    asked = []
    start = Engine.start
    monkeypatch.setattr(
        Engine, "start", lambda self, p, *a, **k: asked.append(p) or start(self, p, *a, **k)
    )
    chat(folder, f"{SPECIAL[1]}\n/exit\n")
    assert 257 not in asked[0]  # <eos>


# ---- a real process


def test_a_real_process_streams_the_answer_and_survives_a_closed_pipe(default_folder, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "llm_engine", "generate"]
    plain = ["--cache", "none", "--runner", "torch"]
    run = subprocess.run(
        [*command, "The capital of France is", "-n", "2", "--model", str(default_folder), *plain],
        capture_output=True, env=environment, timeout=300,
    )  # fmt: skip
    assert (run.returncode, run.stdout.decode().strip("\r\n")) == (0, " Paris.")
    assert b"Traceback" not in run.stderr
    pipe = subprocess.Popen(
        [*command, "ab", "-n", "60", "--model", folder, *plain],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    pipe.stdout.close()  # the reader is gone before the first word
    errors = pipe.stderr.read()
    assert pipe.wait(timeout=120) != 0
    assert b"Traceback" not in errors and b"error:" not in errors
