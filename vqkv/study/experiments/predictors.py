"""Notebook 06: AQUA-KV's predictors with every quantizer, and what each of its choices is worth."""

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np

from vqkv import presets
from vqkv.codecs.predictive import ROLES, inputs, side_by_side
from vqkv.evaluation.evaluate import reconstruction_error
from vqkv.models.load import kv_width
from vqkv.models.rope import rotates
from vqkv.study.experiments.common import bare, bits_with_side, by_window
from vqkv.study.experiments.comparisons import paired_ratio
from vqkv.study.metrics import explained_variance_ratio
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product

CONTEXTS = {"bits_2k": 2048, "bits_8k": 8192, "bits_32k": 32768, "bits_128k": 131072}
WITHOUT = ("aqua higgs 2, no predictor", "aqua higgs 3, no predictor", "higgs 4")  # all with 4 bits in the first layer
PUBLISHED = {
    "quanto 2": "Quanto-2b-gs64",
    "higgs 2": "HIGGS-2b-gs1024",
    "aqua quanto 2": "before RoPE Quanto gs64",
    "aqua higgs 2": "AQUA-KV (HIGGS)",
    "aqua higgs 2, after RoPE": "after RoPE HIGGS",
    "aqua higgs 2, reduced rank": "RRR (68 MiB)",
    "aqua higgs 2, MLP": "MLP (540 MiB)",
    "aqua higgs 2, GPTQ 4 bits": "GPTQ (41 MiB)",
    "aqua higgs 2, first layer 2": "HIGGS 2 bit",
    "aqua higgs 2, no sinks": "w/o 16-bit attention sink",
    "aqua higgs 2, K only": "w/o V predictor",
    "aqua higgs 2, V only": "w/o K predictor",
}  # our row -> the source's name for it
CHOICES = {  # further claims of the deck, each system with another on the same tokens
    "aqua higgs 2": presets.aqua(presets.higgs(2)),
    "aqua higgs 2, window 0": presets.aqua(presets.higgs(2), recent_window=0),
    "kvsharer, 1 pair": presets.kvsharer(1),
    "kvsharer, 2 pairs": presets.kvsharer(2),
}
BASELINE = {  # a system -> the one that it is compared with
    "aqua higgs 2, window 0": "aqua higgs 2",
    "kvsharer, 1 pair": "aqua higgs 2",
    "kvsharer, 2 pairs": "kvsharer, 1 pair",
}


def _table(
    codebook_size: int, num_quantizers: list[int], kmeans_iterations: int, rank: int, sink_tokens: int, seed: int
) -> dict[str, dict[str, presets.Preset]]:
    """Return blocks of rows; what several blocks compare with stands in the first of them."""
    vqllm = {"codebook_size": codebook_size, "seed": seed, "kmeans_iterations": kmeans_iterations}
    backbones = {f"higgs {bits}": presets.higgs(bits) for bits in (2, 3, 4)} | {"quanto 2": presets.quanto(2)}
    backbones |= {f"vqllm {depth}": presets.vqllm(depth, **vqllm) for depth in num_quantizers}
    predicted = {f"aqua {label}": presets.aqua(each) for label, each in backbones.items() if label != "higgs 4"}
    aqua, nothing = partial(presets.aqua, backbones["higgs 2"]), {"key_from": "none", "value_from": "none"}
    blocks = {
        "backbone": backbones | predicted,
        "predictor": {
            "aqua higgs 2, reduced rank": aqua(predictor="reduced_rank", rank=rank),
            "aqua higgs 2, MLP": aqua(predictor="mlp"),
            "aqua higgs 2, GPTQ 4 bits": aqua(predictor="gptq"),
            "aqua higgs 2, no predictor": aqua(**nothing),
            "aqua higgs 3, no predictor": presets.aqua(backbones["higgs 3"], **nothing),
        },
        "first layer": {"aqua higgs 2, first layer 2": aqua(first_layer_bits=2)},
        "sources": {
            "aqua higgs 2, K only": aqua(value_from="none"),
            "aqua higgs 2, V only": aqua(key_from="none"),
            "aqua higgs 2, V from V-1+K-1": aqua(value_from="V-1+K-1"),
        },
        "sinks": {"aqua higgs 2, no sinks": aqua()},
        "RoPE": {"aqua higgs 2, after RoPE": aqua(pre_rope=False)},
    }
    for block, rows in blocks.items():
        sinks = sink_tokens if block != "sinks" else 0
        blocks[block] = {label: dataclasses.replace(bare(each), sink_tokens=sinks) for label, each in rows.items()}
    return blocks


