"""Entropy-coded codes of any quantizer: frequent ones take fewer bits."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vqkv.codecs.part import Layout
from vqkv.codecs.stage import MAX_ROW, Quantizer
from vqkv.codecs.streams import LARGEST, StreamQuantizer, ans, ans_coder, check_heads_fit, frequencies, stored
from vqkv.errors import DataError, FormatError, UnknownNameError

CONTEXTS = ("position", "stage")
TABLES = ("static", "adaptive")
PRIORS = ("static", "uniform")


@dataclass(eq=False)
class Entropy(StreamQuantizer):
    """``quantizer``'s codes through an entropy coder. Lossless.

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
    most_code_bytes = 3  # constriction's probabilities have 24 bits

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
        self._counts = None
        self.register_buffer("frequencies", None)

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
        self.num_tables, self._shape = tables, (heads, tables, max(2, codes))  # there is no model of a single code
        if heads * tables * self._shape[2] > MAX_ROW:
            raise DataError(f"{heads * tables} tables of {codes} frequencies: use context='stage'")

    def partial_fit(self, x: Tensor) -> None:
        """Let the quantizer learn, then count the codes it now has for x."""
        ans()
        self.quantizer.partial_fit(x)
        heads, tables, size = self._shape
        first = torch.arange(heads * tables, device=x.device).view(heads, tables, 1) * size
        codes = self.by_table(self.encode(x)) + first
        counts = torch.bincount(codes.flatten(), minlength=first.numel() * size).view(self._shape)
        self._counts = counts if self._counts is None else self._counts + counts

    def finalize(self) -> None:
        """Freeze the quantizer and round the frequencies."""
        self.quantizer.finalize()
        if self.prior == "static":
            self.frequencies = frequencies(self._counts)
        self._counts = None

    def encode(self, x: Tensor) -> Tensor:
        check_heads_fit(x, self._shape[0])
        return self.quantizer.encode(x)

    def decode(self, codes: Tensor) -> Tensor:
        return self.quantizer.decode(codes)

    def layout(self) -> Layout:
        return {"frequencies": (self._shape, torch.uint16)} if self.prior == "static" else {}

    def coders(self) -> "list[TableCoder]":
        start = np.full(self._shape, float(LARGEST))
        if self.frequencies is not None:
            start = self.frequencies.cpu().numpy().astype(np.float64) + 1
        step = self.step if self.tables == "adaptive" else None
        return [TableCoder(tables, step, self.strength) for tables in start]


class TableCoder:
    """Rows of codes, int32 (tables, count), <-> bytes. Without ``step`` the tables stay as they start."""

    def __init__(self, start: np.ndarray, step: int | None = None, strength: int = 1):
        self.model = ans().model.Categorical
        self.start, self.step = start, step
        # What one code adds: a whole number, so that sums of float64 are exact (below 2^53).
        self.gain = np.maximum(1, start.sum(axis=-1, keepdims=True) // strength)
        self.first = self._models(start)

    def write(self, codes: np.ndarray) -> bytes:
        """The row's stream."""
        parts, weights = [], self.start.copy()
        for part in self._parts(codes.shape[-1]):
            models = self._models(weights) if part.start else self.first
            parts += zip(codes[:, part], models, strict=True)
            self._learn(weights, codes[:, part])
        coder = ans_coder()
        for symbols, model in reversed(parts):
            coder.encode_reverse(np.ascontiguousarray(symbols), model)
        return stored(coder)

    def read(self, stream: bytes, count: int) -> np.ndarray:
        """The inverse. Raises ``FormatError`` if the stream does not end with the row."""
        coder, codes, weights = ans_coder(stream), np.empty((len(self.start), count), np.int32), self.start.copy()
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
