"""Parts of codecs: stages, which can be undone, and a quantizer at the end.

A part is a dataclass. Its arguments are settings, saved as JSON; its ``learned`` fields are buffers, saved as tensors.
"""

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from vqkv.codecs.payload import Payload
from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.kernels import KernelView, decode, pack_codes, unpack_codes

Side = dict[str, Tensor]  # what a stage or a quantizer stores of every row, by name


def learned(saved: bool = True) -> Any:
    """Declare a field that holds a learned tensor: a buffer, None until it is set. ``saved`` with the part, or made
    again from what is."""
    return dataclasses.field(init=False, repr=False, metadata={"saved": saved})


@dataclass(eq=False)
class Part(nn.Module):
    """Anything a codec is built from, registered under its class name: ``config()`` and ``state_dict()`` rebuild it.

    ``limits`` of a setting are the least and the most that it can be, two integers for a whole number, two floats for a
    real one; ``choices`` are what it can be called. ``fixed`` were settings once: files and fingerprints name them.
    """

    registry: ClassVar[dict[str, type["Part"]]] = {}
    limits: ClassVar[dict[str, tuple[float, float]]] = {}
    choices: ClassVar[dict[str, Collection]] = {}
    fixed: ClassVar[dict[str, float]] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Part.registry[cls.__name__] = cls

    def __new__(cls, *args, **kwargs):
        part = super().__new__(cls)
        nn.Module.__init__(part)  # before the dataclass sets its fields
        for each in dataclasses.fields(cls):
            if "saved" in each.metadata:
                part.register_buffer(each.name, None, persistent=each.metadata["saved"])
        return part

    def __post_init__(self):
        for name, (least, most) in self.limits.items():
            value, kinds = getattr(self, name), (int,) if type(least) is int else (int, float)
            if type(value) not in kinds or not least <= value <= most:
                kind = "a number" if float in kinds else "an integer"
                raise DataError(f"{name} {value!r} must be {kind} from {least:g} to {most:g}")
        for name, choices in self.choices.items():
            if getattr(self, name) not in list(choices):
                raise UnknownNameError(name.replace("_", " "), getattr(self, name), choices)

    def config(self) -> dict:
        """Return the settings as JSON-able values; ``part_from_config`` reads them."""
        return {"part": type(self).__name__, **self.fixed} | {
            each.name: _plain(getattr(self, each.name)) for each in dataclasses.fields(self) if each.init
        }

    @property
    def side_bytes(self) -> int:
        """Bytes of side information: everything learned that decoding needs."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state_dict().values())


def _plain(value):
    if isinstance(value, Part):
        return value.config()
    return [_plain(item) for item in value] if isinstance(value, list | tuple | nn.ModuleList) else value


def part_from_config(config):
    """Rebuild a part (or a list of them) from ``config()``. Raises ``FormatError`` for one that is not known."""
    if isinstance(config, list):
        return [part_from_config(item) for item in config]
    if not isinstance(config, dict):
        return config
    settings = {key: part_from_config(value) for key, value in config.items()}
    name = settings.pop("part")
    if name not in Part.registry:
        raise FormatError(f"unknown codec part {name!r}: import the module that defines it, or calibrate again")
    fixed = Part.registry[name].fixed
    if any(settings.pop(each, value) != value for each, value in fixed.items()):
        raise FormatError(f"{name} is always of {fixed} by now: calibrate again")
    return Part.registry[name](**settings)


def codec_from_config(config: dict, state: dict[str, Tensor]) -> Any:
    """Rebuild a codec or a predictor, whichever ``config`` names, fitted, from ``config()`` and ``state_dict()``."""
    root = part_from_config(config)
    for name, tensor in state.items():
        owner, _, own = name.rpartition(".")
        root.get_submodule(owner).register_buffer(own, tensor)
    for part in root.modules():
        part.ready = True
    return root


class Stage(Part):
    """An invertible step on rows: (batch, num_kv_heads, rows, *row_shape) -> the same with another row shape. Write
    ``encode`` and ``decode``, and what of the rest applies."""

    side_fields: tuple[str, ...] = ()  # what it stores for every row
    block_tokens: int = 1  # more, if it folds tokens into rows
    share: float = 1.0  # of a row's values that go out; a quantizer's: of a cache's values that it is given
    weighted: bool = False  # whether it needs ``weigh`` before it learns
    costs: str = "loss"  # and of which costs: to the model's ``loss`` or in ``attention`` (``calibration.error_costs``)
    by_head: bool = False  # whether it serves just as many KV heads as it was built for
    learns_first: bool = False  # whether it learns from all batches before what comes after it begins
    metric: Tensor | None = None  # what errors cost, after ``weigh``

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Prepare for rows of shape (num_kv_heads, *row_shape) and return that of rows going out. Raises ``DataError``
        if impossible."""
        return shape

    def weigh(self, metric: Tensor) -> None:
        """Learn what errors cost: that of e in a head's vector is e' metric e, (num_kv_heads, head_dim, head_dim)."""
        self.metric = metric

    def partial_fit(self, x: Tensor) -> None:
        """Learn from one batch; nothing to learn by default."""

    def settle(self) -> None:
        """Conclude what all batches taught, where it ``learns_first``."""

    def finalize(self) -> None:
        """Freeze what was learned; nothing by default."""

    def keep(self, count: int) -> None:
        """Forget what only values after the first ``count`` of the last axis need: they are not stored."""

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Return the rows going out, and what must be stored of every row to come back."""
        raise NotImplementedError

    def decode(self, y: Tensor, side: Side) -> Tensor:
        """Undo ``encode``, up to what the quantizer lost. May overwrite y, and return a view of it."""
        raise NotImplementedError

    def side_of(self, payload: Payload) -> Side:
        """Return what was stored of every row."""
        return {name: payload.fields[name] for name in self.side_fields}

    def kernel_view_before(self, inner: KernelView, side: Side) -> KernelView | None:
        """Turn the kernels' view of rows after this stage into that of rows before it; None if they cannot read it."""
        return None


