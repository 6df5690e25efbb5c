"""Presets: how a cache is stored, before any model is given."""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps

from vqkv.cache.settings import CacheSettings
from vqkv.codecs.pipeline import Chain, Codec
from vqkv.codecs.predictive import LayerRole
from vqkv.codecs.predictor_kinds import Predictor
from vqkv.codecs.stage import Quantizer, Stage
from vqkv.errors import DataError
from vqkv.models.rope import rotations
from vqkv.runtime.checks import call, check_type


@dataclass
class RolePlan:
    """One role of one layer: its codec's maker, what predicts it, and how many layers the codec stores together."""

    make_codec: Callable[..., Codec]
    predictor: Predictor | None = None
    sources: tuple[LayerRole, ...] = ()
    cross_fitted: bool = False
    layers: int = 1


class LayerPlan:
    """Store every layer as the preset says; subclasses predict layers from each other, or give them unequal bits."""

    def arrange(self, preset: "Preset", trial) -> list[dict[str, RolePlan]]:
        """Return for each layer the plan of its keys and of its values.

        ``trial`` (``calibration.layer_fit.ModelTrial``) answers what must be asked of the model. Raises ``DataError``
        for a model on which the plan cannot be carried out."""
        layers = range(trial.num_layers)
        return [{"key": RolePlan(preset.key_codec), "value": RolePlan(preset.value_codec)} for _ in layers]


@dataclass(frozen=True)
class Preset:
    """A way to store a cache. ``key_codec`` and ``value_codec`` make an unfitted codec for one layer; they check
    head_dim if it is given. The first ``sink_tokens`` and the last ``recent_window`` tokens stay in 16 bits; tokens are
    packed ``block_tokens`` at a time. ``pre_rope``: keys are stored before RoPE and rotated when read; None: where RoPE
    can be undone. ``plan``: which layers are predicted from which; ``if_too_few_tokens``: what is calibrated else."""

    name: str
    key_codec: Callable[..., Codec]
    value_codec: Callable[..., Codec]
    sink_tokens: int = 0
    recent_window: int = 0
    block_tokens: int = 1
    pre_rope: int | None = None
    arguments: dict = field(default_factory=dict)
    plan: LayerPlan | None = None
    if_too_few_tokens: "Preset | None" = None

    def __post_init__(self):
        _ = self.settings  # checks them

    @property
    def settings(self) -> CacheSettings:
        """Tokens that stay exact, and when others are packed."""
        pre_rope = True if self.pre_rope is None else self.pre_rope
        return CacheSettings(self.sink_tokens, self.recent_window, self.block_tokens, pre_rope)

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


def chain(*parts: Stage | Quantizer, kind: type[Chain] = Chain) -> Callable[..., Codec]:
    """Describe a codec by its stages and, last, its quantizer: what is returned makes chains of copies of them."""
    return partial(_chain, parts, kind)


def _chain(parts: tuple, kind: type[Chain], head_dim: int | None = None) -> Codec:
    *stages, quantizer = copy.deepcopy(parts)
    return kind(stages, quantizer, head_dim)


PRESETS: dict[str, Callable[..., Preset]] = {}  # by name
OF_EVERY_PRESET = {"sink_tokens": int, "recent_window": int, "pre_rope": bool | int | None}  # fields of ``Preset``


def preset(function: Callable[..., Preset]) -> Callable[..., Preset]:
    """Register a function that makes a preset: ``make`` knows its name, its arguments must be of the annotated types,
    and the preset notes them (as the function does itself, where it names one). Every preset takes the settings
    ``OF_EVERY_PRESET``, too, in place of those that the function chose."""
    own = inspect.signature(function)
    describe = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY, default=...)
    settings = [describe(name, annotation=kind) for name, kind in OF_EVERY_PRESET.items()]
    signature = own.replace(parameters=sorted([*own.parameters.values(), *settings], key=lambda each: each.kind))

    @wraps(function)
    def checked(*positional, **named) -> Preset:
        given = {name: named.pop(name) for name in OF_EVERY_PRESET if name in named}
        bound = own.bind(*positional, **named)
        bound.apply_defaults()
        for name, value in (bound.arguments | given).items():
            check_type(f"argument {name} of preset {function.__name__!r}", value, signature.parameters[name])
        made = function(*bound.args, **bound.kwargs)
        noted = {name: made.arguments.get(name, value) for name, value in bound.arguments.items()}
        return dataclasses.replace(made, arguments=noted | given, **given)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    PRESETS[function.__name__] = checked
    return checked


def make(name: str, /, **arguments) -> Preset:
    """Make the preset called ``name``. Raises ``UnknownNameError`` or ``DataError`` for what does not fit."""
    return call("preset", PRESETS, name, arguments)
