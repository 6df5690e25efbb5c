"""The packed tokens of one layer's keys or values: written once, read from any token on, taken back from the end."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codec.payload import Payload
from vqkv.coder import Coder, Known

Span = tuple[int, int]  # packed tokens start, ..., stop - 1


@dataclass
class History:
    """``payload`` holds packed tokens in order; those in ``holes``, ascending spans of them, were taken back again.

    A codec that packs blocks of tokens could forget a part of a block only by packing the rest anew, at the price of a
    second quantization error. So the block stays as it is and its end becomes a hole, which is never read.
    """

    payload: Payload | None = None
    holes: tuple[Span, ...] = ()

    def __post_init__(self):
        self._count()

    def _count(self) -> None:
        self.packed = 0 if self.payload is None else self.payload.seq_len  # tokens in holes included
        self._read = self.packed - sum(stop - start for start, stop in self.holes)

    def __len__(self) -> int:
        return self._read

    def append(self, payload: Payload) -> None:
        """Take in tokens after those here."""
        self.payload = payload if self.payload is None else Payload.concat([self.payload, payload])
        self._count()

    def decode(self, coder: Coder, known: Known, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """The packed tokens ``start`` to ``stop`` - 1, without holes, as ``coder`` reads them: fp32, or ``out`` if they
        could be written there. Both are tokens at which the codec can begin."""
        payload = self.payload if stop - start == self.packed else self.payload.tokens(start, stop)
        holes = [(max(a, start), min(b, stop)) for a, b in self.holes if a < stop and b > start]
        if not holes:
            return coder.decode(payload, known, out)
        x = coder.decode(payload, known)
        edges = [start, *(edge for hole in holes for edge in hole), stop]
        spans = zip(edges[::2], edges[1::2], strict=True)
        return torch.cat([x[..., a - start : b - start, :] for a, b in spans], dim=-2)

    def count(self, stop: int) -> int:
        """Tokens that are read among the first ``stop`` packed ones."""
        return stop - sum(min(b, stop) - a for a, b in self.holes if a < stop)

    def truncate(self, seq_len: int, rows: int) -> None:
        """Keep the first ``seq_len`` tokens of those that are read; ``rows``: tokens that only go together."""
        if seq_len >= len(self):
            return
        end, holes = seq_len, []
        for start, stop in self.holes:
            if start >= end:
                break
            holes.append((start, stop))
            end += stop - start
        stop = -(-end // rows) * rows if seq_len else 0
        if stop > end:
            holes.append((end, stop))
        self.holes = tuple(holes) if stop else ()
        self.payload = self.payload.tokens(0, stop) if stop else None
        self._count()

    def select(self, index: Tensor) -> "History":
        """A copy with the sequences of the batch that ``index`` names."""
        return History(None if self.payload is None else self.payload.batch_select(index), self.holes)
