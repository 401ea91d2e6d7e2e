"""The classroom: what students get, what they can check, and grading that survives what they hand in.

Most of it happens on a small book made here; a student's way from a release of Part 1 to their own engine, and the real chapters'
packages, on the real one.
"""

import csv
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "chapters"))

import classroom
import exercises
import grading
import sync
from exercises import Chapter, Submission, Written, read_chapters, read_submission, source
from trials import Limits, Trials
from wrong_solutions import WRONG

BOOK = read_chapters()
ENV = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "LLM_ENGINE_PROGRESS": "off"}
QUICK = Limits(cell_seconds=2, seconds=10, output=2000, memory=700)


# ---- a small book


def code(cell_id: str, text: str, **marks) -> dict:
    metadata = {}
    if marks:
        marks = {"grade": False, "solution": False, "locked": False, "points": 0} | marks
        metadata = {"nbgrader": {"schema_version": 3, "grade_id": cell_id, "task": False, **marks}}
    return {
        "cell_type": "code", "execution_count": 1, "id": cell_id, "metadata": metadata, "outputs": [],
        "source": text.splitlines(keepends=True),
    }  # fmt: skip


def exercise(cell_id: str, before: str, solution: str, seen: str, hidden: str, points: int) -> list:
    indent = " " * (len(solution) - len(solution.lstrip()))
    text = f"{before}\n{indent}### BEGIN SOLUTION\n{solution}\n{indent}### END SOLUTION"
    tests = f"{seen}\n### BEGIN HIDDEN TESTS\n{hidden}\n### END HIDDEN TESTS"
    return [
        code(cell_id, text, solution=True),
        code(f"test-{cell_id}", tests, grade=True, locked=True, points=points),
    ]


def notebook(*cells: dict) -> dict:
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": list(cells), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


SHAPES = [
    code("setup", "#| hide\nimport llm_engine"),
    code("imports", "#| default_exp shapes\n#| export\nimport math"),
    *exercise(
        "double",
        '#| export\ndef double(x):\n    """Twice x."""\n    # Add it to itself.',
        "    return x + x",
        'assert double(2) == 4, "twice two is four"',
        'assert double("ab") == "abab", "also words"',
        2,
    ),
    code("demo", "numbers = [double(i) for i in range(3)]\nprint(numbers)"),
    *exercise(
        "area",
        '#| export\ndef side(x):\n    return abs(x)\n\n\ndef area(r):\n    """Of a circle."""',
        "    return math.pi * side(r) ** 2",
        'assert round(area(1), 2) == 3.14, "pi"',
        'assert round(area(-2), 2) == 12.57, "a radius below zero"',
        3,
    ),
    *exercise(
        "quadruple",
        "#| export\ndef quadruple(x):",
        "    return double(double(x))",
        "assert quadruple(numbers[1]) == 8",
        "assert quadruple(5) == 20",
        1,
    ),
    code("init", "#| export __init__\nfrom llm_engine.shapes import double"),
]
LATER = [
    code("setup", "#| hide\nimport llm_engine"),
    code("imports", "#| default_exp later\n#| export\nfrom llm_engine.shapes import quadruple"),
    *exercise(
        "eight", "#| export\ndef eight(x):", "    return 2 * quadruple(x)", "assert eight(1) == 8",
        "assert eight(2) == 16", 4,
    ),
    code("init", "#| export __init__\nfrom llm_engine.later import eight"),
]  # fmt: skip
EARLY = [
    code("setup", "#| hide\nimport llm_engine"),
    code("page", "from llm_engine.later import eight\n\nprint(eight(1))"),
    code("page-again", "print(eight(2))"),
    code("fine", "print(1)"),
    *exercise(
        "one", "#| default_exp early\n#| export\ndef one():", "    return 1", "assert one() == 1",
        "assert one() * 2 == 2", 1,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """The chapters folder of the small book."""
    root = tmp_path_factory.mktemp("small")
    (root / "chapters").mkdir()
    for name, cells in (("10_early", EARLY), ("11_shapes", SHAPES), ("12_later", LATER)):
        classroom.save(root / "chapters", name, notebook(*cells))
    shutil.copyfile(ROOT / "pyproject.toml", root / "pyproject.toml")
    return root / "chapters"


@pytest.fixture(scope="module")
def shapes(small) -> Chapter:
    return read_chapters(small)["11_shapes"]


def solved(chapter: Chapter, **changes: str) -> list[dict]:
    """A student's notebook with all solutions, and some cells changed."""
    cells = json.loads(json.dumps(classroom.student_version(chapter, set())["cells"]))
    for cell in cells:
        if cell["id"] in chapter.exercises:
            cell["source"] = chapter.exercises[cell["id"]].solution
        cell["source"] = changes.get(cell["id"].replace("-", "_"), cell["source"])
    return cells


def handed_in(folder: Path, student: str, cells: list[dict] | str, name: str = "11_shapes") -> None:
    (folder / student).mkdir(parents=True, exist_ok=True)
    text = cells if isinstance(cells, str) else json.dumps(notebook(*cells))
    (folder / student / f"{name}.ipynb").write_text(text, "utf8")


def cell_of(cells: list[dict], cell_id: str) -> dict:
    return next(c for c in cells if c["id"] == cell_id)


# ---- release


@pytest.fixture(scope="module")
def part1(tmp_path_factory) -> Path:
    """A student's folder: Part 1 of the real book."""
    folder = tmp_path_factory.mktemp("course") / "part1"
    assert classroom.release(["11-19"], folder) == [n for n in BOOK if 11 <= int(n[:2]) <= 19]
    return folder


def text_of(folder: Path) -> str:
    files = [p for p in sorted(folder.rglob("*")) if p.suffix in (".py", ".ipynb", ".md", ".toml")]
    return "\n".join(p.read_text("utf8") for p in files)


def released(folder: Path, name: str) -> Chapter:
    return Chapter(name, json.loads((folder / "chapters" / f"{name}.ipynb").read_text("utf8")))


def own_lines(one: exercises.Exercise) -> list[str]:
    """What a student must write, without what stands in the cell anyway."""
    stub = {line.strip() for line in one.stub.split("\n")}
    lines = (line.strip() for line in one.solution.split("\n"))
    return [line for line in lines if line not in stub and len(line) > 12]


def answers_in(text: str) -> list[str]:
    """Exercises of Part 1 of which more than half of the solution stands in a text (a line or two may be common words)."""
    found = []
    for chapter in BOOK.values():
        for one in chapter.exercises.values() if chapter.number < 20 else ():
            lines = own_lines(one)
            there = [line for line in lines if json.dumps(line)[1:-1] in text or line in text]
            if len(there) > len(lines) / 2:
                found.append(one.key)
    return found


def test_a_release_holds_no_answer(part1):
    code = "\n".join(line for line in text_of(part1).split("\n") if len(line) < 1000)  # no figures
    assert answers_in(code) == []
    every = [one.key for c in BOOK.values() if c.number < 20 for one in c.exercises.values()]
    assert answers_in(text_of(ROOT / "llm_engine")) == every, "which would be noticed"
    notebooks = "".join(p.read_text("utf8") for p in part1.rglob("*.ipynb"))
    assert "BEGIN HIDDEN TESTS" not in notebooks
    assert "BEGIN SOLUTION" not in "".join(
        p.read_text("utf8") for p in (part1 / "chapters").glob("1[1-9]*.ipynb")
    )


def test_a_release_keeps_hints_and_seen_tests_and_hides_the_others(part1):
    for name in [n for n in BOOK if 11 <= int(n[:2]) <= 19]:
        student = released(part1, name)
        assert list(student.code) == list(BOOK[name].code), "every cell is there"
        for one in BOOK[name].exercises.values():
            mine = student.exercises[one.id]
            assert f'raise NotImplementedError("chapter {name[:2]}, exercise {one.id}:' in mine.code
            before = one.code.split("### BEGIN SOLUTION")[0].rstrip()
            assert mine.code.startswith(before), "signature, docstring, hint"
            assert "HIDDEN" not in mine.tests and mine.tests == one.seen_tests.rstrip()
            assert len(mine.tests) < len(one.tests)
            test = cell_of(student.notebook["cells"], one.test_id)
            assert test["metadata"]["editable"] is False and test["outputs"] == []
    figures = [
        o for c in released(part1, "15_attention").notebook["cells"] for o in c.get("outputs", [])
    ]
    assert any("image/png" in o.get("data", {}) for o in figures), "a picture to aim at stays"


def test_the_package_of_a_release_holds_only_what_was_due_before(part1, tmp_path):
    assert {p.stem for p in (part1 / "llm_engine").glob("*.py")} == {"__init__", "viz"}
    assert (part1 / "llm_engine" / "__init__.py").read_text("utf8") == ""
    classroom.release(["20", "22"], tmp_path / "later")
    have = {p.stem: p.read_text("utf8") for p in (tmp_path / "later" / "llm_engine").glob("*.py")}
    before = [
        c for c in sync.exported_cells(sync.read_notebooks()) if c.chapter < 22 and c.chapter != 20
    ]
    assert have == sync.build(before), "word for word, with the cells of earlier chapters alone"
    assert {"engine", "cli", "streaming"} <= have.keys() and "kv_cache" not in have
    assert "kv_cache" not in have["__init__"] and "runners" not in have["__init__"]
    assert not list((tmp_path / "later" / "chapters").glob("3*.ipynb"))


def test_cells_that_need_later_chapters_are_marked_and_do_not_stop_run_all(small, tmp_path):
    classroom.release(["10"], tmp_path / "first", folder=small)
    cells = released(tmp_path / "first", "10_early").code
    marked = {
        i for i, c in cells.items() if "needs a later chapter (llm_engine.later)" in source(c)
    }
    assert marked == {"page", "page-again"}
    assert all("raises-exception" in cells[i]["metadata"]["tags"] for i in marked)
    assert not cells["fine"]["metadata"].get("tags")
    classroom.release(["10-12"], tmp_path / "all", folder=small)
    assert "later chapter (" not in (tmp_path / "all" / "chapters" / "10_early.ipynb").read_text(
        "utf8"
    )


def test_a_model_can_be_given_along(small, tmp_path):
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "config.json").write_text("{}")
    (tmp_path / "smollm2-135m.gguf").write_text("GGUF")
    model = tmp_path / "smollm2-135m"
    classroom.release(["11"], tmp_path / "with", folder=small, model=model)
    classroom.release(["11"], tmp_path / "without", folder=small)
    given = {p.name for p in (tmp_path / "with" / "models").rglob("*") if p.is_file()}
    assert given == {"config.json", "smollm2-135m.gguf"}
    assert "LLM_ENGINE_CACHE=$PWD/models" in (tmp_path / "with" / "README.md").read_text("utf8")
    assert "$PWD/models" not in (tmp_path / "without" / "README.md").read_text("utf8")


def test_a_release_overwrites_nothing_and_knows_its_chapters(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(classroom.ClassroomError, match="not empty"):
        classroom.release(["11"], tmp_path)
    for word in ("99", "eleven", "attention"):
        with pytest.raises(classroom.ClassroomError, match=f"{word}: no such chapter"):
            classroom.release([word], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_students_folder_installs_as_the_package(part1):
    """The same name, programs and requirements as the book's package with its extra `book`."""
    mine = tomllib.loads((part1 / "pyproject.toml").read_text("utf8"))
    book = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))
    assert mine["project"]["name"] == book["project"]["name"] == "llm-engine"
    assert mine["project"]["scripts"] == book["project"]["scripts"]
    assert set(mine["project"]["dependencies"]) == {
        *book["project"]["dependencies"],
        *book["project"]["optional-dependencies"]["book"],
    }
    assert mine["tool"]["setuptools"]["packages"] == ["llm_engine"]
    for tool in classroom.TOOLS:
        assert (part1 / "chapters" / tool).read_bytes() == (ROOT / "chapters" / tool).read_bytes()
    readme = (part1 / "README.md").read_text("utf8")
    for name in [n for n in BOOK if 11 <= int(n[:2]) <= 19]:
        for one in BOOK[name].exercises.values():
            assert f"| [{name}](chapters/{name}.ipynb) | `{one.id}` | {one.points:g} |" in readme


def test_a_students_readme_follows_what_is_released(part1, small, tmp_path):
    classroom.release(["12"], tmp_path / "twelve", folder=small)
    text = (tmp_path / "twelve" / "README.md").read_text("utf8")
    assert "chapter 12, exercise eight: not written yet" in text and "Until you" in text
    classroom.release(["11"], tmp_path / "eleven", folder=small)
    text = (tmp_path / "eleven" / "README.md").read_text("utf8")
    assert "chapter 11, exercise double: not written yet" in text and "Until you" not in text


def words_of(notebook: dict) -> list[tuple[str, str]]:
    """Each cell's source and what it prints."""
    return [
        (
            c.get("id", ""),
            f"{source(c)}\n{json.dumps([o.get('text', '') for o in c.get('outputs', [])])}",
        )
        for c in notebook["cells"]
    ]


# Lines of a solution that a student's folder has for a reason: part of what is given, by cell
GIVEN_LINES = {
    ("12_weights:parse-header", "by-hand-code"),  # reading a length is shown before it is asked
    (
        "13_tokenizer:incremental-detokenizer",
        "incremental-detokenizer",
    ),  # in a method that is given
    ("14_embedding:rope-apply", "pairing-wrong"),  # one line of broadcasting, in the wrong pairing
    ("20_kv_cache:static-cache", "concat-cache"),  # a check that every cache makes
    ("32_memory:weight-bytes", "load-weights"),  # names of weights are taken apart as in chapter 12
    ("32_memory:weight-bytes", "recipe"),
    ("33_integer_kernels:int8-row", "int4-row"),  # given kernels beside the one to be written
    ("33_integer_kernels:int8-row", "narrow-groups"),
    ("33_integer_kernels:int8-row", "four-lines"),
}


def test_no_line_of_a_solution_stands_in_a_students_folder():
    """In the folder of each chapter: it with stubs, those before complete, hidden tests gone."""
    before: list[tuple[str, str]] = []
    found = set()
    for chapter in BOOK.values():
        cells = before + words_of(classroom.student_version(chapter, set()))
        for one in chapter.exercises.values():
            lines = [line for line in own_lines(one) if len(line) > 30]
            found |= {(one.key, i) for i, text in cells if any(line in text for line in lines)}
        before += words_of(classroom.complete_version(chapter, set()))
    assert found == GIVEN_LINES


# ---- a student's own engine


def run(folder: Path, *words: str, **more) -> subprocess.CompletedProcess:
    """A program in a student's folder; llm_engine is theirs and no other."""
    env = ENV | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        **more,
    )


