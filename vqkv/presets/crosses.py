"""Unpublished designs: the stages of all systems crossed with each other, and the best of it."""

import dataclasses
from collections.abc import Callable

from vqkv.codecs.affine import AffineQuantizer
from vqkv.codecs.entropy import Entropy
from vqkv.codecs.entropy_coded_scalar import EntropyCodedScalar, TrellisCodedScalar
from vqkv.codecs.grid import Grid
from vqkv.codecs.groups import ByteGroups
from vqkv.codecs.layout import MergeHeads, TokenBlock
from vqkv.codecs.pca import PCA
from vqkv.codecs.pipeline import Chain, Codec
from vqkv.codecs.scaling import MeanRemoval, VectorScale
from vqkv.codecs.stage import Stage
from vqkv.codecs.transform import Grouping, Hadamard
from vqkv.codecs.vector import ResidualVQ
from vqkv.errors import DataError, UnknownNameError
from vqkv.presets.plans import Budgeted, FromPrevious, Joint
from vqkv.presets.preset import LayerPlan, Preset, chain, preset

TRANSFORM_CODERS = {"uniform": EntropyCodedScalar, "trellis": TrellisCodedScalar}
QUANTIZERS = (*TRANSFORM_CODERS, "rvq", "grid", "affine")
BITS = {"grid": (2, 3, 4), "affine": (1, 2, 3, 4, 5, 6, 7, 8)}  # others have any number up to 16
ROTATIONS = ("none", "hadamard", "pca", "fisher_pca")
# Tokens for each channel of all KV heads from which on a design pays (results/11_rule.csv).
PAYS = {"best-short": 0, "best-mid": 6, "best-long": 45}
LARGEST_GROUP = 1024  # channels that a Hadamard rotation mixes


@preset
def crossed(
    quantizer: str = "uniform",
    bits: float = 2.0,
    mean: bool = True,
    rotation: str = "pca",
    merged: bool = True,
    grouping: str = "contiguous",
    entropy: bool = False,
    predicted: bool = False,
    mixed: bool = False,
    predictor_bits: int = 16,
    joint: bool = False,
    rank: int = 0,
    beam: int = 1,
    codebook_size: int = 256,
    group_size: int = 32,
    block_tokens: int = 32,
    kmeans_iterations: int = 10,
    seed: int = 0,
) -> Preset:
    """Combine any quantizer with any of the stages before and after it.

    ``quantizer``: ``uniform`` (always entropy-coded: a transform coder), ``trellis`` (trellis-coded, else the same),
    ``rvq`` (residual VQ), ``grid`` (HIGGS; 2, 3 or 4 bits) or ``affine`` (groups of 64). ``bits`` are those of the
    codes. ``mean`` is subtracted first. ``rotation``: ``none``, ``hadamard``, ``pca``, or ``fisher_pca``, which scales
    channels by what errors cost the model; ``merged``: of transform coders, one rotation for all heads. ``entropy``
    codes the codes, ``block_tokens`` together. ``predicted`` stores the residuals of AQUA-KV's linear predictors, in
    every layer but the first, with weights of ``predictor_bits`` (GPTQ below 16). ``mixed`` splits the bits among
    layers, keys and values by marginal cost (all but ``grid`` and ``affine``). ``joint``: one rotation for all layers'
    keys, and one for their values (KVTC), without the two. ``rank``: components that are kept, 0: all. ``grouping``,
    ``beam``, ``codebook_size``, ``group_size`` and ``kmeans_iterations`` are residual VQ's.

    Raises ``UnknownNameError`` or ``DataError`` for what does not exist together.
    """
    for what, name, names in (("quantizer", quantizer, QUANTIZERS), ("rotation", rotation, ROTATIONS)):
        if name not in names:
            raise UnknownNameError(what, name, names)
    if not 0 < bits <= 16 or bits not in BITS.get(quantizer, (bits,)):
        raise DataError(f"{quantizer} of {bits!r} bits a value: use {BITS.get(quantizer, 'a number up to 16')}")
    coder = TRANSFORM_CODERS.get(quantizer)
    if joint and (coder is None or predicted or mixed or not merged):
        raise DataError("joint: all layers take one rotation, with uniform or trellis, merged, not predicted or mixed")

    apart = quantizer in ("rvq", "affine")  # these take a head at a time
    stages: list[Stage] = [MeanRemoval()] * mean + [MergeHeads()] * (quantizer == "grid" or (merged and not apart))
    if rotation == "hadamard":
        stages += [Hadamard()] if apart else [Grouping(group_size=LARGEST_GROUP, shrink="power of two"), Hadamard()]
    elif rotation != "none":
        stages += [PCA(rotation == "fisher_pca", rank)]
    if coder is not None:
        codec = chain(*stages, TokenBlock(block_tokens), coder(bits))
    elif quantizer == "grid":
        codec = chain(*stages, VectorScale("rms"), Grid(4 ** int(bits)))
    elif quantizer == "affine":
        codec = chain(*stages, Grouping(group_size=64, shrink="divisor"), AffineQuantizer(int(bits)))
    else:
        books = ResidualVQ(1, codebook_size, group_size, kmeans_iterations, beam=beam, seed=seed).with_bits(bits)
        codec = chain(*stages, VectorScale("std"), Grouping(grouping, group_size), books)
    made = Preset("crossed", codec, codec, sink_tokens=4, block_tokens=block_tokens if coder or entropy else 1)
    made = entropy_coded(made, block_tokens=block_tokens) if entropy else made
    plan: LayerPlan = LayerPlan()
    if predicted:
        kind, weights = ("gptq", {"bits": predictor_bits}) if predictor_bits < 16 else ("linear", {})
        plan = FromPrevious(made, kind, arguments=weights, cross_fitted=True)
    plan = Joint() if joint else Budgeted(plan, bits) if mixed else plan
    return dataclasses.replace(made, name="crossed", plan=None if type(plan) is LayerPlan else plan)


