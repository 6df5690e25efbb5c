"""Presets: how a cache is stored, before any model is known."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps

from vqkv.cache.settings import CacheSettings
from vqkv.codecs.pipeline import Codec
from vqkv.errors import DataError
from vqkv.models.rope import rotations
from vqkv.presets.plans import Budgeted, FromPrevious, Graded, Shared, Together, Unpredicted
from vqkv.runtime.registry import call, check_type


@dataclass(frozen=True)
class Preset:
    """A way to store a cache. ``make_key_codec`` and ``make_value_codec`` build an unfitted codec for one layer from
    head_dim. The first ``sink_tokens`` and the last ``recent_window`` tokens stay in 16 bits; tokens are packed
    ``flush_block`` at a time. ``pre_rope``: keys are stored before RoPE and rotated when read; None: where RoPE can be
    undone. ``plan``: which layers are predicted from which; ``fallback``: what is calibrated instead where that does
    not pay."""

    name: str
    make_key_codec: Callable[[int | None], Codec]
    make_value_codec: Callable[[int | None], Codec]
    sink_tokens: int = 0
    recent_window: int = 0
    flush_block: int = 1
    pre_rope: int | None = None
    arguments: dict = field(default_factory=dict)
    plan: FromPrevious | Budgeted | Graded | Shared | Together | Unpredicted | None = None
    fallback: "Preset | None" = None

    def __post_init__(self):
        _ = self.settings  # checks them

    @property
    def settings(self) -> CacheSettings:
        """Tokens that stay exact, and when others are packed."""
        pre_rope = True if self.pre_rope is None else self.pre_rope
        return CacheSettings(self.sink_tokens, self.recent_window, self.flush_block, pre_rope)

    def fitting(self, model) -> "Preset":
        """With ``pre_rope`` as ``model`` allows, if it is open. Raises ``DataError`` if it is True and cannot be."""
        if self.pre_rope is False:
            return self
        try:
            rotations(model)
        except DataError:
            if self.pre_rope is True:
                raise
            return dataclasses.replace(self, pre_rope=False)
        return dataclasses.replace(self, pre_rope=self.pre_rope or True)

    def key_codec(self, head_dim: int | None = None) -> Codec:
        """An unfitted codec for one layer's keys; ``head_dim``, if given, is checked now rather than at ``fit``."""
        return self.make_key_codec(head_dim)

    def value_codec(self, head_dim: int | None = None) -> Codec:
        """An unfitted codec for one layer's values."""
        return self.make_value_codec(head_dim)


PRESETS: dict[str, Callable[..., Preset]] = {}  # by name


def preset(function: Callable[..., Preset]) -> Callable[..., Preset]:
    """Decorator of what makes a preset: ``make`` finds it by name, its arguments must be of the types that it is
    annotated with, and the preset notes them (as the function does itself, where it names one)."""
    signature = inspect.signature(function)

    @wraps(function)
    def made(*given, **named) -> Preset:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            check_type(f"argument {name} of preset {function.__name__!r}", value, signature.parameters[name])
        found = function(*bound.args, **bound.kwargs)
        own = {name: found.arguments.get(name, value) for name, value in bound.arguments.items()}
        return dataclasses.replace(found, arguments=own)

    PRESETS[function.__name__] = made
    return made


def make(name: str, /, **arguments) -> Preset:
    """The preset called ``name``. Raises ``UnknownNameError`` or ``DataError`` for a wrong name, argument or type."""
    return call("preset", PRESETS, name, arguments)
