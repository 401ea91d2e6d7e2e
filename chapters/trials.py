"""Cells of a notebook, run where they can do little harm: in a process that has limits and is thrown away.

`Trials` starts a server, which imports torch and runs the setup cell once. For each trial it forks: what one trial does to the
process (an endless loop, os._exit, a changed torch) ends with it. Nothing here is a wall against malice: a trial may do whatever
the user who started it may do. The instructor's guide says how to put a container around it.
"""

import ast
import builtins
import contextlib
import dataclasses
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECRET = re.compile(
    "TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY", re.I
)  # variables that a trial does not see
PATIENCE = 5  # on a busy machine a cell may take so many times its seconds by the clock, if it computes no longer than these
GRACE = 5  # seconds that a cell's own alarm has, before the cell is ended from outside
LINE = 1_000_000  # bytes of one message; a longer one is not ours
# Modules that tests rely on: what a cell changes in them is put back before the next cell.
JUDGES = (
    *("builtins", "math", "numpy", "numpy.testing"),
    *("torch", "torch.testing", "torch.nn.functional"),
)


@dataclass(frozen=True)
class Limits:
    """What one trial may take. Seconds are seconds of computing; see `PATIENCE` for those by the clock."""

    cell_seconds: float = 60  # each cell
    seconds: float = 240  # all cells of a trial
    output: int = 10_000  # characters that a cell prints; the rest is counted and dropped
    memory: int = 6_000  # MB of the process and its children
    file: int = 2_000  # MB of one file

    def generous(self) -> "Limits":
        """For a second try, where the first ended in a cell that is not the student's."""
        longer = {"cell_seconds": 10 * self.cell_seconds, "seconds": 10 * self.seconds}
        return dataclasses.replace(self, **longer, memory=2 * self.memory)


@dataclass
class Failure:
    """An error in a cell: what, and where in the cells (outermost first): (cell, line number, line)."""

    kind: str
    message: str
    places: list[tuple[str, int, str]] = field(default_factory=list)
    got: str = ""  # of a failed assertion: the values it compared

    @property
    def line(self) -> int:
        """The line of the cell that was run."""
        return self.places[0][1] if self.places else 0


@dataclass
class Outcome:
    """What became of one cell."""

    cell: str
    output: str = ""
    failure: Failure | None = None
    seconds: float = 0.0  # of its limit that were used


