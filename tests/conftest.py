"""What every test shares: shape checks on each call of the package, the default model, fixed threads, and a clean start."""

import logging
import os
import pkgutil
import sys
from contextlib import suppress
from importlib import import_module

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
def registries():
    """The tables of interchangeable parts, with everything in them that a chapter registers."""
    import llm_engine
    from llm_engine.config import Registry

    for module in pkgutil.iter_modules(llm_engine.__path__):
        import_module(f"llm_engine.{module.name}")
    modules = [module for name, module in sys.modules.items() if name.startswith("llm_engine.")]
    values = [value for module in modules for value in vars(module).values()]
    return list({id(value): value for value in values if isinstance(value, Registry)}.values())


@pytest.fixture(autouse=True)
def a_clean_start(registries):
    """Put back what a test, or a page or a cell that it ran, has changed for the whole process: no test can lean on another."""
    from huggingface_hub.utils import enable_progress_bars

    before = dict(os.environ), os.getcwd(), list(sys.path), list(sys.argv)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    level = logging.getLogger().level
    parts = [(table, dict(table), table.default, table.maker) for table in registries]
    enable_progress_bars()
    yield
    environment, folder, sys.path[:], sys.argv[:] = before
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    with suppress(FileNotFoundError):  # the folder that a test began in may be gone
        os.chdir(folder)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)
    logging.getLogger().setLevel(level)
    for table, entries, table.default, table.maker in parts:
        table.clear()
        table.update(entries)


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
