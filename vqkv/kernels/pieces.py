"""Packed tensors on a CPU: attention reads them piece by piece, while what is decoded of a piece is in the cache.

Plain torch that runs anywhere, but for what ``fused`` has for affine codes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from vqkv.errors import FormatError
from vqkv.kernels import cpu, fused, reference
from vqkv.kernels.bits import pack_codes, unpack_codes
from vqkv.kernels.packed import Affine, Coded, Packed, Rope, Turn
from vqkv.rope import rotate

PIECE = 1 << 18  # values of keys decoded at a time: 1 MB

_flat = WeakTensorKeyDictionary()  # codebooks, or what they are a view of -> (version and place, codes as fp32 rows)


def affine_encode(x: Tensor, bits: int, group_size: int) -> Affine:
    """Twin of ``reference.affine_encode``."""
    groups = x.detach().unflatten(-1, (-1, group_size))
    found = fused.affine.pack_between_ends(groups, bits) if fused.affine.packs(groups, bits) else None
    return Affine(*found, bits) if found else reference.affine_encode(x, bits, group_size)


def rvq_encode_packed(x: Tensor, codebooks: Tensor, bits: int, beam: int = 1) -> Tensor:
    """Twin of ``reference.rvq_encode_packed``."""
    return pack_codes(cpu.rvq_encode(x, codebooks, beam).flatten(-2), bits)


def grid_encode_packed(x: Tensor, codebooks: Tensor, bits: int) -> Tensor:
    """Twin of ``reference.grid_encode_packed``."""
    return rvq_encode_packed(x, codebooks, bits)


def decode(packed: Packed, base: Tensor | None = None, turn: Turn | None = None, dtype=torch.float32) -> Tensor:
    """Twin of ``reference.decode``."""
    values = _affine(packed) if isinstance(packed, Affine) else _coded(packed)
    values = values if base is None else values.add_(base)
    return (values if turn is None else rotate(values, turn.cos, turn.sin)).to(dtype)


def decode_attention(
    query: Tensor, keys: Packed, values: Packed, scaling: float, rope: Rope | None = None
) -> tuple[Tensor, Tensor]:
    """Twin of ``reference.decode_attention`` that holds no more than a piece of keys and values decoded."""
    grouped = query.float().reshape(*keys.shape[:2], -1, keys.shape[3]) * scaling
    parts = []
    for start, stop in _spans(keys, values):
        turn = None if rope is None else rope.after(start).turn(stop - start)
        k, v = decode(keys.tokens(start, stop), turn=turn), decode(values.tokens(start, stop))
        scores = grouped @ k.mT
        parts.append((scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)))
    out, total = reference.merge(parts)
    return out.view(query.shape), total.view(query.shape[:3])


def _spans(keys: Packed, values: Packed) -> list[tuple[int, int]]:
    batch, num_kv_heads, seq_len, head_dim = keys.shape
    whole = max([x.tokens_per_scale for x in (keys, values) if isinstance(x, Coded)], default=1)
    step = max(1, PIECE // (batch * num_kv_heads * head_dim * whole)) * whole
    return [(start, min(start + step, seq_len)) for start in range(0, seq_len, step)]


def _affine(packed: Affine) -> Tensor:
    steps = 2**packed.bits - 1
    levels = torch.arange(steps + 1, dtype=torch.float32, device=packed.codes.device) / steps
    out = torch.empty(*packed.low.shape, packed.group_size, dtype=torch.float32, device=packed.codes.device)
    if fused.affine_decode.serves_affine(packed.codes, levels, packed.low, out):
        fused.affine_decode.affine(packed.codes, levels, packed.low, packed.high, out)
        return out.flatten(-2)
    codes = unpack_codes(packed.codes, packed.bits, packed.shape[-1]).unflatten(-1, (-1, packed.group_size))
    low, high = packed.low.float().unsqueeze(-1), packed.high.float().unsqueeze(-1)
    return codes.float().div_(steps).mul_(high - low).add_(low).flatten(-2)


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
    if fused.jit.serves(packed.codes):
        strings = packed.codes.reshape(-1, packed.codes.shape[3])
        found = fused.decode.places_packed(strings, packed.bits, first.numpy(), count, size)
        if found is None:
            raise FormatError(f"a code is not below codebook_size {size}: altered payload")
        return found
    codes = unpack_codes(packed.codes, packed.bits, count)
    return codes.reshape(-1, period).to(torch.int32) + first


def _rows(codebooks: Tensor) -> Tensor:
    if codebooks.is_inference():
        return codebooks.float().flatten(0, 2)
    owner = codebooks if codebooks._base is None else codebooks._base  # a codec makes a new view for every payload
    now = (codebooks._version, codebooks.storage_offset(), codebooks.shape, codebooks.stride())
    known, rows = _flat.get(owner, (None, None))
    if known != now:
        rows = codebooks.detach().float().flatten(0, 2)
        _flat[owner] = (now, rows)
    return rows


def _by_group(packed: Coded) -> Tensor:
    """The scale of every token and group: (batch, num_kv_heads, seq_len, groups or 1, 1)."""
    scale = packed.scale.float()
    if packed.tokens_per_scale > 1:
        scale = scale.repeat_interleave(packed.tokens_per_scale, dim=2)[:, :, : packed.shape[2]]
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(packed.groups // scale.shape[-1], dim=-1)
    return scale.unsqueeze(-1)
