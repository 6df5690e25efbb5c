"""What the field has published since the four sources, in a few lines each; docstrings say what papers leave open."""

import dataclasses

from vqkv.codecs.affine import AffineQuantizer, Anchors, Clipped
from vqkv.codecs.channel_bits import ChannelBits
from vqkv.codecs.entropy_coded_scalar import EntropyCodedScalar
from vqkv.codecs.grid import Fp4, Fp8, GaussianLevels, SignedGrid
from vqkv.codecs.groups import ComponentGroups
from vqkv.codecs.layout import MergeHeads, TokenBlock
from vqkv.codecs.pca import PCA, CostBasis
from vqkv.codecs.scaling import DualScale, MeanRemoval, Rescale, TileMean, VectorScale
from vqkv.codecs.transform import Grouping, Hadamard, RandomSigns
from vqkv.codecs.vector import HeadCodebooks
from vqkv.presets.crosses import LARGEST_GROUP, crossed
from vqkv.presets.plans import Graded, Joint
from vqkv.presets.preset import Preset, chain, preset


@preset
def kvtc(bits: float = 2.0, deflate: bool = True, rank: int = 0, block_tokens: int = 128) -> Preset:
    """KVTC (Staniszewski & Lancucki 2025, arXiv 2511.01815): keys before RoPE of all layers and heads side by side, and
    values likewise, less their mean, rotated to their first ``rank`` (0: all) principal components, in groups of codes
    of as many bits as dynamic programming gives them (``ComponentGroups``), deflated. Sinks and the last 128 tokens
    stay exact.

    ``bits`` are what a value takes before deflating. Here a group's values in a token lie between two ends of 16 bits,
    groups have 16 to 1,024 components, ``block_tokens`` are deflated together, each group by itself, and PCA
    is exact, not randomised. Without ``deflate`` components are rounded to one step and rANS-coded, not in groups."""
    quantizer = ComponentGroups(bits) if deflate else EntropyCodedScalar(bits)
    codec = chain(MeanRemoval(), MergeHeads(), PCA(rank=rank), TokenBlock(block_tokens), quantizer)
    return Preset("kvtc", codec, codec, sink_tokens=4, recent_window=128, block_tokens=block_tokens, plan=Joint())


@preset
def turboquant(bits: float = 3, seed: int = 0) -> Preset:
    """TurboQuant (Zandieh et al. 2025, arXiv 2504.19874): each head's vector divided by its norm, rotated at random,
    and every coordinate rounded to the Gaussian's best 2^``bits`` levels (Algorithm 1; with the sketch of Algorithm 2
    KL was 1.9 to 3.7 times as large on two small models). The rotation is a Hadamard matrix with random signs, or a
    random orthogonal matrix where head_dim is no power of two, norms are fp16, keys are stored after RoPE. ``bits`` +
    16 / head_dim bits a value. Half bits: outlier channels have one more, and both sets a norm (``ChannelBits``); the
    paper's "2.5" is 2.25, 32 of 128 channels with 3 bits."""
    if bits == int(bits):
        head = Grouping(group_size=LARGEST_GROUP, shrink="divisor")
        codec = chain(head, VectorScale("rms"), RandomSigns(seed), Hadamard(whole=True), GaussianLevels(int(bits)))
    else:
        codec = chain(ChannelBits(bits))
    return Preset("turboquant", codec, codec, pre_rope=False)


@preset
def kvarn(key_bits: int = 2, value_bits: int = 2, block_tokens: int = 128, iterations: int = 16) -> Preset:
    """KVarN (arXiv 2606.03458): tiles of ``block_tokens``, Hadamard over channels, the standard deviations of channels
    and tokens brought to 1 in ``iterations`` steps, then asymmetric rounding: keys per channel, values per token.
    Tokens wait in 16 bits until a tile is full. fp16 for all scales is ours. 2.56 bits a value at head_dim 64."""
    scales = DualScale(iterations)
    keys = chain(Hadamard(), TokenBlock(block_tokens, channels_first=True), scales, AffineQuantizer(key_bits))
    values = chain(Hadamard(), TokenBlock(block_tokens), scales, AffineQuantizer(value_bits))
    return Preset("kvarn", keys, values, pre_rope=False)


@preset
def fp8() -> Preset:
    """What vLLM and SGLang ship as an fp8 cache: E4M3, by default with no scale. 8 bits a value."""
    return Preset("fp8", chain(Fp8()), chain(Fp8()), pre_rope=False)


