"""The pages beside the chapters say what is so: the map, the times, the commands, the words, and every output shown."""

import ast
import builtins
import json
import re
import shlex
from functools import cache
from pathlib import Path

import page_blocks
import pytest
import reading_time
import torch
import typer

import llm_engine
from llm_engine.cli import app

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ROOT / "chapters"
FRONT, GLOSSARY, TROUBLE = (
    CHAPTERS / f"{name}.md" for name in ("index", "glossary", "troubleshooting")
)
PAGES = (FRONT, GLOSSARY, TROUBLE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
WRITTEN_BY_THE_SITE = {"reference"}  # folders of pages that exist only while the site is built


def text_of(path: Path) -> str:
    return path.read_text("utf8")


@cache
def notebook(name: str) -> dict:
    return json.loads((CHAPTERS / name).read_text("utf8"))


def prose(page: str) -> str:
    """A page without its code blocks and comments."""
    page = re.sub(r"^```.*?^```$", "", page, flags=re.S | re.M)
    return re.sub(r"<!--.*?-->", "", page, flags=re.S)


def slug(heading: str) -> str:
    """The anchor that GitHub and MyST give a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def anchors(path: Path) -> set[str]:
    """Headings of a page or a notebook, and the ids of a notebook's code cells."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text("utf8"))["cells"]
        ids = {cell["id"] for cell in cells if cell["cell_type"] == "code"}
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    else:
        ids, text = set(), prose(text_of(path))
    return ids | {slug(h) for h in re.findall(r"^#{1,6} (.+)$", text, re.M)}


# --- the front page


def table_rows(page: str) -> dict[str, list[str]]:
    """Rows of the map: cells by the number of the chapter that a row links to."""
    rows = {}
    for line in page.splitlines():
        found = re.match(r"\| \[(\d\d) [^\]]+\]\((\S+)\)", line)
        if found:
            assert found[2].startswith(found[1]), line
            assert found[1] not in rows, f"chapter {found[1]} is in the map twice"
            rows[found[1]] = [cell.strip() for cell in line.strip().strip("|").split("|")]
    return rows


def test_every_chapter_is_in_the_map_and_in_the_list_of_contents():
    stems = [path.stem for path in sorted(CHAPTERS.glob("[0-9][0-9]_*.ipynb"))]
    page = text_of(FRONT)
    assert list(table_rows(page)) == [stem[:2] for stem in stems]
    listed = [
        line
        for block in re.findall(r"```\{toctree\}\n(.*?)```", page, re.S)
        for line in block.splitlines()
        if line and not line.startswith(":")
    ]
    assert [name for name in listed if name[0].isdigit()] == stems
    others = [name for name in listed if not name[0].isdigit() and "<" not in name]
    assert {path.stem for path in CHAPTERS.glob("*.md")} - {"index"} == set(others)


def test_the_times_follow_the_rule_that_the_page_states():
    page = text_of(FRONT)
    for number in (
        reading_time.WORDS_A_MINUTE,
        reading_time.LINES_A_MINUTE,
        reading_time.MINUTES_A_POINT,
    ):
        assert re.search(rf"\b{number}\b", page)
    hint = "the chapters have changed: run python tests/reading_time.py"
    assert page == reading_time.with_times(page), hint
    cell = "".join(reading_time.map_cell(notebook("00_start_here.ipynb"))["source"])
    assert cell == reading_time.with_times(cell), hint


def test_times_are_counted_from_what_is_read(tmp_path):
    def cell(kind, source, **metadata):
        return {"cell_type": kind, "source": source, "metadata": metadata}

    graded = {"nbgrader": {"grade": True, "points": 3}}
    cells = [
        cell("markdown", "Two words [and more](a_long/address.ipynb)."),
        cell("code", "a = 1\n\nb = 2"),
        cell("code", "#| hide\nc = 3"),
        cell("code", "assert a", **graded),
    ]
    path = tmp_path / "10_x.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert reading_time.measure(path) == reading_time.Times(words=4, lines=2, points=3)
    assert [reading_time.rounded(m) for m in (0, 0.1, 15, 15.1)] == [0, 15, 15, 30]
    times = [reading_time.as_text(m) for m in (0, 45, 60, 90, 135)]
    assert times == ["–", "45 min", "1 h", "1½ h", "2¼ h"]


def test_a_stale_time_is_seen():
    page = text_of(FRONT)
    row = re.search(r"^\| \[15 .*$", page, re.M)[0]
    for stale in (
        row.replace("45 min", "40 min"),
        re.sub(r"1 h \|$", "2 h |", row),
    ):
        assert stale != row
        assert reading_time.with_times(page.replace(row, stale)) == page
    assert reading_time.with_times(page.replace("16 and 18 (", "16 and 18 (1")) == page


def exports() -> tuple[dict[str, str], dict[str, set[str]]]:
    """Which chapter writes a module, and which modules each chapter's exported cells import."""
    writes, imports = {}, {}
    for path in sorted(CHAPTERS.glob("[0-9][0-9]_*.ipynb")):
        number, module = path.name[:2], None
        imports[number] = set()
        for cell in notebook(path.name)["cells"]:
            source = "".join(cell["source"])
            default = re.search(r"^#\| default_exp (\w+)", source, re.M)
            module = default[1] if default else module
            exported = re.match(r"#\| exporti?(?: (\w+))?$", source.split("\n")[0])
            if cell["cell_type"] == "code" and exported:
                writes.setdefault(exported[1] or module, number)
                imports[number] |= set(
                    re.findall(r"^ *from llm_engine\.(\w+) import", source, re.M)
                )
    return writes, imports


def test_what_a_chapter_rests_on_is_named():
    """Whatever a chapter's code imports was written in a chapter that the map tells to read before, or before that."""
    rows = table_rows(text_of(FRONT))
    after = {number: re.findall(r"\d\d", cells[2]) for number, cells in rows.items()}

    def before(number):
        return {n for direct in after[number] for n in {direct, *before(direct)}}

    writes, imports = exports()
    for number, modules in imports.items():
        assert all(name < number for name in after[number]), number
        needed = {writes[module] for module in modules} - {number}
        assert needed <= before(number), (number, needed - before(number))


def test_the_commands_are_those_of_the_readme():
    readme, front = text_of(ROOT / "README.md"), text_of(FRONT)
    for n in (1, 2):
        command = re.compile(rf"<!-- command {n} -->\n(.*?)<!-- end of command {n} -->", re.S)
        assert command.search(front)[1] == command.search(readme)[1]


def test_numbers_on_the_front_page_are_measured_ones():
    """Speeds, sizes and losses are those of the README's tables, the number of places that of chapter 19."""
    section = text_of(FRONT).split("## What you will have built")[1].split("## ")[0]
    known = text_of(ROOT / "README.md") + json.dumps(
        notebook("19_verify.ipynb"), ensure_ascii=False
    )
    claims = re.findall(r"\d+\.\d+|\b\d{2,}\b", re.sub(r"\([^)]*\.\w+[^)]*\)", "", section))
    assert len(claims) > 10
    for number in claims:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", known), number


# --- words


def glossary_entries() -> list[tuple[str, str]]:
    body = text_of(GLOSSARY).split(":::{glossary}\n")[1].split("\n:::")[0]
    return [tuple(entry.split("\n  ", 1)) for entry in body.strip().split("\n\n")]


def test_words_are_in_order_and_explained_once():
    terms = [term for term, _ in glossary_entries()]
    assert len(terms) > 120
    assert terms == sorted(terms, key=str.casefold)
    assert len({term.casefold() for term in terms}) == len(terms)


@cache
def words_of(name: str) -> str:
    return "\n".join("".join(cell["source"]) for cell in notebook(name)["cells"]).casefold()


@pytest.mark.parametrize("term, meaning", glossary_entries(), ids=lambda x: x.split("\n")[0][:20])
def test_a_word_leads_to_a_chapter_that_has_it(term, meaning):
    links = re.findall(r"→\s\[chapter\s(\d\d)\]\((\S+)\)$", meaning)
    assert len(links) == 1, "one arrow, at the end"
    number, name = links[0]
    assert name.startswith(number)
    text = words_of(name)
    for word in re.findall(r"[^\W_]{2,}|�", term):
        stem = word.casefold()[: max(3, len(word) - 2)]  # scaled, scales, scaling
        assert stem in text, f"chapter {number} has no {word!r}"


def test_important_words_of_the_chapters_are_explained():
    """What a chapter prints in bold as a word to remember is in the glossary, in some form."""
    known = " ".join(" ".join(entry) for entry in glossary_entries()).casefold()
    missing = {}
    for path in sorted(CHAPTERS.glob("[0-9][0-9]_*.ipynb")):
        for cell in notebook(path.name)["cells"]:
            if cell["cell_type"] != "markdown":
                continue
            for word in re.findall(r"\*\*([a-z][\w/ -]{2,24})\*\*", "".join(cell["source"])):
                stem = word.casefold().rstrip("s")
                if stem not in known and word not in NOT_EXPLAINED:
                    missing[word] = path.name[:2]
    assert not missing


# bold for weight, not as words to remember
NOT_EXPLAINED = {"above", "crosses", "output", "doubles", "by ceiling", "with everything in it"}


def test_letters_are_those_of_the_package():
    """The table of letters has just those of chapter 00, with the same words, and the model's own sizes."""
    row = re.compile(r"^\| `(\w)` \| ([^|]+?) \|(?: *([\d,]*) *\|)?$", re.M)
    ours = {letter: (axis, size) for letter, axis, size in row.findall(text_of(GLOSSARY))}
    cells = notebook("00_start_here.ipynb")["cells"]
    theirs = {
        letter: axis
        for cell in cells
        if cell["cell_type"] == "markdown"
        for letter, axis, _ in row.findall("".join(cell["source"]))
    }
    assert {letter: axis for letter, (axis, _) in ours.items()} == theirs
    assert set(ours) == set("BTSHNKDFVL")


def test_letters_have_the_sizes_of_the_default_model(default_folder):
    from llm_engine.config import load_config

    config = load_config(default_folder)
    sizes = {
        "H": config.hidden_size,
        "N": config.num_attention_heads,
        "K": config.num_key_value_heads,
        "D": config.head_dim,
        "F": config.intermediate_size,
        "V": config.vocab_size,
        "L": config.num_hidden_layers,
    }
    for letter, size in sizes.items():
        assert re.search(rf"^\| `{letter}` .*\| {size:,} \|$", text_of(GLOSSARY), re.M), letter


# --- links, commands and names, on every page


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(page):
    for target in LINK.findall(prose(text_of(page))):
        name, _, anchor = target.partition("#")
        if re.match(r"https?:", name) or name.split("/")[0] in WRITTEN_BY_THE_SITE:
            continue
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), target


