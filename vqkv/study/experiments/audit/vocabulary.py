"""What an expression of ``claims.csv`` may name: presets, sizes, algorithms, stated figures, tables, their columns."""

import inspect
import math
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pandas as pd

from vqkv import presets
from vqkv.codecs.grid import gaussian_grids
from vqkv.study.experiments.audit import algorithms, framework, shapes
from vqkv.study.experiments.product_codes import gaps
from vqkv.study.experiments.sequences import modes
from vqkv.study.tables import published, repository_root

TASKS = ("arc_25", "hellaswag_10", "mmlu_5", "truthfulqa_0", "winogrande_5", "gsm8k_5")  # of residual VQ's tables


class Between(NamedTuple):
    """Least and most that a figure can be where a source leaves that open."""

    low: float | np.ndarray
    high: float | np.ndarray


def by(column: pd.Series, *keys: pd.Series) -> pd.Series:
    """Return the mean of a column for each combination of keys; operators then pair equal keys."""
    return column.groupby([key.reindex(column.index) for key in keys]).mean()


def scores(rows: pd.DataFrame, *tasks: str) -> np.ndarray:
    """Return accuracies (rows, tasks) of a table of residual VQ."""
    return rows[list(tasks or TASKS)].to_numpy(float)


def every_fp32(files: pd.DataFrame) -> Between:
    """Return the ratio to all snapshots in fp32 of streams of 512 steps, as written, and of 4,096."""
    return Between(files["ratio_every_fp32"].to_numpy(), framework.longer_ratio(files).to_numpy())


def _functions(module) -> dict:
    return {name: f for name, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__}


def names(rows: pd.DataFrame) -> dict:
    """Return what an expression may name whose table has these rows; a column hides another thing of its name."""
    return VOCABULARY | _figures() | dict(rows.items()) | {"table": rows}


@cache
def _figures() -> dict:
    """Return the figures in the sources' text by key, and their tables by name."""
    tables = {path.stem: published(path.stem) for path in (repository_root() / "results/published").glob("*.csv")}
    return tables | dict(zip(tables["stated_figures"]["key"], tables["stated_figures"]["value"], strict=True))


VOCABULARY = {
    "pi": math.pi, "nan": math.nan, "uncompressed": None, "mean": np.mean, "sum": np.sum, "count": len, "abs": np.abs,
    "min": partial(np.nanmin, axis=-1), "max": partial(np.nanmax, axis=-1), "by": by, "between": Between,
    "missing": pd.isna, "scores": scores, "modes": modes, "gaps": gaps, "every_fp32": every_fp32,
    "gaussian_grids": gaussian_grids, **presets.PRESETS, **_functions(algorithms), **_functions(framework),
    **{name: np.vectorize(size, otypes=[float]) for name, size in _functions(shapes).items()},  # of each of a list
}  # fmt: skip
