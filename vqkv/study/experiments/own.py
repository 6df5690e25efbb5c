"""Notebook 19: a preset that a page defines, measured as page 11 measures its systems, and its neighbours there."""

import dataclasses
import itertools
import linecache
import tempfile
from collections.abc import Callable

import numpy as np
import pandas as pd

from vqkv.cache.compressor import Compressor
from vqkv.errors import DataError
from vqkv.study.experiments.common import frame, subject
from vqkv.study.experiments.comparisons import at_equal_bits
from vqkv.study.experiments.frontier import fitted, measured
from vqkv.study.experiments.systems import bare
from vqkv.study.sweep import sweep


def defining_text(function: Callable) -> str:
    """Source of the cell or the module that defines a function: a table made of it is made anew when that changes.
    Raises ``DataError`` where there is none."""
    text = "".join(linecache.getlines(function.__code__.co_filename)).strip()
    if not text:
        raise DataError(f"the source of {function.__name__} cannot be read: define it in a cell or in a file")
    return text


def own_preset(
    models: list[str], corpus: str, definition: str, preset: str, bits: list[int], seeds: list[int], train_seqs: int,
    seq_len: int, num_seqs: int, recall_seqs: int, chunk_size: int, sink_tokens: int, dtype: str, device: str,
):  # fmt: skip
    """Rows of ``frontier`` of a preset: ``definition``, Python source that is run in each process, makes the function
    ``preset``, which takes ``bits``. A row per model, seed and number of them. Only sinks stay exact, as there. What is
    measured was saved and loaded before; raises ``DataError`` if that changed it."""
    text = {"train": [train_seqs, seq_len], "test": [num_seqs, seq_len], "corpus": corpus}
    settings = {
        "who": text | {"dtype": dtype, "device": device}, "definition": definition, "preset": preset,
        "sink_tokens": sink_tokens, "recall_seqs": recall_seqs, "chunk_size": chunk_size,
    }  # fmt: skip
    cases = [{"model": name, "seed": seed, "bits": each} for name, seed, each in itertools.product(models, seeds, bits)]
    return frame(*sweep(_row, cases, settings, preset))


def _row(model: str, seed: int, bits: int, who: dict, definition: str, preset: str, sink_tokens: int, **settings):
    exec(definition, defined := {"__name__": "__main__"})
    who = who | {"name": model, "seed": seed}
    found, made = subject(**who), dataclasses.replace(bare(defined[preset](bits)), sink_tokens=sink_tokens)
    compressor = _reloaded(fitted(made, who))
    label = {"model": model, "seed": seed, "system": preset, "nominal_bits": bits}
    return [label | measured(found, compressor, seed, **settings)], found.sources


def _reloaded(compressor: Compressor) -> Compressor:
    with tempfile.TemporaryDirectory() as folder:
        compressor.save_pretrained(folder)
        found = Compressor.from_pretrained(folder)
    if found.fingerprint != compressor.fingerprint:
        raise DataError(f"{compressor.name} is another one after save and load: what it learns must be buffers")
    return found


def on_same_windows(table: pd.DataFrame, known: pd.DataFrame) -> pd.DataFrame:
    """``table`` and the rows of ``known`` that were measured on its windows: same model, seed and exact perplexity (to
    four digits)."""
    place = ["model", "seed"]
    exact = known[place].merge(table.groupby(place, as_index=False)["ppl_exact"].first(), how="left")["ppl_exact"]
    same = np.abs(known["ppl_exact"].to_numpy() / exact.to_numpy() - 1) < 1e-4
    return pd.concat([known[same], table], ignore_index=True)


def neighbours(table: pd.DataFrame, system: str, bits: str, within: float) -> pd.DataFrame:
    """``at_equal_bits`` of what lies ``within`` so many ``bits`` (a column, mean over seeds) of one of ``system``'s
    rates: KL of that, interpolated between rates, over theirs. A row per model and neighbour, fewest bits first."""
    found = []
    for _, rows in table.groupby("model", sort=False):
        at = rows.groupby(["system", "nominal_bits"])[bits].transform("mean").to_numpy()
        own = (rows["system"] == system).to_numpy()
        near = np.abs(at[:, None] - at[own]).min(axis=1) <= within
        others = [name for name in dict.fromkeys(rows["system"][near]) if name != system]
        found.append(at_equal_bits(rows[near | own], others, [system], bits).sort_values("bits"))
    return pd.concat(found, ignore_index=True)
