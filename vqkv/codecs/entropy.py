"""Entropy-coded codes of any quantizer: frequent ones take fewer bits."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vqkv.codecs.stage import Quantizer, Side
from vqkv.codecs.streams import StreamQuantizer, ans, frequencies, reader, written
from vqkv.errors import DataError


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
    these; after every ``step`` codes of each table they are added to it, and the start weighs as much as ``strength``
    codes.

    A stack coder, not a queue: as the encoder knows the row, it finds all the tables first, then writes in reverse.
    Encoder and decoder agree because both hand constriction the same whole numbers, which no order of summation can
    round differently.
    """

    quantizer: Quantizer
    tables: str = "static"
    context: str = "position"
    choices = {"tables": ("static", "adaptive"), "context": ("position", "stage")}
    step = 16
    strength = 256
    most_code_bytes = 3  # constriction's probabilities have 24 bits

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.quantizer, StreamQuantizer) or type(self.quantizer).encode is Quantizer.encode:
            raise DataError("Entropy takes a Quantizer that leaves storing its codes to others")
        self.by_head, self.side_fields, self._counts = self.context == "position", self.quantizer.side_fields, 0
        self.register_buffer("frequencies", None)

    def build(self, shape: tuple[int, ...]) -> None:
        """As the quantizer does. Raises ``DataError`` if ``position`` has no meaning in such rows."""
        self.quantizer.build(shape)
        self.codes_per_row = self.quantizer.codes_per_row
        codes = getattr(self.quantizer, "codebook_size", 1 << self.quantizer.code_bits)
        heads, tables = 1, getattr(self.quantizer, "num_tables", 1)
        if self.context == "position":
            heads, (tables, rest) = shape[0], divmod(self.codes_per_row, shape[1])
            if rest:
                raise DataError(f"rows of {shape[1:]} do not begin with an axis of tokens: put a TokenBlock first")
        self.num_tables, self._shape = tables, (heads, tables, max(2, codes))  # there is no model of a single code

    def partial_fit(self, x: Tensor) -> None:
        """Let the quantizer learn, then count the codes it now has for x."""
        ans()
        self.quantizer.partial_fit(x)
        heads, tables, size = self._shape
        first = torch.arange(heads * tables, device=x.device).view(heads, tables, 1) * size
        codes = self.by_table(self.encode(x)[0]) + first
        self._counts += torch.bincount(codes.flatten(), minlength=first.numel() * size).view(self._shape)

    def finalize(self) -> None:
        """Freeze the quantizer and round the frequencies."""
        self.quantizer.finalize()
        self.frequencies = frequencies(self._counts)
        self._counts = 0

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        return self.quantizer.encode(x)

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return self.quantizer.decode(codes, side)

    def coders(self) -> "list[TableCoder]":
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
        return written(parts)

    def read(self, stream: bytes, count: int) -> np.ndarray:
        """The inverse."""
        coder, codes, weights = reader(stream), np.empty((len(self.start), count), np.int32), self.start.copy()
        for part in self._parts(count):
            models = self._models(weights) if part.start else self.first
            for symbols, model in zip(codes[:, part], models, strict=True):
                symbols[:] = coder.decode(model, len(symbols))
            self._learn(weights, codes[:, part])
        return codes

    def _parts(self, count: int) -> Iterator[slice]:
        step = self.step or count
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def _models(self, weights: np.ndarray) -> list:
        return [self.model(row, perfect=False) for row in weights]

    def _learn(self, weights: np.ndarray, codes: np.ndarray) -> None:
        if self.step:
            np.add.at(weights, (np.arange(len(codes))[:, None], codes), self.gain)
