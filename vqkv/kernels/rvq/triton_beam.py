"""Beam search for residual VQ: the BEAM best sequences of codes are kept from stage to stage, in registers.

Scores find the BEAM best pairs of a candidate and a group of codes. These hold the BEAM best extensions, as a pair
is as good as its best one; the codes of these groups are then compared in fp32.
"""

import triton
import triton.language as tl

from vqkv.kernels.packing.triton import as_string, one_word, store_rows
from vqkv.kernels.rvq.triton_codebooks import NO_CODE, as_operand, code_vectors, load_vectors, score_tile


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
        lowest = tl.minimum(lowest, score_tile(operand, scaled, norms, first_tile + tile, BLOCK_C, DIM_PADDED, FOLD))
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
        difference = start - code_vectors(codebooks, k, tl.minimum(first + t, size - 1), size, DIM, DIM_PADDED)
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
def encode_beam(
    x, scaled, norms, scales, codebooks, out,
    rows, size1, size2, stride0, stride1, stride2, stride_g, stride_d,
    groups, num_quantizers, size, tiles, bits, row_bytes,
    ROWS: tl.constexpr, GROUPS_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_C: tl.constexpr, FOLD: tl.constexpr, DEPTH: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, GROUP_WORDS: tl.constexpr, WORDS: tl.constexpr,
    BEAM: tl.constexpr, BEAM_PADDED: tl.constexpr,
):  # fmt: skip
    """As ``encode._encode``, with BEAM_PADDED candidates for every sub-vector, best first; missing ones are
    infinitely bad."""
    SUBS: tl.constexpr = ROWS * GROUPS_PADDED
    M: tl.constexpr = SUBS * BEAM_PADDED
    start, sub, rank = tl.program_id(0) * ROWS, tl.arange(0, M) // BEAM_PADDED, tl.arange(0, M) % BEAM_PADDED
    row, group = start + sub // GROUPS_PADDED, sub % GROUPS_PADDED
    residual = load_vectors(x, row, group, rows, groups, size1, size2, stride0, stride1, stride2, stride_g, stride_d,
                     DIM, DIM_PADDED)  # fmt: skip
    energy = tl.where(rank == 0, tl.sum(residual * residual, axis=1), float("inf"))
    words = tl.zeros([M, GROUP_WORDS], tl.uint32)
    for k in tl.range(0, num_quantizers, num_stages=1):
        scale = tl.load(scales + k)
        values, indices = _nearest_groups(
            as_operand(residual, scale), energy, 2 / (scale * scale), scaled, norms, k * tiles, tiles,
            BLOCK_C, DIM_PADDED, FOLD, DEPTH, STAGES, BEAM, BEAM_PADDED,
        )  # fmt: skip
        energy, chosen = _best_extensions(
            residual, values, indices, tiles // DEPTH * (BLOCK_C // FOLD), codebooks, k, size,
            M, DIM, DIM_PADDED, FOLD * DEPTH, BEAM, BEAM_PADDED,
        )  # fmt: skip
        parent, code = _parent(chosen // size, M, BEAM_PADDED), chosen % size
        residual = _rows_of(residual, parent) - code_vectors(codebooks, k, code, size, DIM, DIM_PADDED)
        words = _rows_of(words, parent) | as_string(code, k * bits + tl.zeros_like(code), GROUP_WORDS)
    best = (rank == 0) & (group < groups)
    if PACKED:
        words = tl.where(best[:, None], words, 0)
        row = start + tl.arange(0, ROWS)
        store_rows(words, out, group, num_quantizers * bits, row, rows, row_bytes, ROWS, WORDS)
    else:
        for k in tl.range(0, num_quantizers, num_stages=1):
            code = (one_word(words, k * bits // 32) >> (k * bits % 32).to(tl.uint32)) & ((1 << bits) - 1)
            pointers = out + (row.to(tl.int64) * groups + group) * num_quantizers + k
            tl.store(pointers, code.to(out.dtype.element_ty), mask=best & (row < rows))
