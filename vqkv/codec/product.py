"""Product quantization: a vector is cut into pieces, each with a codebook of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codec.checks import MAX_SEED, check_whole
from vqkv.codec.learning import collected, hand_out
from vqkv.codec.packing import check_packed
from vqkv.codec.part import take
from vqkv.codec.payload import Payload, payload_field
from vqkv.codec.residual import ResidualVQ
from vqkv.codec.stage import Quantizer
from vqkv.errors import DataError
from vqkv.kernels import Coded, Packed


@dataclass(eq=False)
class ProductVQ(Quantizer):
    """Rows (..., num_subvectors * sub_dim): every piece of ``sub_dim`` values -> one of ``codebook_size`` codes of that
    piece's codebook (VQ quality framework, section 3.3; Jegou et al. 2011). Learned like ``ResidualVQ``'s stages.

    Side information: ``codebooks``, fp16 (num_subvectors, codebook_size, sub_dim).
    """

    num_subvectors: int = 2
    codebook_size: int = 256
    sub_dim: int = 4
    seed: int = 0

    def __post_init__(self):
        check_whole("num_subvectors", self.num_subvectors, 1, 4096)
        check_whole("seed", self.seed, 0, MAX_SEED - self.num_subvectors)
        self._pieces = [
            ResidualVQ(1, self.codebook_size, self.sub_dim, seed=self.seed + i) for i in range(self.num_subvectors)
        ]
        self.code_bits = self._pieces[0].code_bits
        self.num_tables = self.num_subvectors  # codes of a row take turns between the pieces' distributions

    def build(self, shape: tuple[int, ...]) -> None:
        """Raises ``DataError`` unless the last axis is num_subvectors * sub_dim."""
        width = self.num_subvectors * self.sub_dim
        if shape[-1] != width:
            raise DataError(f"rows of {shape[1:]} reach a product quantizer of {width} values: add a Grouping")
        for piece in self._pieces:
            piece.build((*shape[:-1], self.sub_dim))
        self.codes_per_row = self._pieces[0].codes_per_row * self.num_subvectors

    def partial_fit(self, x: Tensor) -> None:
        """Raises ``DataError`` at the first call for fewer distinct vectors than codes."""
        for piece, values in zip(self._pieces, self._split(x), strict=True):
            piece.partial_fit(values)

    def finalize(self) -> None:
        """Round to fp16."""
        for piece in self._pieces:
            piece.finalize()

    def encode(self, x: Tensor) -> Tensor:
        """(batch, heads, rows, ..., width) -> (batch, heads, rows, vectors * num_subvectors)."""
        codes = [piece.encode(values) for piece, values in zip(self._pieces, self._split(x), strict=True)]
        return torch.stack(codes, dim=-1).flatten(3)

    def decode(self, codes: Tensor) -> Tensor:
        """The inverse. Raises ``FormatError`` for a code that no codebook has."""
        pieces = codes.unflatten(-1, (-1, self.num_subvectors)).unbind(-1)
        return torch.cat([piece.decode(c) for piece, c in zip(self._pieces, pieces, strict=True)], dim=-1)

    def packed(self, payload: Payload) -> Packed:
        """See ``Quantizer``."""
        codes = payload_field(payload, "codes", payload.tokens_per_row)
        check_packed(codes, self.code_bits, self.codes_per_row)
        codebooks = torch.stack([piece.codebooks for piece in self._pieces])
        return Coded(codes, codebooks, self.code_bits, self.codes_per_row)

    def state(self) -> dict[str, Tensor]:
        """The codebooks."""
        found = [piece.codebooks for piece in self._pieces]
        return {} if found[0] is None else {"codebooks": torch.cat(found)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Raises ``FormatError`` for codebooks of another shape or type."""
        state = dict(state)
        shape = (self.num_subvectors, self.codebook_size, self.sub_dim)
        for piece, codebook in zip(self._pieces, take(state, "codebooks", shape, torch.float16), strict=True):
            piece.load_state({"codebooks": codebook.unsqueeze(0)})
        super().load_state(state)

    def learning_state(self) -> dict[str, Tensor]:
        """Of each piece, by its number."""
        return collected((str(i), piece) for i, piece in enumerate(self._pieces))

    def load_learning_state(self, state: dict[str, Tensor]) -> None:
        """Hand every piece its own."""
        hand_out(state, ((str(i), piece) for i, piece in enumerate(self._pieces)))

    def _split(self, x: Tensor) -> list[Tensor]:
        return x.split(self.sub_dim, dim=-1)
