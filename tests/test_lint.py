"""chapters/lint.py notices each thing it is there for: one good notebook, broken in one way at a time."""

import copy
import importlib.util
import socket
from pathlib import Path

import pytest

CHAPTERS = Path(__file__).parent.parent / "chapters"
SPEC = importlib.util.spec_from_file_location("chapters_lint", CHAPTERS / "lint.py")
LINT = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(LINT)

SETUP = "import torch\n"
SOLUTION = "#| export\ndef f(x):\n    ### BEGIN SOLUTION\n    return x\n    ### END SOLUTION"
TEST = "assert f(1) == 1\n### BEGIN HIDDEN TESTS\nassert f(2) == 2\n### END HIDDEN TESTS"


def grader(cell_id: str, test: bool) -> dict:
    return {
        "schema_version": 3,
        "grade_id": cell_id,
        "grade": test,
        "solution": not test,
        "locked": test,
        "task": False,
        "points": 2 * test,
    }


def code(number: int, cell_id: str, text: str, *outputs: dict, **metadata) -> dict:
    return {
        "cell_type": "code",
        "execution_count": number,
        "id": cell_id,
        "metadata": metadata,
        "outputs": list(outputs),
        "source": text.splitlines(keepends=True),
    }


def printed(text: str, name: str = "stdout") -> dict:
    return {"output_type": "stream", "name": name, "text": [text]}


def good() -> dict:
    cells = [
        {
            "cell_type": "markdown",
            "id": "title",
            "metadata": {},
            "source": ["# 11 [a](11_a.ipynb#b)"],
        },
        code(1, "setup", SETUP),
        code(2, "f", SOLUTION, nbgrader=grader("f", test=False)),
        code(3, "test-f", TEST, nbgrader=grader("test-f", test=True)),
        code(4, "shown", "f(1)", printed("1/2 of a/b\n")),
        code(5, "timed", "f(1)", printed("3 s\n"), tags=["nbval-ignore-output"]),
    ]
    metadata = {"kernelspec": {"name": "python3"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def problems(notebook: dict, name: str = "11_a.ipynb") -> list[str]:
    return list(LINT.lint(name, notebook, SETUP, {"11_a.ipynb"}))


def test_a_good_chapter_passes():
    assert problems(good()) == []


def cell(notebook: dict, cell_id: str) -> dict:
    return next(c for c in notebook["cells"] if c["id"] == cell_id)


def put(cell_id: str, **changes):
    return lambda notebook: cell(notebook, cell_id).update(changes)


def regrade(cell_id: str, **changes):
    return lambda notebook: cell(notebook, cell_id)["metadata"]["nbgrader"].update(changes)


BROKEN = {
    "not run": (put("shown", execution_count=None), "was not run, not as 4"),
    "out of order": (put("shown", execution_count=6), "was run as 6, not as 4"),
    "empty": (put("shown", source=[]), "is empty"),
    "repeated id": (put("shown", id="timed"), "occurs 2 times"),
    "bad id": (put("shown", id="a b"), "an id is"),
    "no setup": (put("setup", id="other"), "has no cell with the id setup"),
    "other setup": (put("setup", source=["import numpy"]), "not the one of the other chapters"),
    "other kernel": (
        lambda nb: nb["metadata"]["kernelspec"].update(name="venv"),
        "must be python3",
    ),
    "old format": (lambda nb: nb.update(nbformat_minor=4), "has no cell ids"),
    "widget state": (lambda nb: nb["metadata"].update(widgets={}), "widgets"),
    "widget": (
        put(
            "shown",
            outputs=[
                {
                    "output_type": "display_data",
                    "data": {"application/vnd.jupyter.widget-view+json": {}},
                }
            ],
        ),
        "stores a widget",
    ),
    "error": (
        put("shown", outputs=[{"output_type": "error", "ename": "ValueError"}]),
        "stores an error (ValueError)",
    ),
    "warning": (put("shown", outputs=[printed("Warning", "stderr")]), "stderr"),
    "path": (put("shown", outputs=[printed("in /home/ann/book/x.py")]), "/home/ann/book/x.py"),
    "windows path": (put("timed", outputs=[printed(r"C:\Users\ann")]), "an absolute path"),
    "address": (put("shown", outputs=[printed("<f at 0x7f00deadbeef>")]), "a memory address"),
    "second uncompared cell": (
        put("shown", metadata={"tags": ["nbval-skip"]}),
        "2 cells are not compared",
    ),
    "uncompared by comment": (
        put("shown", source=["# NBVAL_IGNORE_OUTPUT\n", "f(1)"]),
        "2 cells are not compared",
    ),
    "test before solution": (
        lambda nb: nb["cells"].insert(1, nb["cells"].pop(3)),
        "come after the solution",
    ),
    "no test": (lambda nb: nb["cells"].remove(cell(nb, "test-f")), "has no test cell test-f"),
    "other grade id": (regrade("f", grade_id="g"), "its grade_id is g"),
    "missing key": (lambda nb: cell(nb, "f")["metadata"]["nbgrader"].pop("task"), "schema 3"),
    "old schema": (regrade("f", schema_version=2), "schema 3"),
    "neither": (regrade("f", solution=False), "either a solution"),
    "locked solution": (regrade("f", locked=True), "a solution is unlocked"),
    "worthless test": (regrade("test-f", points=0), "gives points"),
    "no markers": (put("f", source=["def f(x): ..."]), "has solution markers"),
    "open marker": (put("f", source=["### BEGIN SOLUTION\n", "x = 1"]), "do not pair up"),
    "open hidden tests": (put("test-f", source=["### END HIDDEN TESTS"]), "do not pair up"),
    "markers without metadata": (put("f", metadata={}), "no nbgrader metadata"),
    "dead link": (put("title", source=["[b](12_b.ipynb)"]), "links to 12_b.ipynb"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_chapter_is_noticed(case):
    breaks, complaint = BROKEN[case]
    notebook = copy.deepcopy(good())
    breaks(notebook)
    assert any(complaint in problem for problem in problems(notebook)), problems(notebook)


def test_the_name_of_the_machine_is_noticed():
    notebook = good()
    cell(notebook, "shown")["outputs"] = [printed(f"run on {socket.gethostname()}")]
    if len(socket.gethostname()) > 3:
        assert any("the name of this machine" in problem for problem in problems(notebook))


def test_a_chapter_has_a_number():
    assert "NN_words.ipynb" in problems(good(), "Untitled.ipynb")[0]


def test_the_book_has_a_budget_of_uncompared_cells():
    assert list(LINT.book_budget({f"{i}_a.ipynb": good() for i in range(10, 22)})) == []
    assert "13 cells" in next(LINT.book_budget({f"{i}_a.ipynb": good() for i in range(10, 23)}))
