"""Notebook 06: residual depth, codebook size and beam; and every system at equal bits."""

import itertools

import torch
from tqdm import tqdm

from vqkv import presets
from vqkv.calibrate import calibrate
from vqkv.codec.base import Codec, codec_from_config
from vqkv.codec.pipeline import Chain
from vqkv.codec.residual import ResidualVQ
from vqkv.compressor import Compressor
from vqkv.evaluate import evaluate, reconstruction_error
from vqkv.experiments.common import draw, frame, load
from vqkv.metrics import relative_mse
from vqkv.recall import RecallTask


def gaussian_depth(
    codebook_sizes: list[int], depths: list[int], beams: list[int], group_size: int, vectors: int, held_out: int,
    seeds: list[int],
):  # fmt: skip
    """Residual VQ of a standard Gaussian, the source whose best possible error is known: relative MSE and rate.

    One row per codebook size, beam, depth and seed. ``bits_per_value`` counts codes only; the bound at that rate is
    2^(-2 bits).
    """
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        train, test = (torch.randn(1, 1, n, group_size, generator=generator) for n in (vectors, held_out))
        for size in tqdm(codebook_sizes, desc="Gaussian", disable=None):
            codec = Chain([], ResidualVQ(max(depths), size, group_size, seed=seed)).fit(train)
            for beam, depth in itertools.product(beams, depths):
                cut = recut(codec, depth, beam)
                error = relative_mse(test, cut.decode(cut.encode(test)))
                bits = depth * cut.quantizer.code_bits / group_size
                label = {"codebook_size": size, "beam": beam, "num_quantizers": depth, "seed": seed}
                rows.append(label | {"bits_per_value": bits, "mse": error})
    return frame(rows, {})


def residual_depth(
    model: str, corpus: str, codebook_sizes: list[int], depths: list[int], beams: list[int], group_size: int,
    kmeans_iterations: int, train_seqs: int, seq_len: int, num_seqs: int, recall_seqs: int, chunk_size: int, seed: int,
    dtype: str, device: str,
):  # fmt: skip
    """Table 2's question on both roles: MSE, chunked perplexity, KL and recall by codebook size, depth and beam.

    Codebooks are learned once per size, greedily; a shallower quantizer is the first stages of the deepest, which is
    what learning fewer stages gives, and a beam is the encoder's alone.
    """
    sources = {}
    loaded, tokenizer = load(model, dtype, device, sources)
    train = draw(corpus, tokenizer, "train", seq_len, train_seqs, seed, sources)
    test = draw(corpus, tokenizer, "test", seq_len, num_seqs, seed, sources)
    recall = RecallTask(tokenizer).batch(seq_len, recall_seqs, 0)
    settings = {"chunk_size": chunk_size, "reconstruction": False}
    rows = []
    for size in tqdm(codebook_sizes, desc="depth", disable=None):
        preset = presets.vqllm(max(depths), size, group_size, seed=seed, kmeans_iterations=kmeans_iterations)
        deepest = calibrate(loaded, train, preset, batch_size=train_seqs, progress=False)
        for beam, depth in tqdm([*itertools.product(beams, depths)], desc=f"{size} codes", leave=False, disable=None):
            codecs = [tuple(recut(codec, depth, beam) for codec in pair) for pair in deepest.codecs]
            compressor = Compressor(deepest.name, codecs, deepest.settings, deepest.model)
            row = evaluate(loaded, compressor, test, **settings)
            hits = evaluate(loaded, compressor, recall.tokens, answers=recall.answers, **settings)
            row |= {"recall": hits["recall"], "recall_exact": hits["recall_exact"]}
            row |= reconstruction_error(loaded, compressor, test[:1])
            label = {"model": model, "codebook_size": size, "beam": beam, "num_quantizers": depth}
            rows.append(label | row | {"ppl_increase": 100 * (row["ppl"] / row["ppl_exact"] - 1)})
    return frame(rows, sources)


def recut(codec: Codec, num_quantizers: int, beam: int) -> Codec:
    """A fitted residual VQ chain with its first stages only, and another encoder."""
    config, state = codec.config(), codec.state()
    config["quantizer"] |= {"num_quantizers": num_quantizers, "beam": beam}
    state["quantizer.codebooks"] = state["quantizer.codebooks"][:num_quantizers].clone()
    return codec_from_config(config, state)
