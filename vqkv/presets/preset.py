"""Presets: how a cache is stored, before any model is known."""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Protocol

from vqkv.cache.settings import CacheSettings
from vqkv.codecs.pipeline import Chain, Codec
from vqkv.codecs.predictive import Place
from vqkv.codecs.predictor_kinds import Predictor
from vqkv.codecs.stage import Quantizer, Stage
from vqkv.errors import DataError
from vqkv.models.rope import rotations
from vqkv.runtime.registry import call, check_type


@dataclass
class RolePlan:
    """One role of one layer: its codec's maker, what predicts it, and how many layers the codec stores together."""

    make_codec: Callable[[int | None], Codec]
    predictor: Predictor | None = None
    sources: tuple[Place, ...] = ()
    cross_fitted: bool = False
    layers: int = 1


class LayerPlan(Protocol):
    """What a preset arranges for each layer of a model: which others predict it, how many bits it gets."""

    def arrange(self, preset: "Preset", trial) -> list[dict[str, RolePlan]]:
        """Return for each layer the plan of its keys and of its values.

        ``trial`` (``calibration.layer_fit.ModelTrial``) answers what must be asked of the model."""


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
    plan: LayerPlan | None = None
    fallback: "Preset | None" = None

    def __post_init__(self):
        _ = self.settings  # checks them

    @property
    def settings(self) -> CacheSettings:
        """Tokens that stay exact, and when others are packed."""
        pre_rope = True if self.pre_rope is None else self.pre_rope
        return CacheSettings(self.sink_tokens, self.recent_window, self.flush_block, pre_rope)

    def fitting(self, model) -> "Preset":
        """Decide ``pre_rope`` for ``model``, if it is open. Raises ``DataError`` if it is True and cannot be."""
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
        """Make an unfitted codec for one layer's keys; ``head_dim``, if given, is checked now, not by ``fit``."""
        return self.make_key_codec(head_dim)

    def value_codec(self, head_dim: int | None = None) -> Codec:
        """Make an unfitted codec for one layer's values."""
        return self.make_value_codec(head_dim)


def chain(*parts: Stage | Quantizer, kind: type[Chain] = Chain) -> Callable[[int | None], Codec]:
    """Describe a codec by its stages and, last, its quantizer: what is returned makes chains of copies of them."""
    return partial(_chain, parts, kind)


def _chain(parts: tuple, kind: type[Chain], head_dim: int | None) -> Codec:
    *stages, quantizer = copy.deepcopy(parts)
    return kind(stages, quantizer, head_dim)


PRESETS: dict[str, Callable[..., Preset]] = {}  # by name


def preset(function: Callable[..., Preset]) -> Callable[..., Preset]:
    """Register a function that makes a preset: ``make`` knows its name, its arguments must be of the annotated types,
    and the preset notes them (as the function does itself, where it names one)."""
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*positional, **named) -> Preset:
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            check_type(f"argument {name} of preset {function.__name__!r}", value, signature.parameters[name])
        made = function(*bound.args, **bound.kwargs)
        noted = {name: made.arguments.get(name, value) for name, value in bound.arguments.items()}
        return dataclasses.replace(made, arguments=noted)

    PRESETS[function.__name__] = checked
    return checked


def make(name: str, /, **arguments) -> Preset:
    """Make the preset called ``name``. Raises ``UnknownNameError`` or ``DataError`` for a wrong name, argument or
    type."""
    return call("preset", PRESETS, name, arguments)
