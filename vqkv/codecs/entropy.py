"""Entropy-coded codes of any quantizer: frequent ones take fewer bits."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vqkv.codecs.stage import Quantizer, Side, learned
from vqkv.codecs.streams import MOST_LANES, StreamQuantizer, frequencies
from vqkv.errors import DataError
from vqkv.kernels.entropy.code import Code, make_code

MOST_BITS = 10  # of a code that a table distinguishes


@dataclass(eq=False)
class Entropy(StreamQuantizer):
    """``quantizer``'s codes through an entropy coder. Lossless.

    Each row of codes is a stream, with a few bytes of overhead: fold blocks of tokens into rows first (``TokenBlock``).
    ``context`` says which codes share a table of frequencies: ``stage``, all of the same codebook (the quantizer's
    ``num_tables``); ``position``, only those of the same KV head and the same position in a token, where a row's first
    axis is its tokens, as k-means leaves all codes of a codebook about equally frequent.

    Tables are counted in calibration, with the codebooks as they were at each batch, and kept as side information:
    uint16 (heads, tables, codes). Of codes of more than 10 bits, the low bits are stored as they are.
    """

    quantizer: Quantizer
    context: str = "position"
    lanes: int = 4
    frequencies: Tensor = learned()
    choices = {"context": ("position", "stage")}
    limits = {"lanes": (1, MOST_LANES)}

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.quantizer, StreamQuantizer) or type(self.quantizer).encode is Quantizer.encode:
            raise DataError("Entropy takes a Quantizer that leaves storing its codes to others")
        self.by_head, self.side_fields = self.context == "position", self.quantizer.side_fields

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As the quantizer does. Raises ``DataError`` if ``position`` has no meaning in such rows."""
        self.quantizer.build(shape)
        self.codes_per_row = self.quantizer.codes_per_row
        codes = getattr(self.quantizer, "codebook_size", 1 << self.quantizer.code_bits)
        self.heads, self.num_tables = 1, getattr(self.quantizer, "num_tables", 1)
        if self.context == "position":
            self.heads, (self.num_tables, rest) = shape[0], divmod(self.codes_per_row, shape[1])
            if rest:
                raise DataError(f"rows of {shape[1:]} do not begin with an axis of tokens: put a TokenBlock first")
        self.shift = max(0, (codes - 1).bit_length() - MOST_BITS)
        self._shape, self._counts = (self.heads, self.num_tables, (codes - 1 >> self.shift) + 1), torch.tensor(0)
        return shape

    def partial_fit(self, x: Tensor) -> None:
        """Let the quantizer learn, then count the codes it now has for x."""
        self.quantizer.partial_fit(x)
        heads, tables, size = self._shape
        first = torch.arange(heads * tables, device=x.device).view(heads, tables, 1) * size
        codes = self.encode(x)[0].permute(2, 0, 1, 3).unflatten(-1, (-1, tables)).mT
        codes = (codes.long() >> self.shift) + first
        self._counts = self._counts + torch.bincount(codes.flatten(), minlength=first.numel() * size).view(self._shape)

    def finalize(self) -> None:
        """Freeze the quantizer and round the frequencies."""
        self.quantizer.finalize()
        self.frequencies, self._counts = frequencies(self._counts), torch.tensor(0)

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        return self.quantizer.encode(x)

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return self.quantizer.decode(codes, side)

    def make_code(self) -> Code:
        tables = self.frequencies.flatten(0, 1).cpu().numpy().astype(np.int64)
        escaped = [np.append(table, 0) for table in tables]  # no code ever is
        channels = torch.arange(len(tables))
        return make_code(escaped, [0] * len(tables), channels, torch.full_like(channels, self.shift), self.lanes)
