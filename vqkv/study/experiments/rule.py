"""Page 11's rule: of each family the variant that validation text prefers for so many bits and tokens, seen on test."""

import re

import numpy as np
import pandas as pd

from vqkv.study.experiments.comparisons import CHANCE, family
from vqkv.study.experiments.designs import KVTC, RANKS
from vqkv.study.experiments.frontier import DRAWS, equivalent_bits, frontier

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
    """Of ``frontier``'s rows on validation text, for each ``family`` (``OURS`` and KVTC) and nominal ``rate`` the
    system of least ``equivalent`` bits at ``context``."""
    kl, bits = searched["kl_mean"], searched[f"bits_{context}_x1"]
    equivalent = [equivalent_bits(*each) for each in zip(bits, kl)]
    rows = searched.assign(equivalent=equivalent, context=context, **_names(searched)).sort_values("equivalent")
    return rows.drop_duplicates(["family", "rate"]).sort_values(["family", "rate"], ignore_index=True)


def by_rule(table: pd.DataFrame, searched: pd.DataFrame, contexts: list[str]) -> pd.DataFrame:
    """``table`` (of other text) with the ``family`` of every row, and no bits at a context where ``chosen`` prefers
    another of its family at the nearest rate. Designs that were searched with uniform steps stand for a trellis."""
    variants, names = table["system"].map(_variant), _names(table)
    searched_too = variants.isin(set(searched["system"].map(_variant)))
    families = np.where(searched_too, names["family"], table["system"].map(family))
    table = table.assign(family=families, rate=names["rate"])
    for context in contexts:
        kept = chosen(searched, context)
        for place, row in table[searched_too].iterrows():
            mine = kept[kept["family"] == row["family"]]
            nearest = mine.iloc[(mine["rate"] - row["rate"]).abs().argmin()]
            if _variant(nearest["system"]) != variants[place]:
                table.loc[place, f"bits_{context}_x1"] = np.nan
    return table


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
