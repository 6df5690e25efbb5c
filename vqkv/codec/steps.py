"""Uniform steps with entropy-coded codes: what a transform coder stores, its rate met by the size of the step."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vqkv.codec import spreads
from vqkv.codec.entropy import stream_coder
from vqkv.codec.part import take
from vqkv.codec.payload import Payload
from vqkv.codec.ragged import StreamPayload
from vqkv.codec.spreads import LARGEST_CODE, LEVELS, MOST_SHIFT, OCTAVES, PER_OCTAVE
from vqkv.codec.stage import Quantizer
from vqkv.errors import DataError, FormatError
from vqkv.processes import current

TOWARDS_ZERO = 0.1  # of a step: at low rates an error a little larger buys a shorter code
LEAST_BITS, MOST_BITS = 0.01, 10.0
LEAST_STEP, MOST_STEP = torch.finfo(torch.float32).tiny, 1e12  # far beyond what fp16 values can ask for
BISECTIONS, SEARCHED_ROWS = 20, 1 << 10
CURVE = range(6, -25, -1)  # half octaves: steps of 8 times the root mean square down to 1/4096 of it


@dataclass(eq=False)
class Steps(Quantizer):
    """Round to multiples of one step for all channels of the last axis and code the result (ANS), a stream for each
    row: fold blocks of tokens into rows first (``TokenBlock``). Channels that vary by less than a step then cost next
    to nothing, which is reverse water-filling, the optimum for independent Gaussian channels; what is left to Shannon's
    bound is the step's shape, 0.25 bit a value at high rates (Gish & Pierce 1968).

    No value is cut off, as far as 2^23 steps out: channels that vary by more than 32 steps keep their low bits apart,
    and what is beyond a table of frequencies is written out, at 24 bits more.

    ``bits``: what a value is to take; the first batch decides the step. Channels whose codes vary about as much share
    a table of frequencies, as long as their spread demands: int8 ``spreads`` and uint8 ``shifts``, the low bits kept
    apart (num_kv_heads or 1, channels), uint16 ``frequencies`` of all tables, one after the other, narrow ones first,
    and the step, fp32, are the side information. Needs the package ``constriction``.
    """

    bits: float = 2.0
    code_bits = 24
    code_dtype = torch.int32

    def __post_init__(self):
        if type(self.bits) not in (int, float) or not LEAST_BITS <= self.bits <= MOST_BITS:
            raise DataError(f"steps of {self.bits!r} bits a value: use {LEAST_BITS} to {MOST_BITS:g}")

    def build(self, shape: tuple[int, ...]) -> None:
        """Any shape."""
        self._row_shape, self._places = shape[1:], (shape[0], shape[-1])
        self.codes_per_row = math.prod(self._row_shape)
        self._step, self._shifts, self._counts = torch.zeros((), dtype=torch.float32), None, None

    def rates(self, y: Tensor) -> Tensor:
        """See ``Quantizer``: a point for each step of ``CURVE`` that takes ``LEAST_BITS`` to ``MOST_BITS``, and one at
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

    def with_bits(self, bits: float) -> "Steps":
        """See ``Quantizer``."""
        return Steps(bits)

    def partial_fit(self, x: Tensor) -> None:
        """The first batch that is not all zeros decides the step, and which bits are kept apart; the codes of every
        batch from there on are counted."""
        stream_coder()
        self._check_heads(x)
        channels = x.transpose(0, 1).flatten(1, -2)  # heads, rows and tokens, channels
        if self._step == 0:
            everybody = _sampled(current().rows(channels.transpose(0, 1)).transpose(0, 1))
            if not everybody.any():
                return
            self._step = _step(everybody, self.bits)
            self._shifts = _shifts(_rounded(everybody, self._step))
        counts = current().total(spreads.counted(_rounded(channels, self._step), self._shifts))
        self._counts = counts if self._counts is None else self._counts.to(x.device) + counts

    def finalize(self) -> None:
        """Share tables among channels of like spread, and round their frequencies as ``Entropy`` does."""
        if self._counts is None:  # nothing but zeros
            zeros = torch.zeros(self._places[0], 1, self._places[1], dtype=torch.int32)
            self._step, self._shifts = _as_step(1.0, "cpu"), torch.zeros(self._places, dtype=torch.uint8)
            self._counts = spreads.counted(zeros, self._shifts)
        found = spreads.spreads_of(self._counts)
        self._spreads, self._frequencies = found.to(torch.int8), spreads.frequencies_of(self._counts, found)
        self._counts = None

    def encode(self, x: Tensor) -> Tensor:
        """(batch, heads, rows, *row_shape) -> int32 (batch, heads, rows, codes of a row), 0 to 2^24 - 2."""
        self._check_heads(x)
        return (_rounded(x, self._step) + LARGEST_CODE).flatten(3)

    def decode(self, codes: Tensor) -> Tensor:
        """The inverse. Raises ``FormatError`` for the last code, 2^24 - 1, and larger ones, which are not used."""
        if codes.numel() and int(codes.max()) > 2 * LARGEST_CODE:
            raise FormatError(f"code {int(codes.max())} is not below {2 * LARGEST_CODE + 1}: altered payload")
        return ((codes - LARGEST_CODE).float() * self._step).unflatten(-1, self._row_shape)

    def store(self, y: Tensor) -> StreamPayload:
        """``lengths``, bytes of each row's stream (int16 where that is always enough), and the streams."""
        codes = (self.encode(y) - LARGEST_CODE).unflatten(-1, (-1, self._places[1]))
        rows = codes.permute(2, 0, 1, 4, 3).flatten(0, 2).to("cpu", torch.int32).numpy()
        coders = self._coders()
        streams = [coders[i % len(coders)].write(row) for i, row in enumerate(rows)]
        small = self.codes_per_row * spreads.MOST_CODE_BYTES + 8 < 1 << 15
        lengths = torch.tensor([len(s) for s in streams], dtype=torch.int16 if small else torch.int32)
        lengths = lengths.view(codes.shape[2], *codes.shape[:2]).permute(1, 2, 0)
        stream = torch.from_numpy(np.frombuffer(bytearray(b"".join(streams)), np.uint8))
        return StreamPayload({"lengths": lengths.to(y.device)}, ragged={"stream": stream.to(y.device)})

    def load(self, payload: Payload) -> Tensor:
        """The inverse. Raises ``FormatError`` for another quantizer's payload, and for most altered ones."""
        if not isinstance(payload, StreamPayload) or set(payload.ragged) != {"stream"}:
            raise FormatError(f"payload holds {sorted(payload.tensors)}, not streams: decode it with its own codec")
        lengths, stream = payload.counts("stream").permute(2, 0, 1), payload.ragged["stream"]
        heads, channels = self._places
        if stream.dtype != torch.uint8 or stream.ndim != 1 or lengths.shape[2] != heads:
            shape = (*payload.shape[:2], *stream.shape)
            raise FormatError(f"payload of {shape} {stream.dtype} is no stream of this codec: it was altered")
        ends, data, coders = lengths.flatten().cumsum(0).tolist(), stream.cpu().numpy().tobytes(), self._coders()
        rows, tokens = zip([0, *ends], ends, strict=False), self.codes_per_row // channels
        codes = np.array([coders[i % heads].read(data[a:b], tokens) for i, (a, b) in enumerate(rows)], np.int64)
        codes = torch.from_numpy(codes.reshape(*lengths.shape, channels, tokens)).to(stream.device) + LARGEST_CODE
        return self.decode(codes.permute(1, 2, 0, 4, 3).flatten(3))

    def state(self) -> dict[str, Tensor]:
        """The step, how widely each channel's codes are spread, their low bits, and the frequencies less one."""
        names = {"step": self._step, "spreads": self._spreads, "shifts": self._shifts}
        return names | {"frequencies": self._frequencies}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Raises ``FormatError`` for tensors of another shape or type, a step that is none, a spread that is none."""
        state = dict(state)
        self._step = take(state, "step", (), torch.float32)
        self._spreads = take(state, "spreads", self._places, torch.int8)
        if not LEAST_STEP <= self._step <= MOST_STEP or int(self._spreads.int().abs().max()) > PER_OCTAVE * OCTAVES:
            raise FormatError("tensor 'step' or 'spreads' is out of range: the file was altered")
        self._take_shifts(state)
        self._frequencies = take(state, "frequencies", (spreads.frequencies_length(self._spreads),), torch.uint16)
        super().load_state(state)

    def learning_state(self) -> dict[str, Tensor]:
        """The step, 0 before the first batch, the bits kept apart, and the counts of codes."""
        counts = torch.zeros(*self._places, LEVELS, dtype=torch.int64) if self._counts is None else self._counts
        shifts = torch.zeros(self._places, dtype=torch.uint8) if self._shifts is None else self._shifts
        return {"step": self._step, "shifts": shifts, "counts": counts}

    def load_learning_state(self, state: dict[str, Tensor]) -> None:
        """Raises ``FormatError`` for tensors of another shape or type, or below 0."""
        state = dict(state)
        self._step = take(state, "step", (), torch.float32)
        self._take_shifts(state)
        self._counts = take(state, "counts", (*self._places, LEVELS), torch.int64)
        if self._step < 0 or (self._counts < 0).any():
            raise FormatError("tensor 'step' or 'counts' is negative: the file was altered")
        super().load_learning_state(state)

    def _take_shifts(self, state: dict[str, Tensor]) -> None:
        self._shifts = take(state, "shifts", self._places, torch.uint8)
        if int(self._shifts.max()) > MOST_SHIFT:
            raise FormatError(f"tensor 'shifts' has more than {MOST_SHIFT}: the file was altered")

    def _check_heads(self, x: Tensor) -> None:
        if x.shape[1] != self._places[0]:
            raise DataError(f"{x.shape[1]} KV heads, but this codec was fitted on {self._places[0]}: fit again")

    def _coders(self) -> list[spreads.HeadStreams]:
        return spreads.head_streams(self._frequencies, self._spreads, self._shifts)


def _rounded(x: Tensor, step: Tensor) -> Tensor:
    """Multiples of the step, int32, a little nearer to zero than the nearest."""
    size = (x.abs() / step).add_(0.5 - TOWARDS_ZERO).floor_().clamp_(max=LARGEST_CODE)
    return size.copysign_(x).int()


def _shifts(codes: Tensor) -> Tensor:
    return spreads.shifts_of(codes.float().square_().mean(1).sqrt())


def _bits(codes: Tensor) -> float:
    """What a code takes, of (heads, rows, channels)."""
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
