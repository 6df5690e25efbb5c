"""Tokens as they are stored: named tensors, one row for each token or block of tokens."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.errors import DataError, FormatError

TENSOR_DICTS = ("fields", "ragged")


@dataclass(eq=False)
class Payload:
    """Tokens as they are stored: named tensors, each (batch, num_kv_heads, rows, ...), and nothing else.

    One row holds ``tokens_per_row`` tokens: 1, or a block for codecs that share parameters along tokens. Every field is
    contiguous and owns its storage, so ``nbytes`` is what the payload really occupies. Fields whose size depends on
    the data belong in a ``RaggedPayload``.
    """

    fields: dict[str, Tensor]
    tokens_per_row: int = 1

    registry = {}  # class name -> class: what ``payload_from`` may build

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Payload.registry[cls.__name__] = cls

    def __post_init__(self):
        self.fields = {name: _own(tensor) for name, tensor in self.fields.items()}
        if not self.fields or len({tensor.shape[:3] for tensor in self.fields.values()}) != 1:
            shapes = {name: tuple(tensor.shape) for name, tensor in self.fields.items()}
            raise FormatError(f"payload fields must agree in (batch, num_kv_heads, rows), got {shapes}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch, num_kv_heads, rows)."""
        return tuple(next(iter(self.fields.values())).shape[:3])

    @property
    def seq_len(self) -> int:
        """Number of tokens."""
        return self.shape[2] * self.tokens_per_row

    @property
    def nbytes(self) -> int:
        """Bytes that the fields' storage occupies."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything stored, by name."""
        return self.fields

    def header(self) -> dict:
        """All that ``payload_from`` needs beside ``tensors``, as JSON-able values."""
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in TENSOR_DICTS}
        names = {group: sorted(getattr(self, group)) for group in TENSOR_DICTS if hasattr(self, group)}
        return {"payload": type(self).__name__, **settings, **names}

    @staticmethod
    def concat(payloads: "list[Payload]") -> "Payload":
        """Join along tokens. Raises ``DataError`` for no payloads, or payloads of different codecs."""
        payloads = list(payloads)
        if not payloads:
            raise DataError("nothing to concatenate: pass at least one payload")
        first = payloads[0]
        if any(p.header() != first.header() for p in payloads):
            raise DataError("cannot concatenate payloads of different codecs: encode all of them with the same one")
        return first._join(payloads)

    def tokens(self, start: int = 0, stop: int | None = None) -> "Payload":
        """A copy of tokens ``start:stop`` (Python slice rules). Raises ``DataError`` if that cuts a block of tokens."""
        rows = self._rows(start, stop)
        return self._map(lambda tensor: tensor[:, :, rows])

    def batch_select(self, index) -> "Payload":
        """The sequences of the batch that ``index`` names, in its order: 1-D integers, or a mask of booleans."""
        index = _numbers(index, self.shape[0])
        return self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def batch_repeat(self, repeats: int) -> "Payload":
        """Every sequence ``repeats`` times in a row, as ``torch.repeat_interleave`` does."""
        return self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def to(self, device) -> "Payload":
        """The same payload on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def _rows(self, start: int, stop: int | None) -> slice:
        start, stop, _ = slice(start, stop).indices(self.seq_len)
        stop = max(start, stop)
        if start % self.tokens_per_row or stop % self.tokens_per_row:
            raise DataError(
                f"tokens {start}:{stop} cut through a block of {self.tokens_per_row} tokens: use multiples of it"
            )
        return slice(start // self.tokens_per_row, stop // self.tokens_per_row)

    def _join(self, payloads: "list[Payload]") -> "Payload":
        joined = {name: torch.cat([p.fields[name] for p in payloads], dim=2) for name in self.fields}
        return dataclasses.replace(self, fields=joined)

    def _map(self, change) -> "Payload":
        return dataclasses.replace(self, fields={name: change(tensor) for name, tensor in self.fields.items()})


Payload.registry["Payload"] = Payload


def payload_from(header: dict, tensors: dict[str, Tensor]) -> Payload:
    """The payload that ``header()`` and ``tensors`` describe. Raises ``FormatError`` for anything that is none."""
    try:
        settings = dict(header)
        cls = Payload.registry[settings.pop("payload")]
        groups = {group: settings.pop(group) for group in TENSOR_DICTS if group in settings}
        if sorted(name for names in groups.values() for name in names) != sorted(tensors):
            raise FormatError(f"payload names {groups}, but there are {sorted(tensors)}: the file was altered")
        return cls(**{group: {name: tensors[name] for name in names} for group, names in groups.items()}, **settings)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise FormatError(f"no payload of this version of vqkv: {error}") from error


def _numbers(index, batch_size: int) -> Tensor:
    """``index`` as int64. Raises ``DataError`` for a mask of another length than the batch's."""
    index = torch.as_tensor(index)
    if index.dtype is not torch.bool:
        return index.long()
    if index.shape != (batch_size,):
        raise DataError(f"a mask of shape {tuple(index.shape)} for a batch of {batch_size} sequences")
    return index.nonzero().flatten()


def _own(tensor: Tensor) -> Tensor:
    """Contiguous, and without the rest of a larger tensor kept alive behind a view."""
    tensor = tensor.detach().contiguous()
    size = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == size else tensor.clone()


def payload_field(payload: Payload, name: str) -> Tensor:
    """A field of a payload. Raises ``FormatError`` if another codec wrote it."""
    if name not in payload.fields:
        found = sorted(payload.fields)
        raise FormatError(f"payload holds {found}, not {name!r}: decode it with the codec that made it")
    return payload.fields[name]
