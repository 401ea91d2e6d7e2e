"""What it means that a chapter's stored outputs are right: `pytest --nbval --nbval-current-env chapters`.

nbval runs each cell and compares text exactly, so that the last bit of a float turns a chapter red on the next machine, while
pictures, and cells that were never run, are not compared at all. Here is compared what a reader sees:

    text, tables    words and integers exactly; floats within RTOL, or one unit of the last digit printed
    figures         the numbers they were drawn from, within RTOL of the largest; and the picture, pixel by pixel
    stderr          not at all: warnings and progress bars belong to the machine (chapters/lint.py: none is stored)
    tagged cells    `nbval-ignore-output`: run, not compared (chapters/lint.py: few of them)

`tests/test_checker.py` breaks notebooks in every way this is meant to notice.
"""

import base64
import difflib
import io
import math
import re

import numpy as np
from nbval.plugin import IPyNbCell
from PIL import Image

RTOL, ATOL = 1e-5, 1e-7  # what another CPU's kernels may change in float32
FLOAT = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*|\.\d+|\d+(?=e[-+]?\d))(?:e[-+]?\d+)?", re.I)
PNG, FIGURE_DATA = "image/png", "application/vnd.llm-engine.figdata+json"
# In no square of TILE pixels may more than PIXELS be off by LEVELS.
TILE, LEVELS, PIXELS = 32, 48, 12


def compare(stored: list[dict], produced: list[dict]) -> str | None:
    """What differs between the outputs of a cell, in words; None if nothing does."""
    stored, produced = (
        [o for o in side if o.get("name") != "stderr"] for side in (stored, produced)
    )
    if len(stored) != len(produced):
        return f"{len(stored)} outputs are stored, {len(produced)} were produced: {kinds(produced)}"
    for old, new in zip(stored, produced, strict=True):
        if old["output_type"] != new["output_type"]:
            return f"a {old['output_type']} became a {new['output_type']}"
        old, new = contents(old), contents(new)
        if old.keys() != new.keys():
            return f"{', '.join(old)} became {', '.join(new)}"
        for kind in [*(k for k in COMPARE if k in old), *(old.keys() - COMPARE.keys())]:
            if why := COMPARE.get(kind, compare_exactly)(old[kind], new[kind]):
                return f"{kind}: {why}"
    return None


def contents(output: dict) -> dict:
    return (
        {"text": output["text"]}
        if output["output_type"] == "stream"
        else dict(output.get("data", {}))
    )


def kinds(outputs: list[dict]) -> str:
    return ", ".join("+".join(contents(o)) or o["output_type"] for o in outputs) or "nothing"


def compare_text(old: str, new: str) -> str | None:
    if old == new:
        return None
    floats = FLOAT.findall(old), FLOAT.findall(new)
    words = [
        re.sub(r"\s+", "", FLOAT.sub("#", text)) for text in (old, new)
    ]  # padding follows the digits
    if words[0] != words[1]:
        lines = difflib.unified_diff(
            old.split("\n"), new.split("\n"), "stored", "produced", lineterm="", n=1
        )
        return "the text differs\n" + "\n".join(lines)
    for a, b in zip(*floats, strict=True):
        if not abs(float(a) - float(b)) <= max(ATOL, RTOL * abs(float(a)), last_digit(a, b)):
            return f"the number {a} became {b}"
    return None


def last_digit(a: str, b: str) -> float:
    """One unit (and a hair) of the last digit printed; 0 without digits: numpy prints `1.` when a float is an integer."""
    units = []
    for mantissa, _, exponent in (number.lower().partition("e") for number in (a, b)):
        digits = len(mantissa.partition(".")[2])
        units.append(10.0 ** (int(exponent or 0) - digits) if digits else 0.0)
    coarse, fine = max(units), min(filter(None, units), default=0.0)
    same_form = len(a.partition(".")[2]) == len(b.partition(".")[2])
    return 1.001 * (coarse if same_form else fine)


def compare_numbers(old: dict, new: dict) -> str | None:
    """The numbers behind two figures, as `llm_engine.viz.show_figure` publishes them."""
    if old["name"] != new["name"]:
        return f"figure {old['name']} became {new['name']}"
    if old["data"].keys() != new["data"].keys():
        return f"drawn from {', '.join(new['data'])} instead of {', '.join(old['data'])}"
    for key, a in old["data"].items():
        b = new["data"][key]
        if a["shape"] != b["shape"]:
            return f"{key}: shape {a['shape']} became {b['shape']}"
        x, y = (np.array([float(v) for v in side["values"]]) for side in (a, b))
        scale = np.abs(x[np.isfinite(x)]).max(initial=0)
        wrong = ~np.isclose(x, y, rtol=RTOL, atol=ATOL + RTOL * scale, equal_nan=True)
        if wrong.any():
            i = int(wrong.argmax())
            place = (
                [int(n) for n in np.unravel_index(i, a["shape"])]
                if math.prod(a["shape"]) == x.size
                else i
            )
            return f"{key}{place}: {x[i]:.7g} became {y[i]:.7g} ({wrong.sum()} of {x.size} numbers are off)"
    return None


def compare_pixels(old: str, new: str) -> str | None:
    """A typo moves many pixels in one place; another CPU moves a few, by little, here and there."""
    images = [Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB") for png in (old, new)]
    a, b = (np.asarray(image, dtype=np.int16) for image in images)
    if a.shape != b.shape:
        return f"a figure of {a.shape[1]}x{a.shape[0]} pixels became {b.shape[1]}x{b.shape[0]}"
    off = np.abs(a - b).max(-1) > LEVELS
    rows, columns = (range(0, size, TILE // 2) for size in off.shape)  # overlapping squares
    worst = max((int(off[r : r + TILE, c : c + TILE].sum()), r, c) for r in rows for c in columns)
    if worst[0] > PIXELS:
        return f"{off.sum()} of {off.size} pixels differ, most of them around x={worst[2]}, y={worst[1]}"
    return None


def compare_exactly(old, new) -> str | None:
    return None if old == new else "it differs"


COMPARE = {  # what says most about a difference comes first
    FIGURE_DATA: compare_numbers,
    "text": compare_text,
    "text/plain": compare_text,
    "text/html": compare_text,
    "text/markdown": compare_text,
    "text/latex": compare_text,
    PNG: compare_pixels,
}


# ---- put into nbval (0.11, pinned: these are its insides)

run_cell = IPyNbCell.runtest


def runtest(cell: IPyNbCell) -> None:
    if cell.cell.source.strip() and cell.cell.execution_count is None and not cell.options["skip"]:
        cell.raise_cell_error(f"{place(cell)} was stored without having been run.{HINT}")
    if any(output.output_type == "error" for output in cell.cell.outputs):
        cell.raise_cell_error(f"{place(cell)}: an error is stored. Catch it and print its message.")
    run_cell(cell)


def compare_outputs(cell: IPyNbCell, produced: list, stored: list, skip_compare=None) -> bool:
    why = compare(stored, produced)
    cell.comparison_traceback = [f"{place(cell)}: {why}{HINT}"]
    return why is None


def place(cell: IPyNbCell) -> str:
    return f"chapters/{cell.path.name}, cell {cell.cell.get('id')}"


HINT = "\nIf the new output is the right one, store it: python chapters/run.py NN"
IPyNbCell.runtest = runtest
IPyNbCell.compare_outputs = compare_outputs
