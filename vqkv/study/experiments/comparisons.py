"""What page 11 makes of its rows: who is better at equal bits, what a part is worth, which proxy sees what is lost."""

import itertools
import math
import re
from collections.abc import Sequence
from functools import cache

import numpy as np
import pandas as pd

from vqkv.study.experiments.frontier import BROKEN_KL, SMALLEST_KL

CHANCE = 0.95  # of the intervals
DRAWS = 1000  # of a bootstrap


def paired_ratio(ours: Sequence, theirs: Sequence) -> tuple[float, float, float]:
    """Return the mean of ``ours`` over that of ``theirs``, window by window, and its 95% bootstrap interval."""
    both = np.array([ours, theirs], float)
    drawn = both[:, np.random.default_rng(0).integers(both.shape[1], size=(DRAWS, both.shape[1]))].mean(-1)
    low, high = np.quantile(drawn[0] / drawn[1], [(1 - CHANCE) / 2, (1 + CHANCE) / 2])
    return both[0].mean() / both[1].mean(), low, high


def family(system: str) -> str:
    """Return a system's name without its numbers: what rates of one system share."""
    return re.sub(r" ?[0-9][0-9.x+]*", "", system)


def at_equal_bits(table: pd.DataFrame, systems: list[str], designs: list[str], bits: str) -> pd.DataFrame:
    """Set ``systems`` against the best of ``designs`` at its own ``bits`` (a column): a row per model and system.

    A design's KL between two of its rates is interpolated, log KL against bits, window by window; above its most it is
    the KL of the most. ``ratio`` of mean KLs over the windows that both have, ours over theirs, with the ends of its
    95% interval over ``DRAWS`` bootstrap draws of seeds, and of windows within each (Davison & Hinkley 1997, section
    3.8); ``better``: whose KL is less if the interval leaves out 1, else "neither". A window that broke counts as
    ``BROKEN_KL`` nats. NaN and "no rate" where no design has so few bits.
    """
    rows = []
    judged = table[table["system"].isin(systems)]
    for (model, system, nominal), theirs in judged.groupby(["model", "system", "nominal_bits"], sort=False):
        at, their_kl = theirs[bits].mean(), windows(theirs)
        mine = table[table["model"] == model]
        rated = ((name, _interpolated(mine[mine["system"] == name], bits, at)) for name in designs)
        kl_of = {name: kl for name, kl in rated if kl is not None and len(kl.index.intersection(their_kl.index))}
        label = {"model": model, "system": system, "nominal_bits": nominal, "bits": at}
        if not kl_of:
            rows.append(label | {"kl": their_kl.mean(), "better": "no rate"})
            continue
        best = min(kl_of, key=lambda name: kl_of[name].mean())
        rows.append(label | {"design": best} | _compared(their_kl, kl_of[best]))
    names = ("model", "system", "nominal_bits", "bits", "design", "kl", "our_kl", "ratio", "low", "high", "better")
    return pd.DataFrame(rows, columns=names)


def windows(rows: pd.DataFrame) -> pd.Series:
    """Return the KL of each window of one system at one rate, by seed and number."""
    kl_of_window = {
        (seed, number): min(BROKEN_KL, float(kl)) if math.isfinite(float(kl)) else BROKEN_KL
        for seed, each in zip(rows["seed"], rows["kl_each"], strict=True)
        for number, kl in enumerate(str(each).split())
    }
    return pd.Series(kl_of_window, dtype=float)


def _interpolated(rows: pd.DataFrame, bits: str, at: float) -> pd.Series | None:
    """Return the KL of each window that all rates of a design have, at so many bits; None if no rate has so few."""
    rates = sorted(((mine[bits].mean(), windows(mine)) for _, mine in rows.groupby("nominal_bits")), key=lambda x: x[0])
    if not rates or at < rates[0][0]:
        return None
    kl = pd.concat([kl for _, kl in rates], axis=1).dropna().clip(SMALLEST_KL).apply(np.log)
    return kl.apply(lambda each: np.interp(at, [bits for bits, _ in rates], each), axis=1).apply(np.exp)


