"""What a cache keeps exact, and when it packs."""

from dataclasses import dataclass

from vqkv.errors import DataError


@dataclass(frozen=True)
class CacheSettings:
    """What a cache of this compressor keeps exact; see ``presets.Preset``."""

    sink_tokens: int = 0
    recent_window: int = 0
    flush_block: int = 1
    pre_rope: bool = True

    def __post_init__(self):
        check_settings(self.sink_tokens, self.recent_window, self.flush_block, self.pre_rope)


def check_settings(sink_tokens, recent_window, flush_block, pre_rope) -> None:
    """Raise ``DataError`` unless they are whole numbers that a cache can keep, and a boolean."""
    if type(pre_rope) is not bool:
        raise DataError(f"pre_rope {pre_rope!r} must be True or False")
    for label, value, least in (
        ("sink_tokens", sink_tokens, 0),
        ("recent_window", recent_window, 0),
        ("flush_block", flush_block, 1),
    ):
        if type(value) is not int or value < least:
            raise DataError(f"{label} {value!r} must be a whole number from {least} on")
