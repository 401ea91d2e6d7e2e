"""Chapters in a real JupyterLab: opened in a browser, run with "Run All Cells", read from the screen and from the saved file.

Two short chapters by default. LLM_ENGINE_JUPYTERLAB=all runs every one, LLM_ENGINE_JUPYTERLAB=15,31 those.
Also here: each chapter needs nothing beyond the extra `book`.
"""

import ast
import functools
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections import deque
from pathlib import Path

import pytest
from browser import browser  # noqa: F401
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
CHAPTERS = {path.stem: path for path in sorted((ROOT / "chapters").glob("[0-9][0-9]_*.ipynb"))}
SHORT = ("10", "14")
LONGEST = 900  # seconds for a chapter, on a busy machine


def chosen() -> list[str]:
    wanted = os.environ.get("LLM_ENGINE_JUPYTERLAB", "")
    if wanted == "all":
        return list(CHAPTERS)
    numbers = tuple(filter(None, wanted.split(","))) or SHORT
    return [stem for stem in CHAPTERS if stem.startswith(numbers)]


def cells(path: Path) -> list[dict]:
    return [c for c in json.loads(path.read_text("utf8"))["cells"] if c["cell_type"] == "code"]


def kinds(cell: dict) -> list[str]:
    """What a cell shows, without what bars leave behind, and with the pieces of a stream as one."""
    found = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        if output["output_type"] == "display_data" and not "".join(data.get("text/plain", "x")):
            continue
        name = output.get("name") or "+".join(sorted(kind for kind in data if "/" in kind))
        if output["output_type"] == "error":
            name = f"{output['ename']}: {output['evalue']}"
        if name != "stderr" and found[-1:] != [name]:  # warnings belong to the machine
            found.append(name)
    return found


