"""The house: imports run downwards only, without a circle, and no name stands for two things."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "vqkv"
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


@cache
def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, wherever in it."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        for name in (name.removeprefix("vqkv.") for name in names if name.startswith("vqkv.")):
            if name in MODULES:
                modules.add(name)
    return modules


def test_nothing_imports_from_a_higher_room():
    reaching = [
        f"{name} imports {other}"
        for name, path in MODULES.items()
        for other in imported(path)
        if FLOOR_OF[other.split(".")[0]] > FLOOR_OF[name.split(".")[0]]
        or (other.split(".")[0] == "study" and name.split(".")[0] not in ("study", "cli"))
    ]
    assert not reaching and len(FLOORS) <= 8


def test_there_is_no_circle():
    """Neither among modules, packages' faces apart, nor among rooms."""
    modules = {name: imported(path) for name, path in MODULES.items() if path.name != "__init__.py"}
    rooms: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        room = name.split(".")[0]
        rooms.setdefault(room, set()).update(other.split(".")[0] for other in imported(path))
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
    entries = [
        path for path in PACKAGE.iterdir() if path.suffix not in (".md", ".typed") and path.name != "__pycache__"
    ]
    assert len(entries) <= 14 and {path.stem for path in entries} - {"__init__"} == FLOOR_OF.keys()
