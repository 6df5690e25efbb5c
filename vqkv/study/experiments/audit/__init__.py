"""Notebook 12: what the four sources say in numbers, beside the same numbers computed or measured here.

``results/published/claims.csv`` has a row for each claim: ``section`` and ``quote`` (of the source), ``published`` (a
number, the key of one in ``stated_figures``, or a ratio of two; empty where ``find`` tells), ``table`` (of this study,
that ``find`` reads; empty for arithmetic), ``find`` (a function of the source's module or of ``rows``, and its
arguments; empty where neither model nor machine is at hand), ``rule`` (see ``rows.agrees``; ``ours`` for a comparison
that the source did not make), ``figures`` (published ones that it stands for, each counted once) and ``reason``, into
which the function's facts are put.
"""

import pandas as pd

from vqkv.errors import DataError
from vqkv.study.experiments.audit import aqua, blog, framework, residual_vq, rows
from vqkv.study.experiments.common import frame
from vqkv.study.tables import published, repository_root, stored

SOURCES = {
    "residual VQ": residual_vq,
    "AQUA-KV": aqua,
    "KVQuant": aqua,  # a table of its, in AQUA-KV's slides
    "transformers blog": blog,
    "VQ framework": framework,
}


def audited_tables() -> dict[str, str]:
    """The tables that the audit reads, by name, with a hash of their contents: other contents, another audit.

    This study's own are those of the run at hand or, where that has none, of the repository; one that neither has is
    left out. ``published/NAME`` are the sources'.
    """
    names = sorted({*listed()["table"]} - {""})
    names += sorted(f"published/{path.stem}" for path in (repository_root() / "results/published").glob("*.csv"))
    return {name: found[1] for name in names if (found := stored(name))}


def claims_audit(tables: dict[str, str]) -> pd.DataFrame:
    """Every published figure that arithmetic or this study can test. ``tables``: from ``audited_tables``.

    One row per claim: ``source``, ``section``, ``claim``, ``quote``, the figure as ``published`` and as ``recomputed``
    (of several cases the one that agrees least), ``unit``, ``how`` (``arithmetic``: from a formula, a model's shape or
    bytes that are encoded here; ``measured here``: from tables of this study, on their models; ``needs their model``),
    ``low`` and ``high``: its 95% interval, where windows are shared. ``rule``, ``agree`` cases ``of`` so many,
    ``verdict`` (``rows.VERDICTS``), ``figures`` (how many it stands for), ``where`` it is found (a page, or a function
    of this package) and the ``reason``.
    Raises ``DataError`` for a table that has changed since ``audited_tables``.
    """
    own = {name: _read(name, contents) for name, contents in tables.items() if not name.startswith("published/")}
    audited = [rows.row(claim, _found(claim, own)) for claim in listed().to_dict("records")]
    return frame(audited, {f"table {name}": found for name, found in tables.items()})


def listed() -> pd.DataFrame:
    """The claims, as words but for ``figures``."""
    claims = published("claims").fillna("")
    return claims.astype(str).astype({"figures": int})


def _found(claim: dict, own: dict[str, pd.DataFrame]) -> dict | None:
    """The result of the claim's function; None if it has none, or the table that it reads is not there, or lacks what
    it needs."""
    name, *arguments = claim["find"].split("; ")
    if not name or claim["table"] not in ("", *own):
        return None
    find = getattr(rows, name, None) or getattr(SOURCES[claim["source"]], name)
    if not claim["table"]:
        return find(*arguments)
    try:
        return find(own[claim["table"]], *arguments) | {"models": rows.model_names(own[claim["table"]])}
    except (LookupError, ValueError):  # a table of other systems or settings
        return None


def _read(name: str, expected: str) -> pd.DataFrame:
    found = stored(name)
    if found is None or found[1] != expected:
        raise DataError(f"table {name} is not the one that audited_tables() saw: call it again")
    return found[0]