@preset
def nvfp4() -> Preset:
    """NVFP4, as TensorRT-LLM and vLLM ship it: E2M1 with a scale in E4M3 for each 16 channels; their second scale, one
    a layer, only shifts the first into range and is 1 here. 4.5 bits a value."""
    codec = chain(Grouping(group_size=16), Fp4())
    return Preset("nvfp4", codec, codec, pre_rope=False)


@preset
def cachegen(bits: float = 3.0, group: int = 10, block_tokens: int = 160) -> Preset:
    """CacheGen (Liu et al. 2024): of every ``group`` tokens the first in 8 bits, the others as differences from it,
    rounded in steps that grow from the first third of the layers to the last (1/2, 1 and 3/2 of one step) and
    entropy-coded by channel. ``bits``: what a difference is to take on average over layers; steps follow from it. Its
    arithmetic coder is our rANS, with tables for channels of like spread, in streams of ``block_tokens``."""
    codec = chain(TokenBlock(block_tokens), Anchors(group), EntropyCodedScalar(bits))
    return Preset("cachegen", codec, codec, block_tokens=block_tokens, pre_rope=False, plan=Graded(bits))


@preset
def nsnquant(block_tokens: int = 64) -> Preset:
    """NSNQuant (arXiv 2505.18231): tokens divided by their norm, the mean of a tile's tokens subtracted, divided by
    their norm again, rotated by Hadamard, then signs and one codebook of 8 magnitudes for all models (``SignedGrid``),
    learned here by k-means alone. All scales and means are fp16, of which the paper quantizes some to 4 bits."""
    rotation = Grouping(group_size=LARGEST_GROUP, shrink="power of two"), Hadamard()
    codec = chain(TokenBlock(block_tokens), VectorScale("rms"), TileMean(), Rescale("rms"), *rotation, SignedGrid())
    return Preset("nsnquant", codec, codec, pre_rope=False)


@preset
def oscar(key_clip: float = 0.96, value_clip: float = 0.92, group_size: int = 128) -> Preset:
    """OSCAR (arXiv 2605.17757): each head rotated to the eigenvectors of its queries' second moments (keys, after RoPE)
    or of its values' weighted by what attention gives them, then by Hadamard; clipped, and 2 bits between the ends of
    ``group_size`` channels, at most a head. Ends are fp16. Its last step permutes channels, which changes nothing where
    a group is a head. 2.5 bits a value at head_dim 64."""
    stages = CostBasis(), Hadamard(), Grouping(group_size=group_size, shrink="divisor")
    keys = chain(*stages, AffineQuantizer(2, Clipped(key_clip)))
    values = chain(*stages, AffineQuantizer(2, Clipped(value_clip)))
    return Preset("oscar", keys, values, sink_tokens=64, recent_window=256, pre_rope=False)


@preset
def nova(clip: float = 0.92, seed: int = 0) -> Preset:
    """NOVA-KV (arXiv 2608.04074): keys, after RoPE and less their mean, rotated to components of equal cost to the
    queries, divided by their rms, in groups of 4 from all strengths, each with 256 codes of its own; values as in
    ``oscar``. Scales are fp16; costs below a thousandth of their mean count as that. 2.375 bits at head_dim 64."""
    basis = PCA(weighted=True, costs="attention")
    keys = chain(MeanRemoval(), basis, VectorScale("rms"), Grouping("strided", 4), HeadCodebooks(seed=seed))
    return dataclasses.replace(oscar(value_clip=clip), name="nova", key_codec=keys)


@preset
def block_gtq(key_bits: float = 2, value_bits: int = 2, seed: int = 0) -> Preset:
    """Block-GTQ (arXiv 2606.24033): keys' bits by RoPE frequency, more where queries and keys are large
    (``ChannelBits``); values as in ``turboquant``. A norm for every set of channels with as many bits."""
    keys = chain(ChannelBits(key_bits, pairs=True))
    return dataclasses.replace(turboquant(value_bits, seed=seed), name="block_gtq", key_codec=keys)


@preset
def aatc(bits: float = 2.0, block_tokens: int = 32) -> Preset:
    """AATC (arXiv 2608.14191): each head's channels rotated to the components in which errors count as much as they
    cost attention, and bits poured over those of all layers, keys and values, in reverse, which one step with entropy
    coding does. Costs are here those of the model's loss (Fisher information): this is ``best-short``."""
    made = crossed("uniform", bits, rotation="fisher_pca", merged=False, mixed=True, block_tokens=block_tokens)
    return dataclasses.replace(made, name="aatc")
