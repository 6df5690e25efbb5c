"""A row of the audit: a figure as published and as found here, and a verdict on the two."""

import math
from collections.abc import Callable
from functools import cache

import pandas as pd

from vqkv.study.tables import published

ARITHMETIC, MEASURED, NEITHER = "arithmetic", "measured here", "neither"
YES, PARTLY, NO, UNTESTED = "yes", "partly", "no", "cannot be tested here"
RULES: dict[str, Callable[[float, float, float], bool]] = {  # (published, recomputed, number) -> the claim holds
    "close": lambda published, recomputed, within: abs(recomputed / published - 1) <= within,
    "above": lambda _, recomputed, least: recomputed > least,  # claims of a direction, however large
    "at least": lambda published, recomputed, _: recomputed >= published,
    "at most": lambda published, recomputed, _: recomputed <= published,
}


def row(claim: dict, found: dict | None) -> dict:
    """A row of the audit from a row of ``claims.csv`` and what its function found: ``recomputed``, ``published`` where
    the claim does not say it, and facts for the reason. None: its table is not there; NaN: nor what this needs."""
    found = {"recomputed": math.nan} if found is None else found
    said, recomputed, reason = found.get("published", _number(claim["published"])), found["recomputed"], claim["reason"]
    if claim["find"] and math.isnan(recomputed):
        name = claim["table"]
        reason = f"Table {name} is not there, or was made without what this needs: run page {name[:2]}."
    if math.isnan(recomputed):
        verdict = UNTESTED
    else:
        verdict = YES if holds(claim["rule"], said, recomputed) else claim["else"]
    return {
        "source": claim["source"],
        "claim": claim["claim"],
        "published": float(said),
        "recomputed": float(recomputed),
        "unit": claim["unit"],
        "how": MEASURED if claim["table"] else ARITHMETIC if claim["find"] else NEITHER,
        "holds": verdict,
        "figures": claim["figures"],
        "reason": reason.format(**found),
    }


def holds(rule: str, published: float, recomputed: float) -> bool:
    """``rule``: one of ``RULES`` and its number; without, apart by no more than how the figure was rounded."""
    name, _, number = (rule or "close: 0.02").partition(": ")
    return RULES[name](published, recomputed, float(number or 0))


@cache
def stated(key: str) -> float:
    """A figure in the sources' text."""
    return published("stated_figures").set_index("key")["value"][key]


def _number(text: str) -> float:
    """A number, a key of the stated figures, a ratio of two, or nothing."""
    if " / " in text:
        above, below = map(_number, text.split(" / "))
        return above / below
    try:
        return float(text or "nan")
    except ValueError:
        return stated(text)


def furthest(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Of (published, recomputed), the pair that is furthest apart as a ratio."""
    return dict(
        zip(("published", "recomputed"), max(pairs, key=lambda pair: abs(math.log(pair[1] / pair[0]))), strict=True)
    )


def model_names(table: pd.DataFrame) -> str:
    """The models of a table, without their folders."""
    return " and ".join(name.split("/")[-1] for name in dict.fromkeys(table.get("model", [])))
