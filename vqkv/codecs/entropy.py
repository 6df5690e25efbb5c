"""Entropy-coded codes: rANS streams (``vqkv.kernels.entropy``), one a row, in which frequent codes take fewer bits."""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vqkv.codecs.payload import Payload
from vqkv.codecs.stage import Quantizer, Side, learned
from vqkv.errors import DataError, FormatError
from vqkv.kernels import rans_decode, rans_encode
from vqkv.kernels.entropy.code import TOTAL, Code, make_code, most_words

SMOOTHING = 0.5  # added to every code's count: one that calibration never saw is rare, not impossible
MOST_BITS = 10  # of a code that a table distinguishes


class StreamQuantizer(Quantizer):
    """A quantizer whose codes are stored as streams. Of each row, codes take turns between ``num_tables`` tables. Where
    tables differ between heads (``by_head``), a stream holds all heads of a row; else each has its own, and any number
    of heads is served."""

    num_tables: int
    heads: int  # that it was built for
    frequencies: Tensor
    _made: tuple[Tensor, Code] | None = None

    @abstractmethod
    def make_code(self) -> Code:
        """What ``frequencies`` say: a channel for each table, those of one head after the other."""

    def code(self) -> Code:
        """``make_code``, once for every tensor of ``frequencies``."""
        if self._made is None or self._made[0] is not self.frequencies:
            self._made = self.frequencies, self.make_code().to(self.frequencies.device)
        return self._made[1]

    def store(self, y: Tensor) -> Payload:
        """``lengths`` (batch, 1 or num_kv_heads, rows), the words of each stream, and the words, 16 bits each."""
        codes, side = self.encode(y)
        joined = self.heads if self.by_head else 1
        rows = codes.permute(2, 0, 1, 3).unflatten(-1, (-1, self.num_tables)).mT.unflatten(2, (-1, joined))
        values = rows.flatten(3, 4)  # rows, batch, streams, channels, tokens
        words, lengths = rans_encode(values.flatten(0, 2), self.code())
        channels, tokens = values.shape[3:]
        small = most_words(channels, tokens) < 1 << 15
        lengths = lengths.to(torch.int16 if small else torch.int32).view(values.shape[:3]).permute(1, 2, 0)
        return Payload({"lengths": lengths, **side}, ragged={"stream": words})

    def load(self, payload: Payload) -> Tensor:
        """Raises ``FormatError`` for streams that were cut, extended or altered, or are another codec's."""
        lengths = payload.counts("stream").permute(2, 0, 1)
        tokens = self.codes_per_row // self.num_tables
        codes, intact = rans_decode(payload.ragged["stream"], lengths.flatten(), self.code(), tokens)
        if not intact.all():
            raise FormatError(
                f"{int((~intact).sum())} of {intact.numel()} streams were cut, extended or altered, or are another "
                "codec's: store the tokens again"
            )
        joined = self.heads if self.by_head else 1
        codes = codes.view(*lengths.shape, tokens, joined, self.num_tables)  # rows, batch, streams before these
        codes = codes.permute(1, 2, 4, 0, 3, 5).flatten(1, 2)
        return self.from_tables(codes, self.side_of(payload))

    def from_tables(self, codes: Tensor, side: Side) -> Tensor:
        """``decode`` of codes int32 (batch, num_kv_heads, rows, codes of a table, num_tables)."""
        return self.decode(codes.flatten(3), side)


def frequencies(counts: Tensor) -> Tensor:
    """Round counts (..., codes), none 0, to uint16 that sum to 4,096 along the last axis, none 0."""
    shares = counts.double() / counts.double().sum(-1, keepdim=True) * TOTAL
    rounded = shares.round().clamp_min(1)
    while (rest := TOTAL - rounded.sum(-1, keepdim=True)).any():  # from or to where a slot changes a code's bits least
        more, less = ((rounded + 1) / rounded).log2(), (rounded / (rounded - 1)).log2()
        gain = shares * torch.where(rest > 0, more, -less)
        gain = gain.masked_fill((rest < 0) & (rounded == 1), -torch.inf)
        rounded.scatter_add_(-1, gain.argmax(-1, keepdim=True), rest.sign())
    return rounded.to(torch.uint16)


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
    frequencies: Tensor = learned()
    choices = {"context": ("position", "stage")}

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
        self.frequencies, self._counts = frequencies(self._counts + SMOOTHING), torch.tensor(0)

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        return self.quantizer.encode(x)

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return self.quantizer.decode(codes, side)

    def make_code(self) -> Code:
        tables = self.frequencies.flatten(0, 1).cpu().numpy().astype(np.int64)
        escaped = [np.append(table, 0) for table in tables]  # no code ever is
        channels = torch.arange(len(tables))
        return make_code(escaped, [0] * len(tables), channels, torch.full_like(channels, self.shift))
