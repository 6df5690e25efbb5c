"""Residual vector quantization: every stage quantises what the stage before left over. One stage is plain VQ."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codec.checks import MAX_SEED, check_whole
from vqkv.codec.packing import check_packed
from vqkv.codec.part import take
from vqkv.codec.payload import Payload, payload_field
from vqkv.codec.stage import Quantizer
from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.kernels import (
    Coded,
    Packed,
    decode,
    rvq_candidates,
    rvq_decode,
    rvq_encode,
    rvq_encode_packed,
    rvq_statistics,
)
from vqkv.learn import Ema, KMeans, Statistics, check_decay
from vqkv.processes import current

INITS = ("kmeans", "random")
MOST_QUANTIZERS = 64


@dataclass(eq=False)
class ResidualVQ(Quantizer):
    """``num_quantizers`` codebooks of ``codebook_size`` codes of ``group_size`` dims, shared by all heads and groups.

    Algorithm 1 of the residual VQ paper. The first ``partial_fit`` initialises stage by stage on the residuals of the
    stages before, by k-means (on at most ``samples_per_code * codebook_size`` vectors) or ``random`` (small uniform
    codes, upstream's default without k-means); every later call is one moving-average step of all stages.
    ``finalize`` rounds the codebooks (num_quantizers, codebook_size, group_size) to fp16.

    ``beam`` > 1 keeps that many partial sequences of codes from stage to stage: better codes for the same bytes, at the
    encoder's expense. Codebooks are learned greedily all the same, unless ``learning_beam`` > 1: then k-means sees what
    all kept sequences leave over (as faiss trains), and a moving-average step moves each code towards what all other
    stages leave to it. That gains less than the search itself, takes several times as long, and on data with many
    repeated vectors (a first layer's keys before RoPE) can lose.
    """

    num_quantizers: int = 8
    codebook_size: int = 2048
    group_size: int = 32
    kmeans_iterations: int = 10
    init: str = "kmeans"
    decay: float = 0.99
    revive: bool = False
    seed: int = 0
    samples_per_code: int = 16
    beam: int = 1
    learning_beam: int = 1

    def __post_init__(self):
        if self.init not in INITS:
            raise UnknownNameError("init", self.init, INITS)
        limits = {"num_quantizers": MOST_QUANTIZERS, "codebook_size": 65536, "group_size": 32768}
        for name, most in (limits | {"beam": 256, "learning_beam": 256, "samples_per_code": 1 << 20}).items():
            check_whole(name, getattr(self, name), 1, most)
        check_whole("kmeans_iterations", self.kmeans_iterations, 0, 10_000)
        check_whole("seed", self.seed, 0, MAX_SEED)
        check_decay(self.decay)
        self.codebooks: Tensor | None = None

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
        row_shape = shape[1:]
        if row_shape[-1] != self.group_size:
            raise DataError(f"rows of {row_shape} reach a quantizer of group_size {self.group_size}: add a Grouping")
        self._groups = torch.Size(row_shape[:-1])
        self.codes_per_row = self._groups.numel() * self.num_quantizers

    def partial_fit(self, x: Tensor) -> None:
        """x (..., group_size). Raises ``DataError`` at the first call for fewer distinct vectors than codes."""
        vectors = x.reshape(-1, self.group_size)
        if self.codebooks is None:
            self._start(vectors)
        else:
            statistics, samples = self.statistics(vectors)
            self.learn(Statistics.totals(statistics), samples)

    def statistics(self, x: Tensor) -> tuple[list[Statistics], list[Tensor]]:
        """Per stage, statistics of x (rows, group_size), which add up over processes, and a sample of residuals of all
        processes' vectors."""
        codes = rvq_encode(x, self.codebooks, self.learning_beam)
        if self.learning_beam == 1:
            counted = zip(*rvq_statistics(x, codes, self.codebooks), strict=True)
            return [Statistics(*stage) for stage in counted], [*self._residuals(*self._sample(x, codes))]
        targets = [*self._targets(x, codes)]
        counted = [Statistics.of(target, codes[:, k], self.codebook_size) for k, target in enumerate(targets)]
        return counted, self._sample(*targets)

    def learn(self, statistics: list[Statistics], samples: list[Tensor]) -> None:
        """One moving-average step of every stage."""
        stages = zip(self._emas, statistics, samples, strict=True)
        self.codebooks = torch.stack([ema.update(counted, sample) for ema, counted, sample in stages])

    def finalize(self) -> None:
        """Round to fp16. Raises ``DataError`` if a code overflows it."""
        self.codebooks = self.codebooks.half()
        self._emas = []
        if not torch.isfinite(self.codebooks).all():
            raise DataError("a code overflows fp16: put a scale before the quantizer")

    def encode(self, x: Tensor) -> Tensor:
        """(batch, heads, rows, ..., group_size) -> (batch, heads, rows, groups * num_quantizers)."""
        return self._codes(x).flatten(3)

    def decode(self, codes: Tensor) -> Tensor:
        """The inverse. Raises ``FormatError`` for a code that no codebook has."""
        if codes.numel() and (largest := int(codes.max())) >= self.codebook_size:
            raise FormatError(f"code {largest} is not below codebook_size {self.codebook_size}: altered payload")
        return rvq_decode(codes.unflatten(-1, (*self._groups, self.num_quantizers)), self.codebooks)

    def rates(self, y: Tensor) -> Tensor:
        """See ``Quantizer``: a point for each number of quantizers, up to twice as many (if so many there can be) by
        extrapolation."""
        vectors = y.reshape(-1, self.group_size)
        left = [*self._residuals(vectors, rvq_encode(vectors, self.codebooks), last=True)]
        errors = [x.double().square().mean().item() for x in left[1:]]
        shrinks = (errors[-1] / left[0].double().square().mean().item()) ** (1 / len(errors)) if errors[-1] else 1.0
        errors += [errors[-1] * shrinks**more for more in range(1, min(len(errors), MOST_QUANTIZERS - len(errors)) + 1)]
        return torch.tensor([(k * self.code_bits / self.group_size, e) for k, e in enumerate(errors, 1)]).double()

    def with_bits(self, bits: float) -> "ResidualVQ":
        """See ``Quantizer``."""
        return dataclasses.replace(self, num_quantizers=max(1, round(bits * self.group_size / self.code_bits)))

    def encode_packed(self, y: Tensor) -> Tensor:
        """See ``Quantizer``."""
        vectors = y.reshape(*y.shape[:3], -1, self.group_size)
        return rvq_encode_packed(vectors, self.codebooks, self.code_bits, self.beam)

    def load(self, payload: Payload) -> Tensor:
        """See ``Quantizer``; straight from the bit strings, unless they might hold a code that no codebook has."""
        packed = self.packed(payload)
        if not packed.complete:
            return super().load(payload)
        return decode(packed).unflatten(-1, (*self._groups, self.group_size))

    def packed(self, payload: Payload) -> Packed:
        """See ``Quantizer``."""
        codes = payload_field(payload, "codes", payload.tokens_per_row)
        check_packed(codes, self.code_bits, self.codes_per_row)
        return Coded(codes, self.codebooks.unsqueeze(0), self.code_bits, self._groups.numel())

    def loss(self, x: Tensor) -> Tensor:
        """Relative squared error |x - x_hat|^2 / |x|^2 after each stage: x (..., group_size) -> (num_quantizers,)."""
        vectors = x.reshape(-1, self.group_size)
        residuals = [*self._residuals(vectors, self._codes(vectors), last=True)][1:]
        energies = [residual.double().square().sum() for residual in residuals]
        return torch.stack(energies) / vectors.double().square().sum()

    def usage(self, x: Tensor) -> Tensor:
        """How often each code is chosen: x (..., group_size) -> int64 (num_quantizers, codebook_size)."""
        codes = self._codes(x.reshape(-1, self.group_size))
        return torch.stack([torch.bincount(stage, minlength=self.codebook_size) for stage in codes.T])

    def state(self) -> dict[str, Tensor]:
        """The codebooks; fp16 once finalised."""
        return {} if self.codebooks is None else {"codebooks": self.codebooks}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Raises ``FormatError`` for codebooks of another shape or type."""
        state = dict(state)
        shape = (self.num_quantizers, self.codebook_size, self.group_size)
        self.codebooks = take(state, "codebooks", shape, torch.float16)
        super().load_state(state)

    def learning_state(self) -> dict[str, Tensor]:
        """The codebooks as they are, fp32, and the moving averages of all stages."""
        if self.codebooks is None:
            return {}
        averages = [ema.learning_state() for ema in self._emas]
        return {"codebooks": self.codebooks} | {name: torch.stack([a[name] for a in averages]) for name in averages[0]}

    def load_learning_state(self, state: dict[str, Tensor]) -> None:
        """Raises ``FormatError`` for tensors of another shape or type."""
        if not state:
            return
        state, shape = dict(state), (self.num_quantizers, self.codebook_size, self.group_size)
        self.codebooks = take(state, "codebooks", shape, torch.float32)
        averages = {"counts": take(state, "counts", shape[:2], torch.float64)}
        averages["sums"] = take(state, "sums", shape, torch.float64)
        if self.revive:
            size = torch.Generator().get_state().numel()
            averages["generator"] = take(state, "generator", (self.num_quantizers, size), torch.uint8)
        self._emas = [Ema(self.decay, revive=self.revive, seed=self.seed + k) for k in range(self.num_quantizers)]
        for k, ema in enumerate(self._emas):
            ema.resume(self.codebooks[k], {name: tensor[k] for name, tensor in averages.items()})
        super().load_learning_state(state)

    def _codes(self, x: Tensor) -> Tensor:
        return rvq_encode(x, self.codebooks, self.beam)

    def _sample(self, *tensors: Tensor) -> list[Tensor]:
        """The same rows of each tensor (rows, ...), evenly spread over all processes' rows; none if none is needed."""
        if current().count > 1 and not self.revive:
            return [x[:0] for x in tensors]
        length = current().length(tensors[0])
        rows = torch.linspace(0, length - 1, min(length, self.codebook_size), dtype=torch.float32).long()
        return [current().rows(x, rows) for x in tensors]

    def _targets(self, x: Tensor, codes: Tensor):
        """What each stage's codes are to move towards where a beam has weighed stages against each other: what the
        others leave over. As all move at once, together no farther than x."""
        error = (x - rvq_decode(codes, self.codebooks)) / max(1.0, self.num_quantizers * (1 - self.decay))
        for k, codebook in enumerate(self.codebooks.float()):
            yield codebook[codes[:, k]] + error

    def _residuals(self, x: Tensor, codes: Tensor, last: bool = False):
        """What each stage sees: x, then what the stages before left; with ``last`` also what remains at the end."""
        for k, codebook in enumerate(self.codebooks.float()):
            yield x
            x = x - codebook[codes[:, k]]
        if last:
            yield x

    def _start(self, x: Tensor) -> None:
        sample = residual = before = self._subsample(x)  # the same in every process
        length = current().length(x)
        codebooks, self._emas = [], []
        for k in range(self.num_quantizers):
            learner = KMeans(self.codebook_size, self.kmeans_iterations, self.seed + k)
            if self.init == "random":
                learner.codebook = self._random_codebook(k).to(x.device)
            else:
                self._fit_stage(learner, k, sample, before, residual)
            codes = learner.assign(residual)
            counts = Statistics.of(residual, codes, self.codebook_size).counts * (length / len(residual))
            self._emas.append(Ema(self.decay, revive=self.revive, seed=self.seed + k))
            self._emas[k].start(learner.codebook, counts if self.init == "kmeans" else torch.ones_like(counts))
            codebooks.append(learner.codebook)
            before = residual
            greedy = residual - learner.codebook[codes]
            residual = greedy if self.learning_beam == 1 else self._left_over(sample, codebooks)
        self.codebooks = torch.stack(codebooks)

    def _left_over(self, x: Tensor, codebooks: list[Tensor]) -> Tensor:
        """x (rows, group_size) less each of the sequences that the beam ends with: (rows * sequences, group_size)."""
        stages = torch.stack(codebooks)
        return (x.unsqueeze(1) - rvq_decode(rvq_candidates(x, stages, self.learning_beam), stages)).flatten(0, 1)

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
        limit, length = self.samples_per_code * self.codebook_size, current().length(x)
        if length <= limit:
            return current().rows(x)
        generator = torch.Generator().manual_seed(self.seed)
        return current().rows(x, torch.randperm(length, generator=generator)[:limit].to(x.device))

    def _random_codebook(self, stage: int) -> Tensor:
        """Kaiming-uniform over (codebook_size, group_size), as vector-quantize-pytorch draws it."""
        bound = (6 / (self.codebook_size * self.group_size)) ** 0.5
        generator = torch.Generator().manual_seed(self.seed + stage)
        shape = (self.codebook_size, self.group_size)
        return (torch.rand(shape, generator=generator, dtype=torch.float32) * 2 - 1) * bound
