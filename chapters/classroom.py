#!/usr/bin/env python3
"""The classroom: from the same chapters, what students get, what they check, and what a teacher grades.

For teachers, in a checkout of the book:

    python chapters/classroom.py release 11 12 --to FOLDER       a folder for students: these chapters without their solutions
    python chapters/classroom.py grade HANDED_IN --to FOLDER     grade a folder of notebooks: scores.csv and feedback pages
    python chapters/classroom.py overlay 11 12 --to FOLDER       after the deadline: the reference for what is still missing

For students, in the folder they were given:

    python chapters/sync.py                                      write llm_engine/ from your notebooks
    python chapters/classroom.py check 11                        test your exercises of chapter 11, one by one
    python chapters/classroom.py apply                           take over the overlays that lie in overlays/
    python chapters/classroom.py bring ../OLD                    take over what you wrote in an earlier folder
"""

import contextlib
import difflib
import json
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

CHAPTERS = Path(__file__).resolve().parent
ROOT = CHAPTERS.parent
if str(CHAPTERS) not in sys.path:  # also when this file is imported from elsewhere
    sys.path.insert(0, str(CHAPTERS))

import sync
from exercises import (
    BEGIN,
    END,
    OVERLAID,
    TODO,
    Chapter,
    ClassroomError,
    Exercise,
    Found,
    Submission,
    SubmissionError,
    Verdict,
    attempt,
    grader,
    imports_of,
    not_written,
    out_of_reach,
    read_chapters,
    read_submission,
    setup_of,
    shape,
    source,
    without_hidden_tests,
)
from trials import Limits, Trials

FRAMES = "released"  # in a student's folder: the notebooks as they were handed out, for `check`
TOOLS = ("sync.py", "classroom.py", "exercises.py", "trials.py")
NEEDS = "# This cell needs a later chapter ("
BEYOND = NEEDS + "{}). Below is what it shows once that is there."

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__.partition("\n")[0])
out = Console(highlight=False)


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


def release(
    words: list[str],
    to: Path,
    outputs: bool = True,
    folder: Path = CHAPTERS,
    model: Path | None = None,
) -> list[str]:
    """Write a student's folder: the chosen chapters to be filled in, those before them complete. Returns the chosen names.

    `model` is the folder of the converted default model, to be given along.
    """
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
    for given in ("constraints.txt", "benchmarks/quantization.json"):  # chapter 31 shows the latter
        if (folder.parent / given).exists():
            (to / given).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder.parent / given, to / given)
    if model is not None:
        shutil.copytree(model, to / "models" / model.name)
        as_fetched = model.with_suffix(".gguf")  # chapters 12 and 34 look into it
        if as_fetched.exists():
            shutil.copyfile(as_fetched, to / "models" / as_fetched.name)
    readme = student_readme(chapters, due, absent, model is not None)
    (to / "README.md").write_text(readme, "utf8")
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
    """A copy as nbgrader wants it: sources are text, not lines. Outputs stay as they are stored."""
    import nbformat

    cells = [{**cell, "source": source(cell)} for cell in notebook["cells"]]
    return nbformat.from_dict({**notebook, "cells": cells})


def as_lines(notebook) -> dict:
    """A notebook as Jupyter stores it: a line of source is a line of the file."""
    cells = [
        {**cell, "source": source(cell).splitlines(keepends=True)} for cell in notebook["cells"]
    ]
    return {**notebook, "cells": cells}


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


MODEL_HERE = """The chapters work on a model of 135 million parameters. It lies in `models/`; say so to the programs in each new terminal:
`export LLM_ENGINE_CACHE=$PWD/models` (PowerShell: `$env:LLM_ENGINE_CACHE = "$PWD\\models"`).
"""
MODEL_ELSEWHERE = """The chapters work on a model of 135 million parameters, which chapter 12 fetches and converts. {} the converted folder `smollm2-135m` that your teacher gives you: put it into `~/.cache/llm-engine`, or where the environment variable
`LLM_ENGINE_CACHE` says.
"""


