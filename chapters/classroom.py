#!/usr/bin/env python3
"""The classroom: from the same chapters, what students get, what they check, and what a teacher grades.

For teachers, in a checkout of the book:

    python chapters/classroom.py release 11 12 --to FOLDER       a folder for students: these chapters without their solutions
    python chapters/classroom.py overlay 11 12 --to FOLDER       after the deadline: the reference for what is still missing

For students, in the folder they were given:

    python chapters/sync.py                                      write llm_engine/ from your notebooks
    python chapters/classroom.py check 11                        test your exercises of chapter 11, one by one
    python chapters/classroom.py apply                           take over the overlays that lie in overlays/
"""

import json
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

CHAPTERS = Path(__file__).resolve().parent
ROOT = CHAPTERS.parent
if str(CHAPTERS) not in sys.path:  # also when this file is imported from elsewhere
    sys.path.insert(0, str(CHAPTERS))

import sync
from exercises import (
    Chapter,
    grader,
    out_of_reach,
    read_chapters,
    source,
    without_hidden_tests,
)

FRAMES = "released"  # in a student's folder: the notebooks as they were handed out, for `check`
TOOLS = ("sync.py", "classroom.py", "exercises.py")
BEYOND = "# This cell needs a later chapter ({}). Below is what it shows once that is there."

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__.partition("\n")[0])
out = Console(highlight=False)


class ClassroomError(Exception):
    """Something that cannot be done: what, why, and the way out."""


def chosen(words: list[str], book: dict[str, Chapter]) -> list[Chapter]:
    """Chapters by number or name: `15`, `15_attention`, `11-19`, `all`."""
    found: dict[str, Chapter] = {}
    for word in words:
        stem = Path(word).name.removesuffix(".ipynb")
        first, dash, last = stem.partition("-")
        if stem == "all":
            names = [name for name, chapter in book.items() if chapter.exercises]
        elif dash and first.isdigit() and last.isdigit():
            names = [n for n, c in book.items() if int(first) <= c.number <= int(last)]
        else:
            names = [n for n in book if n == stem or (len(stem) == 2 and n.startswith(stem))]
        if not names:
            raise ClassroomError(
                f"{word}: no such chapter. Give numbers such as 15 or 11-19; there are "
                + ", ".join(book)
            )
        found |= {name: book[name] for name in names}
    return [found[name] for name in sorted(found)]


# ---- release


def release(words: list[str], to: Path, outputs: bool = True, folder: Path = CHAPTERS) -> list[str]:
    """Write a student's folder: the chosen chapters to be filled in, those before them complete. Returns the chosen names."""
    book = read_chapters(folder)
    chapters = chosen(words, book)
    if to.exists() and any(to.iterdir()):
        raise ClassroomError(
            f"{to} is not empty, and a release overwrites nothing. Name a new folder"
        )
    released = {chapter.name for chapter in chapters}
    due = {n: c for n, c in book.items() if n < max(released) and n not in released}
    (to / "chapters" / FRAMES).mkdir(parents=True)
    for tool in TOOLS:
        shutil.copyfile(CHAPTERS / tool, to / "chapters" / tool)
    absent = modules_of(book.values()) - modules_of([*due.values(), *chapters])
    for chapter in due.values():
        save(to / "chapters", chapter.name, complete_version(chapter, absent))
    for chapter in chapters:
        notebook = student_version(chapter, absent, outputs)
        save(to / "chapters", chapter.name, notebook)
        frame = {**notebook, "cells": [c for c in notebook["cells"] if c["cell_type"] == "code"]}
        for cell in frame["cells"]:
            cell["outputs"] = []
        save(to / "chapters" / FRAMES, chapter.name, frame)
    write_package(to / "llm_engine", due.values())
    (to / "pyproject.toml").write_text(student_pyproject(folder.parent), "utf8")
    if (folder.parent / "constraints.txt").exists():
        shutil.copyfile(folder.parent / "constraints.txt", to / "constraints.txt")
    (to / "README.md").write_text(student_readme(chapters, due, absent), "utf8")
    return sorted(released)