def fill_in(folder: Path, leave: set[str] = frozenset()) -> None:
    """Write the solutions into a student's notebooks."""
    for path in sorted((folder / "chapters" / "released").glob("*.ipynb")):
        place = folder / "chapters" / path.name
        notebook = json.loads(place.read_text("utf8"))
        for cell in notebook["cells"]:
            one = BOOK[path.stem].exercises.get(cell["id"])
            if one and one.key not in leave:
                cell["source"] = one.solution
        place.write_text(json.dumps(notebook), "utf8")


ANSWER = (
    "import sys, llm_engine, llm_engine.cli\n"
    "print(llm_engine.__file__)\n"
    "sys.argv = ['llm-engine', 'generate', 'The capital of France is', '--max-new-tokens', '2']\n"
    "llm_engine.cli.main()\n"
)


def test_a_student_who_finishes_part_1_generates_text_with_their_own_package(
    part1, tmp_path, default_folder
):
    folder = tmp_path / "mine"
    shutil.copytree(part1, folder)
    fill_in(folder, leave={"16_ffn_and_transformer:feed-forward", "11_config:read-eos"})
    done = run(folder, "chapters/sync.py")
    assert done.returncode == 0, done.stderr
    # one missing: it says which
    done = run(folder, "-c", ANSWER)
    assert done.returncode != 0
    error = "chapter 11, exercise read-eos: not written yet"
    assert error in done.stderr + done.stdout
    # the reference for what is missing, and only for that
    mine = "    # mine\n"
    place = folder / "chapters" / "15_attention.ipynb"
    place.write_text(
        place.read_text("utf8").replace(
            "    mask = key <= query", f"{mine[:-1]}\\n    mask = key <= query"
        )
    )
    assert mine.strip() in place.read_text("utf8")
    classroom.overlay(["11", "15", "16"], folder / "overlays")
    done = run(folder, "chapters/classroom.py", "apply")
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert (
        "11_config: read-eos from the reference" in told
        and "15_attention: you have written all of it" in told
    )
    assert run(folder, "chapters/sync.py").returncode == 0
    assert mine in (folder / "llm_engine" / "attention.py").read_text("utf8"), "their own cells win"
    done = run(folder, "-c", ANSWER)
    assert done.stdout.split("\n")[0] == str(folder / "llm_engine" / "__init__.py"), (
        "no other package"
    )
    assert " Paris." in done.stdout, done.stderr[-2000:]
    assert not (folder / "llm_engine" / "kv_cache.py").exists()


# ---- check


@pytest.fixture(scope="module")
def student(small, tmp_path_factory) -> Path:
    """A student's folder of the small book."""
    folder = tmp_path_factory.mktemp("student") / "course"
    classroom.release(["11-12"], folder, folder=small)
    assert run(folder, "chapters/sync.py").returncode == 0
    return folder


def checked(folder: Path, cells: list[dict], shapes_frame: Chapter, trials: Trials) -> dict:
    place = folder / "chapters" / "11_shapes.ipynb"
    place.write_text(json.dumps(notebook(*cells)), "utf8")
    return {
        v.exercise.id: v for v in classroom.check(place, shapes_frame, [], trials, lambda e: None)
    }


@pytest.fixture(scope="module")
def own_trials(student):
    with Trials(student, "#| hide\nimport llm_engine", QUICK) as trials:
        yield trials


@pytest.fixture
def frame(student) -> Chapter:
    return classroom.frames_of(student / "chapters")["11_shapes"]