def student_readme(
    chapters: list[Chapter], due: dict[str, Chapter], absent: set[str], model: bool
) -> str:
    rows = [
        f"| [{chapter.name}](chapters/{chapter.name}.ipynb) | `{exercise.id}` | {exercise.points:g} |"
        for chapter in chapters
        for exercise in chapter.exercises.values()
    ]
    points = sum(e.points for c in chapters for e in c.exercises.values())
    first = chapters[0].name[:2]
    example = next((e for c in chapters for e in c.exercises.values()), None)
    example = not_written(example.chapter, example.id) if example else "…: not written yet"
    until = any(chapter.number == 12 for chapter in chapters)
    elsewhere = MODEL_ELSEWHERE.format("Until you have written that, use" if until else "Or use")
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
when it is called: `NotImplementedError: {example}`.

{MODEL_HERE if model else elsewhere}
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

To carry on here with what you wrote in an earlier folder: `.venv/bin/python chapters/classroom.py bring ../OLD`, with one or more folders. Do
not copy notebooks by hand: a folder holds chapters that are complete beside those that you wrote, and one would replace the other.
"""


# ---- overlay


def overlay(words: list[str], to: Path, folder: Path = CHAPTERS) -> list[Path]:
    """Write the reference of chapters, for students who have not finished them: FOLDER/NN_name.ipynb."""
    book = read_chapters(folder)
    chapters = chosen(words, book)
    to.mkdir(parents=True, exist_ok=True)
    for chapter in chapters:
        save(to, chapter.name, complete_version(chapter, set()))
    return [to / f"{chapter.name}.ipynb" for chapter in chapters]


def apply(files: list[Path], replace: set[str] = frozenset(), folder: Path = CHAPTERS) -> list[str]:
    """Take overlays over into a student's notebooks. Returns what was done, a line each.

    What the student has written wins. The reference fills in what is still as it was given, and what is missing. An exercise named
    in `replace` gets the reference in any case; the notebook as it was is then kept in `mine/`.
    """
    done = []
    for file in files:
        reference = Chapter(file.stem, json.loads(file.read_text("utf8")))
        place = folder / file.name
        frame_file = folder / FRAMES / file.name
        if not place.exists() or not frame_file.exists():
            done.append(complete(place, file, reference))
            continue
        frame = Chapter(file.stem, json.loads(frame_file.read_text("utf8")))
        try:
            submission = read_submission(place)
        except SubmissionError as error:
            raise ClassroomError(f"{place}: {error}") from None
        notebook = json.loads(place.read_text("utf-8-sig"))
        filled = {}
        for exercise in frame.exercises.values():
            found = submission.find(exercise, frame)
            wanted = exercise.id in replace or exercise.key in replace or "all" in replace
            if found.state in ("stub", "missing") or (wanted and found.state == "written"):
                filled[exercise.id] = notebook["cells"][found.number - 1] if found.number else None
        for exercise, cell in filled.items():
            put(notebook, reference, exercise, cell)
        if filled:
            kept = keep_a_copy(place, folder.parent / "mine")
            save(folder, file.stem, notebook)
            done.append(
                f"{file.stem}: {', '.join(filled)} from the reference (before: mine/{kept.name})"
            )
        else:
            done.append(f"{file.stem}: you have written all of it, nothing to do")
    return done


def complete(place: Path, file: Path, reference: Chapter) -> str:
    """A chapter that was not released in this folder, but perhaps copied here unfinished from an earlier one."""
    if not place.exists():
        shutil.copyfile(file, place)
        return f"{file.stem}: was not here, taken over as a whole"
    notebook = json.loads(place.read_text("utf-8-sig"))
    unwritten = {
        cell["id"]: cell
        for cell in notebook["cells"]
        if cell.get("id") in reference.exercises
        and not_written(file.stem, cell["id"]) in source(cell)
    }
    if not unwritten:
        return f"{file.stem}: nothing is unwritten here, nothing to do"
    kept = keep_a_copy(place, place.parent.parent / "mine")
    for exercise, cell in unwritten.items():
        put(notebook, reference, exercise, cell)
    save(place.parent, file.stem, notebook)
    return f"{file.stem}: {', '.join(unwritten)} from the reference (before: mine/{kept.name})"


def put(notebook: dict, reference: Chapter, exercise: str, old: dict | None) -> None:
    """The reference's cell in the place of the student's, or where it stood in the chapter if there is none."""
    head, code = sync.split_head(source(reference.code[exercise]).split("\n"))
    code = [line for line in code if line.strip() not in (BEGIN, END)]
    text = "\n".join([*head, OVERLAID, *code])
    cell = {**reference.code[exercise], "outputs": [], "execution_count": None}
    cell["source"] = text.splitlines(keepends=True)
    cells = notebook["cells"]
    if old is None:
        order = list(reference.code)
        before = set(order[: order.index(exercise)])
        at = max((i for i, c in enumerate(cells, 1) if c.get("id") in before), default=0)
        cells.insert(at, cell)
    else:
        cells[next(i for i, c in enumerate(cells) if c is old)] = cell
    for other in cells:  # a second cell of this id could not be exported
        if other is not cell and other.get("id") == exercise:
            other["id"] = f"{exercise}-before"


def keep_a_copy(path: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    copy, number = folder / path.name, 1
    while copy.exists():
        number += 1
        copy = folder / f"{path.stem}_{number}.ipynb"
    shutil.copyfile(path, copy)
    return copy


# ---- from one folder to the next


def bring(old: list[Path], replace: set[str] = frozenset(), folder: Path = CHAPTERS) -> list[str]:
    """Take over what a student wrote in earlier folders. Returns what was done, a line for each chapter.

    Only chapters that were to be filled in there. What they wrote comes along as it is, and what they did not write is filled in
    from the chapter that lies here, if that is complete. A chapter in which they have written here stays, unless it is named in
    `replace`. What was here is kept in `mine/`.
    """
    places = [place / "chapters" if (place / "chapters").is_dir() else place for place in old]
    for place in places:
        if not place.is_dir():
            raise ClassroomError(f"{place}: no such folder")
        if not (place / FRAMES).is_dir():
            raise ClassroomError(f"{place} is no student's folder: it has no {FRAMES}/")
        if place.resolve() == folder.resolve():
            raise ClassroomError(f"{place} is this folder; name the one that you come from")
    return [
        bring_chapter(place / frame.name, frame, folder, replace)
        for place in places
        for frame in sorted((place / FRAMES).glob("*.ipynb"))
    ]


def bring_chapter(old: Path, frame_file: Path, folder: Path, replace: set[str]) -> str:
    name, place, own_frame = old.stem, folder / old.name, folder / FRAMES / old.name
    frame = Chapter(name, load(frame_file))
    try:
        found = {e.id: read_submission(old).find(e, frame) for e in frame.exercises.values()}
    except SubmissionError as error:
        return f"{name}: left as it is here, because of {old}: {error}"
    if not any(f.state == "written" for f in found.values()):
        return f"{name}: nothing of yours in {old}, nothing to do"
    notebook, filled = load(old), []
    here = load(place) if place.exists() else {"cells": []}
    if here == notebook:
        return f"{name}: is here already, nothing to do"
    if own_frame.exists() and place.exists() and not {name, name[:2], "all"} & replace:
        written = written_in(place, frame)
        if written:
            return (
                f"{name}: left as it is here, where you have written {', '.join(written)}. To have the one of "
                f"{old.parent.parent} in its place: --replace {name[:2]}"
            )
    given = {c["id"]: c for c in here["cells"] if c.get("id")}
    if place.exists() and not own_frame.exists():  # complete, as it was due before
        reference = Chapter(name, {"cells": [c for c in here["cells"] if c.get("id")]})
        for exercise, its in found.items():
            if its.state in ("stub", "missing") and exercise in reference.exercises:
                put(
                    notebook,
                    reference,
                    exercise,
                    notebook["cells"][its.number - 1] if its.number else None,
                )
                filled.append(exercise)
    for cell in notebook["cells"]:  # what can be run here, and could not be run there
        new = given.get(cell.get("id"))
        if new and NEEDS in source(cell) and plain_text(new) == plain_text(cell):
            cell |= {"source": new["source"], "metadata": new["metadata"]}
    said = f"{name}: yours"
    if filled:
        said += f", with {', '.join(filled)} from the reference"
    if place.exists():
        said += f" (what was here: mine/{keep_a_copy(place, folder.parent / 'mine').name})"
    save(folder, name, notebook)
    if not own_frame.exists():
        own_frame.parent.mkdir(exist_ok=True)
        shutil.copyfile(frame_file, own_frame)
    return said


def written_in(place: Path, frame: Chapter) -> list[str]:
    """The exercises that a student has written in a notebook."""
    try:
        submission = read_submission(place)
    except SubmissionError:
        return ["what cannot be read"]
    return [e.id for e in frame.exercises.values() if submission.find(e, frame).state == "written"]


def plain_text(cell: dict) -> str:
    return "\n".join(line for line in source(cell).split("\n") if not line.startswith(NEEDS))


def load(path: Path) -> dict:
    try:
        notebook = json.loads(path.read_text("utf-8-sig"))
        if isinstance(notebook["cells"], list):
            return notebook
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ClassroomError(f"{path} is damaged: it cannot be read as a notebook")


# ---- check


def own_cells(submission: Submission, frame: Chapter, exercise: Exercise, found: Found) -> dict:
    """The student's notebook as cells by id, for one exercise: theirs, with given cells they deleted, and the test as it was given."""
    mine = {c.id or f"cell-{c.number}": c.code for c in submission.cells}
    order = list(mine)
    for cell_id in reversed(list(frame.code)):  # deleted ones go before what followed them
        if cell_id not in mine:
            after = list(frame.code)[list(frame.code).index(cell_id) + 1 :]
            at = next((order.index(i) for i in after if i in order), len(order))
            order.insert(at, cell_id)
    # what stands after both the exercise and its test is not needed, and may do anything
    end = max(order.index(i) for i in (exercise.id, exercise.test_id))
    order = [i for i in order[: end + 1] if i != "setup"]
    cells = {i: mine.get(i, source(frame.code.get(i, {}))) for i in order}
    # these fetch names back from the package as it is on disk
    cells = {i: text for i, text in cells.items() if not text.startswith("#| export __")}
    for other in frame.exercises.values():
        if other.id != exercise.id and other.id in cells:
            cells[other.id] = submission.find(other, frame).code
    cells[exercise.id] = found.code
    del cells[
        exercise.test_id
    ]  # it comes last, wherever it stands in the notebook, and as it was given
    return cells | {exercise.test_id: exercise.seen_tests}


