"""Notebook 09: how fast the kernels are, and what reading a packed cache costs in time."""

import pandas as pd

from vqkv.study.bench.attention import DECODED, OPERATION, SDPA
from vqkv.study.bench.case import Sizes
from vqkv.study.bench.formats import bits_per_value
from vqkv.study.bench.speed import default_sizes, speed
from vqkv.study.experiments.common import frame

OURS = "vqkv"


def kernel_speed(
    geometry: str, rows: int, sweep_rows: int, tokens: int, runs: list[list[int]], codebook_sizes: list[int],
    depths: list[int], operations: list[str], threads: int, repetitions: int, device: str, seed: int,
) -> pd.DataFrame:  # fmt: skip
    """Times by ``vqkv.study.bench.speed.speed``, which no two runs have alike; ``operations``: [] for all."""
    heads = default_sizes(geometry, device)
    sizes = Sizes(
        heads.heads, heads.kv_heads, heads.head_dim, rows, sweep_rows, tokens, runs=tuple(map(tuple, runs)),
        codebook_sizes=tuple(codebook_sizes), depths=tuple(depths), device=device, seed=seed,
    )  # fmt: skip
    return frame(speed(sizes, operations, threads, repetitions), {})


def against_ours(table: pd.DataFrame, operations: list[str] | None = None) -> pd.DataFrame:
    """Time of every other implementation over that of this library's kernel: a row per operation and format
    (the largest problem of several), a column per implementation; attention aside."""
    rows = table[~table["operation"].isin(["roofline", OPERATION])]
    rows = rows[rows["operation"].isin(operations)] if operations else rows
    keys = ["operation", "format"]
    rows = rows[rows["bound_ms"] == rows.groupby(keys)["bound_ms"].transform("max")]
    rows = rows.assign(implementation=rows["implementation"].str.replace(r" \(.*| beam \d+", "", regex=True))
    times = rows.pivot_table(index=keys, columns="implementation", values="median", sort=False)
    if OURS not in times:
        return times
    ratios = times.drop(columns=OURS).div(times[OURS], axis=0)
    ratios.insert(0, f"{OURS}, ms", times[OURS])
    return ratios


def attention_times(table: pd.DataFrame) -> pd.DataFrame:
    """Time of attention over that of fp16 SDPA at the same batch and context, a row per format and way of reading."""
    rows = _with_numbers(table[table["operation"] == OPERATION], "batch", "context")
    rows = rows.assign(implementation=rows["implementation"].str.replace(r" \(.*", "", regex=True))
    index, columns = ["format", "implementation"], ["batch", "context"]
    return rows.pivot_table(index=index, columns=columns, values="ratio_to_fp16", sort=False)


def trade(table: pd.DataFrame, batch: int = 1) -> pd.DataFrame:
    """Savings and costs of each format at the longest context of this batch size, a row per format.

    ``bits`` per value (codebooks apart), ``smaller``: times smaller than fp16. Time for one token's attention over that
    of fp16 SDPA: ``packed`` by the kernel that reads packed keys and values, ``decoded`` first and then attended;
    ``possible``: the roofline's, if both formats reached it.
    """
    rows = _with_numbers(table[table["operation"] == OPERATION], "batch", "context")
    rows = rows[rows["batch"] == batch]
    rows = rows[rows["context"] == rows["context"].max()]
    exact = rows[(rows["format"] == "fp16") & (rows["implementation"] == SDPA)]
    bound = exact["bound_ms"].iloc[0] if len(exact) else float("nan")
    packed = rows[rows["implementation"].str.startswith(OURS)].set_index("format")
    decoded = rows[rows["implementation"] == DECODED].set_index("format")
    bits = pd.Series({name: bits_per_value(name) for name in packed.index}, dtype=float)
    found = {"bits": bits, "smaller": 16 / bits, "packed": packed["ratio_to_fp16"]}
    found |= {"decoded": decoded["ratio_to_fp16"], "possible": packed["bound_ms"] / bound}
    return pd.DataFrame(found, index=packed.index)


def _with_numbers(table: pd.DataFrame, *names: str) -> pd.DataFrame:
    """The table with these numbers of its shapes (``context=4096``, ``K=8``) as columns."""
    return table.assign(**{name: table["shape"].str.extract(rf"\b{name}=(\d+)")[0].astype(int) for name in names})
