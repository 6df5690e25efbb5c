"""A tensor -> packed bytes -> a tensor. Knows no model. Importing this registers every codec part by name."""

from vqkv.codecs.affine import AffineQuantizer
from vqkv.codecs.base import Codec
from vqkv.codecs.entropy import Entropy
from vqkv.codecs.entropy_coded_scalar import EntropyCodedScalar
from vqkv.codecs.exact import Fp16, Nothing
from vqkv.codecs.fallback import Fallback, MaskedPayload
from vqkv.codecs.grid import Grid
from vqkv.codecs.layout import MergeHeads, TokenBlock
from vqkv.codecs.nonuniform import NonUniform, SparseOutliers
from vqkv.codecs.part import codec_from_config
from vqkv.codecs.payload import Payload, payload_from
from vqkv.codecs.pca import PCA
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.product import ProductVQ
from vqkv.codecs.residual import ResidualVQ
from vqkv.codecs.scaling import ChannelScale, HalfQuadratic, HeadScale, MeanRemoval, MinMax, VectorScale
from vqkv.codecs.stage import Quantizer, Stage
from vqkv.codecs.streams import StreamPayload
from vqkv.codecs.transform import Grouping, Hadamard

__all__ = [
    "PCA",
    "AffineQuantizer",
    "Chain",
    "ChannelScale",
    "Codec",
    "Entropy",
    "EntropyCodedScalar",
    "Fallback",
    "Fp16",
    "Grid",
    "Grouping",
    "Hadamard",
    "HalfQuadratic",
    "HeadScale",
    "MaskedPayload",
    "MeanRemoval",
    "MergeHeads",
    "MinMax",
    "NonUniform",
    "Nothing",
    "Payload",
    "ProductVQ",
    "Quantizer",
    "ResidualVQ",
    "SparseOutliers",
    "Stage",
    "StreamPayload",
    "TokenBlock",
    "VectorScale",
    "codec_from_config",
    "payload_from",
]  # fmt: skip
