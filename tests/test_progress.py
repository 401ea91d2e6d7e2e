"""Progress bars: what a terminal, a notebook, a log file and nobody get to see, and that all long work has one."""

import io
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_folder import write_tiny_folder
from typer.testing import CliRunner

from llm_engine import hub, progress
from llm_engine.progress import Bar, no_progress, progress_bar, track

PROGRESS = Path(progress.__file__)
PLAIN = {"cache": "none", "runner": "torch"}  # nothing to compile


class Terminal(io.StringIO):
    """A terminal that understands what bars write: `screen` is what one sees, `seen` what one saw after each write."""

    def __init__(self, terminal=True):
        super().__init__()
        self.terminal, self.lines, self.row, self.column, self.hidden = terminal, [""], 0, 0, False
        self.seen = []

    def isatty(self):
        return self.terminal

    def write(self, text):
        for piece in re.findall(r"\x1b\[\??[0-9;]*[A-Za-z]|.|\n", text, re.DOTALL):
            self._take(piece)
        self.seen.append(self.screen)
        return super().write(text)

    def _take(self, piece):
        if piece == "\n":
            self.row, self.column = self.row + 1, 0
            self.lines += [""] * (self.row + 1 - len(self.lines))
        elif piece == "\r":
            self.column = 0
        elif piece.startswith("\x1b"):
            number, kind = piece[2:-1], piece[-1]
            if kind == "A":
                self.row = max(0, self.row - int(number or 1))
            elif kind == "K":
                assert number == "2"
                self.lines[self.row] = ""
            elif kind in "hl":
                self.hidden = kind == "l"
            else:
                assert kind == "m", piece
        else:
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + piece + line[self.column + 1 :]
            self.column += 1

    @property
    def screen(self):
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")


@pytest.fixture
def terminal(monkeypatch):
    for name, value in {"TERM": "xterm", "COLUMNS": "90", "LINES": "20"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "LLM_ENGINE_PROGRESS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    made = Terminal()
    use(monkeypatch, made)
    return made


def use(monkeypatch, stderr):
    """Let progress.py alone see it as the error output (pytest has its own idea of the real one)."""
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stderr, modules=sys.modules))


def settle(terminal, *words):
    """Wait until all the words have been on the screen together."""
    end = time.monotonic() + 10
    while not any(all(word in screen for word in words) for screen in terminal.seen):
        assert time.monotonic() < end, (words, terminal.seen[-3:])
        time.sleep(0.02)


# ---- a terminal


def test_a_bar_says_what_how_much_how_fast_and_how_long_and_then_goes(terminal, capsys):
    with progress_bar("unpacking", 8, unit="tensors") as bar:
        bar.advance(1)
        time.sleep(0.05)
        bar.advance(3)
        settle(terminal, "unpacking", "━", "4 of 8 tensors", "/s", "left")
        assert terminal.hidden
        print("a note", file=sys.stderr)  # goes above the bar, and stays
        settle(terminal, "a note", "unpacking")
    assert terminal.screen == "a note" and not terminal.hidden
    assert capsys.readouterr().out == ""


def test_bars_inside_one_another_are_seen_together(terminal):
    with progress_bar("outer", 2, unit="matrices") as outer:
        with progress_bar("inner [0]", 3_000_000, unit="bytes") as inner:
            inner.update(1_500_000)
            settle(terminal, "outer", "inner [0]", "1.5 of 3.0 MB")
        outer.advance()
        settle(terminal, "outer", "1 of 2 matrices")
        assert "inner" not in terminal.screen
    assert terminal.screen == ""
    with progress_bar("another", 2) as bar:  # afterwards everything begins anew
        bar.describe("renamed")
        settle(terminal, "renamed", "0 of 2")
    assert terminal.screen == ""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_and_ctrl_c_leave_a_clean_screen(terminal, error):
    with pytest.raises(error):  # noqa: SIM117
        with progress_bar("outer", 3):
            for item in track([1, 2, 3], "inner"):
                settle(terminal, "outer", "inner")
                if item == 2:
                    raise error
    assert terminal.screen == "" and not terminal.hidden
    assert progress._TerminalBar._picture is None


def test_what_is_quick_shows_nothing(terminal, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 30.0)
    for _ in track(range(1000), "quick"):
        pass
    assert terminal.getvalue() == ""