def check(place: Path, frame: Chapter, only: list[str], trials: Trials, step) -> list[Verdict]:
    """Test the exercises of one notebook, each by itself, with the tests that a student sees."""
    exercises = [e for e in frame.exercises.values() if not only or e.id in only]
    try:
        submission = read_submission(place)
    except SubmissionError as error:
        return [Verdict(e, "unreadable", f"{place.name}: {error}") for e in exercises]
    verdicts = []
    for exercise in exercises:
        step(exercise)
        found = submission.find(exercise, frame)
        if found.state != "written":
            verdicts.append(Verdict(exercise, found.state, "", found.notes, found))
            continue
        cells = own_cells(submission, frame, exercise, found)
        verdict = attempt(cells, exercise, found, trials, given=False)
        tests = [c.code for c in submission.cells if exercise.test_id in (c.id, c.grade_id)]
        if not tests:
            verdict.notes += ("its test cell is gone from the notebook; here it was run anyway",)
        elif shape(tests[-1]) != shape(exercise.seen_tests):
            verdict.notes += ("its test cell was changed; here the test as it was given was run",)
        verdicts.append(verdict)
    return verdicts


def package_notes(folder: Path) -> list[str]:
    """Whether llm_engine/ is what the notebooks say, which the next chapters import."""
    try:
        notebooks = {
            path.name: json.loads(path.read_text("utf-8-sig"))
            for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))
        }
        want = sync.build(sync.exported_cells(notebooks))
    except sync.SyncError as error:
        return [f"sync.py would refuse: {error}"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return ["sync.py would refuse: one of the notebooks is damaged"]
    package = folder.parent / "llm_engine"
    old = [
        m
        for m, text in want.items()
        if not (package / f"{m}.py").exists() or (package / f"{m}.py").read_text("utf8") != text
    ]
    if old:
        which = ", ".join(sorted(old)) if len(old) <= 5 else f"{len(old)} modules"
        return [
            f"llm_engine is older than your notebooks ({which}). Later chapters import it: "
            "python chapters/sync.py"
        ]
    return []


WORDS = {
    "right": "[green]right[/]",
    "wrong": "[red]not yet[/]",
    "stub": "[dim]not written[/]",
    "missing": "[red]missing[/]",
    "waits": "[yellow]waits[/]",
    "overlaid": "[dim]from the reference[/]",
    "unreadable": "[red]unreadable[/]",
}


def advice(verdict: Verdict) -> str:
    """What a learner reads about one exercise."""
    exercise = verdict.exercise
    text = verdict.message
    if verdict.state == "stub":
        text = "its body is still to be written"
    if verdict.state == "missing":
        text = (
            f"no cell with the id {exercise.id}, and none that defines {' or '.join(exercise.names)}. Copy the cell "
            f"back from chapters/{FRAMES}/{exercise.chapter}.ipynb"
        )
    if verdict.state == "overlaid":
        text = (
            "filled in by an overlay: it works, and earns no points. If what stands there now is yours, delete the "
            f"line {OVERLAID}"
        )
    if verdict.state == "wrong" and (hint := hint_of(exercise)):
        text += f"\nHint in the cell: {hint}"
    notes = [] if verdict.state == "missing" else [f"({note})" for note in verdict.notes]
    return "\n".join(filter(None, [text, *notes]))


def hint_of(exercise: Exercise) -> str:
    """The comment just above the body to be written."""
    lines = exercise.stub.split("\n")
    at = next((i for i, line in enumerate(lines) if line.strip() == TODO), 0)
    hint = []
    while at and lines[at - 1].lstrip().startswith("#") and not lines[at - 1].startswith("#|"):
        at -= 1
        hint.insert(0, lines[at].strip().lstrip("# "))
    return " ".join(hint)


def no_exercise(word: str, named: Iterable[str], frames: dict[str, Chapter]) -> str:
    """That the chapters named have no such exercise, which they have, and which one was meant, there or elsewhere."""
    chapters = [frames[name] for name in named if frames[name].exercises]
    near: list[str] = []
    for places in (chapters, [*frames.values()]):
        homes = {i: c.name[:2] for c in places for i in c.exercises}
        near = near or difflib.get_close_matches(word.lower(), homes.keys() - {word}, 1, 0.5)
    meant = f" Did you mean {near[0]} (chapter {homes[near[0]]})?" if near else ""
    have = "; ".join(f"chapter {c.name[:2]} has {', '.join(c.exercises)}" for c in chapters)
    return f"{word}: no such exercise.{meant} {have[:1].upper()}{have[1:]}."


def frames_of(folder: Path) -> dict[str, Chapter]:
    """The notebooks as they were handed out; in the book itself, the chapters."""
    return read_chapters(folder / FRAMES if (folder / FRAMES).is_dir() else folder)


# ---- commands

Chapters = Annotated[list[str], typer.Argument(help="Numbers such as 15 or 11-19, or `all`.")]


@app.command("release")
def release_command(
    chapters: Chapters,
    to: Annotated[Path, typer.Option(help="A new folder.")],
    outputs: Annotated[bool, typer.Option(help="Keep what demonstrations show.")] = True,
    model: Annotated[bool, typer.Option(help="Give the converted model along (640 MB).")] = False,
) -> None:
    """Write a folder for students: these chapters without solutions, the ones before complete."""
    place = None
    if model:
        from llm_engine.hub import DEFAULT_MODEL, resolve

        place = resolve(DEFAULT_MODEL)
    names = release(chapters, to, outputs, model=place)
    book = read_chapters()
    exercises = [e for n in names for e in book[n].exercises.values()]
    points = sum(e.points for e in exercises)
    out.print(
        f"{to}: {len(names)} chapters to fill in ({', '.join(n[:2] for n in names)}), "
        f"{len(exercises)} exercises, {points:g} points. Its README.md says how to begin."
    )


@app.command("overlay")
def overlay_command(
    chapters: Chapters,
    to: Annotated[Path, typer.Option(help="A folder; students put its files into overlays/.")],
) -> None:
    """Write the reference of chapters, to hand out after the deadline."""
    for path in overlay(chapters, to):
        out.print(f"wrote {path}")
    out.print("Students put these into overlays/ and run: python chapters/classroom.py apply")


def need_students_folder(command: str) -> None:
    if not (CHAPTERS / FRAMES).is_dir():
        raise ClassroomError(f"{command} is for a student's folder, as `release` writes it")


@app.command("apply")
def apply_command(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Overlays; all in overlays/ if none.")
    ] = None,
    replace: Annotated[
        list[str],
        typer.Option(help="An exercise of yours that the reference is to replace; or all."),
    ] = [],  # noqa: B006
) -> None:
    """Fill in what you have not written from overlays; what you have written stays."""
    need_students_folder("apply")
    files = files or sorted((ROOT / "overlays").glob("*.ipynb"))
    if not files:
        raise ClassroomError("no overlays: put the files you were given into overlays/")
    for line in apply(files, set(replace)):
        out.print(line)
    out.print("Then: python chapters/sync.py")


