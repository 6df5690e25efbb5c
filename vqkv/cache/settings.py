"""Settings of a cache: the tokens it keeps exact, and when it quantizes the others."""

import math
from dataclasses import dataclass

import torch

from vqkv.runtime.checks import check_whole

LARGEST = 1 << 62  # tokens or bytes


@dataclass(frozen=True)
class CacheSettings:
    """The first ``sink_tokens`` and the last ``recent_window`` tokens stay in 16 bits; tokens are quantized
    ``flush_block`` at a time. ``pre_rope``: keys are stored before RoPE; a number of tokens: rotated back by the
    position of the first of their block of so many, so that attention can rotate queries instead, one for each block.
    Raises ``DataError`` for anything but whole numbers that a cache can keep."""

    sink_tokens: int = 0
    recent_window: int = 0
    flush_block: int = 1
    pre_rope: int = True

    def __post_init__(self):
        if type(self.pre_rope) is not bool:
            check_whole("pre_rope", self.pre_rope, 1, LARGEST)
        for name, least in (("sink_tokens", 0), ("recent_window", 0), ("flush_block", 1)):
            check_whole(name, getattr(self, name), least, LARGEST)


@dataclass(frozen=True, kw_only=True)
class LiveSettings(CacheSettings):
    """The settings of one cache, with what its compressor and its model add. Tokens are quantized in multiples of
    ``block``; sinks and window have ``exact_dtype``; all layers are stored together if ``joint``. ``shapes``:
    num_kv_heads and head_dim of keys and values by layer. A decoded token of one sequence has ``token_bytes``."""

    in_place: bool
    decoded_cache_bytes: int
    tokens_per_row: int
    block: int
    joint: bool
    dtype: torch.dtype
    exact_dtype: torch.dtype
    shapes: tuple[tuple[int, int, int], ...]
    token_bytes: int

    @classmethod
    def of(cls, compressor, model, in_place: bool, decoded_cache_bytes: int) -> "LiveSettings":
        """Those of a compressor's cache for a model; in place nothing stays exact."""
        held = vars(compressor.settings)
        if in_place:
            held = held | {"sink_tokens": 0, "recent_window": 0, "flush_block": 1}
        shapes = tuple(map(tuple, compressor.model["shapes"]))
        values = sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in shapes)
        return cls(
            **held,
            in_place=in_place,
            decoded_cache_bytes=decoded_cache_bytes,
            tokens_per_row=compressor.tokens_per_row,
            block=math.lcm(compressor.tokens_per_row, held["flush_block"]),
            joint=compressor.joint,
            dtype=model.dtype,
            exact_dtype=model.dtype if model.dtype.itemsize == 2 else torch.float16,
            shapes=shapes,
            token_bytes=values * model.dtype.itemsize,
        )
