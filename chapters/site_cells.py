"""How a chapter's cells become a page of the site: an extension of Sphinx, used by conf.py.

Code cells get an anchor, their id, so that `15_attention.html#attention` leads to a cell. What is written for scripts (directives,
exercise markers) is taken out of the shown code and said in words instead; setup and test cells are folded. The notebook that a
page offers for download is the file as it is.
"""

import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import nbformat
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sync import DIRECTIVE, SOLUTION, split_head

HIDDEN_TESTS = ("### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS")
FURTHER = "# further tests, taken out of the student version:"
PACKAGE = "llm_engine"
LINES = "line-of-a-cell"  # Pygments makes <span id="line-of-a-cell-1"> of each line
LINE = re.compile(rf'<span id="{LINES}-\d+">((?:<span class="\w+">)*)( *)(?=([^\n]*))')


def read(text: str) -> nbformat.NotebookNode:
    """A chapter as it is to be shown. What the page needs to know of a cell stands in its metadata, under `site`."""
    notebook = nbformat.reads(text, as_version=4)
    default = ""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        head, code = split_head(cell.source.rstrip().split("\n"))
        words = [DIRECTIVE.fullmatch(line).groups() for line in head if line.strip()]
        default = next((module for word, module in words if word == "default_exp"), default)
        module = next((m or default for word, m in words if word in ("export", "exporti")), "")
        shown, marked = without_markers(code)
        cell.source = "\n".join(shown)
        cell.metadata["site"] = {
            "id": cell.get("id", ""),
            "module": module,
            "directive": next((f"#| {word}" for word, _ in words if word.startswith("export")), ""),
            "marked": marked,
        }
        if not cell.source.strip():
            continue  # a cell that only names the module: not shown
        grader = cell.metadata.get("nbgrader", {})
        if grader.get("grade"):
            points = "1 point" if grader["points"] == 1 else f"{grader['points']} points"
            fold(cell, f"the tests of this exercise ({points})")
        elif any(word == "hide" for word, _ in words):
            fold(cell, "the setup, the same in every chapter" if is_setup(cell) else "this code")
    return notebook


def is_setup(cell) -> bool:
    return cell.get("id") == "setup"


def fold(cell, what: str) -> None:
    """Show the code of a cell only when asked for; what it printed is shown in any case."""
    cell.metadata.setdefault("tags", []).append("hide-input")
    cell.metadata["mystnb"] = {"code_prompt_show": f"Show {what}", "code_prompt_hide": "Hide it"}


def without_markers(code: list[str]) -> tuple[list[str], list[int]]:
    """The lines without exercise markers, and the numbers (from 1) of those that are a solution."""
    shown, marked, inside = [], [], False
    for line in code:
        if line.strip() in SOLUTION:
            inside = line.strip() == SOLUTION[0]
        elif line.strip() == HIDDEN_TESTS[0]:
            shown.append(FURTHER)
        elif line.strip() != HIDDEN_TESTS[1]:
            shown.append(line)
            if inside:
                marked.append(len(shown))
    return shown, marked


class Cells(SphinxTransform):
    """Anchors and captions of code cells, texts for figures."""

    default_priority = (
        750  # when headings have all their ids, before links within the page are resolved
    )

    def apply(self, **kwargs) -> None:
        slugs = self.env.metadata[self.env.docname].get("myst_slugs", {})
        for cell in list(self.document.findall(nodes.container)):
            site = cell.get("cell_metadata", {}).get("site")
            if cell.get("nb_element") == "cell_code" and site and site["id"]:
                self.anchor(cell, site["id"], slugs)
                source = cell[0]
                if source.get("nb_element") == "cell_code_source":
                    source[0]["highlight_args"] = {"linespans": LINES}
                    if site["marked"]:
                        source[0]["highlight_args"]["hl_lines"] = site["marked"]
                    if caption := list(self.caption(site)):
                        source["classes"].append("has-origin")
                        source.insert(0, nodes.paragraph("", "", *caption, classes=["origin"]))
            elif cell.get("nb_element") == "mime_bundle":
                self.describe(cell)

    def anchor(self, cell: nodes.Element, name: str, slugs: dict) -> None:
        """Give the cell its id as an anchor. A heading that has it (15 · Attention) makes way."""
        other = self.document.ids.get(name)
        if other is not None:
            new = f"{name}-section"
            other["ids"] = [new if i == name else i for i in other["ids"]]
            self.document.ids[new] = other
            for words, target in self.document.nameids.items():
                if target == name:
                    self.document.nameids[words] = new
            for slug, (line, target, title) in list(slugs.items()):
                if target == name:
                    slugs[slug] = (line, new, title)
        cell["ids"].append(name)
        self.document.ids[name] = cell
        slugs[name] = (cell.line or 0, name, name)  # so that links from other pages are checked

    def caption(self, site: dict) -> Iterator[nodes.Node]:
        """What the marked lines are; `#| export llm_engine.attention`, linked to its reference."""
        if site["marked"]:
            told = "exercise: in the student's version the marked lines are missing"
            yield nodes.inline("", told, classes=["exercise"])
        if site["module"]:
            yield nodes.inline("", site["directive"], classes=["directive"])
            name = PACKAGE if site["module"] == "__init__" else f"{PACKAGE}.{site['module']}"
            literal = nodes.literal(name, name)
            page = PACKAGE if site["module"] == "__init__" else site["module"]
            reference = addnodes.pending_xref(
                "",
                literal,
                refdomain="std",
                reftype="doc",
                reftarget=f"/reference/{page}",
                refexplicit=True,
                refwarn=True,
                refdoc=self.env.docname,
            )
            yield literal if site["module"] == "__main__" else reference

    def describe(self, bundle: nodes.Element) -> None:
        """A figure's text for those who can't see it: the digest that is published beside it."""
        parts = {part["mime_type"]: part for part in bundle.children}
        if {"image/png", "text/plain"} <= parts.keys():
            for image in parts["image/png"].findall(nodes.image):
                image["alt"] = parts["text/plain"].astext().strip().removeprefix("figure ")


def hang(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Give each line of code the class `line` and the column where its rest goes on, should it be too long for the page."""

    def opened(match: re.Match) -> str:
        tags, spaces, rest = match.groups()
        words = 'class="sd"' in tags or re.match(r'(<[^>]+>)*<span class="(c1|sd)"', rest)
        column = len(spaces) + (2 if words else 4)
        return f'<span class="line" style="--rest: {column}ch">{tags}{spaces}'

    if LINES in context.get("body", ""):
        context["body"] = LINE.sub(opened, context["body"])


def keep_beside(app: Sphinx) -> None:
    """The pictures that myst-nb unpacks: among the build's own files, not in a folder beside the site."""
    folder = Path(app.doctreedir) / "notebooks"
    app.env.mystnb_config = app.env.mystnb_config.copy(output_folder=str(folder.resolve()))


def setup(app: Sphinx) -> dict:
    app.add_transform(Cells)
    app.connect("builder-inited", keep_beside, priority=900)  # after myst-nb has read its settings
    app.connect("html-page-context", hang)
    version = zlib.crc32(Path(__file__).read_bytes())  # another one: every page is read anew
    return {"env_version": version, "parallel_read_safe": True, "parallel_write_safe": True}
