"""What the classroom knows about exercises: which cells they are, what a student wrote, and which cells a test needs.

An exercise is a cell of a chapter whose body lies between `### BEGIN SOLUTION` and `### END SOLUTION`, and a test cell of the same
name after it. Nothing in this file runs a student's code.
"""

import ast
import builtins
import dis
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from types import CodeType

from trials import Failure, Outcome, Trials

CHAPTERS = Path(__file__).resolve().parent
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
HIDDEN = "### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS"
TODO = "# Your code here."


def source(cell: dict) -> str:
    text = cell.get("source", "")
    return "".join(map(str, text)) if isinstance(text, list) else str(text)


def grader(cell: dict) -> dict:
    """nbgrader's part of a cell's metadata."""
    found = cell.get("metadata", {})
    found = found.get("nbgrader", {}) if isinstance(found, dict) else {}
    return found if isinstance(found, dict) else {}


# ---- chapters and their exercises


@dataclass
class Exercise:
    """One exercise of the book, with its solution and all of its tests."""

    chapter: str  # the notebook's name without .ipynb
    id: str
    points: float
    code: str  # the cell as the book has it, markers included
    tests: str  # the test cell, hidden tests included
    test_id: str

    @property
    def key(self) -> str:
        return f"{self.chapter}:{self.id}"

    @cached_property
    def stub(self) -> str:
        """What a student is given: of a released notebook, the cell as it is."""
        if BEGIN not in self.code:
            return self.code
        return without_solution(self.code, not_written(self.chapter, self.id))

    @property
    def solution(self) -> str:
        """The cell without the markers, as the package has it."""
        return "\n".join(line for line in self.code.split("\n") if line.strip() not in (BEGIN, END))

    @cached_property
    def seen_tests(self) -> str:
        return without_hidden_tests(self.tests) if HIDDEN[0] in self.tests else self.tests

    def is_hidden(self, line: int) -> bool:
        """Whether a line of the test cell, counted from 1, belongs to its hidden tests."""
        before = self.tests.split("\n")[: max(line - 1, 0)]
        return before.count(HIDDEN[0]) > before.count(HIDDEN[1])

    @cached_property
    def names(self) -> list[str]:
        """What the exercise asks for: the top-level definitions with a part to be written."""
        lines = enumerate(self.code.split("\n"), 1)
        begins = [i for i, line in lines if line.strip() in (BEGIN, TODO)]
        statements = ast.parse(self.code).body
        asked = [s for s in statements if any(s.lineno <= i <= s.end_lineno + 1 for i in begins)]
        return [name for statement in asked for name in binds(statement)]


class Chapter:
    """A notebook of the book."""

    def __init__(self, name: str, notebook: dict):
        self.name, self.notebook = name, notebook
        self.code = {c["id"]: c for c in notebook["cells"] if c["cell_type"] == "code"}
        self.exercises: dict[str, Exercise] = {}
        for cell_id, cell in self.code.items():
            test = self.code.get(f"test-{cell_id}")
            if grader(cell).get("solution") and test:
                points = float(grader(test).get("points", 0))
                parts = name, cell_id, points, source(cell), source(test), test["id"]
                self.exercises[cell_id] = Exercise(*parts)

    @property
    def number(self) -> int:
        return int(self.name[:2])

    @property
    def cells(self) -> dict[str, str]:
        """The code of each cell, as the book has it, without the setup cell."""
        return {i: source(cell) for i, cell in self.code.items() if i != "setup"}

    def __repr__(self) -> str:
        return f"Chapter({self.name!r}, {list(self.exercises)})"


def read_chapters(folder: Path = CHAPTERS) -> dict[str, Chapter]:
    """The chapters of a book by name, in order."""
    paths = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    return {p.stem: Chapter(p.stem, json.loads(p.read_text("utf8"))) for p in paths}


def not_written(chapter: str, exercise: str) -> str:
    return f"chapter {chapter[:2]}, exercise {exercise}: not written yet"


