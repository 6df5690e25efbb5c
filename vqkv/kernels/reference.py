"""The truth that every fast kernel is tested against: residual VQ by brute force in float64, codes bit by bit,
attention over everything decoded at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.kernels.packed import Affine, Coded, Packed, Rope, Turn
from vqkv.rope import rotate

CHUNK_ELEMENTS = 1 << 20  # differences held at a time, so that memory stays bounded


def rvq_encode(x: Tensor, codebooks: Tensor, beam: int = 1) -> Tensor:
    """Algorithm 1 of the residual VQ paper: nearest code, subtract, repeat.

    x (..., dim) and codebooks (num_quantizers, codebook_size, dim), any float dtype -> codes (..., num_quantizers),
    int64. All arithmetic is in float64; of equally near codes the lowest index wins. With ``beam`` > 1, the
    first of ``rvq_candidates``.
    """
    if beam > 1:
        return rvq_candidates(x, codebooks, beam)[..., 0, :]
    residual = x.reshape(-1, x.shape[-1]).double()
    codes = []
    for codebook in codebooks.double():
        codes.append(nearest(residual, codebook))
        residual = residual - codebook[codes[-1]]
    return torch.stack(codes, dim=-1).view(*x.shape[:-1], len(codebooks))


def rvq_candidates(x: Tensor, codebooks: Tensor, beam: int) -> Tensor:
    """Beam search: keep the ``beam`` sequences of codes with the smallest squared residual, stage by stage extend each
    by every code, and return all that are left, best first: (..., min(beam, codebook_size^num_quantizers), K).

    Of equally good extensions, the one of the better candidate, then the lower code, comes first.
    """
    rows = [_beam_search(row, codebooks.double(), beam) for row in x.reshape(-1, x.shape[-1]).double()]
    return torch.stack(rows).view(*x.shape[:-1], *rows[0].shape)


def _beam_search(x: Tensor, codebooks: Tensor, beam: int) -> Tensor:
    residuals, codes = x.unsqueeze(0), torch.empty(1, 0, dtype=torch.int64, device=x.device)
    for codebook in codebooks:
        distances = (residuals.unsqueeze(1) - codebook).square_().sum(dim=-1)
        best = distances.flatten().sort(stable=True).indices[:beam]
        parents, chosen = best // len(codebook), best % len(codebook)
        residuals = residuals[parents] - codebook[chosen]
        codes = torch.cat([codes[parents], chosen.unsqueeze(-1)], dim=-1)
    return codes


def nearest(residual: Tensor, codebook: Tensor) -> Tensor:
    """Index of the nearest code of every row: residual (rows, dim), codebook (codebook_size, dim), both float64."""
    rows = max(1, CHUNK_ELEMENTS // max(1, codebook.numel()))
    distances = [(part[:, None] - codebook).square_().sum(dim=-1) for part in residual.split(rows)]
    return torch.cat([distance.argmin(dim=-1) for distance in distances])


def rvq_decode(codes: Tensor, codebooks: Tensor) -> Tensor:
    """Sum of the chosen codes: codes (..., num_quantizers) -> float64 (..., dim)."""
    return sum(codebook[codes[..., k]] for k, codebook in enumerate(codebooks.double()))


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., count), integers below 2^bits, -> uint8 (..., ceil(count * bits / 8)): code i is the bits i * bits to
    (i + 1) * bits of its row's string, lowest first; zeros fill the last byte."""
    string = (codes.to(torch.int32).unsqueeze(-1) >> torch.arange(bits, device=codes.device) & 1).flatten(-2)
    octets = F.pad(string, (0, -string.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (octets << torch.arange(8, device=codes.device)).sum(dim=-1).to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of ``pack_codes``: uint8 (..., ceil(count * bits / 8)) -> int64 (..., count)."""
    string = (packed.to(torch.int32).unsqueeze(-1) >> torch.arange(8, device=packed.device) & 1).flatten(-2)
    codes = string[..., : count * bits].unflatten(-1, (count, bits))
    return (codes << torch.arange(bits, device=packed.device)).sum(dim=-1)


def lookup(packed: Tensor, table: Tensor) -> Tensor:
    """Every byte replaced by its row of a table: uint8 (..., size), (256, values) -> (..., size * values)."""
    return table[packed.long()].flatten(-2)


def rvq_encode_packed(x: Tensor, codebooks: Tensor, bits: int, beam: int = 1) -> Tensor:
    """x (..., groups, dim) -> what is stored of it: uint8 (..., ceil(groups * num_quantizers * bits / 8))."""
    return pack_codes(rvq_encode(x, codebooks, beam).flatten(-2), bits)


def grid_encode_packed(x: Tensor, codebooks: Tensor, bits: int) -> Tensor:
    """Pairs x (..., groups, 2) -> the nearest points of a grid (1, points, 2), stored as residual VQ's codes are."""
    return rvq_encode_packed(x, codebooks, bits)


def rvq_statistics(x: Tensor, codes: Tensor, codebooks: Tensor) -> tuple[Tensor, Tensor]:
    """How often each stage chose each code, and the sum of the residuals for which it did: what moving averages need.

    x (rows, dim), codes (rows, num_quantizers), codebooks (num_quantizers, codebook_size, dim) -> float64
    (num_quantizers, codebook_size) and (num_quantizers, codebook_size, dim).
    """
    residual, counts, sums = x.double(), [], []
    for codebook, chosen in zip(codebooks.double(), codes.long().unbind(-1), strict=True):
        counts.append(torch.bincount(chosen, minlength=len(codebook)).double())
        sums.append(torch.zeros_like(codebook).index_add_(0, chosen, residual))
        residual = residual - codebook[chosen]
    return torch.stack(counts), torch.stack(sums)


def affine_encode(x: Tensor, bits: int, group_size: int) -> Affine:
    """x (batch, num_kv_heads, seq_len, head_dim): the ends of every group rounded to fp16, and codes between them."""
    groups = x.float().unflatten(-1, (-1, group_size))
    low, high = (end.clamp(-65504, 65504).half() for end in torch.aminmax(groups, dim=-1))
    start, span = low.float().unsqueeze(-1), (high.float() - low.float()).unsqueeze(-1)
    levels = 2**bits - 1
    codes = ((groups - start) / span.where(span > 0, torch.ones_like(span)) * levels).round().clamp(0, levels)
    return Affine(pack_codes(codes.flatten(-2).to(torch.uint8), bits), low, high, bits)


def decode(packed: Packed, base: Tensor | None = None, turn: Turn | None = None, dtype=torch.float32) -> Tensor:
    """Values (batch, num_kv_heads, seq_len, head_dim) in ``dtype``: decoded, added to ``base`` (a prediction of that
    shape), then rotated by ``turn``; float32 until the end."""
    values = _affine(packed) if isinstance(packed, Affine) else _coded(packed)
    values = values if base is None else base.float() + values
    return (values if turn is None else rotate(values, turn.cos, turn.sin)).to(dtype)


def _affine(packed: Affine) -> Tensor:
    codes = unpack_codes(packed.codes, packed.bits, packed.shape[-1]).unflatten(-1, (-1, packed.group_size))
    low, high = packed.low.float().unsqueeze(-1), packed.high.float().unsqueeze(-1)
    return (low + codes.float() / (2**packed.bits - 1) * (high - low)).flatten(-2)


def _coded(packed: Coded) -> Tensor:
    tables, num_quantizers, _, dim = packed.codebooks.shape
    codes = unpack_codes(packed.codes, packed.bits, packed.groups * num_quantizers)
    codes = codes.unflatten(-1, (packed.groups, num_quantizers))
    values = torch.zeros(*codes.shape[:-1], dim, dtype=torch.float32, device=codes.device)
    for group in range(packed.groups):
        for k in range(num_quantizers):
            values[..., group, :] += packed.codebooks[group % tables, k].float()[codes[..., group, k]]
    if packed.scale is not None:
        scale = packed.scale.float().repeat_interleave(packed.tokens_per_scale, dim=2)[:, :, : packed.shape[2]]
        values *= scale.repeat_interleave(packed.groups // scale.shape[-1], dim=-1).unsqueeze(-1)
    return values.mT.flatten(-2) if packed.strided else values.flatten(-2)


def decode_attention(
    query: Tensor, keys: Packed, values: Packed, scaling: float, rope: Rope | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of query (batch, num_heads, new_tokens, head_dim) to all of ``keys`` and ``values``: float32 output of
    the query's shape, and its log-sum-exp (batch, num_heads, new_tokens), for ``merge``.

    Query head h reads KV head h // (num_heads / num_kv_heads). Nothing is masked. ``rope``: of the keys, which are then
    stored before it; the query comes rotated.
    """
    k, v = decode(keys, turn=rope and rope.turn(keys.shape[2])), decode(values)
    repeats = query.shape[1] // k.shape[1]
    scores = query.float() @ k.repeat_interleave(repeats, dim=1).mT * scaling
    return scores.softmax(dim=-1) @ v.repeat_interleave(repeats, dim=1), scores.logsumexp(dim=-1)


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention to all keys from attention to some of them each: outputs (..., head_dim) and log-sum-exps (...)."""
    outputs, sums = (torch.stack(x) for x in zip(*parts, strict=True))
    total = sums.logsumexp(dim=0)
    return ((sums - total).exp().unsqueeze(-1) * outputs).sum(dim=0), total
