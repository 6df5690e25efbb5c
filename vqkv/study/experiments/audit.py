"""Notebook 12: what the four sources say in numbers, beside the same numbers computed or measured here.

``results/published/claims.csv`` has a row for each claim: ``section`` and ``quote`` (of the source), and expressions
(see ``audit_expressions``):

- ``published``: the figure, or figures, of the source.
- ``arithmetic``: what it should be by the source's own numbers, a model's shape, or bytes that are encoded here. It
  may read a column of ``table``, one of ``results/published``.
- ``measured``: what it is in ``table`` of this study, by model: of ``rows``, divided by the same of ``over``.

A claim with neither needs a model or a machine that is not at hand. ``rule``: see ``agrees``; ``ours``: the source
does not compare. ``figures``: how many published ones it stands for. ``reason`` may have expressions in braces.
"""

import math
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pandas as pd

from vqkv.errors import DataError
from vqkv.study.experiments.audit_expressions import Between, evaluate, filled, names
from vqkv.study.experiments.comparisons import paired_ratio
from vqkv.study.tables import published, repository_root, stored

ARITHMETIC, MEASURED, NEITHER = "arithmetic", "measured here", "needs their model"
HOLDS, IN_PART, DOES_NOT, OURS = "holds", "holds in part", "does not hold", "our re-baselining"
VERDICTS = (HOLDS, IN_PART, DOES_NOT, NEITHER, OURS)
Case = tuple[float, float]  # a figure as published and as found here


def audited_tables() -> dict[str, str]:
    """Return the tables that the audit reads, this run's or the repository's, by name, with a hash of their contents.

    One that neither has is left out. ``published/NAME`` are the sources'.
    """
    read = sorted({*listed().query("measured != ''")["table"]})
    read += sorted(f"published/{path.stem}" for path in (repository_root() / "results/published").glob("*.csv"))
    return {name: pair[1] for name in read if (pair := stored(name))}


def claims_audit(tables: dict[str, str]) -> pd.DataFrame:
    """Return every published figure that arithmetic or this study can test. ``tables``: from ``audited_tables``.

    One row per claim: ``source``, ``section``, ``claim``, ``quote``, the figure as ``published`` and as ``recomputed``
    (of several cases the one that agrees least), ``unit``, ``how`` (``arithmetic``: from a formula, a model's shape or
    bytes that are encoded here; ``measured here``: from tables of this study, on their models; ``needs their model``),
    ``low`` and ``high``: its 95% interval, where windows are shared. ``rule``, ``agree`` cases ``of`` so many,
    ``verdict`` (``VERDICTS``), ``figures`` (how many it stands for), ``where`` it is found (a page, or the
    expression) and the ``reason``. Raises ``DataError`` for a table that has changed since ``audited_tables``.
    """
    own = {}
    for name, contents in tables.items():
        pair = stored(name)
        if pair is None or pair[1] != contents:
            raise DataError(f"table {name} is not the one that audited_tables() saw: call it again")
        own[name] = pair[0]
    rows = []
    for claim in listed().to_dict("records"):
        name = claim["table"]
        recomputed: tuple[list[Case], dict] = ([], {})
        if claim["arithmetic"]:
            recomputed = find(claim, published(name) if name else pd.DataFrame())
        elif claim["measured"]:
            with suppress(LookupError, ValueError):  # the table is not there, or has other systems or settings
                recomputed = find(claim, own[name])
        rows.append(row(claim, *recomputed))
    audited = pd.DataFrame(rows)
    audited.attrs["sources"] = {f"table {name}": contents for name, contents in tables.items()}
    return audited


def listed() -> pd.DataFrame:
    """Return the claims, as words but for ``figures``."""
    return published("claims").fillna("").astype(str).astype({"figures": int})


def agrees(rule: str, said: float, recomputed: float) -> bool:
    """Tell whether a figure agrees with the published one by a rule.

    - Empty: it may miss it by 2% or by its rounding.
    - ``about``: by 10%, where the source says about, almost, roughly, or where the figure is of other models.
    - ``at least`` and ``at most``: a bound.
    - ``above: x`` and ``below: x``: a direction, as size depends on model and task; of an interval its end decides.
    """
    name, _, number = rule.partition(": ")
    return _RULES[name](said, recomputed, float(number or 0))


