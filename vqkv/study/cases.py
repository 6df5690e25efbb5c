"""The cases of a sweep: what their rows depend on, and finished ones on disk until their table is stored."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vqkv.errors import DataError
from vqkv.study.tables import plain, unfinished, write_atomically

PACKAGE = Path(__file__).resolve().parents[1]
SCALARS = (type(None), bool, int, float, str)


def _code() -> str:
    """Hash of every source file of this package, and of the tables that come with it."""
    digest = hashlib.sha256()
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".json", ".csv")):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


CODE = _code()  # when it was imported: a file that changes later is not the code that runs


@dataclass(frozen=True)
class SweepCase:
    """One call of ``compute``, a function of a module that returns (rows, sources), with plain literals; ``name`` is
    what errors call it."""

    compute: Callable
    arguments: dict
    name: str

    def identity(self) -> dict:
        """All that its rows depend on, the hashes of its sources apart."""
        files = {text: _local_files(text) for text in _words(self.arguments)}
        return {
            "function": f"{self.compute.__module__}.{self.compute.__qualname__}",
            "code": CODE,
            "arguments": self.arguments,
            "files": {text: state for text, state in files.items() if state},
        }

    def result(self) -> dict:
        """``rows`` and ``sources``, exactly as JSON gives them back. Raises ``DataError`` for rows that hold more than
        numbers, booleans and words."""
        rows, sources = self.compute(**self.arguments)
        rows = [{name: self._plain(name, value) for name, value in row.items()} for row in rows]
        return {"rows": rows, "sources": plain(sources, f"{self.name}: sources")}

    def _plain(self, name: str, value):
        value = value.item() if isinstance(value, np.generic) else value
        if not isinstance(name, str) or not isinstance(value, SCALARS):
            raise DataError(f"{self.name}: {name!r} = {value!r} is {type(value).__name__}, no number, boolean or word")
        return value


class Kept:
    """Finished cases of the table that is being computed, a file each; outside ``vqkv.study.tables.table`` nothing is
    kept. ``threads``: of whoever computes them, as the last bits of sums depend on that."""

    def __init__(self, threads: int):
        self.folder, self.threads = unfinished(), threads

    def get(self, case: SweepCase) -> dict | None:
        """The result of a finished case, or None."""
        path = self.folder and self._path(case)
        return json.loads(path.read_bytes()) if path and path.is_file() else None

    def put(self, case: SweepCase, result: dict) -> None:
        """Keep it: as a whole, or not at all."""
        if self.folder is not None:
            write_atomically(self._path(case), json.dumps(result).encode())

    def _path(self, case: SweepCase) -> Path:
        identity = json.dumps(case.identity() | {"threads": self.threads})
        return self.folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"


def _words(value) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _words(entry)


def _local_files(word: str) -> list:
    """[name, bytes, time] of each file in a local model or text, which may change under its name; [] for other words.
    A path may also stand behind an @."""
    try:
        path = Path(word.rpartition("@")[2].strip() or "\0").expanduser()
        paths = sorted(path.rglob("*")) if path.is_dir() else [path]
        stats = [(str(file.relative_to(path)), file.stat()) for file in paths if file.is_file()]
    except (OSError, ValueError, RuntimeError):
        return []
    return [[name, about.st_size, about.st_mtime_ns] for name, about in stats]
