"""Residual vector quantization: every stage quantises what the stage before left over. One stage is plain VQ."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.learning.kmeans import Ema, KMeans
from vqkv.codecs.payload import Payload
from vqkv.codecs.stage import Quantizer, Side
from vqkv.errors import DataError
from vqkv.kernels import Coded, KernelView, rvq_decode, rvq_encode, rvq_encode_packed, rvq_statistics
from vqkv.runtime.checks import MAX_SEED

INITS = ("kmeans", "random")
DECAYS = (0.0, 0.999999)
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
    limits = {"num_quantizers": (1, MOST_QUANTIZERS), "codebook_size": (1, 65536), "group_size": (1, 32768),
              "beam": (1, 256), "kmeans_iterations": (0, 10_000), "decay": DECAYS, "seed": (0, MAX_SEED)}  # fmt: skip
    choices = {"init": INITS}

    def __post_init__(self):
        super().__post_init__()
        self.register_buffer("codebooks", None)

    @property
    def code_bits(self) -> int:
        """Bits of a code: ceil(log2 codebook_size), at least 1."""
        return max(1, (self.codebook_size - 1).bit_length())

    @property
    def num_tables(self) -> int:
        """Codes of a row take turns between this many distributions (for entropy coding): one per stage."""
        return self.num_quantizers

    def build(self, shape: tuple[int, ...]) -> None:
        """Rows are (..., group_size). Raises ``DataError`` otherwise."""
        self.row_shape = shape[1:]
        if self.row_shape[-1] != self.group_size:
            raise DataError(f"rows of {shape[1:]} reach a quantizer of group_size {self.group_size}: add a Grouping")
        self._groups = torch.Size(self.row_shape[:-1])
        self.codes_per_row = self._groups.numel() * self.num_quantizers

    def partial_fit(self, x: Tensor) -> None:
        """x (..., group_size). Raises ``DataError`` at the first call for fewer distinct vectors than codes."""
        vectors = x.reshape(-1, self.group_size)
        if self.codebooks is None:
            self._start(vectors)
            return
        codes, count = rvq_encode(vectors, self.codebooks), len(vectors)
        rows = torch.linspace(0, count - 1, min(count, self.codebook_size), dtype=torch.float32).long()
        samples = self._residuals(vectors[rows], codes[rows]) if self.revive else ()
        self.codebooks = self._ema.update(*rvq_statistics(vectors, codes, self.codebooks), samples)

    def finalize(self) -> None:
        """Round to fp16. Raises ``DataError`` if a code overflows it."""
        self.codebooks = self.codebooks.half()
        self._ema = None
        if not torch.isfinite(self.codebooks).all():
            raise DataError("a code overflows fp16: put a scale before the quantizer")

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """(batch, heads, rows, ..., group_size) -> (batch, heads, rows, groups * num_quantizers)."""
        return self._codes(x).flatten(3), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return rvq_decode(codes.unflatten(-1, (*self._groups, self.num_quantizers)), self.codebooks)

    def rates(self, y: Tensor) -> Tensor:
        """A point for each number of quantizers, up to twice as many by extrapolation."""
        vectors = y.reshape(-1, self.group_size)
        left = [*self._residuals(vectors, rvq_encode(vectors, self.codebooks), last=True)]
        errors = [x.double().square().mean().item() for x in left[1:]]
        shrinks = (errors[-1] / left[0].double().square().mean().item()) ** (1 / len(errors)) if errors[-1] else 1.0
        errors += [errors[-1] * shrinks**more for more in range(1, min(len(errors), MOST_QUANTIZERS - len(errors)) + 1)]
        return torch.tensor([(k * self.code_bits / self.group_size, e) for k, e in enumerate(errors, 1)]).double()

    def with_bits(self, bits: float) -> "ResidualVQ":
        return dataclasses.replace(self, num_quantizers=max(1, round(bits * self.group_size / self.code_bits)))

    def store(self, y: Tensor) -> Payload:
        vectors = y.reshape(*y.shape[:3], -1, self.group_size)
        return Payload({"codes": rvq_encode_packed(vectors, self.codebooks, self.code_bits, self.beam)})

    def kernel_view(self, payload: Payload) -> KernelView:
        return Coded(payload.fields["codes"], self.codebooks.unsqueeze(0), self.code_bits, self._groups.numel())

    def loss(self, x: Tensor) -> Tensor:
        """Relative squared error |x - x_hat|^2 / |x|^2 after each stage: x (..., group_size) -> (num_quantizers,)."""
        vectors = x.reshape(-1, self.group_size)
        residuals = [*self._residuals(vectors, self._codes(vectors), last=True)][1:]
        energies = [residual.double().square().sum() for residual in residuals]
        return torch.stack(energies) / vectors.double().square().sum()

    def usage(self, x: Tensor) -> Tensor:
        """Count how often each code is chosen: x (..., group_size) -> int64 (num_quantizers, codebook_size)."""
        codes = self._codes(x.reshape(-1, self.group_size))
        return torch.stack([torch.bincount(stage, minlength=self.codebook_size) for stage in codes.T])

    def _codes(self, x: Tensor) -> Tensor:
        return rvq_encode(x, self.codebooks, self.beam)

    def _residuals(self, x: Tensor, codes: Tensor, last: bool = False):
        """Inputs of each stage: x, then what the stages before left; with ``last`` also what remains at the end."""
        for k, codebook in enumerate(self.codebooks.float()):
            yield x
            x = x - codebook[codes[:, k]]
        if last:
            yield x

    def _start(self, x: Tensor) -> None:
        sample = residual = before = self._subsample(x)
        codebooks, counts = [], []
        for k in range(self.num_quantizers):
            learner = KMeans(self.codebook_size, self.kmeans_iterations, self.seed + k)
            if self.init == "random":
                learner.codebook = self._random_codebook(k).to(x.device)
            else:
                self._fit_stage(learner, k, sample, before, residual)
            codes = learner.assign(residual)
            counted = torch.bincount(codes, minlength=self.codebook_size).double() * (len(x) / len(residual))
            counts.append(counted if self.init == "kmeans" else torch.ones_like(counted))
            codebooks.append(learner.codebook)
            before, residual = residual, residual - learner.codebook[codes]
        self.codebooks = torch.stack(codebooks)
        self._ema = Ema(self.codebooks, torch.stack(counts), self.decay, self.revive, self.seed)

    def _fit_stage(self, learner: KMeans, stage: int, sample: Tensor, before: Tensor, residual: Tensor) -> None:
        try:
            learner.fit(residual)
        except DataError as error:
            if stage == 0 or len(sample.unique(dim=0)) < 2 * self.codebook_size:  # too little data, not too regular
                raise DataError(f"stage {stage + 1} of {self.num_quantizers}: {error}") from error
            learner.codebook = self._spare_codes(residual, before, stage)

    def _spare_codes(self, residual: Tensor, before: Tensor, stage: int) -> Tensor:
        """Codes for a stage that has fewer distinct vectors left than codes. A vector alone in its cluster leaves
        nothing over, and a first layer's keys before RoPE repeat with every token of the vocabulary. Those vectors, and
        for vectors unseen so far some of what the stage before was given, at half its size."""
        left = residual.unique(dim=0)[: self.codebook_size]
        generator = torch.Generator().manual_seed(self.seed + stage)
        picks = torch.randint(len(before), (self.codebook_size - len(left),), generator=generator)
        return torch.cat([left, before[picks.to(before.device)] / 2])

    def _subsample(self, x: Tensor) -> Tensor:
        limit = SAMPLES_PER_CODE * self.codebook_size
        if len(x) <= limit:
            return x
        generator = torch.Generator().manual_seed(self.seed)
        return x[torch.randperm(len(x), generator=generator)[:limit].to(x.device)]

    def _random_codebook(self, stage: int) -> Tensor:
        """Kaiming-uniform over (codebook_size, group_size), as vector-quantize-pytorch draws it."""
        bound = (6 / (self.codebook_size * self.group_size)) ** 0.5
        generator = torch.Generator().manual_seed(self.seed + stage)
        shape = (self.codebook_size, self.group_size)
        return (torch.rand(shape, generator=generator, dtype=torch.float32) * 2 - 1) * bound