def _compared(theirs: pd.Series, ours: pd.Series) -> dict:
    both = pd.concat([theirs, ours], axis=1).dropna()
    by_seed = [rows.to_numpy() for _, rows in both.groupby(level=0)]
    windows = np.concatenate(by_seed)
    means = np.stack([windows[drawn].mean(0) for drawn in _draws(tuple(map(len, by_seed)))])
    ratios = means[:, 1] / means[:, 0]
    low, high = np.quantile(ratios, [(1 - CHANCE) / 2, (1 + CHANCE) / 2])
    better = "ours" if high < 1 else "theirs" if low > 1 else "neither"
    kl = both.mean()
    return {"kl": kl[0], "our_kl": kl[1], "ratio": kl[1] / kl[0], "low": low, "high": high, "better": better}


@cache
def _draws(sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Draw, of seeds with so many windows each: the numbers of the windows in each of ``DRAWS`` draws."""
    rng, first = np.random.default_rng(0), np.cumsum([0, *sizes])
    drawn = (rng.integers(len(sizes), size=len(sizes)) for _ in range(DRAWS))
    return [np.concatenate([first[i] + rng.integers(sizes[i], size=sizes[i]) for i in seeds]) for seeds in drawn]


def with_families(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with the ``family`` of each system."""
    return table.assign(family=table["system"].map(family))


PARTS = {  # part of a design -> what names it, and what stands in its place in the design without it
    "trellis, not uniform": ("trellis", "uniform"),
    "mixed": (", mixed", ""),
    "Fisher-weighted, not plain PCA": ("fisher_pca", "pca"),
    "predicted": (", predicted", ""),
    "by head": (", by head", ""),
}


def paired_ablation(search: pd.DataFrame, contexts: list[str]) -> pd.DataFrame:
    """Return a row for each part and design with it: bits saved over its twin without, at each of ``contexts``."""
    bits = search.groupby("design", sort=False)[[f"equivalent_bits_{name}" for name in contexts]].mean()
    bits.columns = [f"saved_{name}" for name in contexts]
    rows = []
    for (part, (own, other)), design in itertools.product(PARTS.items(), bits.index):
        twin = design.replace(own, other)
        if twin != design and twin in bits.index:
            rows.append({"part": part, "design": design} | (bits.loc[twin] - bits.loc[design]).to_dict())
    return pd.DataFrame(rows, columns=["part", "design", *bits])


def proxy_correlations(
    table: pd.DataFrame, proxies: list[str], tasks: list[str], bands: dict[str, list[float]]
) -> pd.DataFrame:
    """Correlate (Spearman) each proxy with what each task loses: a row per band of stored bits, model, task and proxy.

    Over systems (means over seeds), with a 95% bootstrap interval; 1: the proxy ranks as the task does.
    """
    table = table.assign(unexplained=1 - table["evr"])
    mean = table.groupby(["model", "system", "nominal_bits"], sort=False).mean(numeric_only=True).reset_index()
    correlations = []
    models = mean.groupby("model", sort=False)
    for (band, (least, most)), (model, mine), task in itertools.product(bands.items(), models, tasks):
        mine = mine[mine["bits_per_value"].between(least, most)]
        lost = (mine[f"{task}_exact"] - mine[task]).round(9)
        for proxy in proxies:
            sign = -1 if proxy == "top1" else 1
            about = {"bits": band, "model": model, "task": task, "proxy": proxy, "systems": len(mine)}
            correlations.append(about | _correlated(sign * mine[proxy], lost))
    return pd.DataFrame(correlations)


def _correlated(proxy: pd.Series, lost: pd.Series) -> dict[str, float]:
    finite = proxy.notna() & lost.notna()
    pairs, rng = np.stack([proxy[finite], lost[finite]]), np.random.default_rng(0)
    drawn = _spearman(pairs[:, rng.integers(pairs.shape[1], size=(DRAWS, pairs.shape[1]))])
    drawn = drawn[~np.isnan(drawn)] if not np.isnan(drawn).all() else np.array([math.nan])
    low, high = np.quantile(drawn, [(1 - CHANCE) / 2, (1 + CHANCE) / 2])
    return {"correlation": _spearman(pairs[:, None]).item(), "low": low, "high": high}


def _spearman(pairs: np.ndarray) -> np.ndarray:
    """Correlate ranks (2, draws, values) to (draws,), NaN where one has no two values."""
    ours, theirs = (pd.DataFrame(each.T).rank() for each in pairs)
    return ours.corrwith(theirs).to_numpy()
