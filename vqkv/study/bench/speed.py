"""Speed of the kernels: ``python -m vqkv.study.bench [--out FILE.csv] [--device cuda] [--only OPERATION ...]``.

Every operation beside other libraries and plain torch, all in turn in one process, and beside the roofline of the same
machine, measured in the same run. One tidy row per operation, format, implementation and shape.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from vqkv.errors import DataError, UnknownNameError
from vqkv.study.bench import attention, stored, vectors
from vqkv.study.bench.caches import GEOMETRIES
from vqkv.study.bench.case import BenchCase, Sizes
from vqkv.study.bench.record import check_writable, write
from vqkv.study.bench.rows import Rows
from vqkv.study.bench.timing import num_threads

OPERATIONS: dict[str, Callable[[Sizes], Iterator[BenchCase]]] = {
    **vectors.OPERATIONS,
    **stored.OPERATIONS,
    **attention.OPERATIONS,
}
SHOWN = {
    "operation": 17,
    "format": 20,
    "implementation": 24,
    "shape": 42,
    "median": 9,
    "ratio_to_bound": 9,
    "ratio_to_fp16": 9,
}
ON_A_GPU = {"rows": 65536, "sweep_rows": 16384, "tokens": 8192,
            "runs": tuple((batch, 1024 * 2**i) for batch in (1, 8) for i in range(6))}  # fmt: skip


def default_sizes(geometry: str, device: str) -> Sizes:
    """Sizes to be timed on this kind of device, with the heads of a model of ``vqkv.study.bench.caches.GEOMETRIES``.
    Raises ``UnknownNameError`` for another geometry."""
    if geometry not in GEOMETRIES:
        raise UnknownNameError("geometry", geometry, GEOMETRIES)
    about = GEOMETRIES[geometry]
    heads = {"heads": about["num_attention_heads"], "kv_heads": about["num_key_value_heads"]}
    sizes = Sizes(**heads, head_dim=about["head_dim"], device=device)
    return replace(sizes, **ON_A_GPU) if device.startswith("cuda") else sizes


def speed(sizes: Sizes, only: list[str], threads: int, repetitions: int, found: Callable = lambda rows: None) -> list:
    """Time the operations ``only`` (all if there are none); rows with ``study.bench.rows.COLUMNS``. ``found`` is called
    with all rows so far whenever there are more.

    ``median``, ``min``, ``max``: milliseconds of one call. ``throughput``: values packed or read in a second (of the
    roofline's rows: what they say). ``bound_ms``: the roofline's, and ``ratio_to_bound`` the share of it that is
    reached, which exceeds 1 where data stay in the processor's caches. ``ratio_to_fp16``: attention's time over that of
    fp16 SDPA in the same turns. ``equal``, ``error``: see ``Contender``. Raises ``UnknownNameError`` for other
    operations, ``DataError`` for numbers that are none or a device that is not there.
    """
    _check(sizes, only, threads, repetitions)
    with num_threads(threads), torch.no_grad():
        rows = Rows(sizes.device, threads)
        bar = tqdm(only or OPERATIONS, desc="bench", unit="operation", leave=False, disable=None)
        for name in bar:
            bar.set_postfix_str(name)
            rows.probe()
            for case in OPERATIONS[name](sizes):
                rows.time(case.entries, repetitions)
                found(rows.table())
    return rows.table()


def _check(sizes: Sizes, only: list[str], threads: int, repetitions: int) -> None:
    for name in only:
        if name not in OPERATIONS:
            raise UnknownNameError("operation", name, OPERATIONS)
    numbers = [threads, repetitions, sizes.rows, sizes.sweep_rows, sizes.tokens, *sizes.depths, *sizes.codebook_sizes]
    numbers += [number for run in sizes.runs for number in run]
    if any(type(x) is not int or x < 1 for x in numbers) or any(len(run) != 2 for run in sizes.runs):
        raise DataError(
            f"{sizes}, threads {threads!r}, repetitions {repetitions!r}: give whole numbers from 1 on, and runs as "
            "[batch size, tokens of context]"
        )
    if any(size & (size - 1) for size in sizes.codebook_sizes):
        raise DataError(f"codebook sizes {list(sizes.codebook_sizes)}: give powers of two, which faiss needs")
    if sizes.device.partition(":")[0] not in ("cpu", "cuda"):
        raise DataError(f"device {sizes.device!r}: give cpu or cuda")
    if sizes.device.startswith("cuda") and not torch.cuda.is_available():
        raise DataError(
            f"device {sizes.device!r}: torch {torch.__version__} finds no GPU; leave --device out for the CPU"
        )


def _shown(value) -> str:
    return "" if value is None else str(value)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and, with ``--out``, write after every case: what an interrupted run has found stays."""
    options = _parser().parse_args(arguments)
    given = {name: getattr(options, name) for name in ("rows", "tokens", "runs", "codebook_sizes", "depths")}
    sizes = replace(
        default_sizes(options.geometry, options.device), **{k: v for k, v in given.items() if v is not None}
    )
    _check(sizes, options.only, options.threads, options.repetitions)
    if options.out:
        check_writable(options.out)  # rather than refuse it after the first minute
    print("  ".join(f"{name:<{width}}" for name, width in SHOWN.items()))
    printed = 0

    def found(rows: list[dict]) -> None:
        nonlocal printed
        for row in rows[printed:]:
            tqdm.write("  ".join(f"{_shown(row[name]):<{width}}" for name, width in SHOWN.items()))
        printed = len(rows)
        if options.out:
            write(rows, options.out)

    try:
        speed(sizes, options.only, options.threads, options.repetitions, found)
    except KeyboardInterrupt:
        raise SystemExit(
            f"interrupted: {printed} rows {f'are in {options.out}' if options.out else 'were found'}"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vqkv.study.bench", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, help="CSV file to write")
    add("--only", nargs="+", default=[], metavar="OPERATION", help=f"of {', '.join(OPERATIONS)} (default: all)")
    add("--device", default="cpu", help="cpu or cuda")
    add("--threads", type=int, default=1, help="of torch on the CPU")
    add("--repetitions", type=int, default=15, help="of every call that is fast enough; 3 or more of slow ones")
    add("--geometry", default="llama-3-8b", help=f"whose heads: {', '.join(GEOMETRIES)}")
    add("--rows", type=int, help="vectors for residual VQ")
    add("--tokens", type=int, help="of the layer that is packed and read back")
    add("--run", type=_run, dest="runs", action="append", help="attention: batch x context, such as 1x4096")
    add("--codebook-sizes", type=int, nargs="+", help="of residual VQ")
    add("--depths", type=int, nargs="+", help="codebooks of residual VQ")
    return parser


def _run(text: str) -> list[int]:
    return [int(number) for number in text.split("x")]
