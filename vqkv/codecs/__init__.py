"""A tensor -> packed bytes -> a tensor. Knows no model. Importing this registers every codec part by name."""

from vqkv.codecs import (  # noqa: F401
    affine,
    entropy,
    entropy_coded_scalar,
    exact,
    fallback,
    grid,
    layout,
    nonuniform,
    pca,
    pipeline,
    product,
    residual,
    scaling,
    transform,
    trellis_coded_scalar,
)