def without_solution(code: str, message: str = "") -> str:
    """What nbgrader leaves of a solution cell; the error says which exercise is missing."""
    from nbformat.v4 import new_code_cell
    from nbgrader.preprocessors import ClearSolutions

    raises = f'raise NotImplementedError("{message}")' if message else "raise NotImplementedError()"
    clear = ClearSolutions(code_stub={"python": f"{TODO}\n{raises}"})
    cell = new_code_cell(code, metadata={"nbgrader": {"solution": True, "schema_version": 3}})
    return clear.preprocess_cell(cell, {"language": "python"}, 0)[0].source


def without_hidden_tests(code: str) -> str:
    from nbformat.v4 import new_code_cell
    from nbgrader.preprocessors import ClearHiddenTests

    cell = new_code_cell(code, metadata={"nbgrader": {"grade": True, "schema_version": 3}})
    return ClearHiddenTests().preprocess_cell(cell, {}, 0)[0].source


# ---- what a student hands in


class ClassroomError(Exception):
    """Something that cannot be done: what, why, and the way out."""


class SubmissionError(Exception):
    """A file that is no notebook: why."""


@dataclass
class Written:
    """A code cell that a student has, wherever it came from."""

    number: int  # among all cells, counted from 1
    id: str
    grade_id: str
    code: str

    @cached_property
    def parts(self) -> list[tuple[str, set[str], set[str]]]:
        """Each top-level statement: its text, the names it sets, the names it needs."""
        return [(text, *names_of(text)) for text in statements(plain(self.code))]

    @cached_property
    def defines(self) -> set[str]:
        """Names that it gives a meaning to, other than by an import."""
        return {n for text, sets, _ in self.parts if not is_import(text) for n in sets}

    @cached_property
    def broken(self) -> bool:
        """Whether Python cannot read it."""
        return not self.parts and any(
            line.strip() and not line.lstrip().startswith("#") for line in self.code.split("\n")
        )


@dataclass
class Found:
    """What a student wrote for one exercise."""

    state: str  # written, stub (as it was given), missing, overlaid (the reference, taken over)
    code: str  # what stands for the exercise
    number: int = 0  # the cell it comes from
    notes: tuple[str, ...] = ()
    helpers: str = ""  # of their other cells, what this code needs


