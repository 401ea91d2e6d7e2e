"""The book as a web site: built once, every link followed, and looked at in a real browser.

What finds faults is itself tested: planted faults must be found.
"""

import ast
import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest
from browser import browser  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ROOT / "chapters"
NOTEBOOKS = sorted(CHAPTERS.glob("[0-9][0-9]_*.ipynb"))
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1440, "height": 900}


BUILD = """
import contextlib, io, json, sys
from sphinx.cmd.build import main
results = []
for source, target, *more in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = main(["-q", "-W", "--keep-going", *more, source, target])
    results.append((status, said.getvalue()))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """The site, and a small book with a wrong link, built as `sphinx-build` builds: folder, [(status, warnings), …]."""
    folder, small = tmp_path_factory.mktemp("site") / "_site", tmp_path_factory.mktemp("small")
    write_small_book(small)
    jobs = [("chapters", str(folder), "-b", "html")]
    jobs += [
        (str(small), str(small / "_out"), "-b", "dummy", "-D", "extensions=myst_nb,site_cells")
    ]
    command = [sys.executable, "-c", BUILD]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(jobs), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def site(builds):
    """The built site. A warning is an error."""
    folder, ((status, said), _) = builds
    assert status == 0, said
    assert not list(folder.parent.glob("[!_]*")), "the build left something beside the site"
    return folder


def write_small_book(folder):
    """One chapter, and a page with a good and a wrong link to a cell of it, under the settings of the book."""
    conf = (CHAPTERS / "conf.py").read_text("utf8")
    (folder / "conf.py").write_text(conf, "utf8")
    (folder / "_static").mkdir()
    shutil.copy(CHAPTERS / "_static" / "favicon.svg", folder / "_static")
    cells = [
        {"cell_type": "markdown", "id": "title", "metadata": {}, "source": "# One"},
        {"cell_type": "code", "id": "a-cell", "metadata": {}, "source": "#| hide\n1 + 1"},
    ]
    cells[1] |= {"execution_count": 1, "outputs": []}
    language = {"language_info": {"name": "python", "pygments_lexer": "ipython3"}}
    notebook = {"cells": cells, "metadata": language, "nbformat": 4, "nbformat_minor": 5}
    (folder / "10_one.ipynb").write_text(json.dumps(notebook))
    links = "[good](10_one.ipynb#a-cell), [bad](10_one.ipynb#another-cell)"
    (folder / "index.md").write_text(f"# Title\n\n{links}\n\n```{{toctree}}\n10_one\n```\n")


@pytest.fixture(scope="module")
def pages(site):
    """Text of each page, by its path in the site."""
    return {
        path.relative_to(site).as_posix(): path.read_text("utf8")
        for path in sorted(site.rglob("*.html"))
        if "_static" not in path.parts
    }


# ---- what is on a page, without a browser

TAG = re.compile(r"<(a|img|script|link|source|iframe)\b([^>]*)>")
ADDRESS = re.compile(r'\b(?:href|src|xlink:href)="([^"]*)"')
IDS = re.compile(r'<[a-zA-Z][^>]*?\sid="([^"]+)"')


def addresses(text):
    """(tag, address) of all that a page links to or loads. Code on a page is escaped, so a pattern is enough."""
    for tag, attributes in TAG.findall(text):
        for address in ADDRESS.findall(attributes):
            yield tag, unescape(address)


def broken_links(folder, pages):
    """What a page links to or loads and which is not there, or lies on another machine."""
    ids = {name: set(map(unescape, IDS.findall(text))) for name, text in pages.items()}
    for name, text in pages.items():
        for tag, address in addresses(text):
            path, _, anchor = address.partition("#")
            if re.match(r"(https?:)?//", address):
                if tag != "a":
                    yield f"{name}: <{tag}> loads {address} from another machine"
                continue
            if re.match(r"(mailto|data):", address):
                continue
            path = unquote(path.partition("?")[0])
            target = (folder / name).parent / path if path else folder / name
            where = Path(target).resolve()
            if not where.is_file() or not where.stat().st_size:
                yield f"{name}: <{tag}> leads to {address}, which does not exist"
            elif anchor and where.suffix == ".html":
                page = where.relative_to(folder.resolve()).as_posix()
                if unquote(anchor) not in ids.get(page, set()) and anchor != "top":
                    yield f"{name}: <{tag}> leads to {address}, where there is no such place"


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site, pages):
    assert sum(len(list(addresses(text))) for text in pages.values()) > 5000
    assert not list(broken_links(site, pages))


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ('<a href="16_nothing.html">x</a>', "does not exist"),
        ('<a class="x" href="two.html#nowhere">x</a>', "no such place"),
        ('<a href="#nowhere">x</a>', "no such place"),
        ('<img alt="a" src="_images/gone.png">', "does not exist"),
        ('<script src="https://cdn.example.org/a.js"></script>', "another machine"),
        ('<link rel="stylesheet" href="//cdn.example.org/a.css">', "another machine"),
        ('<svg><a xlink:href="15_gone.html"></a></svg>', "does not exist"),
    ],
)
def test_the_link_check_sees_planted_faults(tmp_path, planted, said):
    good = '<a href="two.html#here">x</a> <a href="https://example.org">x</a> <p id="mine"><a href="#mine">x</a>'
    (tmp_path / "two.html").write_text('<p id="here">x</p>')
    for name, text, count in (("one.html", good, 0), ("bad.html", good + planted, 1)):
        (tmp_path / name).write_text(text)
        pages = {n: (tmp_path / n).read_text() for n in (name, "two.html")}
        found = list(broken_links(tmp_path, pages))
        assert len(found) == count
        assert all(said in problem for problem in found)


def test_a_link_to_what_is_not_there_stops_the_build(builds):
    """With the settings of the book, a wrong link in a chapter or a page is a warning, and so an error."""
    _, (_, (status, said)) = builds
    assert status == 1
    assert re.findall(r"WARNING: (.*)", re.sub(r"\x1b\[[\d;]*m", "", said)) == [
        "local id not found in doc '10_one': 'another-cell' [myst.xref_missing]"
    ]


def test_pages_are_the_chapters_and_texts_and_no_more(pages):
    texts = {p.stem for p in CHAPTERS.glob("*.md")} | {p.stem for p in NOTEBOOKS}
    assert {name.removesuffix(".html") for name in pages if "/" not in name} == texts | {
        "genindex",
        "py-modindex",
        "search",
    }
    assert {name for name in pages if name.startswith("repository/")} == {
        f"repository/{page}.html" for page in ("README", "CONTRIBUTING", "benchmarks")
    }


def test_every_page_is_reached_from_the_navigation(pages):
    linked = {
        (Path("x") / address.partition("#")[0]).as_posix().removeprefix("x/")
        for tag, address in addresses(pages["index.html"])
        if tag == "a"
    }
    assert {p.stem + ".html" for p in [*NOTEBOOKS, *CHAPTERS.glob("*.md")]} - linked <= {
        "index.html"
    }


def code_cells(path):
    """Code cells that have something to show beside directives."""
    for cell in json.loads(path.read_text("utf8"))["cells"]:
        code = [line for line in "".join(cell["source"]).split("\n") if not line.startswith("#|")]
        if cell["cell_type"] == "code" and any(line.strip() for line in code):
            yield cell


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_chapter_as_a_page(site, pages, path):
    """Each code cell has its id as an anchor, once; scripts' marks are not shown; the notebook is there to take away."""
    text = pages[f"{path.stem}.html"]
    places = Counter(IDS.findall(text))
    assert not [place for place, count in places.items() if count > 1]
    for cell in code_cells(path):
        container = re.search(rf'<div class="cell[^"]*" id="{re.escape(cell["id"])}">', text)
        assert container, f"no anchor for cell {cell['id']}"
        grader = cell["metadata"].get("nbgrader", {})
        after = text[container.end() : container.end() + 100].lstrip()
        source = "".join(cell["source"])
        folded = grader.get("grade") or source.startswith("#| hide") or long_imports(source)
        assert after.startswith("<details") == bool(
            folded or "hide-input" in cell["metadata"].get("tags", [])
        )
        solution = grader.get("solution") and "### BEGIN SOLUTION" in source
        end = text.find('<div class="cell ', container.end())
        shown = text[container.end() : end if end > 0 else None]
        assert shown.count('<details class="solution">') == bool(solution), cell["id"]
        if solution:  # and it is listed at the end of the chapter, with a link
            assert f'class="reference internal" href="#{cell["id"]}"' in text, cell["id"]
    for shown in re.findall(r'<div class="cell_input.*?</pre>', text, re.S):
        code = unescape(re.sub(r"<p class=.*?</p>|<[^>]+>", "", shown, flags=re.S)).strip()
        assert not code.startswith("#| ") and "### BEGIN" not in code and "### END" not in code
    assert "[!NOTE]" not in text
    figures = [
        "".join(o["data"].get("text/plain", ""))
        for c in code_cells(path)
        for o in c["outputs"]
        if "image/png" in o.get("data", {})
    ]
    pipelines = [told for told in figures if told.startswith("figure pipeline: ")]
    assert len(re.findall(r"<img [^>]*_images/", text)) == len(figures) - len(pipelines)
    drawn = text.split('<div class="pipeline">')[1:]
    assert len(drawn) == len(pipelines) > 0  # drawn anew, with the same parts lit
    for told, figure in zip(pipelines, drawn):
        lit = set(told.split("\n")[0].removeprefix("figure pipeline: ").split(", "))
        shown = re.findall(r'<a href="(\w+)\.html" class="box lit">', figure.split("</div>")[0])
        assert bool(shown) == bool(lit & {"all", *BOXES}), lit
        if "all" not in lit:
            assert sorted(shown) == sorted(2 * [BOXES[part] for part in lit if part in BOXES])
    assert all(
        re.search(r'alt="[^"]+"', tag) for tag in re.findall(r"<img [^>]*_images/[^>]*>", text)
    )
    download = [a for _, a in addresses(text) if a.endswith(".ipynb")]
    assert download == [f"_sources/{path.name}"]
    assert (site / download[0]).read_bytes() == path.read_bytes()


