"""Notebook 15: a preset that a page defines, measured with published ones."""

import dataclasses
import linecache
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import numpy as np
import pandas as pd

from vqkv.cache.compressor import Compressor
from vqkv.errors import DataError
from vqkv.runtime.files import cache_folder
from vqkv.study.experiments.common import bare, by_window, exact_tokens
from vqkv.study.experiments.comparisons import at_equal_bits
from vqkv.study.experiments.designs import published
from vqkv.study.experiments.frontier import fitted, total_bits
from vqkv.study.shared import digest
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment
from vqkv.study.tables import write_atomically


def defining_text(function: Callable) -> str:
    """Return the source of the cell or module of a function, so that its table follows it. Raises ``DataError``."""
    text = "".join(linecache.getlines(function.__code__.co_filename)).strip()
    if not text:
        raise DataError(f"the source of {function.__name__} cannot be read: define it in a cell or in a file")
    return text


def _cases(
    subject: Subject, models: list[str], seeds: list[int], preset: str, bits: list[int], beside: list[str]
) -> list[dict]:
    systems = [*((preset, each) for each in bits), *((label, 0) for label in beside)]
    subjects = subject.each(name=models, seed=seeds)
    return [{"subject": each, "system": system, "bits": rate} for each in subjects for system, rate in systems]


@experiment(_cases)
def own_preset(subject: Subject, system: str, bits: int, definition: str, sink_tokens: int, chunk_size: int) -> dict:
    """Measure a preset at all ``bits`` and published systems ``beside`` it: a row per model, seed and system.

    ``definition``: source of a module with the function ``preset``. Raises ``DataError`` if saving changes it.
    """
    if bits:
        preset = getattr(imported(definition), system)(bits)
        made = fitted(dataclasses.replace(bare(preset), sink_tokens=sink_tokens), subject)
        with tempfile.TemporaryDirectory() as folder:
            made.save_pretrained(folder)
            compressor = Compressor.from_pretrained(folder)
        if compressor.fingerprint != made.fingerprint:
            raise DataError(f"{made.name} is another one after save and load: what it learns must be buffers")
    else:
        compressor = fitted(published({}, sink_tokens, subject.seed)[system], subject)
    row = by_window(subject, compressor, chunk_size=chunk_size, reconstruction=False)
    totals = total_bits(row, subject.about, exact_tokens(compressor))
    columns = ("bits_per_value", "side_bytes", "kl_mean", "kl_low", "kl_high", "kl_floor", "top1", "kl_each")
    label = {"model": subject.name, "seed": subject.seed, "system": system, "nominal_bits": bits}
    return label | {name: row[name] for name in columns} | totals


def imported(definition: str) -> ModuleType:
    """Import a cell as a module, from a file named by its contents in the user's cache: so any process has it."""
    path = cache_folder("pages") / f"cell_{digest(definition)}.py"
    write_atomically(path, definition.encode())
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return import_module(path.stem)


def neighbours(table: pd.DataFrame, system: str, bits: str, within: float) -> pd.DataFrame:
    """Compare, by ``at_equal_bits``, what lies ``within`` so many ``bits`` (a column) of one of ``system``'s rates."""
    comparisons = []
    for _, rows in table.groupby("model", sort=False):
        at = rows.groupby(["system", "nominal_bits"])[bits].transform("mean").to_numpy()
        own = (rows["system"] == system).to_numpy()
        near = np.abs(at[:, None] - at[own]).min(axis=1) <= within
        others = [name for name in dict.fromkeys(rows["system"][near]) if name != system]
        comparisons.append(at_equal_bits(rows[near | own], others, [system], bits).sort_values("bits"))
    return pd.concat(comparisons, ignore_index=True)