# ---- a server and a page


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab on a copy of the chapters whose outputs are gone, and the folder of that copy."""
    folder = tmp_path_factory.mktemp("lab")
    chapters = folder / "chapters"
    chapters.mkdir()
    for stem in chosen():
        notebook = json.loads(CHAPTERS[stem].read_text("utf8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell.update(outputs=[], execution_count=None)
        (chapters / CHAPTERS[stem].name).write_text(json.dumps(notebook), "utf8")
    (folder / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks/quantization.json", folder / "benchmarks")  # chapter 31 shows it
    (folder / "config/labconfig").mkdir(parents=True)
    settings = {  # every cell is in the page, also those far below; no questions about news
        "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
        "@jupyterlab/apputils-extension:notification": {
            "fetchNews": "false",
            "checkForUpdates": False,
        },
    }
    overrides = folder / "config/labconfig/default_setting_overrides.json"
    overrides.write_text(json.dumps(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = ("CONFIG_DIR", "RUNTIME_DIR", "DATA_DIR")
    environment = {
        **os.environ,
        **{f"JUPYTER_{name}": str(folder / name.split("_")[0].lower()) for name in ours},
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "user-settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--port={port}", "--ip=127.0.0.1", f"--ServerApp.root_dir={chapters}"]
    command += ["--IdentityProvider.token=test", "--ServerApp.port_retries=0"]
    command += ["--LabApp.expose_app_in_browser=True"]
    address = f"http://127.0.0.1:{port}"
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            end = time.monotonic() + 120
            while True:
                try:
                    urllib.request.urlopen(f"{address}/api/status?token=test", timeout=5).close()
                    break
                except OSError:
                    said = (folder / "log").read_text("utf8")[-2000:]
                    assert server.poll() is None and time.monotonic() < end, said
                    time.sleep(0.2)
            yield address, chapters
        finally:
            server.terminate()  # and with it its kernels
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


STATE = """() => {
  const all = selector => [...document.querySelectorAll('.jp-Notebook ' + selector)];
  return {
    prompts: all('.jp-CodeCell .jp-InputArea-prompt').map(x => x.innerText.trim()),
    errors: all('.jp-OutputArea-output[data-mime-type$=".stderr"]').map(x => x.innerText)
      .filter(text => /^-{30}|Traceback|SyntaxError/.test(text)),
    images: all('.jp-RenderedImage img').map(x => [x.complete, x.naturalWidth, x.getBoundingClientRect().width]),
    tables: all('.jp-RenderedHTMLCommon.jp-OutputArea-output table').length,
    bars: all('.jp-OutputArea progress').length,
    dialogs: [...document.querySelectorAll('.jp-Dialog')].map(x => x.innerText),
  };
}"""


READY = """() => {
  const context = window.jupyterapp?.shell.currentWidget?.sessionContext;
  const kernel = context?.session?.kernel;
  return context?.isReady && kernel?.connectionStatus === 'connected' && kernel.status === 'idle';
}"""


def run_all(page, address: str, name: str, count: int) -> dict:
    """Open a chapter, run every cell from the menu, wait for the last; what is then on the page."""
    page.goto(f"{address}/lab/tree/{name}?token=test&reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=120_000)
    page.wait_for_function(READY, timeout=120_000)  # before that, the menu's entry does nothing
    page.click('.lm-MenuBar-itemLabel:text-is("Run")')
    page.click('.lm-Menu-item[data-command="runmenu:run-all"]')
    end = time.monotonic() + LONGEST
    while True:
        state = page.evaluate(STATE)
        assert not state["errors"] and not state["dialogs"], (name, state)
        ran = [prompt for prompt in state["prompts"] if prompt.strip("[]: ").isdigit()]
        if len(ran) == count == len(state["prompts"]):
            break
        assert time.monotonic() < end, (name, state["prompts"])
        page.wait_for_timeout(500)
    page.wait_for_timeout(500)  # the last output is drawn
    return page.evaluate(STATE)


@pytest.mark.parametrize("stem", chosen())
def test_a_chapter_runs_from_top_to_bottom(stem, lab, browser):  # noqa: F811
    address, folder = lab
    stored = cells(CHAPTERS[stem])
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        state = run_all(page, address, f"{stem}.ipynb", len(stored))
        assert state["prompts"] == [f"[{i}]:" for i in range(1, len(stored) + 1)]
        figures = sum("image/png" in kind for cell in stored for kind in all_kinds(cell))
        assert len(state["images"]) == figures and figures > 0
        for complete, pixels, width in state["images"]:
            assert complete and pixels >= 1.4 * width > 100, state[
                "images"
            ]  # crisp, and to be seen
        tables = sum("text/html" in kind for cell in stored for kind in all_kinds(cell))
        assert state["tables"] >= tables and state["bars"] == 0
        page.keyboard.press("Escape")
        page.keyboard.press("Control+s")
        saved = folder / f"{stem}.ipynb"
        end = time.monotonic() + 30
        while last_count(saved) != len(stored):
            assert time.monotonic() < end, "not saved"
            page.wait_for_timeout(200)
    found = cells(saved)
    assert [c["id"] for c in found] == [c["id"] for c in stored]
    for new, old in zip(found, stored, strict=True):
        assert kinds(new) == kinds(old), new["id"]
        assert not any("widget" in kind for kind in all_kinds(new)), new["id"]


def last_count(path: Path) -> int | None:
    """The number of the last cell that ran; None while the file is being written."""
    try:
        return cells(path)[-1]["execution_count"]
    except json.JSONDecodeError:
        return None


def all_kinds(cell: dict) -> list[str]:
    return [kind for output in cell["outputs"] for kind in output.get("data", {})]


def test_an_error_on_the_page_is_seen(lab, browser):  # noqa: F811
    """The check of the check: a chapter whose second cell fails is red."""
    address, folder = lab
    source = json.loads(CHAPTERS[chosen()[0]].read_text("utf8"))
    code = [c for c in source["cells"] if c["cell_type"] == "code"][:1]
    code = [
        {
            **code[0],
            "id": f"c{i}",
            "metadata": {},
            "outputs": [],
            "execution_count": None,
            "source": s,
        }
        for i, s in enumerate(["1", "nonsense", "2"])
    ]
    (folder / "broken.ipynb").write_text(json.dumps({**source, "cells": code}), "utf8")
    with browser.new_context() as context, pytest.raises(AssertionError, match="nonsense"):
        run_all(context.new_page(), address, "broken.ipynb", 3)


# ---- nothing but the extra `book`


def closure(*names: str) -> set[str]:
    """The distributions that installing these brings, by what is installed here says it needs."""
    found: set[str] = set()
    waiting = deque(names)
    while waiting:
        requirement = Requirement(waiting.popleft())
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            key = f"{name}[{extra}]" if extra else name
            if key in found:
                continue
            found.add(key)
            try:
                needed = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # another platform's
            for line in needed:
                marker = Requirement(line).marker
                if marker is None or marker.evaluate({"extra": extra}):
                    waiting.append(line)
    return {key for key in found if "[" not in key}


def imports(code: str, everywhere: bool = True) -> set[str]:
    """Top-level names that code imports; those in functions, too, or only those that are imported at once."""
    lines = [line for line in code.split("\n") if not line.lstrip().startswith(("%", "!"))]
    tree = ast.parse("\n".join(lines))
    found = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@functools.cache
def distributions() -> dict[str, set[str]]:
    """Which distributions hold a module."""
    found = importlib.metadata.packages_distributions()
    return {name: {canonicalize_name(d) for d in holders} for name, holders in found.items()}


def foreign(code: str, allowed: set[str], everywhere: bool = True) -> set[str]:
    """What code imports that none of the allowed distributions has."""
    names = imports(code, everywhere) - set(sys.stdlib_module_names) - {"llm_engine"}
    return {name for name in names if not distributions().get(name, set()) & allowed}


def test_chapters_need_nothing_beyond_the_book_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    extras = project["optional-dependencies"]
    book = [*project["dependencies"], *extras["book"]]
    allowed, optional = closure(*book), closure(*book, *extras["sentencepiece"])
    assert {"torch", "jupyterlab", "ipykernel", "matplotlib", "transformers", "beartype"} <= allowed
    assert not {"pytest", "nbval", "nbgrader", "ruff", "hypothesis", "sphinx"} & allowed
    for stem, path in CHAPTERS.items():
        for cell in cells(path):
            code = "".join(cell["source"])
            # the engine's own functions may import what they alone need, and say so where it is missing
            exported = code.startswith("#| export")
            lost = foreign(code, allowed, not exported) | foreign(code, optional)
            assert not lost, (stem, cell["id"])
    code = "%time\nimport pytest, json\ndef f():\n    from nbgrader.x import y"
    assert foreign(code, allowed) == {"pytest", "nbgrader"}
    assert foreign(code, allowed, everywhere=False) == {"pytest"}
