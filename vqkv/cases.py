"""The cases of a sweep: what their rows depend on, and finished ones on disk until their table is stored."""

import hashlib
import inspect
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vqkv.errors import DataError
from vqkv.tables import plain, work, write_atomically

FORMAT = "vqkv-rows 1"
PACKAGE = Path(__file__).resolve().parent
SCALARS = (type(None), bool, int, float, str)


def _code() -> str:
    """Of every source file of this package, and of the tables that come with it."""
    digest = hashlib.sha256()
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".json")):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


CODE = _code()  # when it was imported: a file that changes later is not the code that runs


@dataclass(frozen=True)
class Case:
    """One call of ``compute``, a function of a module that returns (rows, sources), with plain literals; ``name`` is
    what errors call it."""

    compute: Callable
    arguments: dict
    name: str

    def identity(self) -> dict:
        """What its rows depend on, the hashes of its sources apart."""
        files = {text: _local_files(text) for text in _words(self.arguments)}
        return {
            "format": FORMAT,
            "function": f"{self.compute.__module__}.{self.compute.__qualname__}",
            "code": [CODE, _code_elsewhere(self.compute)],
            "arguments": self.arguments,
            "files": {text: state for text, state in files.items() if state},
        }

    def result(self) -> dict:
        """``rows``, ``sources`` and ``seconds``, exactly as JSON gives them back. Raises ``DataError`` for rows that
        hold more than numbers, booleans and words."""
        start = time.perf_counter()
        rows, sources = self.compute(**self.arguments)
        rows = [{name: self._plain(name, value) for name, value in row.items()} for row in rows]
        sources = plain(sources, f"{self.name}: sources")
        return {"rows": rows, "sources": sources, "seconds": time.perf_counter() - start}

    def _plain(self, name: str, value):
        value = value.item() if isinstance(value, np.generic) else value
        if not isinstance(name, str) or not isinstance(value, SCALARS):
            raise DataError(f"{self.name}: {name!r} = {value!r} is {type(value).__name__}, no number, boolean or word")
        return value


class Kept:
    """Finished cases of the table that is being computed, a checksummed file each; outside ``vqkv.tables.table``
    nothing is kept. ``threads``: of whoever computes them, as the last bits of sums depend on that."""

    def __init__(self, threads: int):
        self.work, self.threads = work(), threads

    def get(self, case: Case) -> dict | None:
        """The result of a finished case; None where there is none, or its file is torn, altered or of another case."""
        if self.work is None:
            return None
        identity = self._identity(case)
        try:
            record = json.loads(self._path(identity).read_bytes())
            whole = record["sha256"] == _sha256(record["finished"])
            return record["finished"]["result"] if whole and record["finished"]["case"] == identity else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def put(self, case: Case, result: dict) -> None:
        """Keep it: as a whole, or not at all."""
        if self.work is not None:
            identity = self._identity(case)
            finished = {"case": identity, "result": result}
            data = json.dumps({"sha256": _sha256(finished), "finished": finished})
            write_atomically(self._path(identity), data.encode())

    def spent(self, seconds: float) -> None:
        """Tell the table how long an earlier run took for what it had finished."""
        if self.work is not None:
            self.work.earlier_seconds += seconds

    def _identity(self, case: Case) -> dict:
        return case.identity() | {"threads": self.threads}

    def _path(self, identity: dict) -> Path:
        return self.work.folder / f"{_sha256(identity)[:32]}.json"


def _sha256(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _code_elsewhere(function: Callable) -> str | None:
    """The sha256 of the file that defines a function outside this package."""
    path = Path(inspect.getsourcefile(function)).resolve()
    return None if path.is_relative_to(PACKAGE) else hashlib.sha256(path.read_bytes()).hexdigest()


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
