"""Each published system in a few lines, so that what differs between them is visible at a glance."""

import dataclasses
from typing import Any

from vqkv.codecs.affine import AffineQuantizer, HalfQuadratic, MinMax
from vqkv.codecs.entropy import FloatBits
from vqkv.codecs.exact import Fallback, Fp16, SparseOutliers
from vqkv.codecs.grid import Grid, NonUniform, WeightedChain
from vqkv.codecs.layout import MergeHeads, TokenBlock
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.scaling import ChannelScale, HeadScale, MeanRemoval, VectorScale
from vqkv.codecs.stage import Quantizer, Stage
from vqkv.codecs.transform import Grouping, Hadamard
from vqkv.codecs.vector import ProductVQ, ResidualVQ
from vqkv.errors import DataError
from vqkv.presets.plans import FromPrevious, Shared
from vqkv.presets.preset import Preset, chain, make, preset


@preset
def fp16() -> Preset:
    """The uncompressed cache in 16 bits a value: what every ratio is against."""
    return Preset("fp16", Fp16, Fp16, pre_rope=False)


@preset
def lossless(block_tokens: int = 32) -> Preset:
    """Every bit of a cache in 16 bits: exponents and signs entropy-coded, mantissas as they are (see ``FloatBits``), in
    blocks of ``block_tokens`` tokens, keys after RoPE. A model in float32 has its cache rounded to fp16."""
    codec = chain(TokenBlock(block_tokens), FloatBits())
    return Preset("lossless", codec, codec, block_tokens=block_tokens, pre_rope=False)


@preset
def vqllm(
    num_quantizers: int = 8,
    codebook_size: int = 2048,
    group_size: int = 32,
    key_grouping: str = "strided",
    value_grouping: str = "contiguous",
    init: str = "kmeans",
    decay: float = 0.99,
    revive: bool = False,
    seed: int = 0,
    beam: int = 1,
    kmeans_iterations: int = 10,
) -> Preset:
    """Residual VQ (Kumar, "Residual vector quantization for KV cache compression in large language model", 2.2).

    Scale by the vector's standard deviation, split into groups of ``group_size`` channels, quantize every group with
    the same ``num_quantizers`` codebooks of ``codebook_size`` codes; no sinks and no recent window. The default stores
    2.875 bits a value at head_dim 128. ``beam`` > 1 searches for better codes of the same size (not in the paper).
    """
    learned: dict[str, Any] = {"init": init, "decay": decay, "revive": revive, "seed": seed, "beam": beam}
    quantizer = ResidualVQ(num_quantizers, codebook_size, group_size, kmeans_iterations, **learned)
    keys = chain(VectorScale("std"), Grouping(key_grouping, group_size, seed=seed), quantizer)
    values = chain(VectorScale("std"), Grouping(value_grouping, group_size, seed=seed), quantizer)
    return Preset("vqllm", keys, values)


@preset
def quanto(bits: int = 4, group_size: int = 64) -> Preset:
    """Transformers' quantized cache, quanto backend: asymmetric, per token in groups of ``group_size`` channels, keys
    after RoPE. Tokens stay in 16 bits until 128 of them are packed together. 4.5 bits a value with 4-bit codes."""
    codec = chain(Grouping(group_size=group_size, shrink="divisor"), AffineQuantizer(bits))
    return Preset("quanto", codec, codec, block_tokens=128, pre_rope=False)


@preset
def hqq(bits: int = 4, group_size: int = 64) -> Preset:
    """Like ``quanto``, but every group's offset is found by HQQ's half-quadratic solver. The backend itself groups
    values of different tokens together, which a growing cache cannot do without packing everything again."""
    codec = chain(Grouping(group_size=group_size, shrink="divisor"), AffineQuantizer(bits, HalfQuadratic(bits)))
    return Preset("hqq", codec, codec, block_tokens=128, pre_rope=False)


@preset
def kivi(bits: int = 2, block_tokens: int = 128) -> Preset:
    """KIVI (Liu et al. 2024): asymmetric; keys per channel over ``block_tokens``, values per token in groups of up to
    as many channels, keys after RoPE. 2.375 bits a value at 2 bits and head_dim 64."""
    keys = chain(TokenBlock(block_tokens, channels_first=True), AffineQuantizer(bits))
    values = chain(Grouping(group_size=block_tokens, shrink="divisor"), AffineQuantizer(bits))
    return Preset("kivi", keys, values, recent_window=128, pre_rope=False)


@preset
def kvquant(
    bits: int = 4,
    outliers: float = 0.01,
    block_tokens: int = 32,
    seed: int = 0,
    fisher: bool = False,
    norm: bool = False,
) -> Preset:
    """KVQuant (Hooper et al. 2024): learned levels for keys before RoPE, scaled per channel offline, and for values,
    scaled per token over all heads; the largest 1% of each block of tokens kept apart; the first token exact.
    ``fisher``: levels are learned with values weighted by Fisher information, as there, averaged over tokens here;
    ``norm``: Q-Norm, which there is for 2 bits."""
    levels, kind = NonUniform(bits, seed=seed, norm=norm), WeightedChain if fisher else Chain
    keys = chain(ChannelScale(), TokenBlock(block_tokens), SparseOutliers(outliers), levels, kind=kind)
    values = chain(MergeHeads(), TokenBlock(block_tokens), SparseOutliers(outliers), MinMax(), levels, kind=kind)
    return Preset("kvquant", keys, values, sink_tokens=1)


