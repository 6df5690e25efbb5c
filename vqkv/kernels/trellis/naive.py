"""Trellis-coded quantization of rows of values: two mirrored quantizers, and which of them the codes before call for.
Here the best path is found by dynamic programming, value after value, in Python.

Values are in units of the step. The quantizer A holds 0, 2, 4, ... and -1, -3, ...; code e means 2e, or 2e + 1 where e
is negative. Its mirror image holds the negatives of these, so that for symmetric values both have the same frequencies
and one table serves them (universal TCQ: Kasner, Marcellin & Hunt 1999). Of one row, codes are read channel after
channel: state 0 comes first, an odd state means the mirror image, and the parity of a code leads to the next state. The
8 states are those of VVC's dependent quantization (ITU-T H.266 v2).
"""

import math

import torch
from torch import Tensor

# next state after an even and an odd code
TRANSITIONS = ((0, 2), (5, 7), (1, 3), (6, 4), (2, 0), (4, 6), (3, 1), (7, 5))
STATES = len(TRANSITIONS)
REACH = 255  # codes that a table of costs holds, in both directions; the last column is what all others cost
LARGEST = (1 << 23) - 1  # of a code


def trellis_encode(x: Tensor, costs: Tensor, table_of: Tensor, shifts: Tensor, weight: float) -> Tensor:
    """Find int32 codes for x (rows, channels), in steps: those of least squared error plus ``weight`` times their bits
    (Viterbi 1967). ``costs``, float32 (tables, 2 * REACH + 2): bits of the codes -REACH to REACH and of any
    other; ``table_of`` and ``shifts``, int32 (channels,): a channel's table, and how many low bits it keeps apart."""
    tables = list(zip(costs[table_of.long()].tolist(), shifts.tolist(), strict=True))
    paths = [_best([*zip(row, tables, strict=True)], weight) for row in x.float().tolist()]
    return torch.tensor(paths, dtype=torch.int32).view(x.shape)


def trellis_decode(codes: Tensor, step: Tensor) -> Tensor:
    """Read codes int32 (rows, channels) back: float32, multiples of ``step``."""
    out = torch.empty(codes.shape, dtype=torch.float32)
    for row, values in zip(codes.tolist(), out):
        state = 0
        for channel, code in enumerate(row):
            values[channel] = _value(code) * (-1 if state & 1 else 1)
            state = TRANSITIONS[state][code & 1]
    return out * step


def _value(code: int) -> int:
    return 2 * code + (code < 0)


def _best(row: list, weight: float) -> list[int]:
    sums = [0.0] + [math.inf] * (STATES - 1)
    paths: list[list[int]] = [[]] * STATES
    for x, (costs, shift) in row:
        x = min(max(x, -2.0 * LARGEST), 2.0 * LARGEST) if x == x else 0.0
        candidates = [_candidates(y, costs, shift, weight) for y in (x, -x)]
        next_sums, next_paths = [math.inf] * STATES, list(paths)
        for state, total in enumerate(sums):
            for parity, (cost, code) in enumerate(candidates[state & 1]):
                to = TRANSITIONS[state][parity]
                if total + cost < next_sums[to]:
                    next_sums[to], next_paths[to] = total + cost, [*paths[state], code]
        sums, paths = next_sums, next_paths
    return paths[sums.index(min(sums))]


def _candidates(y: float, costs: list[float], shift: int, weight: float) -> list[tuple[float, int]]:
    """Find the cheapest even and odd code for y, of the two around it, one nearer to 0 and 0, with their costs."""
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
