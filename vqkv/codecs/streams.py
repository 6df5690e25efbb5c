"""Codes as rANS streams (``vqkv.kernels.entropy``), one a row: channel after channel."""

from abc import abstractmethod

import torch
from torch import Tensor

from vqkv.codecs.payload import Payload
from vqkv.codecs.stage import Quantizer, Side
from vqkv.errors import FormatError
from vqkv.kernels import rans_decode, rans_encode
from vqkv.kernels.entropy.code import TOTAL, Code, most_words

SMOOTHING = 0.5  # added to every code's count: one that calibration never saw is rare, not impossible
MOST_LANES = 32


class StreamQuantizer(Quantizer):
    """A quantizer whose codes are stored as streams. Of each row, codes take turns between ``num_tables`` tables. Where
    tables differ between heads (``by_head``), a stream holds all heads of a row; else each has its own, and any number
    of heads is served. ``lanes``: states that take turns in a stream, 4 for a CPU, 32 for the warps of a GPU."""

    num_tables: int
    lanes: int
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
        small = most_words(*values.shape[3:], self.lanes) < 1 << 15
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
    """Smooth counts (..., codes) and round them to uint16 that sum to 4,096 along the last axis, none 0."""
    counts = counts.double() + SMOOTHING
    shares = counts / counts.sum(-1, keepdim=True) * TOTAL
    rounded = shares.round().clamp_min(1)
    while (rest := TOTAL - rounded.sum(-1, keepdim=True)).any():  # from or to where a slot changes a code's bits least
        more, less = ((rounded + 1) / rounded).log2(), (rounded / (rounded - 1)).log2()
        gain = shares * torch.where(rest > 0, more, -less)
        gain = gain.masked_fill((rest < 0) & (rounded == 1), -torch.inf)
        rounded.scatter_add_(-1, gain.argmax(-1, keepdim=True), rest.sign())
    return rounded.to(torch.uint16)
