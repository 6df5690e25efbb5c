"""A row of the audit: figures as published and as found here, and the one rule that makes a verdict of them."""

import math
from collections.abc import Callable
from functools import cache

import pandas as pd

from vqkv.study.experiments.comparisons import paired_ratio
from vqkv.study.tables import published

ARITHMETIC, MEASURED, NEITHER = "arithmetic", "measured here", "needs their model"
HOLDS, IN_PART, DOES_NOT, OURS = "holds", "holds in part", "does not hold", "our re-baselining"
VERDICTS = (HOLDS, IN_PART, DOES_NOT, NEITHER, OURS)
Case = tuple[float, float]  # a figure as published and as found here


def agrees(rule: str, said: float, found: float) -> bool:
    """``rule``: empty for a figure, which ``found`` may miss by 2% or by its rounding; ``about`` by 10%, where the
    source says about, almost, roughly, or where the figure is of other models; ``at least`` and ``at most``, a bound;
    ``above: x`` and ``below: x``, the direction of a claim whose size depends on model and task; of one measured here
    the end of its interval must point that way."""
    name, _, number = rule.partition(": ")
    return _RULES[name](said, found, float(number or 0))


def verdict(rule: str, cases: list[Case]) -> str:
    """A claim ``holds`` where all of its figures, models or tasks agree, ``holds in part`` where some do, ``does not
    hold`` where none does. ``ours``: a comparison that the source did not make, which says nothing about the source."""
    if not cases:
        return NEITHER
    if rule == "ours":
        return OURS
    agree = sum(agrees(rule, *case) for case in cases)
    return HOLDS if agree == len(cases) else IN_PART if agree else DOES_NOT


def row(claim: dict, found: dict | None) -> dict:
    """A row of the audit from a row of ``claims.csv`` and what its function found: ``cases``, or one of them as
    ``recomputed`` and, where the claim does not say it, ``published``, or ``ranges`` (least and most that a figure can
    be where the source leaves a size open); and facts for the reason. None: its table is not there; NaN: nor what this
    needs. Of several cases the row shows the one that agrees least."""
    cases, rule = _cases(claim, found), claim["rule"]
    end = (found or {}).get({"above": "low", "below": "high"}.get(rule.partition(":")[0]))
    decisive = cases if end is None else [(said, end) for said, _ in cases]
    said, recomputed = max(
        cases, key=lambda case: _distance(rule, *case), default=(_number(claim["published"]), math.nan)
    )
    reason = claim["reason"]
    if claim["find"] and not cases:
        reason = (
            f"Table {claim['table']} is not there, or was made without what this needs: run page {claim['table'][:2]}."
        )
    return {
        "source": claim["source"],
        "section": claim["section"],
        "claim": claim["claim"],
        "quote": claim["quote"],
        "published": float(said),
        "recomputed": float(recomputed),
        "low": (found or {}).get("low", math.nan),
        "high": (found or {}).get("high", math.nan),
        "unit": claim["unit"],
        "how": MEASURED if claim["table"] else ARITHMETIC if claim["find"] else NEITHER,
        "rule": rule,
        "agree": sum(agrees(rule, *case) for case in decisive) if rule != "ours" else 0,
        "of": len(cases),
        "verdict": verdict(rule, decisive),
        "figures": claim["figures"],
        "where": f"page {claim['table'][:2]}" if claim["table"] else claim["find"].partition(";")[0],
        "reason": reason.format(**(found or {}) | {"recomputed": recomputed}),
    }


def ratio(table: pd.DataFrame, column: str, above: str, below: str) -> dict:
    """On each model, the mean of ``column`` over the rows of one query divided by that over the rows of another; of KL
    also its interval, ``low`` to ``high``."""
    over, under = (table.query(query) for query in (above, below))
    ratios = (over.groupby("model")[column].mean() / under.groupby("model")[column].mean()).dropna()
    return {"cases": ratios} | (_interval(over, under) if column == "kl_mean" and "kl_each" in table else {})


def _interval(over: pd.DataFrame, under: pd.DataFrame) -> dict[str, float]:
    """Ends of the 95% interval over windows of a ratio of mean KLs, where each is one row of the same windows."""
    each = [str(rows["kl_each"].iloc[0]).split() for rows in (over, under) if len(rows) == 1]
    if len(each) != 2 or len(each[0]) != len(each[1]):
        return {}
    _, low, high = paired_ratio(*each)
    return {"low": low, "high": high}


def value(table: pd.DataFrame, column: str, query: str = "") -> dict:
    """On each model, the mean of ``column`` over the rows of a query."""
    rows = table.query(query) if query else table
    return {"cases": rows.groupby("model")[column].mean().dropna()}


@cache
def stated(key: str) -> float:
    """A figure in the sources' text."""
    return published("stated_figures").set_index("key")["value"][key]


def model_names(table: pd.DataFrame) -> str:
    """The models of a table, without their folders."""
    return " and ".join(name.split("/")[-1] for name in dict.fromkeys(table.get("model", [])))


def _cases(claim: dict, found: dict | None) -> list[Case]:
    """Pairs of published and found; plain numbers get the figure that the claim says."""
    if found is None:
        return []
    if "ranges" in found:
        said = _number(claim["published"])
        return [(said, min(max(said, low), high)) for low, high in found["ranges"]]
    cases = found.get("cases")
    if cases is None:
        cases = [(found.get("published", _number(claim["published"])), found["recomputed"])]
    pairs = [case if isinstance(case, tuple) else (_number(claim["published"]), case) for case in cases]
    return [(float(said), float(is_now)) for said, is_now in pairs if not math.isnan(is_now)]


def _number(text: str) -> float:
    """A number, a key of the stated figures, a ratio of two, or nothing."""
    if " / " in text:
        above, below = map(_number, text.split(" / "))
        return above / below
    try:
        return float(text or "nan")
    except ValueError:
        return stated(text)


def _equal(said: float, found: float, within: float = 0.02) -> bool:
    """Apart by no more than 2%, or than how a figure of two digits or more was rounded."""
    whole, _, decimals = f"{said:g}".partition(".")
    rounded = len((whole + decimals).lstrip("0")) > 1 and round(found, len(decimals)) == said
    return rounded or abs(found - said) <= within * abs(said)


def _distance(rule: str, said: float, found: float) -> float:
    """Larger for the figure that agrees less."""
    if rule.startswith(("above", "at least")):
        return -found / said if rule == "at least" else -found
    if rule.startswith(("below", "at most")):
        return found / said if rule == "at most" else found
    return abs(math.log(found / said)) if found > 0 < said else math.inf


_RULES: dict[str, Callable[[float, float, float], bool]] = {
    "": lambda said, found, _: _equal(said, found),
    "about": lambda said, found, _: _equal(said, found, 0.1),
    "at least": lambda said, found, _: found >= said,
    "at most": lambda said, found, _: found <= said,
    "above": lambda _, found, least: found > least,
    "below": lambda _, found, most: found < most,
}
