"""Components in groups of one byte, small groups for the strong ones: what attention can read in place."""

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.codecs.grid import gaussian_tables
from vqkv.codecs.learning.kmeans import KMeans
from vqkv.codecs.payload import Payload
from vqkv.codecs.stage import Quantizer, Side, learned
from vqkv.errors import DataError
from vqkv.kernels import Grouped, KernelView, decode, grouped_encode
from vqkv.kernels.derived import remembered
from vqkv.runtime.checks import FP16_MAX, MAX_SEED

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)  # components of a group: 8 bits a value down to half a bit
CODES = 256
SAMPLES = 1 << 16  # groups that a codebook is learned from
LEAST = 1e-6  # of the root mean square of all components


@dataclass(eq=False)
class ByteGroups(Quantizer):
    """Each head's components (last axis, the strongest first), over their root mean square, in neighbouring groups of
    ``SIZES``, each of which is one of 256 vectors, one byte; the weakest components get none. Groups are those of least
    squared error for ``bits`` a value (dynamic programming over components, with a Gaussian's error for each size), as
    many bytes for each head. Groups of one size share a codebook, learned by k-means on the first batch. No entropy
    code and no scale a token: every token takes the same bytes.

    Side information: ``sizes``, uint8 (num_kv_heads, bytes), ``scale``, fp16 (num_kv_heads, components), and
    ``codebooks``, fp16 (256, sum of the sizes in use).
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
        """Raises ``DataError`` for fewer bits than a byte a row."""
        shape = super().build(shape)
        self.codes_per_row = int(self.bits * shape[-1] / 8 + 1e-6)
        self._known: tuple = None, None, None
        if not self.codes_per_row:
            raise DataError(f"{self.bits:g} bits of {shape[-1]} components are no byte: use at least {8 / shape[-1]:g}")
        return shape

    def rates(self, y: Tensor) -> Tensor:
        """A point for each number of bytes."""
        variance = _variance(y)
        heads, width = variance.shape
        error = torch.from_numpy(sum(_least_errors(each)[0][-1] for each in variance.numpy())[1:])
        bits = torch.arange(1, width + 1, dtype=torch.float64) * 8 / width
        return torch.stack([bits, error / (heads * width)], dim=1)

    def with_bits(self, bits: float) -> "ByteGroups":
        return dataclasses.replace(self, bits=bits)

    def partial_fit(self, x: Tensor) -> None:
        """The first batch decides."""
        if self.sizes is not None:
            return
        variance = _variance(x)
        least = LEAST * variance.mean().sqrt().clamp_min(LEAST)
        self.scale = variance.sqrt().clamp(least, FP16_MAX).half().clamp_min(2.0**-24).to(x.device)  # fp16's least
        sizes = [_sizes(each, self.codes_per_row) for each in variance.numpy()]
        self.sizes = torch.tensor(sizes, dtype=torch.uint8, device=x.device)
        firsts, codebooks = self.sizes.long().cumsum(1) - self.sizes.long(), []
        scaled = (x / self.scale.float().unsqueeze(1)).movedim(1, 2)  # batch, rows, heads, components
        for size in self.sizes.unique().tolist():
            heads, groups = (self.sizes == size).nonzero(as_tuple=True)
            components = firsts[heads, groups].unsqueeze(1) + torch.arange(size, device=x.device)
            codebooks.append(self._learned(scaled[:, :, heads[:, None], components].flatten(0, 2)))
        self.codebooks = torch.cat(codebooks, dim=1).half()

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """(batch, num_kv_heads, rows, components) -> uint8 codes (batch, num_kv_heads, rows, bytes)."""
        return grouped_encode(x, self._view(torch.empty(0, dtype=torch.uint8, device=x.device))), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        values = decode(self._view(codes.byte()))
        return F.pad(values, (0, self.scale.shape[1] - values.shape[-1]))

    def kernel_view(self, payload: Payload) -> KernelView | None:
        return self._view(payload.fields["codes"])

    def load(self, payload: Payload) -> Tensor:
        return self.decode(payload.fields["codes"], {})

    def _view(self, codes: Tensor) -> Grouped:
        """Of the components that some head has a byte for."""
        sizes, codebooks, layout = self._known
        if layout is None or sizes is not self.sizes or codebooks is not self.codebooks:
            counts = tuple(map(tuple, self.sizes.tolist()))
            layout = *_laid_out(self.codebooks, counts), self.scale[:, : max(map(sum, counts))]
            self._known = self.sizes, self.codebooks, layout
        return Grouped(codes, *layout)

    def _learned(self, groups: Tensor) -> Tensor:
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(self.seed))[:SAMPLES]
        groups = groups[order.to(groups.device)]
        try:
            return KMeans(CODES, iterations=25, seed=self.seed, spread=True).fit(groups)
        except DataError:  # few tokens, or a head that hardly varies: each vector is a code
            known = groups.unique(dim=0)
            return known[torch.arange(CODES, device=known.device) % len(known)]


@remembered
def _laid_out(codebooks: Tensor, sizes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
    """``Grouped.table`` and its ``layout``."""
    used = sorted({size for head in sizes for size in head})
    begins = dict(zip(used, [0, *itertools.accumulate(CODES * size for size in used)]))
    firsts = [[0, *itertools.accumulate(head[:-1])] for head in sizes]
    starts = [[begins[size] for size in head] for head in sizes]
    table = torch.cat([book.T.float().flatten() for book in codebooks.split(used, 1)])
    return table, torch.tensor([sizes, starts, firsts], device=codebooks.device)


def _least_errors(variance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of one head: ``error[i, b]``, the least squared error of the first i components in b bytes (the last row: of all
    components), and ``size[i, b]``, that of the last group, 0 where the last component gets none."""
    width = len(variance)
    before = np.concatenate([[0.0], variance.cumsum()])
    error, size = np.full((width + 1, width + 1), np.inf), np.zeros((width + 1, width + 1), int)
    error[0, 0] = 0.0
    for i in range(1, width + 1):
        error[i] = error[i - 1] + variance[i - 1]
        for g in (g for g in SIZES if g <= i):
            tried = np.concatenate([[np.inf], error[i - g, :-1] + (before[i] - before[i - g]) * gaussian_error(g)])
            size[i] = np.where(tried < error[i], g, size[i])
            error[i] = np.minimum(tried, error[i])
    return error, size


def _sizes(variance: np.ndarray, count: int) -> list[int]:
    """The sizes of a head's groups in so many bytes."""
    size, i, sizes = _least_errors(variance)[1], len(variance), []
    while count:
        if g := int(size[i, count]):
            sizes.append(g)
            count -= 1
        i -= max(g, 1)
    return sizes[::-1]


def gaussian_error(size: int) -> float:
    """Mean squared error of a standard Gaussian in groups of so many components, 256 vectors learned by k-means."""
    return gaussian_tables()["byte_errors"][str(size)]


def _variance(y: Tensor) -> Tensor:
    """Mean square of each head's components, float64 (num_kv_heads, components)."""
    return y.transpose(0, 1).flatten(1, 2).double().square().mean(1).cpu()
