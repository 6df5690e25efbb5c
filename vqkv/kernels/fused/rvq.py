"""Residual VQ's search after (or with) the matrix product, row by row while its scores are in the L2 cache.

What ``cpu`` does in torch, and the same codes; ``codes`` (rows, K) hold -1 where nothing is decided yet. A row that
fp32 cannot decide is decided in float64 among the codes within reach; what rounding could change even there, and rows
that are not finite, are left to the caller.
"""

import math

import numpy as np

from vqkv.kernels.fused.jit import compiled, index

UNIT, UNIT64 = 2.0**-24, 2.0**-53
HUGE, TINY = 2.0**126, 2.0**-126
LANES = 64  # the minimum is taken over every 64th code: 4 registers of 16
L, L2, L3, L4 = (index(i * LANES) for i in range(1, 5))
INFINITY = np.float32(np.inf)


@compiled()
def reach(best, size, drift, largest, dim):
    """The score that a code must have to be possibly nearer than the best: see ``cpu._Errors``. NaN: cannot say."""
    overflow = not (2 * size + largest) * largest <= HUGE
    farthest = error(largest, size, drift, dim)
    distance = math.sqrt(max(size * size + best + farthest, 0.0))
    bound = error(min((size + distance) * 1.001, largest), size, drift, dim)
    most = best + 2 * bound + 2 * UNIT * abs(best)  # the last: it is rounded to fp32
    return np.float32(np.nan if overflow else most)


@compiled()
def error(norm, size, drift, dim):
    """How wrong the score of a code of this norm may be."""
    rounding = 1.01 * (dim + 4) * UNIT * (2 * size + norm) * norm
    reference_rounding = 4 * (dim + 4) * UNIT64 * (size + norm) * (size + norm)
    return rounding + reference_rounding + 2.02 * norm * drift + (2 * dim + 4) * TINY


@compiled(fast=True)
def norm_of(values):
    """Euclidean norm, in float64, where nothing underflows."""
    total = 0.0
    for j in range(index(len(values))):
        total += np.float64(values[j]) * np.float64(values[j])
    return math.sqrt(total)


@compiled(fast=True)
def fold(scores, i, norms, lanes):
    """lanes[j] = the least of score + norm over the codes j, j + 64, j + 128, ..."""
    for j in range(L):
        lanes[j] = INFINITY
    width = index(scores.shape[1])
    whole = width - width % L4
    for b in range(index(0), whole, L4):
        for j in range(L):
            least = scores[i, b + j] + norms[b + j]
            other = scores[i, b + j + L] + norms[b + j + L]
            least = other if other < least else least
            other = scores[i, b + j + L2] + norms[b + j + L2]
            least = other if other < least else least
            other = scores[i, b + j + L3] + norms[b + j + L3]
            least = other if other < least else least
            lanes[j] = least if least < lanes[j] else lanes[j]
    for b in range(whole, width, L):
        for j in range(L):
            other = scores[i, b + j] + norms[b + j]
            lanes[j] = other if other < lanes[j] else lanes[j]


@compiled(fast=True)
def smallest(lanes, few):
    """The least of 64 lanes; by quarters, as a loop over all would be taken one by one."""
    for quarter in (index(16), index(4)):
        for j in range(quarter):
            least = lanes[j]
            for i in range(index(1), index(4)):
                other = lanes[j + i * quarter]
                least = other if other < least else least
            few[j] = least
        lanes = few
    return min(min(few[0], few[1]), min(few[2], few[3]))


@compiled(fast=True)
def within(lanes, most):
    """How many lanes are at most ``most``, and which one if it is one."""
    count = where = np.int32(0)
    for j in range(np.int32(LANES)):
        hit = np.int32(lanes[index(j)] <= most)
        count += hit
        where += hit * j
    return count, where


