"""Random packed tokens of every format, and tensors in the midst of garbage, so that a read beyond them shows."""

import dataclasses
import math

import torch

from vqkv.kernels import Affine, Coded, Grouped, Rope, naive

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARGIN = 32  # elements


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def whole_numbers(*shape: int, seed: int = 0, size: int = 2) -> torch.Tensor:
    """Scores of such vectors are exact in every arithmetic, and often equal."""
    return torch.randint(-size, size + 1, shape, generator=torch.Generator().manual_seed(seed)).float().to(DEVICE)


def amid(x: torch.Tensor, strides=None, value=math.nan) -> torch.Tensor:
    """x, contiguous or of any strides, inside a larger tensor of garbage, between rows that have a gap, too."""
    strides = strides or x.contiguous().stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    value = value if x.dtype.is_floating_point else 255 if x.dtype == torch.uint8 else -1
    around = torch.full((max(0, span) + 2 * MARGIN,), value, dtype=x.dtype, device=x.device)
    return around.as_strided(x.shape, strides, MARGIN).copy_(x)


def apart(x: torch.Tensor, by: int = 3) -> torch.Tensor:
    """x with garbage around it along every axis: strided, and at no aligned address."""
    strides = [1]
    for size in reversed(x.shape[1:]):
        strides.insert(0, strides[0] * (size + 2 * by))
    return amid(x, strides)


def all_amid(packed):
    """A view whose tensors are ``amid`` garbage."""
    if isinstance(packed, Grouped):
        return packed
    tensors = {field.name: getattr(packed, field.name) for field in dataclasses.fields(packed)}
    return dataclasses.replace(packed, **{n: amid(x) for n, x in tensors.items() if isinstance(x, torch.Tensor)})


def affine(head_dim: int, bits: int, group: int, tokens: int = 67, heads: int = 3, batch: int = 2, seed=1) -> Affine:
    return naive.affine_encode(gaussian(batch, heads, tokens, head_dim, seed=seed), bits, group)


def coded(
    groups: int, dim: int, k: int = 2, bits: int = 5, size: int = 0, tables: int = 1, scales: int = 0, every: int = 1,
    strided: bool = False, tokens: int = 67, heads: int = 3, batch: int = 2, seed: int = 1, dtype=torch.float16,
) -> Coded:  # fmt: skip
    """``scales``: of a token; ``every``: tokens that share them."""
    generator, size = torch.Generator().manual_seed(seed), size or 2**bits
    codes = torch.randint(0, size, (batch, heads, tokens, groups * k), generator=generator).to(DEVICE)
    scale = gaussian(batch, heads, -(-tokens // every), scales, seed=seed + 1).abs().half() + 0.1 if scales else None
    books = gaussian(tables, k, size, dim, seed=seed + 2).to(dtype)
    return Coded(naive.pack_codes(codes, bits), books, bits, groups, scale, every, strided)


def mapped(
    sizes: list[list[int]], head_dim: int, offset: bool = True, tokens: int = 67, batch: int = 2, seed=1
) -> Grouped:
    """Components in groups of a byte, of every head ``sizes`` of its own, and a map to channels."""
    heads, components = len(sizes), max(head_dim // 2, *map(sum, sizes))
    used = sorted({size for head in sizes for size in head})
    starts = [[256 * sum(used[: used.index(size)]) for size in head] for head in sizes]
    firsts = [[sum(head[:i]) for i in range(len(head))] for head in sizes]
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, tokens, len(sizes[0]))
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(DEVICE)
    table, scale = gaussian(256 * sum(used), seed=seed), gaussian(heads, components, seed=seed + 1).abs().half()
    matrix = gaussian(heads, components, head_dim, seed=seed + 2) / head_dim**0.5
    mean = gaussian(heads, head_dim, seed=seed + 3).half() if offset else None
    return Grouped(codes, table, torch.tensor([sizes, starts, firsts]).to(DEVICE), scale, matrix, mean)


SCALING = 0.09
ONE_SIZE, BY_HEAD = [[2, 2, 2]] * 3, [[1, 1, 2, 6], [1, 3, 3, 8], [2, 2, 2, 2]]
FORMATS = {
    **{f"int{b} {d}/{g}": (affine, d, b, g) for b in (2, 4, 8) for d, g in ((128, 64), (64, 16), (96, 48))},
    "residual 11 bits": (coded, 2, 32, 3, 11, 0, 1, 1, 1, True),
    "residual 7 bits": (coded, 4, 32, 2, 7, 100, 1, 1),
    "one group": (coded, 1, 32, 2, 4, 0, 1, 1),
    "residual of 8": (coded, 8, 8, 2, 8, 0, 1, 1, 64),
    "product": (coded, 16, 4, 1, 8, 0, 2, 1, 64),
    "grid 256": (coded, 32, 2, 1, 8, 0, 1, 1),
    "grid 64": (coded, 16, 2, 1, 6),
    "grid 16": (coded, 48, 2, 1, 4, 0, 1, 1, 1, True),
    "live one size": (mapped, ONE_SIZE, 32, False),
    "live by head": (mapped, BY_HEAD, 64),
}


def made(name: str, **more):
    make, *arguments = FORMATS[name]
    return [make(*arguments, **more, seed=seed) for seed in (1, 5)]


def rope(head_dim: int, start: int = 0, block: int = 1) -> Rope:
    return Rope(1e4 ** (-torch.arange(head_dim // 2, device=DEVICE) / (head_dim // 2)), start, block)


def as_decoded(twin, query, keys, values, rotation, tolerance):
    """``twin`` attends to packed tokens as the naive one to decoded ones."""
    out, total = twin.decode_attention(amid(query), all_amid(keys), all_amid(values), SCALING, rotation)
    expected, expected_total = naive.decode_attention(query, keys, values, SCALING, rotation)
    assert out.shape == expected.shape and out.dtype == torch.float32 and total.shape == expected_total.shape
    assert (out - expected).norm() <= tolerance * expected.norm()
    torch.testing.assert_close(total, expected_total, rtol=tolerance, atol=2 * tolerance)