def _against_plain(row: dict, rows: list[dict], num_layers: int) -> dict:
    """Return columns of ``predictor_ablation``; NaN where plain HIGGS is better, or nothing is saved."""
    kl, bits = zip(*sorted((math.log(r["kl_mean"]), r["bits_per_value"]) for r in rows if r["label"] in WITHOUT))
    at = math.log(row["kl_mean"])
    needed, worse = np.interp(at, kl, bits), at > kl[-1]
    saved, values = needed - row["bits_per_value"], 2 * num_layers * row["width"]
    pays = row["predicted"] and saved > 0 and not worse
    return {
        "plain_bits": float("nan") if worse else float(needed),
        "pays_from": 8 * row["side_bytes"] / (values * saved) if pays else float("nan"),
    }


def _ablation_cases(quantizer: dict, num_quantizers: list[int], sink_tokens: int) -> list[dict]:
    blocks = _table(**quantizer, num_quantizers=num_quantizers, sink_tokens=sink_tokens, rank=1, seed=0)
    return [{"block": block, "label": label} for block, labels in blocks.items() for label in labels]


@experiment(
    _ablation_cases, finish=lambda rows: [row | _against_plain(row, rows, row.pop("num_layers")) for row in rows]
)
def predictor_ablation(
    subject: Subject, block: str, label: str, quantizer: dict, num_quantizers: list[int], rank_share: float,
    sink_tokens: int, chunk_size: int, batch_size: int,
) -> list[dict]:  # fmt: skip
    """Measure AQUA-KV's detailed table: every row ``chunked`` on the same tokens, no recent window.

    ``block``: the comparison that a row belongs to. ``bits_2k`` to ``bits_128k`` share side information among so many
    tokens. ``plain_bits``: what plain HIGGS needs for the same KL (log KL interpolated between 2, 3 and 4 bits);
    ``pays_from``: tokens from which the side information is smaller than that saving.
    """
    if block == "RoPE" and not rotates(subject.model):
        return []
    width = kv_width(subject.about)
    sizes: dict[str, Any] = {"num_quantizers": num_quantizers, "sink_tokens": sink_tokens}
    blocks = _table(**quantizer, **sizes, rank=max(1, int(rank_share * width)), seed=subject.seed)
    compressor = subject.calibrated(blocks[block][label], batch_size)
    row = by_window(subject, compressor, chunk_size=chunk_size, reconstruction=False)
    row |= reconstruction_error(subject.exact, compressor, subject.test[:1])
    row = {"model": subject.name, "block": block, "label": label, "predicted": bool(compressor.predictions)} | row
    row |= {"predictor_bytes": compressor.predictor_bytes, "width": width, "num_layers": subject.about["num_layers"]}
    return [row | {name: bits_with_side(row, subject.about, tokens) for name, tokens in CONTEXTS.items()}]


