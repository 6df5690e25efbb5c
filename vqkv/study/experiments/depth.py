"""Notebook 03: residual depth, codebook size and beam."""

import itertools

import torch

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.codecs.base import Codec
from vqkv.codecs.part import codec_from_config
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.residual import ResidualVQ
from vqkv.evaluation.evaluate import reconstruction_error
from vqkv.study.experiments.common import by_window, facts_answered
from vqkv.study.metrics import relative_mse
from vqkv.study.shared import per_process
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product


@experiment(lambda seeds, codebook_sizes: product(seed=seeds, codebook_size=codebook_sizes))
def gaussian_depth(
    seed: int, codebook_size: int, depths: list[int], beams: list[int], group_size: int, vectors: int, held_out: int
) -> list[dict]:
    """Residual VQ of a standard Gaussian, the source whose best possible error is known: relative MSE and rate.

    One row per codebook size, beam, depth and seed. ``bits_per_value`` counts codes only; the bound at that rate is
    2^(-2 bits).
    """
    generator, rows = torch.Generator().manual_seed(seed), []
    train, test = (torch.randn(1, 1, n, group_size, generator=generator) for n in (vectors, held_out))
    codec = Chain([], ResidualVQ(max(depths), codebook_size, group_size, seed=seed)).fit(train)
    for beam, depth in itertools.product(beams, depths):
        cut = recut(codec, depth, beam)
        error = relative_mse(test, cut.decode(cut.encode(test)))
        bits = depth * cut.quantizer.code_bits / group_size
        label = {"codebook_size": codebook_size, "beam": beam, "num_quantizers": depth, "seed": seed}
        rows.append(label | {"bits_per_value": bits, "mse": error})
    return rows


@experiment(lambda codebook_sizes, depths: product(codebook_size=codebook_sizes, num_quantizers=depths))
def residual_depth(
    subject: Subject, codebook_size: int, num_quantizers: int, depths: list[int], group_size: int,
    kmeans_iterations: int, facts: dict, chunk_size: int,
) -> dict:  # fmt: skip
    """Table 2's question on both roles, a row per codebook size and depth: MSE, chunked perplexity and KL, facts lost
    (``facts``: arguments of ``facts_answered``; {} for none).

    Codebooks are learned once per size; a shallower quantizer is the first stages of the deepest, which is what
    learning fewer stages gives.
    """
    learning = {"group_size": group_size, "kmeans_iterations": kmeans_iterations, "seed": subject.seed}
    deepest = _deepest(subject=subject, num_quantizers=max(depths), codebook_size=codebook_size, **learning)
    compressor = shallower(deepest, num_quantizers)
    row = by_window(subject, compressor, chunk_size=chunk_size, reconstruction=False)
    row |= facts_answered(subject, compressor, **facts) if facts else {}
    row |= reconstruction_error(subject.exact, compressor, subject.test[:1])
    return {"model": subject.name, "codebook_size": codebook_size, "num_quantizers": num_quantizers} | row


@per_process(maxsize=1)
def _deepest(subject: Subject, **quantizer) -> Compressor:
    return subject.calibrated(presets.vqllm(**quantizer), subject.train_size[0])


def shallower(compressor: Compressor, num_quantizers: int, beam: int = 1) -> Compressor:
    """A calibrated residual VQ with the first stages of every codec only, and another encoder."""
    codecs = [tuple(recut(codec, num_quantizers, beam) for codec in pair) for pair in compressor.codecs]
    return Compressor(compressor.name, codecs, compressor.settings, compressor.model)


def recut(codec: Codec, num_quantizers: int, beam: int) -> Codec:
    """A fitted residual VQ chain with its first stages only, and another encoder."""
    config, state = codec.config(), codec.state_dict()
    config["quantizer"] |= {"num_quantizers": num_quantizers, "beam": beam}
    state["quantizer.codebooks"] = state["quantizer.codebooks"][:num_quantizers].clone()
    return codec_from_config(config, state)
