"""Quantizers of one step with entropy-coded codes, uniform or trellis-coded: what a transform coder stores.

The size of the step meets the rate."""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from vqkv.codecs.entropy import SMOOTHING, StreamQuantizer, frequencies
from vqkv.codecs.stage import Side, learned
from vqkv.kernels import trellis_decode, trellis_encode
from vqkv.kernels.entropy.code import HALF, TOTAL, Code, make_code
from vqkv.kernels.trellis.naive import REACH as SEARCHED
from vqkv.kernels.trellis.naive import STATES

TOWARDS_ZERO = 0.1  # of a step: at low rates an error a little larger buys a shorter code
MIN_BITS, MAX_BITS = 0.01, 10.0
MIN_STEP = torch.finfo(torch.float32).tiny
BISECTIONS, SEARCHED_ROWS = 20, 1 << 10
CURVE = range(6, -25, -1)  # half octaves: steps of 8 times the root mean square down to 1/4096 of it

LARGEST_CODE = (1 << 23) - 1
REACH = 255  # of the widest table
LEVELS = 2 * REACH + 1
WIDEST = 16.0  # codes of a larger root mean square leave low bits out of the tables, which are as good as uniform
MAX_SHIFT = 16
PER_OCTAVE, OCTAVES = 2, 8  # tables for spreads from 2^-8 to 2^8, two an octave
RARE = 4 * TOTAL  # what is rarer than once in so many codes is no table's

FINER = 1.6  # the step of a trellis-coded quantizer is shorter by about this, at the same rate
BIT_WEIGHT = 0.05  # squared steps that a bit is worth
TRELLIS_BISECTIONS = 8  # of two octaves around there
MAX_COST = 2.0 * HALF + 12  # bits of a code that no table holds