class Submission:
    """A student's notebook, whatever was done to it. Only `read_submission` makes one."""

    def __init__(self, cells: list[Written]):
        self.cells = cells

    def find(self, exercise: Exercise, chapter: Chapter) -> Found:
        """The student's cell for an exercise: by the cell's id, else by nbgrader's id, else by the name it defines.

        Of several cells of one kind, the last that is not the stub counts. The cell need not stand where it stood.
        """
        asked = set(exercise.names)
        given = {shape(source(c)) for i, c in chapter.code.items() if i != exercise.id}
        cells = [c for c in self.cells if shape(c.code) not in given]
        kinds = {
            "id": [c for c in cells if c.id == exercise.id],
            "grade_id": [c for c in cells if c.grade_id == exercise.id],
            "name": [c for c in cells if asked & c.defines],
        }
        seen = [cell for cells in kinds.values() for cell in cells]
        if not seen:
            what = ", ".join(exercise.names)
            return Found(
                "missing", exercise.stub, 0, (f"no cell for it, and none that defines {what}",)
            )
        for kind, cells in kinds.items():
            written = [c for c in cells if not is_stub(c.code, exercise.stub)]
            # a cell whose code went elsewhere is no solution, unless it is all there is
            written = [c for c in written if asked & c.defines or c.broken]
            if written:
                return self.taken(exercise, chapter, written[-1], kind, seen)
        stubs = [c for c in seen if is_stub(c.code, exercise.stub)]
        if stubs:
            return Found("stub", exercise.stub, stubs[-1].number)
        note = f"cell {seen[-1].number} is its cell, but defines no {', '.join(exercise.names)}"
        return Found("written", headed(seen[-1].code, exercise), seen[-1].number, (note,))

    def taken(self, exercise, chapter, cell: Written, kind: str, seen: list[Written]) -> Found:
        notes = []
        if kind == "grade_id":
            notes.append(f"taken from cell {cell.number}, a copy of the exercise's cell")
        if kind == "name":
            notes.append(
                f"taken from cell {cell.number}, the last one that defines {', '.join(exercise.names)}"
            )
        others = {
            c.number for c in seen if c is not cell and not is_stub(c.code, exercise.stub)
        } - {cell.number}
        if others:
            also = ", ".join(map(str, sorted(others)))
            notes.append(f"defined more than once (also in cell {also}): cell {cell.number} counts")
        if OVERLAID in cell.code:
            return Found("overlaid", headed(cell.code, exercise), cell.number, tuple(notes))
        code, foreign = cell.code, self.foreign(exercise, chapter) & cell.defines
        if (
            kind == "name"
        ):  # of a cell that is not the exercise's, only this; `helpers` finds what it needs
            asked = set(exercise.names)
            code = "\n\n\n".join(text for text, sets, _ in cell.parts if sets & asked)
            return Found(
                "written",
                headed(code, exercise),
                cell.number,
                tuple(notes),
                self.helpers(code, exercise, chapter),
            )
        if foreign:  # two exercises in one cell: each is graded by itself
            code = "\n\n\n".join(text for text, sets, _ in cell.parts if not sets & foreign)
        helpers = self.helpers(code, exercise, chapter)
        return Found("written", headed(code, exercise), cell.number, tuple(notes), helpers)

    def foreign(self, exercise: Exercise, chapter: Chapter) -> set[str]:
        """Names that other exercises of the chapter ask for."""
        every = {n for e in chapter.exercises.values() for n in e.names}
        return every - set(exercise.names)

    def helpers(self, code: str, exercise: Exercise, chapter: Chapter) -> str:
        """Statements of the student's other cells that this code builds on, and that the chapter itself does not have.

        A helper function, an import added to a given cell: the last statement that gives a missing name its meaning.
        """
        order = list(chapter.code)
        before = order[: order.index(exercise.test_id)]
        given = [chapter.code[i] for i in before if i != exercise.id]
        known = set(dir(builtins)) | {"get_ipython", "display"}
        for text in map(source, given):
            known |= names_of(plain(text))[0]
        try:
            sets, needs = names_of(plain(code))
        except (SyntaxError, ValueError):
            return ""
        parts = [part for cell in self.cells for part in cell.parts]
        reference = Written(0, "", "", exercise.solution).parts
        open_names, found = sorted(needs - known - sets), {}
        while open_names:
            name = open_names.pop()
            at = max((i for i, part in enumerate(parts) if name in part[1]), default=None)
            if at is not None:
                text, sets, needs = parts[at]
                found[at] = text
            else:  # given with the exercise, outside of what was to be written
                given = [p for p in reference if name in p[1] and not p[1] & set(exercise.names)]
                if not given:
                    continue
                text, sets, needs = given[-1]
                found[-len(found) - 1] = text
            known |= sets | {name}
            open_names += sorted(needs - known)
        return "\n".join(found[at] for at in sorted(found))


OVERLAID = "# From the reference, by an overlay: replace it by your own."


def headed(code: str, exercise: Exercise) -> str:
    """Code under the directives that the exercise's cell has: students lose these."""
    lines = code.split("\n")
    while lines and (not lines[0].strip() or lines[0].lstrip().startswith("#|")):
        del lines[0]
    head = [line for line in exercise.code.split("\n") if line.startswith("#|")]
    return "\n".join([*head, *lines])


