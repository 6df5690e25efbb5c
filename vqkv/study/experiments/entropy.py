"""Notebook 05: how far from equally likely codes are, and what an entropy coder makes of it."""

import statistics

import torch

from vqkv import presets
from vqkv.models.capture import capture
from vqkv.study.metrics import code_perplexity
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product


def _codecs(codebook_size: int, num_quantizers: int, seed: int = 0) -> dict[str, presets.Preset]:
    shared = {"codebook_size": codebook_size, "seed": seed}
    return {
        "VQ of 8 values": presets.vq(8, **shared),
        "2 residual stages of 8 values": presets.rvq2(**shared),
        "residual VQ": presets.vqllm(num_quantizers, **shared),
    }


@experiment(lambda codebook_size, num_quantizers: product(codec=_codecs(codebook_size, num_quantizers)))
def code_entropy(subject: Subject, codec: str, codebook_size: int, num_quantizers: int) -> list[dict]:
    """One row per codec, role and stage: ``entropy`` of the stage's held-out codes in bits, beside their width.

    Beside it, the same for all stages, bits a value of the codes alone: packed, and by rANS with one table for each
    stage (``by_stage``) and one for each place in a token (``by_place``; ``table_bytes`` of side information). Means
    over layers.
    """
    preset, rows = _codecs(codebook_size, num_quantizers, subject.seed)[codec], []
    coded = [subject.calibrated(presets.entropy_coded(preset, context=context)) for context in ("stage", "position")]
    roles = capture(subject.model, subject.test, pre_rope=preset.fitting(subject.model).pre_rope)
    for i, role in enumerate(("key", "value")):
        codecs = [[pair[i] for pair in compressor.codecs] for compressor in coded]
        layers = [_layer(*pair, x.float()) for *pair, x in zip(*codecs, roles[i], strict=True)]
        rows += [{"model": subject.name, "codec": codec, "role": role} | row for row in _mean_rows(layers)]
    return rows


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
    numbers = {name: statistics.mean(each[name] for _, each in layers) for name in layers[0][1]}
    by_stage = [statistics.mean(stage) for stage in zip(*(entropies for entropies, _ in layers), strict=True)]
    return [{"stage": i + 1, "entropy": entropy} | numbers for i, entropy in enumerate(by_stage)]
