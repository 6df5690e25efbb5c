"""Cases of what a cache does with a layer's keys or values: packing, encoding and reading them back."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from vqkv import kernels
from vqkv.kernels import naive as reference
from vqkv.kernels.view import KernelView
from vqkv.study.bench import peers, plain, roofline
from vqkv.study.bench.case import BenchCase, Sizes, gaussian, ours
from vqkv.study.bench.formats import FORMATS, GROUP, grid, rope

WIDTHS = (11, 4, 2)  # bits of a code
BITS = (2, 4, 8)
GRIDS = (16, 256)
CHECKED = 256  # tokens of a head whose codes are compared


def label(shape) -> str:
    """Of (batch, num_kv_heads, seq_len, head_dim)."""
    return " ".join(f"{name}={n}" for name, n in zip(("batch", "heads", "tokens", "head_dim"), shape, strict=True))


def pack(sizes: Sizes) -> Iterator[BenchCase]:
    """Codes to bits."""
    for bits, codes in _codes(sizes):
        case = BenchCase("pack", f"{bits} bits", label(codes.shape), roofline.pack(codes, bits), str(codes.dtype)[6:])
        expected = reference.pack_codes(codes, bits)
        case.add_both("pack_codes", codes, codes, bits, expected=expected)
        yield case


def unpack(sizes: Sizes) -> Iterator[BenchCase]:
    """Bits to codes."""
    for bits, codes in _codes(sizes):
        packed, count = reference.pack_codes(codes, bits), codes.shape[-1]
        case = BenchCase("unpack", f"{bits} bits", label(codes.shape), roofline.pack(codes, bits), str(codes.dtype)[6:])
        case.add_both("unpack_codes", packed, packed, bits, count, expected=codes)
        yield case


def _codes(sizes: Sizes) -> Iterator[tuple[int, Tensor]]:
    generator = torch.Generator().manual_seed(sizes.seed)
    for bits in WIDTHS:
        dtype = torch.uint8 if bits <= 8 else torch.int16
        yield bits, torch.randint(2**bits, sizes.stored, generator=generator, dtype=dtype).to(sizes.device)


def affine_encode(sizes: Sizes) -> Iterator[BenchCase]:
    """Values to int2, int4, int8. The error is that of what is stored."""
    x, group = gaussian(*sizes.stored, seed=sizes.seed, device=sizes.device), min(GROUP, sizes.head_dim)
    for bits in BITS:
        work = roofline.affine_encode(x, reference.affine_encode(x, bits, group))
        case = BenchCase("affine_encode", f"int{bits}", label(x.shape), work)
        case.add_both("affine_encode", x, x, bits, group, expected=x, read=reference.decode)
        peers.add(peers.QUANTO, peers.quanto_encode, case, x, bits, group)
        peers.add(peers.HQQ, peers.hqq_encode, case, x, bits, group)
        yield case


def affine_decode(sizes: Sizes) -> Iterator[BenchCase]:
    """int2, int4, int8 to values. The error is that of what is stored."""
    x, group = gaussian(*sizes.stored, seed=sizes.seed, device=sizes.device), min(GROUP, sizes.head_dim)
    for bits in BITS:
        packed = reference.affine_encode(x, bits, group)
        case = BenchCase("affine_decode", f"int{bits}", label(x.shape), roofline.decode(packed))
        case.add_both("decode", packed.codes, packed, expected=x)
        peers.add(peers.QUANTO, peers.quanto_decode, case, x, bits, group)
        peers.add(peers.HQQ, peers.hqq_decode, case, x, bits, group)
        yield case


def grid_encode(sizes: Sizes) -> Iterator[BenchCase]:
    """Pairs of values to the nearest point of a Gaussian grid."""
    pairs = gaussian(*sizes.stored, seed=sizes.seed, device=sizes.device).unflatten(-1, (-1, 2))
    for size in GRIDS:
        points, bits = grid(size, sizes.device), (size - 1).bit_length()
        work = roofline.encode(pairs.reshape(-1, 2), points, code_bytes=bits / 8)
        case = BenchCase("grid_encode", f"grid {size}", label(sizes.stored), work)
        expected = reference.rvq_encode_packed(pairs[:, :1, :CHECKED], points, bits)
        arguments = (pairs, points, bits)
        case.add_both("rvq_encode_packed", pairs, *arguments, expected=expected, read=lambda x: x[:, :1, :CHECKED])
        yield case


def product_encode(sizes: Sizes) -> Iterator[BenchCase]:
    """Eight values to two codes of 256, each of four values."""
    x = gaussian(*sizes.stored, seed=sizes.seed, device=sizes.device)
    rows, codebooks = x.reshape(-1, 8), gaussian(2, 256, 4, seed=sizes.seed + 1, device=sizes.device)
    work = roofline.encode(rows.reshape(-1, 4), codebooks[:1], code_bytes=1)
    case = BenchCase("product_encode", "product 256x4", label(x.shape), work)
    pieces = [piece.contiguous() for piece in rows.split(4, dim=-1)]
    expected = torch.cat([reference.rvq_encode(p[:CHECKED], book[None]) for p, book in zip(pieces, codebooks)], dim=-1)
    case.add(ours("rvq_encode", x), partial(_pieces, kernels.rvq_encode, pieces, codebooks), expected)
    case.add("plain torch", partial(_pieces, plain.rvq_encode, pieces, codebooks), expected)
    peers.add(peers.FAISS, peers.faiss_product_encode, case, rows, codebooks, expected)
    yield case


def _pieces(encode: Callable, pieces: list[Tensor], codebooks: Tensor) -> Tensor:
    """A byte a piece: (rows, pieces)."""
    codes = [encode(piece, book.unsqueeze(0)) for piece, book in zip(pieces, codebooks, strict=True)]
    return torch.cat(codes, dim=-1).to(torch.uint8)


def coded_decode(family: str, sizes: Sizes) -> Iterator[BenchCase]:
    """Codes of this family of formats (grid, product, residual) to values, with the scale that it has."""
    for name in (name for name in FORMATS if name.startswith(family)):
        packed = FORMATS[name](sizes.stored, sizes.device)
        case = _decode(f"{family}_decode", name, packed)
        if family == "product":  # theirs has no scale
            codes = reference.unpack_codes(packed.codes, packed.bits, packed.groups).reshape(-1, 2)
            expected = reference.decode(replace(packed, scale=None)).view(-1, 8)
            books = packed.codebooks[:, 0].float()
            peers.add(peers.FAISS, peers.faiss_product_decode, case, codes, books, expected)
        yield case


def decode_and(what: str, sizes: Sizes) -> Iterator[BenchCase]:
    """Decoding and what follows it: ``add`` to a prediction, or ``rope``."""
    base = gaussian(*sizes.stored, seed=sizes.seed, device=sizes.device)
    then = base.add if what == "add" else rope(sizes.head_dim, sizes.device).turned
    for name in ("int4", "residual 8x2048 d=32"):
        packed = FORMATS[name](sizes.stored, sizes.device)
        work = roofline.decode(packed, base=base if what == "add" else None, turned=what == "rope")
        case, expected = BenchCase(f"decode_{what}", name, label(packed.shape), work), then(reference.decode(packed))
        case.add(ours("decode", packed.codes), partial(_and, then, kernels.decode, packed), expected)
        case.add("plain torch", partial(_and, then, plain.decode, packed), expected)
        yield case


def _and(then: Callable, decode: Callable, packed: KernelView) -> Tensor:
    return then(decode(packed))


def _decode(operation: str, name: str, packed: KernelView) -> BenchCase:
    case = BenchCase(operation, name, label(packed.shape), roofline.decode(packed))
    case.add_both("decode", packed.codes, packed, expected=reference.decode(packed))
    return case


OPERATIONS = {
    "pack": pack,
    "unpack": unpack,
    "affine_encode": affine_encode,
    "affine_decode": affine_decode,
    "grid_encode": grid_encode,
    "grid_decode": partial(coded_decode, "grid"),
    "product_encode": product_encode,
    "product_decode": partial(coded_decode, "product"),
    "residual_decode": partial(coded_decode, "residual"),
    "decode_add": partial(decode_and, "add"),
    "decode_rope": partial(decode_and, "rope"),
}
