"""Grading a folder of notebooks that students handed in, with nbgrader: its gradebook, its scores, its feedback pages.

nbgrader by itself runs a submission from top to bottom in one kernel, as it was handed in: a copied cell, a lost id, an endless loop
or a wrong function early on takes the points of everything after it. Here each submission is made anew first. The frame and all tests
come from the book, from the student only what each exercise asks for; and each exercise is run by itself, in a process with limits,
with the reference for all other exercises. What came of it is then put into the notebook as its outputs, and nbgrader counts the points.
"""

import contextlib
import csv
import dataclasses
import hashlib
import io
import json
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
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
from trials import Failure, Limits, Outcome, Trials

ASSIGNMENT = "exercises"
OURS = {"released", "mine", "overlays", ".ipynb_checkpoints", "__pycache__", ".venv", "venv"}
MOODLE = re.compile(r"_assignsubmission_file_?")  # what it puts behind a student's name and number
PROGRAMS = ("grading.py", "exercises.py", "trials.py")  # what grades depend on
MOST_FILES, MOST_BYTES = 2_000, 500_000_000  # of one zip file


# ---- finding what was handed in


@dataclass
class Handed:
    """The notebooks of one student."""

    student: str
    files: dict[str, Path] = field(default_factory=dict)  # chapter -> notebook
    notes: list[str] = field(default_factory=list)


def collect(
    folder: Path, book: dict[str, Chapter], room: Path | None = None
) -> tuple[list[Handed], list[str]]:
    """Who handed in what, and remarks on files that belong to nobody.

    A folder for each student, with notebooks at any depth (nbgrader's submitted/STUDENT/ASSIGNMENT/ too), or files whose names
    hold the student and the chapter: `li_15_attention.ipynb`. Zip files are unpacked into `room`: one for each student, in the
    student's folder or named after the student, or a single one that holds all of these, which may be `folder` itself.
    """
    strays: list[str] = []
    if folder.is_file():
        opened = unpack(folder, room, strays) if room else None
        handed, more = collect(opened, book, room) if opened else ([], [])
        return handed, strays + more
    folder = folder / "submitted" if (folder / "submitted").is_dir() else folder
    entries = [e for e in sorted(folder.iterdir()) if not e.name.startswith(".")]
    entries = [e for e in entries if not e.is_symlink() and e.name != "__MACOSX"]
    work = [e for e in entries if e.is_dir() or e.suffix.lower() in (".ipynb", ".zip")]
    found: dict[str, Handed] = {}
    for entry in entries:
        name = MOODLE.sub("", entry.name) or entry.name
        if entry.is_dir():
            student = found.setdefault(name, Handed(name))
            take(student, sorted(notebooks_in(entry)), book, entry)
            for archive in sorted(files_in(entry, ".zip")) if room else ():
                if opened := unpack(archive, room, student.notes):
                    take(student, sorted(notebooks_in(opened)), book, opened)
        elif entry.suffix == ".ipynb":
            chapter = chapter_of(entry, book)
            name = student_of(entry, chapter)
            take(found.setdefault(name, Handed(name)), [entry], book, folder)
        elif entry.suffix.lower() == ".zip" and room:
            name = student_of(entry, next((n for n in book if n in entry.stem), None))
            notes: list[str] = []
            opened = unpack(entry, room, notes)
            if opened and work == [entry] and is_a_class(opened, book):
                handed, more = collect(opened, book, room)
                return handed, strays + notes + more
            student = found.setdefault(name, Handed(name))
            student.notes += notes
            if opened:
                take(student, sorted(notebooks_in(opened)), book, opened)
        elif entry.suffix.lower() in (".zip", ".tar", ".tgz", ".gz", ".7z", ".rar"):
            strays.append(f"{entry.name}: unpack it first, into a folder named after the student")
    return list(found.values()), strays


def student_of(path: Path, chapter: str | None) -> str:
    """The student, from the name of a file that holds it beside the chapter's; the whole name if there is nothing else."""
    name = re.sub(rf"[_\- ]*{chapter}[_\- ]*", "", path.stem) if chapter else path.stem
    name = re.sub(r"(\s*\(\d+\)|-?Copy\d*)$", "", MOODLE.sub("", name))
    return name or path.stem