def click_command():
    return typer.main.get_command(app)


def problem_with(words: list[str]) -> str | None:
    """What is wrong with a call of llm-engine: a command or an option that does not exist."""
    group = click_command()
    command, seen = group, False
    for word in words:
        options = {o: p for p in command.params for o in (*p.opts, *p.secondary_opts)}
        if word.startswith("-") and word != "-":
            name = word.split("=")[0]
            if name not in options and name != "--help":
                return f"{command.name or 'llm-engine'} has no option {name}"
        elif not seen and word in group.commands:
            command, seen = group.commands[word], True
        elif not seen:
            return f"llm-engine has no command {word}"
    return None


def calls(page: str) -> list[list[str]]:
    """Each `llm-engine …` in code blocks and between backticks."""
    blocks = [b.source for b in page_blocks.blocks(page) if b.kind == "bash"]
    lines = [line for source in blocks for line in page_blocks.commands(source)]
    lines = [part for line in lines for part in re.split(r"&&", line)]
    lines += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))
    found = []
    for line in lines:
        line = line.strip().split(" < ")[0]
        if re.match(r"(?:\S*/)?llm-engine\b(?! …)(?= )", line) and "…" not in line:
            found.append(shlex.split(line)[1:])
    return found


PLACES = (*PAGES, ROOT / "README.md")


