"""Pages that the site has besides the chapters, and the list of all of them: an extension of Sphinx, used by conf.py.

README.md, CONTRIBUTING.md and benchmarks/README.md become pages, in chapters/repository/ (not in git).
"""

import re
import zlib
from pathlib import Path

import sync
from docutils import nodes
from site_reference import write_pages
from sphinx import addnodes

PAGES = sync.CHAPTERS / "repository"
SOURCES = {  # page, and the file in the repository that it shows
    "README": "README.md",
    "CONTRIBUTING": "CONTRIBUTING.md",
    "benchmarks": "benchmarks/README.md",
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")


def write(*_) -> None:
    texts = {}
    for page, source in SOURCES.items():
        file = sync.ROOT / source
        if file.exists():  # not in a folder that holds the chapters only
            texts[f"{page}.md"] = relinked(file.read_text("utf8"), source)
    write_pages(PAGES, texts)


def relinked(text: str, source: str) -> str:
    """A file's text with its links as they must be in chapters/repository/."""
    folder = (sync.ROOT / source).parent
    page_of = {(sync.ROOT / file).resolve(): f"{page}.md" for page, file in SOURCES.items()}

    def target(match: re.Match) -> str:
        path = (folder / match[1]).resolve()
        if path in page_of:
            return page_of[path]
        if path.parent == sync.CHAPTERS:
            return f"../{path.name}"
        return f"../../{path.relative_to(sync.ROOT).as_posix()}"

    if source == "README.md":  # its title is that of the front page
        text = re.sub(r"\A# .*", "# README", text)
    return LINK.sub(target, text)


def lead_to_pages(app, docname: str, text: list[str]) -> None:
    """In chapters, `](../README.md` leads to the page, not to a file outside of the site."""
    for page, source in SOURCES.items():
        text[0] = text[0].replace(f"](../{source}", f"](repository/{page}.md")


def tidy(app, error) -> None:
    """Templates that the theme leaves among the files of the site."""
    for leftover in (Path(app.outdir) / "_static").glob("*webpack-macros.html"):
        leftover.unlink()


def navigation(app, pagename, templatename, context, doctree) -> None:
    """For the list at the left: [(caption, [(page, title, [(page below it, title), …]), …]), …], from the toctrees."""
    if not hasattr(app, "parts_of_the_book"):
        app.parts_of_the_book = [
            (
                tree["caption"] or "",
                [(*entry, entries(app.env, entry[0])) for entry in titled(app.env, tree)],
            )
            for tree in toctrees(app.env, app.config.root_doc)
        ]
    context["parts_of_the_book"] = app.parts_of_the_book


def toctrees(env, page: str) -> list[nodes.Node]:
    return list(env.get_doctree(page).findall(addnodes.toctree))


def titled(env, tree: nodes.Node) -> list[tuple[str, str]]:
    """The pages of a toctree with their titles; those that do not exist have been warned of."""
    return [
        (page, title or env.titles[page].astext())
        for title, page in tree["entries"]
        if page in env.titles
    ]


def entries(env, page: str) -> list[tuple[str, str]]:
    return [entry for tree in toctrees(env, page) for entry in titled(env, tree)]


def setup(app) -> dict:
    app.connect("config-inited", write)
    app.connect("source-read", lead_to_pages)
    app.connect("build-finished", tidy)
    app.connect("html-page-context", navigation)
    version = zlib.crc32(Path(__file__).read_bytes())  # another one: every page is read anew
    return {"env_version": version, "parallel_read_safe": True, "parallel_write_safe": True}
