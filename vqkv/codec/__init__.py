"""A tensor -> packed bytes -> a tensor. Knows no model. Importing this registers every codec part by name."""

from vqkv.codec.base import Codec, Fp16, codec_from_config
from vqkv.codec.payload import Payload
from vqkv.codec.pipeline import Chain, Quantizer, Stage
from vqkv.codec.residual import ResidualVQ
from vqkv.codec.scaling import VectorScale
from vqkv.codec.transform import Grouping, Hadamard, MeanRemoval

__all__ = [
    "Chain", "Codec", "Fp16", "Grouping", "Hadamard", "MeanRemoval", "Payload", "Quantizer", "ResidualVQ", "Stage",
    "VectorScale", "codec_from_config",
]  # fmt: skip