def test_markup_in_names_is_text(terminal):
    with progress_bar("[red]layers[0][/red]", 1):
        settle(terminal, "[red]layers[0][/red]")


def test_a_long_description_is_cut_and_the_bar_keeps_to_its_line(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with progress_bar("quantizing layers.29.self_attn.q_proj again", 272, unit="tensors") as bar:
        time.sleep(0.05)
        bar.advance(3)
        settle(terminal, "quantizing layers", "…", "3 of 272 tensors", "left")
        assert all(screen.count("\n") == 0 for screen in terminal.seen)


# ---- a file


def test_a_log_gets_a_line_now_and_then(monkeypatch):
    log = Terminal(terminal=False)
    use(monkeypatch, log)
    monkeypatch.delenv("LLM_ENGINE_PROGRESS", raising=False)
    for _ in track(range(50), "short"):
        pass
    assert log.getvalue() == ""
    clock = iter(range(0, 10_000, 4))  # four seconds pass at each look
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    for _ in track(range(20), "long", unit="windows"):
        pass
    lines = log.getvalue().splitlines()
    assert 8 <= len(lines) <= 20 and "\x1b" not in log.getvalue() and "\r" not in log.getvalue()
    assert re.fullmatch(r"long: \d+ of 20 windows, \S+ s each, \d:\d\d left", lines[2])


def test_a_dumb_terminal_and_none_at_all(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert progress._kind() is progress._LineBar
    use(monkeypatch, None)
    with progress_bar("nobody") as bar:
        bar.advance()
    assert type(bar) is Bar


# ---- numbers


def at_times(monkeypatch, *seconds):
    clock = iter(seconds)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))


def test_numbers(monkeypatch):
    at_times(monkeypatch, 0, 10, 20)
    bar = Bar("x", 12_400, "tensors")
    assert bar.numbers() == "0 of 12,400 tensors" and bar.speed is None
    bar.advance(100)
    bar.advance(100)
    assert bar.numbers() == "200 of 12,400 tensors, 10/s, 20:20 left"
    at_times(monkeypatch, 0, 30)
    slow = Bar("x", 1000)
    slow.update(2)
    assert slow.numbers() == "2 of 1,000, 15 s each, 4:09:30 left"


def test_what_was_there_before_does_not_count_for_the_speed(monkeypatch):
    at_times(monkeypatch, 0, 1, 2)
    bar = Bar("file", None, "bytes")
    bar.resume(500_000_000)
    bar.update(510_000_000, total=520_000_000)
    assert bar.numbers() == "510.0 of 520.0 MB, 10.0 MB/s, 0:01 left"


def test_the_speed_is_that_of_the_last_half_minute(monkeypatch):
    at_times(monkeypatch, *range(200))
    bar = Bar("x", 1000)
    for _ in range(50):
        bar.advance(10)
    for _ in range(40):
        bar.advance(1)
    assert bar.speed == pytest.approx(1)


def test_without_a_total(monkeypatch):
    at_times(monkeypatch, 0, 2)
    bar = Bar("x")
    bar.advance(4)
    assert str(bar) == "x: 4, 2/s"


# ---- off


@pytest.mark.parametrize("value", ["0", "off", "OFF", "no", "False", "never"])
def test_the_environment_switches_them_off(terminal, monkeypatch, value):
    monkeypatch.setenv("LLM_ENGINE_PROGRESS", value)
    assert progress._kind() is Bar
    monkeypatch.setenv("LLM_ENGINE_PROGRESS", "")
    assert progress._kind() is progress._TerminalBar


def test_no_progress(terminal):
    with no_progress():
        assert progress._kind() is Bar
        with no_progress(False):
            assert progress._kind() is Bar
        with progress_bar("silent", 1) as bar:
            bar.advance()
    with no_progress(False), progress_bar("silent", 1, show=False) as other:
        assert progress._kind() is progress._TerminalBar
    assert type(bar) is type(other) is Bar and terminal.getvalue() == ""


def test_track_counts_what_is_dealt_with(monkeypatch):
    bars = recorded(monkeypatch)
    assert list(track(iter("abc"), "letters")) == ["a", "b", "c"]
    for item in track([1, 2, 3], "numbers"):
        if item == 3:
            break
    assert [(b.what, b.done, b.total, b.closed) for b in bars] == [
        ("letters", 3, None, True),
        ("numbers", 2, 3, True),
    ]