@preset
def best(
    bits: float = 2.0, context: int = 8192, kv_width: int = 1024, block_tokens: int = 32, trellis: bool = False
) -> Preset:
    """Choose page 11's design for ``context`` tokens that share the side information.

    ``context``: context length times number of sequences. ``kv_width``: num_kv_heads x head_dim channels (1,024 for
    Llama-3-8B; not read from the model). All designs subtract the mean, rotate by Fisher-weighted PCA, quantize
    uniformly, code ``block_tokens`` together with rANS, and split bits among layers, keys and values by marginal
    cost. ``best-short`` rotates each head by itself. ``best-mid``, from 6 tokens a channel on (``PAYS``), stores the
    residuals of AQUA-KV's linear predictors in 4 bits, by head. ``best-long``, from 45 on, has predictors of 8 bits and
    one rotation for all heads. With fewer than 8 calibration tokens a channel, or where predictions gain nothing on
    held-out ones, it is ``best-short`` at any length, and a warning says so.

    ``bits`` are those of the calibration text; 1.8 are 1.89 on other text with 32 tokens for each channel, 2.25 with
    two. ``trellis``: lower KL at equal bits, seven to eight times as long to encode, twice as long to decode.
    """
    coder = "trellis" if trellis else "uniform"
    shared: dict = {"rotation": "fisher_pca", "mixed": True, "block_tokens": block_tokens}
    short = dataclasses.replace(crossed(coder, bits, merged=False, **shared), name="best")
    if (design := best_for(context, kv_width)) == "best-short":
        return short
    long = design == "best-long"
    made = crossed(coder, bits, predicted=True, predictor_bits=8 if long else 4, merged=long, **shared)
    return dataclasses.replace(made, name="best", if_too_few_tokens=short)


@preset
def live(bits: float = 2.25, block_tokens: int = 16, seed: int = 0) -> Preset:
    """Code at a fixed rate, for a cache in use that attention reads in place.

    Each head's channels, less their mean, are rotated by Fisher-weighted PCA. Components share bytes, the fewer the
    more they vary (``ByteGroups``). ``bits`` are split by marginal cost. Keys are rotated back in blocks of 16."""
    codec = chain(MeanRemoval(), PCA(weighted=True), ByteGroups(bits, seed))
    plan = Budgeted(LayerPlan(), bits)
    return Preset("live", codec, codec, sink_tokens=4, block_tokens=block_tokens, pre_rope=16, plan=plan)


def best_for(tokens: int, kv_width: int) -> str:
    """Choose the design, of ``PAYS``, that ``best`` takes."""
    return max((name for name, pays in PAYS.items() if pays * kv_width <= tokens), key=PAYS.__getitem__)


def entropy_coded(preset: Preset, context: str = "position", block_tokens: int = 128) -> Preset:
    """Code the codes of ``preset`` with rANS (see ``Entropy``), one stream for each head and ``block_tokens`` where it
    has no blocks of its own. Raises ``DataError`` for codecs that are no chain, such as fp16."""

    def coded(codec: Codec) -> Callable[..., Codec]:
        if not isinstance(codec, Chain):
            raise DataError(f"{preset.name} has no codes to entropy-code")
        stages = [*codec.stages]
        if codec.block_tokens == 1:  # before the first stage that stores something per row
            index = next((i for i, stage in enumerate(stages) if stage.side_fields), len(stages))
            stages.insert(index, TokenBlock(block_tokens))
        return chain(*stages, Entropy(codec.quantizer, context))

    return dataclasses.replace(
        preset,
        name=f"{preset.name}+ans",
        key_codec=coded(preset.key_codec(None)),
        value_codec=coded(preset.value_codec(None)),
        arguments=preset.arguments | {"context": context, "block_tokens": block_tokens},
    )