def test_check_says_what_is_wrong_and_waits_for_what_is_missing(student, shapes, frame, own_trials):
    cells = solved(
        shapes,
        area="#| export\ndef area(r):\n    return 3.2 * r**2",
        double=shapes.exercises["double"].stub,
    )
    verdicts = checked(student, cells, frame, own_trials)
    assert {i: v.state for i, v in verdicts.items()} == {
        "double": "stub",
        "area": "wrong",
        "quadruple": "waits",
    }
    assert verdicts["area"].message == "pi. Here `round(area(1), 2)` is 3.2"
    assert "needs exercise double of chapter 11" in verdicts["quadruple"].message
    double = shapes.exercises["double"]
    assert classroom.hint_of(frame.exercises["double"]) == "Add it to itself."
    assert classroom.hint_of(double) == "Add it to itself."


def test_check_names_the_line_of_an_error_and_sees_changed_tests(
    student, shapes, frame, own_trials
):
    cells = solved(
        shapes,
        double="#| export\ndef double(x):\n    twice = y + x\n    return twice",
        test_double="assert True",
        quadruple="#| export\ndef quadruple(x)\n    return 4 * x",
    )
    cells.remove(cell_of(cells, "test-area"))
    verdicts = checked(student, cells, frame, own_trials)
    assert verdicts["double"].message == (
        "NameError: name 'y' is not defined (cell double, line 3: twice = y + x)"
    )
    assert "its test cell was changed" in verdicts["double"].notes[0]
    assert verdicts["area"].state == "right" and "gone" in verdicts["area"].notes[0]
    assert verdicts["quadruple"].state == "wrong"
    assert (
        "SyntaxError" in verdicts["quadruple"].message and "line 2" in verdicts["quadruple"].message
    )


def test_a_cell_that_ends_the_process_is_told_apart_from_those_around_it(
    student, shapes, frame, own_trials
):
    verdicts = checked(student, solved(shapes, area="import os; os._exit(1)"), frame, own_trials)
    assert {i: v.state for i, v in verdicts.items()} == {
        "double": "right",
        "area": "wrong",
        "quadruple": "waits",
    }
    told = verdicts["quadruple"].message
    assert told.startswith("was not reached: cell area stopped before it. the process ended itself")
    assert told.endswith("Mend that cell first")


def test_the_check_command_ends_with_1_until_all_is_right(student, shapes):
    place = student / "chapters" / "11_shapes.ipynb"
    place.write_text(json.dumps(notebook(*solved(shapes))), "utf8")
    done = run(student, "chapters/classroom.py", "check", "11", "double", "quadruple")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 exercises right: 3 of 3 points" in done.stdout
    assert "llm_engine is older than your notebooks (shapes)" in " ".join(done.stdout.split())
    done = run(student, "chapters/classroom.py", "check")
    assert done.returncode == 1
    assert "3 of 4 exercises right: 6 of 10 points" in done.stdout and "not written" in done.stdout
    assert "\n11_shapes\n" in f"\n{done.stdout}" and "\nquadruple " in done.stdout
    done = run(student, "chapters/classroom.py", "check", "13")
    assert done.returncode == 1 and "13: no such chapter" in done.stderr
    done = run(student, "chapters/classroom.py", "grade", "chapters")
    assert done.returncode == 1 and "student's folder" in done.stderr


def test_check_does_not_count_the_reference_as_the_students(
    student, small, shapes, frame, own_trials, tmp_path
):
    """As `grade` gives no points for it."""
    own = "#| export\ndef double(x):\n    return 2 * x"
    cells = solved(shapes, double=own, area=shapes.exercises["area"].stub)
    place = student / "chapters" / "11_shapes.ipynb"
    place.write_text(json.dumps(notebook(*cells)), "utf8")
    overlays = classroom.overlay(["11"], tmp_path, folder=small)
    classroom.apply(overlays, folder=student / "chapters")
    verdicts = classroom.check(place, frame, [], own_trials, lambda e: None)
    assert [v.state for v in verdicts] == ["right", "overlaid", "right"]
    assert [v.points for v in verdicts] == [2, 0, 1]
    told = classroom.advice(verdicts[1])
    assert "earns no points" in told and exercises.OVERLAID in told
    assert "from the reference" in classroom.WORDS["overlaid"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["11", "duoble"],
            "duoble: no such exercise. Did you mean double (chapter 11)? Chapter 11 has",
        ),
        (["quadrupel"], "Did you mean quadruple (chapter 11)?"),
        (["12", "aera"], "aera: no such exercise. Did you mean area (chapter 11)? Chapter 12 has"),
        (["11", "zzz"], "zzz: no such exercise. Chapter 11 has double, area, quadruple."),
        (
            ["12", "area"],
            "area: no such exercise. Chapter 12 has eight. There is one in 11_shapes.",
        ),
        (["13"], "13: no such chapter"),
        (["nowhere/11_shapes.ipynb", "12_none.ipynb"], "12_none.ipynb: no such chapter"),
    ],
)
def test_check_names_what_there_is_where_a_name_is_mistyped(student, monkeypatch, words, said):
    monkeypatch.setattr(classroom, "CHAPTERS", student / "chapters")
    with pytest.raises(classroom.ClassroomError) as error:
        classroom.check_command(words)
    assert said in str(error.value)


def test_check_takes_the_name_of_a_function(student, shapes, monkeypatch, capsys):
    place = student / "chapters" / "11_shapes.ipynb"
    place.write_text(json.dumps(notebook(*solved(shapes))), "utf8")
    monkeypatch.setattr(classroom, "CHAPTERS", student / "chapters")
    monkeypatch.setattr(classroom, "ROOT", student)
    with pytest.raises(classroom.typer.Exit) as end:
        classroom.check_command(["Quadruple"])
    assert end.value.exit_code == 0


# ---- overlay


def test_an_overlay_fills_what_is_missing_and_leaves_what_is_written(small, shapes, tmp_path):
    folder = tmp_path / "course"
    classroom.release(["11"], folder, folder=small)
    overlays = classroom.overlay(["11", "12"], tmp_path / "handout", folder=small)
    assert "HIDDEN" not in overlays[0].read_text("utf8")
    place = folder / "chapters" / "11_shapes.ipynb"
    cells = json.loads(place.read_text("utf8"))["cells"]
    own = "#| export\ndef double(x):\n    return 3 * x  # wrong, but mine"
    cell_of(cells, "double")["source"] = own
    cells.remove(cell_of(cells, "area"))
    place.write_text(json.dumps(notebook(*cells)), "utf8")
    before = place.read_bytes()
    done = classroom.apply(overlays, folder=folder / "chapters")
    assert "11_shapes: area, quadruple from the reference" in done[0]
    assert "12_later: was not here" in done[1]
    after = Chapter("11_shapes", json.loads(place.read_text("utf8")))
    assert source(after.code["double"]) == own
    assert source(after.code["quadruple"]).startswith(f"#| export\n{exercises.OVERLAID}\n")
    order = list(after.code)
    assert order.index("area") == order.index("test-area") - 1, "back where it was"
    assert (folder / "mine" / "11_shapes.ipynb").read_bytes() == before
    assert run(folder, "chapters/sync.py").returncode == 0
    done = classroom.apply(overlays[:1], {"double"}, folder=folder / "chapters")
    assert "double from the reference" in done[0]
    assert "mine/11_shapes_2.ipynb" in done[0] and own[-6:] in (
        folder / "mine" / "11_shapes_2.ipynb"
    ).read_text("utf8")
    found = read_submission(place).find(shapes.exercises["double"], shapes)
    assert found.state == "overlaid", "and earns no points"


