"""From the numbers of all rounds to medians, ratios, goals and a table."""

from statistics import median
from typing import Any, NamedTuple

from rich.table import Table

BUSY = 0.05  # share of the CPU time that others may take before a table is called disturbed
WAYS = ("loop", "generate")  # a bare decode loop, and what the library offers


class Goal(NamedTuple):
    """`ours` must reach `least` times the peer's value; without a peer, `least` itself."""

    measure: str  # "decode", "prefill" or "share"
    ours: str  # a precision: the fastest of this engine's runners stands for it
    peer: str | None  # an engine's name, "best" (of the peers in that precision), or None
    least: float


GOALS = (
    Goal("decode", "float32", "llama.cpp-float32", 1.0),
    Goal("decode", "float32", "transformers-float32", 3.5),
    Goal("share", "float32", None, 0.85),
    Goal("decode", "bf16", "llama.cpp-bf16", 1.05),
    Goal("prefill", "float32", "best", 1.15),
    Goal("prefill", "bf16", "best", 1.15),
    Goal("decode", "int8", "llama.cpp-q8_0", 1.2),
    Goal("decode", "int4", "llama.cpp-q4_0", 1.1),
    Goal("prefill", "int8", "numba-bf16", 1.0),  # fewer bits must not make a prompt slower
    Goal("prefill", "int4", "numba-bf16", 1.0),
)
SHAPE_GOALS = (Goal("share", "bf16", None, 0.90),)


class Spread(NamedTuple):
    """The median of all rounds, between the least and the most."""

    median: float
    least: float
    most: float
    values: list[float]

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(median(values), min(values), max(values), list(values))


def summarize(
    made: dict[str, Any], rounds: list[dict[str, float]], bandwidths: list[float], positions: float
) -> dict[str, Any]:
    """One engine over all rounds. positions: how many earlier tokens a decode step looks at, on average."""
    result = {key: Spread.of([one[key] for one in rounds]) for key in rounds[0]}
    way = max((way for way in WAYS if way in result), key=lambda way: result[way].median)
    token = made["weight_bytes"] + made["token_bytes"] * positions
    result["way"], result["decode"], result["bytes_per_token"] = way, result[way], token
    shares = [token * rate / most for rate, most in zip(result[way].values, bandwidths)]
    result["share"] = Spread.of(shares)
    return result


def ratio(a: Spread, b: Spread) -> Spread:
    """a / b, round by round: what slowed the machine down in one round slowed both."""
    return Spread.of([x / y for x, y in zip(a.values, b.values)])


def fastest(engines: dict[str, Any], names: list[str], measure: str) -> str | None:
    """The name with the best median."""
    there = [name for name in names if measure in engines.get(name, {})]
    return max(there, key=lambda name: engines[name][measure].median, default=None)


def reach(goals: tuple[Goal, ...], engines: dict[str, Any], specs: dict[str, Any]) -> list[dict]:
    """How far each goal is reached; goals whose engines did not run are left out."""
    found = []
    for goal in goals:
        in_precision = [n for n, s in specs.items() if s["precision"] == goal.ours]
        mine = [n for n in in_precision if specs[n]["family"] == "llm-engine"]
        peers = [n for n in in_precision if specs[n]["family"] != "llm-engine"]
        ours = fastest(engines, mine, goal.measure)
        peer = fastest(engines, peers, goal.measure) if goal.peer == "best" else goal.peer
        if ours is None or (goal.peer and goal.measure not in engines.get(peer, {})):
            continue
        value = engines[ours][goal.measure]
        if goal.peer:
            value = ratio(value, engines[peer][goal.measure])
        found.append(
            {"measure": goal.measure, "ours": ours, "peer": peer, "goal": goal.least, "value": value}
            | {"reached": value.median >= goal.least}
        )  # fmt: skip
    return found


# ---- as text


