import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
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


def environment() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


@pytest.mark.parametrize("requirement", DIRECT, ids=str)
def test_constraints_pin_what_pyproject_asks_for(requirement):
    (pin,) = constraints()[canonicalize_name(requirement.name)].specifier
    assert pin.operator == "==" and requirement.specifier.contains(pin.version)


def test_constraints_are_exact_and_portable():
    for requirement in constraints().values():
        (pin,) = requirement.specifier
        assert pin.operator == "==" and "+" not in pin.version and "*" not in pin.version
    assert not [name for name in constraints() if name.startswith("nvidia")]


def test_conda_environment_is_python_pip_and_this_package():
    python, pip, packages = environment()["dependencies"]
    assert pip == "pip" and packages == {"pip": ["-c constraints.txt", EVERYTHING]}
    version = re.fullmatch(r"python=(\d+\.\d+)", python).group(1)
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{version}.0")


def test_every_extra_is_installed_by_conda_and_make():
    assert f"-e .[{','.join(EXTRAS)}]" == EVERYTHING
    assert f"-e '.[{','.join(EXTRAS)}]'" in (ROOT / "Makefile").read_text()


def test_a_package_is_listed_once():
    names = [canonicalize_name(requirement.name) for requirement in DIRECT]
    assert len(names) == len(set(names))


def test_the_core_is_what_the_library_imports():
    """Complete and minimal; what an extra brings is imported under a guard that names it, see ``test_wheel``."""
    known, found = packages_distributions(), set()
    for path in (ROOT / "vqkv").rglob("*.py"):
        if "study" not in path.parts:
            found |= {known[name][0] for name in _imported(path) - sys.stdlib_module_names - {"vqkv"}}
    core = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    guarded = {"datasets", "datasketch", "hqq", "lm-eval"}
    assert {canonicalize_name(name) for name in found} - guarded == core


def _imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, wherever in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]
    return {name.split(".")[0] for name in names}


def test_a_wheel_has_every_file_but_the_guides():
    """Modules of packages, which have an ``__init__.py``, and what ``package-data`` names."""
    package, setuptools = ROOT / "vqkv", CONFIG["tool"]["setuptools"]
    assert not setuptools["include-package-data"] and not setuptools["packages"]["find"]["namespaces"]
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    packed = {path for pattern in setuptools["package-data"]["vqkv"] for path in package.glob(pattern)}
    packed |= {path for path in files if path.suffix == ".py" and _is_module(path)}
    assert {path for path in files - packed if path.name != "README.md"} == set()


def _is_module(path: Path) -> bool:
    folders = [path.parent, *path.parent.parents]
    return all((folder / "__init__.py").is_file() for folder in folders[: folders.index(ROOT)])
