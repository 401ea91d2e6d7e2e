"""The files that say how to install this agree with each other and with the code."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
README = (ROOT / "README.md").read_text("utf8")


def requirements(*extras: str) -> dict[str, Requirement]:
    """What `pip install .[extras]` asks for, by name."""
    found = {}
    for line in [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            found |= requirements(*requirement.extras)
        else:
            found[canonicalize_name(requirement.name)] = requirement
    return found


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def command(name: str) -> str:
    block = re.search(rf"<!-- {name} -->\n```bash\n(.*)\n```\n<!-- end of {name} -->", README)
    assert block, f"README.md has no block between <!-- {name} --> and <!-- end of {name} -->"
    return block[1]


def test_everything_that_is_asked_for_is_pinned_within_its_range():
    for name, requirement in requirements(*EXTRAS).items():
        assert name in pins(), f"{name} is missing in constraints.txt"
        assert pins()[name] in requirement.specifier, f"constraints.txt: {name}=={pins()[name]}"


def test_the_pins_are_what_runs_here():
    """Stored outputs were made with these; a green run with others would show nothing."""
    only_for_benchmarks = requirements("bench").keys() - requirements("test").keys()
    for name, version in pins().items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            assert name in only_for_benchmarks, f"{name} is not installed"
            continue
        assert installed.split("+")[0] == version, name


def test_conda_and_pip_install_the_same():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text("utf8"))
    assert environment["name"] == PROJECT["name"]
    *conda, pip = environment["dependencies"]
    assert [entry.partition("=")[0] for entry in conda] == ["python", "pip"]
    python = conda[0].partition("=")[2]
    assert f"{python}.0" in SpecifierSet(PROJECT["requires-python"])
    assert pip == {"pip": ["-c constraints.txt", "-e .[test]"]}
    assert "nodefaults" in environment["channels"]
    assert "test" in EXTRAS


def test_the_readme_commands_are_one_line_and_use_the_pins():
    for name in ("command 1", "command 2"):
        assert "\n" not in command(name)
        assert "pip install -c constraints.txt -e" in command(name)
    assert 'llm-engine generate "The capital of France is"' in command("command 1")
    assert command("command 2").endswith("python tests/run.py")
    assert "'.[test]'" in command("command 2")
    assert f"torch=={pins()['torch']} --index-url" in README


def test_ci_runs_what_the_readme_says():
    ci = (ROOT / ".ci/run").read_text("utf8")
    for name in ("command 1", "command 2"):
        assert f"$(command_of '{name}')" in ci
    assert "tests/run.py" not in ci, "the command belongs into README.md, from where CI takes it"
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf8"))
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": "bash .ci/run"}


def test_pre_commit_uses_the_pinned_ruff():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf8"))
    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}
    assert {"sync", "lint", "ruff-check", "ruff-format"} <= hooks.keys()
    for name in ("ruff-check", "ruff-format"):
        assert hooks[name]["additional_dependencies"] == [f"ruff=={pins()['ruff']}"]


def test_what_the_engine_imports_is_what_it_asks_for():
    """`pip install llm-engine` alone must be able to run: other imports may only be made where they are needed."""
    modules = importlib.metadata.packages_distributions()
    always, extra = requirements(), requirements(*EXTRAS)
    extra["ipython"] = extra["jupyterlab"]  # comes with it
    for path in sorted((ROOT / "llm_engine").glob("*.py")):
        tree = ast.parse(path.read_text("utf8"))
        at_import = {id(node) for statement in tree.body for node in [statement]}
        for node in ast.walk(tree):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in (name.partition(".")[0] for name in names):
                if name in sys.stdlib_module_names or name == "llm_engine":
                    continue
                distributions = {canonicalize_name(d) for d in modules.get(name, [name])}
                allowed = always if id(node) in at_import else always | extra
                assert distributions & allowed.keys(), f"{path.name}, line {node.lineno}: {name}"


def test_readme_examples_run(default_folder, capsys):
    namespace: dict = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(block, "README.md", "exec"), namespace)
    said = capsys.readouterr().out
    assert said.startswith(" Paris.")
    assert "Paris" not in said.splitlines()[-1]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "chapters/index.md"])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text("utf8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def test_every_chapter_is_listed():
    for path in (ROOT / "chapters").glob("[0-9][0-9]_*.ipynb"):
        for page in ("README.md", "chapters/index.md"):
            assert path.name in (ROOT / page).read_text("utf8"), f"{page} does not list {path.name}"
