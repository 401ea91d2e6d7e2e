"""Grading a folder of notebooks that students handed in, with nbgrader: its gradebook, its scores, its feedback pages.

nbgrader by itself runs a submission from top to bottom in one kernel, as it was handed in: a copied cell, a lost id, an endless loop
or a wrong function early on takes the points of everything after it. Here each submission is made anew first. The frame and all tests
come from the book, from the student only what each exercise asks for; and each exercise is run by itself, in a process with limits,
with the reference for all other exercises. What came of it is then put into the notebook as its outputs, and nbgrader counts the points.
"""

import contextlib
import csv
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sync
from exercises import (
    Chapter,
    ClassroomError,
    Exercise,
    Found,
    SubmissionError,
    Verdict,
    attempt,
    grader,
    imports_of,
    read_submission,
    setup_of,
)
from trials import Limits, Trials

ASSIGNMENT = "exercises"
OURS = {"released", "mine", "overlays", ".ipynb_checkpoints", "__pycache__", ".venv", "venv"}


# ---- finding what was handed in


@dataclass
class Handed:
    """The notebooks of one student."""

    student: str
    files: dict[str, Path] = field(default_factory=dict)  # chapter -> notebook
    notes: list[str] = field(default_factory=list)


def collect(folder: Path, book: dict[str, Chapter]) -> tuple[list[Handed], list[str]]:
    """Who handed in what, and remarks on files that belong to nobody.

    A folder for each student, with notebooks at any depth (nbgrader's submitted/STUDENT/ASSIGNMENT/ too), or files whose names
    hold the student and the chapter: `li_15_attention.ipynb`.
    """
    if (folder / "submitted").is_dir():
        folder = folder / "submitted"
    found: dict[str, Handed] = {}
    strays = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.is_symlink():
            continue
        if entry.is_dir():
            student = found.setdefault(entry.name, Handed(entry.name))
            take(student, sorted(notebooks_in(entry)), book, entry)
        elif entry.suffix == ".ipynb":
            chapter = chapter_of(entry, book)
            name = re.sub(rf"[_\- ]*{chapter}[_\- ]*", "", entry.stem) if chapter else entry.stem
            name = re.sub(r"(\s*\(\d+\)|-?Copy\d*)$", "", name) or entry.stem
            take(found.setdefault(name, Handed(name)), [entry], book, folder)
        elif entry.suffix in (".zip", ".tar", ".gz", ".7z", ".rar"):
            strays.append(f"{entry.name}: unpack it first, into a folder named after the student")
    return list(found.values()), strays


def notebooks_in(folder: Path) -> Iterable[Path]:
    for path in folder.rglob("*.ipynb"):
        inside = path.relative_to(folder).parts[:-1]
        hidden = any(part in OURS or part.startswith(".") for part in inside)
        if not hidden and path.is_file() and not path.is_symlink():
            yield path


def take(student: Handed, paths: list[Path], book: dict[str, Chapter], folder: Path) -> None:
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if (path.parent / "released").is_dir() and not (
            path.parent / "released" / path.name
        ).exists():
            continue  # a chapter that came complete with the student's folder
        try:
            chapter = chapter_of(path, book)
        except Exception:  # whatever it holds, the others are graded
            chapter = None
        if chapter is None:
            student.notes.append(f"{name}: no chapter of the book could be recognized in it")
            continue
        before = student.files.get(chapter)
        if before is not None:
            path, other = sorted((path, before), key=lambda p: rank(p, book[chapter]), reverse=True)
            kept, other = (p.relative_to(folder).as_posix() for p in (path, other))
            student.notes.append(f"{chapter}: {kept} counts, {other} does not")
        student.files[chapter] = path


def rank(path: Path, chapter: Chapter) -> tuple:
    """Of two files for one chapter the higher counts: more exercises written, fewer folders deep, the chapter's name, newer."""
    written = -1
    with contextlib.suppress(SubmissionError):
        submission = read_submission(path)
        found = [submission.find(exercise, chapter) for exercise in chapter.exercises.values()]
        written = sum(f.state == "written" for f in found)
    return written, -len(path.parts), path.stem == chapter.name, path.stat().st_mtime