def is_a_class(folder: Path, book: dict[str, Chapter]) -> bool:
    """Whether an unpacked zip file holds several students: folders side by side, or files with their names."""
    folders = [f for f in folder.iterdir() if f.is_dir() and f.name not in OURS]
    if any(f.name == "chapters" for f in folders):
        return False  # a student's whole folder
    files = list(folder.glob("*.ipynb"))
    if not files:
        return len(folders) > 1 or (folder / "submitted").is_dir()
    named = [(p, n) for p in files for n in book if n in p.stem]
    students = {student_of(path, name) for path, name in named} - {p.stem for p in files}
    return len(students) > 1


def unpack(archive: Path, room: Path, notes: list[str]) -> Path | None:
    """The notebooks of a zip file, in a new folder in `room`; no link, and nothing outside of it. `notes` says what is left out.

    A folder in it that holds all the rest is the one returned. None if the file cannot be read.
    """
    room.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=room))
    left, size = [], 0
    try:
        with zipfile.ZipFile(archive) as file:
            members = [m for m in file.infolist() if not m.is_dir()]
            members = [m for m in members if m.filename.lower().endswith((".ipynb", ".zip"))]
            if len(members) > MOST_FILES:
                raise SubmissionError(f"{len(members):,} files; at most {MOST_FILES:,} are read")
            for member in members:
                parts = PurePosixPath(name_of(member).replace("\\", "/")).parts
                if parts[0] == "__MACOSX" or parts[-1].startswith("._"):
                    continue
                odd = any(part in ("..", "/") or ":" in part or "\0" in part for part in parts)
                if odd or stat.S_ISLNK(member.external_attr >> 16):
                    left.append(parts[-1])
                    continue
                target = place.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with file.open(member) as source, target.open("wb") as copy:
                    while block := source.read(1 << 20):
                        size += len(block)
                        if size > MOST_BYTES:
                            raise SubmissionError(f"more than {MOST_BYTES:,} bytes in it")
                        copy.write(block)
    except (SubmissionError, zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
        reason = error if str(error) else "it is damaged"
        notes.append(f"{archive.name}: it cannot be unpacked ({reason})")
    except (RuntimeError, zlib.error):
        notes.append(f"{archive.name}: it cannot be unpacked (a password, or it is damaged)")
    else:
        if left:
            which = ", ".join(left[:5])
            notes.append(f"{archive.name}: left out, since it is a link or lies elsewhere: {which}")
        while len(inside := list(place.iterdir())) == 1 and only_folders(inside[0]):
            place = inside[0]
        return place
    shutil.rmtree(place, ignore_errors=True)
    return None


def only_folders(place: Path) -> bool:
    """A folder around several students' folders; a student's own has notebooks in it, or `chapters/`."""
    inside = list(place.iterdir()) if place.is_dir() and place.name != "submitted" else []
    names = {p.name for p in inside}
    folders = all(p.is_dir() for p in inside) and "chapters" not in names
    return folders and (len(inside) > 1 or names == {"submitted"})


def name_of(member: zipfile.ZipInfo) -> str:
    """A name that is UTF-8 without saying so is read as UTF-8."""
    if not member.flag_bits & 0x800:
        with contextlib.suppress(UnicodeError):
            return member.filename.encode("cp437").decode("utf8")
    return member.filename


def notebooks_in(folder: Path) -> Iterable[Path]:
    return files_in(folder, ".ipynb")


def files_in(folder: Path, suffix: str) -> Iterable[Path]:
    for path in folder.rglob("*"):
        if path.suffix.lower() != suffix:
            continue
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

        self.folder, self.chapters, self.feedbacks = folder.resolve(), chapters, {}
        self.folder.mkdir(parents=True, exist_ok=True)
        # nbgrader starts alembic by its name; it lies beside python
        programs = str(Path(sys.executable).parent)
        if programs not in os.environ.get("PATH", "").split(os.pathsep):
            os.environ["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", "")])
        self.log = logging.getLogger("nbgrader of the classroom")
        self.log.propagate = False
        self.log.setLevel(logging.INFO)
        self.log.handlers = [logging.FileHandler(self.folder / "log.txt", "a", "utf8")]
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
            GenerateAssignment(coursedir=self.directory, log=self.log, force=True).start()

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
        autograde = Autograde(coursedir=self.directory, log=self.log, force=True)
        autograde.autograde_preprocessors = [
            Results, LimitOutput, SaveAutoGrades, CheckCellMetadata,
        ]  # fmt: skip
        with quiet():
            autograde.start()

    def feedback(self, student: str, show_hidden: bool) -> None:
        """A page for each of a student's notebooks."""
        from nbconvert.writers import FilesWriter
        from nbgrader.converters import GenerateFeedback
        from nbgrader.preprocessors import ClearHiddenTests

        class Feedback(GenerateFeedback):
            """With one exporter for all students: to read its templates takes longer than to use them."""

            ready = False

            def start(self):
                self.init_notebooks()
                if not self.ready:
                    self.ready = True
                    self.writer = FilesWriter(parent=self, config=self.config)
                    self.exporter = self.exporter_class(parent=self, config=self.config)
                    for step in self.preprocessors:
                        self.exporter.register_preprocessor(step)
                with contextlib.chdir(self.coursedir.root):
                    self.convert_notebooks()

        if show_hidden not in self.feedbacks:
            feedback = Feedback(coursedir=self.directory, log=self.log, force=True)
            if not show_hidden:  # on the page only: the gradebook keeps them
                feedback.preprocessors = [ClearHiddenTests, *feedback.preprocessors]
            self.feedbacks[show_hidden] = feedback
        self.directory.student_id = student
        with quiet():
            self.feedbacks[show_hidden].start()

    def page_of(self, student: str) -> list[Path]:
        return sorted((self.folder / "feedback" / student / ASSIGNMENT).glob("*.html"))

    def points(self, student: str) -> dict[tuple[str, str], float]:
        """(chapter, exercise) -> points, as nbgrader's gradebook has them."""
        from nbgrader.api import Gradebook, MissingEntry

        found = {}
        with Gradebook(self.directory.db_url) as book:
            for chapter in self.chapters:
                for exercise in chapter.exercises.values():
                    with contextlib.suppress(MissingEntry):
                        grade = book.find_grade(exercise.test_id, chapter.name, ASSIGNMENT, student)
                        found[chapter.name, exercise.id] = float(grade.score)
        return found


