"""Notebook 06: every system of the four sources, and transformers' own cache, at equal bits on the same tokens."""

import dataclasses
import itertools

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.evaluation.evaluate import evaluate
from vqkv.models.load import describe, load_model
from vqkv.study.experiments.common import all_told, calibrated, frame, subject
from vqkv.study.experiments.depth import shallower
from vqkv.study.peers import TransformersQuantized
from vqkv.study.sweep import per_process, sweep

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
    who = {"corpus": corpus, "train": [train_seqs, seq_len], "test": [num_seqs, seq_len], "seed": seed}
    settings = {
        "who": who | {"dtype": dtype, "device": device},
        "quantizer": {"codebook_size": codebook_size, "num_quantizers": num_quantizers, "beam": beam},
        "chunk_size": chunk_size,
    }
    labels = [*_depths(num_quantizers, beam), *_presets(codebook_size, seed), *_peers()]
    cases = [{"model": name, "label": label} for name in models for label in labels]
    return frame(*sweep(_row, cases, settings, "systems"))


def bare(preset: presets.Preset) -> presets.Preset:
    """The preset without sinks, recent window and a flush block beyond its codec's."""
    return dataclasses.replace(preset, sink_tokens=0, recent_window=0, flush_block=1)


def _row(model: str, label: str, who: dict, quantizer: dict, chunk_size: int):
    who = who | {"name": model}
    found, peer = subject(**who), label in _peers()
    compressor = _peers()[label] if peer else _compressor(label, who, quantizer)
    row = evaluate(found.model, compressor, found.test, chunk_size=chunk_size, exact=found.exact)
    if peer:
        short = in_bfloat16(name=model, device=who["device"])
        metered = evaluate(short, compressor, found.test[:1], chunk_size=chunk_size, reconstruction=False)
        row["bits_per_value"] = metered["bits_per_value"]
    contexts = {"bits_8k": 8192, "bits_128k": 131072}
    row |= {name: all_told(row, describe(found.model), n) for name, n in contexts.items()}
    row["ppl_increase"] = 100 * (row["ppl"] / row["ppl_exact"] - 1)
    return [{"model": model, "system": compressor.name, "label": label, "peer": peer} | row], found.sources


def _compressor(label: str, who: dict, quantizer: dict) -> Compressor:
    depths = _depths(quantizer["num_quantizers"], quantizer["beam"])
    if label in depths:
        return shallower(_deepest(who=who, quantizer=quantizer), *depths[label])
    return calibrated(bare(_presets(quantizer["codebook_size"], who["seed"])[label]), who)


@per_process(maxsize=1)
def _deepest(who: dict, quantizer: dict) -> Compressor:
    depth = max(quantizer["num_quantizers"])
    return calibrated(presets.vqllm(depth, quantizer["codebook_size"], seed=who["seed"]), who)


@per_process(maxsize=1)
def in_bfloat16(name: str, device: str):
    """The model in the type whose scales take 16 bits, to weigh transformers' caches."""
    return load_model(name, "bfloat16", device)[0]


def _depths(num_quantizers: list[int], beam: int) -> dict[str, tuple[int, int]]:
    """Depths and beams of residual VQ, all cut out of the deepest, with and without a beam."""
    return {
        f"vqllm {depth}" + f" beam {width}" * (width > 1): (depth, width)
        for depth, width in itertools.product(num_quantizers, (1, beam))
    }


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
