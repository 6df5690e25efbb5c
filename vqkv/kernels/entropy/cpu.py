"""rANS on a CPU in compiled loops: the streams of ``naive``, bit for bit."""

import threading

import numpy as np
import torch
from torch import Tensor

from vqkv.kernels.entropy.code import BITS, ESCAPE, ESCAPED, HALF, LANES, LOW, OFFSET, Code, first_states, most_words
from vqkv.kernels.machine import compiled, index, serves, spread

COST = 16  # additions that a value is worth
TILE = 16  # channels that are decoded before they are written out, a cache line of every token
WORD, TABLE_BITS, HALF_BITS = np.uint32(16), np.uint32(BITS), np.uint32(HALF)
MASK, HALF_MASK = np.uint32((1 << BITS) - 1), np.uint32((1 << HALF) - 1)
MIN_STATE = np.uint32(LOW)
RAW = 1 << 16  # an interval of frequency 1: bits as they are
_used = threading.local()


def rans_encode(values: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """Compute ``naive.rans_encode``."""
    if not serves(values):
        words, lengths = rans_encode(values.cpu(), code.to("cpu"))
        return words.to(values.device), lengths.to(values.device)
    streams, channels, tokens = values.shape
    most = most_words(channels, tokens)
    buffer, lengths = torch.empty(streams, most, dtype=torch.int16), torch.zeros(streams, dtype=torch.int64)
    values = values.int().contiguous()
    arrays = values, first_states(values.mT), code.channels, code.tables, code.intervals, buffer, lengths
    fixed = [array.numpy() for array in arrays]
    spread(lambda i, j: _encode(i, j, *fixed), streams, COST * channels * tokens)
    kept = [stream[most - length :] for stream, length in zip(buffer, lengths.tolist())]
    return torch.cat([buffer.new_empty(0), *kept]), lengths


def rans_decode(words: Tensor, lengths: Tensor, code: Code, tokens: int) -> tuple[Tensor, Tensor]:
    """Compute ``naive.rans_decode``."""
    if not serves(words):
        values, intact = rans_decode(words.cpu(), lengths.cpu(), code.to("cpu"), tokens)
        return values.to(words.device), intact.to(words.device)
    streams, channels = len(lengths), len(code.channels)
    out = torch.empty(streams, tokens, channels, dtype=torch.int32)
    final = torch.zeros(streams, dtype=torch.int32)
    words = torch.cat([words, words.new_zeros(8)])  # eight are looked at, whether they are needed or not
    arrays = words.view(torch.uint16), lengths.cumsum(0), code.channels, _slots(code.symbols), out, final
    fixed = [array.numpy() for array in arrays]
    spread(lambda i, j: _decode(i, j, *fixed), streams, COST * channels * tokens)
    return out, final == first_states(out)


def _slots(symbols: Tensor) -> Tensor:
    """Make ``Code.slots`` in memory that this thread uses again: 0.04 ms for 20 tables, new memory takes 0.3."""
    size = int((symbols >> 16 & 0xFFFF).sum())
    if len(getattr(_used, "slots", ())) < size:
        _used.slots = torch.empty(size, dtype=torch.int64)
    _repeat(symbols.numpy(), _used.slots.numpy())
    return _used.slots[:size]


@compiled()
def _repeat(symbols, slots):
    at = 0
    for symbol in symbols:
        count = symbol >> 16 & 0xFFFF
        for i in range(count):
            slots[at + i] = symbol | i
        at += count


@compiled()
def _encode(start, stop, values, starts, channels, tables, intervals, buffers, lengths):
    """Write streams start, ..., stop - 1 from the ends of their buffers on, the last draw of the last channel first."""
    states, parts, apart = np.empty(LANES, np.uint32), np.empty((LANES, 8), np.int32), np.empty(LANES, np.bool_)
    tokens = values.shape[2]
    draws = np.empty(5 * (tokens + 8 * LANES), np.int64)
    for stream in range(start, stop):
        buffer, position = buffers[stream], buffers.shape[1]
        states[:] = MIN_STATE
        states[0] = starts[stream]
        for channel in range(channels.shape[0] - 1, -1, -1):
            row, (table, unit, _, shift) = values[stream, channel], channels[channel]
            begin, least, size = tables[table]
            if unit < 0 and shift == 0 and _are_within(row, least, least + size):  # most of them
                for token in range(tokens - 1, -1, -1):
                    draw = _draw_of(intervals[index(begin + row[index(token)] - least)], BITS, token & LANES - 1)
                    position = _put(draw, states, buffer, position)
            else:
                count = _list_draws(row, channels[channel], tables, intervals, parts, apart, draws)
                for i in range(count - 1, -1, -1):
                    position = _put(draws[index(i)], states, buffer, position)
        for lane in range(LANES - 1, -1, -1):
            position -= 2
            buffer[position] = np.int16(np.uint16(states[lane] & np.uint32(0xFFFF)))
            buffer[position + 1] = np.int16(np.uint16(states[lane] >> WORD))
        lengths[stream] = buffers.shape[1] - position


@compiled(inline=True)
def _are_within(row, first, end):
    """Tell whether all values are first, ..., end - 1."""
    within = True
    for i in range(index(len(row))):
        within &= (row[i] >= first) & (row[i] < end)
    return within


@compiled(inline=True)
def _put(draw, states, buffer, position):
    """Take a draw into its lane's state; a word that does not fit any more goes to ``position`` - 1."""
    lane, bits = index(draw & 0xFF), np.uint32(draw >> 8 & 0xFF)
    frequency, first = np.uint32(draw >> 32), np.uint32(draw >> 16 & 0xFFFF)
    x = states[lane]
    full = x >> (np.uint32(32) - bits) >= frequency
    buffer[index(position - 1)] = np.int16(np.uint16(x & np.uint32(0xFFFF)))  # without a branch, which none can foresee
    x = np.uint32(x >> WORD) if full else x
    quotient = np.uint32(x // frequency)
    states[lane] = np.uint32((quotient << bits) + first + np.uint32(x - np.uint32(quotient * frequency)))
    return position - full


@compiled(inline=True)
def _draw_of(interval, bits, lane):
    return np.int64(interval) << 16 | np.int64(bits) << 8 | lane


@compiled(inline=True)
def _list_draws(row, about, tables, intervals, parts, apart, draws):
    """Write a channel's draws in the order of decoding, frequency << 32 | first slot << 16 | bits << 8 | lane, and
    return how many. ``parts`` (lanes, 8) and ``apart`` (lanes,) are memory for a unit of each lane."""
    table, unit, width, shift = about
    (begin, least, size), (origin, largest, units) = tables[table], tables[unit]
    count, tokens = 0, len(row)
    for first in range(0, tokens, LANES * width):
        lanes = min(LANES, (tokens - first + width - 1) // width)
        for lane in range(lanes):
            number, small = 0, unit >= 0
            for j in range(width - 1, -1, -1):
                token = first + lane * width + j
                value = row[index(token)] >> shift if token < tokens else 0
                parts[lane, j] = value
                small &= -largest <= value <= largest
                number = number * (2 * largest + 1) + value + largest
            interval = intervals[index(origin + number)] if small else 0
            apart[lane] = interval == 0
            if unit >= 0:
                draws[index(count)] = _draw_of(interval if interval else intervals[index(origin + units)], BITS, lane)
                count += 1
        for j in range(width):
            beyond = False
            for lane in range(lanes):
                if apart[lane]:
                    value = np.int64(parts[lane, j]) - least
                    held = 0 <= value < size
                    draws[index(count)] = _draw_of(intervals[index(begin + (value if held else size))], BITS, lane)
                    count += 1
                    beyond |= not held
            for half in range(1 if beyond else -1, -1, -1):
                for lane in range(lanes):
                    if apart[lane] and not 0 <= np.int64(parts[lane, j]) - least < size:
                        digit = (parts[lane, j] + OFFSET) >> HALF * half & (1 << HALF) - 1
                        draws[index(count)] = _draw_of(RAW | digit, HALF, lane)
                        count += 1
        for j in range(width if shift else 0):
            for lane in range(lanes):
                token = first + lane * width + j
                low = row[index(token)] & (1 << shift) - 1 if token < tokens else 0
                draws[index(count)] = _draw_of(RAW | low, shift, lane)
                count += 1
    return count


@compiled(inline=True)
def _refill(x, words, position, end):
    """Take the next word into state x, if it needs one; zeros after the end."""
    if x < MIN_STATE:
        x = x << WORD | np.uint32(words[index(position)] if position < end else 0)
        position += 1
    return x, position


@compiled(inline=True)
def _next(x, words, position):
    """Do ``_refill`` where there are words, without a branch: which state needs one cannot be foreseen."""
    more = np.uint32(x << WORD | np.uint32(words[index(position)]))
    needs = x < MIN_STATE
    return (more if needs else x), position + needs


@compiled(inline=True)
def _step(x, entry):
    return np.uint32((np.uint32(entry) >> WORD) * (x >> TABLE_BITS) + (np.uint32(entry) & MASK))


@compiled(inline=True)
def _draw(lane, base, slots, states, words, position, end):
    """Return the value of a look-up in lane's state."""
    entry = slots[base + index(states[lane] & MASK)]
    states[lane], position = _refill(_step(states[lane], entry), words, position, end)
    return np.int32(entry >> 32), position


@compiled()
def _finish(here, width, shift, single, is_unit, slots, states, parts, flags, words, position, end):
    """Turn what the first look-ups found, parts[:here, 0], into values: draw escapes and low bits, unfold units."""
    for lane in range(here):
        value = parts[lane, 0]
        flags[lane, 0] = is_unit and value == ESCAPE
        for j in range(width if is_unit else 0):
            parts[lane, j] = (value >> 4 * j & 15 ^ 8) - 8
    for j in range(width):
        any_beyond = False
        for lane in range(here):
            if flags[lane, 0]:
                parts[lane, j], position = _draw(lane, single, slots, states, words, position, end)
            flags[lane, 1] = parts[lane, j] == ESCAPE
            any_beyond |= parts[lane, j] == ESCAPE
        if any_beyond:
            for half in range(2):
                for lane in range(here):
                    if flags[lane, 1]:
                        digit = np.int32(states[lane] & HALF_MASK)
                        parts[lane, j] = digit << HALF if half == 0 else (parts[lane, j] | digit) - OFFSET
                        states[lane], position = _refill(states[lane] >> HALF_BITS, words, position, end)
    if shift:
        bits, mask = np.uint32(shift), np.uint32((1 << shift) - 1)
        for j in range(width):
            for lane in range(here):
                parts[lane, j] = parts[lane, j] << shift | np.int32(states[lane] & mask)
                states[lane], position = _refill(states[lane] >> bits, words, position, end)
    return position


@compiled(inline=True)
def _unfold(unit, width, tile, at):
    """Write the 8 values of 4 bits."""
    if unit == 0 and width > 2:
        for j in range(8):
            tile[at + index(j)] = 0
        return
    for j in range(8):
        tile[at + index(j)] = np.int32(
            np.int32(np.int32(unit >> np.int32(4 * j)) & np.int32(15)) ^ np.int32(8)
        ) - np.int32(8)


@compiled(inline=True)
def _four(states, slots, base, words, position):
    """Look up four states: return these, their entries, the position of the next word."""
    a, b, c, d = states
    e, f = slots[base + index(a & MASK)], slots[base + index(b & MASK)]
    g, h = slots[base + index(c & MASK)], slots[base + index(d & MASK)]
    a, position = _next(_step(a, e), words, position)
    b, position = _next(_step(b, f), words, position)
    c, position = _next(_step(c, g), words, position)
    d, position = _next(_step(d, h), words, position)
    return (a, b, c, d), (e, f, g, h), position


@compiled(inline=True)
def _low4(states, shift, words, position):
    """Draw so many bits of four states as they are."""
    bits = np.uint32(shift)
    mask = np.uint32((np.uint32(1) << bits) - np.uint32(1))
    a, b, c, d = states
    lows = (a & mask, b & mask, c & mask, d & mask)
    a, position = _next(np.uint32(a >> bits), words, position)
    b, position = _next(np.uint32(b >> bits), words, position)
    c, position = _next(np.uint32(c >> bits), words, position)
    d, position = _next(np.uint32(d >> bits), words, position)
    return (a, b, c, d), lows, position


@compiled(inline=True)
def _join(entries, lows, shift, tile, at):
    for lane, (entry, low) in enumerate(zip(entries, lows)):
        tile[at + index(lane)] = np.int32(np.int32(entry >> 32) << shift | np.int64(low))


@compiled(inline=True)
def _write(entries, width, tile, at):
    p, q = np.int32(entries[0] >> 32), np.int32(entries[1] >> 32)
    r, s = np.int32(entries[2] >> 32), np.int32(entries[3] >> 32)
    if width == 1:
        tile[at], tile[at + index(1)], tile[at + index(2)], tile[at + index(3)] = p, q, r, s
    else:  # all 8 values, of which the next unit writes over those that are not its own
        _unfold(p, width, tile, at)
        _unfold(q, width, tile, at + index(width))
        _unfold(r, width, tile, at + index(2 * width))
        _unfold(s, width, tile, at + index(3 * width))


@compiled(inline=True)
def _fast(row, width, shift, first, units, base, slots, states, positions, words, tiles):
    """Decode units of four lanes of two streams, states in registers, as long as the table holds them all."""
    left, right = (states[0], states[1], states[2], states[3]), (states[4], states[5], states[6], states[7])
    i, j = positions[0], positions[1]
    last, half = len(words) - 8, index(len(tiles) // 2)
    while first + 4 <= units and i <= last and j <= last:
        next_left, values, next_i = _four(left, slots, base, words, i)
        next_right, others, next_j = _four(right, slots, base, words, j)
        if (values[0] | values[1] | values[2] | values[3] | others[0] | others[1] | others[2] | others[3]) & ESCAPED:
            break
        left, right, i, j = next_left, next_right, next_i, next_j
        at = index(row + first * width)
        if shift == 0:
            _write(values, width, tiles, at)
            _write(others, width, tiles, half + at)
        else:
            left, lows, i = _low4(left, shift, words, i)
            _join(values, lows, shift, tiles, at)
            right, lows, j = _low4(right, shift, words, j)
            _join(others, lows, shift, tiles, half + at)
        first += 4
    states[0], states[1], states[2], states[3] = left
    states[4], states[5], states[6], states[7] = right
    positions[0], positions[1] = i, j
    return first


@compiled()
def _decode(start, stop, words, ends, channels, slots, out, final):
    """Decode two streams at a time: what one waits for, the other has time for."""
    states, parts, flags = (
        np.empty(2 * LANES, np.uint32),
        np.empty((LANES, 8), np.int32),
        np.zeros((LANES, 2), np.uint8),
    )
    positions, tokens, count = np.empty(2, np.int64), out.shape[1], channels.shape[0]
    stride = tokens + 8 * LANES
    tiles = np.empty(2 * TILE * stride, np.int32)
    for stream in range(start, stop, 2):
        pair = (stream, min(stream + 1, stop - 1))
        for k in range(2):
            position, end = ends[pair[k] - 1] if pair[k] else 0, ends[pair[k]]
            for lane in range(LANES):
                low, position = _refill(np.uint32(0), words, position, end)
                high, position = _refill(np.uint32(0), words, position, end)
                states[k * LANES + lane] = high << WORD | low
            positions[k] = position
        for corner in range(0, count, TILE):
            last = min(count, corner + TILE)
            for i in range(corner, last):
                unit, width, shift, row = channels[i, 1], channels[i, 2], channels[i, 3], (i - corner) * stride
                single, is_unit = index(channels[i, 0]) << index(BITS), unit >= 0
                base = index(unit) << index(BITS) if is_unit else single
                units, first = np.int64(np.uint32(tokens + width - 1) // np.uint32(width)), np.int64(0)
                while first < units:
                    if shift == 0 or width == 1:
                        first = _fast(row, width, shift, first, units, base, slots, states, positions, words, tiles)
                    here = LANES if units - first > LANES else units - first
                    for k in range(2 if here else 0):
                        mine, position, end = states[k * LANES : (k + 1) * LANES], positions[k], ends[pair[k]]
                        for lane in range(here):
                            parts[lane, 0], position = _draw(lane, base, slots, mine, words, position, end)
                        positions[k] = _finish(
                            here, width, shift, single, is_unit, slots, mine, parts, flags, words, position, end
                        )
                        for lane in range(here):
                            for j in range(width):
                                tiles[k * TILE * stride + row + (first + lane) * width + j] = parts[lane, j]
                    first += here
            for k in range(2):
                for token in range(index(tokens)):
                    line = out[pair[k], token, corner:last]
                    for i in range(index(last - corner)):
                        line[i] = tiles[index(k * TILE * stride + token) + i * index(stride)]
        for k in range(2):
            good = positions[k] == ends[pair[k]]
            for lane in range(1, LANES):
                good &= states[k * LANES + lane] == MIN_STATE
            final[pair[k]] = np.int32(states[k * LANES]) if good else 0
