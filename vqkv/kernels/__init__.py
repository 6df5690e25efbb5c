"""Hot loops, a room an operation: ``naive`` is what the fast ones are tested against, ``cpu`` is compiled by numba or
plain torch, ``triton`` is for GPUs, all with the same signatures. ``dispatch`` picks; ``view`` has their types."""

# ruff: noqa: F401

from vqkv.kernels.dispatch import (
    affine_encode,
    decode,
    decode_attention,
    grouped_encode,
    pack_codes,
    rans_decode,
    rans_encode,
    rvq_decode,
    rvq_encode,
    rvq_statistics,
    trellis_decode,
    trellis_encode,
    unpack_codes,
    using,
    which,
)
from vqkv.kernels.view import Affine, Coded, Grouped, KernelView, Rope