def read_submission(path: Path, most: int = 64_000_000) -> Submission:
    """A student's notebook. Raises `SubmissionError` if the file is none."""
    try:
        if path.stat().st_size > most:
            raise SubmissionError(f"{path.stat().st_size:,} bytes; at most {most:,} are read")
        text = path.read_bytes().decode("utf-8-sig")
        notebook = json.loads(text)
    except OSError as error:
        raise SubmissionError(f"it cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise SubmissionError("it is not a text file in UTF-8") from None
    except (ValueError, RecursionError):
        what = "it is empty" if not text.strip() else "it is not JSON"
        if "<<<<<<<" in text:
            what += "; the marks of a merge conflict are in it"
        raise SubmissionError(f"{what}. Save it in Jupyter and hand it in again") from None
    return Submission(list(written_cells(notebook)))


def written_cells(notebook: object) -> Iterator[Written]:
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if cells is None and isinstance(notebook, dict) and notebook.get("worksheets"):
        raise SubmissionError("it is in a format of before 2015: save it with a current Jupyter")
    if not isinstance(cells, list):
        raise SubmissionError("it is JSON, but no notebook")
    for number, cell in enumerate(cells, 1):
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            code = source(cell).replace("\r\n", "\n")
            yield Written(
                number, str(cell.get("id", "")), str(grader(cell).get("grade_id", "")), code
            )


# ---- reading code without running it


def binds(statement: ast.stmt) -> Iterator[str]:
    """Names that one top-level statement gives a meaning to."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    if isinstance(statement, ast.Import | ast.ImportFrom):
        yield from ((a.asname or a.name).partition(".")[0] for a in statement.names)
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name:
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((a.asname or a.name).partition(".")[0] for a in node.names)


def is_stub(code: str, stub: str) -> bool:
    """Whether code still is what the student was given: only comments and spaces may differ, or the words of the error."""
    return shape(code) == shape(stub)


@lru_cache(4096)
def shape(code: str) -> str:
    """Code without comments, docstrings, spaces and the message of a NotImplementedError; as it is if it cannot be parsed."""
    try:
        tree = ast.parse(plain(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code.strip()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and len(body) > 1 and is_text(body[0]):
            del body[0]
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call | ast.Name):
            error = getattr(node.exc, "func", node.exc)
            if isinstance(error, ast.Name) and error.id == "NotImplementedError":
                node.exc = ast.Name("NotImplementedError")
    return ast.dump(tree)


def is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@lru_cache(4096)
def names_of(code: str) -> tuple[frozenset[str], frozenset[str]]:
    """Names that a cell sets at top level, and names that it needs from elsewhere."""
    sets, needs, inner = set(), set(), []
    # in the order of execution, more or less
    for step in dis.get_instructions(compile(code, "cell", "exec")):
        if step.opname == "STORE_NAME":
            sets.add(step.argval)
        elif step.opname == "LOAD_NAME" and step.argval not in sets:
            needs.add(step.argval)
        elif isinstance(step.argval, CodeType):
            inner.append(step.argval)
    for function in inner:
        steps = list(dis.get_instructions(function))
        needs |= {s.argval for s in steps if s.opname in ("LOAD_GLOBAL", "LOAD_NAME")} - sets
        inner += [s.argval for s in steps if isinstance(s.argval, CodeType)]
    return frozenset(sets), frozenset(needs)


@lru_cache(4096)
def plain(code: str) -> str:
    """Code with IPython's magics made into calls, so that it can be parsed."""
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        return TransformerManager().transform_cell(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code


def needed(cells: dict[str, str], test: str) -> list[str]:
    """The cells before `test` that it builds on, in order: exported ones, and others whose names these use.

    `cells` are a notebook's code cells, id -> code, without the setup cell.
    """
    names = {}
    for cell_id, code in cells.items():
        try:
            names[cell_id] = names_of(plain(code))
        except (SyntaxError, ValueError):
            names[cell_id] = (set(), set())
    order = list(cells)
    before = order[: order.index(test)]
    wanted = [i for i in before if cells[i].startswith("#| export")] + [test]
    exported = set(wanted)
    for i in wanted:
        for name in names[i][1]:
            setters = [j for j in before if name in names[j][0]]
            earlier = [j for j in setters if order.index(j) < order.index(i)]
            for j in (earlier or setters)[-1:]:
                if j not in wanted and not exported.intersection(earlier):
                    wanted.append(j)
    return [i for i in order if i in wanted and i != test]


def imported_modules(code: str) -> Iterator[str]:
    """Modules of llm_engine that a cell imports, also inside functions."""
    try:
        tree = ast.parse(plain(code))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        paths: Iterable[str] = ()
        if isinstance(node, ast.ImportFrom) and not node.level:
            paths = [node.module or ""]
            if node.module == "llm_engine":
                paths = [f"llm_engine.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        for path in paths:
            package, *rest = path.split(".")
            if package == "llm_engine":
                yield rest[0] if rest else "__init__"


def out_of_reach(notebook: dict, absent: set[str]) -> dict[str, list[str]]:
    """Cells that stop without these modules of the package, and which of them they lack, perhaps through cells before."""
    found: dict[str, list[str]] = {}
    lost: dict[str, list[str]] = {}  # name -> what the statement that sets it lacks
    for cell in notebook["cells"]:
        code = source(cell)
        if cell["cell_type"] != "code" or cell["id"] == "setup" or code.startswith("#| export"):
            continue
        lacks: list[str] = []
        for statement in statements(plain(code)):  # the first that lacks something ends the cell
            sets, needs = names_of(statement)
            if not lacks:
                lacks += [m for m in imported_modules(statement) if m in absent]
                lacks += [m for name in sorted(needs & lost.keys()) for m in lost[name]]
            for name in sets:
                lost.pop(name, None)
                if lacks:
                    lost[name] = lacks
        if lacks:
            found[cell["id"]] = list(dict.fromkeys(lacks))
    return found


@lru_cache(4096)
def statements(code: str) -> list[str]:
    """The text of each top-level statement; none if the code cannot be compiled."""
    try:
        compile(code, "cell", "exec")
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = code.split("\n")
    return ["\n".join(lines[first_line(s) - 1 : s.end_lineno]) for s in body]


def is_import(statement: str) -> bool:
    return isinstance(ast.parse(statement).body[0], ast.Import | ast.ImportFrom)


def first_line(statement: ast.stmt) -> int:
    """Where a statement begins, its decorators included."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])


# ---- trying an exercise, and judging what came of it


@dataclass
class Verdict:
    """What became of one exercise."""

    exercise: Exercise
    state: str  # right, wrong, stub, missing, waits, overlaid, unreadable, ungraded
    message: str = ""
    notes: tuple[str, ...] = ()
    found: Found | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    failure: Failure | None = None  # the one that the message tells

    @property
    def points(self) -> float:
        return self.exercise.points if self.state == "right" else 0.0


def setup_of(chapter: Chapter) -> str:
    return source(chapter.code["setup"]) if "setup" in chapter.code else ""


def imports_of(chapter: Chapter) -> list[str]:
    """Import statements of the given cells that exercises need, other than from the package."""
    cells = chapter.cells
    ids = {i for e in chapter.exercises.values() for i in [*needed(cells, e.test_id), e.test_id]}
    parts = [
        text for i in sorted(ids - chapter.exercises.keys()) for text in statements(plain(cells[i]))
    ]
    return [t for t in dict.fromkeys(parts) if is_import(t) and not any(imported_modules(t))]


def attempt(
    cells: dict[str, str], exercise: Exercise, found: Found, trials: Trials, given: bool = True
) -> Verdict:
    """Run what an exercise needs, and judge it. What a given cell does is not the student's loss: it gets a second, generous try.

    `given`: the cells other than the exercise's are the book's. A failure before the student's code then leaves it ungraded.
    """
    run = trial_cells(cells, exercise, found)
    outcomes = trials.run(run, test=exercise.test_id)
    own = {exercise.id, f"helpers-{exercise.id}"}
    at = next(i for i, (cell_id, _) in enumerate(run) if cell_id in own)

    def theirs(outcome: Outcome) -> bool:
        return outcome.cell in own or any(place[0] in own for place in outcome.failure.places)

    def failed_before() -> Outcome | None:
        return next((o for o in outcomes[:at] if o.failure), None) if given else None

    late = [o for o in outcomes if o.failure and o.failure.kind in ("OutOfTime", "Stopped")]
    if failed_before() or (late and not theirs(late[0])):
        outcomes = trials.run(run, trials.limits.generous(), exercise.test_id)
    verdict = judge(exercise, found, outcomes)
    if verdict.state != "right" and (outcome := failed_before()):
        verdict.state, verdict.failure = "ungraded", outcome.failure
        verdict.message = (
            f"not graded: the given cell {outcome.cell} stopped. {in_words(outcome.failure)}"
        )
    return verdict


def trial_cells(cells: dict[str, str], exercise: Exercise, found: Found) -> list[tuple[str, str]]:
    """What must run for one exercise: what its test needs, the student's helpers just before their cell, the test."""
    ids = needed(cells, exercise.test_id)
    if exercise.id not in ids:
        ids.append(exercise.id)
    run, defined = [], set()
    for cell_id in ids:
        if cell_id == exercise.id and found.helpers:
            run.append((f"helpers-{exercise.id}", found.helpers))
        run.append((cell_id, with_own_definitions(cells[cell_id], defined)))
        if cells[cell_id].startswith("#| export"):
            defined |= Written(0, "", "", cells[cell_id]).defines
    return [*run, (exercise.test_id, cells[exercise.test_id])]


def with_own_definitions(code: str, defined: set[str]) -> str:
    """Code that does not import from the package what cells before it have defined: the package may be older than these."""
    lines = code.split("\n")
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError):
        return code
    for statement in body:
        if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith(
            "llm_engine."
        ):
            kept = [a for a in statement.names if a.asname or a.name not in defined]
            if len(kept) < len(statement.names):
                rest = ast.ImportFrom(statement.module, kept, 0)
                place = slice(statement.lineno - 1, statement.end_lineno)
                blank = [""] * (statement.end_lineno - statement.lineno)
                lines[place] = [ast.unparse(rest) if kept else "", *blank]
    return "\n".join(lines)


def judge(exercise: Exercise, found: Found, outcomes: list[Outcome]) -> Verdict:
    """Right, wrong or waiting for another exercise, from what the cells did; and why, in words."""
    test = outcomes[-1].failure
    verdict = Verdict(exercise, "right", "", found.notes, found, outcomes)
    if test is None:
        return verdict
    verdict.state, verdict.message = "wrong", in_words(test, exercise)
    verdict.failure = test
    before = {o.cell: o.failure for o in outcomes[:-1] if o.failure}
    own = [i for i in (exercise.id, f"helpers-{exercise.id}") if i in before]
    unknown = test.kind == "NameError" and {place[0] for place in test.places} <= {exercise.test_id}
    cause = next(iter([*own, *before]), "")
    if cause and (own or unknown or test.kind == "Stopped"):  # what happened before says more
        test = verdict.failure = before[cause]
        verdict.message = f"cell {cause} stopped. {in_words(test)}"
    ended = next((c for c, f in before.items() if f.kind == "Stopped"), None)
    if test.kind == "Stopped" and ended and ended not in (exercise.id, f"helpers-{exercise.id}"):
        verdict.state, verdict.failure = "waits", before[ended]
        verdict.message = f"was not reached: cell {ended} stopped before it. {in_words(before[ended])}. Mend that cell first"
    missing = re.match(r"chapter (\d+), exercise ([\w-]+): not written yet", test.message)
    if test.kind == "NotImplementedError" and missing and missing[2] != exercise.id:
        verdict.state = "waits"
        verdict.message = f"needs exercise {missing[2]} of chapter {missing[1]}, not written yet"
        if missing[1] != exercise.chapter[:2]:
            verdict.message += ". If you have written it: python chapters/sync.py"
    return verdict


def in_words(failure: Failure, exercise: Exercise | None = None) -> str:
    """An error for a learner: what was tested, what came instead, and the line of their own cell."""
    places = [p for p in failure.places if exercise is None or p[0] != exercise.test_id]
    where = ""
    if places:
        cell, number, line = places[-1]
        where = f" (cell {cell}, line {number}: {line})"
    if failure.kind == "Stopped":
        return failure.message
    if failure.kind == "OutOfTime":
        return f"{failure.message}. An endless loop?{where}"
    if failure.kind != "AssertionError":
        return f"{failure.kind}: {failure.message}{where}"
    message = failure.message or (failure.places[-1][2] if failure.places else "an assertion")
    end = "" if message.rstrip().endswith((".", "?", "!", ":")) else "."
    return message + (f"{end} Here {failure.got}" if failure.got else "") + where
