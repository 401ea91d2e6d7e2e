#!/usr/bin/env python3
"""What quantized weights cost and what they bring: bits, bytes, quality on held-out text, speed. One table, one command.

python benchmarks/quantization.py --json benchmarks/quantization.json --into README.md
                                                                         everything, about 10 minutes on two quiet cores
python benchmarks/quantization.py --only 'int4-g64*' --no-speed          some rows, quality alone
python benchmarks/quantization.py --quick                                is it working?

How it measures: benchmarks/README.md.
"""

import copy
import datetime
import fnmatch
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from compare import Quiet, machine
from report import Spread, span
from rich.console import Console
from rich.progress import track
from rich.table import Table

from llm_engine.engine import Engine
from llm_engine.hub import MODELS, WheelModel, gguf_file, resolve
from llm_engine.int4 import collect_inputs, gptq, least_squares, random_tokens, weighted
from llm_engine.quality import calibration_text, held_out_text, measure, window_logits, windows
from llm_engine.quantize import (
    DynamicLinear,
    Method,
    QuantizedLinear,
    Scheme,
    quantize_model,
    round_to_nearest,
)
from llm_engine.quantized_files import save_quantized
from llm_engine.tokenizer import Tokenizer
from llm_engine.transformer import Transformer, load_model

err = Console(stderr=True, highlight=False, soft_wrap=True)
FLOATS = {"float32": torch.float32, "bf16": torch.bfloat16}
HEAD = Scheme(
    8
)  # the LM head, which is the embedding too, in 8 bits wherever anything is quantized
BEGIN, END = "<!-- table of quantization.py -->", "<!-- end of the table -->"  # in README.md
CALIBRATION = (32, 64)  # windows and tokens of the calibration text


class Row(NamedTuple):
    """One line of the table: how the weights are stored, and how their codes were chosen."""

    scheme: str
    method: str = ""
    mixed: tuple[tuple[str, str], ...] = ()  # (pattern, scheme) of single modules

    @property
    def name(self) -> str:
        return " ".join(filter(None, [self.scheme, self.method]))

    @property
    def storage(self) -> str:
        """What speed depends on: rows that differ only in how codes were chosen share it."""
        kind = "W8A8" if self.method == "W8A8" else ""
        return " ".join([self.scheme, kind, *(f"{p}={s}" for p, s in self.mixed)]).strip()


def known_rows() -> list[Row]:
    rows = [
        Row("float32"),
        Row("bf16"),
        Row("int8", "rtn"),
        Row("int8", "least squares"),
        Row("int8", "random tokens"),
        Row("int8", "W8A8"),
    ]
    for scheme in ("int4-g64-asym", "int4-g128-asym", "int4-g64"):
        for method in ("rtn", "least squares", "random tokens", "calibrated", "gptq"):
            if scheme == "int4-g64-asym" or method not in ("least squares", "calibrated"):
                rows.append(Row(scheme, method))
    mixed = (("*.v_proj", "int8"),)
    rows += [Row("int4-g64-asym", "random tokens, v_proj int8", mixed), Row("int4-g32-asym", "rtn")]
    return [*rows, Row("stored")]


