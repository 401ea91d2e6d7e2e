"""The command llm-engine, on a tiny model folder, and once as a real process on the default model."""

import errno
import logging
import os
import re
import subprocess
import sys

import pytest
from tiny_folder import SPECIAL, write_tiny_folder
from typer.testing import CliRunner

from llm_engine import SamplingParams, cli
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


# ---- a token's bias, a prompt in pieces


def test_a_bias_is_given_by_id_or_by_text(folder, monkeypatch):
    seen = []
    start = Engine.start

    def spy(self, ids, params, **more):
        seen.append(params.logit_bias)
        return start(self, ids, params, **more)

    monkeypatch.setattr(Engine, "start", spy)
    bias = ["--logit-bias", "j=-inf", "--logit-bias", "65=2.5", "--logit-bias", r"\n=-100"]
    run = generate(folder, "abc", "-n", "4", *bias, "--logit-bias", "==1", "--logit-bias", f"{SPECIAL[0]}=3")  # fmt: skip
    engine = Engine.from_pretrained(folder, device="cpu", cache="none", runner="torch")
    special = engine.tokenizer.special[SPECIAL[0]]
    wanted = {ord("j"): float("-inf"), 65: 2.5, 10: -100, ord("="): 1, special: 3}
    assert run.exit_code == 0 and seen == [wanted]
    assert run.stdout == expected(folder, "abc", max_new_tokens=4, logit_bias=wanted) + "\n"
    run = call("chat", "-m", folder, "-n", "2", "--logit-bias", "j=-5", input="hi\n")
    assert run.exit_code == 0 and seen[-1] == {ord("j"): -5}


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--logit-bias", "x"], "'x' should look like"),
        (["--logit-bias", "=5"], "'=5' should look like"),
        (["--logit-bias", "a=many"], "'a=many' should look like"),
        (["--logit-bias", "a=nan"], "'a=nan' should look like"),
        (["--logit-bias", "a=101"], "from -100 to 100"),
        (["--logit-bias", "a=inf"], "from -100 to 100"),
        (["--logit-bias", "a=1", "--logit-bias", "a=2"], "'a' is given twice"),
        (["--prefill-chunk", "0"], "prefill_chunk must be at least 1"),
        (["--prefill-chunk", "4", "--cache", "none"], "needs a cache that remembers"),
    ],
)
def test_what_is_wrong_with_them_is_said_before_a_model_is_looked_for(
    command, options, message, monkeypatch
):
    monkeypatch.setattr("llm_engine.engine.resolve", lambda name: pytest.fail("looked for"))
    run = call(command, *(["abc"] if command == "generate" else []), *options)
    assert run.exit_code == 1 and run.stderr.startswith("error: ") and message in run.stderr


def test_a_bias_for_a_text_of_several_tokens_names_them(folder):
    run = generate(folder, "abc", "--logit-bias", "ab=1")
    assert run.exit_code == 1 and "'ab' is 2 tokens here, 'a' (97), 'b' (98)" in run.stderr
    run = generate(folder, "abc", "--logit-bias", "a=1", "--logit-bias", "97=2")
    assert run.exit_code == 1 and "'97' is token 97, which is given twice" in run.stderr
    run = generate(folder, "abc", "--logit-bias", "99999=1")
    assert run.exit_code == 1 and "99999" in run.stderr and "vocabulary" in run.stderr


def test_a_prompt_in_pieces(folder, monkeypatch):
    seen = []
    made = Engine.__init__

    def spy(self, *parts, **options):
        seen.append(options.get("prefill_chunk"))
        made(self, *parts, **options)

    monkeypatch.setattr(Engine, "__init__", spy)
    plain = ("-m", folder, "--cache", "growing", "--runner", "torch")
    whole, pieces = (call("generate", "abcdefg", "-n", "3", *plain, *more) for more in ([], ["--prefill-chunk", "2"]))  # fmt: skip
    assert whole.stdout == pieces.stdout and whole.exit_code == pieces.exit_code == 0
    assert call("chat", *plain, "--prefill-chunk", "5", input="").exit_code == 0
    assert seen == [None, 2, 5]


# ---- what the system says, in words


def test_standard_input_that_is_no_text(folder, monkeypatch):
    run = generate(folder, "-", input=b"abc \xff\xfe")
    assert (
        run.exit_code == 1 and "standard input is not text in UTF-8 (byte 4 is 0xff)" in run.stderr
    )
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ValueError, match="no standard input"):
        cli.read_stdin()


def test_a_number_of_candidates_below_zero(folder):
    assert generate(folder, "abc", "--candidates", "-1").exit_code == 2
    engine = Engine.from_pretrained(folder, device="cpu", cache="none", runner="torch")
    with pytest.raises(ValueError, match="record must be at least 0, not -1"):
        engine.start("abc", record=-1)


def test_a_name_that_no_file_can_have():
    run = call("generate", "abc", "-m", "x" * 5000)
    assert run.exit_code == 1 and len(run.stderr) < 200 and "too long" in run.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("name", ["full.png", "full.csv"])
def test_a_full_disk_is_named(folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.symlink("/dev/full", name)
    asked = ["-o", name] if name.endswith("png") else ["--no-picture", "--numbers", name]
    run = call("logits", folder, "abc", *asked)
    assert run.exit_code == 1
    assert f"error: {name}: No space left on device. Make room there" in run.stderr


def test_where_nothing_can_be_written_is_said_before_a_model_is_quantized(
    folder, tmp_path, monkeypatch
):
    made = tmp_path / "made"
    assert call("quantize", folder, str(made), "-s", "int8-rtn").exit_code == 0
    again = call("quantize", str(made), str(tmp_path / "again"))
    assert again.exit_code == 1 and "is quantized already, as int8-rtn" in again.stderr
    monkeypatch.setattr(cli, "load_model", lambda *a, **k: pytest.fail("loaded"))
    (tmp_path / "file").write_text("x")
    for where, message in (
        (made, "is there already, and not empty"),
        (tmp_path / "file", "is there already"),
        (tmp_path / "file" / "below", "nothing can be written in"),
        ("/dev/null/x", "nothing can be written in"),
    ):
        run = call("quantize", folder, str(where))
        assert run.exit_code == 1 and message in run.stderr, where
        assert str(where) in run.stderr and "hoose another" in run.stderr


def test_a_disk_that_fills_up_while_a_model_is_written(folder, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("llm_engine.quantized_files.write_safetensors", full)
    run = call("quantize", folder, str(tmp_path / "made"), "-s", "int8-rtn")
    assert run.exit_code == 1 and list(tmp_path.iterdir()) == []
    assert f"error: {tmp_path / 'made'}: No space left on device. Make room" in run.stderr


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
