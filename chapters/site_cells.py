"""How a chapter's cells become a page of the site: an extension of Sphinx, used by conf.py.

Code cells get an anchor, their id, so that `15_attention.html#attention` leads to a cell. What is written for scripts (directives,
exercise markers) is taken out of the shown code and said in words instead; setup, long imports, tests and the solutions of exercises
are folded. Figures are shown larger than in a notebook. The notebook that a page offers for download is the file as it is.
"""

import ast
import html
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
LONG = 10  # lines of imports from which on they are folded
ENLARGED = 1.3  # figures on a page, so that their letters are as large as those of code
NARROW = 44  # columns on a phone
LINES = "line-of-a-cell"  # Pygments makes <span id="line-of-a-cell-1"> of each line
MEASURED = re.compile(r"[-+−]?[\d,]*\.?\d+(e[-+]\d+)? ?(%|[kMG]i?B|B|ms|s|h|x|×|dB)?")
LINE = re.compile(rf'<span id="{LINES}-\d+">((?:<span class="\w+">)*)( *)(?=([^\n]*))')

SOLVED = re.compile(
    r'(<span class="line[^"]*" style="[^"]*"><span class="hll">[^\n]*\n</span></span>)+'
)


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
            "defines": defined(cell.source) if marked else [],
        }
        if not cell.source.strip():
            continue  # a cell that only names the module: not shown
        grader = cell.metadata.get("nbgrader", {})
        if grader.get("grade"):
            points = "1 point" if grader["points"] == 1 else f"{grader['points']} points"
            fold(cell, f"the tests of this exercise ({points})")
        elif any(word == "hide" for word, _ in words):
            fold(cell, "the setup, the same in every chapter" if is_setup(cell) else "this code")
        elif "hide-input" in cell.metadata.get("tags", []):
            fold(cell, listed(defined(cell.source)))
        elif len(shown) >= LONG and only_imports(cell.source):
            fold(cell, "the imports")
        for output in cell.outputs:
            if "text/html" in output.get("data", {}):
                output["data"]["text/html"] = aligned(output["data"]["text/html"])
    return notebook


def is_setup(cell) -> bool:
    return cell.get("id") == "setup"


def only_imports(code: str) -> bool:
    try:
        return all(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(code).body)
    except SyntaxError:  # commands of IPython
        return False