@preset
def higgs(bits: int = 2, group_size: int = 1024) -> Preset:
    """HIGGS (Malinovskii et al. 2024) as AQUA-KV applies it: a Hadamard rotation over all heads' channels (groups of at
    most ``group_size``), one norm per group, pairs on a Gaussian grid of 16, 64 or 256 points for 2, 3 or 4 bits. Each
    channel's mean is removed first, which the papers do not do: key biases leave nothing of a 4-bit cache without
    (Qwen2.5). As published: ``crossed("grid", bits, rotation="hadamard", mean=False)``."""
    if bits not in (2, 3, 4):
        raise DataError(f"higgs of {bits!r} bits: 2, 3 and 4 have a grid")
    grouping = Grouping(group_size=group_size, shrink="power of two")
    codec = chain(MeanRemoval(), MergeHeads(), grouping, Hadamard(), VectorScale("rms"), Grid(4**bits))
    return Preset("higgs", codec, codec, sink_tokens=4, recent_window=128)


@preset
def vqq(threshold: float = 0.1, block_tokens: int = 64, codebook_size: int = 256, seed: int = 0) -> Preset:
    """VQ quality framework, stages 1 and 2: ``block_tokens`` of each head divided by their max|v|, blocks of 8
    values to one of 256 codes, or kept in fp16 where the error exceeds ``threshold``. Keys after RoPE."""
    codec = Chain([], ResidualVQ(1, codebook_size, 8, seed=seed), 8)
    return _framework("vqq", block_tokens, Fallback(codec, threshold, 8))


@preset
def vqq_product(threshold: float = 0.08, block_tokens: int = 64, codebook_size: int = 256, seed: int = 0) -> Preset:
    """VQ quality framework, stage 3: as ``vqq``, with two codes of 4 values each in place of one of 8."""
    codec = Chain([], ProductVQ(2, codebook_size, 4, seed=seed), 8)
    return _framework("vqq_product", block_tokens, Fallback(codec, threshold, 8))


@preset
def vq(
    block_values: int = 8, block_tokens: int = 64, codebook_size: int = 256, seed: int = 0, per_head_scale: bool = True
) -> Preset:
    """VQ quality framework without fallback: ``block_values`` (2 or 8 there) to one of 256 codes. Without
    ``per_head_scale`` one codebook covers the values of all heads as they are: its "naive VQ"."""
    parts = Grouping(group_size=block_values), ResidualVQ(1, codebook_size, block_values, seed=seed)
    return _framework("vq", block_tokens, *parts, scaled=per_head_scale)


@preset
def rvq2(block_values: int = 8, block_tokens: int = 64, codebook_size: int = 256, seed: int = 0) -> Preset:
    """The framework's "likely next step": two residual stages of 256 codes on blocks of 8 values."""
    parts = Grouping(group_size=block_values), ResidualVQ(2, codebook_size, block_values, seed=seed)
    return _framework("rvq2", block_tokens, *parts)


def _framework(name: str, block_tokens: int, *parts: Stage | Quantizer, scaled: bool = True) -> Preset:
    """Make a system of the VQ quality framework: blocks of tokens, scaled per head, keys as attention sees them."""
    codec = chain(TokenBlock(block_tokens), *[HeadScale()] * scaled, *parts)
    return Preset(name, codec, codec, pre_rope=False)


@preset
def aqua(
    backbone: Preset | str | dict = "higgs",
    predictor: str = "linear",
    first_layer_bits: int = 4,
    key_from: str = "K-1",
    value_from: str = "V-1+K",
    **settings,
) -> Preset:
    """AQUA-KV (Shutova et al. 2025): keys predicted from the layer before, values from the layer before and their own
    keys; ``backbone`` stores the residuals: a preset, the name of one, or a name with arguments,
    ``{"name": "higgs", "bits": 3}`` (``-p "backbone={name: higgs, bits: 3}"`` on the command line).

    ``predictor``: ``linear``, ``reduced_rank``, ``mlp`` or ``gptq``, with its ``settings`` (``rank=64``). The first
    layer is HIGGS of 4, 3 or 2 bits, or fp16 for 16. ``key_from`` and ``value_from``: see ``plans.FromPrevious``. Of
    the backbone's own settings its flush block stays: 4 sinks and a window of 128 tokens are kept, keys before RoPE.
    """
    if not isinstance(backbone, Preset):
        named = {"name": backbone} if isinstance(backbone, str) else backbone
        backbone = make(named.get("name", ""), **{str(key): value for key, value in named.items() if key != "name"})
    if backbone.plan is not None:
        raise DataError(f"backbone {backbone.name!r} must be a preset without predictors of its own, such as higgs(2)")
    first = fp16() if first_layer_bits == 16 else higgs(first_layer_bits)
    return dataclasses.replace(
        backbone,
        name=f"aqua-{backbone.name}",
        sink_tokens=4,
        recent_window=128,
        pre_rope=None,
        arguments={"backbone": {"name": backbone.name, **backbone.arguments}},
        plan=FromPrevious(first, predictor, key_from, value_from, settings),
    )


@preset
def kvsharer(pairs: int = 1, threshold: float = 0.5) -> Preset:
    """KVSharer (Yang et al. 2024): ``pairs`` layers store nothing and read an earlier layer's cache, which is fp16."""
    return dataclasses.replace(fp16(), name="kvsharer", plan=Shared(pairs, threshold))