def span(spread: Spread | None, digits: int = 1, scale: float = 1.0, unit: str = "") -> str:
    """`54.1 (52.0–55.3)`; without the range when there was one round."""
    if spread is None:
        return "–"
    value, least, most = (f"{x * scale:.{digits}f}" for x in spread[:3])
    return f"{value}{unit}" if len(spread.values) == 1 else f"{value}{unit} ({least}–{most})"


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells: one row for each engine, failed ones too."""
    n = result["prefill_tokens"]
    headers = ["engine", "decode tok/s", "`generate` tok/s", "of the bandwidth"]
    headers += [*([f"prefill of {n}, tok/s"] if n else []), "first token, ms", "peak MB"]
    cells = []
    for name, engine in result["engines"].items():
        if "failed" in engine:
            cells.append([name, "failed", *["–"] * (len(headers) - 2)])
            continue
        row = [
            name,
            span(engine["decode"]),
            span(engine["generate"]),
            span(engine["share"], 0, 100, " %"),
        ]
        row += [span(engine["prefill"], 0)] if n else []
        cells.append([*row, span(engine["first"], 0, 1000), f"{engine['memory']['peak'] / 1e6:.0f}"])  # fmt: skip
    return headers, cells


def notes(result: dict[str, Any]) -> list[str]:
    """What the table cannot say: conditions, goals, failures."""
    machine, quiet = result["machine"], result["quiet"]
    gigabytes = Spread(*(x / 1e9 for x in result["bandwidth"][:3]), result["bandwidth"].values)
    lines = [
        f"{result['date']}, {machine['cpu']}, {machine['cores']} cores, {result['threads']} threads, "
        f"{machine['system']}, Python {machine['python']}.",
        f"{result['model']}: after {result['prompt_tokens']} tokens, {result['tokens']} more; median (least–most) of "
        f"{result['rounds']} interleaved rounds. Read bandwidth {span(gigabytes)} GB/s.",
        f"Other processes took {quiet['others']:.0%} of the CPU time meanwhile, the hypervisor {quiet['stolen']:.0%}; "
        f"swapped: {quiet['swapped_mb']:.0f} MB.",
    ]
    if quiet["others"] + quiet["stolen"] > BUSY:
        lines.append("The machine was not quiet: do not keep these numbers.")
    versions: dict[str, str] = {}
    for engine in result["engines"].values():
        versions |= engine.get("versions", {})
    lines.append(", ".join(f"{k} {v}" for k, v in versions.items()) + ".")
    for goal in result["goals"]:
        against = f" / {goal['peer']}" if goal["peer"] else ""
        lines.append(
            f"{goal['measure']}: {goal['ours']}{against} = {span(goal['value'], 2)}, goal {goal['goal']:.2f}: "
            + ("reached" if goal["reached"] else "missed")
        )
    for name, engine in result["engines"].items():
        if "failed" in engine:
            lines.append(f"{name} failed: {engine['failed']}")
        elif engine["idle_share"] > 0.02:
            lines.append(f"{name} used {engine['idle_share']:.0%} of a core while others were measured")  # fmt: skip
    return lines


def settings(result: dict[str, Any]) -> list[str]:
    """How each engine ran: the fastest of the settings that were tried, and the faster way to decode."""
    lines = []
    for name, engine in result["engines"].items():
        if "failed" in engine:
            continue
        ways = " · ".join(f"{way} {span(engine[way])}" for way in WAYS)
        chosen = {
            work: ", ".join(f"{k} {v}" for k, v in setting.items())
            for work, setting in engine["chosen"].items()
            if setting
        }
        line = f"{name}: {ways}"
        if chosen:
            line += "; " + "; ".join(f"{work} with {text}" for work, text in chosen.items())
        agree = engine["check"]
        line += f"; says {agree['same']} of {agree['of']} tokens as the reference"
        if "logits_apart" in agree:
            line += f", logits at most {agree['logits_apart']:.3g} apart"
        lines.append(line)
    return lines


def rich_table(result: dict[str, Any]) -> Table:
    headers, cells = rows(result)
    table = Table(title=result["model"])
    for i, header in enumerate(headers):
        table.add_column(header.replace("`", ""), justify="right" if i else "left")
    for row in cells:
        table.add_row(*row)
    return table


def markdown(result: dict[str, Any]) -> str:
    """The table as it stands in README.md, and its conditions."""
    headers, cells = rows(result)
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *cells]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return table + "\n\n" + "\n".join(f"* {line}" for line in notes(result)) + "\n"


def as_json(value: Any) -> Any:
    """The result as plain JSON: spreads become objects."""
    if isinstance(value, Spread):
        return value._asdict()
    if isinstance(value, dict):
        return {k: as_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(v) for v in value]
    return value