@dataclass(eq=False)
class EntropyCodedScalar(StreamQuantizer):
    """Round to multiples of one step for all channels of the last axis and code the result (rANS), a stream for each
    row: fold blocks of tokens into rows first (``TokenBlock``). Channels that vary by less than a step cost next to
    nothing, which is reverse water-filling. The gap to Shannon's bound is 0.25 bit a value at high rates (Gish & Pierce
    1968). No value is cut off, as far as 2^23 steps out: channels that vary by more than 16 steps keep their low bits
    apart, and what is beyond a table of frequencies is written out, at 24 bits more.

    ``bits``: what a value is to take; the first batch decides the step. Channels whose codes vary about as much share a
    table of frequencies. Side information: the step, fp32; int8 ``spreads`` and uint8 ``shifts``, the low bits kept
    apart (num_kv_heads or 1, channels); int16 ``reaches``, the largest code of each table, narrow ones first; uint16
    ``frequencies`` of all tables, one after the other, that of the escape last in each.
    """

    bits: float = 2.0
    step: Tensor = learned()
    spreads: Tensor = learned()
    shifts: Tensor = learned()
    reaches: Tensor = learned()
    frequencies: Tensor = learned()
    limits = {"bits": (MIN_BITS, MAX_BITS)}
    by_head = True

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        self.step = torch.zeros((), dtype=torch.float32)
        return super().build(shape)

    def rates(self, y: Tensor) -> Tensor:
        """Return a point for each step of ``CURVE`` that takes ``MIN_BITS`` to ``MAX_BITS``, and one at the least."""
        channels = _sampled(y.transpose(0, 1).flatten(1, -2))
        size, points = _rms(channels), list[tuple[float, float]]()
        for half in CURVE:
            step = as_step(size * 2 ** (half / 2), y.device)
            codes = rounded(channels, step)
            bits, error = bits_of(codes), (codes * step - channels).square().mean(dtype=torch.float64).item()
            if bits > MAX_BITS:
                break
            points = points if bits > MIN_BITS else []
            points.append((max(MIN_BITS, bits), error))
        return torch.tensor(points, dtype=torch.float64)

    def partial_fit(self, x: Tensor) -> None:
        """Let the first batch that is not all zeros decide step and shifts; count codes from there on."""
        channels = x.transpose(0, 1).flatten(1, -2)  # heads, rows and tokens, channels
        if self.step == 0:
            sample = _sampled(channels)
            if not sample.any():
                return
            self._start(sample)
        self._counts = self._counts + counted(self._codes(channels), self.shifts)

    def _start(self, sample: Tensor) -> None:
        """Set step and shifts for ``bits`` by a sample (heads, rows, channels)."""
        self.step = step_for(sample, self.bits / self.share)
        self.shifts = shifts_of(self._codes(sample))

    def _codes(self, channels: Tensor) -> Tensor:
        """Quantize values (heads, rows, channels) to int32 codes."""
        return rounded(channels, self.step)

    def _values(self, codes: Tensor) -> Tensor:
        """Read codes (..., channels) back, float32."""
        return codes * self.step

    def finalize(self) -> None:
        """Share tables among channels of like spread, and round their frequencies as ``Entropy`` does."""
        if self.step == 0:  # nothing but zeros
            zeros = torch.zeros(self.heads, 1, self.num_tables, dtype=torch.int32)
            self.step, self.shifts = as_step(1.0, "cpu"), shifts_of(zeros)
            self._counts = counted(zeros, self.shifts)
        spreads = spreads_of(self._counts) if self.spreads is None else self.spreads.long()
        reaches, rows = [], []
        for spread in spreads.unique().tolist():
            table = self._counts[spreads == spread].sum(0).double().cpu()
            frequent = (table + table.flip(0))[REACH:] * RARE > table.sum()  # by size of the code
            reaches.append(reach := max(1, int(frequent.nonzero().amax())))
            inside = table[REACH - reach : REACH + reach + 1]
            rows.append(frequencies(torch.cat([inside, (table.sum() - inside.sum())[None]]) + SMOOTHING))
        self.spreads, self.reaches = spreads.to(torch.int8), torch.tensor(reaches, dtype=torch.int16)
        self.frequencies, self._counts = torch.cat(rows).to(spreads.device), torch.tensor(0)

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Return int32 codes (batch, heads, rows, codes of a row), up to 2^23 - 1 in size."""
        channels = x.transpose(0, 1)
        codes = self._codes(channels.flatten(1, -2)).view(channels.shape)
        return codes.transpose(0, 1).flatten(3), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return self._values(codes.unflatten(-1, self.row_shape))

    def make_code(self) -> Code:
        reaches = self.reaches.tolist()
        tables = np.split(self.frequencies.cpu().numpy().astype(np.int64), np.cumsum([2 * r + 2 for r in reaches])[:-1])
        number = torch.unique(self.spreads.cpu().long(), return_inverse=True)[1].flatten()
        return make_code(tables, [-r for r in reaches], number, self.shifts.flatten().cpu().long())


@dataclass(eq=False)
class TrellisCodedScalar(EntropyCodedScalar):
    """Choose a token's codes for least error and rate together, among paths of a trellis along its channels.

    ``kernels.trellis`` is universal TCQ (Kasner, Marcellin & Hunt 1999; with entropy coding Fischer & Wang 1992). It
    wins back part of the 0.25 bit that a uniform quantizer loses to Shannon's bound. Only the encoder searches; what is
    stored is as in ``EntropyCodedScalar``.

    A bit is worth ``BIT_WEIGHT`` squared steps: on the bundled models squared error at a rate is least with 0.3, KL
    with 0.05 (chosen on validation text). The search takes codes for Laplacian, of their channel's spread in the first
    batch; ``rates`` are those of a uniform quantizer, which a trellis moves alike.
    """

    fixed = EntropyCodedScalar.fixed | {"states": STATES, "weight": BIT_WEIGHT}

    def _start(self, sample: Tensor) -> None:
        """Find the step by bisection; shifts and spreads are those of a sample in uniform steps as long."""
        bits, low, high = self.bits / self.share, -1.0, 1.0
        start = step_for(sample, bits).item() / FINER
        for _ in range(TRELLIS_BISECTIONS):
            middle = (low + high) / 2
            self.step = as_step(start * 2**middle, sample.device)
            plain = rounded(sample, 2 * self.step)
            self.shifts = shifts_of(plain)
            self.spreads = spreads_of(counted(plain, self.shifts)).to(torch.int8)
            codes = self._codes(sample)
            low, high = (middle, high) if bits_of(codes) > bits else (low, middle)
        self.shifts = shifts_of(codes)

    def _codes(self, channels: Tensor) -> Tensor:
        costs, tables = _costs().to(channels.device), self.spreads.int() + PER_OCTAVE * OCTAVES
        heads = zip(channels / self.step, tables, self.shifts.int(), strict=True)
        return torch.stack([trellis_encode(x, costs, table, low, BIT_WEIGHT) for x, table, low in heads])

    def _values(self, codes: Tensor) -> Tensor:
        return trellis_decode(codes.flatten(0, -2), self.step).view(codes.shape)


def rounded(x: Tensor, step: Tensor) -> Tensor:
    """Round to multiples of the step, int32, a little nearer to zero than the nearest."""
    size = (x.abs() / step).add_(0.5 - TOWARDS_ZERO).floor_().clamp_(max=LARGEST_CODE)
    return size.copysign_(x).int()


def shifts_of(codes: Tensor) -> Tensor:
    """Count low bits that each channel of codes (heads, rows, channels) keeps apart, uint8 (heads, channels)."""
    octaves = (codes.float().square_().mean(1).sqrt().double() / WIDEST).clamp(1.0, 2.0**MAX_SHIFT).log2()
    return octaves.ceil().to(torch.uint8)


def counted(codes: Tensor, shifts: Tensor) -> Tensor:
    """Count each channel's high parts, int64 (heads, channels, LEVELS): codes int32 (heads, rows, channels), ``shifts``
    uint8 (heads, channels)."""
    heads, _, width = codes.shape
    first = torch.arange(heads * width, device=codes.device, dtype=torch.int32).view(heads, 1, width) * LEVELS + REACH
    high = (codes >> shifts.int().unsqueeze(1)).clamp_(-REACH, REACH).add_(first)
    return torch.bincount(high.flatten(), minlength=heads * width * LEVELS).view(heads, width, LEVELS)


def spreads_of(counts: Tensor) -> Tensor:
    """Return the high parts' root mean square as a power of 2, times ``PER_OCTAVE``: int64 (heads, channels)."""
    codes = torch.arange(-REACH, REACH + 1, device=counts.device, dtype=torch.float64)
    spread = ((counts * codes.square()).sum(-1) / counts.sum(-1).clamp_min(1)).sqrt()
    return (spread.clamp(2.0**-OCTAVES, 2.0**OCTAVES).log2() * PER_OCTAVE).round().long()


