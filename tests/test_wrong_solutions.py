"""Each planted wrong solution (wrong_solutions.py) fails in its exercise's own test cell, and the right one passes there.

All of it happens in one process of its own, in which the cells before an exercise are run once for all its solutions.
"""

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import nbformat
import pytest
from test_exercises import (
    BOOK,
    CHAPTERS,
    EXERCISES,
    SETUP,
    Chapter,
    guard_notebook,
    new_namespace,
    without_hidden_tests,
)
from wrong_solutions import WRONG, Wrong

# Two wrong ways for an exercise of the guard's notebook: one that its tests see, and one that they do not.
GUARD = {
    "11_guard:good": [
        Wrong("return x", "return x + 1", "one more is as good"),
        Wrong("return x", "return +x", "a plus sign changes nothing, and it does not"),
    ]
}
CAUGHT_BY = ("AssertionError", "NotImplementedError")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, default_folder) -> dict:
    """chapter:exercise -> for each solution of it, the wrong ones first: [tests that fail, kind of error, message]."""
    guards = tmp_path_factory.mktemp("guards")
    nbformat.write(guard_notebook(), guards / "11_guard.ipynb")
    env = os.environ | {"MPLBACKEND": "agg", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, __file__, str(guards / "11_guard.ipynb")]
    done = subprocess.run(
        command, cwd=CHAPTERS, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    print(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def test_every_exercise_has_wrong_solutions():
    assert WRONG.keys() == set(EXERCISES)
    assert all(WRONG.values())


@pytest.mark.parametrize("exercise", EXERCISES)
def test_wrong_solutions_are_changes_of_the_solution(exercise):
    chapter, _, name = exercise.partition(":")
    source = next(cell.source for cell in BOOK[chapter].cells if cell.id == name)
    body = source.partition("### BEGIN SOLUTION")[2].partition("### END SOLUTION")[0]
    made = {wrong.apply(source) for wrong in WRONG[exercise]}
    assert len(made) == len(WRONG[exercise]), "the same change twice"
    for wrong in WRONG[exercise]:
        assert wrong.old in body, f"{wrong.old!r} is not in the part that a student writes"
        compile(wrong.apply(source), exercise, "exec")
        assert wrong.why and not wrong.why.endswith("."), "a belief, as half a sentence"
    assert len({wrong.why for wrong in WRONG[exercise]}) == len(made)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_wrong_solutions_fail_in_their_own_test_cell(outcomes, exercise):
    *wrongs, right = outcomes[exercise]
    assert right is None, f"after the wrong ones the solution fails, so they prove nothing: {right}"
    for wrong, outcome in zip(WRONG[exercise], wrongs, strict=True):
        assert outcome is not None, f"nobody notices that {wrong.why!r}: {wrong.new!r}"


def test_what_students_see_finds_most(outcomes):
    """Hidden tests are there for a few; whoever passes all seen ones should be right, most of the time."""
    found = Counter(o[0] for exercise in EXERCISES for o in outcomes[exercise][:-1])
    assert found["seen"] > 2 * found["hidden"] > 0, found


def test_a_wrong_solution_that_no_test_sees_is_noticed(outcomes):
    """Guard of the guard."""
    seen, unseen, right = outcomes["11_guard:good"]
    assert seen[:2] == ["seen", "AssertionError"]
    assert unseen is None and right is None


def test_a_replacement_must_fit_once():
    wrong = Wrong("x", "y", "x is y")
    assert wrong.apply("f(x)") == "f(y)"
    for source in ("f(z)", "f(x, x)"):
        with pytest.raises(ValueError, match="times in the cell"):
            wrong.apply(source)


# ---- the process that runs the cells


def public(names: dict) -> dict:
    return {name: value for name, value in names.items() if not name.startswith("__")}


def outcomes_of(chapter: Chapter, name: str, wrongs: list[Wrong]) -> list:
    test = chapter.cells[f"test-{name}"]
    needed = chapter.needed(test.id)
    at = needed.index(name)
    new_namespace(chapter.shell)
    chapter.run(*(chapter.cells[i] for i in needed[:at]))
    before = public(chapter.shell.user_ns)
    found = []
    for wrong in [*wrongs, None]:
        cell = copy.deepcopy(chapter.cells[name])
        cell.source = wrong.apply(cell.source) if wrong else cell.source
        new_namespace(chapter.shell)  # for each, since beartype remembers classes
        chapter.shell.user_ns.update(before)
        chapter.run(cell, *(chapter.cells[i] for i in needed[at + 1 :]))
        for tests, cell in (("seen", without_hidden_tests(test)), ("hidden", test)):
            errors = chapter.run(cell)
            if errors:
                found.append([tests, *errors[0][1:]])
                break
        else:
            found.append(None)
    return found


def main() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.showtraceback = lambda *_, **__: None
    shell.run_cell(SETUP).raise_error()
    guard = nbformat.read(Path(sys.argv[1]), as_version=4)
    results = {}
    for stem, notebook in {**BOOK, "11_guard": guard}.items():
        chapter = Chapter(shell, notebook)
        for exercise, wrongs in (WRONG | GUARD).items():
            if exercise.startswith(f"{stem}:"):
                name = exercise.partition(":")[2]
                results[exercise] = outcomes_of(chapter, name, wrongs)
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
