"""The reference of the package as pages, written from the chapters' cells: an extension of Sphinx, used by conf.py.

`python chapters/site_reference.py` writes them too. One page a module, in chapters/reference/ (not in git): every name of its
`__all__` with signature, docstring and a link to the cell that defines it.
"""

import ast
import re
import textwrap
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import sync
from sphinx.util.nodes import make_refnode

PAGES = sync.CHAPTERS / "reference"
PACKAGE = "llm_engine"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
FENCE = ":" * 6
FIELD_LIST = re.compile(
    r"^(Attributes|Args|Arguments|Returns|Raises):\n((?:[ ]{4}.*\n?|\n)+)", re.M
)
EXAMPLES = re.compile(r"^\[dim\]\n(.*?)\n\[/dim\]$", re.M | re.S)  # of a command, for its help
FOR_TOOLS = re.compile(r"#\s*(fmt|noqa|type|ruff)\b")
CODE = re.compile(r"(`+)(.+?)\1", re.S)
URL = re.compile(r"(?<![(<`])\bhttps?://[^\s<>`]*[^\s<>`.,;:)]")
EMPHASIS = re.compile(r"(?<![\w*\\])\*(?=[^\s*])([^*\n]*[^\s*])\*(?![\w*])")


class Entry:
    """A public name: where it stands, and what there is to say about it."""

    def __init__(self, name: str, cell: sync.Cell, node: Definition):
        self.name, self.cell, self.node = name, cell, node
        self.module = PACKAGE if cell.module == "__init__" else f"{PACKAGE}.{cell.module}"

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def first_line(self) -> str:
        """The first sentence of its docstring, in Markdown."""
        text = " ".join(docstring(self.node).split("\n\n")[0].split())
        return markdown(re.split(r"(?<=\.) (?=[A-Z`])", text)[0])


def entries_of(cells: Iterable[sync.Cell]) -> list[Entry]:
    """All public names that the cells define, in their order."""
    return [
        Entry(name, cell, node)
        for cell in cells
        if cell.public
        for node in cell.tree.body
        for name in sync.defined(ast.Module([node], []))
        if not name.startswith("_")
    ]


def docstring(node: ast.AST) -> str:
    documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    return (ast.get_docstring(node) or "") if isinstance(node, documented) else ""


# ---- docstrings, which are written as plain text with code in backticks, as Markdown


def markdown(text: str, names: dict[str, Entry] | None = None, own: str = "") -> str:
    """Markdown that shows a docstring as it was meant. Names of the package in backticks become links."""

    def code(match: re.Match) -> str:
        inner = match[2]
        entry = (names or {}).get(inner.removesuffix("()"))
        if entry is None or entry.full_name == own:
            return match[0]
        return f"{{py:obj}}`{inner} <{entry.full_name}>`"

    def fields(match: re.Match) -> str:
        body = textwrap.dedent(match[2]).strip()
        items = re.split(r"\n(?=\S)", body)
        lines = [
            "- " + re.sub(r"^(\*{0,2}\w+):", r"`\1`:", item.replace("\n", "\n  ")) for item in items
        ]
        return "\n".join([f"{match[1]}:", "", *lines, ""])

    def examples(match: re.Match) -> str:
        return "\n".join(["```bash", *filter(None, match[1].split("\n")), "```"])

    return outside_code(EXAMPLES.sub(examples, FIELD_LIST.sub(fields, text)), plain, code)


def outside_code(text: str, words, code) -> str:
    """`words` applied to what stands between pieces of code, `code` to the matches of those."""
    parts, last = [], 0
    for match in CODE.finditer(text):
        parts += [words(text[last : match.start()]), code(match)]
        last = match.end()
    return "".join([*parts, words(text[last:])])


def plain(text: str) -> str:
    """Text in which nothing but *emphasis*, lists and web addresses has a meaning."""
    parts, last = [], 0
    for match in URL.finditer(text):
        parts += [escape(text[last : match.start()]), f"<{match[0]}>"]
        last = match.end()
    return "".join([*parts, escape(text[last:])])


def escape(text: str) -> str:
    text = EMPHASIS.sub("\x00\\1\x01", text)
    text = re.sub(r"([\\$<{\[\]|~#_*])", r"\\\1", text)
    return text.replace("\x00", "*").replace("\x01", "*")


# ---- signatures


def signature(node: ast.AST, name: str, *, method: bool = False) -> str:
    """`name(arguments) -> result`, as it stands in the code; without self."""
    node = unquoted(node)
    arguments = node.args
    if method and not decorated(node, "staticmethod"):
        (arguments.posonlyargs or arguments.args)[:1] = []
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return one_line(f"{name}({ast.unparse(arguments)}){result}")


