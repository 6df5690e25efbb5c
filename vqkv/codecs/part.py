"""Parts of codecs: settings as JSON, learned tensors as a module's buffers, a registry that rebuilds from both."""

import dataclasses
from collections.abc import Collection
from typing import Any, ClassVar

from torch import Tensor, nn

from vqkv.errors import DataError, FormatError, UnknownNameError


class Part(nn.Module):
    """Anything a codec is built from: a dataclass whose init fields are its JSON-able settings. What it has learned are
    its persistent buffers, so ``state_dict()`` is what is saved beside ``config()``. Subclasses register under their
    class name.

    ``limits`` of a setting are the least and the most that it can be, two integers for a whole number, two floats for a
    real one; ``choices`` are what it can be called.
    """

    registry: ClassVar[dict[str, type["Part"]]] = {}
    limits: ClassVar[dict[str, tuple[float, float]]] = {}
    choices: ClassVar[dict[str, Collection]] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Part.registry[cls.__name__] = cls

    def __new__(cls, *args, **kwargs):
        part = super().__new__(cls)
        nn.Module.__init__(part)  # before the dataclass sets its fields
        return part

    def __post_init__(self):
        for name, (least, most) in self.limits.items():
            value, whole = getattr(self, name), type(least) is int
            if type(value) not in ((int,) if whole else (int, float)) or not least <= value <= most:
                kind = "an integer" if whole else "a number"
                raise DataError(f"{name} {value!r} must be {kind} from {least:g} to {most:g}")
        for name, known in self.choices.items():
            if getattr(self, name) not in list(known):
                raise UnknownNameError(name.replace("_", " "), getattr(self, name), known)

    def config(self) -> dict:
        """Settings as JSON-able values; ``part_from_config`` reads them."""
        settings = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.init}
        return {"part": type(self).__name__, **settings}

    @property
    def side_bytes(self) -> int:
        """Bytes of side information: everything learned that decoding needs."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state_dict().values())


def _plain(value):
    if isinstance(value, Part):
        return value.config()
    return [_plain(item) for item in value] if isinstance(value, list | tuple | nn.ModuleList) else value


def part_from_config(config):
    """Rebuild a part (or a list of them) from ``config()``. Raises ``FormatError`` for one that is not registered."""
    if isinstance(config, list):
        return [part_from_config(item) for item in config]
    if not isinstance(config, dict):
        return config
    settings = {key: part_from_config(value) for key, value in config.items()}
    name = settings.pop("part")
    if name not in Part.registry:
        raise FormatError(f"unknown codec part {name!r}: import the module that defines it, or calibrate anew")
    return Part.registry[name](**settings)


def codec_from_config(config: dict, state: dict[str, Tensor]) -> Any:
    """A codec or a predictor, whichever ``config`` names, ready, from ``config()`` and ``state_dict()``."""
    root = part_from_config(config)
    load_learned(root, state)
    for part in root.modules():
        part.ready = True
    return root


def load_learned(root: Part, state: dict[str, Tensor]) -> None:
    """Hand every inner part its tensors of the ``state_dict`` of a part with the same settings, also amid learning."""
    for name, tensor in state.items():
        owner, _, own = name.rpartition(".")
        root.get_submodule(owner).register_buffer(own, tensor)