class Trials:
    """Runs lists of cells, each list in a process of its own. `root` holds the llm_engine that they import.

    `imports` are statements whose modules every trial finds loaded.
    """

    def __init__(
        self, root: Path, setup: str, limits: Limits | None = None, imports: list[str] | None = None
    ):
        self.root, self.setup, self.limits = Path(root), setup, limits or Limits()
        self.imports = imports or []
        self.server: subprocess.Popen | None = None
        self.lines: queue.Queue = queue.Queue()

    def __enter__(self) -> "Trials":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        if self.server is not None:
            end(self.server.pid)
            self.server.wait()
            for pipe in (self.server.stdin, self.server.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
            self.server = None

    def start(self) -> None:
        env = {k: v for k, v in os.environ.items() if not SECRET.search(k)} | {
            "PYTHONPATH": os.pathsep.join([str(self.root), os.environ.get("PYTHONPATH", "")]),
            "MPLBACKEND": "agg",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "LLM_ENGINE_PROGRESS": "off",
            "HF_HUB_OFFLINE": "1",
        }
        self.server = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.lines = queue.Queue()
        threading.Thread(target=listen, args=(self.server, self.lines), daemon=True).start()
        self.send({"root": str(self.root), "setup": self.setup, "imports": self.imports})
        message = self.receive(time.monotonic() + 600)
        if not message or not message.get("ready"):
            self.close()
            said = (message or {}).get("error", "it ended")
            raise RuntimeError(f"the setup cell does not run: {said}")

    def send(self, message: dict) -> None:
        self.server.stdin.write(json.dumps(message).encode() + b"\n")
        self.server.stdin.flush()

    def receive(self, deadline: float) -> dict | None:
        """The next message; {} when time is up, None when the server has ended."""
        while True:
            try:
                line = self.lines.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                return {}
            if line is None:
                return None
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    return message

    def run(
        self, cells: list[tuple[str, str]], limits: Limits | None = None, test: str = ""
    ) -> list[Outcome]:
        """What each cell did, in order; like Jupyter with allowed errors, it goes on after one.

        A trial that is stopped or dies leaves a failure for the cell it was in, and for each cell after it. The cell `test` means
        Python's own `sum` by `sum`, also where a cell before it gave that name to something else.
        """
        if self.server is None or self.server.poll() is not None:
            self.close()
            self.start()
        limits, outcomes = limits or self.limits, []
        folder = tempfile.mkdtemp(prefix="trial-")
        self.send({"cells": cells, "limits": vars(limits), "folder": folder, "test": test})
        start = began = time.monotonic()
        now, pid, over, computed = None, None, None, 0.0
        while True:
            if over is None:
                # the cell's own alarm comes first; who ignores it is ended here
                message = self.receive(time.monotonic() + 0.25)
            else:
                message = self.receive(time.monotonic() + 20)
            if message is None or (over and not message):
                break  # the server is gone
            if "pid" in message:
                pid = message["pid"]
            elif "start" in message:
                now, began, computed = message["start"], time.monotonic(), computing_of(pid)
            elif "cell" in message:
                outcomes.append(read_outcome(message))
            elif "exit" in message:
                over = over or ended(message["exit"])
                break
            elif not message:
                used, total = computing_of(pid), time.monotonic() - start
                clock, used_here = time.monotonic() - began - GRACE, used - computed - GRACE
                if is_over(clock, used_here, limits.cell_seconds):
                    over = f"stopped: it ran longer than {limits.cell_seconds:g} s"
                elif is_over(total - GRACE, used - GRACE, limits.seconds):
                    over = f"stopped: all cells together ran longer than {limits.seconds:g} s"
                if over:
                    end(pid)
            if pid and not over and (used := memory_of(pid)) > limits.memory:
                over = f"stopped: it took {used:,} MB of memory; {limits.memory:,} are allowed"
                end(pid)
        if pid:
            end(pid)
        if (
            over is None or message is None or pid == self.server.pid
        ):  # (no fork: one trial, one server)
            over = over or "the process that runs the cells was killed"
            self.close()
        shutil.rmtree(folder, ignore_errors=True)
        for cell_id, _ in cells[len(outcomes) :]:
            used = time.monotonic() - began if cell_id == now else 0.0
            outcomes.append(Outcome(cell_id, failure=Failure("Stopped", over), seconds=used))
            if cell_id == now or now is None:
                over = f"not run, because cell {cell_id} ended the process"
        return outcomes


def read_outcome(message: dict) -> Outcome:
    failure = message.get("failure")
    if failure:
        places = [tuple(place) for place in failure["places"]]
        failure = Failure(failure["kind"], failure["message"], places, failure["got"])
    return Outcome(message["cell"], message["output"], failure, message["seconds"])


def ended(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended itself with exit code {code} (os._exit, or a crash)"


def listen(server: subprocess.Popen, lines: queue.Queue) -> None:
    with contextlib.suppress(OSError, ValueError):
        while line := server.stdout.readline(LINE):
            lines.put(line)
    lines.put(None)


def family(pid: int) -> list:
    import psutil

    try:
        process = psutil.Process(pid)
        return [*process.children(recursive=True), process]
    except psutil.Error:
        return []


def memory_of(pid: int) -> int:
    """MB that a process and its children hold."""
    total = 0
    for process in family(pid):
        with contextlib.suppress(Exception):
            total += process.memory_info().rss
    return total // 1_000_000


def computing_of(pid: int | None) -> float:
    """Seconds that a process and its children have computed."""
    total = 0.0
    for process in family(pid) if pid else []:
        with contextlib.suppress(Exception):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def is_over(clock: float, computed: float, limit: float) -> bool:
    return clock >= limit and (computed >= limit or clock >= PATIENCE * limit)


def end(pid: int | None) -> None:
    """Kill a process that we started, what it started, and what still belongs to its session."""
    for process in family(pid) if pid else []:
        with contextlib.suppress(Exception):
            process.kill()
    if pid and hasattr(os, "killpg"):
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)


# ---- the server


class OutOfTime(BaseException):
    """A cell ran too long. No Exception, so that `except Exception: pass` in a loop does not swallow it."""


class Limited:
    """A text stream that keeps the first characters and counts the rest."""

    encoding = "utf-8"

    def __init__(self, limit: int):
        self.limit, self.kept, self.size = limit, [], 0

    def write(self, text: Any) -> int:
        text = str(text)
        if self.size < self.limit:
            self.kept.append(text[: self.limit - self.size])
        self.size += len(text)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def text(self) -> str:
        dropped = self.size - self.limit
        rest = f"\n… and {dropped:,} more characters, not kept" if dropped > 0 else ""
        return "".join(self.kept) + rest


def serve() -> None:
    """Read a setup, then trials, as lines of JSON from stdin; write messages to what stdout was."""
    pipe = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(nothing, 0)

    def tell(message: dict) -> None:
        pipe.write(b"\n" + json.dumps(message).encode("utf8", "replace") + b"\n")

    first = json.loads(requests.readline())
    try:
        shell = new_shell(first["root"], first["setup"], first["imports"])
    except Exception as error:
        tell({"ready": False, "error": f"{type(error).__name__}: {error}"})
        return
    clean = Clean(shell)
    tell({"ready": True})
    for line in requests:
        job = json.loads(line)
        if not hasattr(os, "fork"):
            tell({"pid": os.getpid()})
            try_cells(shell, clean, job, tell)
            tell({"exit": 0})
            return  # the next trial gets a new server
        watch = hasattr(signal, "sigtimedwait")
        if watch:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        teacher, pid = os.getppid(), os.fork()
        if pid == 0:
            try:
                os.setsid()
                if watch:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
                requests.close()
                os.dup2(nothing, 2)
                try_cells(shell, clean, job, tell)
            finally:
                os._exit(0)
        tell({"pid": pid})
        while watch and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            signal.sigtimedwait([signal.SIGCHLD], 1)
            if os.getppid() != teacher:  # who started us is gone, and nobody else would end this
                end(pid)
                return
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        tell({"exit": os.waitstatus_to_exitcode(status)})


def new_shell(root: str, setup: str, imports: list[str]):
    """IPython's shell, as in a kernel, after the setup cell, with modules loaded that cells will import."""
    sys.path[:] = [
        root,
        *(p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent),
    ]
    from IPython.core.history import HistoryManager
    from IPython.core.interactiveshell import InteractiveShell

    HistoryManager.enabled = False  # its thread would not survive a fork
    shell = InteractiveShell.instance()
    shell.showtraceback = lambda *_, **__: None
    shell.showsyntaxerror = lambda *_, **__: None
    with contextlib.redirect_stdout(Limited(1000)), contextlib.redirect_stderr(Limited(1000)):
        shell.run_cell(setup, store_history=False).raise_error()
        for statement in imports:
            with contextlib.suppress(Exception):  # the cell that wants it will say so
                exec(statement, {})
    return shell


class Clean:
    """What the setup cell left, and what a cell may change of it for those after it: IPython's hooks, modules that tests rely on.

    For mistakes, not against malice: a thread, or a result that equals everything, is not noticed.
    """

    def __init__(self, shell):
        self.modules = [(vars(sys.modules[m]), public(m)) for m in JUDGES if m in sys.modules]
        self.torch = sys.modules.get("torch")
        self.tensor = dict(vars(self.torch.Tensor)) if self.torch else {}
        self.state = self.torch_state()
        self.recursion = sys.getrecursionlimit()
        self.names = dict(shell.user_ns)
        lines = shell.input_transformer_manager
        places = [(shell, "ast_transformers"), (shell, "input_transformers_post")]
        places += [
            (lines, n) for n in ("cleanup_transforms", "line_transforms", "token_transformers")
        ]
        self.hooks = [(owner, name, list(getattr(owner, name))) for owner, name in places]
        self.shell, self.manager = shell, lines
        self.calls = {name: list(calls) for name, calls in shell.events.callbacks.items()}

    def torch_state(self) -> tuple:
        if not self.torch:
            return ()
        torch = self.torch
        return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_default_device()

    def shadowed(self) -> set[str]:
        """Python's own names that cells have given to something else."""
        names = self.shell.user_ns
        taken = {n for n in vars(builtins) if n in names and names[n] is not self.names.get(n)}
        return {n for n in taken if not n.startswith("_")}

    def restore(self) -> None:
        for names, before in self.modules:  # builtins first, and without any of them
            for name, value in before.items():
                if names.get(name) is not value:
                    names[name] = value
        sys.settrace(None)
        sys.setprofile(None)
        sys.setrecursionlimit(self.recursion)
        self.shell.input_transformer_manager = self.manager
        for owner, name, hooks in self.hooks:
            setattr(owner, name, list(hooks))
        self.shell.events.callbacks.update({n: list(calls) for n, calls in self.calls.items()})
        self.shell.set_custom_exc((), None)
        if not self.torch:
            return
        tensor = self.torch.Tensor
        for name, value in dict(vars(tensor)).items():
            if name not in self.tensor and any(name in vars(kind) for kind in tensor.__mro__[1:]):
                delattr(tensor, name)  # it stood before what all tensors have
            elif self.tensor.get(name, value) is not value:
                setattr(tensor, name, self.tensor[name])
        if self.torch_state() != self.state:
            dtype, grad, device = self.state
            self.torch.set_default_device(None if device.type == "cpu" else device)
            self.torch.set_default_dtype(dtype)
            self.torch.set_grad_enabled(grad)


def public(module: str) -> dict[str, Any]:
    """The names that others use of a module; of Python's own all."""
    names = vars(sys.modules[module])
    every = module == "builtins"
    return {n: v for n, v in names.items() if (every and n != "_") or not n.startswith("_")}


class Originals(ast.NodeTransformer):
    """Lets one cell mean Python's own names, where cells before it have given them to something else."""

    def __init__(self, names: set[str]):
        self.names = names

    def visit_Module(self, tree: ast.Module) -> ast.Module:
        nodes = list(ast.walk(tree))
        own = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        own |= {n.arg for n in nodes if isinstance(n, ast.arg)}
        own |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        own |= {
            a.asname or a.name for n in nodes for a in getattr(n, "names", []) if hasattr(a, "name")
        }
        self.names -= own
        return ast.fix_missing_locations(self.generic_visit(tree))

    def visit_Name(self, name: ast.Name) -> ast.expr:
        if name.id not in self.names:
            return name
        module = ast.Call(ast.Name("__import__", ast.Load()), [ast.Constant("builtins")], [])
        return ast.copy_location(ast.Attribute(module, name.id, ast.Load()), name)


def try_cells(shell, clean: Clean, job: dict, tell) -> None:
    limits = Limits(**job["limits"])
    os.chdir(job["folder"])
    confine(limits)
    total, codes = 0.0, dict(job["cells"])
    for cell_id, code in job["cells"]:
        tell({"start": cell_id})
        start, computed = time.monotonic(), time.process_time()
        left = min(limits.cell_seconds, limits.seconds - total)
        if cell_id == job["test"]:
            shell.ast_transformers.append(Originals(clean.shadowed()))
        output, failure = run_cell(
            shell, clean, cell_id, code, max(left, 0.01), limits.output, codes
        )
        clock, computed = time.monotonic() - start, time.process_time() - computed
        seconds = round(min(clock, max(computed, clock / PATIENCE)), 3)
        total += seconds
        message = {"cell": cell_id, "output": output.text(), "seconds": seconds}
        tell(message | {"failure": vars(failure) if failure else None})


def confine(limits: Limits) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file * 1_000_000,) * 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then it is an OSError, not a death


