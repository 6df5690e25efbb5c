"""Tables that outlive a run: a DataFrame <-> ``results/NAME.csv``, with its provenance in ``results/NAME.json``."""

import hashlib
import io
import json
import math
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pandas as pd

from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.runtime.files import replacing
from vqkv.study import steering
from vqkv.study.provenance import describe
from vqkv.study.shared import digest, plain
from vqkv.study.sweep import Experiment


def table(name: str, function: Callable[..., pd.DataFrame], parameters: dict, recompute: bool = False) -> pd.DataFrame:
    """Return the stored table ``name`` if it has these parameters, else ``function(**parameters)``, then stored.

    A committed table is never overwritten by other parameters: that one goes to ``runs/NAME-<hash>/results/``, unless
    the run has a folder. ``attrs["vqkv"]`` says where it lies and whether it is fresh. Raises ``FormatError`` for an
    altered CSV, ``DataError`` for parameters that are no literals and columns that a CSV cannot hold.
    """
    wanted = plain(parameters, f"parameters of table {name!r}")
    recompute = recompute or steering.current.recompute
    root, kept = output_root(), _provenance(output_root(), name)
    if kept and kept["parameters"] != wanted and not steering.current.out:
        root = root / "runs" / f"{name}-{digest(wanted)}"
    if not recompute and (stored := _provenance(root, name)) and stored["parameters"] == wanted:
        return _load(root, name, stored, fresh=False)
    record, start = describe(name, function, wanted), time.perf_counter()
    same = {key: record[key] for key in ("function", "parameters", "versions", "device")} | {"recompute": recompute}
    folder = root / "results" / ".rows" / name / digest(same)  # of finished rows, computed in this very way
    frame = function.run(parameters, folder) if isinstance(function, Experiment) else function(**parameters)
    seconds = frame.attrs.get("seconds", time.perf_counter() - start)
    _store(root, name, frame, record | {"wall_seconds": round(seconds, 2)})
    shutil.rmtree(folder.parent, ignore_errors=True)
    with suppress(OSError):  # not empty: other tables are being computed
        folder.parent.parent.rmdir()
    return _load(root, name, provenance(name, root), fresh=True)


def published(name: str) -> pd.DataFrame:
    """Read published numbers, ``results/published/NAME.csv``. Raises ``UnknownNameError`` for other names."""
    if pair := stored(f"published/{name}"):
        return pair[0]
    paths = (repository_root() / "results/published").glob("*.csv")
    raise UnknownNameError("published table", name, [path.stem for path in paths])


def stored(name: str) -> tuple[pd.DataFrame, str] | None:
    """Return a table as it is stored, of this run or else of the repository, and its hash; None if neither has it."""
    paths = (root / "results" / f"{name}.csv" for root in (output_root(), repository_root()))
    data = next((path.read_bytes() for path in paths if path.is_file()), None)
    return None if data is None else (_read_csv(data), hashlib.sha256(data).hexdigest()[:10])


def stored_table(name: str) -> pd.DataFrame:
    """Return a table as it is stored. Raises ``UnknownNameError`` for one that is not there."""
    if pair := stored(name):
        return pair[0]
    raise UnknownNameError("table", name, stored_names())


def stored_names() -> list[str]:
    """Return the repository's tables."""
    return sorted(path.stem for path in (repository_root() / "results").glob("*.json"))


def provenance(name: str, root: Path | None = None) -> dict:
    """Return how a table of the repository, or of ``root``, was made: function, parameters, versions, device."""
    if filed := _provenance(root or repository_root(), name):
        return filed
    raise UnknownNameError("table", name, stored_names())


def with_interval(table: pd.DataFrame, name: str, low: str, high: str) -> pd.DataFrame:
    """Return the table with the ends of a 95% interval, where there is one, in words behind what they belong to."""
    cells = list(zip(table[name], table[low], table[high], strict=True))
    words = [f"{x:.3g}" + f" ({a:.3g} to {b:.3g})" * (not math.isnan(a)) if x == x else "" for x, a, b in cells]
    return table.assign(**{name: words})


