"""Speed of the kernels: ``python -m vqkv.study.bench [--out FILE.csv] [--device cuda] [--only OPERATION ...]``.

Every operation beside other libraries and plain torch, all in turn in one process, and beside the roofline of the same
machine, measured in the same run. One tidy row per operation, format, implementation and shape.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from vqkv.errors import DataError, UnknownNameError
from vqkv.study.bench import attention, stored, streams, vectors
from vqkv.study.bench.caches import GEOMETRIES
from vqkv.study.bench.case import BenchCase, Contender, Sizes
from vqkv.study.bench.peers import PACKAGES
from vqkv.study.bench.roofline import Roofline, hopeless, probe
from vqkv.study.bench.timing import measure, num_threads
from vqkv.study.provenance import device_name, versions
from vqkv.study.tables import write_atomically

OPERATIONS: dict[str, Callable[[Sizes], Iterator[BenchCase]]] = {
    **vectors.OPERATIONS,
    **stored.OPERATIONS,
    **streams.OPERATIONS,
    **attention.OPERATIONS,
}
COLUMNS = (
    "operation", "format", "implementation", "shape", "dtype", "device", "threads", "repetitions", "median", "min",
    "max", "unit", "throughput", "throughput_unit", "ratio_to_fp16", "ratio_to_bound", "bound_ms", "limited_by",
    "equal", "error", "versions",
)  # fmt: skip
PROBES = 3  # of the rates before every operation: the machine may be busy at one of them
SHOWN = ["operation", "format", "implementation", "shape", "median", "ratio_to_bound", "ratio_to_fp16"]
ON_A_GPU = {"rows": 65536, "sweep_rows": 16384, "tokens": 8192,
            "runs": tuple((batch, 1024 * 2**i) for batch in (1, 8) for i in range(6))}  # fmt: skip


def sizes_of(geometry: str, **sizes) -> Sizes:
    """``sizes``, with the heads of a model of ``caches.GEOMETRIES``. Raises ``UnknownNameError`` for another one."""
    if geometry not in GEOMETRIES:
        raise UnknownNameError("geometry", geometry, GEOMETRIES)
    about = GEOMETRIES[geometry]
    return Sizes(about["num_attention_heads"], about["num_key_value_heads"], about["head_dim"], **sizes)


def speed(sizes: Sizes, only: list[str], threads: int, repetitions: int) -> list[dict]:
    """Time the operations ``only`` (all if there are none); rows with ``COLUMNS``.

    ``median``, ``min``, ``max``: milliseconds of one call. ``throughput``: values packed or read in a second (of the
    roofline's rows: what they say). ``bound_ms``: the roofline's, and ``ratio_to_bound`` the share of it that is
    reached, which exceeds 1 where data stay in the processor's caches. ``ratio_to_fp16``: attention's time over that of
    fp16 SDPA in the same turns. ``equal``, ``error``: see ``Contender``. Raises ``UnknownNameError`` for other
    operations, ``DataError`` for a device that is not there.
    """
    for name in only:
        if name not in OPERATIONS:
            raise UnknownNameError("operation", name, OPERATIONS)
    if sizes.device != "cpu" and not torch.cuda.is_available():
        raise DataError(f"device {sizes.device!r}: torch {torch.__version__} finds no GPU; leave it out for the CPU")
    with num_threads(threads), torch.no_grad():
        rows = Rows(sizes.device, threads)
        bar = tqdm(only or OPERATIONS, desc="bench", unit="operation", leave=False, disable=None)
        for name in bar:
            bar.set_postfix_str(name)
            if repetitions >= PROBES or not rows.probed:  # with fewer, it is no measurement
                rows.probe()
            for case in OPERATIONS[name](sizes):
                rows.time(case.entries, repetitions)
    return rows.table()


@dataclass
class Rows:
    """Times of entries, and the machine's rates: the fastest of all probes so far, so that bounds are those of the
    machine when it is least busy."""

    device: str
    threads: int
    probed: dict[str, tuple[float, list[float]]] = field(default_factory=dict)
    timed: list[tuple[Contender, list[float], float | None]] = field(default_factory=list)

    def probe(self) -> None:
        """Measure the rates once more, but for those that bound nothing."""
        found = probe(self.device.partition(":")[0], PROBES, leave_out=hopeless(self.probed))
        for label, (count, taken) in found.items():
            self.probed.setdefault(label, (count, []))[1].extend(taken)

    def time(self, entries: list[Contender], repetitions: int) -> None:
        """Time the entries in turn."""
        ready = [place for place, entry in enumerate(entries) if entry.ready]
        times = measure([entry.call for entry in entries], repetitions, self.device, ready)
        fp16 = [statistics.median(each) for entry, each in zip(entries, times, strict=True) if entry.format == "fp16"]
        for entry, taken in zip(entries, times, strict=True):  # without the call, which holds the problem's tensors
            self.timed.append((replace(entry, call=None), taken, fp16[0] if fp16 else None))

    def table(self) -> list[dict]:
        """All rows, with ``COLUMNS``; numbers are rounded to five digits."""
        roofline = Roofline.of(self.probed)
        rows = [_probe_row(label, *taken) for label, taken in self.probed.items()]
        rows += [_row(*each, roofline) for each in self.timed]
        shared = {"device": device_name(self.device), "threads": self.threads, "versions": versions(*PACKAGES)}
        return [{name: _rounded((row | shared).get(name)) for name in COLUMNS} for row in rows]


def _row(entry: Contender, taken: list[float], fp16: float | None, roofline: Roofline) -> dict:
    median, (bound, limit) = statistics.median(taken), roofline.bound(entry.work)
    about = {name: getattr(entry, name) for name in ("operation", "format", "implementation", "shape", "dtype")}
    measured = {
        "throughput": entry.work.values / median / 1e3,
        "throughput_unit": "10^6 values/s",
        "ratio_to_fp16": median / fp16 if fp16 else None,
        "ratio_to_bound": bound / median,
        "bound_ms": bound,
        "limited_by": limit,
        "equal": entry.equal,
        "error": entry.error,
    }
    return about | _times(taken) | measured


def _probe_row(name: str, count: float, taken: list[float]) -> dict:
    """One of the roofline's two rates, as a row like the others."""
    rate, unit = (1e-6, "GB/s") if name == "copy" else (1e-9, "TFLOP/s")
    dtype = name.partition(" ")[2] or "float32"
    about = {"operation": "roofline", "format": name.split()[0], "implementation": "torch", "dtype": dtype}
    about |= {"shape": f"{count:.3g} {'bytes' if name == 'copy' else 'flops'}"}
    return about | _times(taken) | {"throughput": count / min(taken) * rate, "throughput_unit": unit}


def _times(taken: list[float]) -> dict:
    found = {"median": statistics.median(taken), "min": min(taken), "max": max(taken)}
    return found | {"unit": "ms", "repetitions": len(taken)}


def _rounded(value):
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main(arguments: list[str]) -> None:
    """Measure on one thread, print and, with ``--out``, write."""
    parser = argparse.ArgumentParser(prog="python -m vqkv.study.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--only", nargs="+", default=[], metavar="OPERATION", help=f"of {', '.join(OPERATIONS)}")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args(arguments)
    sizes = sizes_of("llama-3-8b", device=options.device, **(ON_A_GPU if options.device != "cpu" else {}))
    table = pd.DataFrame(speed(sizes, options.only, threads=1, repetitions=15))
    print(table[SHOWN].to_string(index=False, na_rep=""))
    if options.out:
        write_atomically(options.out, table.to_csv(index=False).encode())
