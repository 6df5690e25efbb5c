"""Notebook 03: residual VQ: what is quantised, which channels share a code, how many, which groups share codebooks, how
deep, large and wide the search is, and product codes next to two residual stages (VQ quality framework, section 6)."""

import dataclasses
import itertools

import pandas as pd
import torch

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.codecs.exact import Fp16
from vqkv.codecs.layout import MergeHeads
from vqkv.codecs.learning.kmeans import KMeans
from vqkv.codecs.pipeline import Chain, Codec
from vqkv.codecs.scaling import VectorScale
from vqkv.codecs.stage import codec_from_config
from vqkv.codecs.vector import ProductVQ, ResidualVQ
from vqkv.evaluation.evaluate import reconstruction_error
from vqkv.models.capture import capture
from vqkv.study.experiments.common import bits_with_side, by_window, exact_compressor, facts_answered
from vqkv.study.metrics import relative_mse
from vqkv.study.shared import per_process
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product

TABLE_1 = {  # the residual VQ paper's rows: how key channels are grouped, if keys are quantised, and whether values are
    "key (contiguous)": ("contiguous", False),
    "key (strided)": ("strided", False),
    "key (random)": ("random", False),
    "value": (None, True),
    "key (strided) + value": ("strided", True),
}

CODEBOOKS = {"shared": (), "by group": (), "by head and group": (MergeHeads,)}  # what has separate codebooks


@experiment(lambda subject, seeds: product(subject=subject.each(seed=seeds), label=TABLE_1))
def grouping(subject: Subject, label: str, quantizer: dict, facts: dict[str, int], chunk_size: int) -> dict:
    """Measure Table 1's rows (what is quantised, how key channels are grouped): a row each per seed.

    Seeds draw all but held-out text. ``quantizer``: of ``presets.vqllm``; ``facts``: of ``facts_answered``, or {}.
    """
    key_grouping, values = TABLE_1[label]
    exact = exact_compressor(subject)
    key = _fitted(subject=subject, quantizer=quantizer, key_grouping=key_grouping) if key_grouping else exact
    value = _fitted(subject=subject, quantizer=quantizer, key_grouping=None) if values else exact
    codecs = [(ours, theirs) for (ours, _), (_, theirs) in zip(key.codecs, value.codecs, strict=True)]
    like = key if key_grouping else value
    compressor = Compressor(like.name, codecs, like.settings, like.model)
    row = by_window(subject, compressor, chunk_size=chunk_size)
    row |= facts_answered(subject, compressor, **facts, seed=0) if facts else {}
    return {"model": subject.name, "quantised": label, "seed": subject.seed} | row


@per_process(maxsize=4)
def _fitted(subject: Subject, quantizer: dict, key_grouping: str | None) -> Compressor:
    """Quantise keys in groups of this kind, or (None) values: a codec that two rows share is fitted once."""
    preset = presets.vqllm(key_grouping=key_grouping or "strided", **quantizer, seed=subject.seed)
    keys, values = (preset.key_codec, Fp16) if key_grouping else (Fp16, preset.value_codec)
    return subject.calibrated(dataclasses.replace(preset, key_codec=keys, value_codec=values))


def _sized_cases(subject: Subject, seeds: list[int], sizes: list[int], quantizer: dict) -> list[dict]:
    listed = [("shared", size, count) for size in sizes for count in _counts(size, quantizer)]
    usual = quantizer["group_size"], quantizer["num_quantizers"]
    listed += [(kind, *usual) for kind in CODEBOOKS if kind != "shared"]
    return [
        {"subject": each, "codebooks": codebooks, "size": size, "count": count}
        for each in subject.each(seed=seeds)
        for codebooks, size, count in listed
    ]