class Unannotated(ast.NodeTransformer):
    """`Annotated[bool, how a command asks for it]` is bool."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        told = ast.unparse(node.value) in ("Annotated", "typing.Annotated")
        return node.slice.elts[0] if told else node


def unquoted(node: ast.AST) -> ast.AST:
    """A copy of a function in which types written as strings, since they are defined later, are not."""
    node = Unannotated().visit(ast.parse(ast.unparse(ast.Module([node], []))).body[0])
    slots = [(node, "returns")] + [
        (a, "annotation") for a in ast.walk(node.args) if isinstance(a, ast.arg)
    ]
    for owner, slot in slots:
        said = getattr(owner, slot)
        if isinstance(said, ast.Constant) and isinstance(said.value, str):
            setattr(owner, slot, ast.parse(said.value, mode="eval").body)
    return node


def class_signature(node: ast.ClassDef, name: str) -> str:
    """The call that makes one: from __init__, or from the fields of a dataclass or named tuple."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return signature(part, name, method=True).removesuffix(" -> None")
    if not decorated(node, "dataclass") and "NamedTuple" not in map(ast.unparse, node.bases):
        return name
    fields = [
        f"{f.target.id}: {ast.unparse(f.annotation)}"
        + (f" = {ast.unparse(f.value)}" if f.value else "")
        for f in fields_of(node)
        if not f.target.id.startswith("_")
    ]
    return one_line(f"{name}({', '.join(fields)})")


def one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text)


def decorated(node: ast.AST, word: str) -> bool:
    return any(
        re.search(rf"\b{word}\b", ast.unparse(d)) for d in getattr(node, "decorator_list", [])
    )