def modules_of(chapters) -> set[str]:
    return {cell.module for cell in cells_of(chapters)}


def cells_of(chapters) -> list[sync.Cell]:
    return sync.exported_cells({f"{c.name}.ipynb": c.notebook for c in chapters})


def write_package(folder: Path, chapters) -> None:
    """The modules of these chapters; `__init__.py` may be empty, so that this folder is the package and no other one."""
    folder.mkdir(parents=True, exist_ok=True)
    for module, text in ({"__init__": ""} | sync.build(cells_of(chapters))).items():
        (folder / f"{module}.py").write_text(text, "utf8", newline="\n")


def save(folder: Path, name: str, notebook: dict) -> None:
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    (folder / f"{name}.ipynb").write_text(text, "utf8", newline="\n")


def complete_version(chapter: Chapter, absent: set[str]) -> dict:
    """A chapter that was due before: with its solutions, but its hidden tests stay hidden for the next course."""
    notebook = editable(chapter.notebook)
    for cell in notebook.cells:
        if grader(cell).get("grade"):
            cell.source = without_hidden_tests(cell.source)
    mark_out_of_reach(notebook, absent)
    return as_lines(notebook)


def student_version(chapter: Chapter, absent: set[str], outputs: bool = True) -> dict:
    """A chapter to be filled in: nbgrader takes out solutions and hidden tests and locks the test cells.

    What the demonstrations print and draw stays, because a picture to aim at helps and contains no code; `In [ ]` says that they
    have not been run. The outputs of exercises and of their tests go.
    """
    from nbgrader.preprocessors import ComputeChecksums, LockCells

    notebook = editable(chapter.notebook)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if cell.id in chapter.exercises:
            cell.source = chapter.exercises[cell.id].stub
        elif grader(cell).get("grade"):
            cell.source = without_hidden_tests(cell.source)
        cell.execution_count = None
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = None
        if grader(cell) or not outputs:
            cell.outputs = []
    mark_out_of_reach(notebook, absent)
    for step in (LockCells(), ComputeChecksums()):
        notebook, _ = step.preprocess(notebook, {})
    return as_lines(notebook)


def mark_out_of_reach(notebook, absent: set[str]) -> None:
    """Say at the top of a cell that it needs later chapters, and let "Run All" go on after it."""
    lacking = out_of_reach(notebook, absent)
    for cell in notebook.cells:
        if cell.get("id") in lacking:
            head, code = sync.split_head(source(cell).split("\n"))
            note = BEYOND.format(", ".join(f"llm_engine.{m}" for m in lacking[cell.id]))
            cell.source = "\n".join([*head, note, *code])
            cell.metadata.tags = [*cell.metadata.get("tags", []), "raises-exception"]


def editable(notebook: dict):
    """A copy as nbformat and nbgrader want it: sources are text, not lines."""
    import nbformat

    return nbformat.reads(json.dumps(notebook), as_version=4)


def as_lines(notebook) -> dict:
    """A notebook as Jupyter stores it: a line of source is a line of the file."""
    import nbformat

    nbformat.validate(notebook)
    return json.loads(nbformat.writes(notebook, version=4))


def student_pyproject(root: Path) -> str:
    """`pip install -e .` in a student's folder: their llm_engine, with what the chapters need."""
    book = tomllib.loads((root / "pyproject.toml").read_text("utf8"))["project"]
    needs = list(dict.fromkeys([*book["dependencies"], *book["optional-dependencies"]["book"]]))
    lines = "".join(f"  {json.dumps(need)},\n" for need in needs)
    return f"""[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

# The same name as the book's package: this one takes its place, so that `import llm_engine` is yours.
[project]
name = "llm-engine"
version = "{book["version"]}"
description = "My own inference engine"
requires-python = "{book["requires-python"]}"
dependencies = [
{lines}]

[project.scripts]
llm-engine = "llm_engine.cli:main"

[tool.setuptools]
packages = ["llm_engine"]
"""


