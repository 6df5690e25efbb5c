"""Residual VQ encoding (Algorithm 1 of the residual VQ paper), all stages in one launch, packed in registers.

A stage's nearest code is found in two steps. Tensor cores score fp16 copies of all codes (half the squared norm minus
the dot product), and of every ``together`` neighbouring codes only the smallest score is kept: one minimum a score; an
index kept beside it costs two instructions more. Then the codes of the best such group are compared in fp32.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from vqkv.kernels import bits as bits_kernels
from vqkv.kernels.gpu.specimen import Specimen

# To be merged into tiles.py. block_m: sub-vectors (with beam search, candidates) of a program; block_c: codes of a
# tile; fold: scores of a tile that become one, up to block_c / 8, as each thread has all of those; depth: tiles over
# which the smallest is taken. A group is fold * depth codes. unroll: tiles between two barriers, 1, 2 or 4 (beam:
# 1). num_stages: how many times as many tiles are on their way to shared memory or in it.
TILES = {
    "encode": {"block_m": 256, "block_c": 64, "fold": 8, "depth": 1, "unroll": 4, "num_warps": 16, "num_stages": 3},
    "encode_few": {"block_m": 64, "block_c": 64, "fold": 8, "depth": 1, "unroll": 2, "num_warps": 4, "num_stages": 3},
    "beam": {"block_m": 64, "block_c": 64, "fold": 2, "depth": 8, "unroll": 1, "num_warps": 4, "num_stages": 3},
}
FEW = 256 * 132  # sub-vectors: below it, smaller programs leave fewer of a large GPU's multiprocessors idle
MAX_WORDS = 32  # 32-bit words of a row's string that fit in registers; longer ones are packed by a second kernel
LARGEST = 4  # binary exponent of a stage's largest code in fp16: residuals 4,096 times as large fit, and codes 2^-18
NO_CODE = tl.constexpr(1 << 30)
HALF_MAX = tl.constexpr(65504.0)
WIDE_BITS = 16  # of a code while beam search carries it


@dataclass(frozen=True)
class Tables:
    """Codebooks rearranged for scoring: code ((chunk * block_c / fold + column) * depth + tile) * fold + i lies in tile
    ``tile`` of the chunk at i * block_c / fold + column, so that neighbouring codes fold into one column."""

    codebooks: Tensor  # (K, C, dim), contiguous
    scaled: Tensor  # fp16 (K, tiles, block_c, dim padded): codes times their stage's scale
    norms: Tensor  # fp32 (K, tiles, block_c): half the squared norms of ``scaled``; infinite where there is no code
    scales: Tensor  # fp32 (K,): powers of two
    depth: int


_tables = WeakTensorKeyDictionary()  # codebooks -> (version, {(block_c, fold, depth): Tables})


def rvq_encode(x: Tensor, codebooks: Tensor, beam: int = 1) -> Tensor:
    """Triton twin of ``reference.rvq_encode``: x (..., dim), any strides -> codes (..., num_quantizers), int64.

    Scores have fp16 operands and fp32 sums, so nearly equal codes may change places; equal ones go to the lowest
    index. A row with NaN or infinite values gets some codes. Numbers whose squares leave fp32 are not told apart.
    """
    out = torch.empty(*x.shape[:-1], len(codebooks), dtype=torch.int64, device=x.device)
    _launch(x.unsqueeze(-2), codebooks, out, beam, bits=WIDE_BITS, words=0)
    return out


def rvq_encode_packed(x: Tensor, codebooks: Tensor, bits: int, beam: int = 1) -> Tensor:
    """Triton twin of ``reference.rvq_encode_packed``: x (..., groups, dim), any strides -> uint8 (..., ceil(groups *
    num_quantizers * bits / 8))."""
    string = x.shape[-2] * len(codebooks) * bits
    words = _words(string)
    tile = TILES["encode" if beam == 1 else "beam"]
    padded = triton.next_power_of_2(x.shape[-2]) * triton.next_power_of_2(beam)
    if words > MAX_WORDS or padded > tile["block_m"]:
        return bits_kernels.pack_codes(rvq_encode(x, codebooks, beam).flatten(-2), bits)
    out = torch.empty(*x.shape[:-2], -(-string // 8), dtype=torch.uint8, device=x.device)
    _launch(x, codebooks, out, beam, bits, words)
    return out


def prepare(codebooks: Tensor, layout: tuple[int, int, int]) -> Tables:
    """The tables of ``codebooks`` for a tile's (block_c, fold, depth), kept as long as the tensor lives and is not
    written to."""
    if codebooks.is_inference():
        return _build(codebooks, *layout)  # has no version counter to notice writes by
    version, tables = _tables.get(codebooks, (None, {}))
    tables = tables if version == codebooks._version else {}
    if layout not in tables:
        tables[layout] = _build(codebooks.detach(), *layout)
    _tables[codebooks] = (codebooks._version, tables)
    return tables[layout]


def _build(codebooks: Tensor, block_c: int, fold: int, depth: int) -> Tables:
    num_quantizers, size, dim = codebooks.shape
    tiles = triton.next_power_of_2(-(-size // block_c))
    depth, multiple = min(depth, tiles), min(max(depth, 4), tiles)
    dim_padded, missing = max(16, triton.next_power_of_2(dim)), -size % (block_c * multiple)
    exponents = torch.frexp(codebooks.float().abs().amax(dim=(1, 2))).exponent
    scales = torch.ldexp(torch.ones(num_quantizers, device=codebooks.device), (LARGEST - exponents).clamp(-60, 60))
    scaled = (codebooks.float() * scales[:, None, None]).clamp(-65504, 65504).half()
    norms = scaled.float().square().sum(dim=-1) / 2  # of the rounded codes: their errors then mostly cancel

    def rearrange(codes: Tensor) -> Tensor:
        parts = codes.reshape(num_quantizers, -1, block_c // fold, depth, fold, codes.shape[-1])
        return parts.permute(0, 1, 3, 4, 2, 5).reshape(num_quantizers, -1, block_c, codes.shape[-1]).contiguous()

    return Tables(
        codebooks=codebooks.contiguous(),
        scaled=rearrange(F.pad(scaled, (0, dim_padded - dim, 0, missing))),
        norms=rearrange(F.pad(norms, (0, missing), value=torch.inf).unsqueeze(-1)).squeeze(-1),
        scales=scales,
        depth=depth,
    )


def _launch(x: Tensor, codebooks: Tensor, out: Tensor, beam: int, bits: int, words: int) -> None:
    """Fill ``out`` for x (..., groups, dim): with packed codes if ``words``, else with plain ones."""
    groups, dim = x.shape[-2:]
    sizes, strides = _collapse(x)
    if len(sizes) > 3:
        x = x.contiguous()
        sizes, strides = _collapse(x)
    sizes, strides = [1] * (3 - len(sizes)) + sizes, [0] * (3 - len(strides)) + strides
    rows, padded = sizes[0] * sizes[1] * sizes[2], triton.next_power_of_2(groups)
    if rows * groups == 0 or out.shape[-1] == 0:
        return
    few = rows * padded < FEW and padded <= TILES["encode_few"]["block_m"]
    tile = TILES["beam" if beam > 1 else "encode_few" if few else "encode"]
    tables = prepare(codebooks, tuple(tile[key] for key in ("block_c", "fold", "depth")))
    num_quantizers, tiles, block_c, dim_padded = tables.scaled.shape
    candidates = triton.next_power_of_2(beam)
    if candidates > tile["block_m"]:
        raise ValueError(f"A beam of {beam} has more candidates than a program's {tile['block_m']} rows")
    kernel, search = (_encode, {}) if beam == 1 else (_encode_beam, {"BEAM": beam, "BEAM_PADDED": candidates})
    per_program = tile["block_m"] // (padded * candidates)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        kernel[(triton.cdiv(rows, per_program),)](
            x, tables.scaled, tables.norms, tables.scales, tables.codebooks, out,
            rows, sizes[1], sizes[2], *strides, *x.stride()[-2:],
            groups, num_quantizers, codebooks.shape[1], tiles, bits, out.shape[-1],
            ROWS=per_program, GROUPS_PADDED=padded, DIM=dim, DIM_PADDED=dim_padded, BLOCK_C=block_c,
            FOLD=tile["fold"], DEPTH=tables.depth, UNROLL=math.gcd(tile["unroll"], tiles),
            STAGES=tile["num_stages"], PACKED=words > 0, GROUP_WORDS=_words(num_quantizers * bits), WORDS=words,
            num_warps=tile["num_warps"], num_stages=1, **search,
        )  # fmt: skip


def _words(bits: int) -> int:
    """How many 32-bit words a string of so many bits gets in a kernel, where sizes are powers of two."""
    return triton.next_power_of_2(-(-bits // 32))


def _collapse(x: Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides of all but the last two dimensions, those that can be walked as one merged."""
    sizes, strides = [], []
    for size, stride in zip(x.shape[:-2], x.stride()[:-2]):
        if size == 1:
            continue
        if sizes and strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes, strides = [*sizes, size], [*strides, stride]
    return sizes, strides


