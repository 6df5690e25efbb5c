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
from vqkv.study.experiments.common import by_window, calibrated, facts_told, frame, subject
from vqkv.study.metrics import relative_mse
from vqkv.study.sweep import per_process, sweep


def gaussian_depth(
    codebook_sizes: list[int], depths: list[int], beams: list[int], group_size: int, vectors: int, held_out: int,
    seeds: list[int],
):  # fmt: skip
    """Residual VQ of a standard Gaussian, the source whose best possible error is known: relative MSE and rate.

    One row per codebook size, beam, depth and seed. ``bits_per_value`` counts codes only; the bound at that rate is
    2^(-2 bits).
    """
    settings = {"depths": depths, "beams": beams, "group_size": group_size, "vectors": vectors, "held_out": held_out}
    cases = [{"seed": seed, "codebook_size": size} for seed in seeds for size in codebook_sizes]
    return frame(*sweep(_gaussian_rows, cases, settings, "Gaussian"))


def _gaussian_rows(seed: int, codebook_size: int, depths, beams, group_size: int, vectors: int, held_out: int):
    generator, rows = torch.Generator().manual_seed(seed), []
    train, test = (torch.randn(1, 1, n, group_size, generator=generator) for n in (vectors, held_out))
    codec = Chain([], ResidualVQ(max(depths), codebook_size, group_size, seed=seed)).fit(train)
    for beam, depth in itertools.product(beams, depths):
        cut = recut(codec, depth, beam)
        error = relative_mse(test, cut.decode(cut.encode(test)))
        bits = depth * cut.quantizer.code_bits / group_size
        label = {"codebook_size": codebook_size, "beam": beam, "num_quantizers": depth, "seed": seed}
        rows.append(label | {"bits_per_value": bits, "mse": error})
    return rows, {}


def residual_depth(
    models: list[str], corpus: str, codebook_sizes: list[int], depths: list[int], group_size: int,
    kmeans_iterations: int, train_seqs: int, seq_len: int, num_seqs: int, facts: dict, chunk_size: int, seed: int,
    dtype: str, device: str,
):  # fmt: skip
    """Table 2's question on both roles, a row per model, codebook size and depth: MSE, chunked perplexity and KL, facts
    lost (``facts``: arguments of ``facts_told``; {} for none).

    Codebooks are learned once per size; a shallower quantizer is the first stages of the deepest, which is what
    learning fewer stages gives.
    """
    texts = {"train": [train_seqs, seq_len], "test": [num_seqs, seq_len], "seed": seed}
    settings = {
        "who": texts | {"corpus": corpus, "dtype": dtype, "device": device},
        "quantizer": {"group_size": group_size, "kmeans_iterations": kmeans_iterations, "deepest": max(depths)},
        "facts": facts,
        "chunk_size": chunk_size,
    }
    cases = [
        {"model": name, "codebook_size": size, "num_quantizers": depth}
        for name, size, depth in itertools.product(models, codebook_sizes, depths)
    ]
    return frame(*sweep(_depth_row, cases, settings, "depth"))


def _depth_row(
    model: str, codebook_size: int, num_quantizers: int, who: dict, quantizer: dict, facts: dict, chunk_size: int
):
    who = who | {"name": model}
    found, deepest = subject(**who), _deepest(codebook_size=codebook_size, who=who, **quantizer)
    compressor = shallower(deepest, num_quantizers)
    row = by_window(found, compressor, found.test, chunk_size=chunk_size, reconstruction=False)
    row |= facts_told(found, compressor, who["corpus"], seed=who["seed"], **facts) if facts else {}
    row |= reconstruction_error(found.exact, compressor, found.test[:1])
    label = {"model": model, "codebook_size": codebook_size, "num_quantizers": num_quantizers}
    return [label | row], found.sources


@per_process(maxsize=1)
def _deepest(codebook_size: int, deepest: int, group_size: int, kmeans_iterations: int, who: dict) -> Compressor:
    learning = {"seed": who["seed"], "kmeans_iterations": kmeans_iterations}
    return calibrated(presets.vqllm(deepest, codebook_size, group_size, **learning), who, who["train"][0])


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
