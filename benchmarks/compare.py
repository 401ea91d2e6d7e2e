#!/usr/bin/env python3
"""This engine, transformers and llama.cpp, one after the other, on the same weights and the same number of threads.

python benchmarks/compare.py                                      everything, 10 to 20 minutes
python benchmarks/compare.py --engines '*-float32' --rounds 5     some
python benchmarks/compare.py --shape llama-3.2-1b                 a larger model's shape, random weights
python benchmarks/compare.py --profile --engines numba-float32    where a decode step's time goes

How it measures, and what was tried to be fair: benchmarks/README.md.
"""

import datetime
import fnmatch
import json
import os
import platform
import pydoc_data.topics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from report import (
    GOALS,
    SHAPE_GOALS,
    Spread,
    as_json,
    markdown,
    notes,
    reach,
    rich_table,
    settings,
    summarize,
)
from rich.console import Console
from workers import EngineFailed, Worker

BANDWIDTH = {"name": "bandwidth", "class": "contestants:Bandwidth"}
NOT_HERE = (
    "auto",
    "cuda-graph",
)  # runners: the fastest of the others, and one that is not for a CPU
REFERENCE = "torch-float32"
INSTALL = "python -m pip install -c constraints.txt -e '.[bench]'"
TIE = 0.2  # two candidates whose logits are closer than this may change places between two engines
SETTLE = 0.2  # seconds for the last engine's threads to fall asleep
SHAPES = {
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
}

err = Console(stderr=True, highlight=False, soft_wrap=True)


class NotTheSameModel(RuntimeError):
    """Two engines that should compute the same do not: comparing their speed would mean nothing."""


# ---- who takes part


def known_engines(precisions: tuple[str, ...] = ("float32", "bf16")) -> dict[str, dict[str, Any]]:
    """Every engine that can be named: this one with each registered runner for the CPU, then the peers."""
    from llm_engine import transformer  # noqa: F401 - the package registers its runners
    from llm_engine.transformer import RUNNERS

    specs: dict[str, dict[str, Any]] = {}

    def add(name: str, family: str, kind: str, precision: str, **more: Any) -> None:
        name = f"{name}-{precision}"
        specs[name] = {"name": name, "family": family, "class": f"contestants:{kind}"}
        specs[name] |= {"precision": precision, **more}

    for precision in precisions:
        for runner in (r for r in RUNNERS if r not in NOT_HERE):
            add(runner, "llm-engine", "Ours", precision, runner=runner)
        add("transformers", "transformers", "Transformers", precision)
        add("llama.cpp", "llama.cpp", "LlamaCpp", precision)
    for precision in ("int8", "int4"):
        add("numba", "llm-engine", "Ours", precision, runner="numba", quantize=precision)
    for precision in ("q8_0", "q4_0"):
        add("llama.cpp", "llama.cpp", "LlamaCpp", precision)
    return specs


USUAL = ("torch-*", "numba-*", "transformers-*", "llama.cpp-*")


def choose(patterns: list[str], specs: dict[str, Any]) -> dict[str, Any]:
    """Those whose name fits one of the patterns; a name without precision or a family means all of it."""
    chosen = {}
    for pattern in (p for group in patterns for p in group.split(",") if p):
        found = {
            n: s for n, s in specs.items() if fnmatch.fnmatch(n, pattern) or pattern in (s["family"], n.rpartition("-")[0])
        }  # fmt: skip
        if not found:
            raise typer.BadParameter(f"no engine {pattern!r}. Known: {', '.join(specs)}")
        chosen |= found
    return {n: s for n, s in specs.items() if n in chosen}


def missing(spec: dict[str, Any]) -> str | None:
    """Why an engine cannot run here at all."""
    if spec["family"] == "llama.cpp" and find_spec("llama_cpp") is None:
        return f"llama-cpp-python is not installed. {INSTALL} builds it from source, in 10 to 20 minutes"
    if spec["family"] == "transformers" and find_spec("transformers") is None:
        return f"transformers is not installed. {INSTALL}"
    return None