def find(claim: dict, table: pd.DataFrame) -> tuple[list[Case], dict]:
    """Evaluate a claim on a table: on the rows that ``rows`` chooses, over the same on those that ``over`` chooses.

    Each model of a measured table is a case, or several. A figure that can be ``between`` two is the nearest there.
    Returns the cases and what the reason may name, ``low`` and ``high`` of an interval included.
    """
    cases: list[Case] = []
    values, by_model = [], claim["measured"] and "model" in table
    for model in [rows for _, rows in table.groupby("model")] if by_model else [table]:
        rows = _chosen(model, claim["rows"])
        recomputed = evaluate(claim["arithmetic"] or claim["measured"], names(rows))
        if claim["over"]:
            recomputed = recomputed / evaluate(claim["measured"], names(_chosen(model, claim["over"])))
        said = evaluate(claim["published"], names(rows))
        values.append(np.ravel(recomputed))
        recomputed = np.clip(said, *recomputed) if isinstance(recomputed, Between) else recomputed
        said = np.clip(recomputed, *said) if isinstance(said, Between) else said
        pairs = zip(*np.broadcast_arrays(np.ravel(said), np.ravel(recomputed)), strict=True)
        cases += [(float(said), float(recomputed)) for said, recomputed in pairs if not math.isnan(recomputed)]
    every = pd.Series(np.hstack(values))
    facts = {"least": every.min(), "most": every.max()} | _interval(claim, table)
    facts["models"] = " and ".join(name.split("/")[-1] for name in dict.fromkeys(table.get("model", [])))
    return cases, names(_chosen(table, claim["rows"])) | facts


def row(claim: dict, cases: list[Case], facts: dict) -> dict:
    """Return the audit's row of a claim: of the case that agrees least, or of none if its table lacks something."""
    rule, page = claim["rule"], f"page {claim['table'][:2]}"
    low, high = (facts.get(end, math.nan) for end in ("low", "high"))
    end = {"above": low, "below": high}.get(rule.partition(":")[0], math.nan)
    decisive = cases if math.isnan(end) else [(said, end) for said, _ in cases]
    agree = sum(agrees(rule, *case) for case in decisive) if rule != "ours" else 0
    verdict = OURS if rule == "ours" else HOLDS if agree == len(cases) else IN_PART if agree else DOES_NOT
    if cases:
        said, recomputed = max(cases, key=lambda case: _distance(rule, *case))
        reason = filled(claim["reason"], facts | {"recomputed": recomputed})
    else:
        said = np.ravel(evaluate(claim["published"] or "nan", names(pd.DataFrame())))[0]  # the least of a range
        recomputed, reason = math.nan, claim["reason"]
        if claim["measured"]:
            reason = f"Table {claim['table']} is not there, or was made without what this needs: run {page}."
    return {
        **{name: claim[name] for name in ("source", "section", "claim", "quote")},
        "published": float(said),
        "recomputed": recomputed,
        "low": low,
        "high": high,
        "unit": claim["unit"],
        "how": ARITHMETIC if claim["arithmetic"] else MEASURED if claim["measured"] else NEITHER,
        "rule": rule,
        "agree": agree,
        "of": len(cases),
        "verdict": verdict if cases else NEITHER,
        "figures": claim["figures"],
        "where": page if claim["measured"] else claim["arithmetic"],
        "reason": reason,
    }


def _chosen(table: pd.DataFrame, rows: str) -> pd.DataFrame:
    return table[evaluate(rows, names(table))] if rows else table


def _interval(claim: dict, table: pd.DataFrame) -> dict[str, float]:
    """Return the 95% interval over windows of a ratio of mean KLs, where each is one row of the same windows."""
    if claim["over"] and "kl_mean" in claim["measured"] and "kl_each" in table:
        pair = [_chosen(table, claim[rows])["kl_each"] for rows in ("rows", "over")]
        each = [str(kl.iloc[0]).split() for kl in pair if len(kl) == 1]
        if len(each) == 2 and len(each[0]) == len(each[1]):
            return dict(zip(("low", "high"), paired_ratio(*each)[1:], strict=True))
    return {}


def _equal(said: float, recomputed: float, within: float = 0.02) -> bool:
    """Tell whether two figures differ by no more than 2%, or than how a figure of two digits or more was rounded."""
    integer, _, decimals = f"{said:g}".partition(".")
    rounded = len((integer + decimals).lstrip("0")) > 1 and round(recomputed, len(decimals)) == said
    return rounded or abs(recomputed - said) <= within * abs(said)


def _distance(rule: str, said: float, recomputed: float) -> float:
    """Return a number that is larger for the figure that agrees less."""
    if rule.startswith(("above", "at least")):
        return -recomputed / said if rule == "at least" else -recomputed
    if rule.startswith(("below", "at most")):
        return recomputed / said if rule == "at most" else recomputed
    return abs(math.log(recomputed / said)) if recomputed > 0 < said else math.inf


_RULES: dict[str, Callable[[float, float, float], bool]] = {
    "": lambda said, recomputed, _: _equal(said, recomputed),
    "about": lambda said, recomputed, _: _equal(said, recomputed, 0.1),
    "at least": lambda said, recomputed, _: recomputed >= said,
    "at most": lambda said, recomputed, _: recomputed <= said,
    "above": lambda _, recomputed, least: recomputed > least,
    "below": lambda _, recomputed, most: recomputed < most,
}
