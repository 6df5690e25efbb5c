"""Vector quantization: residual (one stage is plain VQ), product, and with codebooks of each head."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.learning.kmeans import Ema, KMeans
from vqkv.codecs.payload import Payload
from vqkv.codecs.stage import Quantizer, Side, learned
from vqkv.errors import DataError
from vqkv.kernels import Coded, KernelView, rvq_decode, rvq_encode, rvq_statistics
from vqkv.runtime.checks import MAX_SEED

MAX_QUANTIZERS = 64
SAMPLES_PER_CODE = 16  # the largest number of vectors that k-means sees
HEAD_CODES, HEAD_ITERATIONS = 256, 25
E5M2, LARGEST_MANTISSA = torch.float8_e5m2, 1.75


@dataclass(eq=False)
class ResidualVQ(Quantizer):
    """``num_quantizers`` codebooks of ``codebook_size`` codes of ``group_size`` dims, shared by all heads and groups.

    Algorithm 1 of the residual VQ paper. The first ``partial_fit`` initialises stage by stage on residuals, by k-means
    (on at most 16 vectors a code) or ``random`` (small uniform codes, upstream's default). Every later call is one
    moving-average step of all stages. ``beam`` > 1 keeps that many partial sequences of codes from stage to stage, in
    encoding: better codes for the same bytes. Side information: ``codebooks``, fp16 (num_quantizers, codebook_size,
    group_size).
    """

    num_quantizers: int = 8
    codebook_size: int = 2048
    group_size: int = 32
    kmeans_iterations: int = 10
    init: str = "kmeans"
    decay: float = 0.99
    revive: bool = False
    seed: int = 0
    beam: int = 1
    codebooks: Tensor = learned()
    limits = {"num_quantizers": (1, MAX_QUANTIZERS), "codebook_size": (1, 65536), "group_size": (1, 32768),
              "beam": (1, 256), "kmeans_iterations": (0, 10_000), "decay": (0.0, 0.999999),
              "seed": (0, MAX_SEED)}  # fmt: skip
    choices = {"init": ("kmeans", "random")}

    def __post_init__(self):
        super().__post_init__()
        self.code_bits = max(1, (self.codebook_size - 1).bit_length())
        self.num_tables = self.num_quantizers  # a row's codes take turns between distributions, one per stage

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Prepare for rows (..., group_size). Raises ``DataError`` for others."""
        if shape[-1] != self.group_size:
            raise DataError(f"rows of {shape[1:]} reach a quantizer of group_size {self.group_size}: add a Grouping")
        self.row_shape, self._groups = shape[1:], math.prod(shape[1:-1])
        self.codes_per_row = self._groups * self.num_quantizers
        return shape

    def partial_fit(self, x: Tensor) -> None:
        """Learn from x (..., group_size). Raises ``DataError`` at first for fewer distinct vectors than codes."""
        vectors = x.reshape(-1, self.group_size)
        if self.codebooks is None:
            self._start(vectors)
            return
        codes, count = rvq_encode(vectors, self.codebooks), len(vectors)
        rows = torch.linspace(0, count - 1, min(count, self.codebook_size), dtype=torch.float32).long()
        samples = [*self._residuals(vectors[rows], codes[rows])][:-1] if self.revive else []
        self.codebooks = self._ema.update(*rvq_statistics(vectors, codes, self.codebooks), samples)

    def finalize(self) -> None:
        """Round to fp16. Raises ``DataError`` if a code overflows it."""
        self.codebooks = self.codebooks.half()
        vars(self).pop("_ema", None)  # what only learning needs
        if not torch.isfinite(self.codebooks).all():
            raise DataError("a code overflows fp16: put a scale before the quantizer")

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Return codes (batch, heads, rows, groups * num_quantizers) of x (batch, heads, rows, ..., group_size)."""
        return rvq_encode(x, self.codebooks, self.beam).flatten(3), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return rvq_decode(codes.unflatten(-1, (*self.row_shape[:-1], self.num_quantizers)), self.codebooks)

    def rates(self, y: Tensor) -> Tensor:
        """Return a point for each number of quantizers, up to twice as many by extrapolation."""
        energy, *errors = self._squared(y, beam=1).tolist()
        shrinks = (errors[-1] / energy) ** (1 / len(errors)) if errors[-1] else 1.0
        errors += [errors[-1] * shrinks**more for more in range(1, min(len(errors), MAX_QUANTIZERS - len(errors)) + 1)]
        return torch.tensor([(k * self.code_bits / self.group_size, e) for k, e in enumerate(errors, 1)]).double()

    def with_bits(self, bits: float) -> "ResidualVQ":
        return dataclasses.replace(self, num_quantizers=max(1, round(bits * self.group_size / self.code_bits)))

    def kernel_view(self, payload: Payload) -> KernelView:
        return Coded(payload.fields["codes"], self.codebooks.unsqueeze(0), self.code_bits, self._groups)

    def loss(self, x: Tensor) -> Tensor:
        """Relative squared error |x - x_hat|^2 / |x|^2 after each stage: x (..., group_size) -> (num_quantizers,)."""
        squared = self._squared(x, self.beam)
        return squared[1:] / squared[0]

    def usage(self, x: Tensor) -> Tensor:
        """Count how often each code is chosen: x (..., group_size) -> int64 (num_quantizers, codebook_size)."""
        codes = rvq_encode(x.reshape(-1, self.group_size), self.codebooks, self.beam)
        return torch.stack([torch.bincount(stage, minlength=self.codebook_size) for stage in codes.T])

    def _squared(self, x: Tensor, beam: int) -> Tensor:
        """Mean square of x and of the residual of each stage, float64 (1 + num_quantizers,)."""
        vectors = x.reshape(-1, self.group_size)
        residuals = self._residuals(vectors, rvq_encode(vectors, self.codebooks, beam))
        return torch.stack([residual.double().square().mean() for residual in residuals])

    def _residuals(self, x: Tensor, codes: Tensor) -> Iterator[Tensor]:
        """Yield x, then the residual of each stage."""
        yield x
        for k, codebook in enumerate(self.codebooks.float()):
            x = x - codebook[codes[:, k]]
            yield x

    def _start(self, x: Tensor) -> None:
        """Initialise the codebooks of all stages, and their moving averages."""
        sample, limit = x, SAMPLES_PER_CODE * self.codebook_size
        if len(x) > limit:
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.seed))
            sample = x[order[:limit].to(x.device)]
        residual = before = sample
        codebooks, counts = [], []
        for k in range(self.num_quantizers):
            codebook = self._first_codes(k, residual, before, sample)
            codes = rvq_encode(residual, codebook.unsqueeze(0)).squeeze(-1)
            counted = torch.bincount(codes, minlength=self.codebook_size).double() * (len(x) / len(residual))
            counts.append(counted if self.init == "kmeans" else torch.ones_like(counted))
            codebooks.append(codebook)
            before, residual = residual, residual - codebook[codes]
        self.codebooks = torch.stack(codebooks)
        self._ema = Ema(self.codebooks, torch.stack(counts), self.decay, self.revive, self.seed)

    def _first_codes(self, k: int, residual: Tensor, before: Tensor, sample: Tensor) -> Tensor:
        """Learn or draw the codebook of stage ``k`` from its residual; ``before``: that of the stage before.

        A stage may have fewer distinct vectors left than codes. A vector alone in its cluster leaves no residual, and a
        first layer's keys before RoPE repeat with every token of the vocabulary. Then the codes are those vectors and,
        for vectors that calibration never saw, some of ``before`` at half their size."""
        size, generator = self.codebook_size, torch.Generator().manual_seed(self.seed + k)
        if self.init == "random":  # Kaiming-uniform, as vector-quantize-pytorch draws it
            uniform = torch.rand(size, self.group_size, generator=generator, dtype=torch.float32)
            return ((uniform * 2 - 1) * (6 / (size * self.group_size)) ** 0.5).to(residual.device)
        try:
            return KMeans(size, self.kmeans_iterations, self.seed + k).fit(residual)
        except DataError as error:
            distinct = residual.unique(dim=0)[:size]
            if k == 0 or len(sample.unique(dim=0)) < 2 * size:  # too few vectors, not too regular ones
                raise DataError(f"stage {k + 1} of {self.num_quantizers}: {error}") from error
            picks = torch.randint(len(before), (size - len(distinct),), generator=generator)
            return torch.cat([distinct, before[picks.to(before.device)] / 2])


@dataclass(eq=False)
class ProductVQ(Quantizer):
    """Cut rows (..., num_subvectors * sub_dim) into pieces, each with a ``ResidualVQ`` of ``num_quantizers`` stages (VQ
    quality framework, section 3.3; Jegou et al. 2011). Side information: ``codebooks``, fp16 (num_subvectors *
    num_quantizers, codebook_size, sub_dim)."""

    num_subvectors: int = 2
    codebook_size: int = 256
    sub_dim: int = 4
    seed: int = 0
    num_quantizers: int = 1
    codebooks: Tensor = learned()
    limits = {"num_subvectors": (1, 4096), "seed": (0, MAX_SEED - 4096)}

    def __post_init__(self):
        super().__post_init__()
        # not registered: the codebooks of all are saved as one tensor
        sizes = self.num_quantizers, self.codebook_size, self.sub_dim
        self._pieces = [ResidualVQ(*sizes, seed=self.seed + i) for i in range(self.num_subvectors)]
        self.code_bits = self._pieces[0].code_bits
        self.num_tables = self.num_subvectors * self.num_quantizers  # a row's codes take turns between distributions

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Prepare for rows. Raises ``DataError`` unless the last axis is num_subvectors * sub_dim."""
        width = self.num_subvectors * self.sub_dim
        if shape[-1] != width:
            raise DataError(f"rows of {shape[1:]} reach a product quantizer of {width} values: add a Grouping")
        shape = super().build(shape)
        self.codes_per_row = self.codes_per_row // self.sub_dim * self.num_quantizers
        return shape

    def partial_fit(self, x: Tensor) -> None:
        """Learn from one batch. Raises ``DataError`` at first for fewer distinct vectors than codes."""
        for piece, values in zip(self._pieces, x.split(self.sub_dim, dim=-1), strict=True):
            piece.partial_fit(values)
        self.codebooks = torch.cat([piece.codebooks for piece in self._pieces])

    def finalize(self) -> None:
        """Round to fp16."""
        for piece in self._pieces:
            piece.finalize()
        self.codebooks = torch.cat([piece.codebooks for piece in self._pieces])
        self._pieces = []

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Return codes (batch, heads, rows, vectors * num_subvectors * num_quantizers)."""
        pieces = zip(x.split(self.sub_dim, dim=-1), self.codebooks.split(self.num_quantizers), strict=True)
        return torch.cat([rvq_encode(values, codebook) for values, codebook in pieces], dim=-1).flatten(3), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        by_piece = codes.unflatten(-1, (-1, self.num_subvectors, self.num_quantizers)).unbind(-2)
        pieces = zip(by_piece, self.codebooks.split(self.num_quantizers), strict=True)
        values = [rvq_decode(piece, codebook) for piece, codebook in pieces]
        return torch.cat(values, dim=-1).flatten(-2).unflatten(-1, self.row_shape)

    def kernel_view(self, payload: Payload) -> KernelView:
        tables = self.codebooks.unflatten(0, (self.num_subvectors, self.num_quantizers))
        return Coded(payload.fields["codes"], tables, self.code_bits, self.codes_per_row // self.num_quantizers)


@dataclass(eq=False)
class HeadCodebooks(Quantizer):
    """Give each group of each head, of rows (groups, size), 256 codes of its own, learned by k-means on the first batch
    (NOVA-KV, arXiv 2608.04074). Side information: ``codebooks``, the bytes of E5M2, uint8 (num_kv_heads, groups, 256,
    size), over ``scale``, fp16 (num_kv_heads, groups)."""

    seed: int = 0
    codebooks: Tensor = learned()
    scale: Tensor = learned()
    by_head = True
    code_bits = 8
    limits = {"seed": (0, MAX_SEED)}
    fixed = {"iterations": HEAD_ITERATIONS}

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        self.block_values = shape[-1]
        return super().build(shape)

    def partial_fit(self, x: Tensor) -> None:
        """Learn from the first batch. Raises ``DataError`` for fewer distinct vectors than codes."""
        if self.codebooks is None:
            groups = x.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)
            books = torch.stack([KMeans(HEAD_CODES, HEAD_ITERATIONS, self.seed).fit(rows) for rows in groups])
            books = books.unflatten(0, (x.shape[1], -1))
            self.scale = (books.abs().amax((2, 3)) / LARGEST_MANTISSA).half()
            self.codebooks = (books / self.scale.float()[..., None, None]).to(E5M2).view(torch.uint8)

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Return codes (batch, heads, rows, groups) of x (batch, heads, rows, groups, size)."""
        books = self._books().flatten(0, 1).split(1)
        groups = x.transpose(2, 3).flatten(1, 2).unbind(1)
        codes = [rvq_encode(rows, book).squeeze(-1) for rows, book in zip(groups, books, strict=True)]
        return torch.stack(codes, dim=1).unflatten(1, (x.shape[1], -1)).transpose(2, 3), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        heads, groups = (torch.arange(n, device=codes.device) for n in self.scale.shape)
        return self._books()[heads[:, None, None], groups, codes.long()]

    def _books(self) -> Tensor:
        return self.codebooks.view(E5M2).float() * self.scale.float()[..., None, None]
