"""Speed of the kernels next to other libraries, plain torch and the roofline of the same machine, all in one process;
one tidy row per operation, format, implementation and shape."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.common import set_torch_threads as num_threads
from tqdm import tqdm

from vqkv.study.bench import stored, streams, vectors
from vqkv.study.bench.caches import GEOMETRIES, check_known
from vqkv.study.bench.case import Case, Problem, Sizes
from vqkv.study.bench.peers import PACKAGES
from vqkv.study.bench.roofline import Demand, Roofline
from vqkv.study.provenance import device_name, versions
from vqkv.study.tables import write_atomically

OPERATIONS = {**vectors.OPERATIONS, **streams.OPERATIONS, **stored.OPERATIONS}
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
ROOFLINE = "roofline"
DTYPES = ("float32", "bfloat16")  # of its products; fp16 ones are no faster, and on many CPUs far slower
COPIED = {"cpu": 2**28, "cuda": 2**30}  # bytes: far more than any cache holds
SIDE = {"cpu": 1024, "cuda": 8192}  # of the square matrices that are multiplied
SHORTEST = 2e-3  # seconds that one repetition takes at least, in a call or many
PATIENCE = 1e3  # milliseconds: what has taken so long is not repeated
MIN_REPETITIONS = 3  # repetitions that everything gets all the same
SHOWN = ["operation", "format", "implementation", "shape", "median", "ratio_to_bound", "ratio_to_fp16"]
ON_A_GPU = {"rows": 65536, "sweep_rows": 16384, "tokens": 8192,
            "runs": tuple((batch, 1024 * 2**i) for batch in (1, 8) for i in range(6))}  # fmt: skip


def speed(geometry: str, operations: list[str], threads: int, repetitions: int, **sizes) -> pd.DataFrame:
    """Time ``operations`` (all if there are none) with a model's heads, in turn with the roofline's probes: a row each.

    ``sizes``: other fields of ``Sizes``. ``median``, ``min``, ``max``: milliseconds of ``repetitions`` calls.
    ``throughput``: millions of values a second (of probes: bytes or flops). ``bound_ms``: the roofline's;
    ``ratio_to_bound``: the share reached, above 1 in the processor's caches. ``ratio_to_fp16``: attention's time over
    fp16 SDPA's. ``equal``, ``error``: see ``Case``. Raises ``UnknownNameError`` for other names.
    """
    check_known("geometry", [geometry], GEOMETRIES)
    check_known("operation", operations, OPERATIONS)
    heads: dict[str, Any] = {name: GEOMETRIES[geometry][name] for name in HEADS}
    made = Sizes(**heads, **sizes)
    times: dict[Case, list[float]] = defaultdict(list)
    with num_threads(threads), torch.no_grad():
        probes = _probes(made.device.partition(":")[0])
        for name in tqdm(operations or OPERATIONS, desc="bench", unit="operation", leave=False, disable=None):
            cases = probes + [case for problem in OPERATIONS[name](made) for case in problem.cases]
            laps = in_turn([case.call for case in cases], repetitions, made.device)
            for case, taken in zip(cases, laps, strict=True):
                times[case] += taken
                case.call = case.call if case in probes else dict  # frees the problem's tensors
    copy, *products = (1e3 * case.problem.work.values / min(times[case]) for case in probes)  # when least busy
    line = Roofline(copy, dict(zip(DTYPES, products, strict=True)))
    medians = {case: statistics.median(taken) for case, taken in times.items()}
    fp16 = {case.problem.shape: median for case, median in medians.items() if case.problem.format == "fp16"}
    shared = {"device": device_name(made.device), "threads": threads, "versions": versions(*PACKAGES)}
    rows = [_row(case, taken, medians[case], fp16.get(case.problem.shape), line) for case, taken in times.items()]
    rows = [row | shared for row in rows]
    rounded = ({name: float(f"{x:.5g}") if isinstance(x, float) else x for name, x in row.items()} for row in rows)
    return pd.DataFrame(rounded)


def in_turn(calls: Sequence[Callable], repetitions: int, device: str) -> list[list[float]]:
    """Return milliseconds of every call, each ``repetitions`` times after a warm-up, slow ones fewer."""
    clock = gpu_times if device.startswith("cuda") else cpu_times
    times: list[list[float]] = [[] for _ in calls]
    for repetition in range(repetitions):
        for call, taken in zip(calls, times, strict=True):
            if repetition < MIN_REPETITIONS or sum(taken) < PATIENCE:
                taken += clock(call)
    return times


def cpu_times(call: Callable) -> list[float]:
    """Time a call in milliseconds by torch's ``Timer``."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return [1e3 * seconds for seconds in timer.blocked_autorange(min_run_time=SHORTEST).times]


def gpu_times(call: Callable) -> list[float]:
    """Time a call in milliseconds on a GPU whose cache is cleared before, which ``Timer`` cannot do."""
    from triton.testing import do_bench

    return do_bench(call, warmup=1, rep=10, return_mode="all")


def _probes(device: str) -> list[Case]:
    """Return cases that measure the roofline's rates: a copy, and a matrix product in each dtype."""
    source, side = torch.ones(COPIED[device] // 4, device=device), SIDE[device]
    moved, flops = 2 * source.nbytes, 2 * side**3
    problems = [Problem(ROOFLINE, "copy", f"{moved:.3g} bytes", Demand(0, moved, moved))]
    problems[0].add("torch", partial(torch.empty_like(source).copy_, source))
    for dtype in DTYPES:
        a, out = torch.ones(2, side, side, dtype=getattr(torch, dtype), device=device)
        problems.append(Problem(ROOFLINE, "matmul", f"{flops:.3g} flops", Demand(flops, 0, flops), dtype))
        problems[-1].add("torch", partial(torch.mm, a, a, out=out))
    return [case for problem in problems for case in problem.cases]


def _row(case: Case, taken: list[float], median: float, fp16: float | None, line: Roofline) -> dict:
    problem = case.problem
    bound = None if problem.operation == ROOFLINE else line.bound(problem.work)
    about: dict[str, Any] = {"operation": problem.operation, "format": problem.format}
    about |= {"implementation": case.implementation, "shape": problem.shape}
    about |= {"dtype": problem.dtype, "repetitions": len(taken)}
    about |= {"median": median, "min": min(taken), "max": max(taken), "throughput": problem.work.values / median / 1e3}
    about |= {"ratio_to_fp16": median / fp16 if fp16 else math.nan, "ratio_to_bound": bound / median if bound else None}
    return about | {"bound_ms": bound, "equal": case.equal, "error": case.error}


def main(
    out: Annotated[Path | None, typer.Option(help="CSV file to write.")] = None,
    only: Annotated[list[str], typer.Option(help="An operation; of several, each with this option.")] = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
):
    """Time the kernels on one thread or a GPU, at the shapes of Llama-3-8B; print and write the rows."""
    sizes = {} if device == "cpu" else ON_A_GPU
    try:
        table = speed("llama-3-8b", only, threads=1, repetitions=15, device=device, **sizes)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    print(table[SHOWN].to_string(index=False, na_rep=""))
    if out:
        write_atomically(out, table.to_csv(index=False).encode())