class Maker:
    """Makes the model of a row. The float model is loaded once, and what it is made to read is read once."""

    def __init__(self, name: str):
        self.name, self.folder = name, resolve(name)
        self.tokenizer = Tokenizer.from_folder(self.folder)
        self.float = load_model(self.folder)
        self.heard: dict[str, Mapping[str, torch.Tensor]] = {}

    def hear(self, what: str) -> Mapping[str, torch.Tensor]:
        if what not in self.heard:
            if what == "random tokens":
                ids = random_tokens(self.float.config.vocab_size)
            else:
                count, length = CALIBRATION
                ids = windows(self.tokenizer, calibration_text(), length, count)
            self.heard[what] = collect_inputs(self.float, ids, products=what == "gptq")
        return self.heard[what]

    def method(self, name: str) -> Method:
        if name == "gptq":
            products = self.hear("gptq")
            by_gptq, plain = (
                gptq(products),
                weighted({n: p.diagonal() for n, p in products.items()}),
            )

            def method(weight, scheme, module=""):  # in 8 bits there is nothing to correct
                return (plain if scheme.bits == 8 else by_gptq)(weight, scheme, module)

            return method
        if name in ("random tokens", "calibrated"):
            return weighted(self.hear(name))
        return {"least squares": least_squares}.get(name, round_to_nearest)

    def __call__(self, row: Row) -> Transformer:
        if row.scheme == "stored":
            return load_model(resolve(gguf_file(self.name)), quantize="stored")
        model = copy.deepcopy(self.float)
        if row.scheme in FLOATS:
            return model.to(FLOATS[row.scheme])
        mixed = {pattern: Scheme.parse(scheme) for pattern, scheme in row.mixed}
        return quantize_model(
            model,
            Scheme.parse(row.scheme),
            skip=(),
            mixed={"lm_head": HEAD, **mixed},
            method=self.method(row.method.split(",")[0]),
            linear=DynamicLinear if row.method == "W8A8" else QuantizedLinear,
        )


def sizes(model: Transformer, row: Row, maker: Maker) -> dict[str, float]:
    """Bytes in memory and in a file, bits for each weight: scales, offsets and padding counted."""
    memory = sum(p.nbytes for p in model.parameters())
    weights = sum(p.numel() for p in maker.float.parameters())
    if row.scheme == "stored":
        file = Path(gguf_file(maker.name)).stat().st_size
    elif any(type(m) is QuantizedLinear for m in model.modules()):
        with tempfile.TemporaryDirectory() as place:
            folder = save_quantized(model, Path(place) / "saved", maker.folder)
            file = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    else:
        file = memory  # a float file is its numbers; W8A8 keeps int8's
    return {"bits_per_weight": 8 * memory / weights, "memory_bytes": memory, "file_bytes": file}


def decode_rate(engine: Engine, prompt: list[int], forced: list[int]) -> float:
    """Tokens a second of a bare loop: one token a step, which is given, whatever the engine says."""
    cache, ids = engine.new_cache(), list(prompt)
    engine.step(ids, cache)
    begin = time.perf_counter()
    for token in forced:
        ids.append(token)
        engine.step(ids, cache)
    return len(forced) / (time.perf_counter() - begin)


def prefill_rate(engine: Engine, ids: list[int]) -> float:
    """Tokens a second of reading `ids` and knowing what comes next; the better of two."""
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        engine.step(ids, engine.new_cache())
        seconds.append(time.perf_counter() - begin)
    return len(ids) / min(seconds)


def measure_quality(
    rows: list[Row], maker: Maker, held_out: torch.Tensor, keep: Callable[[Row, dict], None]
) -> None:
    whole = Engine(maker.float, maker.tokenizer)
    reference = list(window_logits(whole, held_out))
    for row in track(rows, "quality", console=err, transient=True):
        begin = time.perf_counter()
        model = maker(row)
        seconds = time.perf_counter() - begin
        found = measure(Engine(model, maker.tokenizer), held_out, reference)
        keep(row, {**found._asdict(), **sizes(model, row, maker), "quantize_seconds": seconds})


def measure_speed(
    rows: list[Row], maker: Maker, rounds: int, tokens: int, prefill: int
) -> dict[str, dict[str, Spread]]:
    """By storage: decode and prefill, all engines in turn, `rounds` times."""
    first = {row.storage: row for row in reversed(rows)}
    # Speed does not depend on how codes were chosen, so the quickest method makes them.
    engines = {
        storage: Engine(maker(row._replace(method="W8A8" if "W8A8" in storage else "rtn")), maker.tokenizer)
        for storage, row in first.items()
    }  # fmt: skip
    text = windows(maker.tokenizer, calibration_text(), max(prefill, 32 + tokens), 1)[0].tolist()
    rates: dict[str, dict[str, list[float]]] = {s: {"decode": [], "prefill": []} for s in engines}
    for turn in track(range(rounds + 1), "speed", console=err, transient=True):
        for storage, engine in engines.items():
            found = {
                "decode": decode_rate(engine, text[:32], text[32 : 32 + (tokens if turn else 2)]),
                "prefill": prefill_rate(engine, text[:prefill]),
            }
            if turn:  # the first round compiles and warms up
                for what, rate in found.items():
                    rates[storage][what].append(rate)
    return {s: {w: Spread.of(r) for w, r in found.items()} for s, found in rates.items()}


