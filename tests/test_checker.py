"""The comparison of stored outputs is itself tested: broken chapters must turn red, harmless differences must not.

One notebook is run and stored; then each cell's code is broken in one way, its stored output kept, and nbval is run over all of
them at once, on one thread and (where OpenBLAS obeys) with the kernels of another CPU.
"""

import copy
import importlib.util
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

CHAPTERS = Path(__file__).parent.parent / "chapters"

SETUP = """
import sys
import numpy as np
from llm_engine.viz import heatmap, new_figure, show_figure, show_lines, show_shapes, show_table

def weights(scale=1.0, bump=0.0):
    x = np.random.default_rng(0).standard_normal((8, 64)).astype("f4") * np.float32(scale)
    scores = x @ x.T / np.float32(8)
    a = np.exp(scores - scores.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)
    a[2, 3] += bump
    return a

def logits(scale=1.0, factor=1.0):
    rng = np.random.default_rng(1)
    x = rng.standard_normal(64).astype("f4") * np.float32(scale)
    y = x @ rng.standard_normal((64, 32)).astype("f4")
    y[5] *= factor
    return y

def attention(scale=1.0, bump=0.0, title="Who attends to whom", cmap="viridis", name="attention"):
    figure, axes = new_figure(3, 3)
    axes.imshow(weights(scale, bump), cmap=cmap)
    axes.set_title(title)
    show_figure(figure, name, attention=weights(scale, bump))

ONE_ULP = np.nextafter(np.float32(1), np.float32(2))
"""

# What the cell says when it is stored, what it says when it is checked, and a part of the complaint (None: none).
MUTANTS = {
    "unchanged": ("attention()", "attention()", None),
    "picture-one-ulp": ("attention()", "attention(scale=ONE_ULP)", None),
    "lines-one-ulp": (
        "show_lines('logits', y=logits())",
        "show_lines('logits', y=logits(ONE_ULP))",
        None,
    ),
    "array-one-ulp": ("weights()", "weights(ONE_ULP)", None),
    "text-one-ulp": (
        "print(f'{logits()[0]:.6f}')",
        "print(f'{logits(ONE_ULP)[0]:.6f}')",
        None,
    ),
    "warning": ("print(1)", "print(1); print('loading', file=sys.stderr)", None),
    "wrong-shape": (
        "show_shapes(x=weights())",
        "show_shapes(x=weights()[:7])",
        "+x       [7, 8]",
    ),
    "wrong-shape-in-text": ("print(weights().shape)", "print(weights()[:7].shape)", "(7, 8)"),
    "wrong-shape-in-figure": (
        "heatmap(weights(), 'a')",
        "heatmap(weights()[:7], 'a')",
        "shape [8, 8] became [7, 8]",
    ),
    "one-weight": ("attention()", "attention(bump=1e-3)", "attention[2, 3]"),
    "one-logit": (
        "show_lines('logits', y=logits())",
        "show_lines('logits', y=logits(factor=1.01))",
        "y[5]",
    ),
    "one-logit-in-text": ("logits()", "logits(factor=1.01)", "the number"),
    "one-logit-in-table": (
        "show_table(['logit'], [[float(v)] for v in logits()])",
        "show_table(['logit'], [[float(v)] for v in logits(factor=1.01)])",
        "the number",
    ),
    "title-typo": (
        "attention()",
        "attention(title='Who attends to whon')",
        "pixels differ",
    ),
    "small-typo": ("attention()", "attention(title='Who attends to wham')", "pixels differ"),
    "colormap": ("attention()", "attention(cmap='magma')", "pixels differ"),
    "other-figure": ("attention()", "attention(name='scores')", "figure attention became scores"),
    "word": ("print('four heads')", "print('five heads')", "text differs"),
    "integer": ("print(13, 7)", "print(13, 8)", "text differs"),
    "nan": ("print(float(1.5))", "print(float('nan'))", "text differs"),
    "nothing-printed": ("print(1)", "x = 1", "1 outputs are stored, 0 were produced"),
    "printed-twice": ("show_shapes(x=weights())", "show_shapes(x=weights())\n2", "2 were produced"),
    "printed-not-returned": ("7", "print(7)", "execute_result became a stream"),
    "never-run": ("3", "3", "without having been run"),
    "never-run-silent": ("x = 3", "x = 3", "without having been run"),
    "stored-error": ("4", "4", "an error is stored"),
    "raises": ("5", "5 / 0", "ZeroDivisionError"),
    "after-the-error": ("6", "6", None),
}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory) -> dict[str, str | None]:
    """What nbval says of each cell."""
    runner = load("run")
    folder = tmp_path_factory.mktemp("chapters")
    shutil.copy(CHAPTERS / "conftest.py", folder)
    notebook = new_notebook(cells=[new_code_cell(SETUP)])
    for name, (stored, _, _) in MUTANTS.items():
        notebook.cells.append(new_code_cell(stored, id=name))
    runner.execute(notebook, folder)
    break_cells(notebook)
    nbformat.write(notebook, folder / "01_mutants.ipynb")
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval"]
    command += [
        "--nbval-current-env",
        f"--junitxml={report}",
        f"--rootdir={folder}",
        "-c",
        os.devnull,
    ]
    other = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Haswell"}
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")} | other
    done = subprocess.run([*command, folder], env=env, capture_output=True, text=True)
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert len(cases) == len(notebook.cells), done.stdout + done.stderr
    found = [None if case.find("failure") is None else case.find("failure").text for case in cases]
    return dict(zip(["setup", *MUTANTS], found, strict=True))


