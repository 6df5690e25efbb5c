"""Page 11's rule: of each family the variants that validation text prefers for so many tokens, seen on test."""

import re

import numpy as np
import pandas as pd

from vqkv.study.experiments.comparisons import CHANCE, family
from vqkv.study.experiments.designs import KVTC, RANKS
from vqkv.study.experiments.frontier import DRAWS, frontier

OURS, THEIRS = "best", "kvtc"
PREDICTED = [f"steps, weighted, predicted in {bits} bits, mixed" for bits in (8, 4)]
SEARCHED = ["steps, weighted, mixed, by head", "steps, weighted, predicted, mixed"]
SEARCHED += [*PREDICTED, *(f"{name}, by head" for name in PREDICTED)]
SEARCHED += [f"steps, weighted, joint, rank {rank}" for rank in RANKS]
GRID = 200  # losses at which two curves are compared


def rule_search(models: list[str], corpus: str, bits: list[float], kvtc_bits: list[float], seed: int, **settings):
    """``frontier`` on validation text, on which no other table reports: the designs of ``SEARCHED`` and KVTC's variants
    (``designs.KVTC``), each at its nominal bits."""
    theirs = {
        "systems": [f"kvtc {each:g}{variant}" for each in kvtc_bits for variant in KVTC],
        "vqllm": {"vqllm": [1, 2]},
    }
    fixed = {"seeds": [seed], "facts": {}, "tuned": {}, "held_out": "validation"}
    return frontier(models, corpus, designs=SEARCHED, bits=bits, **theirs, **fixed, **settings)


def chosen(searched: pd.DataFrame, context: str) -> pd.DataFrame:
    """Of ``frontier``'s rows on validation text those of each ``family`` (``OURS`` and KVTC) on the lower convex hull
    of log KL against bits at ``context``, the fewest bits first; ``rate`` is nominal."""
    rows = searched.assign(context=context, bits=searched[f"bits_{context}_x1"], **_names(searched))
    rows = rows.sort_values(["family", "bits"], ignore_index=True)
    kept = [place for _, mine in rows.groupby("family") for place in _hull(mine["bits"], np.log(mine["kl_mean"]))]
    return rows.loc[kept].reset_index(drop=True)


def _hull(x: pd.Series, y: pd.Series) -> list:
    """Index of the points of the lower convex hull, x ascending, that go down (Andrew 1979)."""
    found: list = []
    for place in x.index:
        while len(found) > 1:
            (a, b), (c, d) = ((x[i] - x[found[-2]], y[i] - y[found[-2]]) for i in (found[-1], place))
            if a * d > b * c:
                break
            found.pop()
        if not found or y[place] < y[found[-1]]:
            found.append(place)
    return found


def by_rule(table: pd.DataFrame, searched: pd.DataFrame, contexts: list[str]) -> pd.DataFrame:
    """``table`` (of other text) with the ``family`` of every row, and no bits at a context for which its system at the
    nearest rate that was searched is not ``chosen``. Designs that were searched with uniform steps stand for a
    trellis."""
    names = pd.DataFrame(_names(searched)).assign(variant=searched["system"].map(_variant).to_numpy())
    table = table.assign(variant=table["system"].map(_variant), **_names(table))
    known = table["variant"].isin(names["variant"])
    table["family"] = table["family"].where(known, table["system"].map(family))
    for context in contexts:
        kept = chosen(searched, context)
        kept = set(zip(kept["system"].map(_variant), kept["rate"]))
        for place, row in table[known].iterrows():
            rates = names.loc[names["variant"] == row["variant"], "rate"]
            if (row["variant"], rates.loc[(rates - row["rate"]).abs().idxmin()]) not in kept:
                table.loc[place, f"bits_{context}_x1"] = np.nan
    return table.drop(columns="variant")


def share_of_bits(table: pd.DataFrame, context: str, most: float = np.inf) -> dict[str, float]:
    """Bits that ``OURS`` takes at a context over those of KVTC at the same KL (log KL interpolated), the ``least`` and
    the ``largest`` share from the lowest KL that both reach to the highest, up to ``most`` bits of KVTC; each with the
    ends of its 95% interval, the same windows for both drawn anew. ``table``: of ``by_rule``."""
    curves = []
    for name in (OURS, THEIRS):
        rows = table[(table["family"] == name) & table[f"bits_{context}_x1"].notna()]
        curves.append(
            (rows[f"bits_{context}_x1"].to_numpy(), np.array([each.split() for each in rows["kl_each"]], float))
        )
    count = curves[0][1].shape[1]
    drawn = np.random.default_rng(0).integers(count, size=(DRAWS, count))
    ends = np.array([_ends(curves, windows, most) for windows in [np.arange(count), *drawn]])
    found = {}
    for name, values in zip(("least", "largest"), ends.T):
        low, high = np.nanquantile(values[1:], [(1 - CHANCE) / 2, (1 + CHANCE) / 2])
        found |= {name: values[0], f"{name}_low": low, f"{name}_high": high}
    return found


def _ends(curves, windows: np.ndarray, most: float) -> tuple[float, float]:
    means = [(bits, np.log(each[:, windows].mean(1))) for bits, each in curves]
    first, last = max(kl.min() for _, kl in means), min(kl.max() for _, kl in means)
    if first >= last:
        return np.nan, np.nan
    losses = np.linspace(first, last, GRID)
    ours, theirs = (np.interp(losses, kl[order := kl.argsort()], bits[order]) for bits, kl in means)
    shares = (ours / theirs)[theirs <= most]
    return (shares.min(), shares.max()) if len(shares) else (np.nan, np.nan)


def _names(table: pd.DataFrame) -> dict[str, list]:
    """Of each row: family and nominal rate."""
    families = [THEIRS if name.startswith(THEIRS) else OURS for name in table["system"]]
    numbers = [re.search(r"[0-9][0-9.]*", name) for name in table["system"]]
    rates = [
        nominal or (float(number[0]) if number else np.nan) for nominal, number in zip(table["nominal_bits"], numbers)
    ]
    return {"family": families, "rate": rates}


def _variant(system: str) -> str:
    """A system at any rate: KVTC's is in its name, and the search rounds to uniform steps."""
    return re.sub(r"^kvtc [0-9.]+", "kvtc", system.replace("steps", "trellis"))
