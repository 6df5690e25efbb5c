"""rANS on a GPU: a program a stream, a lane a state, words taken and given by prefix sums over the lanes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vqkv.kernels.entropy.code import LANES as LANES_OF_A_STREAM
from vqkv.kernels.entropy.code import Code, first_states, most_words

LANES = tl.constexpr(LANES_OF_A_STREAM)


def rans_encode(values: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """Compute ``naive.rans_encode``. Streams are written from their ends on, into rows that hold the longest."""
    streams, channels, tokens = values.shape
    values = values.int().contiguous()
    most = most_words(channels, tokens)
    words = torch.empty(streams, most, dtype=torch.int16, device=values.device)
    lengths = torch.zeros(streams, dtype=torch.int64, device=values.device)
    if streams:
        with torch.cuda.device_of(values):
            _rans_encode[(streams,)](
                values, first_states(values.mT), words, lengths, code.channels, code.tables, code.intervals, channels,
                tokens, most, num_warps=1,
            )  # fmt: skip
    return words[torch.arange(most, device=words.device) >= most - lengths.unsqueeze(1)], lengths


def rans_decode(words: Tensor, lengths: Tensor, code: Code, tokens: int) -> tuple[Tensor, Tensor]:
    """Compute ``naive.rans_decode``."""
    streams, channels = len(lengths), len(code.channels)
    out = torch.empty(streams, tokens, channels, dtype=torch.int32, device=words.device)
    final = torch.zeros(streams, dtype=torch.int32, device=words.device)
    if streams:
        with torch.cuda.device_of(words):
            _rans_decode[(streams,)](
                words.contiguous(), lengths.cumsum(0), out, final, code.channels, code.slots, channels, tokens,
                num_warps=1,
            )  # fmt: skip
    return out, final == first_states(out)


@triton.jit
def _refill(x, mask, words, position, end):
    """Give the next words to the lanes of ``mask`` whose states x need one; zeros after the end."""
    needs = mask & (x < 65536)
    count = needs.to(tl.int64)
    at = position + tl.cumsum(count, 0) - count
    word = tl.load(words + at, mask=needs & (at < end), other=0).to(tl.uint32) & 65535
    return tl.where(needs, (x << 16) | word, x), position + tl.sum(count, 0)


@triton.jit
def _look_up(x, mask, slots, table, words, position, end):
    """Look up the values of the lanes of ``mask`` in a table, and whether these are escapes."""
    entry = tl.load(slots + table * 4096 + (x & 4095).to(tl.int64), mask=mask, other=0)
    step = ((entry >> 16) & 65535).to(tl.uint32) * (x >> 12) + (entry & 4095).to(tl.uint32)
    x, position = _refill(tl.where(mask, step, x), mask, words, position, end)
    return (entry >> 32).to(tl.int32), mask & ((entry & 32768) != 0), x, position


@triton.jit
def _raw(x, mask, bits, words, position, end):
    """Draw so many bits of the states of ``mask`` as they are."""
    low = (x & ((1 << bits) - 1).to(tl.uint32)).to(tl.int32)
    x, position = _refill(tl.where(mask, x >> bits.to(tl.uint32), x), mask, words, position, end)
    return low, x, position


@triton.jit
def _rans_decode(words, ends, out, final, channels, slots, num_channels, tokens):
    """Decode one stream, channel by channel."""
    stream = tl.program_id(0).to(tl.int64)
    end = tl.load(ends + stream)
    position = tl.load(ends + stream - 1, mask=stream > 0, other=0)
    lane = tl.arange(0, LANES)
    at = position + 2 * lane
    low = tl.load(words + at, mask=at < end, other=0).to(tl.uint32) & 65535
    high = tl.load(words + at + 1, mask=at + 1 < end, other=0).to(tl.uint32) & 65535
    x, position = (high << 16) | low, position + 2 * LANES
    out += stream * tokens * num_channels
    half = tl.full((), 12, tl.int32)
    for channel in range(num_channels):
        table = tl.load(channels + channel * 4).to(tl.int64)
        unit = tl.load(channels + channel * 4 + 1).to(tl.int64)
        width = tl.load(channels + channel * 4 + 2)
        shift = tl.load(channels + channel * 4 + 3)
        units = (tokens + width - 1) // width
        first = tl.full((), 0, tl.int32)
        while first < units:
            here = first + lane < units
            packed, apart = tl.zeros((LANES,), tl.int32), here
            if unit >= 0:
                packed, apart, x, position = _look_up(x, here, slots, unit, words, position, end)
            some_apart = tl.max(apart.to(tl.int32), 0) > 0
            for j in range(width):
                value = (((packed >> (4 * j)) & 15) ^ 8) - 8
                if some_apart:
                    single, beyond, x, position = _look_up(x, apart, slots, table, words, position, end)
                    if tl.max(beyond.to(tl.int32), 0) > 0:
                        upper, x, position = _raw(x, beyond, half, words, position, end)
                        lower, x, position = _raw(x, beyond, half, words, position, end)
                        single = tl.where(beyond, ((upper << 12) | lower) - 8388608, single)
                    value = tl.where(apart, single, value)
                token = (first + lane) * width + j
                tl.store(out + token * num_channels + channel, value, mask=here & (token < tokens))
            if shift > 0:
                tl.debug_barrier()
                for j in range(width):
                    token = (first + lane) * width + j
                    there = here & (token < tokens)
                    value = tl.load(out + token * num_channels + channel, mask=there, other=0)
                    lows, x, position = _raw(x, here, shift, words, position, end)
                    tl.store(out + token * num_channels + channel, (value << shift) | lows, mask=there)
            first += LANES
    good = tl.sum(((lane > 0) & (x != 65536)).to(tl.int32), 0) == 0
    first = tl.sum(tl.where(lane == 0, x.to(tl.int32), 0), 0)
    tl.store(final + stream, tl.where(good & (position == end), first, 0))


@triton.jit
def _put(x, mask, frequency, first, bits, words, position):
    """Take a draw into the states of ``mask``; words that do not fit any more go before ``position``."""
    full = mask & ((x >> (32 - bits).to(tl.uint32)) >= frequency)
    count = full.to(tl.int64)
    position -= tl.sum(count, 0)
    tl.store(words + position + tl.cumsum(count, 0) - count, (x & 65535).to(tl.int16), mask=full)
    shrunk = tl.where(full, x >> 16, x)
    divisor = tl.where(mask, frequency, 1)
    quotient = shrunk // divisor
    taken = (quotient << bits.to(tl.uint32)) + first + (shrunk - quotient * divisor)
    return tl.where(mask, taken, x), position


@triton.jit
def _put_interval(x, mask, interval, words, position):
    interval = interval.to(tl.uint32)
    return _put(x, mask, interval >> 16, interval & 65535, tl.full((), 12, tl.int32), words, position)


@triton.jit
def _rans_encode(
    values, starts, words, lengths, channels, tables, intervals, num_channels, tokens, most
):  # fmt: skip
    """Encode one stream, its last draw first."""
    stream = tl.program_id(0).to(tl.int64)
    values += stream * num_channels * tokens
    words += stream * most
    lane = tl.arange(0, LANES)
    x = tl.where(lane == 0, tl.load(starts + stream), 65536).to(tl.uint32)
    position = tl.full((), 0, tl.int64) + most
    half, one = tl.full((), 12, tl.int32), tl.full((LANES,), 1, tl.uint32)
    for back in range(num_channels):
        channel = num_channels - 1 - back
        row = values + channel * tokens
        table = tl.load(channels + channel * 4).to(tl.int64)
        unit = tl.load(channels + channel * 4 + 1).to(tl.int64)
        width = tl.load(channels + channel * 4 + 2)
        shift = tl.load(channels + channel * 4 + 3)
        start, least = tl.load(tables + table * 3), tl.load(tables + table * 3 + 1)
        size = tl.load(tables + table * 3 + 2)
        units = (tokens + width - 1) // width
        first = (units - 1) // LANES * LANES
        while first >= 0:
            here = first + lane < units
            if shift > 0:
                for k in range(width):
                    token = (first + lane) * width + width - 1 - k
                    value = tl.load(row + token, mask=here & (token < tokens), other=0)
                    low = (value & ((1 << shift) - 1)).to(tl.uint32)
                    x, position = _put(x, here, one, low, shift, words, position)
            apart, interval = here, tl.zeros((LANES,), tl.int32)
            if unit >= 0:
                origin, largest = tl.load(tables + unit * 3), tl.load(tables + unit * 3 + 1)
                at, small = tl.zeros((LANES,), tl.int32), here
                for k in range(width):
                    token = (first + lane) * width + width - 1 - k
                    value = tl.load(row + token, mask=here & (token < tokens), other=0) >> shift
                    small = small & (value >= -largest) & (value <= largest)
                    at = at * (2 * largest + 1) + tl.where(small, value + largest, 0)
                interval = tl.load(intervals + origin + at, mask=small, other=0)
                apart = here & (interval == 0)
                escape = tl.load(intervals + origin + tl.load(tables + unit * 3 + 2))
                interval = tl.where(apart, escape, interval)
            if tl.max(apart.to(tl.int32), 0) > 0:
                for k in range(width):
                    token = (first + lane) * width + width - 1 - k
                    value = tl.load(row + token, mask=apart & (token < tokens), other=0) >> shift
                    held = (value >= least) & (value < least + size)
                    beyond = apart & (held == 0)
                    if tl.max(beyond.to(tl.int32), 0) > 0:
                        both = value + 8388608
                        x, position = _put(x, beyond, one, (both & 4095).to(tl.uint32), half, words, position)
                        x, position = _put(x, beyond, one, ((both >> 12) & 4095).to(tl.uint32), half, words, position)
                    single = tl.load(intervals + start + tl.where(held, value - least, size), mask=apart, other=0)
                    x, position = _put_interval(x, apart, single, words, position)
            if unit >= 0:
                x, position = _put_interval(x, here, interval, words, position)
            first -= LANES
    position -= 2 * LANES
    tl.store(words + position + 2 * lane, (x & 65535).to(tl.int16))
    tl.store(words + position + 2 * lane + 1, (x >> 16).to(tl.int16))
    tl.store(lengths + stream, most - position)
