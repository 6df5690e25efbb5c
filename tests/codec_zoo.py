"""Small codecs of every kind, and every preset, small enough for a random checkpoint and a few dozen tokens."""

import copy

import torch
from strategies import gaussian

from vqkv import presets
from vqkv.codecs.affine import AffineQuantizer
from vqkv.codecs.channel_bits import ChannelBits
from vqkv.codecs.entropy import Entropy, FloatBits
from vqkv.codecs.entropy_coded_scalar import EntropyCodedScalar, TrellisCodedScalar
from vqkv.codecs.exact import Fallback, Fp16
from vqkv.codecs.grid import NonUniform
from vqkv.codecs.groups import ByteGroups, ComponentGroups
from vqkv.codecs.layout import MergeHeads, TokenBlock
from vqkv.codecs.pca import PCA
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.scaling import ChannelScale, HeadScale, MeanRemoval, VectorScale
from vqkv.codecs.transform import Grouping, Hadamard
from vqkv.codecs.vector import ProductVQ, ResidualVQ

HEADS, HEAD_DIM = 3, 16


def chain(head_dim=16, kind="strided", stages=(), **settings):
    quantizer = ResidualVQ(**{"num_quantizers": 2, "codebook_size": 20, "group_size": 8, **settings})
    return Chain([*stages, VectorScale(), Grouping(kind, quantizer.group_size)], quantizer, head_dim)


def same(a, b):
    """Whether two payloads hold the same bits, of as many tokens."""
    alike = (a.block_tokens, a.units, a.tensors.keys()) == (b.block_tokens, b.units, b.tensors.keys())
    return alike and all(torch.equal(a.tensors[n], b.tensors[n]) for n in a.tensors)


SMALL = {
    "quanto": presets.quanto(4, 8),
    "hqq": presets.hqq(2, 8),
    "kivi": presets.kivi(2, 9),
    "kvquant": presets.kvquant(3, block_tokens=7),
    "higgs": presets.higgs(2),
    "vqq": presets.vqq(0.3, block_tokens=3, codebook_size=20),
    "vqq_product": presets.vqq_product(0.2, block_tokens=5, codebook_size=20),
    "vq": presets.vq(2, block_tokens=6, codebook_size=20),
    "rvq2": presets.rvq2(block_tokens=3, codebook_size=20),
    "turboquant": presets.turboquant(3),
    "fp8": presets.fp8(),
    "nvfp4": presets.nvfp4(),
    "kvarn": presets.kvarn(block_tokens=4),
    "cachegen": presets.cachegen(group=5, block_tokens=10),
    "nsnquant": presets.nsnquant(block_tokens=6),
    "block_gtq": presets.block_gtq(2.5),
}

LEARNED = {"num_quantizers": 2, "codebook_size": 16, "group_size": 8}
PRESETS = SMALL | {
    "fp16": presets.fp16(),
    "lossless": presets.lossless(block_tokens=16),
    "vqllm": presets.vqllm(**LEARNED),
    "beam": presets.vqllm(**LEARNED, beam=4),
    "kivi": presets.kivi(block_tokens=16, recent_window=8),
    "higgs": presets.higgs(recent_window=8),
    "turboquant": presets.turboquant(2),
    "turboquant outliers": presets.turboquant(2.25),
}

CODED = {name: presets.entropy_coded(PRESETS[name], block_tokens=16) for name in ("vqllm", "kivi")}

CROSSED = {
    "steps": presets.crossed("uniform", 2.0, rotation="none", block_tokens=16),
    "split": presets.crossed("uniform", 1.5, rotation="hadamard", predicted=True, mixed=True, block_tokens=16),
}

EVERY = PRESETS | {f"{name}+ans": preset for name, preset in CODED.items()} | CROSSED