def run_cell(
    shell, clean: Clean, cell_id: str, code: str, seconds: float, kept: int, codes: dict
) -> tuple[Limited, Failure | None]:
    output = Limited(kept)
    shell.compile.get_code_name = lambda *_: f"<{cell_id}>"
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            with alarm(seconds), warnings.catch_warnings():
                result = shell.run_cell(code, store_history=False, silent=False)
            error = result.error_before_exec or result.error_in_exec
        except BaseException as stray:  # the alarm may ring between two steps of IPython
            error = stray
        with contextlib.suppress(Exception):
            clean.restore()
        failure = describe(shell, error, cell_id, codes) if error is not None else None
        unheard = contextlib.redirect_stdout(Limited(0)), contextlib.redirect_stderr(Limited(0))
        with contextlib.suppress(BaseException), alarm(5), unheard[0], unheard[1]:
            if failure and failure.kind == "AssertionError":
                explain(shell, failure, codes[cell_id])
    return output, failure


@contextlib.contextmanager
def alarm(seconds: float):
    if not hasattr(signal, "setitimer"):
        yield
        return

    clock, computed = time.monotonic(), time.process_time()

    def ring(*_):
        if is_over(time.monotonic() - clock, time.process_time() - computed, 0.98 * seconds):
            raise OutOfTime(f"it ran longer than {seconds:.3g} s")

    before = signal.signal(signal.SIGALRM, ring)
    # again and again: a loop may swallow one of them
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def describe(shell, error: BaseException, cell_id: str, codes: dict) -> Failure:
    places = []
    for frame in traceback.extract_tb(error.__traceback__):
        place = frame.filename[1:-1]
        if place in codes:
            places.append((place, frame.lineno, (frame.line or "").strip()[:200]))
    if isinstance(error, SyntaxError) and not places:
        places.append((cell_id, error.lineno or 0, (error.text or "").strip()[:200]))
    try:
        message = str(error)[:2000]
    except BaseException:
        message = "(an error that cannot be printed)"
    return Failure(type(error).__name__, message, places[:20])