# ---- the weights


def random_folder(shape: str) -> Path:
    """A folder with random bfloat16 weights of a known shape, written once."""
    import shutil

    import torch
    from safetensors.torch import save_file

    from llm_engine.hub import cache_dir, resolve

    folder = cache_dir() / "benchmarks" / f"random-{shape}"
    if folder.exists():
        return folder
    config = SHAPES[shape]
    H, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[f"num_{k}_heads"] * config["head_dim"] for k in ("attention", "key_value"))
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(
            std=columns**-0.5, generator=generator
        )

    weights = {"model.embed_tokens.weight": matrix(V, H)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", q, H),
            ("self_attn.k_proj", kv, H),
            ("self_attn.v_proj", kv, H),
            ("self_attn.o_proj", H, q),
            ("mlp.gate_proj", F, H),
            ("mlp.up_proj", F, H),
            ("mlp.down_proj", H, F),
        ):
            weights[f"{at}{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = torch.ones(H, dtype=torch.bfloat16)
    weights["model.norm.weight"] = torch.ones(H, dtype=torch.bfloat16)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        new = Path(made) / folder.name
        new.mkdir()
        save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
        (new / "config.json").write_text(json.dumps(config, indent=2), "utf8")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(resolve() / name, new)
        new.rename(folder)
    return folder


def prepare_gguf(spec: dict[str, Any], folder: Path, threads: int) -> None:
    """Write the GGUF file that a llama.cpp engine runs, once."""
    from gguf_file import TYPES, cached_gguf, make_gguf

    path = cached_gguf(folder, spec["precision"])
    if not path.exists():
        err.print(f"writing {path.name}")
        if spec["precision"] in TYPES:
            make_gguf(folder, spec["precision"])
        else:
            source = make_gguf(folder, "float32")
            made = {"name": "quantizer", "class": "contestants:Quantizer"}
            worker = Worker(made, threads)
            worker.ask("quantize", source=str(source), path=str(path), precision=spec["precision"])
            worker.close()
    spec["gguf"] = str(path)


def text_ids(folder: Path, count: int) -> list[int]:
    """The ids of a text that is on every machine: Python's own help."""
    from llm_engine.tokenizer import Tokenizer

    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in ("assert", "assignment", "attribute-access"))
    ids = Tokenizer.from_folder(folder).encode(text)
    if len(ids) < count:
        raise typer.BadParameter(f"the text has {len(ids)} tokens, fewer than {count}")
    return ids[:count]


# ---- is it the same model?


def compare_words(
    name: str, spec: dict[str, Any], check: dict[str, Any], reference: dict[str, Any], strict: bool
) -> dict[str, Any]:
    """How many tokens agree with the reference's; raises `NotTheSameModel` if that cannot be rounding."""
    said, wanted = check["said"], reference["said"]
    apart = [i for i, (a, b) in enumerate(zip(said, wanted)) if a != b]
    found = {"same": len(wanted) - len(apart), "of": len(wanted)}
    if "logits_apart" in check:
        found["logits_apart"] = check["logits_apart"]
    if not strict:
        return found
    sure = [i for i in apart if reference["gaps"][i] > TIE]
    if spec["precision"] == "float32" and sure:
        i = sure[0]
        raise NotTheSameModel(
            f"{name} does not run the same model as {REFERENCE}: after {i} new tokens it says token {said[i]} instead of "
            f"{wanted[i]}, which leads by {reference['gaps'][i]:.2f} (logits after the prompt differ by up to "
            f"{check.get('logits_apart', 0):.3g}). Was its file written from these weights? Remove it and try again: "
            f"{spec.get('gguf', spec.get('folder'))}"
        )
    if spec["precision"] == "bf16" and found["same"] < 0.7 * found["of"]:
        raise NotTheSameModel(
            f"{name} does not run the same model as {REFERENCE}: only {found['same']} of {found['of']} tokens agree"
        )
    return found


# ---- the run