@experiment(lambda bits: product(bits=bits))
def error_propagation(subject: Subject, bits: int, batch_size: int) -> list[dict]:
    """Measure what quantised inputs predict of held-out tokens (``evr``); a row per bits, layer and role.

    ``mse``: the restored layer's error over its variance; ``mse_alone``: HIGGS' without predictors.
    """
    captured = zip(ROLES, subject.exact.keys_and_values(subject.test, pre_rope=True), strict=True)
    exact = {(role, layer): x.float() for role, layers in captured for layer, x in enumerate(layers)}
    chosen = (presets.aqua(presets.higgs(bits), sink_tokens=0), presets.higgs(bits, sink_tokens=0))
    compressor, alone = (subject.calibrated(preset, batch_size) for preset in chosen)
    restored, without, rows = _restored(exact, compressor), _restored(exact, alone), []
    for (role, layer), prediction in compressor.predictions.items():
        y, row = exact[role, layer], {"model": subject.name, "bits": bits, "role": role, "layer": layer}
        read = prediction.predictor(inputs(restored, prediction.sources, y))
        row["evr"] = explained_variance_ratio(side_by_side(y), read)
        rows.append(row | {"mse": _error(y, restored[role, layer]), "mse_alone": _error(y, without[role, layer])})
    return rows


def _restored(exact: dict, compressor) -> dict:
    """Return keys and values by role and layer, as they are read back."""
    restored: dict = {}
    reconstructions = compressor.new_pass()
    for layer in range(len(compressor.codecs)):
        pair = compressor.reconstruct(layer, exact["key", layer], exact["value", layer], reconstructions)
        restored |= {(role, layer): x for role, x in zip(ROLES, pair, strict=True)}
    return restored


def _error(x, x_hat) -> float:
    """Over the variance."""
    return 1 - explained_variance_ratio(side_by_side(x), side_by_side(x_hat))


def _with_ratios(rows: list[dict]) -> list[dict]:
    """Return the rows with the ratio to the system that each is compared with."""
    kl_of = {row["label"]: row["kl_each"].split() for row in rows}
    for row in rows:
        baseline = BASELINE.get(row["label"], "none")
        baseline = baseline if baseline in kl_of else "none"
        ratios = paired_ratio(kl_of[row["label"]], kl_of[baseline]) if baseline != "none" else [math.nan] * 3
        row |= {"beside": baseline} | dict(zip(("kl_ratio", "kl_ratio_low", "kl_ratio_high"), ratios, strict=True))
    return rows


@experiment(lambda: product(label=CHOICES), finish=_with_ratios)
def predictor_choices(subject: Subject, label: str, prompt_len: int, step_size: int, batch_size: int) -> dict:
    """Measure ``CHOICES``, ``snapshot`` protocol, all on the same tokens whatever their window; a row a system.

    ``prompt_len`` tokens are stored at once, the rest ``step_size`` at a time. ``kl_ratio``: mean KL over that of the
    system ``beside`` ("none": NaN), with its paired 95% interval.
    """
    compressor = subject.calibrated(CHOICES[label], batch_size)
    read: dict[str, Any] = {"protocol": "snapshot", "prompt_len": prompt_len, "step_size": step_size}
    return {"model": subject.name, "label": label} | by_window(subject, compressor, reconstruction=False, **read)


def over_default(table, default: str):
    """Return each row's KL over that of ``default``, ``ratio``, with its paired 95% interval, ``low`` to ``high``."""
    each = table.set_index("label")["kl_each"].str.split()
    ends = np.array([paired_ratio(kl, each[default]) for kl in each]).T
    return table[["block", "label"]].assign(ratio=ends[0], low=ends[1], high=ends[2])


def beside_published(table, published):
    """Join the rows of the source's detailed table, its bits and increase of perplexity (%), with each model's."""
    theirs = published.drop_duplicates("config").set_index("config").loc[list(PUBLISHED.values())]
    theirs.index = list(PUBLISHED)
    exact = published.set_index("config").loc["uncompressed", "wiki2_ppl"]
    joined = theirs[["bits"]].assign(ppl_increase=100 * (theirs["wiki2_ppl"] / exact - 1)).add_prefix("published ")
    for model, rows in table.groupby("model", sort=False):
        ours = rows.set_index("label")[["ppl_increase", "kl_mean"]]
        joined = joined.join(ours.add_prefix(model.split("/")[-1] + " "))
    return joined
