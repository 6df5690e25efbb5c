"""A tensor -> packed bytes -> a tensor. Knows no model. Importing this registers every stage, quantizer and codec by
name; ``predictor_kinds``, which ``predictive`` imports, registers predictors."""

from vqkv.codecs import (  # noqa: F401
    affine,
    byte_groups,
    channel_bits,
    component_groups,
    entropy,
    entropy_coded_scalar,
    exact,
    fallback,
    float_bits,
    grid,
    nonuniform,
    product,
    residual,
    small_floats,
    tiles,
    transform,
    trellis_coded_scalar,
)