def chapter_of(path: Path, book: dict[str, Chapter]) -> str | None:
    """By the file's name, else by the ids of its cells, else by what it defines."""
    for name in book:
        if name in path.stem:
            return name
    try:
        cells = read_submission(path).cells
    except SubmissionError:
        number = re.match(r"(\d\d)(?!\d)", path.stem)
        return next((n for n in book if number and n.startswith(number[1])), None)
    likeness = {
        name: sum(
            (cell.id in chapter.exercises) + (cell.grade_id in chapter.exercises) for cell in cells
        )
        + sum(any(set(e.names) & c.defines for c in cells) for e in chapter.exercises.values())
        for name, chapter in book.items()
    }
    best = max(likeness, key=likeness.get, default=None)
    return best if best and likeness[best] else None


# ---- running


def stubbed_package(chapter: Chapter, book: dict[str, Chapter], folder: Path) -> Path:
    """llm_engine as a student has it who begins this chapter: what came before, and of this one nothing but stubs.

    So that nobody's cell can import the answer.
    """
    notebooks = {f"{n}.ipynb": c.notebook for n, c in book.items() if n < chapter.name}
    own = json.loads(json.dumps(chapter.notebook))
    for cell in own["cells"]:
        if cell["id"] in chapter.exercises:
            cell["source"] = chapter.exercises[cell["id"]].stub
    notebooks[f"{chapter.name}.ipynb"] = own
    modules = {"__init__": ""} | sync.build(sync.exported_cells(notebooks))
    (folder / "llm_engine").mkdir(parents=True)
    for module, text in modules.items():
        (folder / "llm_engine" / f"{module}.py").write_text(text, "utf8")
    return folder


def grade_notebook(
    path: Path | None,
    chapter: Chapter,
    trials: Trials,
    seconds: float,
    step: Callable = lambda e: None,
) -> list[Verdict]:
    """A verdict for each exercise of one submission. Whatever it holds, this returns."""
    exercises = list(chapter.exercises.values())
    if path is None:
        return [Verdict(e, "missing", "not handed in") for e in exercises]
    try:
        submission = read_submission(path)
    except SubmissionError as error:
        return [Verdict(e, "unreadable", f"{path.name}: {error}") for e in exercises]
    reference = chapter.cells
    used, verdicts = 0.0, []
    for exercise in exercises:
        step(exercise)
        try:
            found = submission.find(exercise, chapter)
            if found.state == "written" and used > seconds:
                verdict = Verdict(exercise, "wrong", "", found.notes, found)
                verdict.message = f"not run: the {seconds:g} s of a submission were used up before"
            elif found.state == "written":
                cells = {**reference, exercise.id: found.code}
                verdict = attempt(cells, exercise, found, trials)
                ids = [o.cell for o in verdict.outcomes]
                used += sum(o.seconds for o in verdict.outcomes[ids.index(exercise.id) :])
            else:
                verdict = Verdict(exercise, found.state, "", found.notes, found)
                verdict.message = {
                    "stub": "not written",
                    "missing": "not found in the notebook",
                    "overlaid": "this is the reference, taken over from an overlay",
                }[found.state]
        except Exception as error:  # one exercise never takes the others with it
            verdict = Verdict(exercise, "ungraded", f"it could not be graded: {error!r}")
        verdicts.append(verdict)
    return verdicts


def check_the_reference(chapter: Chapter, trials: Trials) -> None:
    """Before anybody is graded: the book's own solutions pass here. Raises `ClassroomError` if one does not."""
    try:
        trials.start()
    except RuntimeError as error:
        raise ClassroomError(f"{chapter.name} cannot be graded here: {error}") from None
    reference = chapter.cells
    for exercise in chapter.exercises.values():
        found = Found("written", exercise.solution)
        verdict = attempt(reference, exercise, found, trials)
        if verdict.state != "right":
            raise ClassroomError(
                f"{exercise.key} cannot be graded here, because the reference itself fails: {verdict.message}\n"
                "Is the model there, is --seconds enough, are all packages of the book installed?"
            )


# ---- nbgrader


