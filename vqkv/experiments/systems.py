"""Notebook 06: every system of the four sources, and transformers' own cache, at equal bits on the same tokens."""

import dataclasses
import itertools

from tqdm import tqdm

from vqkv import presets
from vqkv.calibrate import calibrate
from vqkv.compressor import Compressor
from vqkv.evaluate import evaluate
from vqkv.experiments.common import draw, frame, load, with_side_information
from vqkv.experiments.depth import recut
from vqkv.models import describe, load_model
from vqkv.peers import TransformersQuantized

BY_BITS = (presets.quanto, presets.hqq, presets.kivi, presets.kvquant, presets.higgs)


def systems(
    models: list[str], corpus: str, train_seqs: int, seq_len: int, num_seqs: int, chunk_size: int, codebook_size: int,
    num_quantizers: list[int], beam: int, seed: int, dtype: str, device: str,
):  # fmt: skip
    """Every quantizer without the tokens that its system keeps exact: bits and damage are the quantizer's own.

    ``chunked`` protocol, chunks of ``chunk_size`` tokens, a multiple of every system's block: all history is packed.
    ``peer`` rows are transformers' cache as it is; its bytes are metered on the model in bfloat16, where its scales
    take 16 bits as ours do. One row per model and system; ``bits_8k`` and ``bits_128k`` share the side information
    (codebooks, grids, scales) out among the values of a cache of 8,192 and of 131,072 tokens.
    """
    rows, sources = [], {}
    for name in models:
        model, tokenizer = load(name, dtype, device, sources)
        train = draw(corpus, tokenizer, "train", seq_len, train_seqs, seed, sources)
        test = draw(corpus, tokenizer, "test", seq_len, num_seqs, seed, sources)
        short, _ = load_model(name, "bfloat16", device)
        residual = calibrate(model, train, presets.vqllm(max(num_quantizers), codebook_size, seed=seed), progress=False)
        compressors = _depths(residual, num_quantizers, beam)
        for label, preset in tqdm(_presets(codebook_size, seed).items(), desc=name, leave=False, disable=None):
            compressors[label] = calibrate(model, train, bare(preset), progress=False)
        peers = _peers()
        for label, compressor in tqdm((compressors | peers).items(), desc=name, leave=False, disable=None):
            row = evaluate(model, compressor, test, chunk_size=chunk_size)
            if label in peers:
                metered = evaluate(short, compressor, test[:1], chunk_size=chunk_size, reconstruction=False)
                row["bits_per_value"] = metered["bits_per_value"]
            row |= with_side_information(row, describe(model), {"bits_8k": 8192, "bits_128k": 131072})
            row["ppl_increase"] = 100 * (row["ppl"] / row["ppl_exact"] - 1)
            rows.append({"model": name, "system": compressor.name, "label": label, "peer": label in peers} | row)
    return frame(rows, sources)


def bare(preset: presets.Preset) -> presets.Preset:
    """The preset without sinks, recent window and a flush block beyond its codec's."""
    return dataclasses.replace(preset, sink_tokens=0, recent_window=0, flush_block=1)


def _depths(deepest: Compressor, num_quantizers: list[int], beam: int) -> dict[str, Compressor]:
    """Residual VQ of several depths out of the deepest, with and without a beam."""
    found = {}
    for depth, width in itertools.product(num_quantizers, (1, beam)):
        codecs = [tuple(recut(codec, depth, width) for codec in pair) for pair in deepest.codecs]
        label = f"vqllm {depth}" + f" beam {width}" * (width > 1)
        found[label] = Compressor(deepest.name, codecs, deepest.settings, deepest.model)
    return found


def _presets(codebook_size: int, seed: int) -> dict[str, presets.Preset]:
    shared = {"codebook_size": codebook_size, "seed": seed}
    affine = {f"{make.__name__} {bits}": make(bits) for make in BY_BITS for bits in (2, 3, 4)}
    return affine | {
        "vq 8": presets.vq(8, **shared),
        "vq 2": presets.vq(2, **shared),
        "rvq2": presets.rvq2(**shared),
        "vqq_product 0.3": presets.vqq_product(0.3, **shared),
        "vqq_product 0.2": presets.vqq_product(0.2, **shared),
    }


def _peers() -> dict[str, TransformersQuantized]:
    kinds = itertools.product(("quanto", "hqq"), (2, 4))
    return {f"transformers {backend} {bits}": TransformersQuantized(backend, bits) for backend, bits in kinds}
