"""Page 11's baselines, each with a small tuning of its own: what ``designs.published`` is then given."""

import ast

import pandas as pd

from vqkv.presets import Preset
from vqkv.study.experiments.common import by_window, tokens_kept_exact
from vqkv.study.experiments.designs import published
from vqkv.study.experiments.frontier import equivalent_bits, fitted, total_bits
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product

AQUA: list[dict] = product(predictor=["linear", "gptq"], first_layer_bits=[4, 2])
AQUA += [{"predictor": "reduced_rank", "rank": 64, "first_layer_bits": 4}]
TRIALS = {
    "quanto 2": [{"group_size": 64}, {"group_size": 32}, {"group_size": 16}],
    "kivi": [{"block_tokens": 128}, {"block_tokens": 64}, {"block_tokens": 32}],
    "kvquant": [
        {"outliers": 0.01, "fisher": False},
        *product(outliers=[0.01, 0.005, 0.0025], fisher=[True]),
        {"outliers": 0.01, "fisher": True, "norm": True},
    ],
    "higgs": [{"group_size": 1024}, {"group_size": 64}, {"group_size": 32}],
    "vqq product": [{"block_tokens": 32}, {"block_tokens": 64}, {"block_tokens": 16}],
    "vqllm": [  # at equal bits, which its labels tell
        {"key_grouping": "strided", "value_grouping": "contiguous"},
        {"key_grouping": "contiguous", "value_grouping": "contiguous"},
        {"key_grouping": "strided", "value_grouping": "strided"},
    ],
    **{f"aqua higgs {bits}": AQUA for bits in (2, 3, 4)},
    "turboquant": [{"pre_rope": False}, {"pre_rope": None}],
    "kvarn": [{"block_tokens": 128}, {"block_tokens": 64}],
    "cachegen": [{"group": group, "block_tokens": 128} for group in (16, 8, 32, 64)],
    "nsnquant": [{"block_tokens": 64}, {"block_tokens": 32}, {"block_tokens": 128}],
    "aatc": [{"block_tokens": 32}, {"block_tokens": 128}],
    "oscar": [{"key_clip": 0.96, "value_clip": 0.92}, {"key_clip": 0.92, "value_clip": 0.88}, {"group_size": 32}],
    "nova": [{"clip": 0.92}, {"clip": 0.96}],
}
WORTH = 0.05  # equivalent bits by which a setting must beat the default to replace it: less is noise
RATES = {"vqq product": "vqq product", "kvarn": "kvarn 2+2", "aatc": "aatc 0.9"}
RATES |= {name: name for name in ("quanto 2", *(f"aqua higgs {bits}" for bits in (2, 3, 4)))}  # others at 2 bits


def _with_chosen(rows: list[dict]) -> list[dict]:
    """The rows with ``chosen``; the default, which comes first in its family, has ``WORTH`` of its own taken off."""
    bits = pd.DataFrame(rows).set_index(["family", "settings"])["equivalent_bits"]
    bits[bits.groupby("family").head(1).index] -= WORTH
    best = set(bits.sort_values(kind="stable").groupby("family").head(1).index)
    return [row | {"chosen": (row["family"], row["settings"]) in best} for row in rows]


@experiment(
    lambda families: [case for name in families or TRIALS for case in product(family=[name], arguments=TRIALS[name])],
    finish=_with_chosen,
)
def tuning(
    subject: Subject, family: str, arguments: dict, chunk_size: int, vqllm: dict[str, list[int]], sink_tokens: int,
    context: str,
) -> list[dict]:  # fmt: skip
    """Each of ``families`` of published systems ([] for all) at one rate with its ``TRIALS``, the first of which is
    page 11's default, on the validation split, on which no table reports: a row per family and ``settings``, of which
    ``arguments`` are the literal.

    ``equivalent_bits``: as in ``frontier.design_search``, with the bits of ``context``, exact tokens and side
    information included. ``chosen``: the least within a family, or its default if that is not worse by ``WORTH``.
    """
    compressor = fitted(trial(family, arguments, vqllm, sink_tokens, subject.seed), subject)
    row = by_window(subject, compressor, chunk_size=chunk_size, reconstruction=False)
    bits = total_bits(row, subject.about, tokens_kept_exact(compressor))[f"bits_{context}_x1"]
    words = ", ".join(f"{name} {value}" for name, value in arguments.items())
    label = {"model": subject.name, "family": family, "settings": words, "arguments": repr(arguments)}
    label |= {name: row[name] for name in ("bits_per_value", "side_bytes", "kl_mean", "kl_floor")}
    return [label | {f"bits_{context}_x1": bits, "equivalent_bits": equivalent_bits(bits, row["kl_mean"])}]


def chosen_settings(table: pd.DataFrame) -> dict[str, dict]:
    """Family -> the arguments that were chosen for it, as ``frontier`` takes them."""
    kept = table[table["chosen"]].drop_duplicates("family")
    return {family: ast.literal_eval(each) for family, each in zip(kept["family"], kept["arguments"], strict=True)}


def trial(family: str, arguments: dict, vqllm: dict[str, list[int]], sink_tokens: int, seed: int) -> Preset:
    """A family at the rate that it is tuned at; of residual VQ the first of ``vqllm``."""
    label = next(iter(vqllm)) if family == "vqllm" else RATES.get(family, f"{family} 2")
    return published(vqllm, sink_tokens, seed, {family: arguments})[label]
