"""Settings of a cache: the tokens it keeps exact, and when it quantizes the others."""

import math
from dataclasses import dataclass

import torch

from vqkv.runtime.checks import check_whole

MOST = 1 << 62  # tokens or bytes


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
            check_whole("pre_rope", self.pre_rope, 1, MOST)
        for name, least in (("sink_tokens", 0), ("recent_window", 0), ("flush_block", 1)):
            check_whole(name, getattr(self, name), least, MOST)


@dataclass(frozen=True, kw_only=True)
class LiveSettings(CacheSettings):
    """The settings of one cache, with what its compressor and its model add. ``joint``: all layers are stored together;
    ``shapes``: num_kv_heads and head_dim of keys and values by layer."""

    in_place: bool
    decoded_cache_bytes: int
    tokens_per_row: int
    joint: bool
    dtype: torch.dtype
    shapes: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, compressor, model, in_place: bool, decoded_cache_bytes: int) -> "LiveSettings":
        """Those of a compressor's cache for a model; in place nothing stays exact."""
        exact = {"sink_tokens": 0, "recent_window": 0, "flush_block": 1} if in_place else {}
        return cls(
            **vars(compressor.settings) | exact,
            in_place=in_place,
            decoded_cache_bytes=decoded_cache_bytes,
            tokens_per_row=compressor.tokens_per_row,
            joint=compressor.joint,
            dtype=model.dtype,
            shapes=tuple(map(tuple, compressor.model["shapes"])),
        )

    @property
    def block(self) -> int:
        """Tokens are quantized in multiples of it."""
        return math.lcm(self.tokens_per_row, self.flush_block)

    @property
    def exact(self) -> torch.dtype:
        """Type of sinks and window: the model's if it has 16 bits, else fp16."""
        return self.dtype if self.dtype.itemsize == 2 else torch.float16

    def room(self, batch_size: int) -> int:
        """Quantized tokens, whole blocks, of which ``decoded_cache_bytes`` holds what is decoded."""
        values = sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in self.shapes)
        token = values * self.dtype.itemsize * batch_size
        tokens = self.decoded_cache_bytes // token
        return tokens - tokens % self.tokens_per_row