@compiled(fast=True)
def within_lane(scores, i, norms, lane, most):
    """The same for the codes of one lane: how many, and which code."""
    count = where = np.int32(0)
    for b in range(np.int32(scores.shape[1] // LANES)):
        code = index(b) * L + index(lane)
        hit = np.int32(scores[i, code] + norms[code] <= most)
        count += hit
        where += hit * b
    return count, where * LANES + lane


@compiled(fast=True)
def squared(exact, code):
    """|exact - code|^2 in float64."""
    total = 0.0
    for j in range(index(len(code))):
        total += (exact[j] - code[j]) * (exact[j] - code[j])
    return total


@compiled()
def nearest(x, codes, stage, codebooks, scores, norms, most):
    """The nearest code in float64 of those with scores up to ``most``; -1 if the reference's rounding could matter."""
    dim, size = index(len(x)), codebooks.shape[1]
    exact = x.astype(np.float64)
    for k in range(index(stage)):  # in this order: the bits of the reference
        for j in range(dim):
            exact[j] -= np.float64(codebooks[k, index(codes[k]), j])
    best, second, winner = np.inf, np.inf, -1
    for code in range(size):
        if scores[index(code)] + norms[index(code)] <= most:
            distance = squared(exact, codebooks[index(stage), index(code)])
            if distance < best:
                best, second, winner = distance, best, code
            elif distance < second:
                second = distance
    return winner if second > best * (1 + 8 * (len(x) + 4) * UNIT64) else -1


@compiled()
def step(rows, stage, x, scores, weights, codebooks, largest, exact, codes, residual, bounds, left):
    """One stage of the rows listed, of ``scores`` and ``residual``: fills codes[:, stage] where they are -1, subtracts
    the codes, and returns how many rows are left, listed in ``left``.

    ``rows`` int64; x (N, dim) and residual (N, dim) fp32; scores (N, width) from ``weights`` (K, dim + 1, width)
    without their last row, the norms; codebooks (K, C, dim) fp32; largest float64 (K,); bounds float64 (N, 2): norm
    and drift of the residual. ``exact``: fp32 holds x and the codebooks without rounding.
    """
    lanes, few = np.empty(LANES, np.float32), np.empty(16, np.float32)
    k, dim, count = index(stage), x.shape[1], 0
    norms = weights[k, index(dim)]
    for row in rows:
        i = index(row)
        if codes[i, k] < 0:
            codes[i, k] = decide(x, i, codes, stage, codebooks, scores, norms, bounds, largest[k], exact, lanes, few)
        if codes[i, k] < 0:
            left[count] = row
            count += 1
        else:
            subtract(residual, i, codebooks, k, index(codes[i, k]), bounds)
    return count


@compiled()
def decide(x, i, codes, stage, codebooks, scores, norms, bounds, largest, exact, lanes, few):
    """The code of one row at one stage, or -1."""
    fold(scores, i, norms, lanes)
    most = reach(np.float64(smallest(lanes, few)), bounds[i, 0], bounds[i, 1], largest, x.shape[1])
    count, lane = within(lanes, most)
    if count == 1:
        count, code = within_lane(scores, i, norms, lane, most)
        if count == 1:
            return code
    if exact and count > 0:
        return nearest(x[i], codes[i], stage, codebooks, scores[i], norms, most)
    return -1


@compiled(fast=True)
def subtract(residual, i, codebooks, k, code, bounds):
    """residual -= code; ``bounds`` follow."""
    total = 0.0
    for j in range(index(residual.shape[1])):
        left = residual[i, j] - codebooks[k, code, j]
        residual[i, j] = left
        total += np.float64(left) * np.float64(left)
    size = math.sqrt(total)
    bounds[i, 1] += 2 * UNIT * (bounds[i, 0] + size)
    bounds[i, 0] = size


@compiled()
def begin(x, bounds):
    """Norm of x (N, dim) and how far its fp32 values may be from the exact ones: fills ``bounds`` (N, 2)."""
    for i in range(index(len(x))):
        bounds[i, 0] = norm_of(x[i])
        bounds[i, 1] = UNIT * bounds[i, 0]