def long_imports(source):
    code = [line for line in source.split("\n") if not line.startswith("#|")]
    try:
        parts = ast.parse("\n".join(code)).body
    except SyntaxError:
        return False
    return len(code) >= 10 and all(isinstance(p, ast.Import | ast.ImportFrom) for p in parts)


BOXES = {
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


def test_numbers_with_a_unit_stand_at_the_right(pages):
    """In chapter 15, "1080 MiB" does; "GQA (as it is)" and "MHA" do not. In chapter 14, "40.7983%"."""
    for cell in ("1080 MiB", "360 MiB"):
        assert f'<td style="text-align:right">{cell}</td>' in pages["15_attention.html"]
    assert '<th style="text-align:right">8,192 tokens</th>' in pages["15_attention.html"]
    for cell in ("GQA (as it is)", "MHA"):
        assert f'<td style="text-align:left">{cell}</td>' in pages["15_attention.html"]
    assert '<td style="text-align:right">40.7983%</td>' in pages["14_embedding.html"]


def test_printed_tables_keep_their_columns(pages):
    """The trace of chapter 16 is a table; the errors of chapter 13, long as they are, are not."""
    wide = r'<div class="output stream columns highlight[^"]*">.{,200}'
    printed = re.findall(wide, pages["16_ffn_and_transformer.html"], re.S)
    assert any("letters" in told and "non-finite" in told for told in printed)
    assert not re.findall(wide, pages["13_tokenizer.html"], re.S)


def test_marked_lines_are_the_solution(pages):
    """In chapter 15, the lines of `visible` that a student writes, and no others, are marked."""
    text = pages["15_attention.html"]
    cell = next(c for c in code_cells(CHAPTERS / "15_attention.ipynb") if c["id"] == "visible")
    inside = "".join(cell["source"]).split("### BEGIN SOLUTION\n")[1].split("### END SOLUTION")[0]
    page = text[text.index('id="visible"') :]
    marked = page[: page.index("</pre>")].split('<span class="hll">')[1:]
    shown = [unescape(re.sub(r"<[^>]+>", "", mark.split("\n")[0])) for mark in marked]
    lines = [line for line in inside.split("\n") if line.strip()]
    assert [line.strip() for line in lines] == [line.strip() for line in shown]


# ---- the reference

MARKER = re.compile(r"# %% chapters/(\S+)\.ipynb #(\S+)")


def definitions(module):
    """Name -> page and anchor of the cell, read from the module as it lies there."""
    lines = (ROOT / "llm_engine" / f"{module}.py").read_text("utf8").split("\n")
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        else:
            continue
        marker = next(
            (m for line in lines[node.lineno - 1 :: -1] if (m := MARKER.match(line))), None
        )
        if marker:
            yield from ((name, f"../{marker[1]}.html#{marker[2]}") for name in names)


@functools.cache
def public_names(module):
    """`__all__`, read and not imported: quicker by seconds."""
    for node in ast.parse((ROOT / "llm_engine" / f"{module}.py").read_text("utf8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module} has no __all__")


MODULES = sorted(p.stem for p in (ROOT / "llm_engine").glob("*.py") if not p.stem.startswith("__"))


def entry_of(text, full_name):
    """The HTML of one entry of a reference page, up to the next."""
    start = text.index(f' id="{full_name}"')
    end = text.find('<dl class="py', start)
    return text[start : end if end > 0 else None]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference_once_and_leads_to_its_cell(pages, module):
    public = public_names(module)
    text = pages[f"reference/{module}.html"]
    cells = {}
    for name, address in definitions(module):
        cells.setdefault(name, address)  # the first time a name appears, it is made
    places = Counter(IDS.findall(text))
    for name in public:
        full_name = f"llm_engine.{module}.{name}"
        assert places[full_name] == 1, f"{full_name} is there {places[full_name]} times"
        links = re.findall(r'class="cell-link[^"]*" href="([^"]+)"', entry_of(text, full_name))
        assert links == [cells[name]], f"{full_name} leads to {links}, not to {cells[name]}"
    own = {place for place in places if place.count(".") == 2 and place.startswith("llm_engine.")}
    assert own == {f"llm_engine.{module}.{name}" for name in public}


def test_what_the_package_offers_is_on_its_page(pages):
    text = pages["reference/llm_engine.html"]
    for name in public_names("__init__"):
        homes = [module for module in MODULES if name in public_names(module)]
        assert len(homes) == 1
        assert f'href="{homes[0]}.html#llm_engine.{homes[0]}.{name}"' in text


def words_of(text):
    """What a reader reads of a page's article, without code."""
    article = text[text.index("<article") : text.index("</article>")]
    article = re.sub(r"<(pre|code|dt)\b.*?</\1>", "", article, flags=re.S)
    return unescape(re.sub(r"<[^>]+>", "", article))


def test_signatures_and_docstrings_are_readable(pages):
    reference = {name: text for name, text in pages.items() if name.startswith("reference/")}
    rope = re.sub(
        r"<[^>]+>", "", entry_of(reference["reference/rope.html"], "llm_engine.rope.rotate")
    )
    assert "Float[Tensor," in unescape(rope)
    for name, text in reference.items():
        words = words_of(text)
        assert "`" not in words, f"{name}: a backtick is shown"
        assert not re.search(r"\\[^\w\s]", words), f"{name}: a backslash is shown"
        assert "jaxtyping." not in words and "<class" not in words
        assert "[dim]" not in text and "Annotated" not in text and not re.search("–[a-z]", words)


# ---- in a browser


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(site):
    """The site, served."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Visit:
    """A browser's page that writes down what goes wrong: messages of scripts, failed and foreign requests."""

    def __init__(self, page, address):
        self.page, self.address, self.noted = page, address, []
        page.on("console", lambda m: m.type in ("error", "warning") and self.noted.append(m.text))
        page.on("pageerror", lambda error: self.noted.append(str(error)))
        page.on("request", self.request)
        page.on("response", lambda r: r.status >= 400 and self.noted.append(f"{r.status} {r.url}"))

    def request(self, request):
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.noted.append(f"wants {request.url}")

    def open(self, name, viewport=None, mode=None):
        if viewport:
            self.page.set_viewport_size(viewport)
        if mode:
            self.page.emulate_media(color_scheme=mode)
        self.noted.clear()
        self.page.goto(f"{self.address}/{name}", wait_until="load")
        self.page.evaluate("window.MathJax && window.MathJax.startup.promise.then(() => null)")
        return self.page


@pytest.fixture(scope="module")
def visit(browser, address):  # noqa: F811
    """One page for all tests, so that scripts and fonts are fetched once."""
    page = browser.new_page()
    yield Visit(page, address)
    page.close()


LOOK = """async () => {
    const found = [];
    const images = [...document.querySelectorAll('.bd-article img')];
    for (const image of images) { image.loading = 'eager'; }
    await Promise.all(images.map(image => image.decode().catch(() => null)));
    for (const image of images) {
        const box = image.getBoundingClientRect(), style = getComputedStyle(image);
        const [wide, high] = ['width', 'height'].map(side => parseFloat(style[side]));
        if (!image.naturalWidth) found.push(`figure ${image.alt.slice(0, 40)} is not there`);
        else if (Math.abs(wide / high - image.naturalWidth / image.naturalHeight) > 0.05 * wide / high)
            found.push(`figure ${image.alt.slice(0, 40)} is distorted: ${wide} x ${high}`);
        else if (wide > image.naturalWidth) found.push(`figure ${image.alt.slice(0, 40)} is blown up`);
    }
    const formulas = [...document.querySelectorAll('.bd-article .math')];
    for (const formula of formulas) {
        const set = formula.querySelector('mjx-container');
        if (!set || set.getBoundingClientRect().width < 2) found.push(`formula ${formula.textContent.slice(0, 40)} is not set`);
        else if (formula.getBoundingClientRect().right > innerWidth
            || formula.scrollWidth > formula.clientWidth + 8 && getComputedStyle(formula).overflowX === 'hidden')
            found.push(`formula ${formula.textContent.slice(0, 40)} is cut off`);
        else if (formula.querySelector('mjx-merror')) found.push(`formula has an error: ${formula.textContent.slice(0, 40)}`);
    }
    for (const image of document.querySelectorAll('.cell_output > a img')) {
        const wide = image.getBoundingClientRect().width, box = image.parentElement;
        if (wide < Math.min(0.8 * parseFloat(image.style.width) || 0, 460) - 1)
            found.push(`figure ${image.alt.slice(0, 40)} is too small to read: ${wide}`);
        else if (wide > box.clientWidth + 1 && (getComputedStyle(box).overflowX !== 'auto' || box.scrollWidth <= box.clientWidth))
            found.push(`figure ${image.alt.slice(0, 40)} does not scroll`);
    }
    for (const text of document.querySelectorAll('.bd-article :is(.output, .highlight-text):not(.columns) pre'))
        if (text.scrollWidth > text.clientWidth + 1) found.push(`output is cut off: ${text.innerText.slice(0, 40)}`);
    for (const code of document.querySelectorAll('.bd-article code.literal'))
        if (/^ /.test(code.textContent) && !getComputedStyle(code).whiteSpace.startsWith('pre'))
            found.push(`a space is lost: ${code.innerText.slice(0, 40)}`);
    for (const drawn of document.querySelectorAll('div.pipeline')) {
        const shown = [...drawn.querySelectorAll('svg')].filter(svg => svg.getBoundingClientRect().width);
        const letter = svg => svg.querySelector('text').getBoundingClientRect().height;
        if (shown.length !== 1 || drawn.scrollWidth > drawn.clientWidth || letter(shown[0]) < 11)
            found.push(`the pipeline does not fit: ${shown.length} ${drawn.scrollWidth} ${drawn.clientWidth}`);
        else for (const box of shown[0].querySelectorAll('.box'))
            if (box.querySelector('text').getBBox().width > box.querySelector('rect').getBBox().width)
                found.push(`a box of the pipeline is too small: ${box.textContent}`);
    }
    for (const line of document.querySelectorAll('.cell_input pre'))
        if (line.scrollWidth > line.clientWidth + 1) found.push(`code is cut off: ${line.innerText.slice(0, 40)}`);
    const sizes = ['h1', 'h2', 'h3'].map(h => document.querySelector(`.bd-article ${h}`)).filter(h => h)
        .map(h => parseFloat(getComputedStyle(h).fontSize));
    if (sizes.some((size, i) => i && size >= sizes[i - 1])) found.push(`headings of ${sizes} pixels`);
    const wide = document.documentElement.scrollWidth;
    if (wide > innerWidth) found.push(`the page is ${wide} pixels wide, the screen ${innerWidth}`);
    return [found, images.length, formulas.length];
}"""


def test_every_page_on_a_phone(visit, pages):
    """Figures and formulas are there, nothing makes the page scroll sideways, no script complains, nothing is fetched."""
    figures = formulas = 0
    reference = [name for name in pages if name.startswith("reference/")]
    chapters = [name for name in pages if name[:2].isdigit()]
    seen = set(pages) - set(reference) - set(chapters)
    seen |= set(chapters[::2]) | {"15_attention.html"}  # every other chapter stands for the rest
    seen |= set(sorted(reference, key=len)[-2:])  # the pages of modules with long names
    for name in sorted(seen):
        page = visit.open(name, PHONE, "dark")
        found, *counts = page.evaluate(LOOK)
        assert not found + visit.noted, f"{name}: {found + visit.noted}"
        figures, formulas = figures + counts[0], formulas + counts[1]
    assert figures > 25 and formulas > 50


PLANT = """() => {
    const article = document.querySelector('.bd-article'), wide = document.createElement('p');
    wide.style.width = '500px'; wide.textContent = 'wide'; article.append(wide);
    const [gone, distorted] = article.querySelectorAll('img');
    gone.src = '_images/gone.png';
    gone.style.maxWidth = '100px';
    distorted.style.width = '50px'; distorted.style.setProperty('height', '300px', 'important');
    article.querySelector('mjx-container').remove();
    console.error('complaint');
    article.querySelectorAll('.cell_output > a')[2].style.overflowX = 'hidden';
    const lines = [...article.querySelectorAll('.cell_input pre .line')].filter(line => line.checkVisibility());
    lines[0].style.cssText = 'white-space: pre; width: 1000px';
    article.querySelector('h1').style.fontSize = '12px';
    article.querySelector('.output pre').innerHTML = '<span style="white-space: pre">' + 'x'.repeat(200) + '</span>';
    article.querySelector('code.literal').textContent = ' Paris';
    article.querySelector('code.literal').style.whiteSpace = 'normal';
    article.querySelector('svg.lying').style.display = 'block';
    return fetch('https://example.org/x').catch(() => null);
}"""


def test_the_look_at_a_page_sees_planted_faults(visit):
    page = visit.open("15_attention.html", PHONE)
    assert not page.evaluate(LOOK)[0] and not visit.noted
    page.evaluate(PLANT)
    found, *_ = page.evaluate(LOOK)
    planted = (
        "pixels wide",
        "is not there",
        "distorted",
        "is not set",
        "headings of",
        "not scroll",
        "too small to read",
        "code is cut off",
        "output is cut off",
        "a space is lost",
        "pipeline does not fit",
    )
    for said in planted:
        assert sum(said in problem for problem in found) == 1, said
    for said in ("wants https://example.org/x", "404", "complaint"):
        assert any(said in note for note in visit.noted), said


CONTRAST = """selector => {
    const brightness = color => {
        const [r, g, b] = color.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = element => {
        for (let e = element; e; e = e.parentElement) {
            const color = getComputedStyle(e).backgroundColor;
            if (!/, 0\\)$|transparent/.test(color)) return color;
        }
        return 'rgb(255, 255, 255)';
    };
    return [...document.querySelectorAll(selector)].filter(e => e.textContent.trim()).slice(0, 200).map(e => {
        const [a, b] = [brightness(getComputedStyle(e).color), brightness(behind(e))];
        return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), b, e.textContent.trim().slice(0, 30)];
    });
}"""
READ = {  # what must be readable, and the least contrast
    ".bd-article p:not(.origin)": 7,
    ".bd-article pre span": 4.5,
    "div.output.text_html td": 7,
    ".bd-article mjx-container": 7,
    "p.origin a": 4.5,
    "div.output pre": 7,
}


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_tables_code_and_formulas_are_readable(visit, mode):
    page = visit.open("15_attention.html", DESKTOP, mode)
    for selector, least in READ.items():
        measured = page.evaluate(CONTRAST, selector)
        assert measured, selector
        for contrast, background, words in measured:
            assert contrast >= least, f"{selector}: {words} has a contrast of {contrast:.1f}"
            assert (background < 0.1) == (mode == "dark"), f"{selector}: {words}"
    card = page.evaluate(
        "getComputedStyle(document.querySelector('.cell_output img')).backgroundColor"
    )
    if mode == "dark":
        assert card == "rgb(255, 255, 255)"  # figures are drawn for white


def test_search_finds_and_a_hit_leads_there(visit):
    page = visit.open("index.html", DESKTOP, "light")
    page.keyboard.press("Control+k")
    page.keyboard.type("repeat_kv")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a")
    hits = page.locator("#search-results li a").all_text_contents()
    assert any("15" in hit for hit in hits), hits
    summary = (
        page.locator("#search-results li", has_text="15 · Attention").locator("p.context").first
    )
    assert "repeat_kv" in summary.inner_text()
    page.locator("#search-results li a", has_text="15 · Attention").first.click()
    page.wait_for_selector("article h1")
    assert page.url.startswith(f"{visit.address}/15_attention.html")
    assert page.locator("article").inner_text().count("repeat_kv") > 1
    visit.open("search.html?q=rotary")  # whose stem, rotari, stands in no text
    page.wait_for_selector("#search-results p.context")
    assert "rotary" in page.locator("#search-results p.context").first.inner_text().lower()
    visit.open("search.html?q=qqqqq")
    page.wait_for_function("/not match any|did not match/.test(document.body.innerText)")
    assert not page.locator("#search-results li a").count()
    assert not visit.noted


def test_a_solution_is_shown_when_asked_for_and_on_paper(visit):
    page = visit.open("15_attention.html", DESKTOP, "light")
    cell = page.locator("#repeat-kv")
    line = cell.locator(".hll", has_text="repeat_interleave")
    assert "def repeat_kv" in cell.inner_text() and "Show the solution" in cell.inner_text()
    assert not line.is_visible()
    cell.locator("summary").click()
    assert line.is_visible() and "Hide the solution" in cell.inner_text()
    cell.locator("summary").click()
    assert not line.is_visible()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert line.is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert not line.is_visible() and not visit.noted


def test_a_link_to_a_cell_scrolls_to_it(visit):
    page = visit.open("reference/attention.html", DESKTOP, "light")
    page.locator("dl.py", has=page.locator("dt[id='llm_engine.attention.eager']")).locator(
        "a.cell-link"
    ).first.click()
    page.wait_for_url("**/15_attention.html#*")
    page.wait_for_timeout(500)
    cell = page.url.partition("#")[2]
    top = page.evaluate("id => document.getElementById(id).getBoundingClientRect().top", cell)
    assert 0 <= top < DESKTOP["height"] / 2
    assert "def eager" in page.locator(f"[id='{cell}']").inner_text()


def test_navigation_on_a_phone_and_on_a_desk(visit):
    for viewport, at_once in ((DESKTOP, True), (PHONE, False)):
        page = visit.open("15_attention.html", viewport)
        entry = page.locator(".bd-sidebar-primary a", has_text="16 ·").first
        assert entry.is_visible() == at_once
        if not at_once:
            page.locator("button.primary-toggle").first.click()
            entry.wait_for(state="visible")
