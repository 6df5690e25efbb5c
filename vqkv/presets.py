"""Each published system in a few lines, so that what differs between them is visible at a glance."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from vqkv.codec.base import Codec, Fp16
from vqkv.codec.pipeline import Chain
from vqkv.codec.residual import ResidualVQ
from vqkv.codec.scaling import VectorScale
from vqkv.codec.transform import Grouping
from vqkv.errors import DataError, UnknownNameError


@dataclass(frozen=True)
class Preset:
    """How a cache is stored: a codec for the keys and one for the values of each layer, and what stays exact.

    ``make_key_codec`` and ``make_value_codec`` build an unfitted codec for one layer from head_dim. The first
    ``sink_tokens`` and the last ``recent_window`` tokens stay in 16 bits; tokens are packed ``flush_block`` at a time.
    ``pre_rope``: keys are stored before RoPE and rotated when read.
    """

    name: str
    make_key_codec: Callable[[int | None], Codec]
    make_value_codec: Callable[[int | None], Codec]
    sink_tokens: int = 0
    recent_window: int = 0
    flush_block: int = 1
    pre_rope: bool = True
    arguments: dict = field(default_factory=dict)

    def __post_init__(self):
        check_settings(self.sink_tokens, self.recent_window, self.flush_block)

    def key_codec(self, head_dim: int | None = None) -> Codec:
        """An unfitted codec for one layer's keys; ``head_dim``, if given, is checked now rather than at ``fit``."""
        return self.make_key_codec(head_dim)

    def value_codec(self, head_dim: int | None = None) -> Codec:
        """An unfitted codec for one layer's values."""
        return self.make_value_codec(head_dim)


def fp16() -> Preset:
    """The uncompressed cache in 16 bits a value: what every ratio is against."""
    return Preset("fp16", Fp16, Fp16, pre_rope=False)


def vqllm(
    num_quantizers: int = 8,
    codebook_size: int = 2048,
    group_size: int = 32,
    key_grouping: str = "strided",
    value_grouping: str = "contiguous",
    quantize: str = "key+value",
    init: str = "kmeans",
    decay: float = 0.99,
    revive: bool = False,
    seed: int = 0,
) -> Preset:
    """Residual VQ (Kumar, "Residual vector quantization for KV cache compression in large language model", 2.2).

    Scale by the vector's standard deviation, split into groups of ``group_size`` channels, quantize every group with
    the same ``num_quantizers`` codebooks of ``codebook_size`` codes; no sinks and no recent window. The default stores
    2.875 bits a value at head_dim 128. ``quantize``: ``key+value``, ``key`` or ``value``; the other role stays fp16.
    """
    arguments = dict(locals())
    if quantize not in ("key+value", "key", "value"):
        raise UnknownNameError("role to quantize", quantize, ("key+value", "key", "value"))

    def chain(grouping: str, head_dim: int | None) -> Codec:
        quantizer = ResidualVQ(
            num_quantizers, codebook_size, group_size, init=init, decay=decay, revive=revive, seed=seed
        )
        return Chain([VectorScale("std"), Grouping(grouping, group_size, seed=seed)], quantizer, head_dim)

    return Preset(
        "vqllm",
        partial(chain, key_grouping) if "key" in quantize else Fp16,
        partial(chain, value_grouping) if "value" in quantize else Fp16,
        arguments=arguments,
    )


PRESETS = {"fp16": fp16, "vqllm": vqllm}


def make(name: str, **arguments) -> Preset:
    """The preset called ``name``; raises ``UnknownNameError`` for an unknown name or argument."""
    if not isinstance(name, str) or name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    known = inspect.signature(PRESETS[name]).parameters
    for argument, value in arguments.items():
        if argument not in known:
            raise UnknownNameError(f"argument of preset {name!r}", argument, known)
        kind = type(known[argument].default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise DataError(f"argument {argument} of preset {name!r} must be {kind.__name__}, not {value!r}")
    return PRESETS[name](**arguments)


def check_settings(sink_tokens, recent_window, flush_block) -> None:
    """Raise ``DataError`` unless they are whole numbers that a cache can keep."""
    for label, value, least in (
        ("sink_tokens", sink_tokens, 0),
        ("recent_window", recent_window, 0),
        ("flush_block", flush_block, 1),
    ):
        if type(value) is not int or value < least:
            raise DataError(f"{label} {value!r} must be a whole number from {least} on")
