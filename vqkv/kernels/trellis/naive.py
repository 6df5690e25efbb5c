"""The best path by dynamic programming, value after value, in Python: see ``code``."""

import math

import torch
from torch import Tensor

from vqkv.kernels.trellis.code import LARGEST, REACH, TRANSITIONS


def trellis_encode(x: Tensor, costs: Tensor, table_of: Tensor, shifts: Tensor, weight: float, states: int) -> Tensor:
    """Rows of values x (rows, channels), in steps -> codes, int32: those of least squared error plus ``weight`` times
    their bits (Viterbi 1967). ``costs``, float32 (tables, 2 * REACH + 2): bits of the codes -REACH to REACH and of any
    other; ``table_of`` and ``shifts``, int32 (channels,): a channel's table, and how many low bits it keeps apart."""
    tables = list(zip(costs[table_of.long()].tolist(), shifts.tolist(), strict=True))
    paths = [_best([*zip(row, tables, strict=True)], weight, states) for row in x.float().tolist()]
    return torch.tensor(paths, dtype=torch.int32).view(x.shape)


def trellis_decode(codes: Tensor, step: Tensor, states: int) -> Tensor:
    """Codes int32 (rows, channels) -> values, float32, of multiples of ``step``."""
    out = torch.empty(codes.shape, dtype=torch.float32)
    for row, values in zip(codes.tolist(), out):
        state = 0
        for channel, code in enumerate(row):
            values[channel] = _value(code) * (-1 if state & 1 else 1)
            state = TRANSITIONS[states][state][code & 1]
    return out * step


def _value(code: int) -> int:
    return 2 * code + (code < 0)


def _best(row: list, weight: float, states: int) -> list[int]:
    sums = [0.0] + [math.inf] * (states - 1)
    paths: list[list[int]] = [[]] * states
    for x, (costs, shift) in row:
        x = min(max(x, -2.0 * LARGEST), 2.0 * LARGEST) if x == x else 0.0
        found = [_candidates(y, costs, shift, weight) for y in (x, -x)]
        next_sums, next_paths = [math.inf] * states, list(paths)
        for state, total in enumerate(sums):
            for parity, (cost, code) in enumerate(found[state & 1]):
                to = TRANSITIONS[states][state][parity]
                if total + cost < next_sums[to]:
                    next_sums[to], next_paths[to] = total + cost, [*paths[state], code]
        sums, paths = next_sums, next_paths
    return paths[sums.index(min(sums))]


def _candidates(y: float, costs: list[float], shift: int, weight: float) -> list[tuple[float, int]]:
    """The cheapest even and odd code for y, of the two around it, one nearer to 0 and 0, with their costs."""
    below = math.floor(y / 2 if y >= 0 else (y - 1) / 2)
    first = below - (y >= 0)
    best = [(math.inf, 0)] * 2
    for code in (first, first + 1, first + 2, 0):
        high = code >> shift
        bits = costs[high + REACH] + shift if -REACH <= high <= REACH else costs[-1]
        error = y - _value(code)
        cost = error * error + weight * bits
        if -LARGEST <= code <= LARGEST and cost < best[code & 1][0]:
            best[code & 1] = (cost, code)
    return best