def with_numbers(table: pd.DataFrame, *names: str) -> pd.DataFrame:
    """Return the table with these numbers of its shapes (``context=4096``, ``K=8``) as columns."""
    return table.assign(**{name: table["shape"].str.extract(rf"\b{name}=(\d+)")[0].astype(int) for name in names})


def repository_root() -> Path:
    """Find the checkout that this package is in, else the one around the current folder, else the current folder."""
    here = Path.cwd()
    for folder in (Path(__file__).resolve().parents[2], here, here.parent):
        if (folder / "notebooks").is_dir() and (folder / "results").is_dir():
            return folder
    return here


def output_root() -> Path:
    """Return the folder that holds ``results/`` and ``figures/`` of this run."""
    return Path(steering.current.out).resolve() if steering.current.out else repository_root()


def write_atomically(path: Path, data: bytes) -> str:
    """Write the complete file or leave the old one (``replacing``); folders are made. Returns the sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(data)
    return hashlib.sha256(data).hexdigest()


def record_figures(root: Path, name: str, hashes: dict[str, str]) -> None:
    """Add the sha256 of figures to the provenance of the table they were drawn from."""
    record = provenance(name, root)
    if (figures := record["figures"] | hashes) != record["figures"]:
        _write_provenance(root, name, record | {"figures": figures})


def _paths(root: Path, name: str) -> tuple[Path, Path]:
    return root / "results" / f"{name}.csv", root / "results" / f"{name}.json"


def _provenance(root: Path, name: str) -> dict | None:
    csv, path = _paths(root, name)
    if not (csv.is_file() and path.is_file()):
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path} is not a table's provenance ({error}): restore it with git, or remove it") from error


def _load(root: Path, name: str, provenance: dict, fresh: bool) -> pd.DataFrame:
    path, _ = _paths(root, name)
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != provenance["sha256"]:
        raise FormatError(
            f"{path} was altered or truncated: its sha256 is not the recorded one. Restore it with `git checkout -- "
            f"results/{name}.csv results/{name}.json`, or recompute it with `python -m vqkv.study --recompute`."
        )
    frame = _read_csv(data, provenance["columns"])
    frame.attrs["vqkv"] = {"root": str(root), "name": name, "fresh": fresh}
    return frame


def _read_csv(data: bytes, columns: dict[str, str] | None = None) -> pd.DataFrame:
    # Only an empty field is missing: "none", "NA" and "null" are words that tables use.
    return pd.read_csv(io.BytesIO(data), dtype=columns, keep_default_na=False, na_values=[""])


def _store(root: Path, name: str, frame: pd.DataFrame, record: dict) -> None:
    """As a CSV that keeps six digits, and each column's type next to it: CSV does not distinguish 1 from 1.0."""
    sources = plain(frame.attrs.get("sources", {}), f"attrs['sources'] of table {name!r}")
    if any(level is not None for level in frame.index.names):
        frame = frame.reset_index()
    columns = {column: _kind(frame[column].infer_objects()) for column in frame.columns}
    frame = frame.astype({column: kind for column, kind in columns.items() if kind != "str"})
    data = frame.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode()
    sha256 = write_atomically(_paths(root, name)[0], data)
    contents = {"rows": len(frame), "columns": columns, "sha256": sha256, "sources": sources, "figures": {}}
    _write_provenance(root, name, record | contents)


def _write_provenance(root: Path, name: str, record: dict) -> None:
    text = json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    write_atomically(_paths(root, name)[1], text.encode())


def _kind(column: pd.Series) -> str:
    if pd.api.types.is_bool_dtype(column) and not column.isna().any():
        return "bool"
    if pd.api.types.is_integer_dtype(column) and not column.isna().any():
        return "int64"
    if pd.api.types.is_numeric_dtype(column):
        return "float64"
    if any(not isinstance(value, str) for value in column.dropna()):
        raise DataError(f"column {column.name!r} of a table holds more than numbers, booleans or strings")
    return "str"