# ---- what was graded before


class Results:
    """A file for each student, results/STUDENT.json: the verdicts, and what each of them was found out from.

    Written after every notebook, so that grading that was stopped goes on where it was, and a second run does what has changed.
    """

    def __init__(self, folder: Path):
        self.folder, self.kept = (
            folder,
            {},
        )  # student -> {"student", "folder", "booked", "notebooks"}
        for path in sorted(folder.glob("*.json")):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(path.read_text("utf8"))
                self.kept[record["student"]] = record

    @property
    def chapters(self) -> set[str]:
        return {name for record in self.kept.values() for name in record["notebooks"]}

    @property
    def names(self) -> dict[str, str]:
        return {student: record["folder"] for student, record in self.kept.items()}

    def of(self, student: str, chapter: Chapter, made_from: str) -> list[Verdict] | None:
        """The verdicts, if all of it was graded, from the same things."""
        record = self.kept.get(student, {"notebooks": {}})["notebooks"].get(chapter.name)
        if not record or record["made_from"] != made_from:
            return None
        with contextlib.suppress(KeyError, TypeError):
            verdicts = [as_verdict(v, chapter) for v in record["verdicts"]]
            return None if any(v.state == "ungraded" for v in verdicts) else verdicts
        return None

    def keep(self, student: str, folder: str, chapter: str, made_from: str, verdicts: list) -> None:
        record = self.kept.setdefault(student, {"student": student, "booked": "", "notebooks": {}})
        record["folder"] = folder
        as_dicts = [as_dict(v) for v in verdicts]
        record["notebooks"][chapter] = {"made_from": made_from, "verdicts": as_dicts}
        self.write(student)

    def state(self, student: str) -> str:
        """Of all of a student's notebooks; `booked` is the one that nbgrader knows."""
        return digest(self.kept[student]["notebooks"])

    def write(self, student: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        record = self.kept[student]
        replace(self.folder / f"{record['folder']}.json", json.dumps(record, ensure_ascii=False))


def as_dict(verdict: Verdict) -> dict:
    shown = {verdict.exercise.id, verdict.exercise.test_id, f"helpers-{verdict.exercise.id}"}
    outcomes = [dataclasses.asdict(o) for o in verdict.outcomes if o.cell in shown]
    found = verdict.found and dataclasses.asdict(verdict.found)
    failure = verdict.failure and dataclasses.asdict(verdict.failure)
    made = {"exercise": verdict.exercise.id, "found": found, "failure": failure}
    told = {"state": verdict.state, "message": verdict.message, "notes": verdict.notes}
    return made | told | {"outcomes": outcomes}


def as_verdict(record: dict, chapter: Chapter) -> Verdict:
    def failure(kept: dict | None) -> Failure | None:
        return kept and Failure(**kept | {"places": [tuple(p) for p in kept["places"]]})

    found = record["found"] and Found(
        **record["found"] | {"notes": tuple(record["found"]["notes"])}
    )
    outcomes = [Outcome(**o | {"failure": failure(o["failure"])}) for o in record["outcomes"]]
    exercise, notes = chapter.exercises[record["exercise"]], tuple(record["notes"])
    told = record["state"], record["message"], notes, found, outcomes
    return Verdict(exercise, *told, failure(record["failure"]))


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def replace(path: Path, text: str, encoding: str = "utf8") -> None:
    """Write a file in one step: whoever is interrupted leaves the one before."""
    new = path.with_name(f".{path.name}.new")
    with new.open("w", encoding=encoding, newline="") as file:
        file.write(text)
    new.replace(path)


def made_from(path: Path | None, rules: str) -> str:
    try:
        return digest([rules, path and hashlib.sha256(path.read_bytes()).hexdigest()])
    except OSError:
        return digest([rules, "cannot be read"])


def rules_of(chapter: Chapter, book: dict[str, Chapter], limits: Limits, seconds: float) -> str:
    """What grades of a chapter depend on beside the notebook: the book's cells, the limits, and the programs that grade."""
    code = [c.cells for n, c in book.items() if n < chapter.name] + [chapter.cells]
    tools = [(Path(__file__).with_name(n)).read_text("utf8") for n in PROGRAMS]
    return digest([code, setup_of(chapter), vars(limits), seconds, tools])


# ---- all of it


@dataclass
class Graded:
    """One student's result. `verdicts` lacks chapters that are still to be graded."""

    student: str
    verdicts: dict[str, list[Verdict]]
    points: dict[tuple[str, str], float]
    notes: list[str]
    kept: int = 0  # notebooks whose verdicts are those of the last time

    @property
    def total(self) -> float:
        return sum(self.points.values())

    @property
    def ungraded(self) -> list[Verdict]:
        return [v for own in self.verdicts.values() for v in own if v.state == "ungraded"]


class Interrupted(Exception):
    """Grading was stopped: so many of so many notebooks are graded, and kept."""

    def __init__(self, done: int, total: int):
        self.done, self.total = done, total
        super().__init__(f"{done} of {total}")


def grade(
    handed: list[Handed],
    chapters: list[Chapter],
    book: dict[str, Chapter],
    to: Path,
    *,
    limits: Limits | None = None,
    seconds: float = 600,
    show_hidden: bool = False,
    again: bool = False,
    step: Callable[[str], None] = lambda text: None,
) -> list[Graded]:
    """Grade what students handed in, and write scores.csv, details.csv and feedback pages into `to`.

    The tables are written after each notebook. What `to` already has of the same notebooks is taken from there, unless `again`.
    Raises `Interrupted` on Ctrl-C.
    """
    to.mkdir(parents=True, exist_ok=True)
    limits = limits or Limits()
    results = Results(to / "results")
    if more := results.chapters - {chapter.name for chapter in chapters}:
        more = ", ".join(sorted(more))
        raise ClassroomError(f"{to} has grades of {more}, too. Name these as well, or a new folder")
    names = folder_names([h.student for h in handed], results.names)
    graded = {h.student: Graded(h.student, {}, {}, list(h.notes)) for h in handed}
    course: Course | None = None

    def tables(last: bool = False) -> None:
        try:
            write_tables(list(graded.values()), chapters, to)
        except PermissionError as error:  # on Windows, while a spreadsheet shows it
            if last:
                name = Path(error.filename2 or error.filename).name
                raise ClassroomError(
                    f"{name} is open elsewhere: close it, and run this again"
                ) from None

    def book_in(student: Handed) -> None:
        """Tell nbgrader, and write the pages, unless it knows."""
        nonlocal course
        result, name = graded[student.student], names[student.student]
        step(f"{student.student}, gradebook")
        course = course or Course(to / "nbgrader", chapters)
        record = results.kept[student.student]
        state = digest([results.state(student.student), show_hidden])
        try:
            known = record["booked"] == state and course.points(name).keys() == result.points.keys()
            if not known or again:
                course.grade(name, result.verdicts)
                pages(course, name, show_hidden, to / "feedback" / name)
                record["booked"] = state
                results.write(student.student)
            result.points |= course.points(name)
        except Exception as error:  # then our own count, and no page
            course.log.exception("grading %s", student.student)
            result.notes.append(f"nbgrader stopped ({error!r}); these points are our own count")

    try:
        with tempfile.TemporaryDirectory(prefix="classroom-") as place:
            for chapter in chapters:
                rules = rules_of(chapter, book, limits, seconds)
                prints = {h.student: made_from(h.files.get(chapter.name), rules) for h in handed}
                kept = {s: results.of(s, chapter, p) for s, p in prints.items() if not again}
                with contextlib.ExitStack() as stack:
                    trials = None
                    if not handed or any(kept.get(h.student) is None for h in handed):
                        root = stubbed_package(chapter, book, Path(place) / chapter.name)
                        parts = root, setup_of(chapter), limits, imports_of(chapter)
                        trials = stack.enter_context(Trials(*parts))
                        check_the_reference(chapter, trials)
                    for student in handed:
                        step(f"{student.student}, {chapter.name}")
                        who, path = student.student, student.files.get(chapter.name)
                        verdicts = kept.get(who)
                        graded[who].kept += verdicts is not None
                        if verdicts is None:
                            verdicts = grade_notebook(path, chapter, trials, seconds)
                            parts = names[who], chapter.name, prints[who], verdicts
                            results.keep(who, *parts)
                        enter(graded[who], chapter, verdicts)
                        if chapter is chapters[-1]:
                            book_in(student)
                        tables()
    except KeyboardInterrupt:
        done = sum(len(result.verdicts) for result in graded.values())
        raise Interrupted(done, len(handed) * len(chapters)) from None
    tables(last=True)
    return list(graded.values())


def enter(result: Graded, chapter: Chapter, verdicts: list[Verdict]) -> None:
    result.verdicts[chapter.name] = verdicts
    result.points |= {(chapter.name, v.exercise.id): v.points for v in verdicts}
    result.notes += dict.fromkeys(v.message for v in verdicts if v.state == "unreadable")
    result.notes += [f"{v.exercise.key} {v.message}" for v in verdicts if v.state == "ungraded"]


def pages(course: Course, name: str, show_hidden: bool, folder: Path) -> None:
    """One student's pages of feedback, out of nbgrader's folder."""
    course.feedback(name, show_hidden)
    folder.mkdir(parents=True, exist_ok=True)
    for file in course.page_of(name):
        # without the network: there are no formulas in it
        text = re.sub(r'<script src="https?://[^>]*>\s*</script>', "", file.read_text("utf8"))
        # nbgrader's list of links calls every one "Test cell"
        text = re.sub(r'(<a href="#test-([\w-]+)">)Test cell</a>', r"\1\2</a>", text)
        replace(folder / file.name, text)


def folder_names(students: list[str], known: dict[str, str] | None = None) -> dict[str, str]:
    """A folder for each student: their name, without what a path or nbgrader cannot hold. `known` names stay."""
    names: dict[str, str] = dict(known or {})
    for student in students:
        if student in names:
            continue
        name = base = re.sub(r"[^\w.@ -]", "_", student).strip(". ") or "student"
        number = 1
        while name in names.values():
            number += 1
            name = f"{base}_{number}"
        names[student] = name
    return names


def write_tables(graded: list[Graded], chapters: list[Chapter], to: Path) -> None:
    exercises: list[Exercise] = [e for c in chapters for e in c.exercises.values()]
    keys = [e.key for e in exercises]
    most = sum(e.points for e in exercises)
    scores = [["student", "points", "of", *keys, "notes"]]
    titles = ["student", "chapter", "exercise", "points", "of", "state", "cell", "message", "notes"]
    details = [titles]
    for result in graded:
        row = [f"{result.points.get((e.chapter, e.id), 0):g}" for e in exercises]
        for v in result.ungraded:
            row[keys.index(v.exercise.key)] = "not graded"
        for number, exercise in enumerate(exercises):
            if exercise.chapter not in result.verdicts:
                row[number] = "not graded yet"
        notes = safe_text("; ".join(result.notes))
        scores.append([safe_text(result.student), f"{result.total:g}", f"{most:g}", *row, notes])
        for name, verdicts in result.verdicts.items():
            for v in verdicts:
                row = [safe_text(result.student), name, v.exercise.id]
                row += [
                    f"{result.points.get((name, v.exercise.id), 0):g}",
                    f"{v.exercise.points:g}",
                ]
                row += [v.state, v.found.number or "" if v.found else ""]
                details.append([*row, safe_text(v.message), safe_text("; ".join(v.notes))])
    for name, rows in (("scores.csv", scores), ("details.csv", details)):
        text = io.StringIO()
        csv.writer(text).writerows(rows)
        replace(to / name, text.getvalue(), "utf-8-sig")


def safe_text(text: str) -> str:
    """A cell of a table: no formula for a spreadsheet, no control characters."""
    text = "".join(c if c.isprintable() or c == "\n" else " " for c in text[:2000])
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
