"""Measurements of a run of the kernels' bench so far, as rows of a table."""

import statistics
from dataclasses import dataclass, field, replace

from vqkv.study.bench.case import Contender
from vqkv.study.bench.peers import PACKAGES
from vqkv.study.bench.roofline import Roofline, hopeless, probe
from vqkv.study.bench.timing import measure
from vqkv.study.provenance import device_name, versions

COLUMNS = (
    "operation", "format", "implementation", "shape", "dtype", "device", "threads", "repetitions", "median", "min",
    "max", "unit", "throughput", "throughput_unit", "ratio_to_fp16", "ratio_to_bound", "bound_ms", "limited_by",
    "equal", "error", "versions",
)  # fmt: skip
PROBES = 3  # of the rates before every operation: the machine may be busy at one of them


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