def bits_of(codes: Tensor) -> float:
    """Estimate the mean bits of codes (heads, rows, channels), if every channel has its own table, in the population
    that these are a sample of (Miller 1955; what a sample itself takes is too little)."""
    shifts = shifts_of(codes)
    counts = counted(codes, shifts)
    total = counts.sum(-1, keepdim=True)
    shares = counts.float() / total
    unseen = ((counts > 0).sum(-1) - 1).clamp_min(0) / (2 * total.squeeze(-1))
    tables = (unseen - torch.xlogy(shares, shares).sum(-1)) / math.log(2)
    return (tables + shifts).double().mean().item()


def step_for(channels: Tensor, bits: float) -> Tensor:
    """Find the step at which the codes of ``channels`` (heads, rows, channels) take ``bits`` each, fp32 ()."""
    size = _rms(channels)
    low, high = math.log(size) - 12, math.log(size) + 8
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        step = as_step(math.exp(middle), channels.device)
        low, high = (middle, high) if bits_of(rounded(channels, step)) > bits else (low, middle)
    return as_step(math.exp(high), channels.device)


def as_step(size: float, device: torch.device | str) -> Tensor:
    """Return ``size``, or the least step that is no subnormal, fp32 ()."""
    return torch.tensor(max(size, MIN_STEP), dtype=torch.float32, device=device)


def _rms(channels: Tensor) -> float:
    return channels.double().square().mean().sqrt().item() or 1.0


def _sampled(channels: Tensor) -> Tensor:
    """Take at most ``SEARCHED_ROWS`` rows of (heads, rows, channels)."""
    return channels[:, :: -(-channels.shape[1] // SEARCHED_ROWS)]


@cache
def _costs() -> Tensor:
    """Tabulate bits of each code of every spread, and of those beyond a table: float32 (spreads, 2 * SEARCHED + 2).

    Code e is as frequent as a power of the size of its value, 2e or 2e + 1."""
    codes = torch.arange(-SEARCHED, SEARCHED + 1, dtype=torch.float64)
    size = (2 * codes + (codes < 0)).abs()
    spreads = 2.0 ** (torch.arange(-PER_OCTAVE * OCTAVES, PER_OCTAVE * OCTAVES + 1, dtype=torch.float64) / PER_OCTAVE)
    low, high = torch.full_like(spreads, -40.0), torch.zeros_like(spreads)  # log2 of that power's base
    for _ in range(60):
        middle = (low + high) / 2
        shares = torch.softmax(middle[:, None] * size * math.log(2), dim=1)
        wide = (shares * codes.square()).sum(1) > spreads.square()
        low, high = torch.where(wide, low, middle), torch.where(wide, middle, high)
    bits = -shares.log2().clamp_min(-MAX_COST)
    return torch.cat([bits, torch.full_like(bits[:, :1], MAX_COST)], dim=1).float()
