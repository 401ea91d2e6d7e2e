"""The exercises from chapter 11 on: solutions pass their tests, and a student's empty cell does not.

For each exercise the cells that its tests need are run with the solution and with what nbgrader leaves of it, and then its tests: all of
them, and those that a student sees. All of it happens in one process of its own, started by the fixture `outcomes`.
"""

import contextlib
import copy
import dis
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import CodeType, ModuleType

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

CHAPTERS = Path(__file__).parent.parent / "chapters"


def read_book(folder: Path) -> dict:
    paths = sorted(folder.glob("[1-9][0-9]_*.ipynb"))
    paths = [
        path for path in paths if not path.name.startswith("10_")
    ]  # an overview, without exercises
    return {path.stem: nbformat.read(path, as_version=4) for path in paths}


def exercises_of(notebook) -> list[str]:
    """Ids of its solution cells."""
    return [c.id for c in notebook.cells if c.metadata.get("nbgrader", {}).get("solution")]


BOOK = read_book(CHAPTERS)
EXERCISES = [
    f"{chapter}:{exercise}" for chapter in BOOK for exercise in exercises_of(BOOK[chapter])
]
VERSIONS = [
    f"{body}, {tests}" for body in ("solution", "stub") for tests in ("all tests", "seen tests")
]
SETUP = next(
    (c.source for nb in BOOK.values() for c in nb.cells if c.id == "setup"), ""
)  # one for all


