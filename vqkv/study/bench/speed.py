"""Speed of the kernels: ``python -m vqkv.study.bench [--out FILE.csv] [--device cuda] [--only OPERATION ...]``.

Every operation beside other libraries and plain torch, all in turn in one process, and beside the roofline of the same
machine, measured in the same run. One tidy row per operation, format, implementation and shape.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from vqkv.errors import DataError, UnknownNameError
from vqkv.study.bench import attention, stored, streams, vectors
from vqkv.study.bench.caches import GEOMETRIES
from vqkv.study.bench.case import BenchCase, Sizes
from vqkv.study.bench.rows import PROBES, Rows
from vqkv.study.bench.timing import num_threads
from vqkv.study.tables import write_atomically

OPERATIONS: dict[str, Callable[[Sizes], Iterator[BenchCase]]] = {
    **vectors.OPERATIONS,
    **stored.OPERATIONS,
    **streams.OPERATIONS,
    **attention.OPERATIONS,
}
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
    """Time the operations ``only`` (all if there are none); rows with ``study.bench.rows.COLUMNS``.

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
