"""The house: imports run downwards only, without a circle, wait until they are used, and are declared in files that
agree; and no name stands for two things."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vqkv"
FLOORS = [  # from the ground up; rooms on one floor may look at each other, but not in a circle
    {"errors"},
    {"kernels", "runtime"},
    {"codecs", "models", "data"},
    {"cache"},
    {"presets"},
    {"evaluation"},
    {"calibration"},
    {"study", "cli", "reference"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"  # the face of the package only hands names on
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What takes seconds to import waits until it is used: all of it for ``import vqkv`` and ``vqkv --help``; for a model
# and a preset torch's compiler and what draws figures, runs pages, fetches data or compiles loops.
NEVER = (
    "scipy.stats", "pandas", "matplotlib", "papermill", "nbformat", "nbconvert", "datasets", "lm_eval", "dask",
    "distributed", "faiss", "hqq", "optimum.quanto", "torch._inductor.compile_fx", "numba",
)  # fmt: skip
STUDY = ("matplotlib", "datasets", "lm_eval", "dask", "distributed", "nbconvert", "faiss")
STEPS = f"""
import sys
def none_of(*names):
    assert not [name for name in names if name in sys.modules], [name for name in names if name in sys.modules]

import vqkv, vqkv.cli
none_of("torch", "transformers", "numpy", *{NEVER})

import pkgutil, vqkv.cache.compressor, vqkv.codecs
from vqkv.codecs.stage import Part
known = {{*Part.registry}}  # to one who loads a compressor, which imports no preset's module
from vqkv import presets
model, tokenizer = vqkv.load_model("vqkv/llama-mini")
presets.best(bits=1.8, context=8192, kv_width=128)
model.set_attn_implementation("vqkv_packed")
none_of(*{NEVER})

import vqkv.study.driver
none_of(*{STUDY})

import vqkv.calibration.calibrate, vqkv.evaluation.evaluate, vqkv.models.capture
from vqkv import *
assert all(callable(getattr(vqkv, name)) and name in dir(vqkv) for name in vqkv.__all__)
assert calibrate is vqkv.calibrate and vqkv.capture.__name__ == "capture"  # functions win on modules of their name
assert not hasattr(vqkv, "compress")
none_of("hqq", "torch._inductor.compile_fx")
for module in pkgutil.walk_packages(vqkv.codecs.__path__, "vqkv.codecs."):
    __import__(module.name)
assert known == {{*Part.registry}} and len(known) > 30
"""
HQQ = """
import torch, transformers.cache_utils
layer, x = transformers.cache_utils.HQQQuantizedLayer(q_group_size=16), torch.randn(1, 1, 8, 16)
layer.update(x, x)
keys, _ = layer.update(x[:, :, :0], x[:, :, :0])
assert (keys - x).abs().max() < 0.5 and "hqq" in sys.modules
"""
LATER = "import sys, transformers.modeling_utils, vqkv\nassert 'vqkv.cache.packed_attention' in sys.modules"


@cache
def imported(path: Path) -> set[str]:
    """Modules that a file imports, wherever in it, and the names that it takes from them as if they were modules."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return modules


def ours(path: Path) -> set[str]:
    """Modules of the package that a file imports."""
    return {name.removeprefix("vqkv.") for name in imported(path) if name.startswith("vqkv.")} & MODULES.keys()


def test_types():
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_imports_from_a_higher_room():
    reaching = [
        f"{name} imports {other}"
        for name, path in MODULES.items()
        for other in ours(path)
        if FLOOR_OF[other.split(".")[0]] > FLOOR_OF[name.split(".")[0]]
        or (other.split(".")[0] == "study" and name.split(".")[0] not in ("study", "cli"))
    ]
    assert not reaching and len(FLOORS) <= 8


def test_there_is_no_circle():
    """Neither among modules, packages' faces apart, nor among rooms."""
    modules = {name: ours(path) for name, path in MODULES.items() if path.name != "__init__.py"}
    rooms: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        room = name.split(".")[0]
        rooms.setdefault(room, set()).update(other.split(".")[0] for other in ours(path))
    for graph in (modules, {room: others - {room} for room, others in rooms.items()}):
        while leaves := {node for node, others in graph.items() if not others & graph.keys()}:
            graph = {node: others for node, others in graph.items() if node not in leaves}
        assert not graph


def test_no_public_class_name_stands_for_two_classes():
    names = Counter(
        node.name
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_house_has_few_doors():
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix not in (".md", ".typed")} - {"__pycache__"}
    assert len(entries) <= 14 and entries - {"__init__"} == FLOOR_OF.keys()


def names(lines) -> list[str]:
    return [canonicalize_name(Requirement(line).name) for line in lines]


def test_constraints_are_exact_and_portable_and_pin_what_pyproject_asks_for():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(zip(names(lines), (Requirement(line).specifier for line in lines), strict=True))
    for (pin,) in pins.values():
        assert pin.operator == "==" and "+" not in pin.version and "*" not in pin.version
    direct = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]
    for line, name in zip(direct, names(direct), strict=True):
        (pin,) = pins[name]
        assert Requirement(line).specifier.contains(pin.version), line
    assert not [name for name in pins if name.startswith("nvidia")] and len(direct) == len(set(names(direct)))


def test_conda_and_make_install_python_pip_and_this_package_with_every_extra():
    python, pip, packages = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    extras = f".[{','.join(EXTRAS)}]"
    assert pip == "pip" and packages == {"pip": ["-c constraints.txt", f"-e {extras}"]}
    assert f"-e '{extras}'" in (ROOT / "Makefile").read_text()
    version = re.fullmatch(r"python=(\d+\.\d+)", python).group(1)
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{version}.0")


def test_the_core_is_what_the_library_imports():
    """Complete and minimal; what an extra brings is imported under a guard that names it, see ``test_wheel``."""
    paths = [path for path in PACKAGE.rglob("*.py") if "study" not in path.parts]
    packages = {name.split(".")[0] for path in paths for name in imported(path)} - sys.stdlib_module_names - {"vqkv"}
    distributions = packages_distributions()
    guarded = {"datasets", "datasketch", "hqq", "lm-eval"}
    imports = {canonicalize_name(distributions[name][0]) for name in packages}
    assert imports - guarded == set(names(PROJECT["dependencies"]))


@pytest.mark.parametrize("script", [STEPS + HQQ * bool(find_spec("hqq")), LATER], ids=["step by step", "transformers"])
def test_a_new_process_imports_only_what_it_needs(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