def defined(code: str) -> list[str]:
    """The public functions and classes of a cell."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = [node.name for node in ast.parse(code).body if isinstance(node, kinds)]
    return [name for name in found if not name.startswith("_")]


def listed(names: list[str]) -> str:
    more = " and more" if len(names) > 4 else ""
    return f"the code of {', '.join(names[:4])}{more}" if names else "this code"


def aligned(table: str) -> str:
    """A table as HTML: columns of numbers with a unit (5 MiB, 7 %) at the right, as those without."""
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.S)
    cells = [re.findall(r"<td style=\"text-align:left\">([^<]*)</td>|<td", row) for row in rows[1:]]
    if not cells or len({len(row) for row in cells}) > 1:
        return table
    right = {i for i, column in enumerate(zip(*cells)) if all(map(MEASURED.fullmatch, column))}
    for row in rows if right else []:
        parts = re.split(r"(?=<t[hd] )", row)
        for i in right:
            parts[i + 1] = parts[i + 1].replace("text-align:left", "text-align:right")
        table = table.replace(row, "".join(parts), 1)
    return table


def fold(cell, what: str) -> None:
    """Show the code of a cell only when asked for; what it printed is shown in any case."""
    tags = cell.metadata.setdefault("tags", [])
    if "hide-input" not in tags:
        tags.append("hide-input")
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
                self.picture(cell)
        for block in self.document.findall(nodes.literal_block):
            if block.get("language") in ("text", "none", "myst-ansi") and in_columns(
                block.astext()
            ):
                block["classes"].append("columns")
        self.link_exercises()
        self.keep_together()

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
            told = "exercise: its solution is folded"
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

    def picture(self, bundle: nodes.Element) -> None:
        """A figure: its size on the page, and a text for those who can't see it, the digest published beside it.

        The recurring one is drawn anew, in the colors of the page and for narrow screens.
        """
        parts = {part["mime_type"]: part for part in bundle.children}
        if not {"image/png", "text/plain"} <= parts.keys():
            return
        told = parts["text/plain"].astext().strip().removeprefix("figure ")
        if told.startswith("pipeline: ") and self.app.builder.format == "html":
            from site_pipeline import pipeline

            lit = set(told.split("\n")[0].removeprefix("pipeline: ").split(", "))
            bundle.replace_self(nodes.raw("", pipeline(lit), format="html"))
            return
        for image in parts["image/png"].findall(nodes.image):
            image["alt"] = told
            for side in ("width", "height"):
                if match := re.fullmatch(r"(\d+)(px)?", image.get(side, "")):
                    image[side] = f"{round(ENLARGED * int(match[1]))}px"

    def link_exercises(self) -> None:
        """In the section that lists the exercises, the name of a cell, or of what it defines, leads to it."""
        place = {}
        for cell in self.document.findall(nodes.container):
            site = cell.get("cell_metadata", {}).get("site") or {"marked": []}
            if cell.get("nb_element") == "cell_code" and site["marked"]:
                place |= dict.fromkeys([site["id"], *site["defines"]], site["id"])
        for section in self.document.findall(nodes.section):
            if section[0].astext() != "Exercises":
                continue
            for literal in list(section.findall(nodes.literal)):
                name = literal.astext().partition(".")[0].removesuffix("()")
                if name in place and not isinstance(literal.parent, nodes.reference):
                    link = nodes.reference(
                        "", "", literal.deepcopy(), refid=place[name], internal=True
                    )
                    literal.replace_self(link)

    def keep_together(self) -> None:
        """No line ends within "chapter 12"."""
        for text in list(self.document.findall(nodes.Text)):
            parent = text.parent
            said = re.sub(r"(?<=[Cc]hapter) (?=\d\d\b)", "\N{NO-BREAK SPACE}", text)
            if said != text and not isinstance(parent, nodes.literal | nodes.literal_block):
                parent.replace(text, nodes.Text(said))


def in_columns(text: str) -> bool:
    """Whether it is a table that would fall apart if its long lines went on below."""
    gaps = [len(re.findall(r"\S {2,}(?=\S)", line)) for line in text.split("\n")]
    return any(min(gaps[i : i + 3]) >= 2 for i in range(len(gaps) - 2))


def hang(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Give each line of code the class `line` and the column where its rest goes on, should it be too long for the page."""

    def opened(match: re.Match) -> str:
        tags, spaces, rest = match.groups()
        words = 'class="sd"' in tags or re.match(r'(<[^>]+>)*<span class="(c1|sd)"', rest)
        column = len(spaces) + (2 if words else 4)
        first = re.match(r"\S*", html.unescape(re.sub(r"<[^>]+>", "", rest)))[0]
        tight = " tight" * (len(spaces) + len(first) > NARROW)
        return f'<span class="line{tight}" style="--rest: {column}ch">{tags}{spaces}'

    if LINES in context.get("body", ""):
        context["body"] = SOLVED.sub(folded, LINE.sub(opened, context["body"]))


def folded(match: re.Match) -> str:
    """The lines of a solution, shown when asked for."""
    count = match[0].count("\n")
    code = re.sub(r"<[^>]+>", "", match[0])
    column = len(code) - len(code.lstrip(" "))
    told = "the solution" if count == 1 else f"the solution ({count} lines)"
    return (
        f'<details class="solution"><summary style="--column: {column}ch"><span class="closed">Show {told}</span>'
        f'<span class="opened">Hide the solution</span></summary>{match[0]}</details>'
    )


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