def break_cells(notebook):
    for cell in notebook.cells[1:]:
        cell.source = MUTANTS[cell.id][1]
        if cell.id.startswith("never-run"):
            cell.outputs, cell.execution_count = [], None
        if cell.id == "stored-error":
            cell.outputs.append(new_output("error", ename="E", evalue="", traceback=[]))


@pytest.mark.parametrize("name", MUTANTS)
def test_the_checker_sees_what_a_reader_would(complaints, name):
    expected = MUTANTS[name][2]
    if expected is None:
        assert complaints[name] is None
    else:
        assert expected in (complaints[name] or "nothing")


def load(tool: str):
    spec = importlib.util.spec_from_file_location(f"chapters_{tool}", CHAPTERS / f"{tool}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("loss 0.123456", "loss 0.123457", True),  # one unit of the last digit
        ("loss 0.123456", "loss 0.123459", False),
        ("x 12345.678", "x 12345.70", True),  # within 1e-5
        ("[0.7308271 , 1.]", "[0.73082715, 1.]", True),  # numpy pads
        ("[1., 2.]", "[1., 3.]", False),  # printed so because they are integers
        ("[1., 2.]", "[1.0000, 2.0001]", True),
        ("1.2e-08", "3.4e-08", True),  # noise
        ("1.2e-03", "1.4e-03", False),
        ("-0.5", "0.5", False),
        ("12", "13", False),
        ("1e5 steps", "1e6 steps", False),
        ("v1.2.3", "v1.2.4", False),
        ("0.5 nan", "0.5 inf", False),
    ],
)
def test_printed_numbers(old, new, same):
    assert (load("conftest").compare_text(old, new) is None) == same


def test_numbers_of_a_figure_are_compared_with_the_largest():
    """A value near zero carries the rounding error of the large ones it was computed with."""
    checker = load("conftest")
    old = {"name": "f", "data": {"x": {"shape": [3], "values": [20.0, 1e-3, "nan"]}}}
    close, far = copy.deepcopy(old), copy.deepcopy(old)
    close["data"]["x"]["values"][1] = 1.1e-3
    far["data"]["x"]["values"][1] = 2e-3
    assert checker.compare_numbers(old, close) is None
    assert "x[1]: 0.001 became 0.002" in checker.compare_numbers(old, far)
    far["data"]["x"]["values"] = [20.0, 1e-3, 1.0]
    assert "x[2]: nan became 1" in checker.compare_numbers(old, far)