def fields_of(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [
        part
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    ]


# ---- pages


def entry_text(entry: Entry, names: dict[str, Entry]) -> str:
    node, name = entry.node, entry.name
    chapter = (
        f"[chapter {entry.cell.chapter}](../{entry.cell.notebook}#{entry.cell.id}){{.cell-link}}"
    )
    text = markdown(docstring(node), names, entry.full_name)
    if isinstance(node, ast.ClassDef):
        bases = [ast.unparse(base) for base in node.bases]
        kind, head = "class", class_signature(node, name)
        told = f"Bases: {', '.join(f'`{base}`' for base in bases)}" if bases else ""
        parts = [told, text, *members(entry, names)]
        return directive(kind, head, [], chapter, *parts)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        options = [":async:"] if isinstance(node, ast.AsyncFunctionDef) else []
        return directive("function", signature(node, name), options, chapter, text)
    options = []
    if isinstance(node, ast.AnnAssign):
        options.append(f":type: {one_line(ast.unparse(node.annotation))}")
    value = one_line(ast.unparse(node.value)) if node.value else ""
    if (
        value
        and len(value) <= 100
        and not isinstance(getattr(node, "targets", [None])[0], ast.Tuple)
    ):
        options.append(f":value: {value}")
    return directive("data", name, options, chapter, comment_of(entry))


def members(entry: Entry, names: dict[str, Entry]) -> Iterator[str]:
    """Fields, unless the signature has said all there is to say; public methods."""
    in_signature = class_signature(entry.node, entry.name) != entry.name
    for field in fields_of(entry.node):
        told = plain(trailing_comment(entry.cell, field))
        if not field.target.id.startswith("_") and (told or not in_signature):
            options = [f":type: {one_line(ast.unparse(field.annotation))}"]
            if field.value:
                options.append(f":value: {one_line(ast.unparse(field.value))}")
            yield directive("attribute", field.target.id, options, told, depth=1)
    for part in entry.node.body:
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        shown = not part.name.startswith("_") or (part.name == "__call__")
        if not shown or decorated(part, "overload") or decorated(part, "setter"):
            continue
        text = markdown(docstring(part), names)
        if decorated(part, "property") or decorated(part, "cached_property"):
            options = [f":type: {one_line(ast.unparse(part.returns))}"] if part.returns else []
            yield directive("property", part.name, options, text, depth=1)
            continue
        options = [f":{word}:" for word in ("classmethod", "staticmethod") if decorated(part, word)]
        if isinstance(part, ast.AsyncFunctionDef):
            options.append(":async:")
        yield directive("method", signature(part, part.name, method=True), options, text, depth=1)


def trailing_comment(cell: sync.Cell, node: ast.stmt) -> str:
    """The comment at the end of a statement's last line."""
    line = cell.body[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    comment = line.strip()
    return comment[1:].strip() if comment.startswith("#") and not FOR_TOOLS.match(comment) else ""


def comment_of(entry: Entry) -> str:
    """What a comment says of a constant: at its end, or right above it."""
    if told := trailing_comment(entry.cell, entry.node):
        return plain(told)
    above = []
    for line in reversed(entry.cell.body[: entry.node.lineno - 1]):
        if not line.startswith("#") or FOR_TOOLS.match(line):
            break
        above.insert(0, line.removeprefix("#").strip())
    return plain(" ".join(above))


def directive(kind: str, head: str, options: list[str], *parts: str, depth: int = 0) -> str:
    fence = FENCE[depth:]
    body = "\n\n".join(part for part in parts if part)
    return "\n".join([f"{fence}{{py:{kind}}} {head}", *options, "", body, "", fence])


def module_page(
    module: str, entries: list[Entry], cells: list[sync.Cell], names: dict[str, Entry]
) -> str:
    title = PACKAGE if module == "__init__" else f"{PACKAGE}.{module}"
    chapters = dict.fromkeys(cell.notebook for cell in cells)
    links = [f"[{int(name[:2]):02d}](../{name})" for name in chapters]
    from_chapters = f"From chapter{'s' if len(links) > 1 else ''} {', '.join(links)}."
    lines = [f"# {title}", f"```{{py:module}} {title}\n```", from_chapters]
    if module == "__init__":
        lines += [package_table(cells, names)]
    lines += [entry_text(entry, names) for entry in entries]
    return "\n\n".join(lines) + "\n"


def package_table(cells: list[sync.Cell], names: dict[str, Entry]) -> str:
    """What `from llm_engine import …` offers, each with a link to the module that has it."""
    told = next((docstring(cell.tree) for cell in cells if docstring(cell.tree)), "")
    rows = ["| `from llm_engine import …` | |", "| --- | --- |"]
    for name in sorted(n for c in cells for n in sync.defined(c.tree, imports=True)):
        entry = names[name]
        rows.append(f"| {{py:obj}}`{name} <{entry.full_name}>` | {entry.first_line} |")
    return "\n\n".join([markdown(told), "\n".join(rows)])


def pages() -> dict[str, str]:
    """Text of each page, by file name; `contents.txt` lists them by part, for reference.md."""
    cells = sync.exported_cells(sync.read_notebooks())
    entries = entries_of(cells)
    names = {entry.name: entry for entry in entries}
    texts, parts = {}, {}
    for module in dict.fromkeys(cell.module for cell in cells):
        own = [cell for cell in cells if cell.module == module]
        public = [entry for entry in entries if entry.cell.module == module]
        if not public and module != "__init__":
            continue  # __main__
        page = PACKAGE if module == "__init__" else module
        texts[f"{page}.md"] = module_page(module, public, own, names)
        part = "The package" if module == "__init__" else part_names()[own[0].chapter // 10]
        parts.setdefault(part, []).append(page)
    parts = {"The package": parts.pop("The package", []), **parts}
    texts["contents.txt"] = "\n\n".join(contents(part, ps, entries) for part, ps in parts.items())
    return texts


def contents(part: str, modules: list[str], entries: list[Entry]) -> str:
    """For reference.md: the modules of a part, each with its names."""
    toctree = ["```{toctree}", ":hidden:", "", *(f"{m} <reference/{m}>" for m in modules), "```"]
    table = ["| module | names |", "| --- | --- |"]
    for module in modules:
        names = [
            e for e in entries if e.cell.module == module and not isinstance(e.node, ast.Assign)
        ]
        names = names or [e for e in entries if e.cell.module == module]
        links = ", ".join(f"{{py:obj}}`{e.name} <{e.full_name}>`" for e in names)
        table.append(
            f"| [{module}](reference/{module}.md) | {links or 'what `from llm_engine import …` offers'} |"
        )
    return "\n".join([f"## {part}", "", *toctree, "", *table])


def part_names() -> dict[int, str]:
    """Number of each part (the tens digit of its chapters) and its name: the captions in index.md."""
    text = (sync.CHAPTERS / "index.md").read_text("utf8")
    found = {}
    for caption, entries in re.findall(r":caption: (.+)\n((?:.*\n)*?)```", text):
        if number := re.search(r"^(\d)\d_", entries, re.M):
            found[int(number[1])] = caption.strip().strip("\"'")
    return {part: found.get(part, f"Part {part}") for part in range(10)}


def write(*_) -> None:
    """Bring chapters/reference/ up to date; a page that says the same is not touched, so that it is not built again."""
    write_pages(PAGES, pages())


def write_pages(folder: Path, texts: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text("utf8") != text:
            path.write_text(text, "utf8", newline="\n")


def setup(app) -> dict:
    app.connect("config-inited", write)
    app.connect("missing-reference", find)
    version = zlib.crc32(Path(__file__).read_bytes())  # another one: every page is read anew
    return {"env_version": version, "parallel_read_safe": True, "parallel_write_safe": True}


def find(app, env, node, contnode):
    """A type in a signature, written without its module: every public name stands for one thing in the whole package."""
    if node.get("refdomain") != "py":
        return None
    names = app.__dict__.setdefault(
        "names_of_the_package", {}
    )  # filled once, when all pages are read
    if not names:
        for full_name, target in env.get_domain("py").objects.items():
            if full_name.count(".") == 2:
                names[full_name.rpartition(".")[2]] = (full_name, target)
    full_name, target = names.get(node["reftarget"].rpartition(".")[2], ("", None))
    if target is None:
        return None
    return make_refnode(
        app.builder, node["refdoc"], target.docname, target.node_id, contnode, full_name
    )


if __name__ == "__main__":
    write()
