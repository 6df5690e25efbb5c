"""Components in groups of their own bits, found by dynamic programming, their codes deflated (KVTC)."""

import math
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vqkv.codecs.affine import MinMax
from vqkv.codecs.payload import Payload
from vqkv.codecs.stage import Quantizer, Side, learned
from vqkv.errors import FormatError

UNIT = 16  # components of the smallest group
SIZES = (1, 4, 16, 64)  # of groups, in units
WIDTHS = (0, 1, 2, 3, 4, 5, 6, 8)  # bits of a code
ENDS = 32  # bits of a group's two ends
SAMPLED = 512  # tokens on which groups are tried
EFFORT = 9  # zlib's highest


@dataclass(eq=False)
class ComponentGroups(Quantizer):
    """Round neighbouring components, of rows (tokens, components), in groups with codes of the same width.

    Codes lie between the least and the largest of the group's values in a token, fp16; groups of width 0 are not
    stored. The codes of a row, group by group and component by component, are deflated (zlib) to a stream. Groups of
    16, 64, 256 or 1,024 components and their widths are those of least squared error on the first batch that take at
    most ``bits`` a value, ends included and before deflating, by dynamic programming (KVTC, Staniszewski & Lancucki
    2025, section 3). The last ones that get none are forgotten, as are their components. Side information: ``groups``,
    int16 (groups, 2), the number of components and the width.
    """

    bits: float = 2.0
    groups: Tensor = learned()
    limits = {"bits": (0.01, 8.0)}
    side_fields = ("low", "high")

    def partial_fit(self, x: Tensor) -> None:
        """Let the first batch decide."""
        if self.groups is None:
            rows = x.reshape(-1, x.shape[-1])
            rows = rows[:: -(-len(rows) // SAMPLED)]
            self.groups = _cheapest(rows, int(self.bits * x.shape[-1] / self.share)).to(x.device)

    def finalize(self) -> None:
        """Leave out the last groups if they are not stored: no reader needs their components."""
        stored = self.groups[:, 1].nonzero()
        self.groups = self.groups[: int(stored.max()) + 1 if len(stored) else 1].clone()

    @property
    def kept(self) -> int:
        return int(self.groups[:, 0].sum())

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """(..., *row_shape) -> uint8 (..., codes of a row), and fp16 ends (..., groups, tokens)."""
        sizes, widths = self.groups.mT.tolist()
        codes = [x.new_zeros(*x.shape[:3], 0, dtype=torch.uint8)]
        ends = [x.new_zeros(2, *x.shape[:3], 0, x.shape[3], dtype=torch.float16)]
        for part, width in zip(x[..., : self.kept].split(sizes, dim=-1), widths):
            if width:
                code, side = MinMax().codes(part, 2**width - 1)
                codes.append(code.to(torch.uint8).mT.flatten(-2))
                ends.append(torch.stack([side["low"], side["high"]]).unsqueeze(-2))
        low, high = torch.cat(ends, dim=-2)
        return torch.cat(codes, dim=-1), {"low": low, "high": high}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        tokens, components = self.row_shape
        out = torch.zeros(*codes.shape[:3], tokens, components, dtype=torch.float32, device=codes.device)
        first = code = stored = 0
        for size, width in self.groups.tolist():
            if width:
                part = codes[..., code : code + size * tokens].unflatten(-1, (size, tokens)).mT
                low, high = (side[name][..., stored, :].float().unsqueeze(-1) for name in self.side_fields)
                out[..., first : first + size] = low + part.float() * ((high - low) / (2**width - 1))
                code, stored = code + size * tokens, stored + 1
            first += size
        return out

    def store(self, y: Tensor) -> Payload:
        """Deflate each group's codes as a block: one table of Huffman codes for several widths would serve none.

        Runs, which are rare, are not looked for: they save less than telling of them costs the tables."""
        codes, side = self.encode(y)
        stops = np.cumsum([size * self.row_shape[0] for size, width in self.groups.tolist() if width])[:-1]
        streams = []
        for row in codes.permute(2, 0, 1, 3).flatten(0, 2).cpu().numpy():
            deflater = zlib.compressobj(EFFORT, wbits=-zlib.MAX_WBITS, strategy=zlib.Z_HUFFMAN_ONLY)
            parts = [deflater.compress(part.data) + deflater.flush(zlib.Z_BLOCK) for part in np.split(row, stops)]
            streams.append(b"".join(parts) + deflater.flush())
        lengths = torch.tensor([len(stream) for stream in streams], dtype=torch.int32, device=y.device)
        lengths = lengths.view(y.shape[2], *y.shape[:2]).permute(1, 2, 0)
        stream = torch.from_numpy(np.frombuffer(b"".join(streams), np.uint8).copy()).to(y.device)
        return Payload({"lengths": lengths, **side}, ragged={"stream": stream})

    def load(self, payload: Payload) -> Tensor:
        """Raises ``FormatError`` for streams that were cut, extended or altered, or are another codec's."""
        lengths = payload.counts("stream").permute(2, 0, 1)
        data, stops = payload.ragged["stream"].cpu().numpy().tobytes(), lengths.flatten().cumsum(0).tolist()
        size = sum(n for n, width in self.groups.tolist() if width) * self.row_shape[0]
        rows = [_inflated(data[start:stop], size) for start, stop in zip([0, *stops], stops)]
        codes = torch.from_numpy(np.array(rows, np.uint8)).to(lengths.device).view(*lengths.shape, size)
        return self.decode(codes.permute(1, 2, 0, 3), self.side_of(payload))


def _inflated(stream: bytes, size: int) -> np.ndarray:
    inflater = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    try:
        codes = inflater.decompress(stream, size + 1)
    except zlib.error:
        codes = b""
    if len(codes) != size or not (inflater.eof or not stream) or inflater.unused_data:
        raise FormatError("a stream was cut, extended or altered, or is another codec's: store the tokens again")
    return np.frombuffer(codes, np.uint8)


def _cheapest(rows: Tensor, budget: int) -> Tensor:
    """Find sizes and widths, int16 (groups, 2), of least squared error over rows in at most ``budget`` bits a token."""
    components, starts = rows.shape[1], range(0, rows.shape[1], UNIT)
    grain = math.gcd(UNIT, components)  # bits of which every cost is a multiple: counted in it, tables stay small
    units, budget = len(starts), budget // grain
    least = np.full((units + 1, budget + 1), np.inf)  # error of the components before each start, by bits spent
    least[0, 0] = 0.0
    steps, chosen = np.zeros(least.shape, np.int16), np.zeros(least.shape, np.uint8)  # of the last group, to each entry
    for unit, start in enumerate(starts):
        for size in (min(size, units - unit) for size in SIZES if size < units - unit + SIZES[-1]):
            part, end = rows[:, start : min(components, start + size * UNIT)], unit + size
            for width in WIDTHS:
                bits = _bits(part.shape[1], width) // grain
                if bits > budget:
                    continue
                error = least[unit, : budget + 1 - bits] + _error(part, width)
                better = error < least[end, bits:]
                least[end, bits:][better] = error[better]
                steps[end, bits:][better], chosen[end, bits:][better] = size, width
    end, spent, groups = units, int(least[-1].argmin()), []
    while end:
        start, width = end - int(steps[end, spent]), int(chosen[end, spent])
        groups.append((min(components, end * UNIT) - start * UNIT, width))
        end, spent = start, spent - _bits(groups[-1][0], width) // grain
    return torch.tensor(groups[::-1], dtype=torch.int16)


def _bits(size: int, width: int) -> int:
    """Count bits of a group's codes and ends in a token."""
    return width * size + ENDS * (width > 0)


def _error(x: Tensor, width: int) -> float:
    """Return the squared error of (tokens, components) in one group, mean over tokens."""
    error = x
    if width:
        codes, side = MinMax().codes(x, 2**width - 1)
        low, high = (side[name].float().unsqueeze(-1) for name in ("low", "high"))
        error = codes * ((high - low) / (2**width - 1)) + low - x
    return error.square().sum(dim=-1).mean().item()
