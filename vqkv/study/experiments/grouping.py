"""Notebook 03: what is quantised, which channels share a code, how many, and which groups share codebooks."""

import dataclasses

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.codecs.layout import MergeHeads
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.product import ProductVQ
from vqkv.codecs.scaling import VectorScale
from vqkv.models.load import describe
from vqkv.study.experiments.common import (
    all_told,
    by_window,
    calibrated,
    exact_compressor,
    facts_told,
    frame,
    paired,
    subject,
)
from vqkv.study.experiments.depth import shallower
from vqkv.study.sweep import per_process, sweep

TABLE_1 = {  # the residual VQ paper's rows: how key channels are grouped, if keys are quantised, and whether values are
    "key (contiguous)": ("contiguous", False),
    "key (strided)": ("strided", False),
    "key (random)": ("random", False),
    "value": (None, True),
    "key (strided) + value": ("strided", True),
}

CODEBOOKS = {"shared": (), "by group": (), "by head and group": (MergeHeads,)}  # who has codebooks of its own


def grouping(
    models: list[str], corpus: str, codebook_size: int, num_quantizers: int, group_size: int, train_seqs: int,
    seq_len: int, num_seqs: int, facts: dict[str, int], chunk_size: int, seeds: list[int], dtype: str, device: str,
):  # fmt: skip
    """Notebook 03: Table 1's rows (what is quantised, and how key channels are grouped) in MSE, chunked perplexity,
    KL and, where ``facts`` has sizes for it, ``common.facts_told``. One row per model, row of the table and seed;
    seeds draw the calibration text, the k-means start and the random permutation, not the held-out text.
    """
    settings = {
        "who": _who(corpus, train_seqs, seq_len, num_seqs, dtype, device),
        "quantizer": {"num_quantizers": num_quantizers, "codebook_size": codebook_size, "group_size": group_size},
        "chunk_size": chunk_size,
        "facts": facts,
    }
    cases = [{"model": name, "seed": seed, "label": label} for name in models for seed in seeds for label in TABLE_1]
    return frame(*sweep(_row, cases, settings, "grouping"))


def group_sizes(
    models: list[str], corpus: str, codebook_size: int, num_quantizers: int, group_size: int, sizes: list[int],
    train_seqs: int, seq_len: int, num_seqs: int, chunk_size: int, seeds: list[int], dtype: str,
    device: str,
):  # fmt: skip
    """Notebook 03: keys and values in contiguous groups of each of ``sizes`` channels, with ``num_quantizers``
    codebooks, and with as many as make the bits of groups of ``group_size``; and these with codebooks of their own for
    each group of channels, as coupled quantization has them, and for each of each head.

    One row per model, seed, size, number and ``codebooks``; ``bits_8k`` and ``bits_128k`` share the side information
    out among the values of a cache of 8,192 and of 131,072 tokens.
    """
    settings = {
        "who": _who(corpus, train_seqs, seq_len, num_seqs, dtype, device),
        "usual": {"num_quantizers": num_quantizers, "codebook_size": codebook_size, "group_size": group_size},
        "chunk_size": chunk_size,
    }
    listed = [("shared", size, count) for size in sizes for count in _counts(size, settings["usual"])]
    listed += [(kind, group_size, num_quantizers) for kind in CODEBOOKS if kind != "shared"]
    names = ("model", "seed", "codebooks", "size", "count")
    cases = [dict(zip(names, (name, seed, *case))) for name in models for seed in seeds for case in listed]
    return frame(*sweep(_sized_row, cases, settings, "group sizes"))


def _who(corpus: str, train_seqs: int, seq_len: int, num_seqs: int, dtype: str, device: str) -> dict:
    texts = {"train": [train_seqs, seq_len], "test": [num_seqs, seq_len], "test_seed": 0}
    return texts | {"corpus": corpus, "dtype": dtype, "device": device}


def _counts(size: int, usual: dict) -> list[int]:
    """Codebooks of groups of ``size`` channels: as many as usual, and as many as make the usual bits."""
    count = usual["num_quantizers"]
    return sorted({count, max(1, count * size // usual["group_size"])})


def _sized_row(
    model: str, seed: int, codebooks: str, size: int, count: int, who: dict, usual: dict, chunk_size: int
):  # fmt: skip
    who = who | {"name": model, "seed": seed}
    found, compressor = subject(**who), _sized(codebooks, size, count, who, usual)
    row = by_window(found, compressor, found.test, chunk_size=chunk_size)
    contexts = {"bits_8k": 8192, "bits_128k": 131072}
    row |= {name: all_told(row, describe(found.model), tokens) for name, tokens in contexts.items()}
    label = {"model": model, "codebooks": codebooks, "group_size": size, "num_quantizers": count, "seed": seed}
    return [label | row], found.sources


def _sized(codebooks: str, size: int, count: int, who: dict, usual: dict) -> Compressor:
    if codebooks == "shared":
        return shallower(_largest(who=who, usual=usual, size=size), count)
    preset = presets.vqllm(**usual, seed=who["seed"])
    stages, heads = CODEBOOKS[codebooks], describe(subject(**who).model)["shapes"][0][0]

    def codec(head_dim: int) -> Chain:
        groups = head_dim // size * (heads if stages else 1)
        quantizer = ProductVQ(groups, usual["codebook_size"], size, who["seed"], count)
        return Chain([VectorScale("std"), *(stage() for stage in stages)], quantizer)

    return calibrated(dataclasses.replace(preset, make_key_codec=codec, make_value_codec=codec), who)


@per_process(maxsize=1)
def _largest(who: dict, usual: dict, size: int) -> Compressor:
    """Groups of ``size`` channels with the most codebooks that are asked for; fewer are its first ones."""
    settings = usual | {"group_size": size, "num_quantizers": _counts(size, usual)[-1]}
    return calibrated(presets.vqllm(**settings, key_grouping="contiguous", seed=who["seed"]), who)


def _row(model: str, seed: int, label: str, who: dict, quantizer: dict, facts: dict, chunk_size: int):
    who = who | {"name": model, "seed": seed}
    found, compressor = subject(**who), _compressor(*TABLE_1[label], who, quantizer)
    row = by_window(found, compressor, found.test, chunk_size=chunk_size)
    row |= facts_told(found, compressor, who["corpus"], seed=0, **facts) if facts else {}
    return [{"model": model, "quantised": label, "seed": seed} | row], found.sources


def _compressor(key_grouping: str | None, values: bool, who: dict, quantizer: dict) -> Compressor:
    """Compressor of one role; the other is exact."""
    exact = exact_compressor(subject(**who))
    key = _fitted(who=who, quantizer=quantizer, key_grouping=key_grouping) if key_grouping else exact
    value = _fitted(who=who, quantizer=quantizer, key_grouping=None) if values else exact
    return paired(key, value, like=key if key_grouping else value)


@per_process(maxsize=4)
def _fitted(who: dict, quantizer: dict, key_grouping: str | None) -> Compressor:
    """Quantises keys in groups of this kind, or (None) values: a codec that two rows share is fitted once."""
    what = {"key_grouping": key_grouping, "quantize": "key"} if key_grouping else {"quantize": "value"}
    return calibrated(presets.vqllm(**what, **quantizer, seed=who["seed"]), who)
