"""Product quantization: a vector is cut into pieces, each with a codebook of its own."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.payload import Payload
from vqkv.codecs.residual import ResidualVQ
from vqkv.codecs.stage import Quantizer, Side
from vqkv.errors import DataError
from vqkv.kernels import Coded, KernelView, rvq_decode, rvq_encode
from vqkv.runtime.checks import MAX_SEED


@dataclass(eq=False)
class ProductVQ(Quantizer):
    """Rows (..., num_subvectors * sub_dim): every piece of ``sub_dim`` values -> one of ``codebook_size`` codes of that
    piece's codebook (VQ quality framework, section 3.3; Jegou et al. 2011), or of each of its ``num_quantizers``,
    learned as in a ``ResidualVQ``. Side information: ``codebooks``, fp16 (num_subvectors * num_quantizers,
    codebook_size, sub_dim)."""

    num_subvectors: int = 2
    codebook_size: int = 256
    sub_dim: int = 4
    seed: int = 0
    num_quantizers: int = 1
    limits = {"num_subvectors": (1, 4096), "seed": (0, MAX_SEED - 4096)}

    def __post_init__(self):
        super().__post_init__()
        # which learn, and are not registered: the codebooks of all are saved as one tensor
        sizes = self.num_quantizers, self.codebook_size, self.sub_dim
        self._pieces = [ResidualVQ(*sizes, seed=self.seed + i) for i in range(self.num_subvectors)]
        self.code_bits = self._pieces[0].code_bits
        self.num_tables = self.num_subvectors * self.num_quantizers  # a row's codes take turns between distributions
        self.register_buffer("codebooks", None)

    def build(self, shape: tuple[int, ...]) -> None:
        """Raises ``DataError`` unless the last axis is num_subvectors * sub_dim."""
        width = self.num_subvectors * self.sub_dim
        if shape[-1] != width:
            raise DataError(f"rows of {shape[1:]} reach a product quantizer of {width} values: add a Grouping")
        self.row_shape = shape[1:]
        self.codes_per_row = math.prod(self.row_shape) // self.sub_dim * self.num_quantizers

    def partial_fit(self, x: Tensor) -> None:
        """Raises ``DataError`` at the first call for fewer distinct vectors than codes."""
        for piece, values in zip(self._pieces, self._split(x), strict=True):
            piece.partial_fit(values)
        self._join()

    def finalize(self) -> None:
        """Round to fp16."""
        for piece in self._pieces:
            piece.finalize()
        self._join()
        self._pieces = []

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """(batch, heads, rows, ..., width) -> (batch, heads, rows, vectors * num_subvectors * num_quantizers)."""
        pieces = zip(self._split(x), self.codebooks.split(self.num_quantizers), strict=True)
        return torch.cat([rvq_encode(values, codebook) for values, codebook in pieces], dim=-1).flatten(3), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        by_piece = codes.unflatten(-1, (-1, self.num_subvectors, self.num_quantizers)).unbind(-2)
        pieces = zip(by_piece, self.codebooks.split(self.num_quantizers), strict=True)
        values = [rvq_decode(piece, codebook) for piece, codebook in pieces]
        return torch.cat(values, dim=-1).flatten(-2).unflatten(-1, self.row_shape)

    def kernel_view(self, payload: Payload) -> KernelView:
        tables = self.codebooks.unflatten(0, (self.num_subvectors, self.num_quantizers))
        return Coded(payload.fields["codes"], tables, self.code_bits, self.codes_per_row // self.num_quantizers)

    def _join(self) -> None:
        self.codebooks = torch.cat([piece.codebooks for piece in self._pieces])

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split(self.sub_dim, dim=-1)