@app.command("bring")
def bring_command(
    old: Annotated[list[Path], typer.Argument(help="Folders that you worked in before.")],
    replace: Annotated[
        list[str],
        typer.Option(help="A chapter, such as 15, to take over although you wrote in it here."),
    ] = [],  # noqa: B006
) -> None:
    """Take over what you wrote in earlier folders; what you have written here stays."""
    need_students_folder("bring")
    for line in bring(old, set(replace)):
        out.print(escape(line))
    out.print("Then: python chapters/sync.py")


@app.command("grade")
def grade_command(
    submissions: Annotated[
        Path, typer.Argument(help="A folder with a folder for each student, or a zip file of it.")
    ],
    chapters: Annotated[
        list[str] | None, typer.Argument(help="What was due; all that is found if none.")
    ] = None,
    to: Annotated[
        Path, typer.Option(help="A folder for scores and feedback: new, or the one of last time.")
    ] = Path("graded"),
    seconds: Annotated[float, typer.Option(help="Each cell may take so long.")] = 60,
    total_seconds: Annotated[float, typer.Option(help="A notebook may take so long.")] = 600,
    memory: Annotated[int, typer.Option(help="MB that one exercise may take.")] = 6000,
    show_hidden: Annotated[bool, typer.Option(help="Show hidden tests in the feedback.")] = False,
    again: Annotated[
        bool, typer.Option(help="Grade also what was graded and is the same.")
    ] = False,
) -> None:
    """Grade a folder of notebooks: points, and a page of feedback for each student.

    Run again, it does what is missing or has changed.
    Their code is run with your rights: do this in a container, or as a user of its own.
    """
    if (CHAPTERS / FRAMES).is_dir():
        raise ClassroomError(
            "grading takes the whole book, with its hidden tests; this is a student's folder"
        )
    import grading

    from llm_engine.progress import progress_bar

    if not submissions.is_dir() and submissions.suffix.lower() != ".zip":
        raise ClassroomError(f"{submissions} is no folder and no zip file")
    if not submissions.exists():
        raise ClassroomError(f"{submissions}: no such file")
    if to.exists() and any(to.iterdir()) and not (to / "results").is_dir():
        raise ClassroomError(f"{to} is not empty, and not from grading. Name a new folder")
    book = read_chapters()
    with contextlib.ExitStack() as stack:
        room = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unpacked-")))
        handed, strays = grading.collect(submissions, book, room)
        if not handed:
            raise ClassroomError(f"no notebooks in {submissions}. " + " ".join(strays))
        names = {name for student in handed for name in student.files}
        due = chosen(chapters or sorted(names), book)
        due = [chapter for chapter in due if chapter.exercises]
        if not due:
            raise ClassroomError("none of these notebooks is a chapter with exercises")
        with contextlib.suppress(ValueError):  # only where it can be caught
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            stack.callback(signal.signal, signal.SIGTERM, before)
        total = len(handed) * (len(due) + 1)
        bar = stack.enter_context(progress_bar("grading", total=total, unit="notebooks"))
        begun = False

        def step(text: str) -> None:
            nonlocal begun
            if begun:
                bar.advance()
            begun = True
            bar.describe(text)

        limits = Limits(cell_seconds=seconds, memory=memory)
        more = {"seconds": total_seconds, "show_hidden": show_hidden, "again": again, "step": step}
        try:
            graded = grading.grade(handed, due, book, to, limits=limits, **more)
        except grading.Interrupted as stop:
            stack.close()
            where = f", and in {to}/scores.csv" if stop.done else ""
            out.print(
                f"Stopped: {stop.done} of {stop.total} notebooks are graded{where}. The same command goes on from "
                "here; it grades none of them again."
            )
            raise typer.Exit(130) from None
    most = sum(e.points for c in due for e in c.exercises.values())
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    shown = due if len(due) <= 8 else []
    for title in ("student", "points", *(c.name[:2] for c in shown), "notes"):
        table.add_column(title, justify="left" if title in ("student", "notes") else "right")
    for result in graded:
        row = [f"{sum(p for (n, _), p in result.points.items() if n == c.name):g}" for c in shown]
        notes = escape("; ".join(result.notes))
        table.add_row(escape(result.student), f"{result.total:g}/{most:g}", *row, notes)
    out.print(table)
    for stray in strays:
        out.print(escape(stray))
    out.print(
        f"{to}: scores.csv, details.csv, feedback/STUDENT/CHAPTER.html, nbgrader/gradebook.db"
    )
    if kept := sum(result.kept for result in graded):
        out.print(
            f"{kept} notebooks are as they were when they were graded: not run again (--again)"
        )
    if gone := grading.Results(to / "results").names.keys() - {h.student for h in handed}:
        out.print(escape(f"Graded before, and not in {submissions} now: {', '.join(sorted(gone))}"))
    if ungraded := sum(len(result.ungraded) for result in graded):
        out.print(f"{ungraded} exercises could not be graded, see the notes: grade these again")
        raise typer.Exit(1)


