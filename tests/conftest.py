"""What every test shares: shape checks on each call of the package, the default model, fixed threads."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

# Installed before anything imports llm_engine: from here on, a call with a wrong shape or type fails its test.
install_import_hook("llm_engine", "beartype.beartype")

# With `pytest -n 2` on two cores, one thread a worker; alone, at most two.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))

# The same examples on every run: a red test stays red until it is mended.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def default_folder():
    """Folder of the default model, converted; fetched the first time."""
    from llm_engine.hub import DEFAULT_MODEL, resolve

    return resolve(DEFAULT_MODEL, progress=False)


@pytest.fixture(scope="session")
def engine(default_folder):
    """The default model in float32 on the CPU, without a cache: the slow, plain engine of Part 1."""
    from llm_engine.engine import Engine

    return Engine.from_pretrained(
        default_folder, device="cpu", dtype=torch.float32, cache="none", runner="torch"
    )
