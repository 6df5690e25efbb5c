"""A tensor -> packed bytes -> a tensor. Knows no model. Importing this registers every codec part by name."""

from vqkv.codec.affine import Uniform
from vqkv.codec.base import Codec, codec_from_config
from vqkv.codec.entropy import Entropy
from vqkv.codec.exact import Fp16, Nothing
from vqkv.codec.fallback import Fallback
from vqkv.codec.grid import Grid
from vqkv.codec.layout import MergeHeads, TokenBlock
from vqkv.codec.nonuniform import NonUniform, SparseOutliers
from vqkv.codec.payload import Payload, payload_from
from vqkv.codec.pipeline import Chain
from vqkv.codec.principal import Principal
from vqkv.codec.product import ProductVQ
from vqkv.codec.ragged import MaskedPayload, RaggedPayload, StreamPayload
from vqkv.codec.residual import ResidualVQ
from vqkv.codec.scaling import ChannelScale, HalfQuadratic, HeadScale, MinMax, VectorScale
from vqkv.codec.stage import Quantizer, Stage
from vqkv.codec.steps import Steps
from vqkv.codec.transform import Grouping, Hadamard, MeanRemoval

__all__ = [
    "Chain", "ChannelScale", "Codec", "Entropy", "Fallback", "Fp16", "Grid", "Grouping", "Hadamard", "HalfQuadratic",
    "HeadScale", "MaskedPayload", "MeanRemoval", "MergeHeads", "MinMax", "NonUniform", "Nothing", "Payload",
    "Principal", "ProductVQ", "Quantizer", "RaggedPayload", "ResidualVQ", "SparseOutliers", "Stage", "Steps",
    "StreamPayload", "TokenBlock", "Uniform", "VectorScale", "codec_from_config", "payload_from",
]  # fmt: skip
