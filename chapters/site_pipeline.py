"""The book's recurring figure for the site: drawn of real text in the page's own colors, lying on a desk, upright on a phone.

An extension of Sphinx, used by conf.py. A code block with the language {pipeline} becomes the figure, each box a link to its chapter;
so does the picture that `show_pipeline` has left in a notebook. The block's text is what is shown where there is no Sphinx, and read
out where the figure can't be seen.
"""

import html
import zlib
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from llm_engine import viz

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
LOOP = "engine: append the token and go round again"
TOLD = "text → tokenizer → embedding → [attention → feed-forward] × L → norm → LM head → sampler → next token, and round again"
UPRIGHT = {  # name -> center x, center y
    "tokenizer": (215, 66),
    "embedding": (215, 148),
    "attention": (215, 240),
    "ffn": (215, 296),
    "norm": (215, 388),
    "lm_head": (215, 450),
    "sampler": (215, 532),
    "config": (62, 148),
    "weights": (62, 268),
    "verify": (62, 450),
}
Point = tuple[float, float]


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def words(text: str, x: float, y: float, kind: str = "", anchor: str = "middle") -> str:
    """One or more lines of text, of which the last stands at y."""
    lines = text.split("\n")
    return "".join(
        f'<text class="{kind}" x="{number(x)}" y="{number(y - 12 * (len(lines) - 1 - i))}" '
        f'text-anchor="{anchor}">{html.escape(line)}</text>'
        for i, line in enumerate(lines)
    )


def arrow(*points: Point, lit: bool = False) -> str:
    """A line through the points, with a head at its end."""
    (x0, y0), (x1, y1) = points[-2:]
    length = abs(x1 - x0) + abs(y1 - y0)  # the last part is level or upright
    u, v = (x1 - x0) / length, (y1 - y0) / length
    head = [
        (x1, y1),
        (x1 - 7 * u - 3 * v, y1 - 7 * v - 3 * u),
        (x1 - 7 * u + 3 * v, y1 - 7 * v + 3 * u),
    ]
    end = (x1 - 5 * u, y1 - 5 * v)
    line, tip = (
        " ".join(f"{number(x)},{number(y)}" for x, y in p) for p in ([*points[:-1], end], head)
    )
    return (
        f'<g class="arrow{" lit" * lit}"><polyline points="{line}"/><polygon points="{tip}"/></g>'
    )


def box(name: str, text: str, x: float, y: float, width: float, lit: bool) -> str:
    height = 36
    shape = f'x="{number(x - width / 2)}" y="{number(y - height / 2)}" width="{number(width)}" height="{height}" rx="5"'
    inner = f"<rect {shape}/>{words(text, x, y + 4.2)}"
    return f'<a href="{CHAPTER_OF[name]}.html" class="box{" lit" * lit}">{inner}</a>'


def layers(x: float, y: float, width: float, height: float, lit: bool) -> str:
    shape = (
        f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" rx="7"'
    )
    return f'<g class="layers{" lit" * lit}"><rect {shape}/></g>'


def lying(bright: set[str], block: bool) -> Iterator[str]:
    """From left to right, at the places that `llm_engine.viz` has for it."""

    def at(x: float, y: float) -> Point:
        return 72 * (x - 0.42), 64 * (2.68 - y)

    (left, top), (right, bottom) = at(4.35, 1.875), at(5.95, 0.125)
    yield layers(left, top, right - left, bottom - top, block)
    yield words("× L", right + 4, top + 4, "note", "start")
    for name, text, x, y, width in viz.PIPELINE:
        yield box(name, text, *at(x, y), 72 * width, name in bright)
    for x0, x1, label in (
        (0.5, 1.05, "text"),
        (2.05, 2.67, "ids\n[B, T]"),
        (3.63, 4.35, "[B, T, H]"),
        (5.95, 6.67, "[B, T, H]"),
        (7.33, 7.77, ""),
        (8.63, 9.4, "logits\n[B, V]"),
        (10.3, 10.98, "next id"),
    ):
        yield arrow(at(x0, 1.0), at(x1, 1.0))
        yield words(label, at((x0 + x1) / 2, 0)[0], at(0, 1.12)[1], "note")
    for x, top in ((3.15, 0.72), (5.15, 0.125)):
        yield arrow(at(x, -0.14), at(x, top))
    yield arrow(at(3.55, -0.42), at(4.7, -0.42))
    yield arrow(at(8.2, 0.72), at(8.2, -0.14))
    yield arrow(
        at(10.98, 1.42), at(10.98, 2.3), at(2.36, 2.3), at(2.36, 1.62), lit="engine" in bright
    )
    yield words(LOOP, *at(6.6, 2.38), "note lit" if "engine" in bright else "note")


def upright(bright: set[str], block: bool) -> Iterator[str]:
    """From top to bottom, for a narrow screen."""
    yield layers(145, 208, 140, 120, block)
    yield words("× L", 289, 218, "note", "start")
    for name, text, *_ in viz.PIPELINE:
        yield box(
            name, text, *UPRIGHT[name], 100 if name in ("attention", "ffn") else 90, name in bright
        )
    for y0, y1, label in (
        (18, 48, "text"),
        (84, 130, "ids [B, T]"),
        (166, 208, "[B, T, H]"),
        (328, 370, "[B, T, H]"),
        (406, 432, ""),
        (468, 514, "logits [B, V]"),
        (550, 585, "next id"),
    ):
        yield arrow((215, y0), (215, y1))
        x, anchor = (
            (207, "end") if label.startswith("ids") else (223, "start")
        )  # there the loop ends
        yield words(label, x, (y0 + y1) / 2 + 3, "note", anchor)
    for y, right in ((148, 170), (268, 145)):
        yield arrow((107, y), (right, y))
    yield arrow((62, 166), (62, 250))
    yield arrow((170, 450), (107, 450))
    yield arrow((215, 588), (322, 588), (322, 107), (225, 107), lit="engine" in bright)
    yield words(LOOP, 180, 618, "note lit" if "engine" in bright else "note")


def pipeline(lit: set[str], told: str = TOLD) -> str:
    """The figure as HTML, in both forms; the style sheet shows one. Names in `lit`: those of `show_pipeline`."""
    bright = {name for name, *_ in viz.PIPELINE} | {"engine"} if "all" in lit else lit
    said = f"The pipeline: {told}" + ("" if "all" in lit else f". Lit: {', '.join(sorted(lit))}")
    forms = [("lying", lying, "0 0 764 220"), ("upright", upright, "0 0 340 626")]
    drawn = [
        f'<svg class="{name}" viewBox="{room}" role="img" aria-label="{html.escape(said)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(draw(bright, "layers" in lit))}</svg>'
        for name, draw, room in forms
    ]
    return f'<div class="pipeline">{"".join(drawn)}</div>'


class Pipeline(SphinxDirective):
    """The figure in a page of words. Option `lit`: parts to light up, as in `show_pipeline`."""

    has_content = True
    option_spec = {"lit": directives.unchanged}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        told = " ".join(self.content)
        if self.env.app.builder.format != "html":
            return [nodes.literal_block(told, told)]
        lit = set(self.options.get("lit", "all").split())
        return [nodes.raw("", pipeline(lit, told), format="html")]


def setup(app) -> dict:
    app.add_directive("pipeline", Pipeline)
    version = zlib.crc32(Path(__file__).read_bytes())  # another one: every page is read anew
    return {"env_version": version, "parallel_read_safe": True, "parallel_write_safe": True}