def test_an_overlay_also_fills_an_unfinished_chapter_copied_from_an_earlier_folder(small, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    classroom.release(["11"], old, folder=small)
    classroom.release(["12"], new, folder=small)
    overlays = classroom.overlay(["11"], tmp_path / "handout", folder=small)
    assert "nothing to do" in classroom.apply(overlays, folder=new / "chapters")[0]
    shutil.copyfile(*(f / "chapters" / "11_shapes.ipynb" for f in (old, new)))
    done = classroom.apply(overlays, folder=new / "chapters")
    assert "11_shapes: double, area, quadruple from the reference" in done[0]
    assert "not written yet" not in (new / "chapters" / "11_shapes.ipynb").read_text("utf8")


# ---- from one folder to the next


def write(folder: Path, cell_id: str, text: str, name: str = "11_shapes") -> None:
    place = folder / "chapters" / f"{name}.ipynb"
    cells = json.loads(place.read_text("utf8"))["cells"]
    cell_of(cells, cell_id)["source"] = text
    place.write_text(json.dumps(notebook(*cells)), "utf8")


def code_in(folder: Path, cell_id: str, name: str = "11_shapes") -> str:
    return source(released(folder, name).code[cell_id])


OWN = "#| export\ndef double(x):\n    return 2 * x  # mine"


@pytest.fixture
def weeks(small, tmp_path) -> list[Path]:
    """Folders week by week: a student wrote one of the exercises of chapter 11, and that of chapter 12."""
    folders = [tmp_path / f"week{n}" for n in (1, 2, 3)]
    for folder, chapter in zip(folders, ("11", "12", "10"), strict=True):
        classroom.release([chapter], folder, folder=small)
    classroom.release(["12"], tmp_path / "later", folder=small)
    write(folders[0], "double", OWN)
    write(folders[1], "eight", "#| export\ndef eight(x):\n    return 8 * x  # mine", "12_later")
    return [*folders, tmp_path / "later"]


def test_what_was_written_comes_along_and_what_was_not_is_filled_in(weeks):
    """Copied over one another, unfinished chapters would replace complete ones, and complete ones those that a student wrote."""
    one, two, _, last = weeks
    before = (last / "chapters" / "11_shapes.ipynb").read_bytes()
    for order in ([one, two], [two, one]):
        done = classroom.bring(order, folder=last / "chapters")
        for folder in (one, two):
            assert (
                "is here already" in " ".join(classroom.bring([folder], folder=last / "chapters"))
                or folder is one
            )
    assert "11_shapes: left as it is here, where you have written double" in done[1]
    assert code_in(last, "double") == OWN
    assert code_in(last, "area").startswith(f"#| export\n{exercises.OVERLAID}")
    assert "mine" in code_in(last, "eight", "12_later")
    assert (last / "mine" / "11_shapes.ipynb").read_bytes() == before
    assert run(last, "chapters/sync.py").returncode == 0
    assert "not written yet" not in (last / "llm_engine" / "shapes.py").read_text("utf8")
    assert classroom.frames_of(last / "chapters").keys() == {"11_shapes", "12_later"}


def test_nothing_of_a_student_is_replaced_unless_they_say_so(weeks):
    one, _, _, last = weeks
    classroom.bring([one], folder=last / "chapters")
    newer = OWN.replace("mine", "newer")
    write(last, "double", newer)
    assert "To have the one of" in classroom.bring([one], folder=last / "chapters")[0]
    assert code_in(last, "double") == newer
    done = classroom.bring([one], {"11"}, folder=last / "chapters")
    assert code_in(last, "double") == OWN
    kept = last / done[0].partition("what was here: ")[2].rstrip(")")
    assert "newer" in kept.read_text("utf8")


def test_a_folder_that_cannot_be_brought_is_named(weeks, tmp_path):
    one, two, _, last = weeks
    (tmp_path / "empty").mkdir()
    with pytest.raises(classroom.ClassroomError, match="no student's folder"):
        classroom.bring([one, tmp_path / "empty"], folder=last / "chapters")
    assert "not written yet" not in code_in(last, "double") and code_in(last, "double") != OWN
    with pytest.raises(classroom.ClassroomError, match="is this folder"):
        classroom.bring([last], folder=last / "chapters")
    (one / "chapters" / "11_shapes.ipynb").write_text("{", "utf8")
    done = classroom.bring([one, two], folder=last / "chapters")
    assert (
        "left as it is here" in done[0] and "not JSON" in done[0] and "12_later: yours" in done[1]
    )
    assert "chapters/classroom.py bring ../OLD" in (last / "README.md").read_text("utf8")
    assert "cp " not in (last / "README.md").read_text("utf8")


def test_a_cell_that_waited_for_a_later_chapter_can_run_where_that_is(small, tmp_path):
    classroom.release(["10"], tmp_path / "first", folder=small)
    classroom.release(["10-12"], tmp_path / "all", folder=small)
    write(
        tmp_path / "first",
        "one",
        "#| default_exp early\n#| export\ndef one():\n    return 1.0",
        "10_early",
    )
    assert "needs a later" in code_in(tmp_path / "first", "page", "10_early")
    classroom.bring([tmp_path / "first"], folder=tmp_path / "all" / "chapters")
    assert "return 1.0" in code_in(tmp_path / "all", "one", "10_early")
    cell = released(tmp_path / "all", "10_early").code["page"]
    assert "needs a later" not in source(cell) and not cell["metadata"].get("tags")


# ---- finding what a student wrote


def rewritten(cells: list[dict], seed: int) -> list[dict]:
    """A solved notebook after an afternoon: reordered, ids lost or doubled, cells copied, marks gone, others added."""
    chance = random.Random(seed)
    cells = json.loads(json.dumps(cells))
    if chance.random() < 0.5:
        chance.shuffle(cells)
    for cell in list(cells):
        if chance.random() < 0.3:
            cell.pop("id", None)
        if chance.random() < 0.3:
            cell["metadata"] = chance.choice([{}, None, [], {"nbgrader": "?"}])
        if chance.random() < 0.2:
            cells.insert(chance.randrange(len(cells)), {**cell, "id": f"copy-{chance.random()}"})
        if chance.random() < 0.2:
            cell["source"] = "".join(cell["source"]) + "\n\n# a thought\n"
        if chance.random() < 0.1:
            cells.insert(chance.randrange(len(cells)), code(f"x{chance.random()}", "1 +"))
        if chance.random() < 0.1:
            cells.append({"cell_type": "markdown", "source": ["# notes"]})
        if chance.random() < 0.1:
            cells.append(
                chance.choice(
                    [None, 3, {}, {"cell_type": "code"}, {"cell_type": "code", "source": 7}]
                )
            )
        if chance.random() < 0.1:
            cell.pop("outputs", None)
    return cells


@settings(max_examples=80)
@given(seed=st.integers(0, 10**9))
def test_a_solution_is_found_whatever_became_of_the_notebook(shapes, tmp_path_factory, seed):
    cells = rewritten(solved(shapes), seed)
    submission = Submission(list(exercises.written_cells(notebook(*cells))))
    for one in shapes.exercises.values():
        found = submission.find(one, shapes)
        assert found.state == "written", one.id
        names: dict = {"math": __import__("math"), "double": lambda x: x + x}
        exec("\n".join([found.helpers, found.code]), names)
        assert names["double"](4) == 8 if one.id == "double" else True
        assert round(names["area"](-2), 2) == 12.57 if one.id == "area" else True
        assert names["quadruple"](3) == 12 if one.id == "quadruple" else True


def find(shapes: Chapter, exercise_id: str, *texts: str, ids: tuple[str, ...] = ()):
    ids = ids + ("",) * len(texts)
    cells = [Written(n, ids[n - 1], "", text) for n, text in enumerate(texts, 1)]
    return Submission(cells).find(shapes.exercises[exercise_id], shapes)


def test_the_last_definition_that_is_no_stub_counts_and_it_says_so(shapes):
    stub = shapes.exercises["double"].stub
    right = "def double(x):\n    return 2 * x"
    assert find(shapes, "double", stub).state == "stub"
    assert (
        find(shapes, "double", stub.replace("# Your code here.", "# I give up\n    ")).state
        == "stub"
    )
    assert find(shapes, "double", "x = 1").state == "missing"
    found = find(shapes, "double", right, "def double(x):\n    return x", right, stub)
    assert (found.state, found.number) == ("written", 3)
    assert "taken from cell 3, the last one that defines double" in found.notes[0]
    assert "also in cell 1, 2" in found.notes[1]
    found = find(
        shapes, "double", "#| export\ndef double(x):\n    return 1", right, ids=("double",)
    )
    assert found.number == 1, "the exercise's own cell comes first"
    assert "cell 1 counts" in found.notes[0]
    found = find(shapes, "double", stub, right, ids=("double",))
    assert found.number == 2 and found.code == f"#| export\n{right}"
    found = find(shapes, "double", "# moved down", right, ids=("double",))
    assert found.number == 2, "an emptied cell is no solution"


def test_helpers_of_a_student_come_along_and_nothing_else_does(shapes):
    solution = "def area(r):\n    return constant() * square(r)\n"
    found = find(
        shapes,
        "area",
        "import math, cmath\nfrom fractions import Fraction as F",
        "def square(x):\n    return power(x, 2)\n\nprint(1 / 0)",
        "while True: pass",
        "def power(x, n):\n    return F(x) ** n\n\ndef double(x):\n    return 0",
        "def constant(): return math.pi",
        solution,
        ids=("imports", "", "", "", "", "area"),
    )
    assert "1 / 0" not in found.helpers and "double" not in found.helpers
    names: dict = {"math": __import__("math")}
    exec(f"{found.helpers}\n{found.code}", names)
    assert round(names["area"](2), 2) == 12.57
    # what was given with the exercise, outside of what was to be written, is given again
    found = find(shapes, "area", "def area(r):\n    return 3 * side(r)")
    assert "def side(x)" in found.helpers


def test_two_exercises_in_one_cell_are_graded_apart(shapes):
    both = "def double(x):\n    return 7\n\n\ndef quadruple(x):\n    return double(double(x))\n"
    found = find(shapes, "quadruple", both, ids=("quadruple",))
    assert "def double" not in found.code and "def quadruple" in found.code
    found = find(shapes, "quadruple", both)
    assert "def double" not in found.code + found.helpers


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "empty"),
        (b"print(1)", "not JSON"),
        (b'{"cells": [<<<<<<< HEAD', "merge conflict"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no notebook"),
        (b'{"cells": {}}', "no notebook"),
        (b'{"worksheets": [1]}', "before 2015"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b" " * 70_000_000, "at most"),
    ],
)
def test_what_is_no_notebook_is_named(tmp_path, text, why):
    (tmp_path / "x.ipynb").write_bytes(text)
    with pytest.raises(exercises.SubmissionError, match=why):
        read_submission(tmp_path / "x.ipynb")


