"""How long a chapter takes, by one rule that the pages state and the tests hold them to.

Reading: 200 words of prose and 20 lines of code a minute. Doing the exercises: 10 minutes a point.
"""

import json
import re
from dataclasses import dataclass
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


def chapters() -> dict[str, Times]:
    """Every chapter by its file name without the ending, in order."""
    return {path.stem: measure(path) for path in sorted(CHAPTERS.glob("[0-9][0-9]_*.ipynb"))}