# ---- a notebook


def test_a_kernel_draws_only_for_someone_who_watches():
    """In a real kernel: HTML that ends empty for a cell that may ask for input, nothing for one that may not."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    work = f"""
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("progress", {str(PROGRESS)!r})
progress = importlib.util.module_from_spec(spec)
spec.loader.exec_module(progress)
progress.PATIENCE = progress.SOON = 0.01
print("before")
for i in progress.track(range(4), "a <b>", unit="steps"):
    time.sleep(0.03)
"""

    def run(watched):
        messages = []
        client.execute_interactive(
            work, allow_stdin=watched, timeout=60, output_hook=messages.append
        )
        kinds = ("stream", "display_data", "update_display_data", "error")
        found = [(m["msg_type"], m["content"]) for m in messages if m["msg_type"] in kinds]
        assert found.pop(0)[1] == {"name": "stdout", "text": "before\n"}
        return found

    try:
        assert run(False) == []
        drawn = run(True)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert [kind for kind, _ in drawn] == ["display_data"] + ["update_display_data"] * (
        len(drawn) - 1
    )
    assert len({content["transient"]["display_id"] for _, content in drawn}) == 1
    first, last = drawn[0][1]["data"], drawn[-1][1]["data"]
    assert "a &lt;b&gt; <progress" in first["text/html"] and "of 4 steps" in first["text/html"]
    assert 'max="4"' in first["text/html"] and first["text/plain"].startswith("a <b>: ")
    assert last == {"text/plain": ""}, "what is stored with the notebook is empty"


# ---- the long work of the engine


def recorded(monkeypatch):
    """Bars that only take part in a list."""
    bars = []

    class Recorded(Bar):
        closed = False

        def __init__(self, *args):
            super().__init__(*args)
            bars.append(self)

        def close(self):
            self.closed = True

    monkeypatch.setattr(progress, "_kind", lambda: Recorded if progress.shown() else Bar)
    return bars


@pytest.fixture
def bars(monkeypatch):
    monkeypatch.delenv("LLM_ENGINE_PROGRESS", raising=False)
    return recorded(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("progress") / "tiny")


def finished(bars):
    """The names of the bars, all of which must have come to their end."""
    for bar in bars:
        assert bar.closed and bar.done == bar.total > 0, (bar.what, bar.done, bar.total)
    return [bar.what for bar in bars]


def test_loading_quantizing_saving_and_loading_again(folder, bars, tmp_path):
    from llm_engine.quantized_files import save_quantized
    from llm_engine.transformer import load_model

    model = load_model(folder, quantize="int4")
    assert finished(bars) == ["loading as int4", "listening", "improving int4"]
    bars.clear()
    save_quantized(model, tmp_path / "small", folder, "int4")
    assert finished(bars) == ["writing"] and bars[0].unit == "bytes"
    assert bars[0].total == sum(p.nbytes for p in model.parameters())
    bars.clear()
    load_model(tmp_path / "small")
    load_model(folder)
    assert finished(bars) == ["loading weights", "loading weights"]


def test_quantizing_a_model_and_gptq(folder, bars):
    from llm_engine.int4 import collect_inputs, gptq, random_tokens
    from llm_engine.quantize import Scheme, quantize_model
    from llm_engine.transformer import load_model

    model = load_model(folder)
    ids = random_tokens(model.config.vocab_size, 2, 8)
    bars.clear()
    method = gptq(collect_inputs(model, ids, products=True))
    quantize_model(model, Scheme(4, 16), method=method, skip=("layers.1.*", "lm_head"))
    names = [f"layers.0.attn.{x}_proj" for x in "qkvo"]
    names += [f"layers.0.ffn.{x}_proj" for x in ("gate", "up", "down")]
    assert finished(bars) == ["listening", "quantizing", *names]  # gptq's lie inside "quantizing"


def test_perplexity(folder, bars):
    from llm_engine.quality import measure, perplexity
    from llm_engine.transformer import load_model

    with no_progress():
        model = load_model(folder)
    assert bars == []
    ids = torch.arange(24).view(3, 8)
    perplexity(model, ids)
    assert finished(bars) == ["reading"] and bars[0].total == 3
    measure(model, ids, progress=False)
    perplexity(model, ids, progress=False)
    assert len(bars) == 1


def test_verify(folder, bars, monkeypatch):
    """Without transformers, whose part is played by our own recordings."""
    from llm_engine import verify

    assert verify.self_test(folder, reference=False, trained=False, **PLAIN).ok
    assert finished(bars) == ["loading weights", "checking"]
    bars.clear()
    with no_progress():
        model = verify.load_model(folder)

    def record_reference(reference, ids, *, inside):
        return verify.record_engine(reference, verify.side_by_side([ids]), ["embed", "lm_head"])[0]

    monkeypatch.setattr(verify, "record_reference", record_reference)
    assert verify.compare_models(model, model, [[1, 2, 3], [4, 5]]).ok
    assert finished(bars) == ["reading with transformers", "comparing"]
    assert [bar.total for bar in bars] == [2, 2]


def test_converting_and_unpacking(bars, monkeypatch, tmp_path):
    """`convert_gguf` on a stand-in for the reader: the bar counts its tensors."""

    class Stop(Exception):
        pass

    def read(tensor):
        if tensor.name.endswith("2"):
            raise Stop
        return torch.zeros(2, 2)

    class Field:
        def __init__(self, value):
            self.contents = lambda: value

    class Reader:
        def __init__(self, path):
            self.fields = {"general.architecture": Field("llama")}
            self.fields["llama.attention.head_count"] = Field(2)
            self.tensors = [SimpleNamespace(name=f"x{i}") for i in range(4)]

    monkeypatch.setattr("gguf.GGUFReader", Reader)
    monkeypatch.setattr(hub, "describe_gguf", lambda *args: {})
    monkeypatch.setattr(hub, "gguf_name", lambda name: name)
    monkeypatch.setattr(hub, "read_gguf_tensor", read)
    with pytest.raises(Stop):
        hub.convert_gguf(tmp_path / "x.gguf", tmp_path / "folder")
    (bar,) = bars
    assert (bar.what, bar.done, bar.total, bar.closed) == ("unpacking", 2, 4, True)
    with pytest.raises(Stop):
        hub.convert_gguf(tmp_path / "x.gguf", tmp_path / "folder", progress=False)
    assert len(bars) == 1


def test_a_download_from_the_hub_counts_bytes_and_draws_nothing_of_its_own(
    bars, monkeypatch, tmp_path, capfd
):
    """huggingface_hub's own way to make and move bars (snapshot_download of version 2), with the class that we hand it."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars

    (tmp_path / "model.safetensors").write_bytes(b"")

    def snapshot_download(repo, tqdm_class, **options):
        assert are_progress_bars_disabled()
        made = {"disable": None, "total": 0, "initial": 0, "unit": "B", "unit_scale": True}
        with (
            tqdm_class(name="huggingface_hub.snapshot_download.transfer", desc="a", **made) as wire,
            tqdm_class(name="huggingface_hub.snapshot_download", desc="b", **made) as disk,
            tqdm_class(total=2, desc="Fetching 2 files") as files,
        ):
            for size in (300, 700):
                disk.total += size
                wire.total += size
                disk.refresh()
                wire.set_postfix_str("1 MB/s", refresh=False)
                assert wire.format_dict["n"] == wire.n
                wire.update(size // 2)
                disk.update(size)
                files.update(1)
            disk.set_description("done")
        assert list(tqdm_class(iter("xy"), total=2)) == ["x", "y"]  # as older versions use it
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert hub.resolve("owner/model") == tmp_path
    assert finished(bars) == ["owner/model"] and bars[0].done == 1000
    assert not are_progress_bars_disabled() and capfd.readouterr() == ("", "")
    disable_progress_bars()  # as transformers' own switch does
    hub.resolve("owner/model", progress=False)
    assert len(bars) == 1 and are_progress_bars_disabled()


def test_quiet_means_no_bars(folder, bars):
    from llm_engine import Engine
    from llm_engine.cli import app

    asked = [
        "generate",
        "abc",
        "-n",
        "1",
        "--cache",
        "none",
        "--runner",
        "torch",
        "-m",
        str(folder),
    ]
    assert CliRunner().invoke(app, asked).exit_code == 0
    assert finished(bars) == ["loading weights"]
    assert CliRunner().invoke(app, ["--quiet", *asked]).exit_code == 0
    Engine.from_pretrained(folder, progress=False, **PLAIN)
    assert len(bars) == 1
