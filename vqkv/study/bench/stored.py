"""Cases of what a cache does with a layer's keys or values: packing, encoding, reading them back, attention to them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv import kernels
from vqkv.cache.meter import tensor_bytes
from vqkv.codecs.grid import gaussian_grids
from vqkv.kernels import naive as reference
from vqkv.kernels.view import KernelView, Rope
from vqkv.study.bench import peers, roofline
from vqkv.study.bench.case import Operation, Problem, Sizes, gaussian, ours, plain_encode
from vqkv.study.bench.formats import FORMATS, GROUP, keys_and_values
from vqkv.study.bench.roofline import Demand

WIDTHS = (11, 4, 2)  # bits of a code
BITS = (2, 4, 8)
GRIDS = (16, 256)
CHECKED = 256  # tokens of a head whose codes are compared
ATTENTION = "decode_attention"
SDPA = "torch SDPA"
DECODED = "decode, then SDPA"
ATTENDED = [name for name in FORMATS if name != "grid 16"]


def label(shape) -> str:
    """Write the shape (batch, num_kv_heads, seq_len, head_dim)."""
    return " ".join(f"{name}={n}" for name, n in zip(("batch", "heads", "tokens", "head_dim"), shape, strict=True))


def layer_keys(sizes: Sizes) -> Tensor:
    """Draw Gaussian keys of one layer."""
    return gaussian(*sizes.stored, seed=sizes.seed, device=sizes.device)


def packing(operation: str, sizes: Sizes) -> Iterator[Problem]:
    """Time codes to bits, or back."""
    generator = torch.Generator().manual_seed(sizes.seed)
    for bits in WIDTHS:
        dtype = torch.uint8 if bits <= 8 else torch.int16
        codes = torch.randint(2**bits, sizes.stored, generator=generator, dtype=dtype).to(sizes.device)
        packed = reference.pack_codes(codes, bits)
        work = Demand(0, codes.nbytes + packed.nbytes, codes.numel())
        problem = Problem(operation, f"{bits} bits", label(codes.shape), work, str(codes.dtype)[6:])
        if operation == "pack":
            problem.add_ours("pack_codes", codes, codes, bits, expected=packed)
        else:
            problem.add_ours("unpack_codes", packed, packed, bits, codes.shape[-1], expected=codes)
        yield problem


def affine(direction: str, sizes: Sizes) -> Iterator[Problem]:
    """Time values to int2, int4, int8, or back. The error is that of what is stored."""
    x, group = layer_keys(sizes), min(GROUP, sizes.head_dim)
    for bits in BITS:
        packed = reference.affine_encode(x, bits, group)
        work = Demand(4 * x.numel(), x.nbytes + tensor_bytes(packed), x.numel())  # two ends, offset and span
        work = work if direction == "encode" else roofline.decode(packed)
        problem = Problem(f"affine_{direction}", f"int{bits}", label(x.shape), work)
        if direction == "encode":
            problem.add_ours("affine_encode", x, x, bits, group, expected=x, read=reference.decode)
        else:
            problem.add_ours("decode", packed.codes, packed, expected=x)
        problem.add_peer("quanto", partial(peers.quanto, direction, x, bits, group), x)
        problem.add_peer("hqq", partial(peers.hqq, direction, x, bits, group), x)
        yield problem


def grid_encode(sizes: Sizes) -> Iterator[Problem]:
    """Time pairs of values to the nearest point of a Gaussian grid."""
    pairs = layer_keys(sizes).unflatten(-1, (-1, 2))
    for size in GRIDS:
        points, bits = gaussian_grids()[size][0].half().unsqueeze(0).to(sizes.device), (size - 1).bit_length()
        work = roofline.encode(pairs.reshape(-1, 2), points, code_bytes=bits / 8)
        problem = Problem("grid_encode", f"grid {size}", label(sizes.stored), work)
        expected = reference.pack_codes(reference.rvq_encode(pairs[:, :1, :CHECKED], points).flatten(-2), bits)
        mine = partial(_pairs, kernels, kernels.rvq_encode, pairs, points, bits)
        plain = partial(_pairs, reference, plain_encode, pairs, points.float(), bits)
        problem.add(ours("rvq_encode", pairs), mine, expected, lambda x: x[:, :1, :CHECKED])
        problem.add("plain torch", plain, expected, lambda x: x[:, :1, :CHECKED])
        yield problem


def _pairs(twin, encode: Callable, pairs: Tensor, points: Tensor, bits: int) -> Tensor:
    """Return codes of a token's pairs as they are stored, packed by the functions of ``twin``."""
    codes = encode(pairs.reshape(-1, pairs.shape[-1]), points)
    return twin.pack_codes(codes.view(pairs.shape[:-1]), bits)


def product_encode(sizes: Sizes) -> Iterator[Problem]:
    """Encode eight values to two codes of 256, each of four values."""
    rows = layer_keys(sizes).reshape(-1, 8)
    codebooks = gaussian(2, 256, 4, seed=sizes.seed + 1, device=sizes.device)
    work = roofline.encode(rows.reshape(-1, 4), codebooks[:1], code_bytes=1)
    problem = Problem("product_encode", "product 256x4", label(sizes.stored), work)
    pieces = [piece.contiguous() for piece in rows.split(4, dim=-1)]
    expected = _pieces(reference.rvq_encode, [piece[:CHECKED] for piece in pieces], codebooks)
    problem.add(ours("rvq_encode", rows), partial(_pieces, kernels.rvq_encode, pieces, codebooks), expected)
    problem.add("plain torch", partial(_pieces, plain_encode, pieces, codebooks), expected)
    problem.add_peer("faiss", partial(peers.faiss_encode, codebooks, rows, product=True), expected)
    yield problem


