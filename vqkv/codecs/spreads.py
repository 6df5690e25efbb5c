"""Integer codes around zero, of channels that vary by very different amounts, as streams: channels of like spread share
a table, wide ones keep their low bits apart, and what no table reaches is written out."""

import math

import numpy as np
import torch
from torch import Tensor

from vqkv.codecs.streams import ans, frequencies, reader, written

LARGEST_CODE = (1 << 23) - 1
REACH = 511  # of the widest table
LEVELS = 2 * REACH + 1
WIDEST = 32.0  # codes of a larger root mean square leave low bits out of the tables, which are as good as uniform
MOST_SHIFT = 16
PER_OCTAVE, OCTAVES = 2, 8  # tables for spreads from 2^-8 to 2^8, two an octave
SPREADS = 12  # a table has codes for so many spreads to either side
LEAST_REACH = 3
HALF = 12  # bits: what a code is beyond its table is written as two numbers of so many


def shifts_of(root_mean_squares: Tensor) -> Tensor:
    """Low bits that codes which vary by so much keep apart, uint8 of the same shape."""
    octaves = (root_mean_squares.double() / WIDEST).clamp(1.0, 2.0**MOST_SHIFT).log2()
    return octaves.ceil().to(torch.uint8)


def counted(codes: Tensor, shifts: Tensor) -> Tensor:
    """Counts of each channel's high parts, int64 (heads, channels, LEVELS): codes int32 (heads, rows, channels),
    ``shifts`` uint8 (heads, channels)."""
    heads, _, width = codes.shape
    first = torch.arange(heads * width, device=codes.device, dtype=torch.int32).view(heads, 1, width) * LEVELS + REACH
    high = (codes >> shifts.int().unsqueeze(1)).clamp_(-REACH, REACH).add_(first)
    return torch.bincount(high.flatten(), minlength=heads * width * LEVELS).view(heads, width, LEVELS)


def entropy(counts: Tensor, shifts: Tensor) -> float:
    """Mean bits of a code, if every channel has a table of its own, in the population that the counted codes are a
    sample of (Miller 1955; what a sample itself takes is too little)."""
    total = counts.sum(-1, keepdim=True)
    shares = counts.float() / total
    unseen = ((counts > 0).sum(-1) - 1).clamp_min(0) / (2 * total.squeeze(-1))
    tables = (unseen - torch.xlogy(shares, shares).sum(-1)) / math.log(2)
    return (tables + shifts).double().mean().item()


def spreads_of(counts: Tensor) -> Tensor:
    """int64 (heads, channels): the high parts' root mean square as a power of 2, times ``PER_OCTAVE``."""
    codes = torch.arange(-REACH, REACH + 1, device=counts.device, dtype=torch.float64)
    spread = ((counts * codes.square()).sum(-1) / counts.sum(-1).clamp_min(1)).sqrt()
    return (spread.clamp(2.0**-OCTAVES, 2.0**OCTAVES).log2() * PER_OCTAVE).round().long()


def reach_of(spread: int) -> int:
    """The largest code of a table; there and beyond, the rest is written out."""
    return min(REACH, max(LEAST_REACH, math.ceil(SPREADS * 2 ** (spread / PER_OCTAVE))))


def frequencies_of(counts: Tensor, spreads: Tensor) -> Tensor:
    """All tables one after the other, narrow ones first: see ``streams.frequencies``."""
    found = []
    for spread in spreads.unique().tolist():
        alike, reach = counts[spreads == spread].sum(0).double(), reach_of(spread)
        table = alike[REACH - reach : REACH + reach + 1]
        table[0] += alike[: REACH - reach].sum()
        table[-1] += alike[REACH + reach + 1 :].sum()
        found.append(frequencies(table))
    return torch.cat(found)


class HeadStreams:
    """Writes and reads the streams of one head: codes of a row, 0 to twice ``LARGEST_CODE``, are (channels, tokens)."""

    def __init__(self, models: dict[int, object], spreads: np.ndarray, shifts: np.ndarray):
        uniform = ans().model.Uniform
        self._tables = _groups(spreads, lambda spread: models[spread])
        self._low = _groups(shifts, lambda shift: uniform(1 << shift) if shift else None)
        self._half = uniform(1 << HALF)
        self._reaches = np.array([reach_of(int(spread)) for spread in spreads], np.int64)[:, None]
        self._shifts = shifts.astype(np.int64)[:, None]

    def write(self, row: np.ndarray) -> bytes:
        """The row's stream."""
        row = row.astype(np.int64) - LARGEST_CODE
        high, low = row >> self._shifts, row & ((1 << self._shifts) - 1)
        beyond = (np.abs(high) - self._reaches)[np.abs(high) >= self._reaches]
        symbols = np.clip(high, -self._reaches, self._reaches) + self._reaches
        both = ((self._low, low), (self._tables, symbols))
        parts = [(values[channels], model) for group, values in both for model, channels in group]
        return written([*parts, (beyond >> HALF, self._half), (beyond & ((1 << HALF) - 1), self._half)])

    def read(self, stream: bytes, tokens: int) -> np.ndarray:
        """The inverse, int64 (channels, tokens)."""
        coder = reader(stream)
        high = np.zeros((len(self._shifts), tokens), np.int64)
        low = np.zeros_like(high)
        for group, values in ((self._low, low), (self._tables, high)):
            for model, channels in group:
                values[channels] = coder.decode(model, len(channels) * tokens).reshape(-1, tokens)
        high -= self._reaches
        escaped = np.abs(high) == self._reaches
        if count := int(escaped.sum()):
            beyond = coder.decode(self._half, count).astype(np.int64) << HALF
            high[escaped] += np.sign(high[escaped]) * (beyond + coder.decode(self._half, count))
        return ((high << self._shifts) | low) + LARGEST_CODE


def head_streams(frequencies: Tensor, spreads: Tensor, shifts: Tensor) -> list[HeadStreams]:
    """One for each head, from what is stored: see ``frequencies_of``; spreads and shifts are (heads, channels)."""
    weights = frequencies.cpu().numpy().astype(np.float64) + 1
    spreads, shifts, models, start = spreads.cpu().numpy(), shifts.cpu().numpy(), {}, 0
    for spread in np.unique(spreads).tolist():
        stop = start + 2 * reach_of(spread) + 1
        models[spread] = ans().model.Categorical(weights[start:stop], perfect=False)
        start = stop
    return [HeadStreams(models, *head) for head in zip(spreads, shifts, strict=True)]


def _groups(kinds: np.ndarray, model) -> list[tuple[object, np.ndarray]]:
    """The model and the channels of each kind, but for kinds that have no model."""
    made = {kind: model(kind) for kind in np.unique(kinds).tolist()}
    return [(found, np.flatnonzero(kinds == kind)) for kind, found in made.items() if found is not None]
