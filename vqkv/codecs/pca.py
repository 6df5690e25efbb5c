"""The basis in which a transform coder quantizes: uncorrelated channels, the error of each worth the same."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.stage import Side, Stage, learned
from vqkv.errors import DataError
from vqkv.kernels import Grouped, KernelView
from vqkv.kernels.precision import by_rows

ROWS = 4096  # tokens whose products are summed in fp32
MANY = 1024  # channels, from which on components in fp64 take twice as long and gain nothing
MIN_WEIGHT = 1e-3  # of the mean: what no query has ever looked at may still be read by the next one


@dataclass(eq=False)
class PCA(Stage):
    """Rotate the last axis to the principal components of all batches (Karhunen-Loeve transform).

    Of all orthonormal transforms this saves a uniform quantizer with entropy-coded codes most bits (Goyal 2001,
    "Theoretical foundations of transform coding"; for KV caches e.g. KVTC, Staniszewski & Lancucki 2025). ``weighted``:
    channels are scaled first so that errors of equal size cost equally, by ``weigh``, to the model's ``loss`` or in
    ``attention`` (``costs``). ``rank``: how many components are kept, the strongest; 0: all. One matrix per head, or
    one for all after ``MergeHeads``; fp16, side information.
    """

    weighted: bool = False
    rank: int = 0
    costs: str = "loss"
    matrix: Tensor = learned()
    unweighted: Tensor = learned()  # the inverse of what errors cost, where some components are left out
    inverse: Tensor | None = learned(saved=False)  # of the matrix as stored, when it is first needed
    by_head = True
    learns_first = True
    choices = {"costs": ("loss", "attention")}

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        self._matrices, self._channels = shape[0], shape[-1]
        self._count, self._moment = 0, torch.zeros((), dtype=torch.float64)  # of its size with the first batch
        rank = min(self.rank or shape[-1], shape[-1])
        self.share = rank / shape[-1]
        return *shape[:-1], rank

    def partial_fit(self, x: Tensor) -> None:
        """Sum up second moments."""
        rows = x.transpose(0, 1).flatten(1, -2).float()
        self._count += rows.shape[1]
        for some in rows.split(ROWS, dim=1):
            self._moment = (some.mT @ some).double() + self._moment.to(x.device)

    def settle(self) -> None:
        """Find the components. Raises ``DataError`` for fewer tokens than channels, and for unknown costs."""
        channels = self._channels
        if self._count < channels:
            raise DataError(
                f"principal components of {channels} channels from {self._count} tokens: calibrate on at least as "
                "many, better 16 times as many (more or longer sequences), or use a preset that leaves heads apart"
            )
        moment = self._moment / self._count
        if self.weighted:
            scales = self._scales(moment.device)
            scale = self._of_rows(scales)
            moment = scale @ moment @ scale
        basis = torch.linalg.eigh(moment.float() if channels > MANY else moment)[1].flip(-1)
        matrix = scale @ basis.double() if self.weighted else basis
        self.matrix = matrix[..., : self.rank or channels].half().contiguous()  # as it is loaded: layouts round apart
        if self.weighted and channels > self.matrix.shape[-1]:
            self.unweighted = torch.linalg.matrix_power(scales, -2).half()
        self._moment = self._moment.new_zeros(())

    def keep(self, count: int) -> None:
        """Keep the strongest components, unless they are weighted: each of these tells of the others."""
        if not self.weighted:
            self.matrix, self.inverse = self.matrix[..., :count].contiguous(), None

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        return self._times(x, self.matrix.float()), {}

    def decode(self, y: Tensor, side: Side, channels: slice = slice(None)) -> Tensor:
        """Multiply y by the inverse of the matrix as stored, or by some channels of it."""
        inverse = self._inverse()
        return self._times(y[..., : inverse.shape[-2]], inverse[..., channels])

    def kernel_view_before(self, inner: KernelView, side: Side) -> KernelView | None:
        if not isinstance(inner, Grouped) or inner.matrix is not None:
            return None
        return dataclasses.replace(inner, matrix=self._inverse()[:, : inner.shape[3]])

    def _inverse(self) -> Tensor:
        """Invert the matrix; where components are left out, to the values that cost least of all that they may be."""
        if self.inverse is None:
            single = not self.weighted and self.matrix.shape[-1] > MANY  # orthonormal: fp32 is enough
            matrix = self.matrix.float() if single else self.matrix.double()
            back = matrix.mT if self.unweighted is None else matrix.mT @ self._of_rows(self.unweighted.double())
            self.inverse = torch.linalg.solve(back @ matrix, back).float()
        return self.inverse

    def _scales(self, device: torch.device) -> Tensor:
        """Return roots of the heads' metrics, float64, of mean eigenvalue about 1; the identity without costs."""
        if self.metric is None:
            raise DataError("PCA(weighted=True) was not told what errors cost: fit it with vqkv.calibrate")
        values, vectors = torch.linalg.eigh(self.metric.to(device).double())
        values = values / values.mean() if values.mean() > 0 else torch.ones_like(values)
        return vectors @ values.clamp_min(MIN_WEIGHT).sqrt().diag_embed() @ vectors.mT

    def _of_rows(self, blocks: Tensor) -> Tensor:
        """Turn matrices of heads (num_kv_heads, head_dim, head_dim) into those of rows: one, if heads are merged."""
        return blocks if len(blocks) == self._matrices else torch.block_diag(*blocks)[None]

    def _times(self, x: Tensor, matrix: Tensor) -> Tensor:
        return by_rows(lambda rows: rows @ matrix, x.flatten(2, -2)).reshape(*x.shape[:-1], matrix.shape[-1])


@dataclass(eq=False)
class CostBasis(Stage):
    """Rotate each head's last axis to the eigenvectors of its metric (OSCAR, arXiv 2605.17757). Side information:
    ``matrix``, fp16 (num_kv_heads, head_dim, head_dim)."""

    matrix: Tensor = learned()
    by_head = True
    weighted = True
    costs = "attention"

    def weigh(self, metric: Tensor) -> None:
        self.matrix = torch.linalg.eigh(metric.double())[1].half()

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        if self.matrix is None:
            raise DataError("CostBasis was not told what errors cost: fit it with vqkv.calibrate")
        return by_rows(lambda rows: rows @ self.matrix.float(), x), {}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        return by_rows(lambda rows: rows @ self.matrix.float().mT, y)
