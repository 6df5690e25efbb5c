"""What encoder and decoder agree on: frequency tables, and which of them a channel uses.

A stream holds integers (channels, tokens). Four states of 32 bits, the lanes, each from 2^16 on, take turns along the
tokens of a channel, and read 16-bit words from one stream: at every draw, the lanes that fall below 2^16 take the next
words, in the order of the lanes. The stream begins with the states, two words each, low word first. Decoding ends with
no word left, the first state at 2^16 plus a checksum of the values, from which encoding began, and every other state at
2^16; anything else is not what was written. The checksum of 16 bits makes a stream half a bit longer.

A *draw* is a look-up of 12 bits in a table, or so many bits as they are. A channel's tokens come in units of ``width``
(1, 2, 4 or 8) neighbours, unit u in lane u mod 4. A unit is one draw where its values are frequent together;
else an escape, after which each value is drawn by itself from the channel's table of single values. A value that this
does not hold is another escape, then its 24 bits, the high half first. Last come ``shift`` low bits of every value,
where a channel keeps them apart. What a lane lacks of a unit at the end is zeros.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

LANES = 4  # states of a stream
BITS = 12
TOTAL = 1 << BITS  # frequencies of a table sum to it
LOW = 1 << 16  # states are at least that
HALF = 12  # bits of half of an escaped value
OFFSET = 1 << (2 * HALF - 1)  # added to an escaped value: it lies from -2^23 to 2^23 - 1
ESCAPE, ESCAPED = -(1 << 31), 1 << 15  # as a table's value, and the bit that marks its slots
WIDTHS = ((8, 1, 3973), (4, 2, 3482), (2, 7, 2048))  # of units: largest size of a value, least frequency of zeros
MAX_ESCAPES = 5  # for each value of a unit: an escape of frequency p wastes p log2(1/p) bits, here up to 0.01 a value


@dataclass(frozen=True, eq=False)
class Code:
    """``symbols``, int64: those of nonzero frequency, table after table, from the highest bit down the value or values
    (32 bits; of units, 4 bits each), the frequency (16), whether it is an escape (1), 15 zeros. ``intervals``, int32:
    frequency and first slot (16 bits each) of every symbol, one table after the other, or 0 for a unit that is not
    held; ``tables``, int32 (tables, 3): where these begin, the least value (of units: the largest size of one), the
    number of single values or units, behind which the escape lies. ``channels``, int32 (channels, 4): table of single
    values, table of units or -1, width, shift."""

    symbols: Tensor
    intervals: Tensor
    tables: Tensor
    channels: Tensor

    @cached_property
    def slots(self) -> Tensor:
        """int64 (tables, 4096), what a decoder finds: every symbol as often as it is frequent, its lowest bits counting
        these. 32 KiB a table: on a CPU it is made for each call, as tables of all layers would outweigh their cache."""
        counts = self.symbols >> 16 & 0xFFFF
        starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
        counted = torch.arange(len(starts), device=starts.device) - starts
        return (self.symbols.repeat_interleave(counts) | counted).view(-1, TOTAL)

    def to(self, device: torch.device | str) -> "Code":
        return Code(*(x.to(device) for x in (self.symbols, self.intervals, self.tables, self.channels)))


def first_states(values: Tensor) -> Tensor:
    """Return 2^16 plus a checksum, int32 (streams,), of streams int32 (streams, tokens, channels). Odd weights tell any
    single value that differs; arithmetic is that of 32 bits, of whose product with 2^32 over the golden ratio the high
    half depends on every bit."""
    weights = torch.arange(1, 2 * values[0].numel(), 2, dtype=torch.int32, device=values.device) if len(values) else 1
    total = (values.flatten(1) * weights).sum(1, dtype=torch.int32)
    return (total * -1640531535 >> 16 & 0xFFFF) + LOW


def most_words(channels: int, tokens: int) -> int:
    """Bound a stream's words: a state's two, and at most a word for each of five draws a value."""
    return 2 * LANES + 5 * channels * (tokens + 7)


def make_code(frequencies: list[np.ndarray], least: list[int], table_of: Tensor, shifts: Tensor) -> Code:
    """Make tables from ``frequencies`` of single values from ``least`` on, and last of the escape (0: there is none),
    each summing to 4096; ``table_of`` and ``shifts``: (channels,). In whole numbers: every machine makes the same."""
    singles = [_Table.of_singles(each, low) for each, low in zip(frequencies, least)]
    units, widths = {}, []
    for number, (each, low) in enumerate(zip(frequencies, least)):
        zeros = int(each[-low]) if 0 <= -low < len(each) - 1 else 0
        made = (_Table.of_units(each, low, width, most) for width, most, least_zeros in WIDTHS if zeros >= least_zeros)
        chosen = next((table for table in made if table.escapes <= MAX_ESCAPES * table.width), singles[number])
        widths.append(chosen.width)
        if chosen.width > 1:
            units[number] = chosen
    order = [*singles, *units.values()]
    unit_of = {number: len(singles) + i for i, number in enumerate(units)}
    starts = np.cumsum([0, *(len(table.intervals) for table in order)])
    rows = [(start, table.least, table.count) for start, table in zip(starts, order)]
    about = [
        (table, unit_of.get(table, -1), widths[table], shift)
        for table, shift in zip(table_of.tolist(), shifts.tolist(), strict=True)
    ]
    return Code(
        torch.from_numpy(np.concatenate([table.symbols for table in order])),
        torch.from_numpy(np.concatenate([table.intervals for table in order])),
        torch.tensor(rows, dtype=torch.int32).view(-1, 3),
        torch.tensor(about, dtype=torch.int32).view(-1, 4),
    )


@dataclass
class _Table:
    symbols: np.ndarray
    intervals: np.ndarray
    least: int
    count: int
    width: int = 1
    escapes: int = 0

    @staticmethod
    def of_singles(frequencies: np.ndarray, least: int) -> "_Table":
        count = len(frequencies) - 1
        values = np.append(np.arange(least, least + count, dtype=np.int64), ESCAPE)
        return _Table(*_spans(frequencies.astype(np.int64), values), least, count)

    @staticmethod
    def of_units(frequencies: np.ndarray, least: int, width: int, most: int) -> "_Table":
        """Count units of values up to ``most`` in size, as if independent; the first value is the last digit."""
        digits = np.arange(-most, most + 1)
        there = (digits >= least) & (digits < least + len(frequencies) - 1)
        single = np.where(there, frequencies.astype(np.int64)[np.where(there, digits - least, 0)], 0)
        share, packed = np.full(1, 1 << 36, np.int64), np.zeros(1, np.int64)
        for digit in range(width):
            share = (single[:, None] * share[None] >> BITS).reshape(-1)
            packed = ((digits & 15)[:, None] << 4 * digit | packed[None]).reshape(-1)
        slots = share + (1 << 23) >> 24
        slots[slots.argmax()] -= max(0, slots.sum() - TOTAL + 1)  # the escape's slot
        every = np.append(slots, TOTAL - slots.sum())
        return _Table(*_spans(every, np.append(packed, ESCAPE)), most, len(slots), width, int(every[-1]))


def _spans(frequencies: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Make symbols and intervals of values that take so many slots each, in order."""
    first = np.cumsum(frequencies) - frequencies
    symbols = values << 32 | (values == ESCAPE) * ESCAPED | frequencies << 16
    return symbols[frequencies > 0], np.where(frequencies > 0, frequencies << 16 | first, 0).astype(np.int32)
