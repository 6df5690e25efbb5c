"""Each published system in a few lines, and ours; who predicts whom; who gets the bits."""

from vqkv.presets.crosses import best, crossed, entropy_coded, live
from vqkv.presets.preset import PRESETS, Preset, make
from vqkv.presets.published import (
    aqua,
    fp16,
    higgs,
    hqq,
    kivi,
    kvquant,
    kvsharer,
    lossless,
    quanto,
    rvq2,
    vq,
    vqllm,
    vqq,
    vqq_product,
)
from vqkv.presets.recent import aatc, block_gtq, cachegen, fp8, kvarn, kvtc, nova, nsnquant, nvfp4, oscar, turboquant

__all__ = [
    "PRESETS", "Preset", "aatc", "aqua", "best", "block_gtq", "cachegen", "crossed", "entropy_coded", "fp8", "fp16",
    "higgs", "hqq", "kivi", "kvarn", "kvquant", "kvsharer", "kvtc", "live", "lossless", "make", "nova",
    "nsnquant", "nvfp4", "oscar", "quanto", "rvq2", "turboquant", "vq", "vqllm", "vqq", "vqq_product",
]  # fmt: skip