@app.command("check")
def check_command(
    what: Annotated[
        list[str] | None, typer.Argument(help="Chapters or notebooks, then exercises; all if none.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Each cell may take so long.")] = 60,
) -> None:
    """Test your exercises, one by one, without a network."""
    frames = frames_of(CHAPTERS)
    places: dict[str, Path] = {}
    only: list[str] = []
    every = {e.id for frame in frames.values() for e in frame.exercises.values()}
    for word in what or ["all"]:
        path, exercise = Path(word), word.lower().replace("_", "-")
        if path.suffix == ".ipynb" and path.exists():
            found = [n for n in frames if path.stem == n or path.stem.startswith(n)]
            if not found:
                raise ClassroomError(f"{word}: its name is none of {', '.join(frames)}")
            places[found[0]] = path
        elif exercise in every:
            only.append(exercise)
        elif path.suffix == ".ipynb" or word[:1].isdigit() or word == "all" or word in frames:
            places |= {c.name: CHAPTERS / f"{c.name}.ipynb" for c in chosen([word], frames)}
        else:
            raise ClassroomError(no_exercise(word, places or frames, frames))
    for word in only:
        home = [n for n in frames if word in frames[n].exercises]
        if places and not places.keys() & set(home):
            there = no_exercise(word, places, frames)
            raise ClassroomError(f"{there} There is one in {', '.join(home)}.")
    if only and not places:
        places = {
            n: CHAPTERS / f"{n}.ipynb"
            for n, frame in frames.items()
            if set(only) & set(frame.exercises)
        }
    places = {n: p for n, p in places.items() if frames[n].exercises}
    setup = next((setup_of(frames[n]) for n in places), "")
    imports = [text for n in places for text in imports_of(frames[n])]
    count = sum(len([e for e in frames[n].exercises if not only or e in only]) for n in places)
    if not count:
        raise ClassroomError("there are no exercises in these chapters")
    verdicts = []
    errors = Console(stderr=True)
    with (
        Trials(ROOT, setup, Limits(cell_seconds=seconds), imports) as trials,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=errors,
            transient=True,
            disable=not errors.is_terminal,
        ) as bar,
    ):
        task = bar.add_task("starting", total=count)

        def step(exercise: Exercise) -> None:
            bar.update(task, description=exercise.key, completed=len(verdicts))

        for name, place in places.items():
            verdicts += check(place, frames[name], only, trials, step)
    for name in places:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for title in ("exercise", "", "points", "what to look at"):
            table.add_column(
                title,
                justify="right" if title == "points" else "left",
                overflow="fold",
                no_wrap=title == "exercise",
            )
        for v in verdicts:
            if v.exercise.chapter == name:
                points = f"{v.points:g}/{v.exercise.points:g}"
                table.add_row(v.exercise.id, WORDS[v.state], points, escape(advice(v)))
        out.print(f"[bold]{name}[/]")
        out.print(table)
    right = sum(v.state == "right" for v in verdicts)
    score, most = sum(v.points for v in verdicts), sum(v.exercise.points for v in verdicts)
    out.print(f"{right} of {len(verdicts)} exercises right: {score:g} of {most:g} points")
    if (CHAPTERS / FRAMES).is_dir():
        if right:
            out.print("More tests are run when it is graded.")
        for note in package_notes(CHAPTERS):
            out.print(f"Note: {escape(note)}")
    raise typer.Exit(0 if right == len(verdicts) else 1)


def main() -> None:
    try:
        app()
    except (ClassroomError, sync.SyncError) as error:
        print(error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
