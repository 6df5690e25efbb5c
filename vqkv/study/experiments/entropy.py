"""Notebook 05: how far from equally likely codes are, and what an entropy coder makes of it."""

import statistics

import torch

from vqkv import presets
from vqkv.models.capture import capture
from vqkv.study.experiments.common import calibrated, frame, subject
from vqkv.study.metrics import code_perplexity
from vqkv.study.sweep import sweep


def code_entropy(
    models: list[str], corpus: str, train_seqs: int, num_seqs: int, seq_len: int, codebook_size: int,
    num_quantizers: int, seed: int, dtype: str, device: str,
):  # fmt: skip
    """One row per model, codec, role and stage: ``entropy`` of the stage's held-out codes in bits, beside their width.

    Beside it, the same for all stages, bits a value of the codes alone: packed, and by rANS with one table for each
    stage (``by_stage``) and one for each place in a token (``by_place``; ``table_bytes`` of side information). Means
    over layers.
    """
    texts = {"train": [train_seqs, seq_len], "test": [num_seqs, seq_len], "seed": seed}
    settings = {
        "who": texts | {"corpus": corpus, "dtype": dtype, "device": device},
        "quantizer": {"codebook_size": codebook_size, "num_quantizers": num_quantizers, "seed": seed},
    }
    cases = [{"model": name, "codec": codec} for name in models for codec in _codecs(**settings["quantizer"])]
    return frame(*sweep(_rows, cases, settings, "entropy"))


def _rows(model: str, codec: str, who: dict, quantizer: dict):
    who = who | {"name": model}
    found, preset, rows = subject(**who), _codecs(**quantizer)[codec], []
    fitted = [calibrated(presets.entropy_coded(preset, context=context), who) for context in ("stage", "position")]
    preset = preset.fitting(found.model)
    roles = capture(found.model, found.test, pre_rope=preset.pre_rope)
    for i, role in enumerate(("key", "value")):
        codecs = [[pair[i] for pair in compressor.codecs] for compressor in fitted]
        layers = [_layer(*pair, x.float()) for *pair, x in zip(*codecs, roles[i], strict=True)]
        rows += [{"model": model, "codec": codec, "role": role} | row for row in _mean_rows(layers)]
    return rows, found.sources


def _codecs(codebook_size: int, num_quantizers: int, seed: int) -> dict[str, presets.Preset]:
    shared = {"codebook_size": codebook_size, "seed": seed}
    return {
        "VQ of 8 values": presets.vq(8, **shared),
        "2 residual stages of 8 values": presets.rvq2(**shared),
        "residual VQ": presets.vqllm(num_quantizers, **shared),
    }


def _layer(by_stage, by_place, x) -> tuple[list[float], dict]:
    """Entropy by stage, and bits a value of the codes by way of coding them."""
    inner = by_place.quantizer.quantizer
    codes = inner.encode(by_place.vectors(x))[0].reshape(-1, inner.num_quantizers)
    counts = torch.stack([torch.bincount(stage, minlength=inner.codebook_size) for stage in codes.T])
    numbers = {"code_bits": inner.code_bits, "packed": codes.numel() * inner.code_bits / x.numel()}
    numbers |= {"by_stage": _code_bits(by_stage, x), "by_place": _code_bits(by_place, x)}
    numbers["table_bytes"] = by_place.side_bytes - inner.codebooks.nbytes
    return code_perplexity(counts).log2().tolist(), numbers


def _code_bits(codec, x) -> float:
    payload = codec.encode(x)
    return 8 * (payload.nbytes - payload.fields["scale"].nbytes) / x.numel()


def _mean_rows(layers: list[tuple[list[float], dict]]) -> list[dict]:
    numbers = {name: statistics.mean(found[name] for _, found in layers) for name in layers[0][1]}
    by_stage = [statistics.mean(stage) for stage in zip(*(entropies for entropies, _ in layers), strict=True)]
    return [{"stage": i + 1, "entropy": entropy} | numbers for i, entropy in enumerate(by_stage)]
