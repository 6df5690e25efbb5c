"""Corpora that are files here: the bundled ones, which every installation has, and local text."""

import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from vqkv.errors import DataError

PACKAGES = (
    "accelerate", "aiohttp", "anyio", "dask", "datasets", "distributed", "fontTools", "fsspec", "huggingface_hub",
    "hypothesis", "IPython", "jedi", "jinja2", "joblib", "jupyter_server", "lm_eval", "matplotlib", "mpmath",
    "networkx", "nltk", "numpy", "pandas", "pip", "prompt_toolkit", "pydantic", "pygments", "rich", "scipy",
    "setuptools", "sklearn", "sympy", "torch", "tornado", "transformers", "triton",
)  # fmt: skip
HELD_OUT_PERCENT = 6
MAX_BYTES = 400_000  # longer files are generated tables, not prose or code
PIECE = 8_000  # characters of a local text that count as one document
TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".jsonl", ".json")


def local_documents(name: str, files: list[tuple[str, Path]], split: str, seed: int) -> Iterator[str]:
    """Yield the texts of one split in an order fixed by ``seed``; a repeated text (by content hash) only once."""
    if name in LOCAL_CORPORA:
        texts = (path.read_text(encoding="utf-8", errors="ignore") for path in _chosen(files, split, seed))
    else:
        texts = _chosen([piece for label, path in files for piece in _local_pieces(label, path)], split, seed)
    seen = set()
    for text in texts:
        digest = hashlib.sha256(text.encode(errors="ignore")).digest()
        if text.strip() and digest not in seen:
            seen.add(digest)
            yield text


def _chosen(named: list[tuple[str, object]], split: str, seed: int) -> list:
    """Items of ``split`` by the hash of their name, shuffled."""
    found = [item for label, item in named if held_out(label) == (split == "test")]
    random.Random(f"{seed}").shuffle(found)
    return found


def held_out(module: str) -> bool:
    """True for a module of the test split, by a hash of its dotted name: no file of it is ever trained on."""
    return int(hashlib.sha256(module.encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


def text_files(name: str) -> list[tuple[str, Path]] | None:
    """(label, path) of the files of a bundled corpus or of local text; None if nothing here has that name."""
    if name in LOCAL_CORPORA:
        return LOCAL_CORPORA[name]()
    path = Path(name).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
        if not found:
            raise DataError(f"folder {name!r} holds no text file ({', '.join(TEXT_SUFFIXES)})")
        return [(str(p.relative_to(path)), p) for p in found]
    return None


@cache
def _stdlib_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
    return _modules(root, (p for p in root.rglob("*.py") if not skip.intersection(p.relative_to(root).parts)), depth=1)


@cache
def _package_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["purelib"])
    paths = (p for package in PACKAGES for p in (root / package).rglob("*.py"))
    return _modules(root, paths, depth=2)


LOCAL_CORPORA = {"python-stdlib": _stdlib_files, "python-packages": _package_files}


def _modules(root: Path, paths, depth: int) -> list[tuple[str, Path]]:
    """(dotted module name down to ``depth``, path) of each source file that is not a generated table."""
    found = []
    for path in sorted(paths):
        if 64 <= path.stat().st_size <= MAX_BYTES:
            found.append((".".join(path.relative_to(root).with_suffix("").parts[:depth]), path))
    return found


def _local_pieces(label: str, path: Path) -> list[tuple[str, str]]:
    """(name, text) of each row of a .jsonl file, or of each stretch of about ``PIECE`` characters of any other: a
    single long text also has many windows, and a test split."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except ValueError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    if path.suffix != ".jsonl":
        lines, pieces = text.splitlines(keepends=True), [""]
        for line in lines:
            pieces[-1] += line
            if len(pieces[-1]) >= PIECE:
                pieces.append("")
        return [(f"{label}#{i}", piece) for i, piece in enumerate(pieces)]
    rows = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    return [(f"{label}#{number}", _row_text(path, number, line)) for number, line in rows]


def _row_text(path: Path, number: int, line: str) -> str:
    try:
        return json.loads(line)["text"] + ""
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}, line {number}: each line must be a JSON object with a 'text' field that is a string ({error!r})"
        ) from error
