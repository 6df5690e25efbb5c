"""Text that every installation has: source of Python's library and of the pinned packages, and prose of both.

Its splits are ``train`` (models, calibration), ``validation`` (every choice) and ``test``. A document belongs to the
split whose list, made by ``python -m vqkv.reference.splitting``, holds the hash of its content: so a release of Python
or of a package, whose files change, moves no document from one split to another.
"""

import ast
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

SPLITS = ("train", "validation", "test")
VALIDATION_PERCENT, TEST_PERCENT = 6, 8
FOLDER = Path(__file__).parent / "splits"
PACKAGES = (
    "accelerate", "aiohttp", "anyio", "dask", "datasets", "distributed", "fontTools", "fsspec", "huggingface_hub",
    "hypothesis", "IPython", "jedi", "jinja2", "joblib", "jupyter_server", "lm_eval", "matplotlib", "mpmath",
    "networkx", "nltk", "numpy", "pandas", "prompt_toolkit", "pydantic", "pygments", "rich", "scipy", "sklearn",
    "sympy", "torch", "tornado", "transformers", "triton",
)  # fmt: skip
NOT_EVERYWHERE = {
    "site-packages", "dist-packages", "__pycache__", "lib-dynload", "test", "tests", "idlelib", "idle_test", "tkinter",
    "turtledemo", "ensurepip", "lib2to3", "distutils",
}  # fmt: skip  # what some distributions of Python leave out
MIN_CHARACTERS, MAX_CHARACTERS = 256, 400_000  # longer files are generated tables
MIN_PROSE, PROSE_SHARE = 600, 0.75  # characters, and the share of letters and spaces, below which a file is no prose
GENERATED = re.compile(r"generated (by|from|file|automatically|code)|do not edit|machine.generated", re.IGNORECASE)
PROSE_FILES = re.compile(r"METADATA|.*\.(md|rst|txt)|(LICEN[CS]E|COPYING|NOTICE|AUTHORS|README)\b.*", re.IGNORECASE)


class Document(NamedTuple):
    """A file; ``module``, its dotted name down to the depth that stays in one split; docstrings only, or all."""

    module: str
    path: Path
    docstrings: bool = False

    def text(self) -> str:
        """Read the document; empty where it is generated, not Python, too short or too long."""
        text = self.path.read_text(encoding="utf-8", errors="ignore")
        if GENERATED.search(text[:2000]) or not MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
            return ""
        if self.docstrings:
            text = _docstrings(text)
        if self.docstrings or self.path.suffix != ".py":
            words = sum(map(len, re.findall(r"[A-Za-z ]+", text)))
            return text if len(text) >= MIN_PROSE and words >= PROSE_SHARE * len(text) else ""
        return text


def documents(corpus: str, split: str, seed: int = 0) -> Iterator[str]:
    """Yield the texts of one split of a corpus in ``CORPORA``, each once, in an order that ``seed`` fixes."""
    wanted = set(listed(split))

    def order(document: Document) -> bytes:
        name = f"{seed}/{document.module}/{document.path.name}/{document.docstrings}"
        return hashlib.sha256(name.encode()).digest()

    for document in sorted(CORPORA[corpus](), key=order):
        text = document.text()
        if (name := content_hash(text)) in wanted:
            wanted.remove(name)
            yield text


@cache
def _stdlib() -> list[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        Document(parts[0].removesuffix(".py"), root.joinpath(*parts))
        for parts in _files(root)
        if parts[-1].endswith(".py") and not NOT_EVERYWHERE.intersection(parts)
    ]


@cache
def _packages() -> list[Document]:
    root = Path(sysconfig.get_paths()["purelib"])
    names = ((package, *parts) for package in PACKAGES for parts in _files(root / package) if parts[-1].endswith(".py"))
    return [Document(".".join(parts[:3]).removesuffix(".py"), root.joinpath(*parts)) for parts in names]


@cache
def _prose_files() -> list[Document]:
    root = Path(sysconfig.get_paths()["purelib"])
    return [  # by the package that a file belongs to, without its version
        Document(parts[0].split("-")[0].lower(), root.joinpath(*parts))
        for parts in _files(root)
        if PROSE_FILES.fullmatch(parts[-1]) and not parts[-1].endswith(".py") and root.joinpath(*parts).is_file()
    ]


def _files(root: Path) -> list[tuple[str, ...]]:
    """List files below a folder, each as the parts of its path from there, in their order; rglob takes three times as
    long."""
    below = len(root.parts)
    return sorted((*Path(folder).parts[below:], name) for folder, _, names in os.walk(root) for name in names)


CORPORA: dict[str, Callable[[], list[Document]]] = {
    "python-stdlib": _stdlib,
    "python-packages": _packages,
    "python": lambda: _stdlib() + _packages(),
    "prose-files": _prose_files,
    "prose": lambda: _prose_files() + [each._replace(docstrings=True) for each in CORPORA["python"]()],
}


def _docstrings(source: str) -> str:
    """Join docstrings of a module that are longer than a line, a blank line between them."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(tree) if isinstance(node, documented))
    return "\n\n".join(text for node in nodes if "\n" in (text := ast.get_docstring(node) or ""))


def content_hash(text: str) -> str:
    """Name a document by its content in twelve hex digits, whatever its line ends."""
    return hashlib.sha256(text.replace("\r\n", "\n").encode(errors="ignore")).hexdigest()[:12]


@cache
def listed(split: str) -> frozenset[str]:
    """Read the content hashes of the documents of a split."""
    return frozenset((FOLDER / f"{split}.txt").read_text().split())


def dealt(name: str) -> str:
    """Choose the split of a document of this name (a module, a piece of a user's text) by a hash of it."""
    bucket = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 100
    if bucket < VALIDATION_PERCENT:
        return "validation"
    return "test" if bucket < VALIDATION_PERCENT + TEST_PERCENT else "train"