# ---- the table

HEADERS = (
    "scheme", "method", "bits / weight", "file MB", "memory MB", "perplexity", "KL", "top-1", "decode tok/s", "prefill tok/s",
)  # fmt: skip


def cells(result: dict[str, Any], *, ranges: bool = True) -> list[list[str]]:
    """The table as text, one line for each row. `ranges`: speeds with the least and the most behind the median."""

    def speed_of(row: dict[str, Any], measure: str, digits: int) -> str:
        found = result.get("speed", {}).get(row["storage"], {}).get(measure)
        if found is None:
            return "–"
        return span(Spread(**found), digits) if ranges else f"{found['median']:.{digits}f}"

    lines = []
    base = next((r["perplexity"] for r in result["rows"] if r["scheme"] == "float32"), None)
    for row in result["rows"]:
        more = ""
        if base and row["scheme"] != "float32":
            rise = round(100 * (row["perplexity"] / base - 1), 2) + 0.0  # and -0.0 is 0
            more = f" ({rise:+.2f} %)"
        lines.append(
            [
                row["scheme"],
                row["method"] or "–",
                f"{row['bits_per_weight']:.2f}",
                f"{row['file_bytes'] / 1e6:.0f}",
                f"{row['memory_bytes'] / 1e6:.0f}",
                f"{row['perplexity']:.2f}{more}",
                f"{row['kl']:.4f}",
                f"{100 * row['top1']:.1f} %",
                speed_of(row, "decode", 1),
                speed_of(row, "prefill", 0),
            ]
        )  # fmt: skip
    return lines


