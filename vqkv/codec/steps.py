"""Uniform steps with entropy-coded codes: what a transform coder stores, its rate met by the size of the step."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vqkv.codec.entropy import LARGEST, MAX_CODE_BYTES, SMOOTHING, stream_coder
from vqkv.codec.part import take
from vqkv.codec.payload import Payload
from vqkv.codec.ragged import StreamPayload
from vqkv.codec.stage import Quantizer
from vqkv.errors import DataError, FormatError
from vqkv.processes import current

REACH = 1023  # codes are -1023 to 1023 at most: what lies further out is cut off
LEVELS = 2 * REACH + 1
TOWARDS_ZERO = 0.1  # of a step: at low rates an error a little larger buys a shorter code
PER_OCTAVE, OCTAVES = 2, 8  # tables for spreads from 2^-8 to 2^8 steps, two an octave
SPREADS = 12  # a table has codes for so many spreads to either side
LEAST_REACH = 3
LEAST_BITS, MOST_BITS = 0.01, 7.0
LEAST_STEP, MOST_STEP = torch.finfo(torch.float32).tiny, 1e12  # far beyond what fp16 values can ask for
BISECTIONS, SEARCHED_ROWS = 20, 1 << 12
CURVE = range(6, -25, -1)  # half octaves: steps of 8 times the root mean square down to 1/4096 of it


@dataclass(eq=False)
class Steps(Quantizer):
    """Round to multiples of one step for all channels of the last axis and code the result (ANS), a stream for each
    row: fold blocks of tokens into rows first (``TokenBlock``). Channels that vary by less than a step then cost next
    to nothing, which is reverse water-filling, the optimum for independent Gaussian channels; what is left to Shannon's
    bound is the step's shape, 0.25 bit a value at high rates (Gish & Pierce 1968).

    Values further out than 1,023 steps are cut off. In the bundled models' principal components that counts from 4 bits
    a value on; with a channel a thousand times as wide as the others, at any rate.

    ``bits``: what a value is to take; the first batch decides the step. Channels whose codes vary about as much share
    a table of frequencies, as long as their spread demands: int8 ``spreads`` (num_kv_heads or 1, channels), uint16
    ``frequencies`` of all tables, one after the other, narrow ones first, and the step, fp32, are the side information.
    Needs the package ``constriction``.
    """

    bits: float = 2.0
    code_bits = 11
    code_dtype = torch.int32

    def __post_init__(self):
        if type(self.bits) not in (int, float) or not LEAST_BITS <= self.bits <= MOST_BITS:
            raise DataError(f"steps of {self.bits!r} bits a value: use {LEAST_BITS} to {MOST_BITS:g}")

    def build(self, shape: tuple[int, ...]) -> None:
        """Any shape."""
        self._row_shape, self._places = shape[1:], (shape[0], shape[-1])
        self.codes_per_row = math.prod(self._row_shape)
        self._step, self._counts, self._reaches = torch.zeros((), dtype=torch.float32), None, None

    def rates(self, y: Tensor) -> Tensor:
        """See ``Quantizer``: a point for each step of ``CURVE``."""
        channels = _sampled(y.transpose(0, 1).flatten(1, -2))
        rms, points = channels.double().square().mean().sqrt().item() or 1.0, []
        for half in CURVE:
            step = _as_step(rms * 2 ** (half / 2), y.device)
            error = (_rounded(channels, step) * step - channels).double().square().mean().item()
            points.append((min(MOST_BITS, max(LEAST_BITS, _entropy(_counted(channels, step)))), error))
        return torch.tensor(points, dtype=torch.float64)

    def with_bits(self, bits: float) -> "Steps":
        """See ``Quantizer``."""
        return Steps(bits)

    def partial_fit(self, x: Tensor) -> None:
        """The first batch decides the step; the codes of every batch are counted."""
        stream_coder()
        self._check_heads(x)
        channels = x.transpose(0, 1).flatten(1, -2)  # heads, rows and tokens, channels
        if self._step == 0:
            self._step = _step(current().rows(channels.transpose(0, 1)).transpose(0, 1), self.bits)
        counts = current().total(_counted(channels, self._step))
        self._counts = counts if self._counts is None else self._counts.to(x.device) + counts

    def finalize(self) -> None:
        """Share tables among channels of like spread, and round their frequencies as ``Entropy`` does."""
        spreads = _spreads(self._counts)
        frequencies = []
        for spread in spreads.unique().tolist():
            reach = _reach(spread)
            counts = self._counts[spreads == spread].sum(0)[REACH - reach : REACH + reach + 1].double() + SMOOTHING
            frequencies.append((counts * (LARGEST / counts.max())).round().clamp(1, LARGEST) - 1)
        self._set(self._step, spreads.to(torch.int8), torch.cat(frequencies).to(torch.uint16))
        self._counts = None

    def encode(self, x: Tensor) -> Tensor:
        """(batch, heads, rows, *row_shape) -> int64 (batch, heads, rows, codes of a row), 0 to 2,046."""
        self._check_heads(x)
        codes = _rounded(x, self._step)
        if self._reaches is not None:
            reaches = self._reaches.view(1, len(self._reaches), *[1] * (x.ndim - 3), -1)
            codes = codes.clamp(-reaches, reaches)
        return (codes + REACH).flatten(3)

    def decode(self, codes: Tensor) -> Tensor:
        """The inverse. Raises ``FormatError`` for codes from 2,047 on, which are not used."""
        if codes.numel() and int(codes.max()) >= LEVELS:
            raise FormatError(f"code {int(codes.max())} is not below {LEVELS}: altered payload")
        return ((codes.float() - REACH) * self._step).unflatten(-1, self._row_shape)

    def store(self, y: Tensor) -> StreamPayload:
        """``lengths``, bytes of each row's stream (int16 where that is always enough), and the streams."""
        codes = (self.encode(y) - REACH).unflatten(-1, (-1, self._places[1]))
        rows = codes.permute(2, 0, 1, 4, 3).flatten(0, 2).to("cpu", torch.int32).numpy()
        tables = self._tables()
        streams = [_written(row, tables[i % len(tables)]) for i, row in enumerate(rows)]
        small = self.codes_per_row * MAX_CODE_BYTES + 8 < 1 << 15
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
        ends, data, tables = lengths.flatten().cumsum(0).tolist(), stream.cpu().numpy().tobytes(), self._tables()
        rows, shape = zip([0, *ends], ends, strict=False), (channels, self.codes_per_row // channels)
        codes = np.array([_read(data[a:b], tables[i % heads], shape) for i, (a, b) in enumerate(rows)], np.int32)
        codes = torch.from_numpy(codes.reshape(*lengths.shape, *shape)).to(stream.device) + REACH
        return self.decode(codes.permute(1, 2, 0, 4, 3).flatten(3))

    def state(self) -> dict[str, Tensor]:
        """The step, how widely each channel's codes are spread, and the frequencies less one."""
        return {"step": self._step, "spreads": self._spreads, "frequencies": self._frequencies}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Raises ``FormatError`` for tensors of another shape or type, a step that is none, a spread that is none."""
        state = dict(state)
        step = take(state, "step", (), torch.float32)
        spreads = take(state, "spreads", self._places, torch.int8)
        if not LEAST_STEP <= step <= MOST_STEP or int(spreads.int().abs().max()) > PER_OCTAVE * OCTAVES:
            raise FormatError("tensor 'step' or 'spreads' is out of range: the file was altered")
        length = sum(2 * _reach(spread) + 1 for spread in spreads.unique().tolist())
        self._set(step, spreads, take(state, "frequencies", (length,), torch.uint16))
        super().load_state(state)

    def learning_state(self) -> dict[str, Tensor]:
        """The step, 0 before the first batch, and the counts of codes."""
        counts = torch.zeros(*self._places, LEVELS, dtype=torch.int64) if self._counts is None else self._counts
        return {"step": self._step, "counts": counts}

    def load_learning_state(self, state: dict[str, Tensor]) -> None:
        """Raises ``FormatError`` for tensors of another shape or type, or below 0."""
        state = dict(state)
        self._step = take(state, "step", (), torch.float32)
        self._counts = take(state, "counts", (*self._places, LEVELS), torch.int64)
        if self._step < 0 or (self._counts < 0).any():
            raise FormatError("tensor 'step' or 'counts' is negative: the file was altered")
        super().load_learning_state(state)

    def _check_heads(self, x: Tensor) -> None:
        if x.shape[1] != self._places[0]:
            raise DataError(f"{x.shape[1]} KV heads, but this codec was fitted on {self._places[0]}: fit again")

    def _set(self, step: Tensor, spreads: Tensor, frequencies: Tensor) -> None:
        self._step, self._spreads, self._frequencies = step, spreads, frequencies
        kinds = spreads.unique().tolist()
        reaches = {spread: _reach(spread) for spread in kinds}
        self._reaches = torch.zeros_like(spreads, dtype=torch.int64)
        for spread, reach in reaches.items():
            self._reaches[spreads == spread] = reach

    def _tables(self) -> list[list["_Table"]]:
        """For each head, the tables that its channels use."""
        weights = self._frequencies.cpu().numpy().astype(np.float64) + 1
        spreads, models, start = self._spreads.cpu().numpy(), {}, 0
        for spread in np.unique(spreads).tolist():
            stop = start + 2 * _reach(spread) + 1
            models[spread] = stream_coder().model.Categorical(weights[start:stop], perfect=False)
            start = stop
        return [
            [_Table(model, np.flatnonzero(row == spread), _reach(spread)) for spread, model in models.items()]
            for row in spreads
        ]


class _Table(NamedTuple):
    """The model of the codes -reach to reach, and the channels of one head that use it."""

    model: object
    channels: np.ndarray
    reach: int


def _written(row: np.ndarray, tables: list[_Table]) -> bytes:
    """A row of codes around 0, int32 (channels, tokens), as a stream without the zero bytes at its end."""
    coder = stream_coder().stack.AnsCoder()
    for table in reversed(tables):
        coder.encode_reverse(np.ascontiguousarray(row[table.channels]).reshape(-1) + table.reach, table.model)
    return coder.get_compressed().astype("<u4").tobytes().rstrip(b"\0")


def _read(stream: bytes, tables: list[_Table], shape: tuple[int, int]) -> np.ndarray:
    """The inverse. Raises ``FormatError`` if the stream does not end with the row."""
    row = np.empty(shape, np.int32)
    words = np.frombuffer(stream + bytes(-len(stream) % 4), "<u4").astype(np.uint32)
    try:
        coder = stream_coder().stack.AnsCoder(words)
    except ValueError as error:
        raise FormatError(f"a stream is altered: {error}") from error
    for table in tables:
        codes = coder.decode(table.model, len(table.channels) * shape[1])
        row[table.channels] = codes.reshape(-1, shape[1]) - table.reach
    if not coder.is_empty():
        raise FormatError("a stream is longer than its codes: altered payload")
    return row


def _rounded(x: Tensor, step: Tensor) -> Tensor:
    """Multiples of the step, int64, a little nearer to zero than the nearest."""
    size = (x.abs() / step + (0.5 - TOWARDS_ZERO)).floor().clamp_(max=REACH)
    return (size * x.sign()).long()


def _counted(channels: Tensor, step: Tensor) -> Tensor:
    """(heads, rows, channels) -> how often each channel has each code, int64 (heads, channels, LEVELS)."""
    heads, _, width = channels.shape
    first = torch.arange(heads * width, device=channels.device).view(heads, 1, width) * LEVELS
    codes = _rounded(channels, step) + REACH + first
    return torch.bincount(codes.flatten(), minlength=heads * width * LEVELS).view(heads, width, LEVELS)


def _entropy(counts: Tensor) -> float:
    """Mean bits of a code, if every channel has a table of its own."""
    shares = counts.double() / counts.sum(-1, keepdim=True)
    return -torch.xlogy(shares, shares).sum(-1).mean().item() / math.log(2)


def _step(channels: Tensor, bits: float) -> Tensor:
    """The step at which the codes of ``channels`` (heads, rows, channels) take ``bits`` each, fp32 ()."""
    channels = _sampled(channels)
    rms = channels.double().square().mean().sqrt().item() or 1.0
    low, high = math.log(rms) - 12, math.log(rms) + 8
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        step = _as_step(math.exp(middle), channels.device)
        low, high = (middle, high) if _entropy(_counted(channels, step)) > bits else (low, middle)
    return _as_step(math.exp(high), channels.device)


def _as_step(size: float, device) -> Tensor:
    return torch.tensor(max(size, LEAST_STEP), dtype=torch.float32, device=device)


def _sampled(channels: Tensor) -> Tensor:
    """At most ``SEARCHED_ROWS`` rows of (heads, rows, channels)."""
    return channels[:, :: -(-channels.shape[1] // SEARCHED_ROWS)]


def _spreads(counts: Tensor) -> Tensor:
    """int64 (heads, channels): the codes' root mean square as a power of 2, times ``PER_OCTAVE``."""
    codes = torch.arange(-REACH, REACH + 1, device=counts.device, dtype=torch.float64)
    spread = ((counts * codes.square()).sum(-1) / counts.sum(-1).clamp_min(1)).sqrt()
    return (spread.clamp(2.0**-OCTAVES, 2.0**OCTAVES).log2() * PER_OCTAVE).round().long()


def _reach(spread: int) -> int:
    """The largest code of a table."""
    return min(REACH, max(LEAST_REACH, math.ceil(SPREADS * 2 ** (spread / PER_OCTAVE))))
