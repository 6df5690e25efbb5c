"""Page 11's rule: of each family the variants that validation text prefers for so many tokens."""

import re

import numpy as np
import pandas as pd

from vqkv.study.experiments.designs import KVTC, RANKS
from vqkv.study.experiments.frontier import frontier

OURS, THEIRS = "best", "kvtc"
PREDICTED = [f"steps, weighted, predicted in {bits} bits, mixed" for bits in (8, 4)]
SEARCHED = ["steps, weighted, mixed, by head", "steps, weighted, predicted, mixed"]
SEARCHED += [*PREDICTED, *(f"{name}, by head" for name in PREDICTED)]
SEARCHED += [f"steps, weighted, joint, rank {rank}" for rank in RANKS]


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


def _names(table: pd.DataFrame) -> dict[str, list]:
    """Of each row: family and nominal rate."""
    families = [THEIRS if name.startswith(THEIRS) else OURS for name in table["system"]]
    numbers = [re.search(r"[0-9][0-9.]*", name) for name in table["system"]]
    rates = [
        nominal or (float(number[0]) if number else np.nan) for nominal, number in zip(table["nominal_bits"], numbers)
    ]
    return {"family": families, "rate": rates}
