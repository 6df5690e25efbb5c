"""Uniform steps with entropy-coded codes: what a transform coder stores, its rate met by the size of the step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs import spreads
from vqkv.codecs.spreads import LARGEST_CODE
from vqkv.codecs.stage import Side
from vqkv.codecs.streams import StreamQuantizer, ans

TOWARDS_ZERO = 0.1  # of a step: at low rates an error a little larger buys a shorter code
LEAST_BITS, MOST_BITS = 0.01, 10.0
LEAST_STEP = torch.finfo(torch.float32).tiny
BISECTIONS, SEARCHED_ROWS = 20, 1 << 10
CURVE = range(6, -25, -1)  # half octaves: steps of 8 times the root mean square down to 1/4096 of it


@dataclass(eq=False)
class EntropyCodedScalar(StreamQuantizer):
    """Round to multiples of one step for all channels of the last axis and code the result (ANS), a stream for each
    row: fold blocks of tokens into rows first (``TokenBlock``). Channels that vary by less than a step then cost next
    to nothing, which is reverse water-filling, the optimum for independent Gaussian channels; what is left to Shannon's
    bound is the step's shape, 0.25 bit a value at high rates (Gish & Pierce 1968).

    No value is cut off, as far as 2^23 steps out: channels that vary by more than 32 steps keep their low bits apart,
    and what is beyond a table of frequencies is written out, at 24 bits more.

    ``bits``: what a value is to take; the first batch decides the step. Channels whose codes vary about as much share
    a table of frequencies, as long as their spread demands: int8 ``spreads`` and uint8 ``shifts``, the low bits kept
    apart (num_kv_heads or 1, channels), uint16 ``frequencies`` of all tables, one after the other, narrow ones first,
    and the step, fp32, are the side information.
    """

    bits: float = 2.0
    limits = {"bits": (LEAST_BITS, MOST_BITS)}
    by_head = True
    most_code_bytes = 8  # 24 bits for a table's rarest code, 16 low ones, 24 beyond the table

    def build(self, shape: tuple[int, ...]) -> None:
        super().build(shape)
        self._places, self.num_tables, self._counts = (shape[0], shape[-1]), shape[-1], None
        self.register_buffer("step", torch.zeros((), dtype=torch.float32))
        for name in ("spreads", "shifts", "frequencies"):
            self.register_buffer(name, None)

    def rates(self, y: Tensor) -> Tensor:
        """A point for each step of ``CURVE`` that takes ``LEAST_BITS`` to ``MOST_BITS``, and one at
        ``LEAST_BITS`` if a step of ``CURVE`` takes less."""
        channels = _sampled(y.transpose(0, 1).flatten(1, -2))
        rms, points = channels.double().square().mean().sqrt().item() or 1.0, []
        for half in CURVE:
            step = _as_step(rms * 2 ** (half / 2), y.device)
            codes = _rounded(channels, step)
            bits, error = _bits(codes), (codes * step - channels).square().mean(dtype=torch.float64).item()
            if bits > MOST_BITS:
                break
            points = points if bits > LEAST_BITS else []
            points.append((max(LEAST_BITS, bits), error))
        return torch.tensor(points, dtype=torch.float64)

    def with_bits(self, bits: float) -> "EntropyCodedScalar":
        return EntropyCodedScalar(bits)

    def partial_fit(self, x: Tensor) -> None:
        """The first batch that is not all zeros decides the step, and which bits are kept apart; the codes of every
        batch from there on are counted."""
        ans()
        channels = x.transpose(0, 1).flatten(1, -2)  # heads, rows and tokens, channels
        if self.step == 0:
            sample = _sampled(channels)
            if not sample.any():
                return
            self.step = _step(sample, self.bits)
            self.shifts = _shifts(_rounded(sample, self.step))
        counts = spreads.counted(_rounded(channels, self.step), self.shifts)
        self._counts = counts if self._counts is None else self._counts.to(x.device) + counts

    def finalize(self) -> None:
        """Share tables among channels of like spread, and round their frequencies as ``Entropy`` does."""
        if self._counts is None:  # nothing but zeros
            zeros = torch.zeros(self._places[0], 1, self._places[1], dtype=torch.int32)
            self.step, self.shifts = _as_step(1.0, "cpu"), torch.zeros(self._places, dtype=torch.uint8)
            self._counts = spreads.counted(zeros, self.shifts)
        found = spreads.spreads_of(self._counts)
        self.spreads, self.frequencies = found.to(torch.int8), spreads.frequencies_of(self._counts, found)
        self._counts = None

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """(batch, heads, rows, *row_shape) -> int32 (batch, heads, rows, codes of a row), 0 to 2^24 - 2."""
        return (_rounded(x, self.step) + LARGEST_CODE).flatten(3), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return ((codes - LARGEST_CODE).float() * self.step).unflatten(-1, self.row_shape)

    def coders(self) -> list[spreads.HeadStreams]:
        return spreads.head_streams(self.frequencies, self.spreads, self.shifts)


def _rounded(x: Tensor, step: Tensor) -> Tensor:
    """Multiples of the step, int32, a little nearer to zero than the nearest."""
    size = (x.abs() / step).add_(0.5 - TOWARDS_ZERO).floor_().clamp_(max=LARGEST_CODE)
    return size.copysign_(x).int()


def _shifts(codes: Tensor) -> Tensor:
    return spreads.shifts_of(codes.float().square_().mean(1).sqrt())


def _bits(codes: Tensor) -> float:
    """Bits that a code takes, of (heads, rows, channels)."""
    shifts = _shifts(codes)
    return spreads.entropy(spreads.counted(codes, shifts), shifts)


def _step(channels: Tensor, bits: float) -> Tensor:
    """The step at which the codes of ``channels`` (heads, rows, channels) take ``bits`` each, fp32 ()."""
    rms = channels.double().square().mean().sqrt().item() or 1.0
    low, high = math.log(rms) - 12, math.log(rms) + 8
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        step = _as_step(math.exp(middle), channels.device)
        low, high = (middle, high) if _bits(_rounded(channels, step)) > bits else (low, middle)
    return _as_step(math.exp(high), channels.device)


def _as_step(size: float, device) -> Tensor:
    return torch.tensor(max(size, LEAST_STEP), dtype=torch.float32, device=device)


def _sampled(channels: Tensor) -> Tensor:
    """At most ``SEARCHED_ROWS`` rows of (heads, rows, channels)."""
    return channels[:, :: -(-channels.shape[1] // SEARCHED_ROWS)]
