# ruff: noqa: F401
"""Each published system in a few lines, and ours; who predicts whom; who gets the bits."""

from vqkv.presets.crosses import best, crossed, entropy_coded, live
from vqkv.presets.preset import PRESETS, Preset, make
from vqkv.presets.published import aqua, fp16, higgs, hqq, kivi, kvquant, kvsharer, lossless

# isort: split
from vqkv.presets.published import quanto, rvq2, vq, vqllm, vqq, vqq_product
from vqkv.presets.recent import aatc, block_gtq, cachegen, fp8, kvarn, kvtc, nova, nsnquant, nvfp4, oscar, turboquant
