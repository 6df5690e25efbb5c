"""The cases of a sweep, and what their rows depend on."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vqkv.study.tables import plain

PACKAGE = Path(__file__).resolve().parents[1]


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

    def result(self) -> dict:
        """``rows`` and ``sources``, exactly as JSON gives them back."""
        rows, sources = self.compute(**self.arguments)
        rows = [{k: v.item() if isinstance(v, np.generic) else v for k, v in row.items()} for row in rows]
        return {"rows": rows, "sources": plain(sources, f"{self.name}: sources")}

    def identity(self, threads: int) -> str:
        """A hash of all that its rows depend on but for its sources, whose own hashes are compared with the other
        cases'; the last bits of sums depend on the ``threads`` of whoever computes them."""
        function = f"{self.compute.__module__}.{self.compute.__qualname__}"
        about = json.dumps([function, CODE, self.arguments, threads])
        return hashlib.sha256(about.encode()).hexdigest()[:32]
