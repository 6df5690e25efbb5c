"""The best path on a CPU in compiled loops: the codes of ``naive``."""

import numpy as np
import torch
from torch import Tensor

from vqkv.kernels.machine import compiled, index, serves, spread
from vqkv.kernels.trellis.naive import LARGEST, REACH, TRANSITIONS

COST = 100  # additions that a value is worth
FAR = 2.0 * LARGEST
NEXT = np.array(TRANSITIONS)
# the two ways to each state, (states, 2): twice the state that it comes from plus the code's parity
WAYS = NEXT.reshape(-1).argsort(kind="stable").reshape(-1, 2)


def trellis_encode(x: Tensor, costs: Tensor, table_of: Tensor, shifts: Tensor, weight: float) -> Tensor:
    """Compute ``naive.trellis_encode``."""
    if not serves(x):
        return trellis_encode(x.cpu(), costs.cpu(), table_of.cpu(), shifts.cpu(), weight).to(x.device)
    codes = torch.empty(x.shape, dtype=torch.int32)
    arrays = x.float().contiguous(), costs, table_of, shifts, codes
    fixed = [array.numpy() for array in arrays]
    spread(lambda i, j: _encode(i, j, weight, WAYS, *fixed), len(x), COST * x.shape[1])
    return codes


def trellis_decode(codes: Tensor, step: Tensor) -> Tensor:
    """Compute ``naive.trellis_decode``."""
    if not serves(codes):
        return trellis_decode(codes.cpu(), step.cpu()).to(codes.device)
    out = torch.empty(codes.shape, dtype=torch.float32)
    fixed = codes.contiguous().numpy(), out.numpy()
    size = np.float32(step.item())
    spread(lambda i, j: _decode(i, j, size, NEXT, *fixed), len(codes), 4 * codes.shape[1])
    return out


@compiled(inline=True)
def _value(code):
    return 2 * code + (code < 0)


@compiled(inline=True)
def _cost(code, y, table, shift, weight):
    high = code >> shift
    held = -REACH <= high <= REACH
    bits = np.float64(table[index(high + REACH if held else len(table) - 1)]) + (shift if held else 0)
    error = y - np.float64(_value(code))
    return error * error + weight * bits if -LARGEST <= code <= LARGEST else np.inf


@compiled(inline=True)
def _candidates(y, table, shift, weight):
    """Compute ``naive._candidates``: cost and code, even and odd."""
    first = np.int64(np.floor(y / 2 if y >= 0 else (y - 1) / 2)) - (y >= 0)
    a, b, c = (
        _cost(first, y, table, shift, weight),
        _cost(first + 1, y, table, shift, weight),
        _cost(first + 2, y, table, shift, weight),
    )
    zero = _cost(np.int64(0), y, table, shift, weight)
    code = first if a <= c else first + 2  # of the parity that two of the three have
    alike, other = (min(a, c), code), (b, first + 1)
    even, odd = (other, alike) if first & 1 else (alike, other)
    return even if even[0] <= zero else (zero, np.int64(0)), odd


@compiled()
def _encode(start, stop, weight, origins, x, costs, table_of, shifts, codes):
    channels, states = x.shape[1], len(origins)
    sums, after = np.empty(states), np.empty(states)
    chosen, origin = np.empty((channels, states), np.int32), np.empty((channels, states), np.int8)
    best, code_of = np.empty(4), np.empty(4, np.int32)  # of each quantizer, even and odd
    for row in range(start, stop):
        sums[:] = np.inf
        sums[0] = 0.0
        for channel in range(channels):
            value = np.float64(x[row, channel])
            value = np.float64(min(max(value, -FAR), FAR) if value == value else 0.0)
            table, shift = costs[table_of[channel]], np.int64(shifts[channel])
            for side in range(2):
                even, odd = _candidates(value if side == 0 else -value, table, shift, weight)
                best[index(2 * side)], code_of[index(2 * side)] = even
                best[index(2 * side + 1)], code_of[index(2 * side + 1)] = odd
            for to in range(states):  # both ways there
                one, other = origins[index(to), 0], origins[index(to), 1]
                total = sums[index(one >> 1)] + best[index(one & 3)]
                instead = sums[index(other >> 1)] + best[index(other & 3)]
                way = other if instead < total else one
                after[index(to)] = min(total, instead)
                origin[index(channel), index(to)] = way >> 1
                chosen[index(channel), index(to)] = code_of[index(way & 3)]
            sums, after = after, sums
        state = np.argmin(sums)
        for channel in range(channels - 1, -1, -1):
            codes[row, channel] = chosen[channel, state]
            state = origin[channel, state]


@compiled()
def _decode(start, stop, step, transitions, codes, out):
    for row in range(start, stop):
        state = 0
        for channel in range(codes.shape[1]):
            code = codes[row, channel]
            value = np.float32(_value(code)) * step
            out[row, channel] = -value if state & 1 else value
            state = transitions[state, code & 1]
