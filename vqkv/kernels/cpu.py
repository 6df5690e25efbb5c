"""Every operation as a CPU runs it: compiled loops and torch."""

# ruff: noqa: F401

from vqkv.kernels.attention.cpu import decode_attention
from vqkv.kernels.entropy.cpu import rans_decode, rans_encode
from vqkv.kernels.formats.cpu import affine_encode, decode, grouped_encode
from vqkv.kernels.packing.cpu import pack_codes, unpack_codes
from vqkv.kernels.rvq.cpu import rvq_decode, rvq_encode, rvq_statistics
from vqkv.kernels.trellis.cpu import trellis_decode, trellis_encode
