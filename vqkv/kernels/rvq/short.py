"""Compiled search of short vectors: no matrix product, all stages of 128 rows at once, side by side in registers."""

import numpy as np

from vqkv.kernels.machine import compiled, index
from vqkv.kernels.rvq.loops import INFINITY, UNIT, nearest, reach

ROWS = 128
R = index(ROWS)


@compiled()
def search(first, stop, largest, products, norms, codebooks, exact, x, codes):
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
    """``reach`` of every row."""
    for i in range(R):
        most[i] = reach(np.float64(best[i]), size[i], drift[i], largest, dim)


@compiled(fast=True)
def _norms(residual, size, drift, roundings):
    """Euclidean norms of the columns, in float64, where nothing underflows; and how far rounding took them off."""
    for i in range(R):
        total = 0.0
        for j in range(index(len(residual))):
            total += np.float64(residual[j, i]) * np.float64(residual[j, i])
        before, size[i] = size[i], np.sqrt(total)
        drift[i] += roundings * UNIT * (before + size[i])


@compiled(fast=True)
def _compare(residual, products, norms, codes, score, best, second, winner):
    """Best and second best score of every row over all codes, and which code is the best."""
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
