"""Files that are there as a whole or not at all, and the named tensors in them."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file in ``path``'s folder that takes its place at the end of the ``with``, once it is on the disk. If that
    fails or is interrupted, what was at ``path`` stays. Raises ``OSError`` for a missing folder or a full disk."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of its values; of a contiguous tensor in CPU memory without a copy."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def tensors_sha256(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Of names, types, shapes and bytes, in the order given."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def claim(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Take out the tensors whose names start with ``prefix``, by the rest of the name."""
    return {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