# ---- the tests


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, default_folder) -> dict:
    """chapter:exercise -> version -> [[cell, kind of error, message], …] of that run."""
    guards = tmp_path_factory.mktemp("guards")
    nbformat.write(guard_notebook(), guards / "11_guard.ipynb")
    command = [sys.executable, __file__, str(CHAPTERS), str(guards)]
    env = os.environ | {"MPLBACKEND": "agg", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        command, cwd=CHAPTERS, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    print(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_passes(outcomes, exercise):
    assert outcomes[exercise]["solution, all tests"] == []
    assert outcomes[exercise]["solution, seen tests"] == []


@pytest.mark.parametrize("exercise", EXERCISES)
@pytest.mark.parametrize("tests", ["all tests", "seen tests"])
def test_an_empty_solution_fails_in_its_own_test_cell(outcomes, exercise, tests):
    test_cell = f"test-{exercise.partition(':')[2]}"
    errors = {cell: kind for cell, kind, _ in outcomes[exercise][f"stub, {tests}"]}
    assert errors.get(test_cell) in ("NotImplementedError", "AssertionError"), errors


@pytest.mark.parametrize("chapter", BOOK)
def test_each_chapter_has_exercises_with_seen_and_hidden_tests(chapter):
    notebook = BOOK[chapter]
    assert 2 <= len(exercises_of(notebook)) <= 4
    by_id = {cell.id: cell for cell in notebook.cells}
    for exercise in exercises_of(notebook):
        test = by_id[f"test-{exercise}"]
        assert test.metadata.nbgrader.points > 0
        seen, hidden = without_hidden_tests(test).source, test.source
        assert "assert" in seen, f"{chapter}: {test.id} shows a student no test"
        assert hidden.count("assert") > seen.count("assert"), f"{chapter}: {test.id} hides no test"
        stub = without_solution(by_id[exercise]).source
        assert "raise NotImplementedError()" in stub
        assert "#| export" in stub


def test_weak_exercises_are_noticed(outcomes):
    """Guards of the guard: tests that a stub passes, that break elsewhere, or that only the hidden part makes fail."""
    assert outcomes["11_guard:good"]["stub, all tests"] == [
        ["test-good", "NotImplementedError", ""]
    ]
    assert outcomes["11_guard:good"]["solution, all tests"] == []
    assert outcomes["11_guard:never-called"]["stub, all tests"] == []
    assert outcomes["11_guard:wrong"]["solution, all tests"][0][:2] == [
        "test-wrong",
        "AssertionError",
    ]
    assert outcomes["11_guard:wrong"]["solution, seen tests"] == []
    broken = outcomes["11_guard:broken-before"]["stub, all tests"]
    assert [error[:2] for error in broken] == [
        ["demo", "NotImplementedError"],
        ["test-broken-before", "NameError"],
    ]


def guard_notebook():
    def solution(name, function):
        text = f"#| export\ndef {function}(x):\n    ### BEGIN SOLUTION\n    return x\n    ### END SOLUTION"
        return graded(name, text, solution=True, grade=False)

    def graded(cell_id, text, **flags):
        grader = {"schema_version": 3, "grade_id": cell_id, "locked": not flags["solution"]}
        grader |= {"task": False, "points": int(flags["grade"]), **flags}
        return new_code_cell(text, id=cell_id, metadata={"nbgrader": grader})

    def test(name, text):
        return graded(f"test-{name}", text, solution=False, grade=True)

    hidden = "### BEGIN HIDDEN TESTS\nassert wrong(1) == 2\n### END HIDDEN TESTS"
    return new_notebook(
        cells=[
            solution("good", "good"),
            new_code_cell("unused = 1 / 0", id="not-needed"),
            new_code_cell("one = 1", id="needed"),
            test("good", "assert good(one) == 1"),
            solution("never-called", "never_called"),
            test("never-called", "assert callable(never_called)"),
            solution("wrong", "wrong"),
            test("wrong", f"assert wrong(1) == 1\n{hidden}"),
            solution("broken-before", "broken"),
            new_code_cell("value = broken(1)", id="demo"),
            test("broken-before", "assert value == 1"),
        ]
    )


# ---- what nbgrader makes of a cell


def without_solution(cell):
    from nbgrader.preprocessors import ClearSolutions

    return ClearSolutions().preprocess_cell(copy.deepcopy(cell), {"language": "python"}, 0)[0]


def without_hidden_tests(cell):
    from nbgrader.preprocessors import ClearHiddenTests

    return ClearHiddenTests().preprocess_cell(copy.deepcopy(cell), {}, 0)[0]


# ---- the process that runs the cells


def names_of(code: str) -> tuple[set[str], set[str]]:
    """Names that a cell sets at top level, and names that it needs from elsewhere."""
    sets, needs, inner = set(), set(), []
    for step in dis.get_instructions(
        compile(code, "cell", "exec")
    ):  # in the order of execution, more or less
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


class Chapter:
    """A notebook's code cells, run as far as an exercise's tests need them."""

    def __init__(self, shell, notebook):
        self.shell = shell
        self.cells = {c.id: c for c in notebook.cells if c.cell_type == "code" and c.id != "setup"}
        self.names = {i: names_of(shell.transform_cell(c.source)) for i, c in self.cells.items()}

    def needed(self, test: str) -> list[str]:
        """The cells before `test` that it builds on, in order: exported ones, and others whose names these use."""
        order = list(self.cells)
        before = order[: order.index(test)]
        wanted = [i for i in before if self.cells[i].source.startswith("#| export")] + [test]
        exported = set(wanted)
        for i in wanted:
            for name in self.names[i][1]:
                setters = [j for j in before if name in self.names[j][0]]
                earlier = [j for j in setters if order.index(j) < order.index(i)]
                for j in (earlier or setters)[-1:]:
                    if j not in wanted and not exported.intersection(earlier):
                        wanted.append(j)
        return [i for i in order if i in wanted and i != test]

    def run(self, *cells) -> list[list[str]]:
        """Go on after an error, as nbgrader does."""
        errors = []
        for cell in cells:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                result = self.shell.run_cell(cell.source, store_history=False)
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                errors.append([cell.id, type(error).__name__, str(error)[:500]])
        return errors

    def outcomes(self, exercise: str) -> dict:
        test = self.cells[f"test-{exercise}"]
        seen, solution = without_hidden_tests(test), [self.cells[i] for i in self.needed(test.id)]
        stub = [without_solution(cell) if cell.id == exercise else cell for cell in solution]
        found = {}
        for version, cells in (("solution", solution), ("stub", stub)):
            new_namespace(self.shell)
            errors = self.run(*cells)
            found[f"{version}, all tests"] = errors + self.run(test)
            found[f"{version}, seen tests"] = errors + self.run(seen)
        return found


def new_namespace(shell) -> None:
    """An empty module, after the setup cell. A new name for it, since beartype remembers classes by theirs."""
    module = ModuleType(f"notebook_{len(sys.modules)}")
    for name in names_of(shell.transform_cell(SETUP))[0] & shell.user_ns.keys():
        module.__dict__[name] = shell.user_ns[name]
    sys.modules[module.__name__] = shell.user_module = module
    shell.user_ns = module.__dict__
    shell.init_user_ns()


def run_book(shell, book: dict) -> dict:
    results = {}
    for name, notebook in book.items():
        chapter = Chapter(shell, notebook)
        for exercise in exercises_of(notebook):
            start = time.process_time()
            if f"test-{exercise}" in chapter.cells:
                results[f"{name}:{exercise}"] = chapter.outcomes(exercise)
            print(f"{time.process_time() - start:6.2f} s  {name}:{exercise}", file=sys.stderr)
    return results


def main() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.showtraceback = lambda *_, **__: None
    shell.run_cell(SETUP).raise_error()
    results = {}
    for folder in sys.argv[1:]:
        results |= run_book(shell, read_book(Path(folder)))
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