def page(chapter: Chapter, verdicts: list[Verdict] | None = None, student: str = "") -> Any:
    """The exercises of a chapter as a notebook of their own: the reference, or a student's with what came of it."""
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    title = f"# {chapter.name}" + (f", {in_markdown(student)}" if student else "")
    cells = [new_markdown_cell(title, id="title")]
    for number, exercise in enumerate(chapter.exercises.values()):
        verdict = verdicts[number] if verdicts else None
        text = f"## {exercise.id}"
        if verdict:
            text += f"\n\n**{verdict.points:g} of {exercise.points:g} points.** {told(verdict)}"
            text += "".join(f"\n\n* {note}" for note in verdict.notes)
        cells.append(new_markdown_cell(text, id=f"about-{exercise.id}"[:64]))
        code, found = exercise.code, verdict.found if verdict else None
        if verdict:
            code = found.code if found else exercise.stub
            if found and found.helpers:
                helpers = f"# From your other cells, since this exercise uses it:\n{found.helpers}"
                cells.append(new_code_cell(helpers, id=f"helpers-{exercise.id}"[:64]))
        for cell_id, text in ((exercise.id, code), (exercise.test_id, exercise.tests)):
            marks = {"nbgrader": dict(grader(chapter.code[cell_id]))}
            cells.append(new_code_cell(text, id=cell_id, metadata=marks))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def told(verdict: Verdict) -> str:
    """A verdict's message for the page, as plain text in Markdown; what a hidden test compared stays hidden."""
    if verdict.state == "right":
        return "All tests pass."
    text = verdict.message
    test = verdict.failure
    in_test = test and test.places and test.places[0][0] == verdict.exercise.test_id
    if verdict.state == "wrong" and in_test and verdict.exercise.is_hidden(test.line):
        text = f"One of the tests that are kept for grading: {test.message or 'no more is told'}"
        if test.kind not in ("AssertionError", "Stopped", "OutOfTime"):
            text = f"In one of the tests that are kept for grading: {test.kind}: {test.message}"
    return in_markdown(text)


def in_markdown(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|$])", r"\\\1", text)


def outputs_of(verdict: Verdict) -> dict[str, list[dict]]:
    """Outputs for the student's cell and the test cell, as nbgrader reads them: an error in the test cell means no points."""
    from nbformat.v4 import new_output

    shown = {o.cell: o for o in verdict.outcomes}
    exercise, outputs = verdict.exercise, {}
    for cell_id in (f"helpers-{exercise.id}", exercise.id, exercise.test_id):
        outcome, outputs[cell_id] = shown.get(cell_id), []
        if outcome and outcome.output.strip():
            outputs[cell_id].append(new_output("stream", name="stdout", text=outcome.output))
        if outcome and outcome.failure and cell_id != exercise.test_id:
            failure = outcome.failure
            text = f"{failure.kind}: {failure.message}"
            outputs[cell_id].append(error_output(failure.kind, failure.message, text))
    if verdict.state != "right":
        kind = verdict.failure.kind if verdict.failure else "NotGraded"
        text = re.sub(r"\\(.)", r"\1", told(verdict))  # it names the kind where that helps
        outputs[exercise.test_id].append(error_output(kind, text, text))
    return outputs


def error_output(kind: str, message: str, text: str) -> dict:
    from nbformat.v4 import new_output

    return new_output("error", ename=kind, evalue=message, traceback=[text])


