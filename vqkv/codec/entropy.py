"""Entropy-coded codes: frequent ones take fewer bits, and each row becomes one stream of an asymmetric numeral system.

Needs the package ``constriction``, which is imported when codes are first learned from, stored or loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vqkv.codec.learning import collected, hand_out
from vqkv.codec.part import take
from vqkv.codec.payload import Payload
from vqkv.codec.ragged import StreamPayload
from vqkv.codec.stage import MAX_ROW, Quantizer
from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.processes import current

CONTEXTS = ("position", "stage")
TABLES = ("static", "adaptive")
PRIORS = ("static", "uniform")
LARGEST = 1 << 16  # frequencies are 1 to this, less one in uint16: a code without a frequency cannot be written down
SMOOTHING = 0.5  # added to every code's count: one that calibration never saw is rare, not impossible
MAX_CODE_BYTES = 3  # constriction's probabilities have 24 bits, so no code costs more


@dataclass(eq=False)
class Entropy(Quantizer):
    """``quantizer``'s codes through an entropy coder (ANS: Duda 2013; ``constriction``: Bamler 2022). Lossless.

    Each row of codes is a stream of its own, with a few bytes of overhead: fold blocks of tokens into rows first
    (``TokenBlock``). ``context`` says which codes share a table of frequencies: ``stage``, all that use the same
    codebook (the quantizer's ``num_tables`` says how many there are); ``position``, only those of the same KV head and
    the same place in a token, where a row's first axis is its tokens. k-means leaves all codes of a codebook about
    equally frequent, so it is the differences between heads and channels that save bytes.

    ``static`` tables are counted in calibration and kept as side information: uint16 (heads, tables, codes). The counts
    are of the codebooks as they were at each batch, so an estimate of the final ones. ``adaptive``: a row starts from
    these, or with ``prior`` ``uniform`` from equal ones, which take no bytes; after every ``step`` codes of each table
    they are added to it, and the start weighs as much as ``strength`` codes.

    A stack coder, not a queue: it turns any bytes into codes of the table, so an altered stream cannot break it; and
    as the encoder knows the row, it finds all the tables first, then writes in reverse. Encoder and decoder agree
    because both hand constriction the same whole numbers, which no order of summation can round differently.
    """

    quantizer: Quantizer
    tables: str = "static"
    context: str = "position"
    prior: str = "static"
    step: int = 16
    strength: int = 256

    def __post_init__(self):
        if not isinstance(self.quantizer, Quantizer) or type(self.quantizer).store is not Quantizer.store:
            raise DataError("Entropy takes a Quantizer that leaves storing its codes to others")
        if self.tables not in TABLES:
            raise UnknownNameError("kind of tables", self.tables, TABLES)
        if self.context not in CONTEXTS:
            raise UnknownNameError("context", self.context, CONTEXTS)
        if self.prior not in (known := PRIORS if self.tables == "adaptive" else PRIORS[:1]):
            raise UnknownNameError(f"prior of {self.tables} tables", self.prior, known)
        for name in ("step", "strength"):
            if type(getattr(self, name)) is not int or not 1 <= getattr(self, name) <= LARGEST:
                raise DataError(f"{name} {getattr(self, name)!r} must be an integer from 1 to {LARGEST}")
        self._counts = self._frequencies = None

    @property
    def code_bits(self) -> int:
        """Bits of a code that is not entropy-coded."""
        return self.quantizer.code_bits

    @property
    def codes_per_row(self) -> int:
        """Codes in each stream."""
        return self.quantizer.codes_per_row

    def build(self, shape: tuple[int, ...]) -> None:
        """As the quantizer does. Raises ``DataError`` if ``position`` has no meaning in such rows."""
        self.quantizer.build(shape)
        codes = getattr(self.quantizer, "codebook_size", 1 << self.quantizer.code_bits)
        heads, tables = 1, getattr(self.quantizer, "num_tables", 1)
        if self.context == "position":
            heads, (tables, rest) = shape[0], divmod(self.codes_per_row, shape[1])
            if rest:
                raise DataError(f"rows of {shape[1:]} do not begin with an axis of tokens: put a TokenBlock first")
        self._shape = heads, tables, max(2, codes)  # there is no model of a single code
        if heads * tables * self._shape[2] > MAX_ROW:
            raise DataError(f"{heads * tables} tables of {codes} frequencies: use context='stage'")

    def partial_fit(self, x: Tensor) -> None:
        """Let the quantizer learn, then count the codes it now has for x."""
        stream_coder()
        self.quantizer.partial_fit(x)
        heads, tables, size = self._shape
        first = torch.arange(heads * tables, device=x.device).view(heads, tables, 1) * size
        codes = self._by_table(self.quantizer.encode(x)) + first
        counts = current().total(torch.bincount(codes.flatten(), minlength=first.numel() * size).view(self._shape))
        self._counts = counts if self._counts is None else self._counts + counts

    def finalize(self) -> None:
        """Freeze the quantizer and round the frequencies: the most frequent code has 65,536, no code less than 1."""
        self.quantizer.finalize()
        if self.prior == "static":
            counts = self._counts.double() + SMOOTHING
            frequencies = (counts * (LARGEST / counts.amax(dim=-1, keepdim=True))).round().clamp(1, LARGEST)
            self._frequencies = (frequencies - 1).to(torch.uint16)
        self._counts = None

    def encode(self, x: Tensor) -> Tensor:
        """The quantizer's codes."""
        return self.quantizer.encode(x)

    def decode(self, codes: Tensor) -> Tensor:
        """The quantizer's values."""
        return self.quantizer.decode(codes)

    def store(self, y: Tensor) -> StreamPayload:
        """``lengths``, the bytes of each row's stream (int16 where that is always enough), and the streams."""
        by_table = self._by_table(self.encode(y))
        rows, coders = by_table.flatten(0, 2).to("cpu", torch.int32).contiguous().numpy(), self._coders()
        streams = [coders[i % len(coders)].encode(row) for i, row in enumerate(rows)]
        small = self.codes_per_row * MAX_CODE_BYTES + 8 < 1 << 15
        lengths = torch.tensor([len(s) for s in streams], dtype=torch.int16 if small else torch.int32)
        stream = torch.from_numpy(np.frombuffer(bytearray(b"".join(streams)), np.uint8))
        fields = {"lengths": lengths.view(by_table.shape[:3]).permute(1, 2, 0).to(y.device)}
        return StreamPayload(fields, ragged={"stream": stream.to(y.device)})

    def load(self, payload: Payload) -> Tensor:
        """The inverse. Raises ``FormatError`` for another quantizer's payload, and for most altered ones."""
        if not isinstance(payload, StreamPayload) or set(payload.ragged) != {"stream"}:
            raise FormatError(f"payload holds {sorted(payload.tensors)}, not streams: decode it with its own codec")
        lengths, stream = payload.counts("stream").permute(2, 0, 1), payload.ragged["stream"]
        if stream.dtype != torch.uint8 or stream.ndim != 1 or self._shape[0] not in (1, lengths.shape[2]):
            shape = (*payload.shape[:2], *stream.shape)
            raise FormatError(f"payload of {shape} {stream.dtype} is no stream of this codec: it was altered")
        ends, data, coders = lengths.flatten().cumsum(0).tolist(), stream.cpu().numpy().tobytes(), self._coders()
        count = self.codes_per_row // self._shape[1]
        rows = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        codes = np.array([coders[i % len(coders)].decode(row, count) for i, row in enumerate(rows)], np.int64)
        codes = torch.from_numpy(codes).to(stream.device).view(-1, self._shape[1], count).mT
        codes = codes.reshape(*lengths.shape, self.codes_per_row)
        return self.decode(codes.permute(1, 2, 0, 3))

    def state(self) -> dict[str, Tensor]:
        """What the quantizer learned, and the frequencies less one."""
        state = {f"quantizer.{name}": tensor for name, tensor in self.quantizer.state().items()}
        return state if self._frequencies is None else state | {"frequencies": self._frequencies}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Raises ``FormatError`` for frequencies of another shape or type."""
        state = dict(state)
        if self.prior == "static":
            self._frequencies = take(state, "frequencies", self._shape, torch.uint16)
        if not all(name.startswith("quantizer.") for name in state):
            raise FormatError(f"unexpected tensors {sorted(state)}: the file was altered")
        self.quantizer.load_state({name.removeprefix("quantizer."): tensor for name, tensor in state.items()})

    def learning_state(self) -> dict[str, Tensor]:
        """What the quantizer has learned so far, and the counts of its codes, int64 (heads, tables, codes)."""
        counts = torch.zeros(self._shape, dtype=torch.int64) if self._counts is None else self._counts
        return collected([("quantizer", self.quantizer)]) | {"counts": counts}

    def load_learning_state(self, state: dict[str, Tensor]) -> None:
        """Raises ``FormatError`` for counts of another shape or type, or below 0."""
        state = dict(state)
        self._counts = take(state, "counts", self._shape, torch.int64)
        if (self._counts < 0).any():
            raise FormatError("tensor 'counts' is negative: the file was altered")
        hand_out(state, [("quantizer", self.quantizer)])

    def _by_table(self, codes: Tensor) -> Tensor:
        """Codes (batch, heads, rows, codes_per_row) -> (rows, batch, heads, tables, codes of a table)."""
        if self._shape[0] not in (1, codes.shape[1]):
            raise DataError(f"{codes.shape[1]} KV heads, but there are tables for {self._shape[0]}: fit again")
        return codes.permute(2, 0, 1, 3).unflatten(-1, (-1, self._shape[1])).mT

    def _coders(self) -> "list[_Coder]":
        """One for all heads, or one for each."""
        start = np.full(self._shape, float(LARGEST))
        if self._frequencies is not None:
            start = self._frequencies.cpu().numpy().astype(np.float64) + 1
        step = self.step if self.tables == "adaptive" else None
        return [_Coder(tables, step, self.strength) for tables in start]


class _Coder:
    """Rows of codes, int32 (tables, count), <-> bytes. Without ``step`` the tables stay as they start."""

    def __init__(self, start: np.ndarray, step: int | None = None, strength: int = 1):
        constriction = stream_coder()
        self.stack, self.model = constriction.stack.AnsCoder, constriction.model.Categorical
        self.start, self.step = start, step
        # What one code adds: a whole number, so that sums of float64 are exact (below 2^53).
        self.gain = np.maximum(1, start.sum(axis=-1, keepdims=True) // strength)
        self.first = self._models(start)

    def encode(self, codes: np.ndarray) -> bytes:
        """The row's stream, without the zero bytes at its end."""
        parts, weights = [], self.start.copy()
        for part in self._parts(codes.shape[-1]):
            models = self._models(weights) if part.start else self.first
            parts += zip(codes[:, part], models, strict=True)
            self._learn(weights, codes[:, part])
        coder = self.stack()
        for symbols, model in reversed(parts):
            coder.encode_reverse(np.ascontiguousarray(symbols), model)
        return coder.get_compressed().astype("<u4").tobytes().rstrip(b"\0")

    def decode(self, stream: bytes, count: int) -> np.ndarray:
        """The inverse. Raises ``FormatError`` if the stream does not end with the row."""
        words = np.frombuffer(stream + bytes(-len(stream) % 4), "<u4").astype(np.uint32)
        codes, weights = np.empty((len(self.start), count), np.int32), self.start.copy()
        try:
            coder = self.stack(words)
        except ValueError as error:
            raise FormatError(f"a stream is altered: {error}") from error
        for part in self._parts(count):
            models = self._models(weights) if part.start else self.first
            for symbols, model in zip(codes[:, part], models, strict=True):
                symbols[:] = coder.decode(model, len(symbols))
            self._learn(weights, codes[:, part])
        if not coder.is_empty():
            raise FormatError("a stream is longer than its codes: altered payload")
        return codes

    def _parts(self, count: int) -> Iterator[slice]:
        step = self.step or count
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def _models(self, weights: np.ndarray) -> list:
        return [self.model(row, perfect=False) for row in weights]

    def _learn(self, weights: np.ndarray, codes: np.ndarray) -> None:
        if self.step:
            np.add.at(weights, (np.arange(len(codes))[:, None], codes), self.gain)


def stream_coder():
    """Raises ``ImportError`` with the remedy if the package is missing."""
    try:
        from constriction import stream
    except ImportError as error:
        raise ImportError("entropy coding needs the package constriction: pip install constriction") from error
    return stream
