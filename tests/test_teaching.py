"""The instructor's guide: its tables are what the notebooks say, and every cell that it names is there."""

import re
import shlex
import sys
from pathlib import Path

import nbformat
import pytest
import typer
from reading_time import as_text, chapters, rounded
from wrong_solutions import WRONG

CHAPTERS = Path(__file__).resolve().parent.parent / "chapters"
sys.path.insert(0, str(CHAPTERS))
import classroom

GUIDE = (CHAPTERS / "teaching.md").read_text("utf8")
TIMES = chapters()
NUMBERS = {name[:2]: name for name in TIMES}
OPTIONAL = {"33", "34"}  # chapters that the five weeks leave out


def book() -> dict:
    paths = sorted(CHAPTERS.glob("[0-9][0-9]_*.ipynb"))
    return {path.stem: nbformat.read(path, as_version=4) for path in paths}


BOOK = book()


def section(title: str) -> str:
    """The part of the guide under a heading, subsections included."""
    level = GUIDE.partition(f" {title}\n")[0].rpartition("\n")[2]
    assert re.fullmatch("#+", level), f"no heading {title!r}"
    body = GUIDE.partition(f"{level} {title}\n")[2]
    return re.split(rf"\n#{{1,{len(level)}}} ", body)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of the first table in a text, without its head."""
    lines = text[text.index("\n|") + 1 :].split("\n")
    table = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), None)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def minutes(numbers: list[str]) -> int:
    """Reading and exercises of some chapters, as the table of hours has them."""
    times = [TIMES[NUMBERS[number]] for number in numbers]
    return sum(rounded(t.reading) + rounded(t.exercises) for t in times)


def linked(cell: str) -> list[str]:
    """Numbers of the chapters that a cell of a table links to."""
    return re.findall(r"\]\((\d\d)_\w+\.ipynb\)", cell)


def exercises() -> dict[tuple[str, str], int]:
    """(chapter, exercise) -> points, in the order of the book."""
    found = {}
    for name, notebook in BOOK.items():
        points = {c.id: c.metadata.get("nbgrader", {}).get("points") for c in notebook.cells}
        for cell in notebook.cells:
            if cell.metadata.get("nbgrader", {}).get("solution"):
                found[name, cell.id] = points[f"test-{cell.id}"]
    return found


# ---- the tables, as they should be


def hours_table() -> list[list[str]]:
    table = []
    for name, times in TIMES.items():
        first = next(cell for cell in BOOK[name].cells if cell.cell_type == "markdown")
        title = first.source.split("\n")[0].removeprefix("# ")
        link = f"[{title}]({name}.ipynb)"
        doing = as_text(rounded(times.exercises))
        table.append([link, as_text(rounded(times.reading)), str(times.points or "–"), doing])
    return table


def hours_and_points(numbers: list[str]) -> list[str]:
    points = sum(TIMES[NUMBERS[number]].points for number in numbers)
    return [as_text(minutes(numbers)), str(points)]


def test_the_table_of_hours():
    assert rows(section("Hours")) == hours_table()


def together() -> str:
    reading = as_text(sum(rounded(times.reading) for times in TIMES.values()))
    doing = as_text(sum(rounded(times.exercises) for times in TIMES.values()))
    points = sum(times.points for times in TIMES.values())
    return f"Together: {reading} of reading and {doing} of exercises, {points} points."


def test_the_sums_of_hours():
    assert f"\n{together()}" in section("Hours")


@pytest.mark.parametrize("title, left_out", [("Five weeks", OPTIONAL), ("Ten weeks", set())])
def test_a_syllabus(title, left_out):
    """Each chapter once and in order, and hours and points are the sums."""
    taught = []
    for week, (number, names, hours, points, *_) in enumerate(rows(section(title)), 1):
        assert number == str(week)
        taught += linked(names)
        assert [hours, points] == hours_and_points(linked(names)), f"{title}, week {week}"
    assert taught == [number for number in NUMBERS if number not in left_out]


def test_the_table_of_exercises():
    table = rows(section("The exercises"))
    found = [
        (f"{number}", link.groups(), points)
        for number, name, points, _ in table
        if (link := re.fullmatch(r"\[([\w-]+)\]\((\d\d_\w+)\.ipynb#([\w-]+)\)", name))
    ]
    expected = [
        (name[:2], (cell, name, cell), str(points)) for (name, cell), points in exercises().items()
    ]
    assert found == expected
    assert all(asks and not asks.endswith(".") for *_, asks in table)


# ---- misconceptions


def beliefs(name: str) -> list[str]:
    heading = next(
        line for line in GUIDE.split("\n") if line.startswith("### ") and f"({name}.ipynb)" in line
    )
    body = GUIDE.partition(heading)[2]
    body = re.split(r"\n#{1,3} ", body)[0]
    return [" ".join(b.split()) for b in re.findall(r"^\* (.+(?:\n  .+)*)", body, re.MULTILINE)]


@pytest.mark.parametrize("name", [name for name in TIMES if name[:2] >= "10"])
def test_misconceptions(name):
    """Two to four a chapter: what is believed, a question, and a cell of that chapter that settles it."""
    found = beliefs(name)
    assert 2 <= len(found) <= 4
    cells = {cell.id for cell in BOOK[name].cells if cell.cell_type == "code"}
    for belief in found:
        assert re.match(r"\*\*“.+”\*\*", belief), f"begins with what is believed: {belief}"
        asked, _, look = belief.partition(" Run ")
        assert "?" in asked, f"no question: {belief}"
        links = re.findall(rf"\({name}\.ipynb#([\w-]+)\)", look)
        assert links, f"no cell of {name}: {belief}"
        assert set(links) <= cells, f"no such cell: {set(links) - cells}"


def test_every_cell_that_is_linked_exists():
    for name, cell in re.findall(r"\((\d\d_\w+)\.ipynb#([\w-]+)\)", GUIDE):
        assert cell in {c.id for c in BOOK[name].cells}, f"{name}#{cell}"


def test_the_number_of_planted_wrong_solutions():
    assert f"has {sum(map(len, WRONG.values()))} plausible wrong solutions" in GUIDE


# ---- commands


def classroom_commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.+?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`((?:release|check|apply|overlay|grade) [^`]+)`", GUIDE)
    found = [line.partition("classroom.py ")[2] for block in blocks for line in block.split("\n")]
    return list(dict.fromkeys(command for command in [*found, *inline] if command))


def test_the_guide_shows_every_command_of_the_classroom():
    shown = {shlex.split(command, comments=True)[0] for command in classroom_commands()}
    assert shown == set(typer.main.get_command(classroom.app).commands)


@pytest.mark.parametrize("command", classroom_commands())
def test_commands_of_the_classroom_can_be_parsed(command):
    name, *arguments = shlex.split(command, comments=True)
    app = typer.main.get_command(classroom.app)
    if name == "release" and "--to" not in arguments:  # named in a sentence
        arguments += ["--to", "folder"]
    app.commands[name].make_context(name, list(arguments))
    chapters = [a for a in arguments if re.fullmatch(r"\d\d(-\d\d)?", a)]
    assert classroom.chosen(chapters, classroom.read_chapters()) or name in (
        "apply",
        "bring",
        "check",
    )


# ---- numbers of today


def refreshed(guide: str) -> str:
    """The guide with hours and points as the notebooks have them. New chapters and exercises need lines of their own first."""
    table = dict(zip(TIMES, hours_table(), strict=True))
    points = {f"{name}.ipynb#{cell}": n for (name, cell), n in exercises().items()}
    lines = []
    for line in guide.split("\n"):
        if week := re.fullmatch(r"(\| \d+ \| (\[\d\d\]\([^|]+) \|) [^|]+ \| \d+ (\| .+)", line):
            line = f"{week[1]} {' | '.join(hours_and_points(linked(week[2])))} {week[3]}"
        elif chapter := re.match(r"\| \[\d\d · [^|]+\]\((\w+)\.ipynb\) \|", line):
            line = f"| {' | '.join(table[chapter[1]])} |"
        elif exercise := re.fullmatch(r"(\| \d\d \| \[.+\]\((.+)\) \|) \d+ (\| .+)", line):
            line = f"{exercise[1]} {points[exercise[2]]} {exercise[3]}"
        elif line.startswith("Together: "):
            line = f"{together()}{line.partition(' points.')[2]}"
        lines.append(line)
    return "\n".join(lines)


def test_stale_numbers_are_refreshed():
    assert refreshed(GUIDE) == GUIDE, "run: python tests/test_teaching.py"
    stale = re.sub(r"\d+¼ h", "99 h", GUIDE.replace("109 points", "1 points"))
    assert stale != GUIDE and refreshed(stale) == GUIDE


if __name__ == "__main__":
    (CHAPTERS / "teaching.md").write_text(refreshed(GUIDE), "utf8")