@triton.jit
def _load(x, row, group, rows, groups, size1, size2, stride0, stride1, stride2, stride_g, stride_d, DIM, DIM_PADDED):
    """Sub-vectors, fp32 [M, DIM_PADDED]: ``row`` counts through sizes (.., size1, size2), ``group`` is in the row."""
    d = tl.arange(0, DIM_PADDED)
    offset = (row // (size1 * size2)).to(tl.int64) * stride0 + group.to(tl.int64) * stride_g
    offset += (row // size2 % size1).to(tl.int64) * stride1 + (row % size2).to(tl.int64) * stride2
    mask = ((row < rows) & (group < groups))[:, None] & (d < DIM)[None, :]
    return tl.load(x + offset[:, None] + d.to(tl.int64)[None, :] * stride_d, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _code_vectors(codebooks, k, code, size, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """The codes themselves, fp32 [M, DIM_PADDED]."""
    d = tl.arange(0, DIM_PADDED)
    offset = (k * size + code) * DIM
    return tl.load(codebooks + offset[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _operand(residual, scale):
    """fp16 for the tensor cores; numbers that are none become 0, so that every comparison has an answer."""
    scaled = tl.minimum(tl.maximum(tl.where(residual == residual, residual, 0.0) * scale, -HALF_MAX), HALF_MAX)
    return scaled.to(tl.float16)


@triton.jit
def _scores(operand, scaled, norms, tile, BLOCK_C: tl.constexpr, DIM_PADDED: tl.constexpr, FOLD: tl.constexpr):
    """Half squared distance minus half the residual's energy, the smallest of each FOLD codes of a tile:
    [M, BLOCK_C / FOLD]."""
    c = tl.arange(0, BLOCK_C)
    codes = tl.load(scaled + (tile * BLOCK_C + c)[:, None] * DIM_PADDED + tl.arange(0, DIM_PADDED)[None, :])
    norm = tl.load(norms + tile * BLOCK_C + c)
    scores = norm[None, :] - tl.dot(operand, tl.trans(codes))
    if FOLD > 1:
        scores = tl.min(tl.reshape(scores, [operand.shape[0], FOLD, BLOCK_C // FOLD]), axis=1)
    return scores


@triton.jit
def _nearest_group(operand, scaled, norms, first_tile, tiles, BLOCK_C: tl.constexpr, DIM_PADDED: tl.constexpr,
                   FOLD: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """The group of FOLD codes that has the smallest score, the first of equals: int32 [M]."""
    M: tl.constexpr = operand.shape[0]
    COLUMNS: tl.constexpr = BLOCK_C // FOLD
    best = tl.full([M, COLUMNS], float("inf"), tl.float32)
    best_tile = tl.zeros([M, COLUMNS], tl.int32)
    for turn in tl.range(0, tiles // UNROLL, num_stages=STAGES):
        for i in tl.static_range(UNROLL):
            tile = turn * UNROLL + i
            scores = _scores(operand, scaled, norms, first_tile + tile, BLOCK_C, DIM_PADDED, FOLD)
            best_tile = tl.where(scores < best, tile, best_tile)
            best = tl.minimum(best, scores)
    group = best_tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return tl.min(tl.where(best == tl.min(best, axis=1)[:, None], group, NO_CODE), axis=1)


@triton.jit
def _nearest_of_group(residual, codebooks, k, size, group, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
                      GROUP_SIZE: tl.constexpr):  # fmt: skip
    """The nearest of a group's codes in fp32, the first of equals: int32 [M], always a code."""
    first = group * GROUP_SIZE
    member = tl.zeros_like(group)
    if GROUP_SIZE > 1:
        nearest = tl.full(group.shape, float("inf"), tl.float32)
        for t in tl.static_range(GROUP_SIZE):
            code = tl.minimum(first + t, size - 1)
            difference = residual - _code_vectors(codebooks, k, code, size, DIM, DIM_PADDED)
            distance = tl.sum(difference * difference, axis=1)
            member = tl.where(distance < nearest, t, member)
            nearest = tl.minimum(nearest, distance)
    return tl.minimum(first + member, size - 1)


@triton.jit
def _placed(value, position, WORDS: tl.constexpr):
    """A string of WORDS 32-bit words that has ``value`` (up to 32 bits) from bit ``position`` on and is 0 elsewhere:
    [M, WORDS]."""
    word = tl.arange(0, WORDS)[None, :]
    value, position = value.to(tl.uint32)[:, None], position[:, None]
    shift, first = (position % 32).to(tl.uint32), position // 32
    over = (value >> 1) >> (31 - shift)  # shifting by 32 is not defined
    return tl.where(word == first, value << shift, 0) | tl.where(word == first + 1, over, 0)


@triton.jit
def _word(words, index):
    """One of every string's words [M]."""
    return tl.sum(tl.where(tl.arange(0, words.shape[1])[None, :] == index, words, 0), axis=1)


@triton.jit
def _store_rows(words, out, group, group_bits, row, rows, row_bytes, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Join the strings of every row's groups, words [M, .], into one of WORDS words and store its bytes; row [ROWS]."""
    placed = tl.zeros([words.shape[0], WORDS], tl.uint32)
    for index in tl.static_range(words.shape[1]):
        placed |= _placed(_word(words, index), group * group_bits + 32 * index, WORDS)
    joined = tl.sum(tl.reshape(placed, [ROWS, words.shape[0] // ROWS, WORDS]), axis=1)  # their bits are disjoint
    byte = tl.arange(0, 4)[None, None, :]
    values = (joined[:, :, None] >> (byte * 8).to(tl.uint32)).to(tl.uint8)
    place = tl.arange(0, WORDS)[None, :, None] * 4 + byte
    pointers = out + row.to(tl.int64)[:, None, None] * row_bytes + place
    tl.store(pointers, values, mask=(row < rows)[:, None, None] & (place < row_bytes))


@triton.jit
def _encode(
    x, scaled, norms, scales, codebooks, out,
    rows, size1, size2, stride0, stride1, stride2, stride_g, stride_d,
    groups, num_quantizers, size, tiles, bits, row_bytes,
    ROWS: tl.constexpr, GROUPS_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_C: tl.constexpr, FOLD: tl.constexpr, DEPTH: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, GROUP_WORDS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Whole rows of sub-vectors; the residual, and the packed string, stay in registers from stage to stage."""
    M: tl.constexpr = ROWS * GROUPS_PADDED
    start = tl.program_id(0) * ROWS
    row, group = start + tl.arange(0, M) // GROUPS_PADDED, tl.arange(0, M) % GROUPS_PADDED
    valid = (row < rows) & (group < groups)
    residual = _load(x, row, group, rows, groups, size1, size2, stride0, stride1, stride2, stride_g, stride_d,
                     DIM, DIM_PADDED)  # fmt: skip
    words = tl.zeros([M, GROUP_WORDS], tl.uint32)
    for k in tl.range(0, num_quantizers, num_stages=1):
        operand = _operand(residual, tl.load(scales + k))
        near = _nearest_group(operand, scaled, norms, k * tiles, tiles, BLOCK_C, DIM_PADDED, FOLD, UNROLL, STAGES)
        code = _nearest_of_group(residual, codebooks, k, size, near, DIM, DIM_PADDED, FOLD)
        residual -= _code_vectors(codebooks, k, code, size, DIM, DIM_PADDED)
        if PACKED:
            words |= _placed(code, k * bits + tl.zeros_like(code), GROUP_WORDS)
        else:
            pointers = out + (row.to(tl.int64) * groups + group) * num_quantizers + k
            tl.store(pointers, code.to(out.dtype.element_ty), mask=valid)
    if PACKED:
        words = tl.where((group < groups)[:, None], words, 0)
        row = start + tl.arange(0, ROWS)
        _store_rows(words, out, group, num_quantizers * bits, row, rows, row_bytes, ROWS, WORDS)


@triton.jit
def _extract(lowest, energy, unscale, chunk, num_groups, BEAM_PADDED: tl.constexpr):
    """Take the best (candidate, group of codes) of every sub-vector out of a chunk's scores: its squared distance and
    candidate * num_groups + group, [M / BEAM_PADDED], and the scores without it."""
    M: tl.constexpr = lowest.shape[0]
    SUBS: tl.constexpr = M // BEAM_PADDED
    COLUMNS: tl.constexpr = lowest.shape[1]
    column = tl.arange(0, COLUMNS)[None, :]
    score = tl.min(lowest, axis=1)
    where = tl.min(tl.where(lowest == score[:, None], column, COLUMNS - 1), axis=1)
    index = tl.arange(0, M) % BEAM_PADDED * num_groups + chunk * COLUMNS + where
    totals, indices = tl.reshape(energy + score * unscale, [SUBS, BEAM_PADDED]), tl.reshape(index, [SUBS, BEAM_PADDED])
    value = tl.min(totals, axis=1)
    taken = tl.min(tl.where(totals == value[:, None], indices, NO_CODE), axis=1)
    hit = tl.reshape(indices == taken[:, None], [M])
    return value, taken, tl.where(hit[:, None] & (column == where[:, None]), float("inf"), lowest)


@triton.jit
def _insert(values, indices, value, index):
    """Put (value, index) [N] in the place of the worst of a list [N, LENGTH] where it is better; lower index first."""
    worst = tl.max(values, axis=1)
    last = tl.max(tl.where(values == worst[:, None], indices, -1), axis=1)
    better = (value < worst) | ((value == worst) & (index < last))
    place = better[:, None] & (indices == last[:, None])
    return tl.where(place, value[:, None], values), tl.where(place, index[:, None], indices)


@triton.jit
def _nearest_groups(operand, energy, unscale, scaled, norms, first_tile, tiles, BLOCK_C: tl.constexpr,
                    DIM_PADDED: tl.constexpr, FOLD: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
                    BEAM: tl.constexpr, BEAM_PADDED: tl.constexpr):  # fmt: skip
    """The BEAM best (candidate, group) of every sub-vector, which hold its BEAM best extensions: squared distances and
    candidate * num_groups + group, [M]. In no order; places without one are infinite."""
    M: tl.constexpr = operand.shape[0]
    SUBS: tl.constexpr = M // BEAM_PADDED
    COLUMNS: tl.constexpr = BLOCK_C // FOLD
    num_groups = tiles // DEPTH * COLUMNS
    values = tl.full([SUBS, BEAM_PADDED], float("inf"), tl.float32)
    indices = tl.zeros([SUBS, BEAM_PADDED], tl.int32) + (NO_CODE + tl.arange(0, BEAM_PADDED)[None, :])
    lowest = tl.full([M, COLUMNS], float("inf"), tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        lowest = tl.minimum(lowest, _scores(operand, scaled, norms, first_tile + tile, BLOCK_C, DIM_PADDED, FOLD))
        if tile % DEPTH == DEPTH - 1:
            for _ in tl.range(0, BEAM, num_stages=1):
                value, index, lowest = _extract(lowest, energy, unscale, tile // DEPTH, num_groups, BEAM_PADDED)
                values, indices = _insert(values, indices, value, index)
            lowest = tl.full([M, COLUMNS], float("inf"), tl.float32)
    return tl.reshape(values, [M]), tl.reshape(indices, [M])


@triton.jit
def _parent(candidate, M: tl.constexpr, BEAM_PADDED: tl.constexpr):
    """Where a sub-vector's candidate lies: [M], always within."""
    return tl.arange(0, M) // BEAM_PADDED * BEAM_PADDED + tl.minimum(candidate, BEAM_PADDED - 1)


@triton.jit
def _rows_of(values, index):
    """values [M, N] in the order of index [M]."""
    return tl.gather(values, tl.broadcast_to(index[:, None], values.shape), axis=0)


@triton.jit
def _best_extensions(residual, values, indices, num_groups, codebooks, k, size, M: tl.constexpr, DIM: tl.constexpr,
                     DIM_PADDED: tl.constexpr, GROUP_SIZE: tl.constexpr, BEAM: tl.constexpr,
                     BEAM_PADDED: tl.constexpr):  # fmt: skip
    """Of the codes in the groups found, the BEAM nearest, best first, compared in fp32: their squared distances and
    candidate * size + code, [M]. Equals: the better candidate, then the lower code."""
    SUBS: tl.constexpr = M // BEAM_PADDED
    candidate, first = indices // num_groups, indices % num_groups * GROUP_SIZE
    start = _rows_of(residual, _parent(candidate, M, BEAM_PADDED))
    member = tl.arange(0, GROUP_SIZE)[None, :]
    distances = tl.full([M, GROUP_SIZE], float("inf"), tl.float32)
    for t in tl.range(0, GROUP_SIZE, num_stages=1):
        difference = start - _code_vectors(codebooks, k, tl.minimum(first + t, size - 1), size, DIM, DIM_PADDED)
        distance = tl.sum(difference * difference, axis=1)
        exists = (first + t < size) & (values < float("inf"))
        distances = tl.where((member == t) & exists[:, None], distance[:, None], distances)
    extensions = tl.minimum(candidate, BEAM_PADDED - 1)[:, None] * size + first[:, None] + member
    distances = tl.reshape(distances, [SUBS, BEAM_PADDED * GROUP_SIZE])
    extensions = tl.reshape(extensions, [SUBS, BEAM_PADDED * GROUP_SIZE])
    place = tl.arange(0, BEAM_PADDED)[None, :]
    best = tl.full([SUBS, BEAM_PADDED], float("inf"), tl.float32)
    chosen = tl.zeros([SUBS, BEAM_PADDED], tl.int32)
    for rank in tl.range(0, BEAM, num_stages=1):
        value = tl.min(distances, axis=1)
        index = tl.min(tl.where(distances == value[:, None], extensions, NO_CODE), axis=1)
        distances = tl.where(extensions == index[:, None], float("inf"), distances)
        best = tl.where(place == rank, value[:, None], best)
        chosen = tl.where(place == rank, index[:, None], chosen)
    return tl.reshape(best, [M]), tl.reshape(chosen, [M])


@triton.jit
def _encode_beam(
    x, scaled, norms, scales, codebooks, out,
    rows, size1, size2, stride0, stride1, stride2, stride_g, stride_d,
    groups, num_quantizers, size, tiles, bits, row_bytes,
    ROWS: tl.constexpr, GROUPS_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_C: tl.constexpr, FOLD: tl.constexpr, DEPTH: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, GROUP_WORDS: tl.constexpr, WORDS: tl.constexpr,
    BEAM: tl.constexpr, BEAM_PADDED: tl.constexpr,
):  # fmt: skip
    """As ``_encode``, with BEAM_PADDED candidates for every sub-vector, best first; missing ones are infinitely bad."""
    SUBS: tl.constexpr = ROWS * GROUPS_PADDED
    M: tl.constexpr = SUBS * BEAM_PADDED
    start, sub, rank = tl.program_id(0) * ROWS, tl.arange(0, M) // BEAM_PADDED, tl.arange(0, M) % BEAM_PADDED
    row, group = start + sub // GROUPS_PADDED, sub % GROUPS_PADDED
    residual = _load(x, row, group, rows, groups, size1, size2, stride0, stride1, stride2, stride_g, stride_d,
                     DIM, DIM_PADDED)  # fmt: skip
    energy = tl.where(rank == 0, tl.sum(residual * residual, axis=1), float("inf"))
    words = tl.zeros([M, GROUP_WORDS], tl.uint32)
    for k in tl.range(0, num_quantizers, num_stages=1):
        scale = tl.load(scales + k)
        values, indices = _nearest_groups(
            _operand(residual, scale), energy, 2 / (scale * scale), scaled, norms, k * tiles, tiles,
            BLOCK_C, DIM_PADDED, FOLD, DEPTH, STAGES, BEAM, BEAM_PADDED,
        )  # fmt: skip
        energy, chosen = _best_extensions(
            residual, values, indices, tiles // DEPTH * (BLOCK_C // FOLD), codebooks, k, size,
            M, DIM, DIM_PADDED, FOLD * DEPTH, BEAM, BEAM_PADDED,
        )  # fmt: skip
        parent, code = _parent(chosen // size, M, BEAM_PADDED), chosen % size
        residual = _rows_of(residual, parent) - _code_vectors(codebooks, k, code, size, DIM, DIM_PADDED)
        words = _rows_of(words, parent) | _placed(code, k * bits + tl.zeros_like(code), GROUP_WORDS)
    best = (rank == 0) & (group < groups)
    if PACKED:
        words = tl.where(best[:, None], words, 0)
        row = start + tl.arange(0, ROWS)
        _store_rows(words, out, group, num_quantizers * bits, row, rows, row_bytes, ROWS, WORDS)
    else:
        for k in tl.range(0, num_quantizers, num_stages=1):
            code = (_word(words, k * bits // 32) >> (k * bits % 32).to(tl.uint32)) & ((1 << bits) - 1)
            pointers = out + (row.to(tl.int64) * groups + group) * num_quantizers + k
            tl.store(pointers, code.to(out.dtype.element_ty), mask=best & (row < rows))


_TYPES = {
    "x": "*fp16", "scaled": "*fp16", "norms": "*fp32", "scales": "*fp32", "codebooks": "*fp16", "out": "*u8",
    **dict.fromkeys(("rows", "size1", "size2", "stride0", "stride1", "stride2", "stride_g"), "i32"),
    **dict.fromkeys(("groups", "num_quantizers", "size", "tiles", "bits", "row_bytes"), "i32"),
}  # fmt: skip


def _specimen(name: str, tile: dict, out: str = "*u8", **constants) -> Specimen:
    """Llama-3-8B: 4 groups of 32 channels, 8 codebooks of 2,048 codes, 44 bytes a head."""
    shape = {
        "GROUPS_PADDED": 4, "DIM": 32, "DIM_PADDED": 32, "BLOCK_C": tile["block_c"],
        "FOLD": tile["fold"], "DEPTH": tile["depth"], "UNROLL": tile["unroll"],
        "PACKED": True, "STAGES": tile["num_stages"], "GROUP_WORDS": 4, "WORDS": 16, "stride_d": 1,
    } | constants  # fmt: skip
    candidates = constants.get("BEAM_PADDED", 1)
    return Specimen(
        name,
        _encode_beam if candidates > 1 else _encode,
        _TYPES | {"out": out},
        {"ROWS": tile["block_m"] // shape["GROUPS_PADDED"] // candidates} | shape,
        num_warps=tile["num_warps"],
        divisible=("stride0", "stride1", "stride2", "stride_g", "size", "tiles"),
    )


SPECIMENS = [
    _specimen("rvq_encode_packed", TILES["encode"]),
    _specimen("rvq_encode_packed_few", TILES["encode_few"]),
    _specimen("rvq_encode", TILES["encode"], out="*i64", GROUPS_PADDED=1, PACKED=False),
    _specimen("rvq_encode_packed_beam4", TILES["beam"], BEAM=4, BEAM_PADDED=4),
]