def _pieces(encode: Callable, pieces: list[Tensor], codebooks: Tensor) -> Tensor:
    """Return a byte a piece: (rows, pieces)."""
    codes = [encode(piece, book.unsqueeze(0)) for piece, book in zip(pieces, codebooks, strict=True)]
    return torch.cat(codes, dim=-1).to(torch.uint8)


def coded_decode(family: str, sizes: Sizes) -> Iterator[Problem]:
    """Time codes of this family of formats (grid, product, residual) to values, with the scale that it has."""
    for name in (name for name in FORMATS if name.startswith(family)):
        packed: Any = FORMATS[name](sizes.stored, sizes.device)
        problem = Problem(f"{family}_decode", name, label(packed.shape), roofline.decode(packed))
        problem.add_ours("decode", packed.codes, packed, expected=reference.decode(packed))
        if family == "product":  # theirs has no scale
            codes = reference.unpack_codes(packed.codes, packed.bits, packed.groups).reshape(-1, 2)
            expected = reference.decode(replace(packed, scale=None)).view(-1, 8)
            books = packed.codebooks[:, 0].float()
            problem.add_peer("faiss", partial(peers.faiss_decode, books, codes, product=True), expected)
        yield problem


def grouped_encode(sizes: Sizes) -> Iterator[Problem]:
    """Time components to the bytes of ``live``: of each group the nearest of 256 vectors."""
    view: Any = FORMATS["live 2.25"](sizes.stored, sizes.device)
    like = replace(view, matrix=None, offset=None)
    x = gaussian(*like.shape, seed=sizes.seed, device=sizes.device) * like.scale.float().unsqueeze(1)
    work = Demand(2 * 256 * x.numel(), x.nbytes + like.codes.nbytes, x.numel(), exact=True)
    problem = Problem("grouped_encode", "live 2.25", label(x.shape), work)
    expected = reference.grouped_encode(x[:, :, :CHECKED], like)
    call = partial(kernels.grouped_encode, x, like)
    problem.add(ours("grouped_encode", x), call, expected, lambda codes: codes[:, :, :CHECKED])
    yield problem


def attention(sizes: Sizes) -> Iterator[Problem]:
    """Time one new token of each sequence against its cache, uncompressed and in every format."""
    for batch, context in sizes.runs:
        heads, kv_heads, head_dim = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
        shape = (batch, kv_heads, context, head_dim)
        query = gaussian(batch, heads, 1, head_dim, seed=sizes.seed, device=sizes.device).half()
        where = f"batch={batch} context={context} heads={heads}/{kv_heads} head_dim={head_dim}"
        keys, values = (gaussian(*shape, seed=seed, device=sizes.device) for seed in (1, 2))
        expected = sdpa(query.float(), keys, values)
        for name, dtype in (("fp16", torch.float16), ("fp32", torch.float32)):
            q, k, v = (x.to(dtype) for x in (query, keys, values))
            problem = Problem(ATTENTION, name, where, roofline.attention(q, k, v), str(dtype)[6:])
            problem.add(SDPA, partial(sdpa, q, k, v), expected)
            yield problem
        for name in ATTENDED:
            yield _packed(name, query, shape, where)


def _packed(name: str, query: Tensor, shape: tuple, where: str) -> Problem:
    keys, values, rope = keys_and_values(name, shape, str(query.device))
    work = roofline.attention(query, keys, values, rope is not None and rope.block == 1)
    problem, scaling = Problem(ATTENTION, name, where, work, "float16"), query.shape[-1] ** -0.5
    expected, _ = reference.decode_attention(query, keys, values, scaling, rope)
    run = partial(kernels.decode_attention, query, keys, values, scaling, rope)
    problem.add(ours(ATTENTION, query, query, keys, values, 1.0, rope), run, expected, itemgetter(0))
    problem.add(DECODED, partial(decoded, query, keys, values, rope), expected)
    return problem


def sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend with query (batch, heads, 1, head_dim) by torch; its heads are a KV head's queries: faster than GQA."""
    batch, heads, _, head_dim = query.shape
    grouped = query.view(batch, keys.shape[1], -1, head_dim)
    return F.scaled_dot_product_attention(grouped, keys, values).reshape(batch, heads, 1, head_dim)


def decoded(query: Tensor, keys: KernelView, values: KernelView, rope: Rope | None) -> Tensor:
    """Read a cache without such a kernel: decode to the model's dtype, then attend."""
    k, v = kernels.decode(keys), kernels.decode(values)
    k = k if rope is None else rope.rotated(k)
    return sdpa(query, k.to(query.dtype), v.to(query.dtype))


OPERATIONS: dict[str, Operation] = {
    "pack": partial(packing, "pack"),
    "unpack": partial(packing, "unpack"),
    "affine_encode": partial(affine, "encode"),
    "affine_decode": partial(affine, "decode"),
    "grid_encode": grid_encode,
    "grid_decode": partial(coded_decode, "grid"),
    "product_encode": product_encode,
    "product_decode": partial(coded_decode, "product"),
    "residual_decode": partial(coded_decode, "residual"),
    "grouped_encode": grouped_encode,
    ATTENTION: attention,
}
