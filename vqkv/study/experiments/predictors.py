"""Notebook 06: AQUA-KV's predictors with every quantizer, and what each of its choices is worth."""

import dataclasses
import math
from functools import partial

import numpy as np

from vqkv import presets
from vqkv.codecs.predictive import ROLES, Prediction, inputs, side_by_side
from vqkv.evaluation.evaluate import reconstruction_error
from vqkv.models.capture import capture
from vqkv.models.load import describe, kv_width
from vqkv.models.rope import rotates
from vqkv.study.experiments.common import all_told, by_window, calibrated, frame, subject
from vqkv.study.experiments.comparisons import paired_ratio
from vqkv.study.metrics import explained_variance_ratio
from vqkv.study.sweep import per_process, sweep

CONTEXTS = {"bits_2k": 2048, "bits_8k": 8192, "bits_32k": 32768, "bits_128k": 131072}


def predictor_ablation(
    models: list[str], corpus: str, train_seqs: int, seq_len: int, num_seqs: int, chunk_size: int, batch_size: int,
    codebook_size: int, num_quantizers: list[int], kmeans_iterations: int, rank_share: float, sink_tokens: int,
    seed: int, dtype: str, device: str,
):  # fmt: skip
    """AQUA-KV's detailed table: every row in the ``chunked`` protocol on the same tokens, no recent window.

    ``block`` says which comparison a row belongs to, ``predicted`` whether it has predictors. ``bits_2k`` to
    ``bits_128k`` share the side information (predictors, codebooks) out among the values of so many tokens.
    ``plain_bits``: what HIGGS without predictors, its first layer at 4 bits too, needs for the same KL (between 2, 3
    and 4 bits log KL is interpolated, beyond them it is cut off); ``pays_from``: tokens from which the side information
    is smaller than that saving.
    """
    who = {"corpus": corpus, "train": [train_seqs, seq_len], "test": [num_seqs, seq_len], "seed": seed}
    settings = {
        "who": who | {"dtype": dtype, "device": device},
        "table": {
            "codebook_size": codebook_size, "num_quantizers": num_quantizers, "kmeans_iterations": kmeans_iterations,
            "sink_tokens": sink_tokens, "seed": seed,
        },
        "rank_share": rank_share,
        "chunk_size": chunk_size,
        "batch_size": batch_size,
    }  # fmt: skip
    labels = [(block, label) for block, presets in _table(rank=1, **settings["table"]).items() for label in presets]
    cases = [{"model": name, "block": block, "label": label} for name in models for block, label in labels]
    rows, sources = sweep(_ablation_row, cases, settings, "ablation")
    return frame([row for name in models for row in _beside_plain([r for r in rows if r["model"] == name])], sources)


def _ablation_row(
    model: str, block: str, label: str, who: dict, table: dict, rank_share: float, chunk_size: int, batch_size: int
):
    """None for the block ``RoPE`` of a model without."""
    who = who | {"name": model}
    found = subject(**who)
    about = describe(found.model)
    if block == "RoPE" and not rotates(found.model):
        return [], found.sources
    width = kv_width(about)
    preset = _table(rank=max(1, int(rank_share * width)), **table)[block][label]
    compressor = calibrated(preset, who, batch_size)
    row = by_window(found, compressor, found.test, chunk_size=chunk_size, reconstruction=False)
    row |= reconstruction_error(found.exact, compressor, found.test[:1])
    row = {"model": model, "block": block, "label": label, "predicted": bool(compressor.predictions)} | row
    row |= {"predictor_bytes": compressor.predictor_bytes, "width": width, "num_layers": about["num_layers"]}
    return [row | {name: all_told(row, about, n) for name, n in CONTEXTS.items()}], found.sources


