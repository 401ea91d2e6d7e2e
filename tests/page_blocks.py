"""Run what a Markdown page shows: its `python` and `bash` blocks, and compare with the `text` block after each.

`python tests/page_blocks.py chapters/troubleshooting.md` runs a page and writes the outputs into it, so that none is
typed. All blocks of a page share one process and one empty folder. Two comments direct it, which readers do not see:

    <!-- plant
    Python, run before the next block: the fault that is to be found.
    -->

    <!-- numbers vary -->      before a `text` block: words are compared, numbers are not

A `bash` block holds calls of `llm-engine`, run in this process; `< FILE` gives them an input. It may call `python` too.
"""

import contextlib
import io
import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

FENCE = re.compile(
    r"<!-- plant\n(?P<plant>.*?)\n-->"
    r"|(?P<vary><!-- numbers vary -->)"
    r"|^(?P<fence>`{3,})(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=fence)$",
    re.S | re.M,
)
NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?")


@dataclass
class Block:
    kind: str  # "python" or "bash"
    source: str
    plant: str  # Python to run before it
    output: str | None  # what the page shows after it; None if nothing
    line: int  # where the source begins
    numbers_vary: bool = False
    span: tuple[int, int] = (0, 0)  # of the output in the page

    @property
    def name(self) -> str:
        return f"line {self.line}: {self.source.strip().splitlines()[0][:60]}"

    def agrees(self, got: str) -> bool:
        """Is this what the page shows?"""
        same = (lambda text: NUMBER.sub("#", text)) if self.numbers_vary else str
        return words(same(got)) == words(same(self.output or ""))


def words(text: str) -> list[list[str]]:
    """Lines of words: how wide a column is, and dashes under its head, are no matter."""
    lines = [[re.sub(r"-{4,}", "----", word) for word in line.split()] for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def blocks(page: str) -> list[Block]:
    """The `python` and `bash` blocks of a page, in order."""
    found: list[Block] = []
    plant, vary = [], False
    waiting = None  # the block whose output may come next
    for match in FENCE.finditer(page):
        if match["plant"]:
            plant.append(match["plant"])
        elif match["vary"]:
            vary = True
        elif match["info"] in ("python", "bash"):
            line = page.count("\n", 0, match.start("body")) + 1
            waiting = Block(match["info"], match["body"], "\n".join(plant), None, line)
            found.append(waiting)
            plant = []
        elif match["info"] == "text" and waiting:
            waiting.output, waiting.span = match["body"], match.span("body")
            waiting.numbers_vary, waiting, vary = vary, None, False
        else:
            waiting = None
    return found


class PageRunner:
    """Runs the blocks of one page, one after the other, in one namespace and in the current folder."""

    def __init__(self, names: dict | None = None):
        self.names = {} if names is None else names
        self.names["__name__"] = "page"
        # like the shell's variables, what a plant patches is put back at its end
        self.undo = contextlib.ExitStack()
        self.names["until_next"] = self.undo.enter_context

    def run(self, block: Block) -> str:
        """What it prints. Plants of the block before are undone."""
        self.undo.close()
        if block.plant:
            exec(compile(block.plant, "<plant>", "exec"), self.names)
        if block.kind == "bash":
            return "".join(self._command(line) for line in commands(block.source))
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(block.source, f"<{block.name}>", "exec"), self.names)
        return output.getvalue()

    def _command(self, line: str) -> str:
        from typer.testing import CliRunner

        from llm_engine.cli import app

        line, _, file = line.partition(" < ")
        program, *arguments = shlex.split(line)
        if program == "python":
            done = subprocess.run(
                [sys.executable, *arguments], text=True, encoding="utf8",
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            return done.stdout
        if program != "llm-engine":
            raise ValueError(f"only llm-engine and python are run here, not {program}")
        entered = Path(file.strip()).read_text("utf8") if file else None
        return CliRunner().invoke(app, arguments, input=entered).output


def commands(source: str) -> list[str]:
    """The commands of a `bash` block, without comments and with continued lines joined."""
    lines = source.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def run_page(path: Path, names: dict | None = None) -> list[tuple[Block, str]]:
    """Each block that shows an output, or is Python, with what it gives. `names` is left with what Python defined."""
    results, here = [], os.getcwd()
    runner, logger = PageRunner(names), logging.getLogger("llm_engine")
    level, off = logger.level, {"LLM_ENGINE_PROGRESS": "off"}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, off):
        os.chdir(folder)
        logger.setLevel(logging.WARNING)
        try:
            for block in blocks(path.read_text("utf8")):
                # commands that show no output are only looked up; Python is run, others build on it
                if block.output is not None or block.kind == "python":
                    results.append((block, runner.run(block)))
        finally:
            runner.undo.close()
            os.chdir(here)
            logger.setLevel(level)  # other tests in this process shall find things as they were
    return results


def write_outputs(path: Path) -> int:
    """Run the page and store what does not agree; how many blocks changed."""
    page, changed = path.read_text("utf8"), 0
    for block, got in reversed(run_page(path)):
        if block.output is not None and not block.agrees(got):
            start, end = block.span
            text = "\n".join(line.rstrip() for line in got.rstrip().splitlines())
            page, changed = page[:start] + text + "\n" + page[end:], changed + 1
    path.write_text(page, "utf8")
    return changed


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import torch
    from jaxtyping import install_import_hook

    install_import_hook("llm_engine", "beartype.beartype")  # as in the tests
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        print(f"{name}: {write_outputs(Path(name).resolve())} outputs written")