@pytest.mark.parametrize("page", PLACES, ids=lambda path: path.stem)
def test_every_command_and_option_exists(page):
    for words in calls(text_of(page)):
        assert problem_with(words) is None, words


def test_options_named_alone_exist():
    """`--cache int8` in a sentence belongs to some command; `-n` too."""
    known = {
        option
        for command in [click_command(), *click_command().commands.values()]
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    known |= {"--check", "--update"}  # of chapters/sync.py
    for page in (FRONT, TROUBLE):
        for word in re.findall(r"`(--?[a-z][\w-]*)", prose(text_of(page))):
            assert word in known, word


def test_a_wrong_command_is_seen():
    assert problem_with(["generate", "x", "--chat", "-n", "5"]) is None
    assert "no option --chta" in problem_with(["generate", "x", "--chta"])
    assert "no command generat" in problem_with(["generat", "x"])
    assert "no option --batch" in problem_with(["-q", "generate", "x", "--batch", "2"])


def package_names() -> tuple[set[str], set[str]]:
    """Every public name of the package; and what can be asked of its objects, or given to its functions, by name."""
    names, inside = set(), set()
    for path in Path(llm_engine.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            if isinstance(node, ast.arg):
                inside.add(node.arg)
            if isinstance(node, ast.Attribute):
                inside.add(node.attr)
            if isinstance(node, ast.Name):  # constants, registries, fields of dataclasses
                inside.add(node.id)
    return names, names | inside


def test_names_of_the_package_exist():
    """`Engine`, `apply_chat_template`, `engine.stream`, `SamplingParams(stop_token_ids=...)`: all of them."""
    names, attributes = package_names()
    files = (".json", ".md", ".py", ".safetensors", ".model", ".bin", ".gguf")
    for page in PAGES:
        for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(text_of(page))):
            if re.fullmatch(r"[A-Z]\w+", code) and code != code.upper():  # CamelCase
                assert code in names or hasattr(builtins, code), code
            if re.fullmatch(r"[a-z]\w*(\.\w+)*(\(.*\))?", code) and "." in code.split("(")[0]:
                _, *rest = code.split("(")[0].split(".")
                if not code.endswith(files):
                    assert set(rest) <= attributes, code
            call = re.fullmatch(r"([\w.]+)\((.*)\)", code)
            if call:
                tree = ast.parse(code, mode="eval").body
                last = call[1].split(".")[-1]
                assert last in names or last in attributes or last == "len", code
                options = {k.arg for k in tree.keywords}
                assert options <= attributes, code


# --- every output on the pages was run


@pytest.fixture(scope="module")
def results():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # plans name a team's memory
    grad = torch.is_grad_enabled()
    try:
        names: dict = {}
        done = page_blocks.run_page(TROUBLE, names)
        yield {block.line: (block, got) for block, got in done} | names
    finally:
        torch.set_grad_enabled(grad)
        torch.set_num_threads(threads)


SHOWN = [block for block in page_blocks.blocks(text_of(TROUBLE)) if block.output is not None]


@pytest.mark.parametrize("line", [b.line for b in SHOWN], ids=[b.name for b in SHOWN])
def test_what_the_page_shows_is_what_comes_out(results, line):
    block, got = results[line]
    assert block.agrees(got), f"shown:\n{block.output}\ncame:\n{got}"


def test_every_command_of_troubleshooting_shows_its_output():
    for block in page_blocks.blocks(text_of(TROUBLE)):
        if block.kind == "bash":
            assert block.output, block.name


def test_every_symptom_has_what_a_reader_needs():
    """An entry shows how to find the cause, leads to a chapter, and is in the table at the top."""
    page = text_of(TROUBLE)
    top, *entries = re.split(r"^### ", page, flags=re.M)
    listed = set(re.findall(r"\]\(#([\w-]+)\)", top))
    assert len(entries) >= 25
    for entry in entries:
        heading = entry.split("\n")[0]
        assert slug(heading) in listed, heading
        assert "```text" in entry, heading
        assert re.search(r"\.ipynb", entry), heading


def test_the_answer_on_the_front_page(results):
    """The command is that of the README, which is run where the package is installed; here the answer itself."""
    block, sure = [b for b in page_blocks.blocks(text_of(FRONT)) if b.output is not None]
    program, command, prompt, *options = shlex.split(block.source)
    assert (program, command, options) == ("llm-engine", "generate", ["--stop", r"\n"])
    assert block.source.strip() in text_of(ROOT / "README.md").replace(".venv/bin/", "")
    answer = results["engine"].generate(
        prompt, llm_engine.SamplingParams(max_new_tokens=64, stop=("\n",))
    )
    assert answer.text + "\n" == block.output

    assert shlex.split(sure.source)[:3] == ["llm-engine", "logits", prompt]
    logits = results["engine"].logits(results["engine"].encode(prompt))[-1]
    best = logits.softmax(-1).topk(5)
    for line, i, p in zip(sure.output.splitlines()[1:], best.indices, best.values, strict=True):
        _, token, name, logit, probability = line.split()
        assert int(token) == i and name == results["engine"].tokenizer.token(int(i))
        assert float(logit) == pytest.approx(logits[i].item(), abs=2e-3)
        assert float(probability.rstrip("%")) == pytest.approx(100 * p.item(), abs=0.02)


# --- the runner of pages itself


def test_blocks_and_their_outputs():
    page = (
        "```python\nx = 1\n```\n\n<!-- plant\ny = 5\n-->\n\n```python\nprint(x, y)\n```\n\ntext\n\n"
        "<!-- numbers vary -->\n```text\n2 6\n```\n\n```bash\nllm-engine plan\n```\n```python\n```\n"
    )
    first, second, third, _ = page_blocks.blocks(page)
    assert (first.output, first.plant) == (None, "")
    assert (second.output, second.plant, second.numbers_vary) == ("2 6\n", "y = 5", True)
    assert (third.kind, third.output) == ("bash", None)
    assert second.agrees("1 5\n") and not second.agrees("1 five\n")
    second.numbers_vary = False
    assert not second.agrees("1 5\n") and second.agrees("2   6\n\n")


def test_a_wrong_output_is_seen_and_can_be_written(tmp_path):
    path = tmp_path / "page.md"
    page = "```python\nprint(40 + 2)\n```\n\n```text\n41\n```\n"
    path.write_text(page)
    [(block, got)] = page_blocks.run_page(path)
    assert not block.agrees(got)
    assert page_blocks.write_outputs(path) == 1
    assert path.read_text() == page.replace("41", "42")
    assert page_blocks.write_outputs(path) == 0


def test_plants_end_with_their_block(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(
        "<!-- plant\nimport contextlib\nclosed = []\ncleanup = contextlib.ExitStack()\n"
        "cleanup.callback(closed.append, 1)\nuntil_next(cleanup)\n-->\n\n"
        "```python\nprint(closed)\n```\n\n```text\n[]\n```\n\n"
        "```python\nprint(closed)\n```\n\n```text\n[1]\n```\n"
    )
    assert all(block.agrees(got) for block, got in page_blocks.run_page(path))
