"""Residual VQ of short vectors: no matrix product, 128 rows side by side in vector registers, all stages at once."""

import numpy as np

from vqkv.kernels.fused.jit import compiled, index
from vqkv.kernels.fused.rvq import INFINITY, UNIT, nearest, norm_of, reach

ROWS = 128
R = index(ROWS)


@compiled()
def search(rows, x, weights, codebooks, largest, exact, codes, left):
    """All stages of the rows listed: fills their ``codes`` where they are -1, and returns how many rows are left,
    listed in ``left``, each decided up to a stage that is not. Arguments as in ``rvq.step``."""
    dim, count = index(x.shape[1]), 0
    residual, work = np.zeros((x.shape[1], ROWS), np.float32), np.empty((6, ROWS), np.float32)
    size, drift, most = np.zeros(ROWS), np.zeros(ROWS), np.empty(ROWS, np.float32)
    winner, alive = np.empty(ROWS, np.int32), np.empty(ROWS, np.bool_)
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        load(part, x, residual, size, drift)
        alive[:] = False
        alive[: len(part)] = True
        for stage in range(len(weights)):
            k = index(stage)
            compare(residual, weights[k], codebooks.shape[1], work[0], work[1], work[2], winner)
            bound(work[1], size, drift, largest[k], x.shape[1], most)
            for i in range(index(len(part))):
                row = index(part[i])
                if not alive[i]:
                    continue
                if codes[row, k] < 0:
                    if work[2, i] > most[i]:
                        codes[row, k] = winner[i]
                    elif exact:
                        codes[row, k] = again(x[row], codes[row], stage, weights[k], codebooks, residual[:, i], most[i])
                if codes[row, k] < 0:
                    alive[i] = False
                    left[count] = row
                    count += 1
                    continue
                for j in range(dim):
                    residual[j, i] -= codebooks[k, index(codes[row, k]), j]
            advance(residual, size, drift)
    return count


@compiled()
def load(rows, x, residual, size, drift):
    """x of these rows, transposed, with its norms."""
    for i in range(index(len(rows))):
        row = index(rows[i])
        for j in range(index(x.shape[1])):
            residual[j, i] = x[row, j]
        size[i] = norm_of(x[row])
        drift[i] = UNIT * size[i]


@compiled(fast=True)
def compare(residual, weights, codes, score, best, second, winner):
    """Best and second best score of every row over all codes, and which code is the best."""
    dim = index(len(residual))
    last, norms = dim - index(1), weights[dim]
    for i in range(R):
        best[i] = second[i] = INFINITY
        winner[i] = 0
    for code in range(index(codes)):
        for i in range(R):
            score[i] = norms[code]
        for j in range(last):
            weight, value = weights[j, code], residual[j]
            for i in range(R):
                score[i] += value[i] * weight
        weight, value, number = weights[last, code], residual[last], np.int32(code)
        for i in range(R):
            this, least = score[i] + value[i] * weight, best[i]
            worse = this if this > least else least
            second[i] = worse if worse < second[i] else second[i]
            winner[i] = number if this < least else winner[i]
            best[i] = this if this < least else least


@compiled()
def bound(best, size, drift, largest, dim, most):
    """``reach`` of every row."""
    for i in range(R):
        most[i] = reach(np.float64(best[i]), size[i], drift[i], largest, dim)


@compiled(fast=True)
def advance(residual, size, drift):
    """Norms and drifts of the residuals."""
    for i in range(R):
        total = 0.0
        for j in range(index(len(residual))):
            total += np.float64(residual[j, i]) * np.float64(residual[j, i])
        before, size[i] = size[i], np.sqrt(total)
        drift[i] += 2 * UNIT * (before + size[i])


@compiled()
def again(x, codes, stage, weights, codebooks, residual, most):
    """One row's code in float64, or -1."""
    dim, scores = index(len(residual)), np.zeros(weights.shape[1], np.float32)
    for j in range(dim):
        for code in range(index(len(scores))):
            scores[code] += residual[j] * weights[j, code]
    return nearest(x, codes, stage, codebooks, scores, weights[dim], most)
