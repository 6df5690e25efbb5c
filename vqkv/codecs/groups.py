"""Components in groups of their own bits: of a byte, which attention reads in place, or of codes that are deflated."""

import math
import zlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.codecs.affine import MinMax
from vqkv.codecs.grid import gaussian_tables
from vqkv.codecs.learning.kmeans import KMeans
from vqkv.codecs.payload import Payload
from vqkv.codecs.stage import Quantizer, Side, learned
from vqkv.errors import DataError, FormatError
from vqkv.kernels import Grouped, KernelView, decode, grouped_encode
from vqkv.runtime.checks import FP16_MAX, MAX_SEED

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)  # components of a group of one byte: 8 bits a value down to half a bit
CODES = 256
SAMPLES = 1 << 16  # groups that a codebook is learned from
MIN_STD = 1e-6  # of the root mean square of all components

UNIT = 16  # components of the smallest deflated group
UNITS = (1, 4, 16, 64)  # of a deflated group
WIDTHS = (0, 1, 2, 3, 4, 5, 6, 8)  # bits of a code
ENDS = 32  # bits of a group's two ends
SAMPLED = 512  # tokens on which groups are tried
EFFORT = 9  # zlib's highest


@dataclass(eq=False)
class ByteGroups(Quantizer):
    """Store each head's components (last axis, the strongest first) in groups of one byte, over their root mean square.

    A group has one of ``SIZES``; the weakest components get no byte. Groups are those of least squared error for
    ``bits`` a value (dynamic programming over components, with a Gaussian's error for each size), as many for each
    head. Groups of one size share a codebook of 256 vectors, learned by k-means on the first batch. Every token takes
    the same bytes. Side information: ``sizes``, uint8 (num_kv_heads, bytes), ``scale``, fp16 (num_kv_heads,
    components), and ``codebooks``, fp16 (256, sum of the sizes in use).
    """

    bits: float = 2.0
    seed: int = 0
    sizes: Tensor = learned()
    scale: Tensor = learned()
    codebooks: Tensor = learned()
    limits = {"bits": (0.01, 8.0), "seed": (0, MAX_SEED)}
    by_head = True
    code_bits = 8

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Prepare for rows (components,). Raises ``DataError`` for fewer bits than a byte a row."""
        shape = super().build(shape)
        self.codes_per_row = int(self.bits * shape[-1] / 8 + 1e-6)
        self._layout: tuple = None, None, None  # and the tensors that it was made of
        if not self.codes_per_row:
            raise DataError(f"{self.bits:g} bits of {shape[-1]} components are no byte: use at least {8 / shape[-1]:g}")
        return shape

    def rates(self, y: Tensor) -> Tensor:
        """Return a point for each number of bytes."""
        variance = _variance(y)
        heads, width = variance.shape
        error = torch.from_numpy(sum(_least_errors(each)[0][-1] for each in variance.numpy())[1:])
        bits = torch.arange(1, width + 1, dtype=torch.float64) * 8 / width
        return torch.stack([bits, error / (heads * width)], dim=1)

    def partial_fit(self, x: Tensor) -> None:
        """Let the first batch decide."""
        if self.sizes is not None:
            return
        variance = _variance(x)
        least = MIN_STD * variance.mean().sqrt().clamp_min(MIN_STD)
        self.scale = variance.sqrt().clamp(least, FP16_MAX).half().clamp_min(2.0**-24).to(x.device)  # fp16's least
        sizes = [_sizes(each, self.codes_per_row) for each in variance.numpy()]
        self.sizes = torch.tensor(sizes, dtype=torch.uint8, device=x.device)
        firsts, codebooks = self.sizes.long().cumsum(1) - self.sizes.long(), []
        scaled = (x / self.scale.float().unsqueeze(1)).movedim(1, 2)  # batch, rows, heads, components
        for size in self.sizes.unique().tolist():
            heads, groups = (self.sizes == size).nonzero(as_tuple=True)
            components = firsts[heads, groups].unsqueeze(1) + torch.arange(size, device=x.device)
            codebooks.append(self._codebook(scaled[:, :, heads[:, None], components].flatten(0, 2)))
        self.codebooks = torch.cat(codebooks, dim=1).half()

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Return uint8 codes (batch, num_kv_heads, rows, bytes) of x (batch, num_kv_heads, rows, components)."""
        return grouped_encode(x, self._view(torch.empty(0, dtype=torch.uint8, device=x.device))), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        values = decode(self._view(codes.byte()))
        return F.pad(values, (0, self.scale.shape[1] - values.shape[-1]))

    def kernel_view(self, payload: Payload) -> KernelView | None:
        return self._view(payload.fields["codes"])

    def load(self, payload: Payload) -> Tensor:
        return self.decode(payload.fields["codes"], {})

    def _view(self, codes: Tensor) -> Grouped:
        sizes, codebooks, layout = self._layout
        if layout is None or sizes is not self.sizes or codebooks is not self.codebooks:
            self._layout = self.sizes, self.codebooks, (layout := self._laid_out())
        return Grouped(codes, *layout)

    def _laid_out(self) -> tuple[Tensor, Tensor, Tensor]:
        """Make table, layout and scale of ``Grouped``, of the components that some head has a byte for."""
        sizes = self.sizes.long()
        used, index = sizes.unique(return_inverse=True)
        begins, firsts = CODES * (used.cumsum(0) - used), sizes.cumsum(1) - sizes
        table = torch.cat([book.T.float().flatten() for book in self.codebooks.split(used.tolist(), 1)])
        return table, torch.stack([sizes, begins[index], firsts]), self.scale[:, : int(sizes.sum(1).max())]

    def _codebook(self, groups: Tensor) -> Tensor:
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(self.seed))[:SAMPLES]
        groups = groups[order.to(groups.device)]
        try:
            return KMeans(CODES, iterations=25, seed=self.seed, spread=True).fit(groups)
        except DataError:  # few tokens, or a head that hardly varies: each vector is a code
            distinct = groups.unique(dim=0)
            return distinct[torch.arange(CODES, device=distinct.device) % len(distinct)]


