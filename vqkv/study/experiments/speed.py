"""Notebooks 08 and 09: time and memory of caches in use, of kernels, and of reading a packed cache."""

import pandas as pd

from vqkv.study.bench.formats import bits_per_value
from vqkv.study.bench.generation import latency, peak_memory
from vqkv.study.bench.speed import ROOFLINE, speed
from vqkv.study.bench.stored import ATTENTION, DECODED, SDPA
from vqkv.study.experiments.common import frame
from vqkv.study.tables import with_numbers

OURS = "vqkv"


def kernel_speed(geometry: str, operations: list[str], threads: int, repetitions: int, **sizes) -> pd.DataFrame:
    """Time kernels by ``bench.speed.speed``; ``operations``: [] for all; ``sizes``: fields of ``bench.case.Sizes``."""
    return frame(speed(geometry, operations, threads, repetitions, **sizes), {})


def against_ours(table: pd.DataFrame) -> pd.DataFrame:
    """Return others' times over our kernel's: a row per operation and format (its largest problem), attention aside."""
    rows = table[~table["operation"].isin([ROOFLINE, ATTENTION])]
    keys = ["operation", "format"]
    rows = rows[rows["bound_ms"] == rows.groupby(keys)["bound_ms"].transform("max")]
    rows = rows.assign(implementation=rows["implementation"].str.replace(r" \(.*| beam \d+", "", regex=True))
    times = rows.pivot_table(index=keys, columns="implementation", values="median", sort=False)
    if OURS not in times:
        return times
    ratios = times.drop(columns=OURS).div(times[OURS], axis=0)
    ratios.insert(0, f"{OURS}, ms", times[OURS])
    return ratios


def trade(table: pd.DataFrame) -> pd.DataFrame:
    """Return savings and costs of each format at the longest context of one sequence.

    Times of a token's attention over fp16 SDPA's: ``packed``, ``decoded`` first, ``possible`` by the roofline.
    """
    rows = with_numbers(table[table["operation"] == ATTENTION], "batch", "context")
    rows = rows[rows["batch"] == 1]
    rows = rows[rows["context"] == rows["context"].max()]
    exact = rows[(rows["format"] == "fp16") & (rows["implementation"] == SDPA)]
    bound = exact["bound_ms"].iloc[0] if len(exact) else float("nan")
    packed = rows[rows["implementation"].str.startswith(OURS)].set_index("format")
    decoded = rows[rows["implementation"] == DECODED].set_index("format")
    bits = pd.Series({name: bits_per_value(name) for name in packed.index}, dtype=float)
    columns = {"bits": bits, "smaller": 16 / bits, "packed": packed["ratio_to_fp16"]}
    columns |= {"decoded": decoded["ratio_to_fp16"], "possible": packed["bound_ms"] / bound}
    return pd.DataFrame(columns, index=packed.index)


def generation_latency(**settings) -> pd.DataFrame:
    """Time by ``bench.generation.latency``; no case of a sweep, as all systems take turns in one process."""
    return frame(latency(**settings), {})


def read_in_place(geometries: list[str], **settings) -> pd.DataFrame:
    """``generation_latency`` of several shapes, where attention reads packed tokens as they lie, if kernels can."""
    runs = [latency(geometry=geometry, attention="vqkv_packed", **settings) for geometry in geometries]
    return frame([row for rows in runs for row in rows], {})


def generation_peak(**settings) -> pd.DataFrame:
    """Resident memory by ``bench.generation.peak_memory``, which differs a little from run to run; nor a sweep."""
    return frame(peak_memory(**settings), {})
