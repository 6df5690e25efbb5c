"""The best path on a GPU: a program a row, a lane a state. Sums are in fp32, so that ties may fall otherwise than on a
CPU; what is read back does not depend on who encoded."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vqkv.kernels.trellis.code import LARGEST, REACH, origins, transitions

SCRATCH = 1 << 28  # bytes for the ways to every state
ROWS = 64  # of a program that decodes


def trellis_encode(x: Tensor, costs: Tensor, table_of: Tensor, shifts: Tensor, weight: float, states: int) -> Tensor:
    """``naive.trellis_encode``."""
    codes = torch.empty(x.shape, dtype=torch.int32, device=x.device)
    rows = max(1, SCRATCH // (5 * states * x.shape[1]))
    ways, about = origins(states).int().to(x.device), (table_of.contiguous(), shifts.contiguous())
    for part, out in zip(x.float().contiguous().split(rows), codes.split(rows), strict=True):
        if len(part):
            chosen = torch.empty(*part.shape, states, dtype=torch.int32, device=x.device)
            origin = torch.empty(*part.shape, states, dtype=torch.uint8, device=x.device)
            with torch.cuda.device_of(x):
                _trellis_encode[(len(part),)](
                    part, costs.contiguous(), *about, ways, out, chosen, origin, x.shape[1], float(weight), states,
                    REACH, LARGEST, num_warps=1,
                )  # fmt: skip
    return codes


def trellis_decode(codes: Tensor, step: Tensor, states: int) -> Tensor:
    """``naive.trellis_decode``."""
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    after = transitions(states).int().to(codes.device)
    if len(codes):
        with torch.cuda.device_of(codes):
            _trellis_decode[(triton.cdiv(len(codes), ROWS),)](
                codes.contiguous(), after, step.float(), out, len(codes), codes.shape[1], ROWS, num_warps=2
            )
    return out


@triton.jit
def _cheapest(value, way, table, shift, weight, REACH: tl.constexpr, LARGEST: tl.constexpr):
    """What ``naive._candidates`` finds for the quantizer and the parity of each lane's way."""
    y = tl.where((way & 2) != 0, -value, value)
    below = tl.floor(tl.where(y >= 0, y / 2, (y - 1) / 2)).to(tl.int32)
    first = below - (y >= 0).to(tl.int32)
    best, chosen = tl.full(way.shape, float("inf"), tl.float32), tl.zeros(way.shape, tl.int32)
    for i in tl.static_range(4):
        code = first + i if i < 3 else tl.zeros(way.shape, tl.int32)
        high = code >> shift
        held = (high >= -REACH) & (high <= REACH)
        bits = tl.load(table + tl.where(held, high + REACH, 2 * REACH + 1)) + tl.where(held, shift, 0)
        error = y - (2 * code + (code < 0).to(tl.int32)).to(tl.float32)
        cost = error * error + weight * bits
        take = ((code & 1) == (way & 1)) & (code >= -LARGEST) & (code <= LARGEST) & (cost < best)
        best, chosen = tl.where(take, cost, best), tl.where(take, code, chosen)
    return best, chosen


@triton.jit
def _trellis_encode(
    x, costs, table_of, shifts, ways, codes, chosen, origin, channels, weight, STATES: tl.constexpr,
    REACH: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One row, forwards to the best sum and back along its path."""
    start, to = tl.program_id(0).to(tl.int64) * channels, tl.arange(0, STATES)
    one, other = tl.load(ways + 2 * to), tl.load(ways + 2 * to + 1)
    sums = tl.where(to == 0, 0.0, float("inf"))
    for channel in range(channels):
        value = tl.load(x + start + channel)
        value = tl.where(value == value, tl.minimum(tl.maximum(value, -2.0 * LARGEST), 2.0 * LARGEST), 0.0)
        table, shift = costs + tl.load(table_of + channel) * (2 * REACH + 2), tl.load(shifts + channel)
        cost, code = _cheapest(value, one, table, shift, weight, REACH, LARGEST)
        others_cost, others_code = _cheapest(value, other, table, shift, weight, REACH, LARGEST)
        total, instead = tl.gather(sums, one >> 1, 0) + cost, tl.gather(sums, other >> 1, 0) + others_cost
        better, place = instead < total, (start + channel) * STATES + to
        tl.store(chosen + place, tl.where(better, others_code, code))
        tl.store(origin + place, (tl.where(better, other, one) >> 1).to(tl.uint8))
        sums = tl.minimum(total, instead)
        sums -= tl.min(sums, 0)
    tl.debug_barrier()  # what one lane wrote, all read
    state = tl.argmin(sums, 0)
    for i in range(channels):
        place = (start + channels - 1 - i) * STATES + state
        tl.store(codes + start + channels - 1 - i, tl.load(chosen + place))
        state = tl.load(origin + place).to(tl.int32)


@triton.jit
def _trellis_decode(codes, after, step, out, rows, channels, ROWS: tl.constexpr):
    """A lane a row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there, size, state = row < rows, tl.load(step), tl.zeros((ROWS,), tl.int32)
    for channel in range(channels):
        code = tl.load(codes + row * channels + channel, mask=there, other=0)
        value = (2 * code + (code < 0).to(tl.int32)).to(tl.float32) * size
        tl.store(out + row * channels + channel, tl.where((state & 1) != 0, -value, value), mask=there)
        state = tl.load(after + 2 * state + (code & 1))