# ---- running


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    with Trials(tmp_path_factory.mktemp("root"), "import math", QUICK) as trials:
        yield trials


def tried(trials: Trials, *codes: str) -> list:
    return trials.run([(f"c{i}", text) for i, text in enumerate(codes)])


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("while True: pass", "OutOfTime", "longer than 2 s"),
        ("while True:\n  try:\n    while True: pass\n  except Exception: pass", "OutOfTime", "2 s"),
        ("import os; os._exit(0)", "Stopped", "exit code 0"),
        ("import os, signal; os.kill(os.getpid(), 9)", "Stopped", "SIGKILL"),
        ("import no_such_module", "ModuleNotFoundError", "no_such_module"),
        ("def f(:", "SyntaxError", "invalid syntax"),
        ("raise SystemExit(3)", "SystemExit", "3"),
        ("def f(n): return f(n)\nf(1)", "RecursionError", "recursion"),
        ("input()", "EOFError", ""),
        ("x = b'1' * 900_000_000\nimport time; time.sleep(9)", "Stopped", "MB of memory"),
    ],
)
def test_a_cell_that_goes_wrong_is_named_and_ends_alone(trials, text, kind, message):
    first, bad = tried(trials, "print(math.pi)", text)
    assert first.output == "3.141592653589793\n"
    assert bad.failure.kind == kind and message in bad.failure.message
    assert tried(trials, "assert 1 == 1")[0].failure is None, "the next trial does not notice"


def test_a_failed_assertion_shows_what_it_compared(trials):
    def got(text: str) -> str:
        return tried(trials, f"import numpy as np\na = np.arange(100.0)\n{text}")[0].failure.got

    assert got("assert 1 + 1 == 3") == "`1 + 1` is 2"
    assert got("x = 5\nassert True and x == max(7, 2), 'no'") == "`x` is 5; `max(7, 2)` is 7"
    assert got("assert np.allclose(a, a + 1)") == (
        "`a` is [100] of float64, from 0 to 99; `a + 1` is [100] of float64, from 1 to 100"
    )
    assert got("assert a is None") == "`a` is [100] of float64, from 0 to 99"
    assert "all of them NaN" in got("assert (a * np.nan) is None")
    assert "all 0" in got("assert (a * 0) is None")
    assert got("assert not a.any()") == "", "then the message must do"


def test_secrets_of_the_teacher_stay_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HARMLESS", "1")
    with Trials(tmp_path, "import os", QUICK) as trials:
        (done,) = tried(trials, "print(os.environ.get('HF_TOKEN'), os.environ.get('HARMLESS'))")
    assert done.output == "None 1\n"


def test_prints_of_megabytes_are_cut_and_leave_nothing_behind(trials):
    loud, raw = tried(
        trials,
        "import sys\nprint('x' * 30_000_000)\nprint('y' * 1000, file=sys.stderr)",
        "import os\nfor _ in range(20_000): os.write(1, b'x' * 1000)\nos.system('echo out; echo err >&2')",
    )
    assert len(loud.output) < 3000 and "more characters, not kept" in loud.output
    assert loud.failure is None and raw.failure is None