def error_propagation(
    models: list[str], corpus: str, train_seqs: int, seq_len: int, num_seqs: int, batch_size: int, bits: list[int],
    seed: int, dtype: str, device: str,
):  # fmt: skip
    """The prediction that quantised inputs leave, on held-out tokens; a row per model, bits, layer and role.

    ``evr_exact``: fitted on exact inputs and read from them. ``evr_mismatched``: the same predictor reading what
    AQUA-KV with HIGGS of ``bits`` bits restores. ``evr``: fitted on restored inputs, as AQUA-KV does. ``mse``: the
    error of the restored layer over its variance; ``mse_alone``: of HIGGS without predictors.
    """
    who = {"corpus": corpus, "train": [train_seqs, seq_len], "test": [num_seqs, seq_len], "seed": seed}
    settings = {"who": who | {"dtype": dtype, "device": device}, "batch_size": batch_size}
    cases = [{"model": name, "bits": width} for name in models for width in bits]
    return frame(*sweep(_propagation_rows, cases, settings, "propagation"))


def _propagation_rows(model: str, bits: int, who: dict, batch_size: int):
    who = who | {"name": model}
    found, exact = subject(**who), _exact(who=who)
    on_exact = _on_exact(who=who, batch_size=batch_size)
    preset = presets.aqua(presets.higgs(bits), sink_tokens=0)
    compressor, alone = (calibrated(each, who, batch_size) for each in (preset, presets.higgs(bits, sink_tokens=0)))
    label = {"model": model, "bits": bits}
    return [label | row for row in _by_place(exact, on_exact, compressor, alone)], found.sources


