"""Payloads with fields whose size depends on the data: each row owns a run of pieces in a flat tensor."""

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vqkv.codecs.packing import unpack
from vqkv.codecs.payload import Payload, _numbers, _own
from vqkv.errors import FormatError


@dataclass(eq=False)
class RaggedPayload(Payload):
    """``ragged[name]`` is (pieces, ...): the pieces of all rows in the order (row, batch, head).

    That order makes concatenation along tokens a plain ``cat``. How many pieces each row owns follows from ``fields``,
    by ``counts``, and so is counted in ``nbytes`` like everything else.
    """

    ragged: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        self.ragged = {name: _own(tensor) for name, tensor in self.ragged.items()}
        for name, tensor in self.ragged.items():
            counts = self.counts(name)
            if counts.numel() and (int(counts.min()) < 0 or int(counts.sum()) != len(tensor)):
                raise FormatError(f"rows own {int(counts.sum())} pieces of {name!r}, but there are {len(tensor)}")

    def counts(self, name: str) -> Tensor:
        """Pieces of ``ragged[name]`` that each row owns: int64 (batch, num_kv_heads, rows)."""
        raise NotImplementedError

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything stored, by name."""
        return self.fields | self.ragged

    def tokens(self, start: int = 0, stop: int | None = None) -> "RaggedPayload":
        rows, ragged = self._rows(start, stop), {}
        for name, tensor in self.ragged.items():
            ends = [0, *self.counts(name).sum(dim=(0, 1)).cumsum(0).tolist()]
            ragged[name] = tensor[ends[rows.start] : ends[rows.stop]]
        fields = {name: tensor[:, :, rows] for name, tensor in self.fields.items()}
        return dataclasses.replace(self, fields=fields, ragged=ragged)

    def batch_select(self, index) -> "RaggedPayload":
        index = _numbers(index, self.shape[0]).to(next(iter(self.fields.values())).device)
        index = index.where(index >= 0, index + self.shape[0])
        fields = {name: tensor.index_select(0, index) for name, tensor in self.fields.items()}
        ragged = {
            name: tensor.index_select(0, _pieces(self.counts(name).permute(2, 0, 1), index))
            for name, tensor in self.ragged.items()
        }
        return dataclasses.replace(self, fields=fields, ragged=ragged)

    def batch_repeat(self, repeats: int) -> "RaggedPayload":
        return self.batch_select(torch.arange(self.shape[0]).repeat_interleave(repeats))

    def _join(self, payloads: "list[RaggedPayload]") -> "RaggedPayload":
        fields = {name: torch.cat([p.fields[name] for p in payloads], dim=2) for name in self.fields}
        ragged = {name: torch.cat([p.ragged[name] for p in payloads]) for name in self.ragged}
        return dataclasses.replace(self, fields=fields, ragged=ragged)

    def _map(self, change) -> "RaggedPayload":
        fields = {name: change(tensor) for name, tensor in self.fields.items()}
        return dataclasses.replace(self, fields=fields, ragged={n: change(tensor) for n, tensor in self.ragged.items()})


def _pieces(counts: Tensor, batch: Tensor) -> Tensor:
    """Positions of the pieces of the sequences ``batch``, for counts (rows, batch, num_kv_heads)."""
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    starts, counts = starts[:, batch].flatten(), counts[:, batch].flatten()
    shift = starts - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum()), device=counts.device) + shift.repeat_interleave(counts)


@dataclass(eq=False)
class MaskedPayload(RaggedPayload):
    """Rows of ``units`` blocks. ``fields["mask"]`` has a bit for each block: 1, the block owns a piece of every ragged
    tensor but ``exact``; 0, it owns a piece of ``exact``."""

    units: int = 0

    def mask(self) -> Tensor:
        """Bool (batch, num_kv_heads, rows, units)."""
        return unpack(self.fields["mask"], 1, self.units).bool()

    def counts(self, name: str) -> Tensor:
        ones = self.mask().sum(dim=-1)
        return self.units - ones if name == "exact" else ones


@dataclass(eq=False)
class StreamPayload(RaggedPayload):
    """``fields["lengths"]`` says how many pieces of the ragged tensors each row owns."""

    def counts(self, name: str) -> Tensor:
        return self.fields["lengths"].long()