def test_a_loop_that_catches_everything_and_a_killed_server_cost_one_trial(trials):
    stubborn = "while True:\n  try:\n    while True: pass\n  except BaseException: pass"
    before, bad, _ = tried(trials, "x = 1", stubborn, "x")
    assert before.failure is None and bad.failure is not None
    tried(trials, "import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    assert tried(trials, "math.pi")[0].failure is None


def test_one_trial_does_not_change_the_next(trials):
    tried(
        trials,
        "import os, textwrap\ntextwrap.dedent = 3\nos.environ['LEFT'] = '1'\nopen('left', 'w').close()",
    )
    (done,) = tried(
        trials,
        "import os, textwrap\nassert textwrap.dedent('')==''\nassert 'LEFT' not in os.environ and not os.listdir()",
    )
    assert done.failure is None, done.failure


# ---- what a student's cell changes for the whole process

HOOKS = {
    "ast_transformers": """
import ast
class NoTests(ast.NodeTransformer):
    def visit_Assert(self, node):
        return ast.Pass()
get_ipython().ast_transformers.append(NoTests())""",
    "ast_transformers, another list": """
import ast
class NoTests(ast.NodeTransformer):
    def visit_Assert(self, node):
        return ast.Pass()
get_ipython().ast_transformers = [NoTests()]""",
    "input_transformers": """
get_ipython().input_transformers_post.append(lambda lines: ["pass\\n"])
get_ipython().input_transformers_cleanup.append(lambda lines: ["pass\\n"])""",
    "events": """
def fix(*_):
    get_ipython().user_ns["double"] = lambda x: x + x
get_ipython().events.register("pre_run_cell", fix)
get_ipython().events.register("pre_execute", fix)""",
    "builtins": """
import builtins
builtins.abs = lambda x: 0
builtins.isinstance = lambda *_: True
builtins.len = lambda x: 2
builtins.AssertionError = Warning
builtins.print = None""",
    "torch": """
import torch
torch.equal = torch.allclose = lambda *_, **__: True
torch.testing.assert_close = print
torch.Tensor.__eq__ = lambda a, b: torch.tensor(True)
torch.Tensor.item = lambda a: 4""",
    "numpy and math": """
import math, numpy
math.isclose = numpy.allclose = lambda *_, **__: True""",
    "trace": "import sys\nsys.settrace(lambda *_: None)\nsys.setrecursionlimit(200)",
}
CHECKS = """import math, numpy, torch
assert isinstance(double(1), int) and not isinstance(1, str), "isinstance"
assert not torch.equal(torch.ones(2), torch.zeros(2)), "torch.equal"
assert not torch.allclose(torch.ones(2), torch.zeros(2)), "torch.allclose"
assert not (torch.ones(2) == torch.zeros(2)).any() and torch.tensor(5).item() == 5, "tensors"
assert not math.isclose(1, 2) and not numpy.allclose(1, 2), "isclose"
try:
    torch.testing.assert_close(torch.ones(2), torch.zeros(2))
except AssertionError:
    print("fine")
else:
    raise ValueError("assert_close")
assert abs(-2) == 2 and len("abc") == 3, "abs, len"
def deep(n):
    return n and deep(n - 1)
assert deep(500) == 0, "recursion"
"""


@pytest.fixture(scope="module")
def torch_trials(tmp_path_factory):
    limits = Limits(cell_seconds=9)
    with Trials(tmp_path_factory.mktemp("root"), f"double = abs\n{CHECKS}", limits) as trials:
        yield trials  # what these need is loaded once, in the setup


@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_cell_changes_for_the_process_does_not_reach_the_test(torch_trials, hook):
    """Neither does it let a wrong solution pass, nor does it fail a right one."""
    own = f"{HOOKS[hook]}\ndef double(x):\n    return "
    for solution, state in (("x + x", "right"), ("3 * x", "wrong")):
        cells = [("double", own + solution), ("test", f"{CHECKS}assert double(2) == 4, 'four'")]
        test = torch_trials.run(cells, test="test")[-1]
        assert ("wrong" if test.failure else "right") == state, (test.failure, solution)
        assert test.failure is None or test.failure.message == "four"
        assert test.output == "fine\n"


def test_names_of_python_mean_in_a_test_what_python_means(torch_trials):
    """A variable called `sum` in a student's cell costs nobody the test; the student's function goes on using it."""
    own = "import torch\nsum = max = 3\nlist = [1]\ntorch.set_default_dtype(torch.float64)\ndef double(x):\n    return x * max - x"
    test = (
        "import torch\ndef f(min):\n    return min\nassert f(3) == 3\n"
        "assert sum([double(2), max(1, 2)]) == 6 and list('ab') == ['a', 'b']\n"
        "assert torch.ones(1).dtype == torch.float32\nid = 5\nassert id == 5"
    )
    assert torch_trials.run([("double", own), ("test", test)], test="test")[-1].failure is None
    without = torch_trials.run([("double", own), ("test", test)])[-1]
    assert "not callable" in without.failure.message


def test_what_the_setup_cell_sets_up_stays(tmp_path):
    setup = "import ast\nclass Twice(ast.NodeTransformer):\n    def visit_Constant(self, node):\n        return ast.Constant(2 * node.value)\nget_ipython().ast_transformers.append(Twice())"
    with Trials(tmp_path, setup, QUICK) as trials:
        assert [o.output for o in tried(trials, "print(2)", "print(3)")] == ["4\n", "6\n"]


# What Windows has not. Python runs a file of this name when it starts.
WITHOUT_FORK = """import os, signal, sys
for module, names in (
    (os, "fork forkpty setsid killpg waitid"),
    (signal, "setitimer SIGALRM SIGCHLD sigtimedwait pthread_sigmask SIGXFSZ SIGKILL"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.modules["resource"] = None
"""


@pytest.fixture
def without_fork(tmp_path, monkeypatch) -> Path:
    """A folder whose trials find themselves on a system without fork, signals and limits of resources."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_FORK)
    monkeypatch.delattr(os, "killpg", raising=False)
    monkeypatch.setattr("trials.GRACE", 0.3)
    return tmp_path


def test_without_fork_each_trial_has_a_process_of_its_own(without_fork):
    limits = Limits(cell_seconds=0.5, seconds=3, output=2000, memory=1500)
    with Trials(without_fork, "import math, os", limits) as trials:
        (fork,) = tried(trials, "print(hasattr(os, 'fork'))")
        assert fork.output == "False\n"
        first, bad, after = tried(trials, "os.pi = 3", "assert os.pi == 4, 'pi'", "os.pi")
        assert bad.failure.message == "pi" and bad.failure.got == "`os.pi` is 3"
        assert first.failure is after.failure is None
        assert tried(trials, "assert not hasattr(os, 'pi')")[0].failure is None, "a new process"
        before, loop, late = tried(trials, "print(1)", "while True: pass", "print(2)")
        assert before.output == "1\n" and "longer than 0.5 s" in loop.failure.message
        assert late.failure.message == "not run, because cell c1 ended the process"
        (gone,) = tried(trials, "os._exit(3)")
        assert gone.failure.kind == "Stopped"
        assert tried(trials, "print('x' * 5000)")[0].output.startswith("x" * 2000)


def test_without_fork_a_notebook_is_graded_as_elsewhere(without_fork, small, shapes):
    wrong = "#| export\ndef double(x):\n    return 2 * x + 0.5"
    handed_in(without_fork, "one", solved(shapes, double=wrong))
    root = grading.stubbed_package(shapes, read_chapters(small), without_fork)
    with Trials(root, "import llm_engine", QUICK) as trials:
        path = without_fork / "one" / "11_shapes.ipynb"
        verdicts = grading.grade_notebook(path, shapes, trials, 60)
    assert [v.state for v in verdicts] == ["wrong", "right", "right"]
    assert verdicts[0].message == "twice two is four. Here `double(2)` is 4.5"


def alive(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.skipif(not hasattr(signal, "sigtimedwait"), reason="nothing to wait with")
def test_a_trial_ends_with_the_program_that_started_it(tmp_path):
    """Also where that was killed: a loop that nobody would end."""
    place = tmp_path / "pid"
    cell = f"import os\nopen({str(place)!r}, 'w').write(str(os.getpid()))\nwhile True: pass"
    program = f"""from pathlib import Path
from trials import Trials

Trials(Path({str(tmp_path)!r}), "").run([("a", {cell!r})])
"""
    env = ENV | {"PYTHONPATH": str(ROOT / "chapters")}
    teacher = subprocess.Popen([sys.executable, "-c", program], env=env)
    try:
        wait_until(lambda: place.exists() and place.read_text())
        pid = int(place.read_text())
        assert alive(pid)
    finally:
        teacher.kill()
        teacher.wait()
    wait_until(lambda: not alive(pid))


def wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.05)


# ---- grading


def graded_rows(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "scores.csv").open(encoding="utf-8-sig") as file:
        return {row["student"]: row for row in csv.DictReader(file)}


def details(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    with (folder / "details.csv").open(encoding="utf-8-sig") as file:
        return {(row["student"], row["exercise"]): row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def course(small, shapes, tmp_path_factory) -> Path:
    """What a whole course handed in for 11_shapes, graded."""
    place = tmp_path_factory.mktemp("grading")
    folder = place / "submitted"
    stubs = classroom.student_version(shapes, set())["cells"]
    # each student costs a second; mistakes in different exercises share a notebook
    handed_in(place / "unpacked", ".", solved(shapes))
    folder.mkdir()
    shutil.make_archive(str(folder / "solved"), "zip", place / "unpacked")
    handed_in(folder, "stubs", stubs)
    handed_in(
        folder, "wrong", solved(shapes, double="#| export\ndef double(x):\n    return 2 * x + 0.5")
    )
    missing = "#| export\nimport nothing_of_this_name\n\n\ndef area(r):\n    return 3.14159 * r**2"
    whole = "#| export\ndef double(x):\n    return int(x) * 2"
    handed_in(folder, "hidden", solved(shapes, double=whole, area=missing))
    handed_in(
        folder,
        "tampered",
        [
            cell if cell["id"] != "test-area" else code("test-area", "pass", grade=True, points=99)
            for cell in solved(
                shapes, test_double="pass", area="#| export\ndef area(r):\n    return 0"
            )
        ],
    )
    loops = solved(shapes, double="#| export\ndef double(x):\n    while True: pass")
    loops.remove(cell_of(loops, "test-double"))
    loops.remove(cell_of(loops, "area"))
    handed_in(folder, "loops", loops)
    handed_in(
        folder, "exits", solved(shapes, double="import os\nos._exit(0)", demo="while True: pass")
    )
    loud = "#| export\ndef double(x):\n    print('<script>x</script>' * 100_000)\n    return x + x"
    handed_in(folder, "loud", solved(shapes, double=loud, imports="import nothing_of_this_name"))
    handed_in(folder, "broken", '{"cells": [')
    answer = (
        "#| export\ndef double(x):\n    import llm_engine.shapes as s\n\n    return s.double(x)"
    )
    handed_in(folder, "cheats", solved(shapes, double=answer))
    handed_in(
        folder,
        "patches",
        solved(shapes, imports="import math\nmath.pi = 3", double=shapes.exercises["double"].stub),
    )
    handed_in(folder, "=cmd()", solved(shapes), name="homework (1)")
    (folder / "nobody").mkdir()
    book = read_chapters(small)
    handed, strays = grading.collect(place, book, place / "room")
    assert strays == []
    grading.grade(handed, [shapes], book, place / "graded", limits=QUICK)
    return place / "graded"


POINTS = {  # double 2, area 3, quadruple 1
    "solved": "2 3 1",
    "stubs": "0 0 0",
    "wrong": "0 3 1",  # quadruple uses double, and is not to blame
    "hidden": "0 0 1",
    "tampered": "2 0 1",
    "loops": "0 0 1",
    "exits": "0 3 1",
    "loud": "2 3 1",
    "broken": "0 0 0",
    "cheats": "0 3 1",
    "patches": "0 3 1",
    "'=cmd()": "2 3 1",
    "nobody": "0 0 0",
}


def test_each_mistake_costs_its_own_points_and_no_others(course):
    rows = graded_rows(course)
    exercise_columns = ("11_shapes:double", "11_shapes:area", "11_shapes:quadruple")
    found = {who: " ".join(row[e] for e in exercise_columns) for who, row in rows.items()}
    assert found == POINTS
    assert "not JSON" in rows["broken"]["notes"] and not rows["solved"]["notes"]
    for who, row in rows.items():
        assert float(row["points"]) == sum(map(int, POINTS[who].split())) and row["of"] == "6"


def test_the_gradebook_is_nbgraders_and_says_the_same(course):
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{course}/nbgrader/gradebook.db") as book:
        found = {
            s.student.id: s.score for s in book.find_assignment(grading.ASSIGNMENT).submissions
        }
        cell = book.find_grade_cell("test-double", "11_shapes", grading.ASSIGNMENT)
        assert cell.max_score == 2
    want = {w.replace("'=cmd()", "_cmd__"): sum(map(int, p.split())) for w, p in POINTS.items()}
    assert found == want


def test_the_details_say_why(course):
    found = details(course)
    said = {key: row["message"] for key, row in found.items()}
    assert said["wrong", "double"] == "twice two is four. Here `double(2)` is 4.5"
    assert (
        "longer than 2 s" in said["loops", "double"] and "endless loop" in said["loops", "double"]
    )
    assert "exit code 0" in said["exits", "double"]
    assert "nothing_of_this_name" in said["hidden", "area"]
    assert said["loops", "area"] == "not found in the notebook"
    assert "not JSON" in said["broken", "double"]
    assert said["nobody", "double"] == "not handed in"
    assert "exercise double: not written yet" in said["cheats", "double"], "no answer to import"
    assert all(row["state"] == "stub" for (who, _), row in found.items() if who == "stubs")


def test_pages_of_feedback_teach_and_hide_the_hidden_tests(course):
    pages = {p.parent.name: p.read_text("utf8") for p in (course / "feedback").rglob("*.html")}
    assert pages.keys() == {w.replace("'=cmd()", "_cmd__") for w in POINTS}
    assert "Score: 4.0 / 6.0" in pages["wrong"] and "twice two is four" in pages["wrong"]
    assert "kept for grading: also words" not in pages["wrong"]
    assert "One of the tests that are kept for grading" not in pages["wrong"]
    assert "In one of the tests that are kept for grading: ValueError" in pages["hidden"]
    for who, page in pages.items():
        assert "abab" not in page, "a hidden test"
        assert "cdnjs" not in page and "<script>x" not in page
        assert len(page) < 1_000_000, who
    assert "more characters, not kept" in pages["loud"]
    tampered = pages["tampered"]
    assert "twice two is four" in tampered and "Score: 3.0 / 6.0" in tampered, "tests are restored"


def test_pages_name_student_and_exercises_and_the_error_they_tell(course):
    page = (course / "feedback" / "wrong" / "11_shapes.html").read_text("utf8")
    assert "Test cell" not in page and '<a href="#test-double">double</a>' in page
    assert "11_shapes, wrong" in page
    page = (course / "feedback" / "hidden" / "11_shapes.html").read_text("utf8")
    assert "NameError: cell" not in page


def test_what_is_printed_while_an_assertion_is_explained_is_dropped(trials):
    (done,) = tried(trials, "def f():\n    print('once')\n    return 1\nassert f() == 2")
    assert done.failure.got == "`f()` is 1" and done.output == "once\n"


def test_submissions_are_found_in_every_layout(small, shapes, tmp_path):
    book = read_chapters(small)
    cells = solved(shapes)
    place = tmp_path / "in"
    handed_in(place / "submitted", "nbgrader/week1", cells)
    assert grading.collect(place, book)[0][0].files.keys() == {"11_shapes"}
    flat = tmp_path / "flat"
    for name in ("li_11_shapes", "11_shapes_wu", "kim 11_shapes (1)", "11_shapes-Copy1"):
        handed_in(flat, ".", cells, name=name)
    found = {h.student: list(h.files) for h in grading.collect(flat, book)[0]}
    assert found.keys() == {"li", "wu", "kim", "11_shapes-Copy1"}
    assert set(map(tuple, found.values())) == {("11_shapes",)}
    mixed = tmp_path / "mixed"
    handed_in(mixed, "ann", cells, name="my homework")  # known by its cells
    handed_in(mixed, "ann", [code("a", "x = 1")], name="scratch")
    handed_in(mixed, "bob", "no notebook", name="12-bob")  # known by its number
    handed_in(mixed, "eve", cells)
    handed_in(mixed, "eve", cells, name="11_shapes_old")
    classroom.release(
        ["12"], mixed / "zoe", folder=small
    )  # a whole folder, with chapter 11 complete
    ann, bob, eve, zoe = grading.collect(mixed, book)[0]
    assert ann.files["11_shapes"].stem == "my homework"
    assert ann.notes == ["scratch.ipynb: no chapter of the book could be recognized in it"]
    assert list(bob.files) == ["12_later"]
    assert eve.files["11_shapes"].stem == "11_shapes"
    assert eve.notes == ["11_shapes: 11_shapes.ipynb counts, 11_shapes_old.ipynb does not"]
    assert list(zoe.files) == ["12_later"], "nobody is graded for the reference they were given"


def zipped(place: Path, files: dict[str, str | bytes]) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in files.items():
            file.writestr(name, text)
    return place


def test_zip_files_are_read_in_the_layouts_of_course_systems(small, shapes, tmp_path):
    book, work, name = (
        read_chapters(small),
        json.dumps(notebook(*solved(shapes))),
        "11_shapes.ipynb",
    )
    every = tmp_path / "in"
    zipped(every / "ash.zip", {name: work})
    zipped(
        every / "birch.ZIP",
        {f"week 1/chapters/{name}": work, f"week 1/chapters/released/{name}": work},
    )
    zipped(every / "cedar" / "homework.zip", {f"__MACOSX/._{name}": b"\0", f"a/{name}": work})
    handed_in(every, "elm", solved(shapes))
    zipped(every / "oak_77_assignsubmission_file_11_shapes.zip", {name: work})
    (every / "fir.tar").write_text("")
    handed, strays = grading.collect(every, book, tmp_path / "room")
    assert {h.student: list(h.files) for h in handed} == {
        who: ["11_shapes"] for who in ("ash", "birch", "cedar", "elm", "oak_77")
    }
    assert strays == ["fir.tar: unpack it first, into a folder named after the student"]
    assert [h.notes for h in handed] == [[], [], [], [], []]
    inner = zipped(tmp_path / "inner.zip", {name: work}).read_bytes()
    for number, (files, students) in enumerate(
        [
            ({f"ash/{name}": work, f"birch/{name}": work}, {"ash", "birch"}),
            ({f"export/ash/{name}": work, "export/birch/own.zip": inner}, {"ash", "birch"}),
            ({f"ash_1_assignsubmission_file_/{name}": work, f"ash_2_assignsubmission_file_/{name}": work},
             {"ash_1", "ash_2"}),
            ({f"ash_{name}": work, f"birch_{name}": work}, {"ash", "birch"}),
            ({f"submitted/ash/ps1/{name}": work}, {"ash"}),
            ({f"ash/chapters/{name}": work, f"ash/chapters/released/{name}": work}, {"ash"}),
            ({f"ash/{name}": work}, {"ash"}),
        ]
    ):  # fmt: skip
        archive = zipped(tmp_path / f"{number}" / "export.zip", files)
        found, strays = grading.collect(archive, book, tmp_path / "room")
        assert {h.student for h in found} == students and not strays, files
        assert all(list(h.files) == ["11_shapes"] for h in found)
        if len(students) > 1:  # as the only file of a folder
            found, _ = grading.collect(archive.parent, book, tmp_path / "room")
            assert {h.student for h in found} == students
    assert all(
        h.student == "export" for h in grading.collect(tmp_path / "5", book, tmp_path / "room")[0]
    )


def test_a_zip_file_writes_nothing_outside_and_no_more_than_it_may(small, tmp_path, monkeypatch):
    room = tmp_path / "place" / "room"
    link = zipfile.ZipInfo("link.ipynb")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    names = [
        "../../up.ipynb",
        "/abs.ipynb",
        "a/../../up.ipynb",
        "..\\up.ipynb",
        "C:\\up.ipynb",
        "fine/ü.ipynb",
    ]
    notes: list[str] = []
    archive = zipped(tmp_path / "evil.zip", dict.fromkeys(names, "{}") | {"program.py": "1"})
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(link, "/etc/passwd")
    place = grading.unpack(archive, room, notes)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["evil.zip", "ü.ipynb"]
    assert place.is_relative_to(room) and not any(p.is_symlink() for p in room.rglob("*"))
    assert notes == [
        "evil.zip: left out, since it is a link or lies elsewhere: "
        "up.ipynb, abs.ipynb, up.ipynb, up.ipynb, up.ipynb"
    ]
    monkeypatch.setattr(grading, "MOST_BYTES", 1000)
    bomb = zipped(tmp_path / "bomb.zip", {"a.ipynb": b"0" * 900, "b.ipynb": b"0" * 5_000_000})
    assert grading.unpack(bomb, room, notes) is None and "more than 1,000 bytes" in notes[-1]
    monkeypatch.setattr(grading, "MOST_FILES", 5)
    many = zipped(tmp_path / "many.zip", {f"{n}.ipynb": "" for n in range(6)})
    assert grading.unpack(many, room, notes) is None and "6 files" in notes[-1]
    for text in (b"", b"PK\3\4 nothing", bomb.read_bytes()[:-30]):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / "ann.zip").write_bytes(text)
        handed, strays = grading.collect(tmp_path / "in", read_chapters(small), room)
        assert [h.student for h in handed] == ["ann"] and not handed[0].files, "graded with 0"
        assert "ann.zip: it cannot be unpacked" in handed[0].notes[0] and not strays


def test_nobody_is_graded_where_the_reference_itself_fails(small, shapes, tmp_path):
    broken = json.loads(json.dumps(shapes.notebook))
    cell_of(broken["cells"], "double")["source"] = source(shapes.code["double"]).replace(
        "+ x", "+ y"
    )
    with pytest.raises(classroom.ClassroomError, match=r"double cannot be graded here.*'y'"):
        grading.grade([], [Chapter("11_shapes", broken)], read_chapters(small), tmp_path / "to")
    broken["cells"][0]["source"] = "import no_such_module"
    with pytest.raises(classroom.ClassroomError, match="no_such_module"):
        grading.grade([], [Chapter("11_shapes", broken)], read_chapters(small), tmp_path / "to")
    assert not list((tmp_path / "to").iterdir()), "and the next try may use this folder"


def test_a_given_cell_that_fails_is_not_the_students_loss(small, shapes, tmp_path):
    """The book's cell `imports` is slow once, then broken: the first costs nothing, the second is said and is no wrong answer."""
    waits = "import os, time\nif os.path.exists({!r}):\n    {}"
    once, broken = tmp_path / "once", tmp_path / "broken"
    slow = waits.format(str(once), f"os.remove({str(once)!r})\n    while True: pass")
    stop = waits.format(str(broken), "raise OSError('no room')")
    given = json.loads(json.dumps(shapes.notebook))
    cell_of(given["cells"], "imports")["source"] = (
        f"#| default_exp shapes\n#| export\n{slow}\n{stop}\nimport math"
    )
    chapter = Chapter("11_shapes", given)
    for student in ("1 ann", "2 bob"):
        handed_in(tmp_path / "in", student, solved(shapes))
    handed, _ = grading.collect(tmp_path / "in", read_chapters(small))

    def step(text: str) -> None:
        if text.startswith(("1 ann, 11", "2 bob, 11")):
            (once if text[0] == "1" else broken).touch()

    limits = Limits(cell_seconds=1)
    book = read_chapters(small)
    graded = grading.grade(handed, [chapter], book, tmp_path / "to", limits=limits, step=step)
    assert [g.total for g in graded] == [6, 3]
    rows = graded_rows(tmp_path / "to")
    assert (
        rows["1 ann"]["11_shapes:area"] == "3" and rows["2 bob"]["11_shapes:area"] == "not graded"
    )
    assert "not graded: the given cell imports stopped. OSError: no room" in rows["2 bob"]["notes"]
    assert details(tmp_path / "to")["2 bob", "area"]["state"] == "ungraded"


def test_grading_that_is_stopped_keeps_what_is_done_and_goes_on(
    small, shapes, tmp_path, monkeypatch
):
    for student in ("ann", "bob"):
        handed_in(tmp_path / "in", student, solved(shapes))
    book, ran, stops, to = read_chapters(small), [], ["bob"], tmp_path / "to"
    whole = grading.grade_notebook

    def watched(path, *more):
        ran.append(path.parent.name)
        if path.parent.name in stops:
            raise KeyboardInterrupt
        return whole(path, *more)

    monkeypatch.setattr(grading, "grade_notebook", watched)

    def graded(**more) -> dict[str, str]:
        ran.clear()
        handed, _ = grading.collect(tmp_path / "in", book)
        grading.grade(handed, [shapes], book, to, limits=QUICK, **more)
        return {who: row["points"] for who, row in graded_rows(to).items()}

    with pytest.raises(grading.Interrupted, match="1 of 2"):
        graded()
    rows = graded_rows(to)
    assert (rows["ann"]["points"], rows["bob"]["11_shapes:area"]) == ("6", "not graded yet")
    assert not list(to.glob(".*.new"))
    stops.clear()
    page = to / "feedback" / "ann" / "11_shapes.html"
    before = page.stat().st_mtime_ns
    assert graded() == {"ann": "6", "bob": "6"}
    assert ran == ["bob"], "what was graded is not run again"
    assert page.stat().st_mtime_ns == before

    wrong = "#| export\ndef double(x):\n    return 3 * x"
    handed_in(tmp_path / "in", "bob", solved(shapes, double=wrong))
    shutil.rmtree(to / "nbgrader")
    assert graded() == {"ann": "6", "bob": "4"}, "also where the gradebook was lost"
    assert ran == ["bob"], "what has changed is run"
    assert "twice two is four" in (to / "feedback" / "bob" / "11_shapes.html").read_text("utf8")
    assert details(to)["bob", "double"]["message"].startswith("twice two is four")
    assert graded(again=True) == {"ann": "6", "bob": "4"} and ran == ["ann", "bob"]
    with pytest.raises(classroom.ClassroomError, match="has grades of 11_shapes, too"):
        grading.grade([], [book["12_later"]], book, to)


@pytest.mark.parametrize("way", ["SIGINT", "SIGTERM"])
def test_the_grade_command_says_how_to_go_on(small, shapes, tmp_path, monkeypatch, capsys, way):
    def grade(*_, **__):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), getattr(signal, way))
            time.sleep(60)
        raise grading.Interrupted(1, 2)

    monkeypatch.setattr(grading, "grade", grade)
    monkeypatch.setattr(classroom, "CHAPTERS", small)
    monkeypatch.setattr(classroom, "read_chapters", lambda: read_chapters(small))
    handed_in(tmp_path / "in", "ann", solved(shapes))
    term = signal.getsignal(signal.SIGTERM)
    # who runs tests in the background may have it ignored
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(classroom.typer.Exit) as end:
            classroom.grade_command(tmp_path / "in", ["11"], tmp_path / "to", 1, 1, 100, False)
    finally:
        signal.signal(signal.SIGINT, interrupt)
    assert end.value.exit_code == 130 and signal.getsignal(signal.SIGTERM) is term
    assert "1 of 2 notebooks are graded" in capsys.readouterr().out
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(classroom.ClassroomError, match="not from grading"):
        classroom.grade_command(tmp_path / "in", ["11"], tmp_path / "mine", 1, 1, 100, False)