@contextlib.contextmanager
def quiet():
    """Without the warnings of nbgrader's own use of its libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Course:
    """A folder as nbgrader wants it, with its gradebook."""

    def __init__(self, folder: Path, chapters: list[Chapter]):
        from nbgrader.coursedir import CourseDirectory

        self.folder, self.chapters = folder.resolve(), chapters
        self.folder.mkdir(parents=True)
        # nbgrader starts alembic by its name; it lies beside python
        programs = str(Path(sys.executable).parent)
        if programs not in os.environ.get("PATH", "").split(os.pathsep):
            os.environ["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", "")])
        self.log = logging.getLogger("nbgrader of the classroom")
        self.log.propagate = False
        self.log.setLevel(logging.INFO)
        self.log.handlers = [logging.FileHandler(self.folder / "log.txt", "w", "utf8")]
        self.directory = CourseDirectory(
            root=str(self.folder), assignment_id=ASSIGNMENT, log=self.log
        )
        for chapter in chapters:
            self.write("source", ".", page(chapter), chapter)
        self.release()

    def write(self, step: str, student: str, notebook, chapter: Chapter) -> None:
        import nbformat

        path = self.folder / step / student / ASSIGNMENT / f"{chapter.name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(nbformat.writes(notebook, version=4), "utf8")

    def release(self) -> None:
        from nbgrader.converters import GenerateAssignment

        self.directory.student_id = "."
        with quiet():
            GenerateAssignment(coursedir=self.directory, log=self.log).start()

    def grade(self, student: str, verdicts: dict[str, list[Verdict]]) -> None:
        """Hand one student's results to nbgrader, which counts the points."""
        from nbgrader.converters import Autograde
        from nbgrader.preprocessors import (
            CheckCellMetadata,
            LimitOutput,
            NbGraderPreprocessor,
            SaveAutoGrades,
        )

        class Results(NbGraderPreprocessor):
            """In the place of nbgrader's Execute: the cells were run before, each exercise by itself."""

            def preprocess(self, notebook, resources):
                outputs = {}
                for verdict in verdicts[resources["nbgrader"]["notebook"]]:
                    outputs |= outputs_of(verdict)
                for cell in notebook.cells:
                    if cell.cell_type == "code":
                        cell.outputs = outputs.get(grader(cell).get("grade_id", cell.id), [])
                return notebook, resources

        for chapter in self.chapters:
            if chapter.name in verdicts:
                notebook = page(chapter, verdicts[chapter.name], student)
                self.write("submitted", student, notebook, chapter)
        self.directory.student_id = student
        autograde = Autograde(coursedir=self.directory, log=self.log)
        autograde.autograde_preprocessors = [
            Results, LimitOutput, SaveAutoGrades, CheckCellMetadata,
        ]  # fmt: skip
        with quiet():
            autograde.start()

    def feedback(self, show_hidden: bool) -> None:
        """A page for each notebook that was graded."""
        from nbgrader.converters import GenerateFeedback
        from nbgrader.preprocessors import ClearHiddenTests

        self.directory.student_id = "*"
        feedback = GenerateFeedback(coursedir=self.directory, log=self.log)
        if not show_hidden:  # on the page only: the gradebook keeps them
            feedback.preprocessors = [ClearHiddenTests, *feedback.preprocessors]
        with quiet():
            feedback.start()

    def page_of(self, student: str) -> list[Path]:
        return sorted((self.folder / "feedback" / student / ASSIGNMENT).glob("*.html"))

    def points(self, student: str) -> dict[tuple[str, str], float]:
        """(chapter, exercise) -> points, as nbgrader's gradebook has them."""
        from nbgrader.api import Gradebook, MissingEntry

        found = {}
        with Gradebook(self.directory.db_url) as book:
            for chapter in self.chapters:
                for exercise in chapter.exercises.values():
                    try:
                        grade = book.find_grade(exercise.test_id, chapter.name, ASSIGNMENT, student)
                        found[chapter.name, exercise.id] = float(grade.score)
                    except MissingEntry:
                        found[chapter.name, exercise.id] = 0.0
        return found


# ---- all of it


@dataclass
class Graded:
    """One student's result."""

    student: str
    verdicts: dict[str, list[Verdict]]
    points: dict[tuple[str, str], float]
    notes: list[str]

    @property
    def total(self) -> float:
        return sum(self.points.values())

    @property
    def ungraded(self) -> list[Verdict]:
        return [v for own in self.verdicts.values() for v in own if v.state == "ungraded"]


