"""Codes as streams of an asymmetric numeral system (ANS: Duda 2013; ``constriction``: Bamler 2022), one for each row.

Needs the package ``constriction``, which is imported when codes are first learned from, stored or loaded.
"""

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from vqkv.codecs.payload import Payload
from vqkv.codecs.stage import Quantizer

LARGEST = 1 << 16  # frequencies are 1 to this, less one in uint16: a code without a frequency cannot be written down
SMOOTHING = 0.5  # added to every code's count: one that calibration never saw is rare, not impossible


class StreamQuantizer(Quantizer):
    """A quantizer whose codes are stored as streams. Of each row, codes take turns between ``num_tables`` tables.

    Subclasses make ``coders``, one for all heads or one for each, which ``write`` a row of codes, int32 (num_tables,
    count), as bytes and ``read`` so many back.
    """

    num_tables: int
    most_code_bytes: int  # that a code can take

    @abstractmethod
    def coders(self) -> list: ...

    def store(self, y: Tensor) -> Payload:
        """``lengths``, the bytes of each row's stream (int16 where that is always enough), and the streams."""
        codes, side = self.encode(y)
        by_table, coders = self.by_table(codes), self.coders()
        rows = by_table.flatten(0, 2).to("cpu", torch.int32).contiguous().numpy()
        streams = [coders[i % len(coders)].write(row) for i, row in enumerate(rows)]
        small = self.codes_per_row * self.most_code_bytes + 8 < 1 << 15
        lengths = torch.tensor([len(s) for s in streams], dtype=torch.int16 if small else torch.int32)
        stream = torch.from_numpy(np.frombuffer(bytearray(b"".join(streams)), np.uint8))
        fields = {"lengths": lengths.view(by_table.shape[:3]).permute(1, 2, 0).to(y.device), **side}
        return Payload(fields, ragged={"stream": stream.to(y.device)})

    def load(self, payload: Payload) -> Tensor:
        lengths, stream, coders = payload.counts("stream").permute(2, 0, 1), payload.ragged["stream"], self.coders()
        ends, data = lengths.flatten().cumsum(0).tolist(), stream.cpu().numpy().tobytes()
        rows = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        count = self.codes_per_row // self.num_tables
        codes = np.array([coders[i % len(coders)].read(row, count) for i, row in enumerate(rows)], np.int64)
        codes = torch.from_numpy(codes).to(stream.device).view(*lengths.shape, self.num_tables, count)
        return self.decode(codes.permute(1, 2, 0, 4, 3).flatten(3), self.side_of(payload))

    def by_table(self, codes: Tensor) -> Tensor:
        """Codes (batch, heads, rows, codes_per_row) -> (rows, batch, heads, num_tables, codes of a table)."""
        return codes.permute(2, 0, 1, 3).unflatten(-1, (-1, self.num_tables)).mT


def frequencies(counts: Tensor) -> Tensor:
    """Counts (..., codes) -> uint16, less one: the most frequent code has 65,536, no code less than 1."""
    counts = counts.double() + SMOOTHING
    return ((counts * (LARGEST / counts.amax(dim=-1, keepdim=True))).round().clamp(1, LARGEST) - 1).to(torch.uint16)


def written(parts: list[tuple[np.ndarray, object]]) -> bytes:
    """The stream from which symbols and their models are read in this order, without the zero bytes at its end. A
    stack: what is read last is written first."""
    coder = ans().stack.AnsCoder()
    for symbols, model in reversed(parts):
        coder.encode_reverse(np.ascontiguousarray(symbols, np.int32).reshape(-1), model)
    return coder.get_compressed().astype("<u4").tobytes().rstrip(b"\0")


def reader(stream: bytes):
    """A coder that ``decode``s what was ``written``."""
    return ans().stack.AnsCoder(np.frombuffer(stream + bytes(-len(stream) % 4), "<u4").astype(np.uint32))


def ans():
    """Raises ``ImportError`` with the remedy if the package is missing."""
    try:
        from constriction import stream
    except ImportError as error:
        raise ImportError("entropy coding needs the package constriction: pip install constriction") from error
    return stream
