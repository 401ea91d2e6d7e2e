#!/usr/bin/env python3
"""Run chapters from top to bottom, each in a fresh kernel, and store their outputs.

    python chapters/run.py 15 16     run chapters 15 and 16
    python chapters/run.py all       run every chapter
    python chapters/run.py --tidy all  run nothing; only drop what editors leave in the files

A chapter that stops with an error is left as it was.
"""

import argparse
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

CHAPTERS = Path(__file__).resolve().parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
KEPT = (
    "nbgrader",
    "tags",
)  # what means something in a cell's metadata; the rest is an editor's memory


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Drop what depends on the editor or the machine: kernel versions, folded cells, timings."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict(
            {k: cell.metadata[k] for k in KEPT if k in cell.metadata}
        )


def execute(notebook: nbformat.NotebookNode, folder: Path = CHAPTERS, timeout: int = 600) -> None:
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # where a kernel's messages are cut depends on the moment
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()


def write(notebook: nbformat.NotebookNode, path: Path) -> None:
    """As Jupyter writes it: a line of source is a line of the file. Never half a file."""
    nbformat.validate(notebook)
    draft = path.with_suffix(".draft")
    draft.write_text(nbformat.writes(notebook, version=4) + "\n", "utf8", newline="\n")
    draft.replace(path)


def chosen(words: list[str]) -> list[Path]:
    if words == ["all"]:
        return sorted(CHAPTERS.glob("[0-9][0-9]_*.ipynb"))
    paths = []
    for word in words:
        found = sorted(CHAPTERS.glob(f"{Path(word).stem}*.ipynb")) if word else []
        if len(found) != 1:
            sys.exit(f"{word}: {len(found)} chapters begin so; give a number such as 15, or `all`")
        paths += found
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chapters", nargs="+", metavar="NN", help="numbers of chapters, or `all`")
    parser.add_argument("--tidy", action="store_true", help="only clean the files, run nothing")
    options = parser.parse_args()
    failed = 0
    for path in chosen(options.chapters):
        notebook, start = nbformat.read(path, as_version=4), time.perf_counter()
        tidy(notebook)
        try:
            if not options.tidy:
                execute(notebook)
        except CellExecutionError as error:
            print(f"{path.name}: stopped, nothing stored\n{error}", file=sys.stderr)
            failed += 1
            continue
        tidy(notebook)
        write(notebook, path)
        done = "tidied" if options.tidy else f"ran in {time.perf_counter() - start:.1f} s"
        print(f"{path.name}: {done}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
