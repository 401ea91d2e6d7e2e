"""One process for each engine, and the few words spoken with it.

An engine lives in its own process, so that its peak memory is its own, and so that a crash ends nothing but itself. Both sides
are here: `Worker` is the handle that compare.py holds, `serve` is what runs in the process. They exchange lines of JSON over
pipes. Between two commands a process is blocked in a read: it must use no CPU while others are measured, and that is checked.
"""

import contextlib
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
TIMEOUT = 900.0  # seconds for one command
THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS",
)  # fmt: skip
# How long a thread without work spins before it sleeps. "active" would burn the cores while others are measured, "passive" makes
# every small parallel loop wait for the scheduler: the libraries' own defaults (a few milliseconds, then sleep) are right.
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "OMP_PLACES")  # fmt: skip


class EngineFailed(RuntimeError):
    """An engine could not do what was asked: the message says why. The others go on."""


def environment(threads: int) -> dict[str, str]:
    """The environment of a worker: so many threads for every library, and default waiting."""
    made = {key: value for key, value in os.environ.items() if key not in WAIT_VARIABLES}
    made |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    made |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    made["PYTHONPATH"] = os.pathsep.join(
        [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return made


class Worker:
    """An engine in its process. `spec` names the class ("module:Class") and what it is made from."""

    def __init__(self, spec: dict[str, Any], threads: int, timeout: float = TIMEOUT):
        self.name, self.timeout, self.used = spec["name"], timeout, 0.0
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "workers.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment(threads),
        )
        self.buffer = b""
        self.pid = self.process.pid
        self.made = self.ask("load", spec=spec, threads=threads)

    def ask(self, command: str, **arguments: Any) -> Any:
        """Have something done and wait for the result; raises `EngineFailed`."""
        try:
            line = json.dumps({"do": command, **arguments}) + "\n"
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
            answer = json.loads(self._line())
        except TimeoutError:  # before OSError, which it is a kind of
            self.close(kill=True)
            raise EngineFailed(f"no answer to {command!r} after {self.timeout:.0f} s") from None
        except (OSError, EOFError):
            code = self.process.wait()
            how = f"signal {-code}" if code < 0 else f"exit status {code}"
            note = ", as when memory runs out" if code == -9 else ""
            self.close()
            raise EngineFailed(
                f"its process ended with {how}{note} during {command!r}{self._last_words()}"
            ) from None
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer["result"]

    def _line(self) -> bytes:
        """One line from the process. Read without a thread: nothing of ours runs while an engine is measured."""
        stream, end = self.process.stdout.fileno(), time.monotonic() + self.timeout
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([stream], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            block = os.read(stream, 1 << 16)
            if not block:
                raise EOFError
            self.buffer += block
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        if self.log.closed:
            return ""
        self.log.seek(0)
        lines = self.log.read().decode("utf8", "replace").strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""

    def cpu_seconds(self) -> float:
        """CPU time this process has used so far, all threads together; if it is gone, as far as is known."""
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self.pid).cpu_times()
            self.used = max(self.used, times.user + times.system)
        return self.used

    def close(self, kill: bool = False) -> None:
        """End the process."""
        if kill:
            self.process.kill()
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # the end of its input is the end of its work
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


# ---- the other side


def memory() -> dict[str, int]:
    """Bytes of memory this process holds: the most so far, and now. Mapped files count as far as they are in memory."""
    status = Path("/proc/self/status")
    if (
        status.exists()
    ):  # not ru_maxrss: on Linux that begins with the size of the process we were started from
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return {k: int(fields[f].split()[0]) * 1024 for k, f in (("peak", "VmHWM"), ("now", "VmRSS"))}  # fmt: skip
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak *= 1 if sys.platform == "darwin" else 1024
    return {"peak": peak, "now": psutil.Process().memory_info().rss}


def forget_peak() -> None:
    """Let the peak begin again at what is held now (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def serve(commands: Any, answers: Any) -> None:
    """Read commands, do them one after the other, write results. Errors are answers too."""
    engine = None
    for line in commands:
        arguments = json.loads(line)
        command = arguments.pop("do")
        try:
            if command == "load":
                spec = arguments["spec"]
                module, name = spec["class"].split(":")
                engine = getattr(importlib.import_module(module), name)(spec, arguments["threads"])
                result = engine.made() | {"memory": memory()}
            elif command == "memory":
                result = memory()
            else:
                result = getattr(engine, command)(**arguments)
                if command == "tune":  # trials of settings that were not chosen are not its memory
                    forget_peak()
            answer = {"result": result}
        except Exception as error:
            # the traceback goes to the log, one line to the table
            import traceback

            traceback.print_exc()
            text = " ".join(str(error).split())
            answer = {"error": f"{type(error).__name__}: {text}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    # What libraries print must not get between our lines: their standard output is our standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf8")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
