"""Notebook 05: the VQ quality framework's threshold sweep."""

import statistics

from tqdm import tqdm

from vqkv import presets
from vqkv.calibrate import calibrate
from vqkv.capture import capture
from vqkv.evaluate import evaluate
from vqkv.experiments.common import draw, frame, load


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
    rows, sources = [], {}
    for name in models:
        model, tokenizer = load(name, dtype, device, sources)
        train = draw(corpus, tokenizer, "train", prompt_len, train_seqs, seed, sources)
        test = draw(corpus, tokenizer, "test", prompt_len + new_tokens, num_seqs, seed, sources)
        keys, values = capture(model, test[:, :prompt_len], post_rope=True)
        shared = {"keyframe": prompt_len, "codebook_size": codebook_size, "seed": seed}
        for preset in (presets.vqq(1.0, **shared), presets.vqq_product(1.0, **shared)):
            compressor = calibrate(model, train, preset, progress=False)
            for threshold in tqdm(thresholds, desc=preset.name, leave=False, disable=None):
                for codec in (codec for pair in compressor.codecs for codec in pair):
                    codec.quantizer.threshold = threshold
                share = _vq_share(compressor, keys, values)
                label = {"model": name, "method": preset.name, "threshold": threshold, "vq_blocks": share}
                label["median_error"] = _median_error(compressor, keys, values)
                rows += _per_sequence(model, compressor, test, prompt_len, label)
        for method, preset in _without_fallback(shared).items():
            compressor = calibrate(model, train, preset, progress=False)
            label = {"model": name, "method": method, "threshold": float("nan"), "vq_blocks": 1.0}
            label["median_error"] = _median_error(compressor, keys, values)
            rows += _per_sequence(model, compressor, test, prompt_len, label)
    return frame(rows, sources)


def _without_fallback(shared: dict) -> dict:
    return {
        "vq, 2": presets.vq(2, **shared),
        "vq, 8": presets.vq(8, **shared),
        "vq, 8, unscaled": presets.vq(8, per_head_scale=False, **shared),
        "rvq2": presets.rvq2(**shared),
    }


def _per_sequence(model, compressor, tokens, prompt_len: int, label: dict) -> list[dict]:
    """One row a sequence: KL and top-1 agreement of the tokens after the prompt."""
    settings = {"prompt_len": prompt_len, "batch_size": len(tokens), "reconstruction": False, "per_sequence": True}
    settings["step_size"] = tokens.shape[1] - prompt_len  # fewer than a keyframe: none is packed, so all at once
    found = evaluate(model, compressor, tokens, "snapshot", **settings)
    shared = label | {"bits_per_value": found["bits_per_value"], "ratio": 16 / found["bits_per_value"]}
    return [
        shared | {"sequence": i, "kl": kl, "top1": top1}
        for i, (kl, top1) in enumerate(zip(found["kl_each"], found["top1_each"], strict=True))
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
