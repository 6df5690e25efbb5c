"""Tokens as they are stored: named tensors, one row for each token or block of tokens."""

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vqkv.kernels import unpack_codes


@dataclass(eq=False)
class Payload:
    """Tokens as they are stored, and nothing else. One row holds ``block_tokens`` tokens: 1, or a block.

    ``fields``: named tensors, each (batch, num_kv_heads, rows, ...). ``ragged``: tensors whose size depends on the
    data, each (pieces, ...), the pieces of all rows in the order (row, batch, head), so that concatenation along tokens
    is a plain ``cat``. Every tensor is contiguous and owns its storage: ``nbytes`` is what the payload really occupies.

    Two fields say how many pieces of ragged tensors a row owns. ``lengths``: so many. ``mask``: a bit for each of its
    ``units`` blocks, 1, the block owns a piece of every ragged tensor but ``exact``; 0, it owns a piece of ``exact``.
    """

    fields: dict[str, Tensor]
    block_tokens: int = 1
    ragged: dict[str, Tensor] = field(default_factory=dict)
    units: int = 0

    def __post_init__(self):
        self.fields = {name: _own(tensor) for name, tensor in self.fields.items()}
        self.ragged = {name: _own(tensor) for name, tensor in self.ragged.items()}

    def counts(self, name: str) -> Tensor:
        """Count pieces of ``ragged[name]`` that each row owns: int64 (batch, num_kv_heads, rows)."""
        if "lengths" in self.fields:
            return self.fields["lengths"].long()
        ones = self.mask().sum(dim=-1)
        return self.units - ones if name == "exact" else ones

    def mask(self) -> Tensor:
        """Unpack ``mask``: bool (batch, num_kv_heads, rows, units)."""
        return unpack_codes(self.fields["mask"], 1, self.units).bool()

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch, num_kv_heads, rows)."""
        batch, heads, rows, *_ = next(iter(self.fields.values())).shape
        return batch, heads, rows

    @property
    def device(self) -> torch.device:
        """Where it is stored."""
        return next(iter(self.fields.values())).device

    @property
    def seq_len(self) -> int:
        """Number of tokens."""
        return self.shape[2] * self.block_tokens

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors' storage occupies."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything stored, by name."""
        return self.fields | self.ragged

    def holding(self, tensors: dict[str, Tensor]) -> "Payload":
        """Return a payload of other tokens of the same codec: ``tensors`` have the same names."""
        fields, ragged = ({name: tensors[name] for name in group} for group in (self.fields, self.ragged))
        return dataclasses.replace(self, fields=fields, ragged=ragged)

    @staticmethod
    def concat(payloads: "list[Payload]") -> "Payload":
        """Join payloads of one codec along tokens."""
        first = payloads[0]
        fields = {name: torch.cat([p.fields[name] for p in payloads], dim=2) for name in first.fields}
        return first.holding(fields | {name: torch.cat([p.ragged[name] for p in payloads]) for name in first.ragged})

    def tokens(self, start: int = 0, stop: int | None = None) -> "Payload":
        """Copy tokens ``start:stop`` (Python slice rules), which are complete blocks."""
        start, stop, _ = slice(start, stop).indices(self.seq_len)
        first, last = start // self.block_tokens, max(start, stop) // self.block_tokens
        tensors = {name: tensor[:, :, first:last] for name, tensor in self.fields.items()}
        for name, tensor in self.ragged.items():  # pieces of neighbouring rows are neighbours
            counts = self.counts(name).sum((0, 1))
            tensors[name] = tensor[int(counts[:first].sum()) : int(counts[:last].sum())]
        return self.holding(tensors)

    def batch_select(self, index) -> "Payload":
        """Copy the sequences of the batch that ``index`` (1-D integers) names, in its order."""
        index = torch.as_tensor(index, device=self.device).long()
        tensors = {name: tensor[index] for name, tensor in self.fields.items()}
        for name, tensor in self.ragged.items():
            by_row = self.counts(name).permute(2, 0, 1)
            starts = (by_row.flatten().cumsum(0) - by_row.flatten()).view_as(by_row)
            starts, counts = (x[:, index].flatten() for x in (starts, by_row))
            shift = starts - (counts.cumsum(0) - counts)
            pieces = torch.arange(int(counts.sum()), device=index.device) + shift.repeat_interleave(counts)
            tensors[name] = tensor[pieces]
        return self.holding(tensors)


def _own(tensor: Tensor) -> Tensor:
    """Make contiguous, and without the rest of a larger tensor kept alive behind a view."""
    tensor = tensor.detach().contiguous()
    size = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == size else tensor.clone()
