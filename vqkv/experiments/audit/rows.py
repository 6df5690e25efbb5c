"""A row of the audit: a figure as published and as found here, and whether the two agree."""

import math
from collections.abc import Callable

import pandas as pd

ARITHMETIC, MEASURED, NEITHER = "arithmetic", "measured here", "neither"
YES, PARTLY, NO, UNTESTED = "yes", "partly", "no", "cannot be tested here"

Rule = Callable[[float, float], bool]  # (published, recomputed) -> whether the claim holds
Tables = dict[str, pd.DataFrame]


def close(within: float) -> Rule:
    """The two differ by at most this share of the published figure."""
    return lambda published, recomputed: abs(recomputed / published - 1) <= within


def above(least: float) -> Rule:
    """For claims of a direction: the figure found here is above ``least``, however large."""
    return lambda _, recomputed: recomputed > least


def at_least(published: float, recomputed: float) -> bool:
    """The figure found here is as high as published, or higher."""
    return recomputed >= published


def at_most(published: float, recomputed: float) -> bool:
    """The figure found here is as low as published, or lower."""
    return recomputed <= published


ROUNDED = close(0.02)  # apart by no more than how the figure was rounded


def row(
    claim: str, published: float, recomputed: float, unit: str, reason: str, *, how: str = ARITHMETIC,
    rule: Rule = ROUNDED, otherwise: str = NO, figures: int = 1,
) -> dict:  # fmt: skip
    """``otherwise``: the verdict when ``rule`` does not hold. ``figures``: published figures that the row stands for.
    A ``recomputed`` of NaN is one that nothing here tells."""
    if math.isnan(recomputed):
        holds = UNTESTED
    else:
        holds = YES if rule(published, recomputed) else otherwise
    return {
        "claim": claim,
        "published": float(published),
        "recomputed": float(recomputed),
        "unit": unit,
        "how": how,
        "holds": holds,
        "figures": figures,
        "reason": reason,
    }


def untested(claim: str, published: float, unit: str, reason: str, figures: int = 1) -> dict:
    """A claim for which this study has neither the model nor the machine."""
    return row(claim, published, math.nan, unit, reason, how=NEITHER, figures=figures)


def measured(
    tables: Tables, name: str, claim: str, published: float, unit: str,
    find: Callable[[pd.DataFrame], tuple[float, str]], *, rule: Rule = ROUNDED, otherwise: str = PARTLY,
    figures: int = 1,
) -> dict:  # fmt: skip
    """A row from the study's table ``name``: ``find`` gives the figure and the reason. Without that table, or where it
    was made with other sizes and lacks what is looked for (NaN), the claim is not tested."""
    recomputed, reason = math.nan, ""
    if name in tables:
        recomputed, reason = find(tables[name])
    if math.isnan(recomputed):
        reason = f"Table {name} is not there, or was made without what this needs: run page {name[:2]}."
    settings = {"how": MEASURED, "rule": rule, "otherwise": otherwise, "figures": figures}
    return row(claim, published, recomputed, unit, reason, **settings)


def furthest(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Of (published, recomputed), the pair that is furthest apart as a ratio."""
    return max(pairs, key=lambda pair: abs(math.log(pair[1] / pair[0])))


def model_names(table: pd.DataFrame) -> str:
    """The models of a table, without their folders."""
    return " and ".join(name.split("/")[-1] for name in dict.fromkeys(table["model"]))
