#!/usr/bin/env python3
"""Every check of the project, one after the other: `python tests/run.py`. Exits non-zero if one fails.

python tests/run.py lint chapters    only the steps whose name contains one of these words
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
FOLDERS = ("chapters", "llm_engine", "tests", "benchmarks")
CODE = [name for name in FOLDERS if (ROOT / name).is_dir()]  # git keeps no empty folders
# A chapter's cells, and a module's fixtures, stay together.
WORKERS = ["-n", "2", "--dist", "loadfile"]
PYTEST = [PYTHON, "-m", "pytest", "-q", "--durations=10", "--durations-min=1", *WORKERS]

STEPS = {
    "sync: the package is what the notebooks say": [PYTHON, "chapters/sync.py", "--check"],
    "lint: notebooks": [PYTHON, "chapters/lint.py"],
    "lint: code": [PYTHON, "-m", "ruff", "check", "--quiet", *CODE],
    "lint: format": [PYTHON, "-m", "ruff", "format", "--check", "--quiet", *CODE],
    "model: the default model is there": [
        *(PYTHON, "-c"),
        "from llm_engine.hub import DEFAULT_MODEL, resolve; resolve(DEFAULT_MODEL)",
    ],
    "chapters: run, and compared with what is stored": [
        *PYTEST,
        *("--nbval", "--nbval-current-env", "--nbval-cell-timeout=120", "chapters"),
    ],
    "tests": [*PYTEST, "tests"],
}

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # two workers on two cores; chapters set their own number
    "OMP_WAIT_POLICY": "passive",  # a thread without work lets the other worker go on
    "TOKENIZERS_PARALLELISM": "false",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # a warning of the notebook kernel's debugger
}


def main() -> int:
    words = sys.argv[1:]
    steps = {
        n: c for n, c in STEPS.items() if not words or any(w in n.split(":")[0] for w in words)
    }
    results = []
    for name, command in steps.items():
        print(f"\n==== {name}", flush=True)
        start = time.perf_counter()
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}).returncode
        results.append((name, code, time.perf_counter() - start))
    print("\n==== where the time went")
    for name, code, seconds in results:
        print(f"{seconds:7.1f} s  {'passed' if code == 0 else 'FAILED'}  {name}")
    failed = sum(code != 0 for _, code, _ in results)
    print(f"{sum(seconds for *_, seconds in results):7.1f} s  in all\n")
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
