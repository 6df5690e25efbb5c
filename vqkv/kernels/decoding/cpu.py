"""Packed tokens -> values on a CPU: compiled loops read the codes, torch adds up. Plain torch for tensors elsewhere."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.errors import FormatError
from vqkv.kernels.affine import cpu_decode
from vqkv.kernels.decoding.naive import decode_affine
from vqkv.kernels.derived import remembered
from vqkv.kernels.machine import serves
from vqkv.kernels.packed import Affine, Coded, Packed, Turn
from vqkv.kernels.packing.cpu import unpack_codes
from vqkv.kernels.rope import rotate
from vqkv.kernels.rvq.places import places_packed


def decode(packed: Packed, base: Tensor | None = None, turn: Turn | None = None, dtype=torch.float32) -> Tensor:
    """``naive.decode``. Raises ``FormatError`` for strings of another length and, on a CPU, for a code that there is
    not."""
    values = _affine(packed) if isinstance(packed, Affine) else _coded(packed)
    values = values if base is None else values.add_(base)
    return (values if turn is None else rotate(values, turn.cos, turn.sin)).to(dtype)


def _affine(packed: Affine) -> Tensor:
    steps = 2**packed.bits - 1
    levels = torch.arange(steps + 1, dtype=torch.float32, device=packed.codes.device) / steps
    out = torch.empty(*packed.low.shape, packed.group_size, dtype=torch.float32, device=packed.codes.device)
    if not cpu_decode.serves_affine(packed.codes, levels, packed.low, out):
        return decode_affine(packed, unpack_codes(packed.codes, packed.bits, packed.shape[-1]))
    cpu_decode.affine(packed.codes, levels, packed.low, packed.high, out)
    return out.flatten(-2)


def _coded(packed: Coded) -> Tensor:
    num_quantizers, _, dim = packed.codebooks.shape[1:]
    places = _places(packed).view(-1, num_quantizers)
    values = F.embedding_bag(places, _rows(packed.codebooks), mode="sum")
    values = values.view(*packed.shape[:3], packed.groups, dim)
    if packed.scale is not None:
        values *= _by_group(packed)
    return values.mT.flatten(-2) if packed.strided else values.flatten(-2)


def _places(packed: Coded) -> Tensor:
    """int32: for each code, its row among those of all codebooks."""
    tables, num_quantizers, size, _ = packed.codebooks.shape
    count, period = packed.groups * num_quantizers, tables * num_quantizers
    first = torch.arange(period, device=packed.codes.device, dtype=torch.int32) * size
    if packed.codes.dtype is not torch.uint8 or packed.codes.shape[3] != -(-count * packed.bits // 8):
        raise FormatError(f"{count} codes of {packed.bits} bits do not fill rows of {tuple(packed.codes.shape)} bytes")
    if serves(packed.codes):
        return places_packed(packed.codes.flatten(0, 2), packed.bits, first.numpy(), count, size)
    return unpack_codes(packed.codes, packed.bits, count).reshape(-1, period).to(torch.int32) + first


@remembered
def _rows(codebooks: Tensor) -> Tensor:
    return codebooks.float().flatten(0, 2)


def _by_group(packed: Coded) -> Tensor:
    """The scale of every token and group: (batch, num_kv_heads, seq_len, groups or 1, 1)."""
    scale = packed.scale.float()
    if packed.tokens_per_scale > 1:
        scale = scale.repeat_interleave(packed.tokens_per_scale, dim=2)[:, :, : packed.shape[2]]
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(packed.groups // scale.shape[-1], dim=-1)
    return scale.unsqueeze(-1)
