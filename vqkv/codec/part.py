"""What parts of codecs share: settings as JSON, learned tensors by name, a registry that rebuilds them from both."""

import dataclasses
from contextlib import contextmanager

import torch
from torch import Tensor

from vqkv.errors import FormatError

MAX_DEPTH = 16  # parts within parts: an altered config must not exhaust the stack
ALTERED = (TypeError, ValueError, AttributeError, ArithmeticError, LookupError, RuntimeError)  # what bad settings raise


class Part:
    """Anything a codec is built from: a dataclass whose init fields are its JSON-able settings.

    Subclasses register under their class name. ``state`` holds what was learned (side information).
    """

    registry: dict[str, type["Part"]] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Part.registry[cls.__name__] = cls

    def config(self) -> dict:
        """Settings as JSON-able values; ``codec_from_config`` reads them."""
        settings = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.init}
        return {"part": type(self).__name__, **settings}

    def state(self) -> dict[str, Tensor]:
        """Learned tensors by name."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take what ``state`` gave. Raises ``FormatError`` for missing, unexpected or misshapen tensors."""
        if state:
            raise FormatError(f"{type(self).__name__} has no state, but got {sorted(state)}: the file was altered")

    def learning_state(self) -> dict[str, Tensor]:
        """All that ``partial_fit`` has made so far and ``finalize`` has not yet frozen."""
        return {}

    def load_learning_state(self, state: dict[str, Tensor]) -> None:
        """Go on learning from what ``learning_state`` gave. Raises ``FormatError`` as ``load_state`` does."""
        if state:
            raise FormatError(f"{type(self).__name__} learns nothing, but got {sorted(state)}: the file was altered")

    def to(self, device) -> "Part":
        """Move learned tensors (and those of inner parts) to ``device``, in place."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, Part):
                    inner.to(device)
        return self


def _plain(value):
    if isinstance(value, Part):
        return value.config()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


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
def refusing(what: str):
    """Whatever settings or tensors of an altered file raise becomes a ``FormatError``."""
    try:
        yield
    except FormatError:
        raise
    except ALTERED as error:
        raise FormatError(f"{what} do not fit this version of vqkv: {error}") from error


def take(state: dict[str, Tensor], name: str, shape: tuple, dtype: torch.dtype) -> Tensor:
    """Pop a tensor of a given shape and type out of ``state``. Raises ``FormatError`` if it is not so."""
    tensor = state.pop(name, None)
    if not isinstance(tensor, Tensor):
        raise FormatError(f"tensor {name!r} is missing: the file is truncated or was altered")
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise FormatError(f"tensor {name!r} is {tuple(tensor.shape)} {tensor.dtype}, expected {tuple(shape)} {dtype}")
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise FormatError(f"tensor {name!r} holds NaN or infinity: the file was altered")
    return tensor
