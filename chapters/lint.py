#!/usr/bin/env python3
"""Rules that every stored chapter keeps, checked without running anything: `python chapters/lint.py [FILE …]`.

Each problem is one line: the chapter, the cell, what is wrong and what to do.
"""

import json
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

CHAPTERS = Path(__file__).resolve().parent
IGNORED_IN_CHAPTER, IGNORED_IN_BOOK = 1, 12  # cells that are run but not compared
UNCOMPARED_TAGS = {"nbval-ignore-output", "nbval-skip", "raises-exception"}
UNCOMPARED_COMMENT = re.compile(r"^\s*#+\s*(NBVAL_|PYTEST_VALIDATE)", re.M)
NAME = re.compile(r"\d\d_[a-z0-9_]+\.ipynb")
CELL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")
HOST = socket.gethostname()
MACHINE = {
    "an absolute path": re.compile(
        r"(?<![\w.])(?:/(?:home|root|Users|tmp|var|opt|usr|work|mnt)/|[A-Z]:\\)\S+"
    ),
    "a memory address": re.compile(r"\b0x[0-9a-f]{7,}\b"),
    "the name of this machine": re.compile(rf"\b{re.escape(HOST)}\b" if len(HOST) > 3 else r"(?!)"),
}
MARKERS = {kind: (f"### BEGIN {kind}", f"### END {kind}") for kind in ("SOLUTION", "HIDDEN TESTS")}
GRADER_KEYS = {"schema_version", "grade_id", "grade", "solution", "locked", "task", "points"}


def source(cell: dict) -> str:
    return "".join(cell["source"])


def tags(cell: dict) -> set[str]:
    return set(cell["metadata"].get("tags", []))


def is_compared(cell: dict) -> bool:
    return not (tags(cell) & UNCOMPARED_TAGS or UNCOMPARED_COMMENT.search(source(cell)))


def lint(name: str, notebook: dict, setup: str, files: set[str]) -> Iterator[str]:
    """Problems of one chapter. `setup` is what its setup cell must be, `files` are what it may link to."""
    if not NAME.fullmatch(name):
        yield f"{name}: a chapter is named NN_words.ipynb"
    for check in (
        file_format,
        cell_ids,
        run_order,
        setup_cell,
        outputs,
        uncompared,
        exercises,
        links,
    ):
        for place, problem in check(notebook, setup, files):
            yield f"{name}{f', cell {place}' if place else ''}: {problem}"


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def file_format(notebook, setup, files):
    version = (notebook["nbformat"], notebook["nbformat_minor"])
    if version < (4, 5):
        yield (
            "",
            f"nbformat {version[0]}.{version[1]} has no cell ids; save it with a current Jupyter",
        )
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        yield "", "the kernelspec must be python3. Run: python chapters/run.py --tidy NN"
    if "widgets" in notebook["metadata"]:
        yield "", "holds the state of widgets, which a page cannot show; print text instead"


def cell_ids(notebook, setup, files):
    counts = Counter(cell.get("id") for cell in notebook["cells"])
    for cell_id, count in counts.items():
        if not cell_id or not CELL_ID.fullmatch(cell_id):
            yield cell_id, "an id is 1 to 64 letters, digits, - or _"
        elif count > 1:
            yield cell_id, f"the id occurs {count} times"


def run_order(notebook, setup, files):
    for expected, cell in enumerate(code_cells(notebook), 1):
        if not source(cell).strip():
            yield cell.get("id"), "is empty; delete it"
        elif cell["execution_count"] != expected:
            found = (
                "was not run"
                if cell["execution_count"] is None
                else f"was run as {cell['execution_count']}"
            )
            yield cell.get("id"), f"{found}, not as {expected}. Run: python chapters/run.py NN"
            return  # the rest only follows from this


def setup_cell(notebook, setup, files):
    found = [source(cell) for cell in code_cells(notebook) if cell.get("id") == "setup"]
    if not found:
        yield "", "has no cell with the id setup"
    elif found[0].strip() != setup.strip():
        yield "setup", "is not the one of the other chapters"


def outputs(notebook, setup, files):
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                yield (
                    cell.get("id"),
                    f"stores an error ({output['ename']}). Catch it and print its message",
                )
            if output.get("name") == "stderr" and is_compared(cell):
                yield (
                    cell.get("id"),
                    "stores warnings or progress (stderr), which differ on each machine",
                )
            data = output.get("data", {"text": output.get("text", "")})
            for kind, content in data.items():
                if "jupyter.widget" in kind:
                    yield (
                        cell.get("id"),
                        "stores a widget, which a page cannot show; print text instead",
                    )
                if kind.startswith("text"):
                    for what, pattern in MACHINE.items():
                        if match := pattern.search("".join(content)):
                            yield cell.get("id"), f"prints {what}: {match[0]}"


