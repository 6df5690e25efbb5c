"""Notebook 05: the VQ quality framework's threshold sweep, beside what it claims."""

import statistics

import pandas as pd

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.evaluation.evaluate import evaluate
from vqkv.models.capture import capture
from vqkv.study.experiments.audit.framework import fallback_bits
from vqkv.study.experiments.common import Subject, calibrated, frame, subject
from vqkv.study.sweep import per_process, sweep
from vqkv.study.tables import published

TINYLLAMA = {  # rows of its table 4.2, and what they are called here
    "m=2 threshold=0.08": ("vqq_product", 0.08),
    "m=2 threshold=0.10": ("vqq_product", 0.1),
    "block 2, no fallback": ("vq, 2", None),
    "block 8, no fallback": ("vq, 8, unscaled", None),
}


def claimed_sweep() -> pd.DataFrame:
    """The source's tables 4.1 (GPT-2, plain VQ) and 4.2 (TinyLlama): one row per method and threshold. ``claimed_live``
    is the ratio to the live fp16 cache that its shares of blocks in fp16 leave."""
    plain, other = published("vqq_threshold_sweep_gpt2"), published("vqq_tinyllama").set_index("config")
    live = 16 / fallback_bits(plain["fp16_fallback_pct"] / 100)
    plain = plain.assign(method="vqq", claimed_live=live).rename(columns={"kl": "claimed_kl"})
    rows = [
        {"method": method, "threshold": threshold, "claimed_ratio": other["claimed_ratio"][config]}
        | {"claimed_kl": float(other["kl_mean"][config])}
        for config, (method, threshold) in TINYLLAMA.items()
    ]
    columns = ["method", "threshold", "claimed_ratio", "claimed_kl", "claimed_live"]
    return pd.concat([plain, pd.DataFrame(rows)])[columns].astype({"threshold": float})


def threshold_sweep(
    models: list[str], corpus: str, thresholds: list[float], prompt_len: int, new_tokens: int, num_seqs: int,
    train_seqs: int, codebook_size: int, seed: int, dtype: str, device: str,
):  # fmt: skip
    """Every threshold with VQ and with product codes, then plain VQ and two residual stages without fallback.

    ``snapshot`` protocol: the whole prompt is one keyframe (one scale per head), then ``new_tokens`` tokens are
    decoded. One row per model, method, threshold (NaN without fallback) and sequence; ``vq_blocks`` is the share of
    blocks that are not in fp16, ``ratio`` is against the live fp16 cache of the prompt, ``median_error`` the median
    absolute error of a value, in shares of its head's maximum.
    """
    texts = {"train": [train_seqs, prompt_len], "test": [num_seqs, prompt_len + new_tokens], "seed": seed}
    who = texts | {"corpus": corpus, "dtype": dtype, "device": device}
    shared = {"keyframe": prompt_len, "codebook_size": codebook_size, "seed": seed}
    cases = [
        {"model": name, "method": method, "threshold": threshold}
        for name in models
        for found, chosen in ((_with_fallback(shared), thresholds), (_without_fallback(shared), [None]))
        for method in found
        for threshold in chosen
    ]
    return frame(*sweep(_rows, cases, {"who": who, "shared": shared}, "thresholds"))


def _rows(model: str, method: str, threshold: float | None, who: dict, shared: dict):
    """The rows of a method at a threshold; ``None`` for one without fallback."""
    who, prompt_len = who | {"name": model}, shared["keyframe"]
    found = subject(**who)
    keys, values = _prompts(who=who, prompt_len=prompt_len)
    compressor = _fitted(method=method, who=who, shared=shared)
    label = {"model": model, "method": method, "threshold": float("nan"), "vq_blocks": 1.0}
    if threshold is not None:
        for codec in (codec for pair in compressor.codecs for codec in pair):
            codec.quantizer.threshold = threshold
        label |= {"threshold": threshold, "vq_blocks": _vq_share(compressor, keys, values)}
    label["median_error"] = _median_error(compressor, keys, values)
    return _per_sequence(found, compressor, prompt_len, label), found.sources


@per_process(maxsize=1)
def _prompts(who: dict, prompt_len: int):
    found = subject(**who)
    return capture(found.model, found.test[:, :prompt_len], pre_rope=False)


@per_process(maxsize=1)
def _fitted(method: str, who: dict, shared: dict) -> Compressor:
    return calibrated((_with_fallback(shared) | _without_fallback(shared))[method], who)


def _with_fallback(shared: dict) -> dict:
    return {preset.name: preset for preset in (presets.vqq(1.0, **shared), presets.vqq_product(1.0, **shared))}


def _without_fallback(shared: dict) -> dict:
    return {
        "vq, 2": presets.vq(2, **shared),
        "vq, 8": presets.vq(8, **shared),
        "vq, 8, unscaled": presets.vq(8, per_head_scale=False, **shared),
        "rvq2": presets.rvq2(**shared),
    }


def _per_sequence(found: Subject, compressor, prompt_len: int, label: dict) -> list[dict]:
    """One row a sequence: KL and top-1 agreement of the tokens after the prompt."""
    tokens = found.test
    settings = {"prompt_len": prompt_len, "batch_size": len(tokens), "reconstruction": False, "per_sequence": True}
    settings["step_size"] = tokens.shape[1] - prompt_len  # fewer than a keyframe: none is packed, so all at once
    row = evaluate(found.model, compressor, tokens, "snapshot", exact=found.exact, **settings)
    shared = label | {name: row[name] for name in ("bits_per_value", "kl_floor")}
    shared["ratio"] = 16 / row["bits_per_value"]
    return [
        shared | {"sequence": i, "kl": kl, "top1": top1}
        for i, (kl, top1) in enumerate(zip(row["kl_each"], row["top1_each"], strict=True))
    ]


def _vq_share(compressor, keys, values) -> float:
    """Share of the blocks that are stored as codes."""
    pairs = zip(compressor.codecs, zip(keys, values, strict=True), strict=True)
    masks = [codec.encode(x).mask() for codecs, layer in pairs for codec, x in zip(codecs, layer, strict=True)]
    return statistics.mean(mask.float().mean().item() for mask in masks)


def _median_error(compressor, keys, values) -> float:
    """Mean over layers and roles."""
    medians = []
    for layer, pair in enumerate(zip(keys, values, strict=True)):
        for x, x_hat in zip(pair, compressor.reconstruct(layer, *pair), strict=True):
            error = (x - x_hat).abs() / x.abs().amax(dim=(2, 3), keepdim=True)
            medians.append(error.median().item())
    return statistics.mean(medians)