@experiment(_sized_cases)
def group_sizes(subject: Subject, codebooks: str, size: int, count: int, quantizer: dict, chunk_size: int) -> dict:
    """Quantize in contiguous groups of each of ``sizes`` channels, with as many codebooks as usual, or for equal bits.

    Groups of the usual size also get codebooks by group (coupled quantization) and by head and group. A row per seed,
    size, number and ``codebooks``; ``bits_8k`` and ``bits_128k``: with side information.
    """
    if codebooks == "shared":
        deepest = quantizer | {"group_size": size, "num_quantizers": _counts(size, quantizer)[-1]}
        compressor = first_stages(subject, count, deepest | {"key_grouping": "contiguous"})
    else:
        compressor = subject.calibrated(_separate(subject, codebooks, quantizer))
    row = by_window(subject, compressor, chunk_size=chunk_size)
    contexts = {"bits_8k": 8192, "bits_128k": 131072}
    row |= {name: bits_with_side(row, subject.about, tokens) for name, tokens in contexts.items()}
    label = {"model": subject.name, "codebooks": codebooks, "group_size": size, "num_quantizers": count}
    return label | {"seed": subject.seed} | row


def _counts(size: int, quantizer: dict) -> list[int]:
    """Count codebooks of groups of ``size`` channels: as many as usual, and as many as make the usual bits."""
    count = quantizer["num_quantizers"]
    return sorted({count, max(1, count * size // quantizer["group_size"])})


def _separate(subject: Subject, codebooks: str, quantizer: dict) -> presets.Preset:
    """Make residual VQ with codebooks for each group, of each head or of all."""
    stages, heads, size = CODEBOOKS[codebooks], subject.about["shapes"][0][0], quantizer["group_size"]

    def codec(head_dim: int | None = None) -> Chain:
        groups = (head_dim or size) // size * (heads if stages else 1)
        product_vq = ProductVQ(groups, quantizer["codebook_size"], size, subject.seed, quantizer["num_quantizers"])
        return Chain([VectorScale("std"), *(stage() for stage in stages)], product_vq)

    preset = presets.vqllm(**quantizer, seed=subject.seed)
    return dataclasses.replace(preset, key_codec=codec, value_codec=codec)


@experiment(lambda seeds, codebook_sizes: product(seed=seeds, codebook_size=codebook_sizes))
def gaussian_depth(
    seed: int, codebook_size: int, depths: list[int], beams: list[int], group_size: int, vectors: int, held_out: int
) -> list[dict]:
    """Measure residual VQ of a Gaussian: a row per codebook size, beam, depth and seed. The bound is 2^(-2 bits)."""
    generator, rows = torch.Generator().manual_seed(seed), []
    train, test = (torch.randn(1, 1, n, group_size, generator=generator) for n in (vectors, held_out))
    codec = Chain([], ResidualVQ(max(depths), codebook_size, group_size, seed=seed)).fit(train)
    for beam, depth in itertools.product(beams, depths):
        cut = recut(codec, depth, beam)
        error = relative_mse(test, cut.decode(cut.encode(test)))
        bits = depth * (codebook_size - 1).bit_length() / group_size
        label = {"codebook_size": codebook_size, "beam": beam, "num_quantizers": depth, "seed": seed}
        rows.append(label | {"bits_per_value": bits, "mse": error})
    return rows


@experiment(lambda codebook_sizes, depths: product(codebook_size=codebook_sizes, num_quantizers=depths))
def residual_depth(
    subject: Subject, codebook_size: int, num_quantizers: int, depths: list[int], group_size: int,
    kmeans_iterations: int, facts: dict, chunk_size: int,
) -> dict:  # fmt: skip
    """Measure Table 2's question on both roles: a row per codebook size and depth.

    Codebooks are learned once per size: a shallower quantizer is the first stages of the deepest.
    """
    deepest = {"num_quantizers": max(depths), "codebook_size": codebook_size, "group_size": group_size}
    deepest |= {"kmeans_iterations": kmeans_iterations}
    compressor = first_stages(subject, num_quantizers, deepest, subject.train_size[0])
    row = by_window(subject, compressor, chunk_size=chunk_size, reconstruction=False)
    row |= facts_answered(subject, compressor, **facts) if facts else {}
    row |= reconstruction_error(subject.exact, compressor, subject.test[:1])
    return {"model": subject.name, "codebook_size": codebook_size, "num_quantizers": num_quantizers} | row


def first_stages(subject: Subject, num_quantizers: int, deepest: dict, batch_size: int = 8) -> Compressor:
    """Return the first stages of residual VQ with the settings ``deepest``, which is fitted once in a process."""
    return shallower(_deepest(subject=subject, quantizer=deepest, batch_size=batch_size), num_quantizers)


@per_process(maxsize=1)
def _deepest(subject: Subject, quantizer: dict, batch_size: int) -> Compressor:
    return subject.calibrated(presets.vqllm(**quantizer, seed=subject.seed), batch_size)


def shallower(compressor: Compressor, num_quantizers: int) -> Compressor:
    """Cut a calibrated residual VQ to the first stages of every codec."""
    codecs = [(recut(key, num_quantizers), recut(value, num_quantizers)) for key, value in compressor.codecs]
    return Compressor(compressor.name, codecs, compressor.settings, compressor.model)


def recut(codec: Codec, num_quantizers: int, beam: int = 1) -> Codec:
    """Cut a fitted residual VQ chain to its first stages, with another encoder."""
    config, state = codec.config(), codec.state_dict()
    config["quantizer"] |= {"num_quantizers": num_quantizers, "beam": beam}
    state["quantizer.codebooks"] = state["quantizer.codebooks"][:num_quantizers].clone()
    return codec_from_config(config, state)


BLOCK = 8  # values
WHITE, ROLES = "white Gaussian", ("keys", "values")


@experiment(lambda subject, seeds: product(data=[WHITE, *ROLES], subject=subject.each(seed=seeds)))
def product_against_residual(
    subject: Subject, data: str, codebook_sizes: list[int], vectors: int, held_out: int, iterations: int, seq_len: int
) -> list[dict]:
    """Store blocks of 8 values as two codes, of 4 values each or in two stages: held-out MSE at equal bits.

    Of white Gaussian vectors, and of a middle layer's keys and values. A row per data, size, method and seed.
    """
    generator, counts = torch.Generator().manual_seed(subject.seed), {"train": vectors, "test": held_out}
    if data == WHITE:
        parts = [torch.randn(count, BLOCK, generator=generator) for count in counts.values()]
    else:
        blocks = _blocks(subject=subject.changed(seed=0), role=data, counts=counts, seq_len=seq_len)
        shuffled = ((x[torch.randperm(len(x), generator=generator)], n) for x, n in zip(blocks, counts.values()))
        parts = [x[:count] for x, count in shuffled]
    rows, named = [], data if data == WHITE else f"{subject.name} {data}"
    for size in codebook_sizes:
        for method, error in (("product", _product), ("residual", _residual)):
            mse = error(parts[0], parts[1], KMeans(size, iterations, subject.seed)) / parts[1].square().sum().item()
            rows.append({"data": named, "seed": subject.seed, "codebook_size": size, "method": method, "mse": mse})
    return rows


@per_process(maxsize=1)
def _blocks(subject: Subject, role: str, counts: dict[str, int], seq_len: int) -> list[torch.Tensor]:
    """Return blocks of the calibration text and of the held-out text, at least so many of each."""
    parts = []
    for split, count in counts.items():
        tokens = subject.text(split, [-(-count // seq_len), seq_len], subject.seed)
        layers = capture(subject.model, tokens, pre_rope=False)[ROLES.index(role)]
        x = layers[len(layers) // 2].float()
        parts.append((x / x.abs().amax(dim=(2, 3), keepdim=True)).reshape(-1, BLOCK))
    return parts


def _left(train: torch.Tensor, test: torch.Tensor, kmeans: KMeans) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the nearest codes, learned on the first, leave of both."""
    codebook = kmeans.fit(train)
    return train - codebook[kmeans.assign(train)], test - codebook[kmeans.assign(test)]


def _residual(train, test, kmeans: KMeans) -> float:
    train, test = _left(train, test, kmeans)
    return _left(train, test, kmeans)[1].square().sum().item()


def _product(train, test, kmeans: KMeans) -> float:
    halves = zip(*(x.split(BLOCK // 2, dim=1) for x in (train, test)), strict=True)
    return sum(_left(x.contiguous(), y.contiguous(), kmeans)[1].square().sum().item() for x, y in halves)


def gaps(table: pd.DataFrame) -> pd.DataFrame:
    """Return product codes' error over that of residual stages, by data and size: mean, least and most of seeds."""
    wide = table.pivot_table(index=["data", "codebook_size", "seed"], columns="method", values="mse", sort=False)
    gap = (wide["product"] / wide["residual"]).rename("gap")
    return gap.groupby(level=["data", "codebook_size"], sort=False).agg(["mean", "min", "max"]).reset_index()
