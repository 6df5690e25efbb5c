"""Residual vector quantization: every stage quantizes the residual of the stage before. One stage is plain VQ."""

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
from vqkv.kernels import Coded, KernelView, rvq_decode, rvq_encode, rvq_encode_packed, rvq_statistics
from vqkv.runtime.checks import MAX_SEED

MOST_QUANTIZERS = 64
SAMPLES_PER_CODE = 16  # vectors that k-means sees at most


@dataclass(eq=False)
class ResidualVQ(Quantizer):
    """``num_quantizers`` codebooks of ``codebook_size`` codes of ``group_size`` dims, shared by all heads and groups.

    Algorithm 1 of the residual VQ paper. The first ``partial_fit`` initialises stage by stage on the residuals of the
    stages before, by k-means (on at most 16 vectors a code) or ``random`` (small uniform codes, upstream's default
    without k-means); every later call is one moving-average step of all stages. ``finalize`` rounds the codebooks
    (num_quantizers, codebook_size, group_size) to fp16. ``beam`` > 1 keeps that many partial sequences of codes from
    stage to stage, in encoding: better codes for the same bytes.
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
    limits = {"num_quantizers": (1, MOST_QUANTIZERS), "codebook_size": (1, 65536), "group_size": (1, 32768),
              "beam": (1, 256), "kmeans_iterations": (0, 10_000), "decay": (0.0, 0.999999),
              "seed": (0, MAX_SEED)}  # fmt: skip
    choices = {"init": ("kmeans", "random")}

    def __post_init__(self):
        super().__post_init__()
        self.code_bits = max(1, (self.codebook_size - 1).bit_length())
        self.num_tables = self.num_quantizers  # a row's codes take turns between distributions, one per stage

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Rows are (..., group_size). Raises ``DataError`` otherwise."""
        if shape[-1] != self.group_size:
            raise DataError(f"rows of {shape[1:]} reach a quantizer of group_size {self.group_size}: add a Grouping")
        self.row_shape, self._groups = shape[1:], math.prod(shape[1:-1])
        self.codes_per_row = self._groups * self.num_quantizers
        return shape

    def partial_fit(self, x: Tensor) -> None:
        """x (..., group_size). Raises ``DataError`` at the first call for fewer distinct vectors than codes."""
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
        """(batch, heads, rows, ..., group_size) -> (batch, heads, rows, groups * num_quantizers)."""
        return rvq_encode(x, self.codebooks, self.beam).flatten(3), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return rvq_decode(codes.unflatten(-1, (*self.row_shape[:-1], self.num_quantizers)), self.codebooks)

    def rates(self, y: Tensor) -> Tensor:
        """A point for each number of quantizers, up to twice as many by extrapolation."""
        vectors = y.reshape(-1, self.group_size)
        residuals = self._residuals(vectors, rvq_encode(vectors, self.codebooks))
        energy, *errors = [x.double().square().mean().item() for x in residuals]
        shrinks = (errors[-1] / energy) ** (1 / len(errors)) if errors[-1] else 1.0
        errors += [errors[-1] * shrinks**more for more in range(1, min(len(errors), MOST_QUANTIZERS - len(errors)) + 1)]
        return torch.tensor([(k * self.code_bits / self.group_size, e) for k, e in enumerate(errors, 1)]).double()

    def with_bits(self, bits: float) -> "ResidualVQ":
        return dataclasses.replace(self, num_quantizers=max(1, round(bits * self.group_size / self.code_bits)))

    def store(self, y: Tensor) -> Payload:
        vectors = y.reshape(*y.shape[:3], -1, self.group_size)
        return Payload({"codes": rvq_encode_packed(vectors, self.codebooks, self.code_bits, self.beam)})

    def kernel_view(self, payload: Payload) -> KernelView:
        return Coded(payload.fields["codes"], self.codebooks.unsqueeze(0), self.code_bits, self._groups)

    def loss(self, x: Tensor) -> Tensor:
        """Relative squared error |x - x_hat|^2 / |x|^2 after each stage: x (..., group_size) -> (num_quantizers,)."""
        vectors = x.reshape(-1, self.group_size)
        residuals = self._residuals(vectors, rvq_encode(vectors, self.codebooks, self.beam))
        energy, *errors = [residual.double().square().sum() for residual in residuals]
        return torch.stack(errors) / energy

    def usage(self, x: Tensor) -> Tensor:
        """Count how often each code is chosen: x (..., group_size) -> int64 (num_quantizers, codebook_size)."""
        codes = rvq_encode(x.reshape(-1, self.group_size), self.codebooks, self.beam)
        return torch.stack([torch.bincount(stage, minlength=self.codebook_size) for stage in codes.T])

    def _residuals(self, x: Tensor, codes: Tensor) -> Iterator[Tensor]:
        """x, then the residual of each stage."""
        yield x
        for k, codebook in enumerate(self.codebooks.float()):
            x = x - codebook[codes[:, k]]
            yield x

    def _start(self, x: Tensor) -> None:
        sample, limit = x, SAMPLES_PER_CODE * self.codebook_size
        if len(x) > limit:
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.seed))
            sample = x[order[:limit].to(x.device)]
        residual = before = sample
        codebooks, counts = [], []
        for k in range(self.num_quantizers):
            learner = KMeans(self.codebook_size, self.kmeans_iterations, self.seed + k)
            generator = torch.Generator().manual_seed(self.seed + k)
            if self.init == "random":  # Kaiming-uniform, as vector-quantize-pytorch draws it
                bound = (6 / (self.codebook_size * self.group_size)) ** 0.5
                uniform = torch.rand(self.codebook_size, self.group_size, generator=generator, dtype=torch.float32)
                learner.codebook = ((uniform * 2 - 1) * bound).to(x.device)
            else:
                try:
                    learner.fit(residual)
                except DataError as error:
                    if k == 0 or len(sample.unique(dim=0)) < 2 * self.codebook_size:  # too little data, not too regular
                        raise DataError(f"stage {k + 1} of {self.num_quantizers}: {error}") from error
                    learner.codebook = self._spare_codes(residual, before, generator)
            codes = learner.assign(residual)
            counted = torch.bincount(codes, minlength=self.codebook_size).double() * (len(x) / len(residual))
            counts.append(counted if self.init == "kmeans" else torch.ones_like(counted))
            codebooks.append(learner.codebook)
            before, residual = residual, residual - learner.codebook[codes]
        self.codebooks = torch.stack(codebooks)
        self._ema = Ema(self.codebooks, torch.stack(counts), self.decay, self.revive, self.seed)

    def _spare_codes(self, residual: Tensor, before: Tensor, generator: torch.Generator) -> Tensor:
        """Codes for a stage that has fewer distinct vectors left than codes. A vector alone in its cluster leaves no
        residual, and a first layer's keys before RoPE repeat with every token of the vocabulary. Those vectors, and
        for vectors that calibration never saw some of what the stage before was given, at half its size."""
        left = residual.unique(dim=0)[: self.codebook_size]
        picks = torch.randint(len(before), (self.codebook_size - len(left),), generator=generator)
        return torch.cat([left, before[picks.to(before.device)] / 2])
