"""Notebook 05: what an entropy coder makes of codes that are not equally likely."""

import statistics

from vqkv import presets
from vqkv.models.capture import capture
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
    """One row per codec and role: bits a value of the held-out codes alone, packed, and by rANS with one table for each
    stage (``by_stage``) and one for each place in a token (``by_place``; ``table_bytes`` of side information). Means
    over layers.
    """
    preset, rows = _codecs(codebook_size, num_quantizers, subject.seed)[codec], []
    coded = [subject.calibrated(presets.entropy_coded(preset, context=context)) for context in ("stage", "position")]
    roles = capture(subject.model, subject.test, pre_rope=preset.fitting(subject.model).pre_rope or 0)
    for i, role in enumerate(("key", "value")):
        codecs = [[pair[i] for pair in compressor.codecs] for compressor in coded]
        by_layer = zip(codecs[0], codecs[1], roles[i], strict=True)
        layers = [_layer(stage, position, x.float()) for stage, position, x in by_layer]
        means = {name: statistics.mean(layer[name] for layer in layers) for name in layers[0]}
        rows.append({"model": subject.name, "codec": codec, "role": role} | means)
    return rows


def _layer(by_stage, by_place, x) -> dict[str, float]:
    """Bits a value of the codes by way of coding them."""
    inner = by_place.quantizer.quantizer
    bits = {"packed": inner.encode(by_place.vectors(x))[0].numel() * inner.code_bits / x.numel()}
    for name, codec in (("by_stage", by_stage), ("by_place", by_place)):
        payload = codec.encode(x)
        bits[name] = 8 * (payload.nbytes - payload.fields["scale"].nbytes) / x.numel()
    return bits | {"table_bytes": by_place.side_bytes - inner.codebooks.nbytes}
