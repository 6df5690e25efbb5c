"""What is declared: dependencies, their pins, and the environments that hold them."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONFIG["project"]
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = [
    Requirement(line) for line in (*PROJECT["dependencies"], *(entry for extra in EXTRAS.values() for entry in extra))
]
EVERYTHING = "-e .[study,peers,dev]"


def constraints() -> dict[str, Requirement]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def test_constraints_are_exact_and_portable_and_pin_what_pyproject_asks_for():
    pins = {name: requirement.specifier for name, requirement in constraints().items()}
    for (pin,) in pins.values():
        assert pin.operator == "==" and "+" not in pin.version and "*" not in pin.version
    for requirement in DIRECT:
        (pin,) = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin.version), requirement
    assert not [name for name in pins if name.startswith("nvidia")]


def test_conda_environment_is_python_pip_and_this_package():
    python, pip, packages = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert pip == "pip" and packages == {"pip": ["-c constraints.txt", EVERYTHING]}
    version = re.fullmatch(r"python=(\d+\.\d+)", python).group(1)
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{version}.0")


def test_every_extra_is_installed_by_conda_and_make_and_a_package_is_listed_once():
    assert f"-e .[{','.join(EXTRAS)}]" == EVERYTHING
    assert f"-e '.[{','.join(EXTRAS)}]'" in (ROOT / "Makefile").read_text()
    names = [canonicalize_name(requirement.name) for requirement in DIRECT]
    assert len(names) == len(set(names))


def test_the_core_is_what_the_library_imports():
    """Complete and minimal; what an extra brings is imported under a guard that names it, see ``test_wheel``."""
    distributions, imports = packages_distributions(), set()
    for path in (ROOT / "vqkv").rglob("*.py"):
        if "study" not in path.parts:
            imports |= {distributions[name][0] for name in _imported(path) - sys.stdlib_module_names - {"vqkv"}}
    core = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    guarded = {"datasets", "datasketch", "hqq", "lm-eval"}
    assert {canonicalize_name(name) for name in imports} - guarded == core


def _imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, wherever in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]
    return {name.split(".")[0] for name in names}