def grade(
    handed: list[Handed],
    chapters: list[Chapter],
    book: dict[str, Chapter],
    to: Path,
    *,
    limits: Limits | None = None,
    seconds: float = 600,
    show_hidden: bool = False,
    step: Callable[[str], None] = lambda text: None,
) -> list[Graded]:
    """Grade what students handed in, and write scores.csv, details.csv and feedback pages into `to`."""
    to.mkdir(parents=True, exist_ok=True)
    verdicts: dict[str, dict[str, list[Verdict]]] = {h.student: {} for h in handed}
    with tempfile.TemporaryDirectory(prefix="classroom-") as place:
        for chapter in chapters:
            root = stubbed_package(chapter, book, Path(place) / chapter.name)
            with Trials(root, setup_of(chapter), limits, imports_of(chapter)) as trials:
                check_the_reference(chapter, trials)
                for student in handed:
                    step(f"{student.student}, {chapter.name}")
                    path = student.files.get(chapter.name)
                    verdicts[student.student][chapter.name] = grade_notebook(
                        path, chapter, trials, seconds
                    )
    course, graded = Course(to / "nbgrader", chapters), []
    names = folder_names([h.student for h in handed])
    for student in handed:
        step(f"{student.student}, gradebook")
        result = Graded(student.student, verdicts[student.student], {}, list(student.notes))
        for own in result.verdicts.values():
            result.notes += dict.fromkeys(v.message for v in own if v.state == "unreadable")
            result.notes += [f"{v.exercise.key} {v.message}" for v in own if v.state == "ungraded"]
        try:
            course.grade(names[student.student], result.verdicts)
            result.points = course.points(names[student.student])
        except Exception as error:  # then our own count, and no page
            course.log.exception("grading %s", student.student)
            result.notes.append(f"nbgrader stopped ({error!r}); these points are our own count")
            result.points = {
                (name, v.exercise.id): v.points for name, vs in result.verdicts.items() for v in vs
            }
        graded.append(result)
    step("pages of feedback")
    try:
        course.feedback(show_hidden)
    except Exception:  # it has gone on with the others; see the log
        course.log.exception("feedback")
    for student in handed:
        for file in course.page_of(names[student.student]):
            folder = to / "feedback" / names[student.student]
            folder.mkdir(parents=True, exist_ok=True)
            # without the network: there are no formulas in it
            text = re.sub(r'<script src="https?://[^>]*>\s*</script>', "", file.read_text("utf8"))
            # nbgrader's list of links calls every one "Test cell"
            text = re.sub(r'(<a href="#test-([\w-]+)">)Test cell</a>', r"\1\2</a>", text)
            (folder / file.name).write_text(text, "utf8")
    write_tables(graded, chapters, to)
    return graded


def folder_names(students: list[str]) -> dict[str, str]:
    """A folder for each student: their name, without what a path or nbgrader cannot hold."""
    names: dict[str, str] = {}
    for student in students:
        name = base = re.sub(r"[^\w.@ -]", "_", student).strip(". ") or "student"
        number = 1
        while name in names.values():
            number += 1
            name = f"{base}_{number}"
        names[student] = name
    return names


def write_tables(graded: list[Graded], chapters: list[Chapter], to: Path) -> None:
    exercises: list[Exercise] = [e for c in chapters for e in c.exercises.values()]
    most = sum(e.points for e in exercises)
    with (to / "scores.csv").open("w", encoding="utf-8-sig", newline="") as file:
        table = csv.writer(file)
        table.writerow(["student", "points", "of", *(e.key for e in exercises), "notes"])
        for result in graded:
            row = [f"{result.points.get((e.chapter, e.id), 0):g}" for e in exercises]
            for v in result.ungraded:
                row[[e.key for e in exercises].index(v.exercise.key)] = "not graded"
            notes = safe_text("; ".join(result.notes))
            table.writerow(
                [safe_text(result.student), f"{result.total:g}", f"{most:g}", *row, notes]
            )
    with (to / "details.csv").open("w", encoding="utf-8-sig", newline="") as file:
        table = csv.writer(file)
        table.writerow(
            ["student", "chapter", "exercise", "points", "of", "state", "cell", "message", "notes"]
        )
        for result in graded:
            for name, verdicts in result.verdicts.items():
                for v in verdicts:
                    points = result.points.get((name, v.exercise.id), 0)
                    row = [safe_text(result.student), name, v.exercise.id, f"{points:g}"]
                    row += [
                        f"{v.exercise.points:g}",
                        v.state,
                        v.found.number or "" if v.found else "",
                    ]
                    table.writerow([*row, safe_text(v.message), safe_text("; ".join(v.notes))])


def safe_text(text: str) -> str:
    """A cell of a table: no formula for a spreadsheet, no control characters."""
    text = "".join(c if c.isprintable() or c == "\n" else " " for c in text[:2000])
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