def test_grading_ends_with_1_if_something_could_not_be_graded(tmp_path, monkeypatch):
    handed_in(tmp_path / "in", "ann", solved(BOOK["11_config"]), name="11_config")
    one = BOOK["11_config"].exercises["read-eos"]
    verdict = exercises.Verdict(one, "ungraded", "not graded: no room")
    result = grading.Graded("ann", {"11_config": [verdict]}, {}, ["not graded"])
    monkeypatch.setattr(grading, "grade", lambda *_, **__: [result])
    with pytest.raises(classroom.typer.Exit) as end:
        classroom.grade_command(tmp_path / "in", ["11"], tmp_path / "to", 1, 1, 100, False)
    assert end.value.exit_code == 1


def test_what_given_cells_import_is_loaded_before_the_trials(tmp_path):
    wanted = exercises.imports_of(BOOK["15_attention"])
    assert any("transformers" in text for text in wanted)
    assert not any("llm_engine" in text for text in wanted)
    with Trials(tmp_path, "", QUICK, ["import no_such_module", "import wave"]) as trials:
        (done,) = tried(trials, "import sys\nprint('wave' in sys.modules)")
    assert done.output == "True\n"


def test_seconds_are_seconds_of_computing(tmp_path):
    with Trials(tmp_path, "import time", Limits(cell_seconds=0.5)) as trials:
        busy, slept = tried(trials, "while True: pass", "time.sleep(0.8)\nprint(1)")
        assert busy.failure.kind == "OutOfTime" and slept.failure is None
        assert tried(trials, "time.sleep(9)")[0].failure.kind == "OutOfTime"


