"""What the classroom knows about exercises: which cells they are, what a student wrote, and which cells a test needs.

An exercise is a cell of a chapter whose body lies between `### BEGIN SOLUTION` and `### END SOLUTION`, and a test cell of the same
name after it. Nothing in this file runs a student's code.
"""

import ast
import dis
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType

CHAPTERS = Path(__file__).resolve().parent
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
HIDDEN = "### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS"
TODO = "# Your code here."


def source(cell: dict) -> str:
    text = cell.get("source", "")
    return text if isinstance(text, str) else "".join(map(str, text))


def grader(cell: dict) -> dict:
    """nbgrader's part of a cell's metadata."""
    found = cell.get("metadata", {})
    found = found.get("nbgrader", {}) if isinstance(found, dict) else {}
    return found if isinstance(found, dict) else {}


# ---- chapters and their exercises


@dataclass(frozen=True)
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

    @property
    def stub(self) -> str:
        return without_solution(self.code, not_written(self.chapter, self.id))

    @property
    def solution(self) -> str:
        """The cell without the markers, as the package has it."""
        return "\n".join(line for line in self.code.split("\n") if line.strip() not in (BEGIN, END))

    @property
    def seen_tests(self) -> str:
        return without_hidden_tests(self.tests)

    @cached_property
    def names(self) -> list[str]:
        """What the exercise asks for: the top-level definitions with a part to be written."""
        begins = [i for i, line in enumerate(self.code.split("\n"), 1) if line.strip() == BEGIN]
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
    try:
        return shape(code) == shape(stub)
    except SyntaxError:
        return False


def shape(code: str) -> str:
    """Code without comments, docstrings, spaces and the message of a NotImplementedError."""
    tree = ast.parse(code)
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


def names_of(code: str) -> tuple[set[str], set[str]]:
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
    return sets, needs


def plain(code: str) -> str:
    """Code with IPython's magics made into calls, so that it can be parsed."""
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager().transform_cell(code)


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


def statements(code: str) -> list[str]:
    """The text of each top-level statement; none if the code cannot be parsed."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError):
        return []
    lines = code.split("\n")
    return ["\n".join(lines[first_line(s) - 1 : s.end_lineno]) for s in body]


def first_line(statement: ast.stmt) -> int:
    """Where a statement begins, its decorators included."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])
