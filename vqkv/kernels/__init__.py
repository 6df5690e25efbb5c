"""Hot loops. ``reference`` is the truth; ``cpu``, ``fused``, ``bits`` and ``pieces`` are its fast twins on a CPU and
``gpu`` those in Triton, all with the same signatures; ``dispatch`` picks; ``packed`` says what they are told."""

from vqkv.kernels.dispatch import (
    affine_encode,
    by_byte,
    decode,
    decode_attention,
    grid_encode_packed,
    lookup,
    pack_codes,
    rvq_candidates,
    rvq_decode,
    rvq_encode,
    rvq_encode_packed,
    rvq_statistics,
    unpack_codes,
    using,
    which,
    which_attention,
)
from vqkv.kernels.packed import Affine, Coded, Packed, Rope, Turn

__all__ = [
    "Affine",
    "Coded",
    "Packed",
    "Rope",
    "Turn",
    "affine_encode",
    "by_byte",
    "decode",
    "decode_attention",
    "grid_encode_packed",
    "lookup",
    "pack_codes",
    "rvq_candidates",
    "rvq_decode",
    "rvq_encode",
    "rvq_encode_packed",
    "rvq_statistics",
    "unpack_codes",
    "using",
    "which",
    "which_attention",
]