def test_of_two_attempts_the_one_with_more_written_counts(small, shapes, tmp_path):
    stubs = classroom.student_version(shapes, set())["cells"]
    handed_in(tmp_path, "ann", stubs)
    handed_in(tmp_path, "ann", solved(shapes), name="11_shapes-v2")
    handed_in(tmp_path, "bob", solved(shapes))
    handed_in(tmp_path, "bob/old", stubs)
    handed_in(tmp_path, "eve", solved(shapes))
    handed_in(tmp_path, "eve/old", solved(shapes))
    handed_in(tmp_path, "kim", "no notebook")
    handed_in(tmp_path, "kim", stubs, name="kim 11_shapes")
    found = {h.student: h for h in grading.collect(tmp_path, read_chapters(small))[0]}
    assert found["ann"].files["11_shapes"].stem == "11_shapes-v2"
    for student in ("bob", "eve"):
        assert found[student].files["11_shapes"] == tmp_path / student / "11_shapes.ipynb"
        assert found[student].notes == [
            "11_shapes: 11_shapes.ipynb counts, old/11_shapes.ipynb does not"
        ]
    assert found["kim"].files["11_shapes"].stem == "kim 11_shapes"


def test_a_submission_has_its_time(small, shapes, tmp_path):
    loop = "#| export\ndef {}(x):\n    while True: pass"
    cells = solved(shapes, double=loop.format("double"), area=loop.format("area"))
    handed_in(tmp_path, "slow", cells)
    root = grading.stubbed_package(shapes, read_chapters(small), tmp_path / "root")
    limits = Limits(cell_seconds=1)
    with Trials(root, "import llm_engine", limits) as trials:
        verdicts = grading.grade_notebook(
            tmp_path / "slow" / "11_shapes.ipynb", shapes, trials, 0.2
        )
    assert "longer than 1 s" in verdicts[0].message
    assert all("used up before" in v.message for v in verdicts[1:])


# ---- grading the real chapters


def test_what_the_tests_of_a_chapter_need_is_there_when_it_is_graded():
    """Nothing of later chapters; a student who begins the chapter has no more."""
    first: dict[str, int] = {}
    for cell in sync.exported_cells(sync.read_notebooks()):
        first.setdefault(cell.module, cell.chapter)
    for chapter in BOOK.values():
        cells = {i: source(c) for i, c in chapter.code.items() if i != "setup"}
        for one in chapter.exercises.values():
            for cell_id in [*exercises.needed(cells, one.test_id), one.test_id]:
                for module in exercises.imported_modules(cells[cell_id]):
                    used = first.get(module, 0)
                    assert used <= chapter.number, f"{one.key}: cell {cell_id} uses {module}"


def test_a_planted_wrong_solution_loses_exactly_its_points(tmp_path):
    """Chapter 16, whose exercises use each other, and whose second module imports the first."""
    chapter = BOOK["16_ffn_and_transformer"]
    root = grading.stubbed_package(chapter, BOOK, tmp_path / "root")
    assert "not written yet" in (root / "llm_engine" / "ffn.py").read_text("utf8")
    assert not (root / "llm_engine" / "sampler.py").exists()
    with Trials(root, exercises.setup_of(chapter)) as trials:

        def states(**changes: str) -> dict[str, str]:
            handed_in(tmp_path, "one", solved(chapter, **changes), name=chapter.name)
            path = tmp_path / "one" / f"{chapter.name}.ipynb"
            verdicts = grading.grade_notebook(path, chapter, trials, 600)
            return {v.exercise.id: v.state for v in verdicts}

        assert set(states().values()) == {"right"}
        one = chapter.exercises["feed-forward"]  # on which the other two depend
        assert states(feed_forward=WRONG[one.key][0].apply(one.solution)) == {
            "feed-forward": "wrong",
            "block": "right",
            "runner": "right",
        }