def uncompared(notebook, setup, files):
    ids = [cell.get("id") for cell in code_cells(notebook) if not is_compared(cell)]
    if len(ids) > IGNORED_IN_CHAPTER:
        yield (
            "",
            f"{len(ids)} cells are not compared ({', '.join(ids)}); at most {IGNORED_IN_CHAPTER} may be",
        )


def exercises(notebook, setup, files):
    """nbgrader's metadata: solution cells with markers, each with its test cell after it."""
    seen = []
    for cell in notebook["cells"]:
        grader, text = cell["metadata"].get("nbgrader"), source(cell)
        marked = {kind: markers_in(text, kind) for kind in MARKERS}
        for kind, lines in marked.items():
            if cell["cell_type"] == "code" and lines != list(MARKERS[kind]) * (len(lines) // 2):
                yield cell.get("id"), f"{MARKERS[kind][0]} and {MARKERS[kind][1]} do not pair up"
        if grader is None:
            if cell["cell_type"] == "code" and any(marked.values()):
                yield cell.get("id"), "has exercise markers, but no nbgrader metadata"
            continue
        seen.append(cell.get("id"))
        if grader.keys() != GRADER_KEYS or grader["schema_version"] != 3 or grader["task"]:
            yield (
                cell.get("id"),
                f"nbgrader metadata must be schema 3 with {', '.join(sorted(GRADER_KEYS))}",
            )
        elif grader["grade_id"] != cell.get("id"):
            yield cell.get("id"), f"its grade_id is {grader['grade_id']}; make it the cell's id"
        elif grader["solution"] == grader["grade"]:
            yield cell.get("id"), "is either a solution (solution: true) or a test (grade: true)"
        elif grader["solution"] and (
            grader["locked"] or grader["points"] or not marked["SOLUTION"]
        ):
            yield cell.get("id"), "a solution is unlocked, gives no points and has solution markers"
        elif grader["grade"] and (
            not grader["locked"] or grader["points"] <= 0 or marked["SOLUTION"]
        ):
            yield cell.get("id"), "a test is locked, gives points and has no solution markers"
        elif grader["grade"] and cell["id"].removeprefix("test-") not in seen[:-1]:
            yield cell["id"], "must be named test-X and come after the solution X"
    for cell_id in seen:
        if not cell_id.startswith("test-") and f"test-{cell_id}" not in seen:
            yield cell_id, f"the exercise has no test cell test-{cell_id}"


def markers_in(text: str, kind: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if re.search(rf"(BEGIN|END) {kind}", line)]


def links(notebook, setup, files):
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            for target in LINK.findall(source(cell)):
                if target not in files and not (CHAPTERS / target).exists():
                    yield cell.get("id"), f"links to {target}, which does not exist"


def book_budget(notebooks: dict[str, dict]) -> Iterator[str]:
    total = sum(not is_compared(cell) for nb in notebooks.values() for cell in code_cells(nb))
    if total > IGNORED_IN_BOOK:
        yield f"{total} cells of the book are run but not compared; at most {IGNORED_IN_BOOK} may be"


def setup_of(notebooks: dict[str, dict]) -> str:
    """The setup cell that most chapters have."""
    found = [
        source(c) for nb in notebooks.values() for c in code_cells(nb) if c.get("id") == "setup"
    ]
    return Counter(found).most_common(1)[0][0] if found else ""


def main() -> int:
    paths = [Path(word) for word in sys.argv[1:]]
    book = {
        path.name: json.loads(path.read_text("utf8")) for path in sorted(CHAPTERS.glob("*.ipynb"))
    }
    chapters = {path.name: json.loads(path.read_text("utf8")) for path in paths} or book
    problems = [
        p for name, nb in chapters.items() for p in lint(name, nb, setup_of(book), set(book))
    ]
    problems += book_budget(book)
    ignored = sum(not is_compared(cell) for nb in book.values() for cell in code_cells(nb))
    print(*problems, sep="\n", end="\n" if problems else "")
    print(
        f"{len(chapters)} chapters, {ignored} cells run but not compared, {len(problems)} problems"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
