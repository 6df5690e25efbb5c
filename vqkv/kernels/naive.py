"""Every operation in its naive form: the truth that the fast ones are tested against."""

# ruff: noqa: F401

from vqkv.kernels.attention.naive import decode_attention
from vqkv.kernels.entropy.naive import rans_decode, rans_encode
from vqkv.kernels.formats.naive import affine_encode, decode, grouped_encode
from vqkv.kernels.packing.naive import pack_codes, unpack_codes
from vqkv.kernels.rvq.naive import rvq_decode, rvq_encode, rvq_statistics
from vqkv.kernels.trellis.naive import trellis_decode, trellis_encode
