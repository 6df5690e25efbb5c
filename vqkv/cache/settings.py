"""Settings of a cache: the tokens it keeps exact, and when it quantizes the others."""

from dataclasses import dataclass

import torch

from vqkv.runtime.checks import check_whole


@dataclass(frozen=True)
class CacheSettings:
    """The first ``sink_tokens`` and the last ``recent_window`` tokens stay in 16 bits; tokens are quantized
    ``block_tokens`` at a time. ``pre_rope``: keys are stored before RoPE; a number of tokens: rotated back by the
    position of the first of their block of so many, so that attention can rotate queries instead, one for each block.
    Raises ``DataError`` for anything but integers that a cache can keep."""

    sink_tokens: int = 0
    recent_window: int = 0
    block_tokens: int = 1
    pre_rope: int = True

    def __post_init__(self):
        if type(self.pre_rope) is not bool:
            check_whole("pre_rope", self.pre_rope, 1)
        for name, least in (("sink_tokens", 0), ("recent_window", 0), ("block_tokens", 1)):
            check_whole(name, getattr(self, name), least)


@dataclass(frozen=True, kw_only=True)
class LiveSettings(CacheSettings):
    """The settings of one cache: ``block_tokens`` are whole blocks of all codecs; tokens of one are ``row_tokens``;
    sinks and window have ``exact_dtype``; all layers are stored together if ``joint``."""

    in_place: bool
    row_tokens: int
    joint: bool
    exact_dtype: torch.dtype
