"""Notebook 12: what the four sources say in numbers, beside the same numbers computed or measured here."""

import pandas as pd

from vqkv.errors import DataError
from vqkv.experiments.audit import aqua, blog, framework, residual_vq
from vqkv.experiments.common import frame
from vqkv.tables import published, stored

SOURCES = {"residual VQ": residual_vq, "AQUA-KV": aqua, "transformers blog": blog, "VQ framework": framework}
STORED = (
    "02_learning", "03_grouping", "04_algebra", "04_evr", "05_entropy", "05_ladder", "05_thresholds", "06_depth",
    "07_ablation", "08_peak", "08_position",
)  # fmt: skip
PUBLISHED = (
    "aqua_detailed", "aqua_large_scale", "aqua_quantizer_evr", "hf_longbench", "kv_size_by_context",
    "rvq_table1_key_value", "rvq_table2_codebook_size", "rvq_table3_models", "stated_figures", "vqq_magnitudes",
    "vqq_threshold_sweep_gpt2", "vqq_tinyllama",
)  # fmt: skip


def audited_tables() -> dict[str, str]:
    """The tables that the audit reads, by name, with a hash of their contents: other contents, another audit.

    This study's own are those of the run at hand or, where that has none, of the repository; one that neither has is
    left out. ``published/NAME`` are the sources'.
    """
    names = [*STORED, *(f"published/{name}" for name in PUBLISHED)]
    return {name: found[1] for name in names if (found := stored(name))}


def claims_audit(tables: dict[str, str]) -> pd.DataFrame:
    """Every published figure that arithmetic or this study can test. ``tables``: from ``audited_tables``.

    One row per claim: ``source``, ``claim``, the figure as ``published`` and as ``recomputed``, ``unit``, ``how``
    (``arithmetic``: from a formula, a model's shape or bytes that are encoded here; ``measured here``: from tables of
    this study, on whatever models these were made with), ``holds`` (yes, partly, no, cannot be tested here),
    ``figures`` (how many it stands for; of several the one furthest off is shown), and the ``reason``.
    Raises ``DataError`` for a table that has changed since ``audited_tables``.
    """
    own = {name: _read(name, tables[name]) for name in STORED if name in tables}
    stated = published("stated_figures").set_index("key")["value"]
    rows = [{"source": name} | row for name, module in SOURCES.items() for row in module.rows(stated, own)]
    return frame(rows, {f"table {name}": found for name, found in tables.items()})


def _read(name: str, expected: str) -> pd.DataFrame:
    found = stored(name)
    if found is None or found[1] != expected:
        raise DataError(f"table {name} is not the one that audited_tables() saw: call it again")
    return found[0]