def notes(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{result['model']}, {result['tokens']:,} tokens of held-out text predicted (half of the topics of Python's help, "
        f"Python {result['text_python']}), windows of {result['window']}.",
    ]
    if about := result.get("conditions"):
        quiet = about["quiet"]
        lines.append(
            f"Speed: {about['date']}, {about['machine']['cpu']}, {about['threads']} threads, median of "
            f"{about['rounds']} interleaved rounds; {about['tokens']} tokens decoded, {about['prefill']} read. Others took "
            f"{quiet['others']:.0%} of the CPU time meanwhile, the hypervisor {quiet['stolen']:.0%}."
        )
        if quiet["others"] + quiet["stolen"] > 0.05:
            lines.append("The machine was not quiet: do not keep these speeds.")
    return lines


def markdown(result: dict[str, Any]) -> str:
    lines = [HEADERS, ["---", "---", *["---:"] * (len(HEADERS) - 2)], *cells(result, ranges=False)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return table + "\n\n" + "\n".join(f"* {line}" for line in notes(result)) + "\n"


def with_table(page: str, result: dict[str, Any]) -> str:
    """A Markdown page with this result between its two marks, in place of what is there."""
    before, mark, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"the page has no place for the table: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{markdown(result)}\n{END}{after}"


def rich_table(result: dict[str, Any]) -> Table:
    table = Table(title=result["model"])
    for i, header in enumerate(HEADERS):
        table.add_column(header, justify="right" if i > 1 else "left")
    for line in cells(result):
        table.add_row(*line)
    return table


def refuse_another_text(file: Path | None, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Rows of one table were measured on one text. Topics of `help()` change between versions such as 3.11 and 3.12."""

    def comparable(table: dict[str, Any]) -> dict[str, Any]:
        version = str(table.get("text_python", "")).split(".")[:2]
        return {key: table.get(key) for key in wanted} | {"text_python": ".".join(version)}

    here, there = comparable(wanted), comparable(stored)
    apart = [f"{key} {there[key]}, not {here[key]}" for key in wanted if here[key] != there[key]]
    if apart:
        raise typer.BadParameter(
            f"{file} was measured with {'; '.join(apart)}. Name another file for --json, or remove this one first."
        )


def main(
    model: Annotated[str, typer.Option(help="a known name or a folder")] = "smollm2-135m",
    only: Annotated[list[str] | None, typer.Option(help="rows, e.g. 'int4-g64*'")] = None,
    speed: Annotated[bool, typer.Option(help="measure speed too")] = True,
    quality: Annotated[bool, typer.Option(help="measure quality; else it is taken from --json")] = True,
    count: Annotated[int, typer.Option("--windows", help="windows of held-out text")] = 8,
    window: Annotated[int, typer.Option(help="tokens in a window")] = 512,
    rounds: int = 5,
    tokens: int = 64,
    prefill: int = 512,
    threads: Annotated[int, typer.Option(help="0: one for each core")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="written; rows that are there and not measured anew are kept")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown")] = False,
    page: Annotated[Path | None, typer.Option("--into", help="a Markdown page with marks for the table, README.md")] = None,
    quick: Annotated[bool, typer.Option(help="one small window, one round")] = False,
) -> None:  # fmt: skip
    """Measure what quantization of the weights costs and brings."""
    about = machine()
    threads = threads or about["cores"] or 1
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    if quick:
        count, window, rounds, tokens, prefill = 1, 64, 1, 4, 32
    maker = Maker(model)
    all_rows = known_rows()
    if not isinstance(
        MODELS.get(model), WheelModel
    ):  # only of these is there a file with the blocks as they were
        all_rows = [row for row in all_rows if row.scheme != "stored"]
    rows = [r for r in all_rows if not only or any(fnmatch.fnmatch(r.name, p) for p in only)]
    if not rows:
        raise typer.BadParameter(f"no such row. Known: {', '.join(r.name for r in all_rows)}")

    result: dict[str, Any] = {}
    if json_file and json_file.exists():
        result = json.loads(json_file.read_text("utf8"))
    held_out = windows(maker.tokenizer, held_out_text(), window, count)
    about_text = {"model": model, "tokens": count * (window - 1), "window": window, "text_python": about["python"]}  # fmt: skip
    if quality and result:
        refuse_another_text(json_file, result, about_text)
    if quality:
        result = {**result, **about_text}
    kept = {row["name"]: row for row in result.get("rows", [])}

    def write() -> None:
        result["rows"] = [kept[row.name] for row in all_rows if row.name in kept]
        if json_file:
            json_file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf8")

    def keep(row: Row, found: dict[str, Any]) -> None:
        kept[row.name] = {"name": row.name, "storage": row.storage, **row._asdict(), **found}
        write()  # at once: a run that is broken off has lost one row at most

    if quality:
        measure_quality(rows, maker, held_out, keep)
    if speed:
        quiet = Quiet(time.process_time)
        found = measure_speed(rows, maker, rounds, tokens, prefill)
        result["speed"] = {s: {w: x._asdict() for w, x in r.items()} for s, r in found.items()}
        result["conditions"] = {
            "date": datetime.date.today().isoformat(), "machine": about, "threads": threads, "rounds": rounds,
            "tokens": tokens, "prefill": prefill, "quiet": quiet.end(),
        }  # fmt: skip
    write()
    if page:
        page.write_text(with_table(page.read_text("utf8"), result), "utf8")
    if as_markdown:
        print(markdown(result))
    else:
        console = Console(width=150)
        console.print(rich_table(result))
        for line in notes(result):
            console.print(line)


if __name__ == "__main__":
    typer.run(main)
