"""Parts of codecs: settings as JSON, learned tensors as a module's buffers, a registry that rebuilds from both."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vqkv.errors import FormatError

MAX_DEPTH = 16  # parts within parts: an altered config must not exhaust the stack
ALTERED = (TypeError, ValueError, AttributeError, ArithmeticError, LookupError, RuntimeError)  # what bad settings raise
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # of learned tensors; a size of -1 is any


class Part(nn.Module):
    """Anything a codec is built from: a dataclass whose init fields are its JSON-able settings.

    What it has learned are its persistent buffers, so ``state_dict()`` is what is saved beside ``config()``. Subclasses
    register under their class name, and under the one they had ``formerly``, which saved compressors may have.
    """

    registry: dict[str, type["Part"]] = {}

    def __init_subclass__(cls, formerly: str = "", **kwargs):
        super().__init_subclass__(**kwargs)
        Part.registry |= {cls.__name__: cls} | ({formerly: cls} if formerly else {})

    def __new__(cls, *args, **kwargs):
        part = super().__new__(cls)
        nn.Module.__init__(part)  # before the dataclass sets its fields
        return part

    def config(self) -> dict:
        """Settings as JSON-able values; ``codec_from_config`` reads them."""
        settings = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.init}
        return {"part": type(self).__name__, **settings}

    def layout(self) -> Layout:
        """Shape and type of each of its own learned tensors, as stored."""
        return {}

    def restore(self) -> None:
        """Compute what follows from the learned tensors. Raises ``FormatError`` for values that none can have."""

    @property
    def side_bytes(self) -> int:
        """Bytes of side information: everything learned that decoding needs."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state_dict().values())


def _plain(value):
    if isinstance(value, Part):
        return value.config()
    return [_plain(item) for item in value] if isinstance(value, list | tuple | nn.ModuleList) else value


def part_from_config(config, depth: int = 0):
    """Rebuild a part (or a list of them) from ``config()``. Raises ``FormatError`` for anything not understood."""
    if depth > MAX_DEPTH:
        raise FormatError(f"settings nested more than {MAX_DEPTH} deep: the file was altered")
    if isinstance(config, list):
        return [part_from_config(item, depth + 1) for item in config]
    if not isinstance(config, dict):
        return config
    settings = dict(config)
    name = settings.pop("part", None)
    name = name if isinstance(name, str) else type(name).__name__
    cls = Part.registry.get(name)
    if cls is None or not dataclasses.is_dataclass(cls):
        raise FormatError(f"unknown codec part {name!r}: the file was altered or needs a newer vqkv")
    settings = {key: part_from_config(value, depth + 1) for key, value in settings.items()}
    with refusing(f"settings of {name}"):
        return cls(**settings)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Whatever settings or tensors of an altered file raise becomes a ``FormatError``."""
    try:
        yield
    except FormatError:
        raise
    except ALTERED as error:
        raise FormatError(f"{what} do not fit this version of vqkv: {error}") from error


def load_learned(root: Part, state: dict[str, Tensor]) -> None:
    """Take what ``state_dict`` gave of a part of the same settings. Raises ``FormatError`` for tensors that are
    missing, unexpected, not finite, or of another shape or type."""
    with refusing("learned tensors"):
        owners = [(name, part) for name, part in root.named_modules() if isinstance(part, Part)]
        layout = {f"{o}.{name}".lstrip("."): about for o, part in owners for name, about in part.layout().items()}
        left = dict(state)
        learned = {name: take(left, name, *about) for name, about in layout.items()}
        if left:
            raise FormatError(f"unexpected tensors {sorted(left)}: the file was altered or is for another codec")
        take_over(root, learned)


def take_over(root: Part, state: dict[str, Tensor]) -> None:
    """Hand every inner part its tensors of another's ``state_dict``, unchecked, also amid learning."""
    for name, tensor in state.items():
        owner, _, own = name.rpartition(".")
        root.get_submodule(owner).register_buffer(own, tensor)
    for part in root.modules():
        if isinstance(part, Part):
            part.restore()


def take(state: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Pop a tensor of a given shape and type out of ``state``. Raises ``FormatError`` if it is not so."""
    tensor = state.pop(name, None)
    if not isinstance(tensor, Tensor):
        raise FormatError(f"tensor {name!r} is missing: the file is truncated or was altered")
    sizes = tuple(size if wanted == -1 else wanted for size, wanted in zip(tensor.shape, shape, strict=False))
    if tuple(tensor.shape) != sizes or tensor.ndim != len(shape) or tensor.dtype != dtype:
        raise FormatError(f"tensor {name!r} is {tuple(tensor.shape)} {tensor.dtype}, expected {tuple(shape)} {dtype}")
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise FormatError(f"tensor {name!r} holds NaN or infinity: the file was altered")
    return tensor