class Run:
    """All the workers of one comparison. An engine that fails is out; the others go on."""

    def __init__(self, specs: dict[str, dict[str, Any]], threads: int, work: dict[str, list[int]]):
        self.specs, self.threads, self.work = specs, threads, work
        self.workers: dict[str, Worker] = {}
        self.all_workers: list[Worker] = []  # those that failed, too
        self.engines: dict[str, dict[str, Any]] = {name: {} for name in specs}
        self.bandwidths: list[float] = []
        self.rounds: dict[str, list[dict[str, float]]] = {name: [] for name in specs}
        self.idle: dict[str, list[tuple[float, float]]] = {name: [] for name in specs}

    def failed(self, name: str, error: Exception) -> None:
        self.engines[name] = {"failed": str(error)}
        err.print(f"{name} failed: {error}", style="red", markup=False)
        if worker := self.workers.pop(name, None):
            worker.close()

    def start(self, name: str) -> Worker | None:
        """The worker of an engine, its weights loaded; None if that failed."""
        reason = missing(self.specs[name])
        try:
            if reason:
                raise EngineFailed(reason)
            self.workers[name] = Worker(self.specs[name], self.threads)
            self.all_workers.append(self.workers[name])
        except EngineFailed as error:
            self.failed(name, error)
            return None
        self.engines[name] |= self.workers[name].made
        return self.workers[name]

    def warm(self, name: str, tune: bool) -> None:
        """Compile and tune, outside every clock."""
        worker, work = self.workers[name], self.work
        fed = {"prompt": work["prompt"], "forced": work["forced"][:24], "long": work["long"]}
        found = worker.ask("tune", **fed, search=tune)
        self.engines[name] |= found

    def turn(self, name: str) -> None:
        """One engine's turn in a round, while all others sleep."""
        others = {n: w.cpu_seconds() for n, w in self.workers.items() if n != name}
        begin = time.perf_counter()
        self.rounds[name].append(self.workers[name].ask("measure", **self.work))
        passed = time.perf_counter() - begin
        for other, before in others.items():
            used = self.workers[other].cpu_seconds() - before
            self.idle[other].append((used, passed))

    def round(self, bandwidth: Worker) -> None:
        """Every engine once, in turn; the bandwidth is the best reading before any of the turns."""
        readings = [bandwidth.ask("bandwidth")]
        for name in list(self.workers):
            try:
                self.turn(name)
            except EngineFailed as error:
                self.failed(name, error)
            time.sleep(SETTLE)
            readings.append(bandwidth.ask("bandwidth"))
        self.bandwidths.append(max(readings))

    def finish(self) -> dict[str, dict[str, Any]]:
        """The engines with all that was found out about them."""
        forced, prompt = len(self.work["forced"]), len(self.work["prompt"])
        for name, worker in list(self.workers.items()):
            try:
                held = worker.ask("memory")
            except EngineFailed as error:
                self.failed(name, error)
                continue
            engine = self.engines[name]
            loaded = engine["memory"]["peak"]
            engine["memory"] = {"loading": loaded, "running": held["peak"], "now": held["now"]}
            engine["memory"]["peak"] = max(loaded, held["peak"])
            used, passed = (sum(column) for column in zip(*self.idle[name], strict=True)) if self.idle[name] else (0, 1)  # fmt: skip
            engine["idle_share"] = used / passed
            positions = prompt + (forced + 1) / 2
            engine |= summarize(engine, self.rounds[name], self.bandwidths, positions)
        return self.engines

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def begin(run: Run, folder: Path, strict: bool, tune: bool, tokens: int) -> None:
    """Load every engine, warm it up, and see that all compute the same; fills in what is fed to all of them."""
    with tempfile.TemporaryDirectory() as scratch:
        saved = str(Path(scratch) / "reference.npy")
        extra = None
        if strict and REFERENCE not in run.specs:
            err.print(f"loading the reference, {REFERENCE}")
            spec = known_engines()[REFERENCE] | {"folder": str(folder)}
            reader = extra = Worker(spec, run.threads)
        else:
            reader = next(filter(None, map(run.start, [REFERENCE] if strict else run.specs)), None)
        if reader is None:
            raise EngineFailed("no engine to compare the others with")
        if strict:
            said = reader.ask("greedy", prompt=run.work["prompt"], count=tokens)
            run.work["forced"] = said[:tokens]
        fed = {"prompt": run.work["prompt"], "forced": run.work["forced"]}
        reference = reader.ask("check", **fed, reference=None, save=saved)
        if extra:
            extra.close()
        for name, spec in run.specs.items():
            err.print(f"warming up {name}")
            if "failed" in run.engines[name] or (
                name not in run.workers and run.start(name) is None
            ):
                continue
            try:
                run.warm(name, tune)
                check = run.workers[name].ask("check", **fed, reference=saved, save=None)
            except EngineFailed as error:
                run.failed(name, error)
                continue
            run.engines[name]["check"] = compare_words(name, spec, check, reference, strict)


