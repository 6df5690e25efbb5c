"""Files that are there completely or not at all, and the named tensors in them under a checksum."""

import hashlib
import json
import os
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from vqkv.errors import DamageError, FormatError

CRC32, DIGITS = b'"crc32":"', 8  # before the checksum in a file's header, where no other quote is without a backslash


def cache_folder(kind: str) -> Path:
    """Return ``~/.cache/vqkv/kind``, for what is made once and kept; ``VQKV_CACHE`` moves the first part."""
    return Path(os.environ.get("VQKV_CACHE") or "~/.cache/vqkv").expanduser() / kind


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file in ``path``'s folder that takes its place at the end of the ``with``, once it is on the disk. If
    that fails or is interrupted, what was at ``path`` stays. Raises ``OSError`` for a missing folder or a full disk."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}: make it first")
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")  # tempfile's is its owner's
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checked(path: Path, about: dict, tensors: dict[str, Tensor]) -> None:
    """Write one safetensors file with ``about`` as JSON in its metadata, with a CRC32 of all its bytes."""
    metadata = {"about": json.dumps(about), "crc32": "0" * DIGITS}
    data = bytearray(save({name: x.contiguous() for name, x in tensors.items()}, metadata))
    data[_checksum(data)] = _crc32(data)
    with replacing(path) as file:
        file.write(data)


def load_checked(path: Path, kind: str, version: int, remedy: str) -> tuple[dict, dict[str, Tensor]]:
    """Read header and tensors that ``save_checked`` wrote as format ``kind``. Raises ``FormatError`` for a file that is
    missing and for another format or version, ``DamageError`` for one cut or altered, before anything is made of it."""
    there = path.is_file()
    data = bytearray(path.read_bytes() if there else b"")
    digits = _checksum(data)
    stored, data[digits] = data[digits], b"0" * DIGITS
    if stored != _crc32(data):
        error = DamageError if there else FormatError
        raise error(f"{path} is missing, cut or altered, or no {kind}: {remedy}")
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
        tensors = {name: file.get_tensor(name).clone() for name in sorted(file.keys())}
    if (about["format"], about["version"]) != (kind, version):
        raise FormatError(f"{path} is {about['format']} {about['version']}; this vqkv reads {kind} {version}: {remedy}")
    return about, tensors


def _checksum(data: bytearray) -> slice:
    """Find where the digits of a file's checksum are."""
    start = data.find(CRC32) + len(CRC32)
    return slice(start, start + DIGITS)


def _crc32(data: bytearray) -> bytes:
    return f"{zlib.crc32(data):0{DIGITS}x}".encode()


def raw_bytes(tensor: Tensor) -> memoryview:
    """View the bytes of its values; of a contiguous tensor in CPU memory without a copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensors_sha256(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash names, types, shapes and bytes, in the order given."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def claim(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Take out the tensors whose names start with ``prefix``, by the rest of the name."""
    return {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
