"""Product quantization: a vector is cut into pieces, each with its own codebook."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.learning.kmeans import KMeans
from vqkv.codecs.payload import Payload
from vqkv.codecs.residual import ResidualVQ
from vqkv.codecs.stage import Quantizer, Side, learned
from vqkv.errors import DataError
from vqkv.kernels import Coded, KernelView, rvq_decode, rvq_encode
from vqkv.runtime.checks import MAX_SEED

CODES = 256
E5M2, MOST_E5M2 = torch.float8_e5m2, 1.75  # its largest mantissa


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
    codebooks: Tensor = learned()
    limits = {"num_subvectors": (1, 4096), "seed": (0, MAX_SEED - 4096)}

    def __post_init__(self):
        super().__post_init__()
        # which learn, and are not registered: the codebooks of all are saved as one tensor
        sizes = self.num_quantizers, self.codebook_size, self.sub_dim
        self._pieces = [ResidualVQ(*sizes, seed=self.seed + i) for i in range(self.num_subvectors)]
        self.code_bits = self._pieces[0].code_bits
        self.num_tables = self.num_subvectors * self.num_quantizers  # a row's codes take turns between distributions

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Raises ``DataError`` unless the last axis is num_subvectors * sub_dim."""
        width = self.num_subvectors * self.sub_dim
        if shape[-1] != width:
            raise DataError(f"rows of {shape[1:]} reach a product quantizer of {width} values: add a Grouping")
        shape = super().build(shape)
        self.codes_per_row = self.codes_per_row // self.sub_dim * self.num_quantizers
        return shape

    def partial_fit(self, x: Tensor) -> None:
        """Raises ``DataError`` at the first call for fewer distinct vectors than codes."""
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
        """(batch, heads, rows, ..., width) -> (batch, heads, rows, vectors * num_subvectors * num_quantizers)."""
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
    """Rows (groups, size): each group of each head -> one of its own 256 codes, learned by k-means on the first batch
    (NOVA-KV, arXiv 2608.04074). Side information: ``codebooks``, the bytes of E5M2, uint8 (num_kv_heads, groups, 256,
    size), over ``scale``, fp16 (num_kv_heads, groups)."""

    iterations: int = 25
    seed: int = 0
    codebooks: Tensor = learned()
    scale: Tensor = learned()
    by_head = True
    code_bits = 8
    limits = {"iterations": (0, 10_000), "seed": (0, MAX_SEED)}

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        self.block_values = shape[-1]
        return super().build(shape)

    def partial_fit(self, x: Tensor) -> None:
        """Raises ``DataError`` for fewer distinct vectors than codes."""
        if self.codebooks is None:
            groups = x.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)
            books = torch.stack([KMeans(CODES, self.iterations, self.seed).fit(rows) for rows in groups])
            books = books.unflatten(0, (x.shape[1], -1))
            self.scale = (books.abs().amax((2, 3)) / MOST_E5M2).half()
            self.codebooks = (books / self.scale.float()[..., None, None]).to(E5M2).view(torch.uint8)

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """(batch, heads, rows, groups, size) -> (batch, heads, rows, groups)."""
        books = self._books().flatten(0, 1).split(1)
        groups = x.transpose(2, 3).flatten(1, 2).unbind(1)
        codes = [rvq_encode(rows, book).squeeze(-1) for rows, book in zip(groups, books, strict=True)]
        return torch.stack(codes, dim=1).unflatten(1, (x.shape[1], -1)).transpose(2, 3), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        heads, groups = (torch.arange(n, device=codes.device) for n in self.scale.shape)
        return self._books()[heads[:, None, None], groups, codes.long()]

    def _books(self) -> Tensor:
        return self.codebooks.view(E5M2).float() * self.scale.float()[..., None, None]