def student_readme(chapters: list[Chapter], due: dict[str, Chapter], absent: set[str]) -> str:
    rows = [
        f"| [{chapter.name}](chapters/{chapter.name}.ipynb) | `{exercise.id}` | {exercise.points:g} |"
        for chapter in chapters
        for exercise in chapter.exercises.values()
    ]
    points = sum(e.points for c in chapters for e in c.exercises.values())
    first = chapters[0].name[:2]
    before = ", ".join(f"[{n[:2]}](chapters/{n}.ipynb)" for n in due) or "none"
    return f"""# Your engine

This folder becomes an inference engine, and you write it. The chapters are notebooks. In some of their cells a body is missing, and these
cells are your exercises. A script takes the cells marked `#| export` out of your notebooks and writes them as the package
`llm_engine`, so what you write there is what runs.

## Once

```bash
python3 -m venv .venv
.venv/bin/pip install -c constraints.txt -e .
.venv/bin/python chapters/sync.py
```

(On Linux, `.venv/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu` as the second line saves gigabytes. On
Windows the programs lie in `.venv\\Scripts`.) The third command writes `llm_engine/` from your notebooks. What is not written yet says so
when it is called: `NotImplementedError: chapter 11, exercise head-size: not written yet`.

The chapters work on a model of 135 million parameters, which [chapter 12](chapters/) fetches and converts. Until you have written that, ask your
teacher for the converted folder and put it into `~/.cache/llm-engine`, or wherever the environment variable `LLM_ENGINE_CACHE` says.

## Each time

1. Read: `.venv/bin/jupyter lab chapters`. Write the body of an exercise, and run the test cell after it.
2. Check: `.venv/bin/python chapters/classroom.py check {first}` tests your exercises of chapter {first} one by one, without a network.
3. Export: `.venv/bin/python chapters/sync.py`. The next chapters import what you wrote here.

Add cells wherever you like. Keep the cells of the exercises, because your work is found by them. The tests of a test cell are not all: some
more are kept for grading.

## The exercises

| chapter | exercise | points |
| --- | --- | ---: |
{chr(10).join(rows)}
| | together | {points:g} |

Hand in the notebooks of these chapters.

## What is here

* `chapters/`: your chapters, and complete the ones that came before ({before}).
* `llm_engine/`: written by `sync.py`, never edited by hand. At first it holds only what came before.
* `overlays/`, later: the reference for exercises you could not finish. Put there what you get, and run
  `.venv/bin/python chapters/classroom.py apply`, then `sync.py`. What you have written stays; only what is missing is filled in.
* A cell that says it needs a later chapter cannot run yet. What you see below it is what it will show.
* Numbers and pictures under cells with `In [ ]` are the reference's. Running a cell replaces them by yours.

To carry on in the folder of a later release, copy your notebooks over its own: `cp OLD/chapters/1*.ipynb NEW/chapters/`.
"""


# ---- commands

Chapters = Annotated[list[str], typer.Argument(help="Numbers such as 15 or 11-19, or `all`.")]


@app.command("release")
def release_command(
    chapters: Chapters,
    to: Annotated[Path, typer.Option(help="A new folder.")],
    outputs: Annotated[bool, typer.Option(help="Keep what demonstrations show.")] = True,
) -> None:
    """Write a folder for students: these chapters without solutions, the ones before complete."""
    names = release(chapters, to, outputs)
    book = read_chapters()
    exercises = [e for n in names for e in book[n].exercises.values()]
    points = sum(e.points for e in exercises)
    out.print(
        f"{to}: {len(names)} chapters to fill in ({', '.join(n[:2] for n in names)}), "
        f"{len(exercises)} exercises, {points:g} points. Its README.md says how to begin."
    )


@app.callback()
def main_options() -> None:
    pass


def main() -> None:
    try:
        app()
    except (ClassroomError, sync.SyncError) as error:
        print(error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