class Quantizer(Stage):
    """Rows of values -> integer codes (batch, num_kv_heads, rows, codes_per_row) and back: the end of a chain.

    ``store`` and ``load`` keep a row's codes as one packed bit string, and what else it takes in ``side_fields``."""

    code_bits: int
    codes_per_row: int
    row_shape: tuple[int, ...]  # of the values of a row
    block_values: int = 1  # neighbouring values that a code stands for

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Prepare for rows of (num_kv_heads, *row_shape). Raises ``DataError`` if impossible."""
        if shape[-1] % self.block_values:
            raise DataError(
                f"{shape[-1]} channels are not divisible by the {self.block_values} values of a code: "
                "use another preset, such as turboquant"
            )
        self.row_shape = shape[1:]
        self.codes_per_row = math.prod(self.row_shape) // self.block_values
        return shape

    @property
    def kept(self) -> int | None:
        """Values of the last axis that are stored, the first ones; None for all."""
        return None

    def store(self, y: Tensor) -> Payload:
        """Encode and pack rows of values."""
        codes, side = self.encode(y)
        return Payload({"codes": pack_codes(codes, self.code_bits), **side})

    def load(self, payload: Payload) -> Tensor:
        """Undo ``store``: float32 values, in memory that the payload does not share."""
        packed = self.kernel_view(payload)
        if packed is not None:
            return decode(packed).unflatten(-1, self.row_shape)
        codes = unpack_codes(payload.fields["codes"], self.code_bits, self.codes_per_row)
        return self.decode(codes.int(), self.side_of(payload))

    def quantize_dequantize(self, y: Tensor) -> Tensor:
        """Return rows y as ``load`` would after ``store``, also before ``finalize``."""
        return self.decode(*self.encode(y))

    def kernel_view(self, payload: Payload) -> KernelView | None:
        """Return stored codes as kernels read them; None if they cannot read them."""
        return None

    def rates(self, y: Tensor) -> Tensor:
        """Trade bits for error, once fitted: float64 (n, 2), bits a value and mean squared error of rows y, fewest bits
        first. Raises ``DataError`` where bits cannot be chosen."""
        raise DataError(f"{type(self).__name__} cannot trade bits for error: use EntropyCodedScalar or ResidualVQ")

    def with_bits(self, bits: float) -> "Quantizer":
        """Return an unfitted quantizer like this one, of so many bits a value, where ``rates`` knows of any."""
        return dataclasses.replace(cast(Any, self), bits=bits)
