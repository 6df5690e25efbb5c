"""Compiled loops of residual VQ's search: a row's best code while its scores are in the L2 cache.

Where fp32's error could have chosen between codes, ``nearest`` decides in float64.
"""

import math

import numpy as np

from vqkv.kernels.machine import compiled, index

UNIT = 2.0**-24  # fp32 unit roundoff
HUGE, TINY = 2.0**126, 2.0**-126  # no partial sum below the first overflows; an underflow may lose the second
ROWS = index(128)  # side by side in a loop's vectors
SHORT = 4  # channels: a matrix product of so few takes longer than adding them up
INFINITY = np.float32(np.inf)


@compiled()
def step(first, stop, scores, weights, codebook, largest, residual, rounded, codes):
    """One stage of rows first, ..., stop - 1: fills their ``codes`` (rows,) and subtracts these from ``residual``.

    scores (C, rows): the products of weights (dim + 1, C) and ``rounded`` (rows, dim + 1), which is the residual (rows,
    dim) in fp32 and ones; not read for up to ``SHORT`` channels. codebook (C, dim) without rounding, and the largest
    norm of a code in it.
    """
    score, best, second = np.empty(ROWS, np.float32), np.empty(ROWS, np.float32), np.empty(ROWS, np.float32)
    winner, columns = np.empty(ROWS, np.int32), np.zeros((SHORT, ROWS), np.float32)
    dim = residual.shape[1]
    for start in range(index(first), index(stop), ROWS):
        rows = min(ROWS, index(stop) - start)
        if dim <= SHORT:
            columns[:dim, :rows] = rounded[start : start + rows, :dim].T
        best[:] = second[:] = INFINITY
        winner[:] = 0
        for code in range(index(len(codebook))):
            if dim <= SHORT:
                _score(weights, code, columns, score)
                _compare(score, np.int32(code), rows, best, second, winner)
            else:
                _compare(scores[code, start : start + rows], np.int32(code), rows, best, second, winner)
        for i in range(rows):
            row = residual[start + i]
            alone = second[i] > reach(best[i], _norm(row), largest, dim)
            codes[start + i] = winner[i] if alone else nearest(row, codebook)
            code = codebook[index(codes[start + i])]
            for j in range(index(dim)):
                row[j] -= code[j]
                rounded[start + i, j] = row[j]


@compiled(fast=True)
def _score(weights, code, columns, score):
    """Scores of a code for columns (dim, rows)."""
    dim = index(len(weights) - 1)
    norm = weights[dim, code]
    for i in range(ROWS):
        score[i] = norm
    for j in range(dim):
        weight, value = weights[j, code], columns[j]
        for i in range(ROWS):
            score[i] += weight * value[i]


@compiled(fast=True)
def _compare(score, code, rows, best, second, winner):
    """Of each row the least score, the second least, and a code that has the least."""
    for i in range(rows):
        this, least = score[i], best[i]
        worse = this if this > least else least
        second[i] = worse if worse < second[i] else second[i]
        winner[i] = code if this < least else winner[i]
        best[i] = this if this < least else least


@compiled()
def reach(best, size, largest, dim):
    """The score up to which a code may be nearer to a residual of norm ``size`` than the one with the ``best`` score.
    NaN, which nothing reaches, where squares overflow.

    A nearer code is no farther from the residual r than the winner, so |c| <= |r| + sqrt(|r|^2 + best): an outlying
    code elsewhere in the codebook does not loosen the bound.
    """
    overflow = not (2 * size + largest) * largest <= HUGE
    best = np.float64(best)
    distance = math.sqrt(max(size * size + best + error(largest, size, dim), 0.0))
    bound = error(min((size + distance) * 1.001, largest), size, dim)
    most = best + 2 * bound + 2 * UNIT * abs(best)  # the last: it is rounded to fp32
    return np.float32(np.nan if overflow else most)


@compiled()
def error(norm, size, dim):
    """Bound on the error of the score |c|^2 - 2 r.c of a code of this norm: dim + 1 rounded terms in any order, of a
    residual of norm ``size`` that is rounded, too."""
    return 1.01 * (dim + 6) * UNIT * (2 * size + norm) * norm + (2 * dim + 4) * TINY


@compiled(fast=True)
def _norm(row):
    total = 0.0
    for j in range(index(len(row))):
        total += row[j] * row[j]
    return math.sqrt(total)


@compiled(fast=True)
def nearest(residual, codebook):
    """The code nearest to a residual (dim,) by the distances themselves, in float64, of equals the lowest."""
    best, winner = np.inf, index(0)
    for code in range(index(len(codebook))):
        total = 0.0
        for j in range(index(len(residual))):
            difference = residual[j] - np.float64(codebook[code, j])
            total += difference * difference
        if total < best:
            best, winner = total, code
    return np.int64(winner)
