"""A tensor -> packed bytes -> a tensor. Knows no model. Importing this registers every codec part by name."""

from vqkv.codecs import (  # noqa: F401
    affine,
    byte_groups,
    component_groups,
    entropy,
    entropy_coded_scalar,
    exact,
    fallback,
    float_bits,
    grid,
    layout,
    merged_layers,
    nonuniform,
    pca,
    pipeline,
    product,
    residual,
    scaling,
    tiles,
    transform,
    trellis_coded_scalar,
)
