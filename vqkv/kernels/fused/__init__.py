"""Loops over values that torch would need several passes over memory for, as machine code for a CPU (see ``jit``)."""

from vqkv.kernels.fused import affine, affine_decode, decode, encode, jit

__all__ = ["affine", "affine_decode", "decode", "encode", "jit"]
