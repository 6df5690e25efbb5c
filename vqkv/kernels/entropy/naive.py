"""rANS one draw after the other, in Python: see ``code``."""

import torch
from torch import Tensor

from vqkv.kernels.entropy.code import BITS, ESCAPE, HALF, LANES, LOW, OFFSET, TOTAL, Code, first_states

MASK = (1 << 16) - 1


def rans_encode(values: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """Code integers (streams, channels, tokens) of 24 bits: all streams' words, int16, and how many each has, int64."""
    starts = first_states(values.int().mT).tolist()
    streams = [_written(list(_draws(x.tolist(), code)), start) for x, start in zip(values, starts)]
    words = [word - (word >> 15 << 16) for stream in streams for word in stream]
    return torch.tensor(words, dtype=torch.int16), torch.tensor([len(x) for x in streams], dtype=torch.int64)


def rans_decode(words: Tensor, lengths: Tensor, code: Code, tokens: int) -> tuple[Tensor, Tensor]:
    """Undo it: int32 (streams, tokens, channels), and whether each stream is one that was written, bool."""
    out = torch.zeros(len(lengths), tokens, len(code.channels), dtype=torch.int32)
    ends = torch.zeros(len(lengths), dtype=torch.int32)
    for i, stream in enumerate(words.split(lengths.tolist())):
        reader = _Reader([word & MASK for word in stream.tolist()])
        for channel, about in enumerate(code.channels.tolist()):
            out[i, :, channel] = torch.tensor(_read(reader, code, about, tokens), dtype=torch.int32)
        first, *others = reader.states
        if reader.position == len(reader.words) and first < 2 * LOW and {*others} <= {LOW}:
            ends[i] = first
    return out, ends == first_states(out)


def _draws(rows: list[list[int]], code: Code):
    """Yield (lane, bits, frequency, first) of every draw in the order of decoding; ``frequency`` 1 of raw bits."""
    intervals, tables = code.intervals.tolist(), code.tables.tolist()

    def single(value, table):
        start, least, count = tables[table]
        held = 0 <= value - least < count
        return held, intervals[start + (value - least if held else count)]

    for row, (table, unit, width, shift) in zip(rows, code.channels.tolist(), strict=True):
        row = row + [0] * (-len(row) % width)
        parts = [row[i : i + width] for i in range(0, len(row), width)]
        for first in range(0, len(parts), LANES):
            lanes = [[value >> shift for value in part] for part in parts[first : first + LANES]]
            apart = [*range(len(lanes))]
            if unit >= 0:
                start, most, count = tables[unit]
                apart = []
                for lane, part in enumerate(lanes):
                    number = sum((value + most) * (2 * most + 1) ** j for j, value in enumerate(part))
                    small = all(abs(value) <= most for value in part)
                    interval = intervals[start + number] if small else 0
                    if not interval:
                        apart.append(lane)
                    yield lane, BITS, *divmod(interval or intervals[start + count], 1 << 16)
            for j in range(width):
                beyond = []
                for lane in apart:
                    held, interval = single(lanes[lane][j], table)
                    if not held:
                        beyond.append(lane)
                    yield lane, BITS, *divmod(interval, 1 << 16)
                for down in (HALF, 0):
                    for lane in beyond:
                        yield lane, HALF, 1, lanes[lane][j] + OFFSET >> down & ((1 << HALF) - 1)
            for j in range(width if shift else 0):
                for lane, part in enumerate(parts[first : first + LANES]):
                    yield lane, shift, 1, part[j] & ((1 << shift) - 1)


def _written(draws: list, start: int) -> list[int]:
    states, words = [start] + [LOW] * (LANES - 1), []
    for lane, bits, frequency, first in reversed(draws):
        x = states[lane]
        if x >= frequency << (32 - bits):
            words.append(x & MASK)
            x >>= 16
        states[lane] = (x // frequency << bits) + first + x % frequency
    return [half for x in states for half in (x & MASK, x >> 16)] + words[::-1]


class _Reader:
    def __init__(self, words: list[int]):
        words = words + [0] * (2 * LANES - len(words))
        self.words, self.position = words, 2 * LANES
        self.states = [words[2 * i] | words[2 * i + 1] << 16 for i in range(LANES)]

    def refill(self, lane: int, x: int) -> None:
        if x < LOW:
            x = x << 16 | (self.words[self.position] if self.position < len(self.words) else 0)
            self.position += 1
        self.states[lane] = x

    def raw(self, lane: int, bits: int) -> int:
        x = self.states[lane]
        self.refill(lane, x >> bits)
        return x & ((1 << bits) - 1)

    def look_up(self, lane: int, slots: Tensor) -> int:
        x = self.states[lane]
        entry = int(slots[x % TOTAL])
        self.refill(lane, (entry >> 16 & MASK) * (x >> BITS) + entry % TOTAL)
        return entry >> 32


def _read(reader: _Reader, code: Code, about: list[int], tokens: int) -> list[int]:
    table, unit, width, shift = about
    out = []
    for first in range(0, -(-tokens // width), LANES):
        lanes = range(min(LANES, -(-tokens // width) - first))
        parts, apart = [[0] * width for _ in lanes], [*lanes]
        if unit >= 0:
            values = [reader.look_up(lane, code.slots[unit]) for lane in lanes]
            apart = [lane for lane in lanes if values[lane] == ESCAPE]
            parts = [[(value >> 4 * j & 15 ^ 8) - 8 for j in range(width)] for value in values]
        for j in range(width):
            for lane in apart:
                parts[lane][j] = reader.look_up(lane, code.slots[table])
            beyond = [lane for lane in apart if parts[lane][j] == ESCAPE]
            for lane in beyond:
                parts[lane][j] = reader.raw(lane, HALF) << HALF
            for lane in beyond:
                parts[lane][j] += reader.raw(lane, HALF) - OFFSET
        for j in range(width if shift else 0):
            for lane in lanes:
                parts[lane][j] = parts[lane][j] << shift | reader.raw(lane, shift)
        out += [value for part in parts for value in part]
    return out[:tokens]