def machine() -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text("utf8").splitlines()
        name = next((s.split(":", 1)[1].strip() for s in lines if s.startswith("model name")), name)
    return {
        "cpu": name,
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


class Quiet:
    """How much of the machine others used between two moments."""

    def __init__(self, own: Callable[[], float]):
        self.own = own
        self.begin = self._now()

    def _now(self) -> tuple[float, float, float, float, float]:
        times = psutil.cpu_times()
        stolen = getattr(times, "steal", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        swapped = psutil.swap_memory()
        return sum(times[:8]), idle, stolen, self.own(), swapped.sin + swapped.sout

    def end(self) -> dict[str, float]:
        total, idle, stolen, own, swapped = (b - a for a, b in zip(self.begin, self._now()))
        total = max(total, 1e-9)  # the clock of the system is coarse
        return {
            "others": max(0.0, (total - idle - stolen - own) / total),
            "stolen": stolen / total,
            "swapped_mb": swapped / 1e6,
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        }


def enough_memory(specs: dict[str, Any], folder: Path) -> None:
    """All engines are loaded at once: refuse what would swap."""
    elements = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    stored = json.loads((folder / "config.json").read_text("utf8")).get("dtype", "float32")
    elements //= 4 if stored == "float32" else 2
    size = {"float32": 4, "bf16": 2, "q8_0": 34 / 32, "int8": 1.1, "q4_0": 18 / 32, "int4": 0.6}
    need = sum(elements * size[spec["precision"]] for spec in specs.values())
    need += (2 << 30) + (300 << 20) * len(specs)
    have = psutil.virtual_memory().available
    if need > have:
        raise typer.BadParameter(
            f"these {len(specs)} engines need about {need / 1e9:.1f} GB together, {have / 1e9:.1f} GB are free. "
            "Name fewer with --engines"
        )


def compare(
    specs: dict[str, Any], folder: Path, model: str, *, rounds: int, threads: int, prompt: int,
    tokens: int, prefill: int, strict: bool, tune: bool,
) -> dict[str, Any]:  # fmt: skip
    """The whole comparison; returns what `report` shows."""
    enough_memory(specs, folder)
    ids = text_ids(folder, max(prefill, prompt + tokens))
    work = {"prompt": ids[:prompt], "forced": ids[prompt : prompt + tokens], "long": ids[:prefill]}
    for spec in specs.values():
        spec |= {"folder": str(folder), "context": max(prefill, prompt + tokens) + 32}
        if spec["family"] == "llama.cpp" and not missing(spec):
            prepare_gguf(spec, folder, threads)
    run = Run(specs, threads, work)
    bandwidth = Worker(BANDWIDTH, threads)
    try:
        begin(run, folder, strict, tune, tokens)
        me = psutil.Process()

        def own() -> float:
            mine = sum(me.cpu_times()[:2])
            return mine + sum(w.cpu_seconds() for w in [bandwidth, *run.all_workers])

        quiet = Quiet(own)
        for number in range(1, rounds + 1):
            err.print(f"round {number} of {rounds}")
            run.round(bandwidth)
        about = quiet.end()
        engines = run.finish()
    finally:
        run.close()
        bandwidth.close()
    return {
        "tool": "benchmarks/compare.py",
        "date": datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        "model": model,
        "machine": machine(),
        "threads": threads,
        "rounds": rounds,
        "prompt_tokens": prompt,
        "tokens": tokens,
        "prefill_tokens": prefill,
        "quiet": about,
        "bandwidth": Spread.of(run.bandwidths),
        "engines": engines,
        "goals": reach(GOALS if strict else SHAPE_GOALS, engines, specs),
    }


def show_profiles(specs: dict[str, Any], folder: Path, threads: int, tokens: int) -> None:
    prompt = text_ids(folder, 32)
    for name, spec in specs.items():
        if spec["family"] != "llm-engine":
            continue
        print(f"\n==== {name}, {threads} threads")
        try:
            worker = Worker(spec | {"folder": str(folder)}, threads)
            print(worker.ask("profile", prompt=prompt, count=tokens))
            worker.close()
        except EngineFailed as error:
            print(f"failed: {error}")


app = typer.Typer(add_completion=False)


@app.command()
def main(
    engines: Annotated[list[str] | None, typer.Option(help="names or patterns, e.g. numba-bf16, 'llama.cpp-*', transformers")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(help="for every engine; 0: as many as there are cores")] = 0,
    model: Annotated[str, typer.Option(help="a known name, a folder or a Hub id")] = "smollm2-135m",
    shape: Annotated[str | None, typer.Option(help=f"random weights of this shape instead, decode only: {', '.join(SHAPES)}")] = None,
    tokens: Annotated[int, typer.Option(min=0, help="new tokens in a decode trial; 0: 64, or 16 with --shape")] = 0,
    prompt: Annotated[int, typer.Option(min=1, help="tokens before them")] = 32,
    prefill: Annotated[int, typer.Option(min=0, help="tokens of the prefill trial; 0: none")] = 512,
    json_file: Annotated[Path | None, typer.Option("--json", help="write everything here")] = None,
    markdown_too: Annotated[bool, typer.Option("--markdown", help="print the table as Markdown")] = False,
    quick: Annotated[bool, typer.Option(help="one round, 16 tokens, no search for settings: is it working?")] = False,
    profile: Annotated[bool, typer.Option(help="show where a decode step's time goes in this engine, and end")] = False,
) -> None:  # fmt: skip
    """Compare this engine with transformers and llama.cpp on this machine."""
    from llm_engine.hub import resolve

    threads = threads or psutil.cpu_count()
    if shape and shape not in SHAPES:
        raise typer.BadParameter(f"unknown shape {shape!r}. Known: {', '.join(SHAPES)}")
    known = known_engines()
    usual = ("*-bf16",) if shape else USUAL
    there = [p for p in usual if any(fnmatch.fnmatch(name, p) for name in known)]
    specs = choose(engines or there, known)
    tokens = tokens or (16 if shape else 64)
    if quick:
        rounds, tokens = 1, min(tokens, 16)
    folder = random_folder(shape) if shape else resolve(model)
    if profile:
        show_profiles(specs, folder, threads, tokens)
        return
    try:
        result = compare(
            specs, folder, f"random weights, shape of {shape}" if shape else model, rounds=rounds, threads=threads,
            prompt=prompt, tokens=tokens, prefill=0 if shape else prefill, strict=not shape, tune=not quick,
        )  # fmt: skip
    except (NotTheSameModel, EngineFailed) as error:
        err.print(f"stopped: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    if json_file:
        json_file.write_text(json.dumps(as_json(result), indent=2) + "\n", "utf8")
    if markdown_too:
        print(markdown(result))
        return
    out = Console(highlight=False, soft_wrap=True)
    if not out.is_terminal:
        out.width = 150
    out.print(rich_table(result))
    for line in [*notes(result), "", *settings(result)]:
        out.print(line, markup=False)


if __name__ == "__main__":
    app()