def explain(shell, failure: Failure, code: str) -> None:
    """Of an assertion that failed in the cell itself: the values on both sides, looked at again."""
    if len(failure.places) != 1:
        return
    tests = [s for s in ast.walk(ast.parse(code)) if isinstance(s, ast.Assert)]
    test = next(s.test for s in tests if s.lineno <= failure.line <= s.end_lineno)

    def value(node: ast.expr) -> Any:
        text = ast.fix_missing_locations(ast.Expression(node))
        return eval(compile(text, "<explain>", "eval"), shell.user_ns)

    while isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        test = next(part for part in test.values if not value(part))
    if isinstance(test, ast.Compare) and len(test.comparators) == 1:
        left, right = test.left, test.comparators[0]
        if not isinstance(left, ast.Constant):
            failure.got = f"{text_of(left)} is {short(value(left))}"
        if not isinstance(right, ast.Constant | ast.Tuple | ast.List):
            failure.got += f"{'; ' if failure.got else ''}{text_of(right)} is {short(value(right))}"
    elif isinstance(test, ast.Call) and len(test.args) >= 2:
        first, second = test.args[:2]
        failure.got = f"{text_of(first)} is {short(value(first))}; {text_of(second)} is {short(value(second))}"


def text_of(node: ast.expr) -> str:
    text = ast.unparse(node)
    return f"`{text}`" if len(text) <= 60 else f"`{text[:57]}…`"


def short(value: Any) -> str:
    """A value in a line; of a large tensor or array its shape and what is in it."""
    if hasattr(value, "shape") and hasattr(value, "dtype") and math.prod(value.shape) > 12:
        return summary(value)
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else text[:200] + " …"


def summary(tensor: Any) -> str:
    text = f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
    numbers = [float(x) for x in tensor.reshape(-1)[:100_000].tolist()]
    finite = [x for x in numbers if math.isfinite(x)]
    if strange := len(numbers) - len(finite):
        text += f", {strange if finite else 'all'} of them NaN or infinite"
    if finite and min(finite) == max(finite):
        text += f", {'the others' if strange else 'all'} {finite[0]:.6g}"
    elif finite:
        text += f", from {min(finite):.6g} to {max(finite):.6g}"
    return text


if __name__ == "__main__":
    serve()
