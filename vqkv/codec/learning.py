"""What parts have learned so far and not yet frozen, as tensors by name: kept while a long run of learning goes on."""

from collections.abc import Iterable

import torch
from torch import Tensor

from vqkv.codec.part import Part
from vqkv.errors import FormatError

Owners = Iterable[tuple[str, Part]]


def collected(owners: Owners) -> dict[str, Tensor]:
    """The ``learning_state`` of every part, as ``owner.name``."""
    return {f"{owner}.{name}": tensor for owner, part in owners for name, tensor in part.learning_state().items()}


def hand_out(state: dict[str, Tensor], owners: Owners, devices: dict[str, torch.device] | None = None) -> None:
    """``load_learning_state`` of every part with its own tensors of ``state``, moved to the owner's of ``devices``.
    Raises ``FormatError`` if some are left, and whatever the parts raise."""
    left = dict(state)
    for owner, part in owners:
        mine = [name for name in left if name.startswith(owner + ".")]
        learned = {name.removeprefix(owner + "."): left.pop(name) for name in mine}
        if devices is not None:
            learned = {name: tensor.to(devices[owner]) for name, tensor in learned.items()}
        part.load_learning_state(learned)
    if left:
        raise FormatError(f"unexpected tensors {sorted(left)}: the file was altered or is for another codec")