@per_process(maxsize=1)
def _exact(who: dict) -> dict:
    """Held-out keys and values by place."""
    found = subject(**who)
    layers = [x.float() for pair in zip(*capture(found.model, found.test), strict=True) for x in pair]
    places = [(role, layer) for layer in range(len(layers) // 2) for role in ROLES]
    return dict(zip(places, layers, strict=True))


@per_process(maxsize=1)
def _on_exact(who: dict, batch_size: int):
    """AQUA-KV whose predictors were fitted on exact inputs."""
    return calibrated(presets.aqua(presets.fp16(), first_layer_bits=16, sink_tokens=0), who, batch_size)


NOTHING = {"key_from": "none", "value_from": "none"}
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


def over_default(table, default: str):
    """KL of each row over that of ``default`` on the same windows, ``ratio`` with the ends of its paired 95% interval,
    ``low`` and ``high``."""
    each = table.set_index("label")["kl_each"].str.split()
    found = [paired_ratio(kl, each[default]) for kl in each]
    ends = np.array(found).T
    return table[["block", "label"]].assign(ratio=ends[0], low=ends[1], high=ends[2])


def beside_published(table, published):
    """The rows that the source's detailed table has too: its bits and perplexity (increase over the uncompressed, in
    percent), then each model's perplexity increase and KL."""
    theirs = published.drop_duplicates("config").set_index("config").loc[list(PUBLISHED.values())]
    theirs.index = list(PUBLISHED)
    exact = published.set_index("config").loc["uncompressed", "wiki2_ppl"]
    joined = theirs[["bits"]].assign(ppl_increase=100 * (theirs["wiki2_ppl"] / exact - 1)).add_prefix("published ")
    for model, rows in table.groupby("model", sort=False):
        ours = rows.set_index("label")[["ppl_increase", "kl_mean"]]
        joined = joined.join(ours.add_prefix(model.split("/")[-1] + " "))
    return joined


def _table(
    codebook_size, num_quantizers, kmeans_iterations, rank, sink_tokens, seed
) -> dict[str, dict[str, presets.Preset]]:
    """Blocks of rows; what several blocks compare with stands in the first of them."""
    exact = {"sink_tokens": sink_tokens, "recent_window": 0, "flush_block": 1}
    aqua = partial(_aqua, exact)
    vqllm = {"codebook_size": codebook_size, "seed": seed, "kmeans_iterations": kmeans_iterations}
    backbones = {f"higgs {bits}": presets.higgs(bits) for bits in (2, 3, 4)} | {"quanto 2": presets.quanto(2)}
    backbones |= {f"vqllm {depth}": presets.vqllm(depth, **vqllm) for depth in num_quantizers}
    plain = {label: dataclasses.replace(backbone, **exact) for label, backbone in backbones.items()}
    return {
        "backbone": plain | {f"aqua {label}": aqua(each) for label, each in backbones.items() if label != "higgs 4"},
        **_choices(aqua, backbones, rank),
        "sinks": {"aqua higgs 2, no sinks": aqua(backbones["higgs 2"], sink_tokens=0)},
        "RoPE": {"aqua higgs 2, after RoPE": aqua(backbones["higgs 2"], pre_rope=False)},
    }


def _aqua(exact: dict, backbone: presets.Preset, **changes) -> presets.Preset:
    """AQUA-KV that keeps ``exact`` tokens, unless a change says otherwise."""
    kept = {name: changes.get(name, value) for name, value in exact.items()}
    return dataclasses.replace(presets.aqua(backbone, **changes), **kept)


def _choices(aqua, backbones: dict[str, presets.Preset], rank: int) -> dict[str, dict[str, presets.Preset]]:
    """Other choices with 2-bit HIGGS: predictors, the first layer's bits, sources."""
    higgs = partial(aqua, backbones["higgs 2"])
    return {
        "predictor": {
            "aqua higgs 2, reduced rank": higgs(predictor="reduced_rank", rank=rank),
            "aqua higgs 2, MLP": higgs(predictor="mlp"),
            "aqua higgs 2, GPTQ 4 bits": higgs(predictor="gptq"),
            "aqua higgs 2, no predictor": higgs(**NOTHING),
            "aqua higgs 3, no predictor": aqua(backbones["higgs 3"], **NOTHING),
        },
        "first layer": {"aqua higgs 2, first layer 2": higgs(first_layer_bits=2)},
        "sources": {
            "aqua higgs 2, K only": higgs(value_from="none"),
            "aqua higgs 2, V only": higgs(key_from="none"),
            "aqua higgs 2, V from V-1+K-1": higgs(value_from="V-1+K-1"),
        },
    }


def _beside_plain(rows: list[dict]) -> list[dict]:
    """A model's rows with ``_against_plain``'s columns, without the number of layers that these need."""
    return [row | _against_plain(row, rows, row.pop("num_layers")) for row in rows]


def _against_plain(row: dict, rows: list[dict], num_layers: int) -> dict:
    """Columns of ``predictor_ablation``; NaN where HIGGS of 2 bits without predictors has a lower KL, or nothing is
    saved."""
    plain = sorted((r for r in rows if r["label"] in WITHOUT), key=lambda r: r["kl_mean"])
    needed = np.interp(
        math.log(row["kl_mean"]), [math.log(r["kl_mean"]) for r in plain], [r["bits_per_value"] for r in plain]
    )
    saved, values = needed - row["bits_per_value"], 2 * num_layers * row["width"]
    worse = row["kl_mean"] > plain[-1]["kl_mean"]
    pays = row["predicted"] and saved > 0 and not worse
    return {
        "plain_bits": float("nan") if worse else float(needed),
        "pays_from": 8 * row["side_bytes"] / (values * saved) if pays else float("nan"),
    }


def _by_place(exact: dict, on_exact, compressor, alone) -> list[dict]:
    restored, without, rows = _restored(exact, compressor), _restored(exact, alone), []
    for place, prediction in compressor.predictions.items():
        fitted_on_exact = on_exact.predictions[place]
        found = {
            "evr_exact": _evr(exact, exact[place], fitted_on_exact),
            "evr_mismatched": _evr(restored, exact[place], fitted_on_exact),
            "evr": _evr(restored, exact[place], prediction),
            "mse": _error(exact[place], restored[place]),
            "mse_alone": _error(exact[place], without[place]),
        }
        rows.append({"role": place[0], "layer": place[1]} | found)
    return rows


def _restored(exact: dict, compressor) -> dict:
    """Keys and values by place, as they are read back."""
    restored, known = {}, compressor.new_pass()
    for layer in range(len(compressor.codecs)):
        pair = compressor.reconstruct(layer, exact["key", layer], exact["value", layer], known)
        restored |= {(role, layer): x for role, x in zip(ROLES, pair, strict=True)}
    return restored


def _error(x, x_hat) -> float:
    """Over the variance."""
    return 1 - explained_variance_ratio(side_by_side(x), side_by_side(x_hat))


def _evr(known: dict, y, prediction: Prediction) -> float:
    return explained_variance_ratio(side_by_side(y), prediction.predictor(inputs(known, prediction.sources, y)))
