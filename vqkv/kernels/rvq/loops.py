"""Compiled loops of residual VQ's search: the least score of a row while its scores are in the L2 cache.

Where fp32's error could have chosen between codes, ``nearest`` decides in float64.
"""

import math

import numpy as np

from vqkv.kernels.machine import compiled, index

UNIT = 2.0**-24  # fp32 unit roundoff
HUGE, TINY = 2.0**126, 2.0**-126  # no partial sum below the first overflows; an underflow may lose the second
LANES = 64  # the minimum is taken over every 64th code: 4 registers of 16
L, L2, L3, L4 = (index(i * LANES) for i in range(1, 5))
ROWS = 128  # of short vectors, all stages of which are taken at once, side by side in registers
R = index(ROWS)
INFINITY = np.float32(np.inf)


@compiled()
def reach(best, size, drift, largest, dim):
    """Bound the score up to which a code may be nearer than the best. NaN, which nothing reaches, where squares
    overflow. A nearer code is no farther from the residual r than the winner, so |c| <= |r| + sqrt(|r|^2 + best): an
    outlying code elsewhere does not loosen the bound."""
    overflow = not (2 * size + largest) * largest <= HUGE
    farthest = error(largest, size, drift, dim)
    distance = math.sqrt(max(size * size + best + farthest, 0.0))
    bound = error(min((size + distance) * 1.001, largest), size, drift, dim)
    most = best + 2 * bound + 2 * UNIT * abs(best)  # the last: it is rounded to fp32
    return np.float32(np.nan if overflow else most)


@compiled()
def error(norm, size, drift, dim):
    """Bound the error of the score |c|^2 - 2 r.c of a code of this norm: dim + 1 rounded terms in any order, of a
    residual of norm ``size`` that is off by ``drift``."""
    return 1.01 * (dim + 4) * UNIT * (2 * size + norm) * norm + 2.02 * norm * drift + (2 * dim + 4) * TINY


@compiled(fast=True)
def _fold(scores, i, norms, lanes):
    """Set lanes[j] to the least of score + norm over the codes j, j + 64, j + 128, ..."""
    for j in range(L):
        lanes[j] = INFINITY
    width = index(scores.shape[1])
    unrolled = width - width % L4
    for b in range(index(0), unrolled, L4):
        for j in range(L):
            least = scores[i, b + j] + norms[b + j]
            other = scores[i, b + j + L] + norms[b + j + L]
            least = other if other < least else least
            other = scores[i, b + j + L2] + norms[b + j + L2]
            least = other if other < least else least
            other = scores[i, b + j + L3] + norms[b + j + L3]
            least = other if other < least else least
            lanes[j] = least if least < lanes[j] else lanes[j]
    for b in range(unrolled, width, L):
        for j in range(L):
            other = scores[i, b + j] + norms[b + j]
            lanes[j] = other if other < lanes[j] else lanes[j]


@compiled(fast=True)
def _smallest(lanes, few):
    """Return the least of 64 lanes; by quarters, as a loop over all would be taken one by one."""
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
def _within(scores, i, norms, most):
    """Count of codes whose score is at most ``most``, and the code if it is one."""
    count = where = np.int32(0)
    for j in range(np.int32(scores.shape[1])):
        hit = np.int32(scores[i, index(j)] + norms[index(j)] <= most)
        count += hit
        where += hit * j
    return count, where


@compiled()
def step(first, stop, stage, largest, norms, codebooks, exact, bounds, x, residual, codes, scores):
    """Take stage ``stage`` of rows first, ..., stop - 1: fill codes[:, stage] and subtract these codes. Tables as in
    ``SearchTables``; scores (rows, width) of residual (rows, dim), without the norms; x (rows, dim) as it came; bounds
    float64 (rows, 2): a residual's norm and drift."""
    lanes, few = np.empty(LANES, np.float32), np.empty(16, np.float32)
    k, dim = index(stage), residual.shape[1]
    for i in range(index(first), index(stop)):
        if stage == 0:
            bounds[i, 0] = bounds[i, 1] = 0
            _measure(residual, i, bounds, 1)
        _fold(scores, i, norms[k], lanes)
        most = reach(np.float64(_smallest(lanes, few)), bounds[i, 0], bounds[i, 1], largest[k], dim)
        count, code = _within(scores, i, norms[k], most)
        codes[i, k] = code if count == 1 else nearest(x[i], codes[i], stage, exact)
        code = codes[i, k]
        for j in range(index(dim)):
            residual[i, j] -= codebooks[k, index(code), j]
        _measure(residual, i, bounds, 2)


