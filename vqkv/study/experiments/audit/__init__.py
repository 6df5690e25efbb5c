"""Notebook 12: what the four sources say in numbers, beside the same numbers computed or measured here.

``results/published/claims.csv`` has a row for each claim: ``section`` and ``quote`` (of the source), and expressions
(see ``expressions`` and ``vocabulary``):

- ``published``: the figure, or figures, of the source.
- ``arithmetic``: what it should be by the source's own numbers, a model's shape, or bytes that are encoded here. It
  may read a column of ``table``, one of ``results/published``.
- ``measured``: what it is in ``table`` of this study, by model: of ``rows``, divided by the same of ``over``.

A claim with neither needs a model or a machine that is not at hand. ``rule``: see ``rows.agrees``; ``ours`` for a
comparison that the source did not make. ``figures``: how many published ones it stands for, each counted once.
``reason`` may have expressions in braces.
"""

import pandas as pd

from vqkv.errors import DataError
from vqkv.study.experiments.audit.rows import Case, find, row
from vqkv.study.tables import published, repository_root, stored


def audited_tables() -> dict[str, str]:
    """Return the tables that the audit reads, by name, with a hash of their contents: of this run, else the
    repository's.

    One that neither has is left out. ``published/NAME`` are the sources'.
    """
    names = sorted({*listed().query("measured != ''")["table"]})
    names += sorted(f"published/{path.stem}" for path in (repository_root() / "results/published").glob("*.csv"))
    return {name: pair[1] for name in names if (pair := stored(name))}


def claims_audit(tables: dict[str, str]) -> pd.DataFrame:
    """Every published figure that arithmetic or this study can test. ``tables``: from ``audited_tables``.

    One row per claim: ``source``, ``section``, ``claim``, ``quote``, the figure as ``published`` and as ``recomputed``
    (of several cases the one that agrees least), ``unit``, ``how`` (``arithmetic``: from a formula, a model's shape or
    bytes that are encoded here; ``measured here``: from tables of this study, on their models; ``needs their model``),
    ``low`` and ``high``: its 95% interval, where windows are shared. ``rule``, ``agree`` cases ``of`` so many,
    ``verdict`` (``rows.VERDICTS``), ``figures`` (how many it stands for), ``where`` it is found (a page, or the
    expression) and the ``reason``.
    Raises ``DataError`` for a table that has changed since ``audited_tables``.
    """
    own = {}
    for name, contents in tables.items():
        pair = stored(name)
        if pair is None or pair[1] != contents:
            raise DataError(f"table {name} is not the one that audited_tables() saw: call it again")
        own[name] = pair[0]
    audited = pd.DataFrame([row(claim, *_recomputed(claim, own)) for claim in listed().to_dict("records")])
    audited.attrs["sources"] = {f"table {name}": contents for name, contents in tables.items()}
    return audited


def listed() -> pd.DataFrame:
    """Return the claims, as words but for ``figures``."""
    claims = published("claims").fillna("")
    return claims.astype(str).astype({"figures": int})


def _recomputed(claim: dict, own: dict[str, pd.DataFrame]) -> tuple[list[Case], dict]:
    """Return no case of a claim that cannot be tested: its table is not there, or has other systems or settings."""
    if claim["arithmetic"]:
        return find(claim, published(claim["table"]) if claim["table"] else pd.DataFrame())
    try:
        return find(claim, own[claim["table"]]) if claim["measured"] else ([], {})
    except (LookupError, ValueError):
        return [], {}