PREDICTED = {
    "aqua-higgs": presets.aqua(presets.higgs(), recent_window=8),
    "aqua-vqllm": presets.aqua(presets.vqllm(**LEARNED), recent_window=0, sink_tokens=0),
    "aqua-kivi": presets.aqua(presets.kivi(block_tokens=16), first_layer_bits=16, recent_window=8),
    "aqua-quanto-gptq": presets.aqua(presets.quanto(), "gptq", key_from="K-1+K-2", value_from="V-1", pre_rope=False),
    "aqua-means": presets.aqua(presets.higgs(), "reduced_rank", key_from="none", value_from="mean", recent_window=0),
    "kvsharer": presets.kvsharer(threshold=-1),
    "kvtc": presets.kvtc(2.0, block_tokens=16, recent_window=8),
    "oscar": presets.oscar(sink_tokens=4, recent_window=8),
}

MLP = {"epochs": 2, "minibatch": 64}
PREDICTORS = {"linear": {}, "reduced_rank": {"rank": 3}, "mlp": MLP, "gptq": {"group_size": 4}}


EXTRA = {
    "transform coder": Chain([MeanRemoval(), MergeHeads(), PCA(), TokenBlock(4)], EntropyCodedScalar(2.0)),
    "transform coder per head": Chain([PCA(), TokenBlock(3)], EntropyCodedScalar(1.0)),
    "steps token by token": Chain([], EntropyCodedScalar(3.0)),
    "trellis": Chain([MeanRemoval(), MergeHeads(), PCA(), TokenBlock(4)], TrellisCodedScalar(2.0)),
    "trellis per head": Chain([TokenBlock(3)], TrellisCodedScalar(1.0)),
    "affine per channel in groups": Chain([TokenBlock(6, True), Grouping(group_size=3)], AffineQuantizer(2)),
    "fallback of affine": Chain([HeadScale()], Fallback(Chain([], AffineQuantizer(2)), 0.1, 4)),
    "fallback of residual VQ": Chain([TokenBlock(2), HeadScale()], Fallback(Chain([], ResidualVQ(2, 20, 8)), 0.1, 8)),
}

EXTRA |= {kind: chain(kind=kind) for kind in ("contiguous", "strided", "random")}
EXTRA |= {
    "revived": chain(revive=True, decay=0.5, codebook_size=60, init="random"),
    "beam": chain(beam=3),
    "levels": Chain([ChannelScale()], NonUniform(3)),
    "ans": Chain([TokenBlock(4)], Entropy(NonUniform(2))),
    "float bits": Chain([TokenBlock(4)], FloatBits()),
    "ans by stage": Chain([TokenBlock(4), Grouping(group_size=8)], Entropy(ResidualVQ(2, 20, 8), context="stage")),
    "component groups": Chain([MeanRemoval(), MergeHeads(), PCA(), TokenBlock(6)], ComponentGroups(3.0)),
    "few components": Chain([MergeHeads(), PCA(rank=20), TokenBlock(4)], ComponentGroups(2.0)),
    "product+ans": Chain([TokenBlock(5)], Entropy(ProductVQ(4, 20, 4))),
    "fp16": Fp16(),
    "channel bits": Chain([], ChannelBits(2.25)),
    "byte groups": Chain([], ByteGroups(3.0)),
    "rotated": chain(stages=[MeanRemoval(), Hadamard()]),
}
KINDS = [*(f"{name} {role}" for name in SMALL for role in ("key", "value")), *EXTRA]


def unfitted_codecs():
    """One of every kind."""
    made = {f"{name} {role}": getattr(p, f"{role}_codec")() for name, p in SMALL.items() for role in ("key", "value")}
    return made | copy.deepcopy(EXTRA)  # other tests are to find them as they are


def fitted_codecs():
    """One of every kind, fitted for 3 heads of 16 channels."""
    x = gaussian(2, HEADS, 210, HEAD_DIM)
    return {name: codec if codec.ready else codec.fit(x) for name, codec in unfitted_codecs().items()}