@compiled(fast=True)
def _measure(residual, i, bounds, roundings):
    """Measure the norm of a residual, and its drift, that so many roundings add to."""
    total = 0.0
    for j in range(index(residual.shape[1])):
        total += np.float64(residual[i, j]) * np.float64(residual[i, j])
    size = math.sqrt(total)
    bounds[i, 1] += roundings * UNIT * (bounds[i, 0] + size)
    bounds[i, 0] = size


@compiled(fast=True)
def nearest(x, codes, stage, codebooks):
    """Find the code of one stage by distances in float64, of equals the lowest: x (dim,), ``codes`` of the stages
    before, codebooks (K, C, dim), none of them rounded."""
    k, dim, residual = index(stage), index(len(x)), x.astype(np.float64)
    for before in range(k):
        for j in range(dim):
            residual[j] -= np.float64(codebooks[before, index(codes[before]), j])
    best, winner = np.inf, index(0)
    for code in range(index(codebooks.shape[1])):
        total = 0.0
        for j in range(dim):
            difference = residual[j] - np.float64(codebooks[k, code, j])
            total += difference * difference
        if total < best:
            best, winner = total, index(code)
    return np.int64(winner)


@compiled()
def search_short(first, stop, largest, products, norms, codebooks, exact, x, codes):
    """Take all stages of rows first, ..., stop - 1: fill their ``codes`` (rows, K). Tables as in ``SearchTables``."""
    dim = index(x.shape[1])
    residual, work = np.zeros((x.shape[1], ROWS), np.float32), np.empty((3, ROWS), np.float32)
    size, drift, most = np.zeros(ROWS), np.zeros(ROWS), np.empty(ROWS, np.float32)
    winner = np.empty(ROWS, np.int32)
    for start in range(index(first), index(stop), R):
        rows = min(R, index(stop) - start)
        for i in range(rows):
            for j in range(dim):
                residual[j, i] = x[start + i, j]
        size[:] = drift[:] = 0
        _norms(residual, size, drift, 1)
        for k in range(index(len(products))):
            _compare(residual, products[k], norms[k], codebooks.shape[1], work[0], work[1], work[2], winner)
            _bound(work[1], size, drift, largest[k], x.shape[1], most)
            for i in range(rows):
                row = start + i
                alone = work[2, i] > most[i]
                codes[row, k] = winner[i] if alone else nearest(x[row], codes[row], k, exact)
                for j in range(dim):
                    residual[j, i] -= codebooks[k, index(codes[row, k]), j]
            _norms(residual, size, drift, 2)


@compiled()
def _bound(best, size, drift, largest, dim, most):
    """Compute ``reach`` of every row."""
    for i in range(R):
        most[i] = reach(np.float64(best[i]), size[i], drift[i], largest, dim)


@compiled(fast=True)
def _norms(residual, size, drift, roundings):
    """Measure the columns' norms in float64, where nothing underflows, and how far rounding took them off."""
    for i in range(R):
        total = 0.0
        for j in range(index(len(residual))):
            total += np.float64(residual[j, i]) * np.float64(residual[j, i])
        before, size[i] = size[i], np.sqrt(total)
        drift[i] += roundings * UNIT * (before + size[i])


@compiled(fast=True)
def _compare(residual, products, norms, codes, score, best, second, winner):
    """Return best and second best score of every row over all codes, and which code is the best."""
    last = index(len(residual) - 1)
    for i in range(R):
        best[i] = second[i] = INFINITY
        winner[i] = 0
    for code in range(index(codes)):
        for i in range(R):
            score[i] = norms[code]
        for j in range(last):
            weight, value = products[j, code], residual[j]
            for i in range(R):
                score[i] += value[i] * weight
        weight, value, number = products[last, code], residual[last], np.int32(code)
        for i in range(R):
            this, least = score[i] + value[i] * weight, best[i]
            worse = this if this > least else least
            second[i] = worse if worse < second[i] else second[i]
            winner[i] = number if this < least else winner[i]
            best[i] = this if this < least else least