def _least_errors(variance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find for one head ``error[i, b]``, the least squared error of the first i components in b bytes (last row: of all
    components), and ``size[i, b]``, that of the last group, 0 where the last component gets none."""
    width, errors = len(variance), gaussian_tables()["byte_errors"]  # of a standard Gaussian, by size of a group
    before = np.concatenate([[0.0], variance.cumsum()])
    error, size = np.full((width + 1, width + 1), np.inf), np.zeros((width + 1, width + 1), int)
    error[0, 0] = 0.0
    for i in range(1, width + 1):
        error[i] = error[i - 1] + variance[i - 1]
        for g in (g for g in SIZES if g <= i):
            tried = np.concatenate([[np.inf], error[i - g, :-1] + (before[i] - before[i - g]) * errors[str(g)]])
            size[i] = np.where(tried < error[i], g, size[i])
            error[i] = np.minimum(tried, error[i])
    return error, size


def _sizes(variance: np.ndarray, count: int) -> list[int]:
    """Return the sizes of a head's groups in so many bytes."""
    size, i, sizes = _least_errors(variance)[1], len(variance), []
    while count:
        if g := int(size[i, count]):
            sizes.append(g)
            count -= 1
        i -= max(g, 1)
    return sizes[::-1]


def _variance(y: Tensor) -> Tensor:
    """Return the mean square of each head's components, float64 (num_kv_heads, components)."""
    return y.transpose(0, 1).flatten(1, 2).double().square().mean(1).cpu()


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
        """Return uint8 codes (..., codes of a row) and fp16 ends (..., groups, tokens) of x (..., *row_shape)."""
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
        """Undo ``store``. Raises ``FormatError`` for streams that were cut or altered, or are another codec's."""
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
        for size in (min(size, units - unit) for size in UNITS if size < units - unit + UNITS[-1]):
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
