"""How long a chapter takes, by one rule that the pages state and the tests hold them to.

Reading: 200 words of prose and 20 lines of code a minute. Doing the exercises: 10 minutes a point.
`python tests/reading_time.py` writes the times into the front page and into chapter 00.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CHAPTERS = Path(__file__).resolve().parent.parent / "chapters"
WORDS_A_MINUTE, LINES_A_MINUTE, MINUTES_A_POINT = 200, 20, 10


@dataclass(frozen=True)
class Times:
    words: int
    lines: int
    points: int

    @property
    def reading(self) -> float:
        """Minutes."""
        return self.words / WORDS_A_MINUTE + self.lines / LINES_A_MINUTE

    @property
    def exercises(self) -> float:
        """Minutes."""
        return self.points * MINUTES_A_POINT


def rounded(minutes: float) -> int:
    """To the next quarter of an hour that is not less."""
    return -int(-minutes // 15) * 15


def as_text(minutes: int) -> str:
    """45 -> "45 min", 90 -> "1½ h", 0 -> "–"."""
    if minutes == 0:
        return "–"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60}{['', '¼', '½', '¾'][minutes % 60 // 15]} h"


def measure(notebook: Path) -> Times:
    """Count what a reader reads: prose, code without blank lines, and not the cells that grade."""
    words = lines = points = 0
    for cell in json.loads(notebook.read_text("utf8"))["cells"]:
        source = "".join(cell["source"])
        grading = cell["metadata"].get("nbgrader", {})
        points += grading.get("points", 0) if grading.get("grade") else 0
        if cell["cell_type"] == "markdown":
            text = re.sub(r"\]\([^)]*\)", "]", source)  # the address of a link is not read
            words += len(re.findall(r"\w[\w'’.,-]*", text))
        elif not grading.get("grade") and not source.startswith("#| hide"):
            lines += sum(bool(line.strip()) for line in source.splitlines())
    return Times(words, lines, points)


@cache
def chapters() -> dict[str, Times]:
    """Every chapter by its file name without the ending, in order."""
    return {path.stem: measure(path) for path in sorted(CHAPTERS.glob("[0-9][0-9]_*.ipynb"))}


ROW = re.compile(r"^\|[^|\n]*\[(\d\d) [^\n]*\|[^\n]*\|$", re.M)
TOTAL = re.compile(r"(order: )[^\n]*?( of reading[^\n]*?do them, )[^\n]*?( of exercises)")
WAY = re.compile(r"^(\* [^\n]*?)(?<=\d) \([^)\n]*\)", re.M)


def with_times(page: str) -> str:
    """A page in Markdown with the times of today in its tables of chapters and its lists of them.

    In a table the columns `reading` and `exercises` are filled, after the number of the chapter that a row links to. A
    list item that names chapters has the sum of their reading times in brackets after the last number.
    """
    times = {stem[:2]: time for stem, time in chapters().items()}
    columns: list[str] = []
    lines = []
    for line in page.split("\n"):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        row = ROW.match(line)
        if "reading" in cells:
            columns = cells
        elif not line.startswith("|"):
            columns = []
        elif columns and row:
            for name in {"reading", "exercises"} & set(columns):
                minutes = rounded(getattr(times[row[1]], name))
                cells[columns.index(name)] = as_text(minutes)
            line = f"| {' | '.join(cells)} |"
        lines.append(line)
    page = "\n".join(lines)

    def together(names, kind: str) -> str:
        return as_text(sum(rounded(getattr(times[name], kind)) for name in names))

    page = TOTAL.sub(
        lambda m: m[1] + together(times, "reading") + m[2] + together(times, "exercises") + m[3],
        page,
    )

    def way(match: re.Match) -> str:
        return f"{match[1]} ({together(re.findall('[0-9][0-9]', match[1]), 'reading')})"

    return WAY.sub(way, page)


def map_cell(notebook: dict) -> dict:
    """The cell of chapter 00 that holds the map."""
    return next(cell for cell in notebook["cells"] if cell["id"] == "map-table")


def main() -> None:
    front, start = CHAPTERS / "index.md", CHAPTERS / "00_start_here.ipynb"
    front.write_text(with_times(front.read_text("utf8")), "utf8")
    notebook = json.loads(start.read_text("utf8"))
    cell = map_cell(notebook)
    cell["source"] = with_times("".join(cell["source"])).splitlines(keepends=True)
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    start.write_text(text + "\n", "utf8")


if __name__ == "__main__":
    main()
