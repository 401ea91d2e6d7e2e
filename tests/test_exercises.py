"""The exercises from chapter 11 on: solutions pass their tests; an empty cell, and every planted wrong solution, does not.

For each exercise the cells before it that its tests need are run once. Then come what nbgrader leaves of the exercise, each wrong
solution of wrong_solutions.py, and the solution, each with the cells between exercise and tests, and then the tests: those that a
student sees, and if these pass the hidden ones. The solution comes last, so that a failure before it is no leftover of another one.
All of it happens in one process of its own, started by the fixture `outcomes`.
"""

import ast
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from nbformat.v4 import new_code_cell, new_notebook

CHAPTERS = Path(__file__).resolve().parent.parent / "chapters"
sys.path.insert(0, str(CHAPTERS))
from exercises import Chapter, Exercise, names_of, needed, plain, read_chapters, source
from wrong_solutions import WRONG, Wrong

BOOK = {name: chapter for name, chapter in read_chapters().items() if name >= "11"}
EXERCISES = [exercise.key for chapter in BOOK.values() for exercise in chapter.exercises.values()]
SETUP = source(BOOK["11_config"].code["setup"])  # the same in all chapters

# ---- the tests


@pytest.fixture(scope="module")
def outcomes(default_folder) -> dict:
    """chapter:exercise -> version of it -> {"cells": […], "seen": […], "all": […]}: errors in the cells, in the tests that are
    seen, in all tests, each [cell, kind, message]. Versions are "stub", "solution", and what is believed in a wrong one.
    """
    env = os.environ | {"MPLBACKEND": "agg", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, __file__]
    done = subprocess.run(
        command, cwd=CHAPTERS, env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    print(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def own_tests(exercise: str) -> str:
    return f"test-{exercise.partition(':')[2]}"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_passes(outcomes, exercise):
    assert outcomes[exercise]["solution"] == {"cells": [], "seen": [], "all": []}


@pytest.mark.parametrize("exercise", EXERCISES)
@pytest.mark.parametrize("tests", ["all", "seen"])
def test_an_empty_solution_fails_in_its_own_test_cell(outcomes, exercise, tests):
    errors = {cell: kind for cell, kind, _ in outcomes[exercise]["stub"][tests]}
    assert errors.get(own_tests(exercise)) in ("NotImplementedError", "AssertionError"), errors


@pytest.mark.parametrize("exercise", EXERCISES)
def test_wrong_solutions_fail_in_their_own_test_cell(outcomes, exercise):
    """… also where only the hidden tests can tell."""
    for wrong in WRONG[exercise]:
        errors = [cell for cell, *_ in outcomes[exercise][wrong.why]["all"]]
        assert errors == [own_tests(exercise)], f"nobody notices: {wrong.why} ({wrong.new!r})"


def test_what_students_see_finds_most(outcomes):
    """Hidden tests are for a few: whoever passes all that is seen should be right, most of the time."""
    versions = [
        outcomes[exercise][wrong.why] for exercise in EXERCISES for wrong in WRONG[exercise]
    ]
    seen = sum(bool(version["seen"]) for version in versions)
    assert 0.6 <= seen / len(versions) < 1  # chapters/teaching.md says six in ten


@pytest.mark.parametrize("chapter", BOOK)
def test_each_chapter_has_exercises_with_seen_and_hidden_tests(chapter):
    exercises = BOOK[chapter].exercises.values()
    assert 2 <= len(exercises) <= 4
    for exercise in exercises:
        assert exercise.points > 0
        seen, hidden = exercise.seen_tests, exercise.tests
        assert "assert" in seen, f"{exercise.key} shows a student no test"
        assert hidden.count("assert") > seen.count("assert"), f"{exercise.key} hides no test"
        assert "raise NotImplementedError(" in exercise.stub
        assert "#| export" in exercise.stub


@pytest.mark.parametrize("exercise", EXERCISES)
def test_each_assertion_says_what_is_expected(exercise):
    """A failing hidden test shows nothing but its message."""
    chapter, _, name = exercise.partition(":")
    tests = ast.parse(BOOK[chapter].exercises[name].tests)
    silent = [n for n in ast.walk(tests) if isinstance(n, ast.Assert) and n.msg is None]
    assert not silent, [ast.unparse(node) for node in silent]


def test_each_exercise_has_wrong_solutions():
    assert WRONG.keys() == set(EXERCISES)
    assert all(WRONG.values())


@pytest.mark.parametrize("exercise", EXERCISES)
def test_wrong_solutions_are_changes_of_what_students_write(exercise):
    chapter, _, name = exercise.partition(":")
    code = BOOK[chapter].exercises[name].code
    body = code.partition("### BEGIN SOLUTION")[2].partition("### END SOLUTION")[0]
    beliefs = Counter(wrong.why for wrong in WRONG[exercise])
    made = {wrong.apply(code) for wrong in WRONG[exercise]}
    assert len(made) == len(beliefs) == len(WRONG[exercise]), "one of them is there twice"
    for wrong in WRONG[exercise]:
        assert wrong.old in body, f"{wrong.old!r} is not in the part that a student writes"
        compile(wrong.apply(code), exercise, "exec")


def test_a_replacement_must_fit_once():
    wrong = Wrong("x", "y", "x is y")
    assert wrong.apply("f(x)") == "f(y)"
    for code in ("f(z)", "f(x, x)"):
        with pytest.raises(ValueError, match="times in the cell"):
            wrong.apply(code)


def test_weak_exercises_are_noticed(outcomes):
    """Guards of the guard: tests that a stub or a wrong solution passes, that break elsewhere, or fail in the hidden part only."""
    good = outcomes["11_guard:good"]
    assert [error[:2] for error in good["stub"]["all"]] == [["test-good", "NotImplementedError"]]
    assert good["solution"] == {"cells": [], "seen": [], "all": []}
    assert [error[:2] for error in good["more is better"]["seen"]] == [
        ["test-good", "AssertionError"]
    ]
    assert good["a plus changes nothing"]["all"] == [], "not wrong at all"
    assert outcomes["11_guard:never-called"]["stub"]["all"] == []
    wrong = outcomes["11_guard:wrong"]["solution"]
    assert wrong["seen"] == [] and wrong["all"][0][:2] == ["test-wrong", "AssertionError"]
    broken = outcomes["11_guard:broken-before"]["stub"]
    assert broken["cells"][0][:2] == ["demo", "NotImplementedError"]
    assert broken["all"][0][:2] == ["test-broken-before", "NameError"]


GUARD_WRONG = {
    "11_guard:good": [
        Wrong("return x", "return x + 1", "more is better"),
        Wrong("return x", "return +x", "a plus changes nothing"),
    ]
}


def guard_chapter() -> Chapter:
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
    notebook = new_notebook(
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
    return Chapter("11_guard", notebook)


# ---- the process that runs the cells


class Session:
    """Runs cells one after the other, and goes on after an error, as nbgrader does."""

    def __init__(self, shell):
        self.shell = shell
        shell.showtraceback = lambda *_, **__: None
        shell.run_cell(SETUP).raise_error()
        names = names_of(plain(SETUP))[0]
        self.after_setup = {n: v for n, v in shell.user_ns.items() if n in names}

    def namespace(self, names: dict) -> None:
        """A new module with these names. Its own name is new, too, since beartype remembers classes by theirs."""
        module = ModuleType(f"notebook_{len(sys.modules)}")
        module.__dict__.update(names)
        sys.modules[module.__name__] = self.shell.user_module = module
        self.shell.user_ns = module.__dict__
        self.shell.init_user_ns()

    def names(self) -> dict:
        return {n: v for n, v in self.shell.user_ns.items() if not n.startswith("__")}

    def run(self, cells: dict[str, str]) -> list[list[str]]:
        errors = []
        for cell_id, code in cells.items():
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                result = self.shell.run_cell(code, store_history=False)
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                errors.append([cell_id, type(error).__name__, str(error)[:500]])
        return errors

    def outcomes(self, chapter: Chapter, exercise: Exercise, wrongs: list[Wrong]) -> dict:
        cells = chapter.cells
        order = needed(cells, exercise.test_id)
        at = order.index(exercise.id)
        self.namespace(self.after_setup)
        broken = self.run({i: cells[i] for i in order[:at]})
        before = self.names()
        versions = {"stub": exercise.stub}
        versions |= {wrong.why: wrong.apply(exercise.code) for wrong in wrongs}
        found = {}
        for version, code in (versions | {"solution": exercise.code}).items():
            self.namespace(before)
            errors = broken + self.run({i: cells[i] for i in order[at:]} | {exercise.id: code})
            seen = self.run({exercise.test_id: exercise.seen_tests})
            every = seen or self.run({exercise.test_id: rest_of(exercise)})
            found[version] = {"cells": errors, "seen": seen, "all": every}
        return found


def rest_of(exercise: Exercise) -> str:
    """The tests that are still to be run once those that are seen were: hidden ones are at the end, except where they are not."""
    seen, mark, hidden = exercise.tests.partition("### BEGIN HIDDEN TESTS\n")
    at_the_end = mark and not hidden.partition("### END HIDDEN TESTS")[2].strip()
    return hidden if at_the_end and seen.strip() == exercise.seen_tests.strip() else exercise.tests


def main() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    session, results = Session(InteractiveShell.instance()), {}
    for chapter in (*BOOK.values(), guard_chapter()):
        for exercise in chapter.exercises.values():
            start = time.process_time()
            wrongs = (WRONG | GUARD_WRONG).get(exercise.key, [])
            results[exercise.key] = session.outcomes(chapter, exercise, wrongs)
            print(f"{time.process_time() - start:6.2f} s  {exercise.key}", file=sys.stderr)
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
