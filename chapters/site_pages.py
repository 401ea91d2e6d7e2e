"""Pages and pictures that the site has besides the chapters: an extension of Sphinx, used by conf.py.

* README.md, CONTRIBUTING.md and benchmarks/README.md become pages, in chapters/repository/ (not in git).
* A code block with the language {pipeline} becomes the book's recurring figure, each box a link to its chapter. Its text is what
  is shown where there is no Sphinx, and read out where the figure can't be seen.
"""

import html
import io
import re
import zlib
from pathlib import Path

import sync
from docutils import nodes
from docutils.parsers.rst import directives
from site_reference import write_pages
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

PAGES = sync.CHAPTERS / "repository"
SOURCES = {  # page, and the file in the repository that it shows
    "README": "README.md",
    "CONTRIBUTING": "CONTRIBUTING.md",
    "benchmarks": "benchmarks/README.md",
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
CHAPTER_OF = {  # part of the pipeline -> where it is built
    "tokenizer": "13_tokenizer",
    "embedding": "14_embedding",
    "attention": "15_attention",
    "ffn": "16_ffn_and_transformer",
    "norm": "14_embedding",
    "lm_head": "16_ffn_and_transformer",
    "sampler": "17_sampler",
    "config": "11_config",
    "weights": "12_weights",
    "verify": "19_verify",
}


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


# ---- the recurring figure


class Pipeline(SphinxDirective):
    """The pipeline as an SVG that takes its colors from the page. Option `lit`: parts to light up, as in `show_pipeline`."""

    has_content = True
    option_spec = {"lit": directives.unchanged}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        told = " ".join(self.content)
        if self.env.app.builder.format != "html":
            return [nodes.literal_block(told, told)]
        picture = pipeline_svg(self.options.get("lit", "all").split(), told)
        return [nodes.raw("", f'<div class="pipeline">{picture}</div>', format="html")]


def pipeline_svg(lit: list[str], told: str) -> str:
    import matplotlib

    from llm_engine import viz

    figure, axes = viz.new_figure(8.4, 2.6)
    viz.plot_pipeline(axes, lit)
    figure.patch.set_visible(False)
    boxes, paper = axes.patches[1:], matplotlib.colors.to_rgba(viz.PAPER)
    for (name, *_), box in zip(viz.PIPELINE, boxes):
        box.set_url(f"{CHAPTER_OF[name]}.html")
        box.set_gid(f"box-{name}")
    for patch in axes.patches:
        if patch.get_facecolor() == paper:
            patch.set_facecolor("#fefefe")  # so that it differs from the white of text on a lit box
    buffer = io.StringIO()
    with (
        viz.book_style(),
        matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "pipeline"}),
    ):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    for color, name in (
        (viz.INK, "ink"),
        (viz.MUTED, "muted"),
        ("#fefefe", "box"),
        (viz.ACCENT, "accent"),
    ):
        svg = svg.replace(color, f"var(--book-{name})")
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', _head(told), svg, count=1)
    return re.sub(r"\n\s*\n", "\n", svg)  # a blank line would end the HTML for some parsers


def _head(told: str) -> str:
    return (
        r'<svg viewBox="\1" role="img" xmlns="http://www.w3.org/2000/svg" '
        rf'xmlns:xlink="http://www.w3.org/1999/xlink"><title>{html.escape(told)}</title>'
    )


def setup(app) -> dict:
    app.connect("config-inited", write)
    app.connect("source-read", lead_to_pages)
    app.connect("build-finished", tidy)
    app.connect("html-page-context", navigation)
    app.add_directive("pipeline", Pipeline)
    version = zlib.crc32(Path(__file__).read_bytes())  # another one: every page is read anew
    return {"env_version": version, "parallel_read_safe": True, "parallel_write_safe": True}
