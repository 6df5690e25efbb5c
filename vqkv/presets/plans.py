"""Plans: which layer is predicted from which, and how many bits each gets."""

import dataclasses
import math
import re
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from vqkv.codecs.base import Codec
from vqkv.codecs.exact import Nothing
from vqkv.codecs.predictive import ROLES, Place
from vqkv.codecs.predictor_kinds import Copy, Slice, make_predictor
from vqkv.errors import DataError
from vqkv.presets.preset import Preset, RolePlan
from vqkv.runtime.checks import check_whole

SOURCE = re.compile(r"(K|V)(?:-([1-9]\d?))?")
SYMBOLS = {"K": "key", "V": "value"}
NOT_PREDICTED, CONSTANT = "none", "mean"
LEAST = 0.05  # bits of a layer
STEPS = (0.5, 1.0, 1.5)  # of the first, second and last third of the layers, relative to each other


@dataclass(frozen=True)
class Unpredicted:
    """Every layer as the preset stores it, none predicted from another."""

    def arrange(self, preset: Preset, trial) -> list[dict[str, RolePlan]]:
        """Return for each layer the plan of its keys and of its values."""
        return [_as_stored(preset)] * trial.num_layers


@dataclass(frozen=True)
class FromPrevious:
    """AQUA-KV: every layer but the first is predicted from reconstructions of those before it.

    ``key_from`` and ``value_from`` name sources with ``+`` between them: ``K-1`` the keys one layer before, ``V-2`` the
    values two before, ``K`` (for values) the layer's own keys; sources before the first layer are left out. ``mean``
    is a constant, ``none`` no prediction. The first layer is stored as ``first`` says. ``cross_fitted``: codecs learn
    from residuals of held-out tokens, and a linear predictor is there only where these gain by it
    (``calibration.cross_fit``; AQUA-KV does without).
    """

    first: Preset
    kind: str = "linear"
    key_from: str = "K-1"
    value_from: str = "V-1+K"
    arguments: dict = field(default_factory=dict)
    cross_fitted: bool = False

    def __post_init__(self):
        make_predictor(self.kind, **self.arguments)  # refuses what it does not know
        self._sources()

    def arrange(self, preset: Preset, trial) -> list[dict[str, RolePlan]]:
        """Return for each layer the plan of its keys and of its values. Raises ``DataError`` for sources that no layer
        has."""
        plans = [_as_stored(self.first)] + [_as_stored(preset) for _ in range(trial.num_layers - 1)]
        for role, sources in self._sources().items():
            if min((back for _, back in sources), default=0) >= trial.num_layers > 1:
                raise DataError(
                    f"sources {getattr(self, f'{role}_from')!r} of a {role}: a model of {trial.num_layers} layers has "
                    f"none of them, name one at most {trial.num_layers - 1} layers back"
                )
            for layer, plan in enumerate(plans):
                if layer == 0 or getattr(self, f"{role}_from") == NOT_PREDICTED:
                    continue
                places = tuple((name, layer - back) for name, back in sources if back <= layer)
                predictor = make_predictor(self.kind, **self.arguments) if places else make_predictor("linear")
                cross_fitted = self.cross_fitted and bool(places)
                plan[role] = RolePlan(plan[role].make_codec, predictor, places, cross_fitted)
        return plans

    def _sources(self) -> dict[str, list[tuple[str, int]]]:
        """Parse ``"V-1+K"`` to ``[("value", 1), ("key", 0)]``, role and how many layers back, for each role."""
        parsed: dict[str, list[tuple[str, int]]] = {role: [] for role in ROLES}
        for role, sources in (("key", self.key_from), ("value", self.value_from)):
            if sources in (NOT_PREDICTED, CONSTANT):
                continue
            matches = [SOURCE.fullmatch(part) for part in sources.split("+")]
            if len({match[0] for match in matches if match}) < len(matches):
                raise DataError(f"sources {sources!r} of a {role}: write e.g. 'K-1', 'V-1+K', 'mean' or 'none'")
            parsed[role] = [(SYMBOLS[match[1]], int(match[2] or 0)) for match in matches if match]
            if any(back == 0 and (role, name) != ("value", "key") for name, back in parsed[role]):
                raise DataError(f"sources {sources!r} of a {role}: of the same layer only a value can read the key")
        return parsed


@dataclass(frozen=True)
class Budgeted:
    """Bits where an error costs the model most: all layers and roles of ``plan`` together take ``bits`` a value, split
    for the lowest expected KL (``allocate``), measured with the preset as it is. Takes quantizers whose bits can be
    chosen; the bits of scales are not counted."""

    plan: FromPrevious | Unpredicted
    bits: float

    def arrange(self, preset: Preset, trial) -> list[dict[str, RolePlan]]:
        """Return for each layer the plan of its keys and values. Raises ``DataError`` if ``bits`` are too few."""
        bits = allocate(trial.cost_curves(preset, self.plan.arrange(preset, trial)), self.bits)
        plans = self.plan.arrange(preset, trial)  # predictors that have not learned yet
        return [
            {role: dataclasses.replace(plan, make_codec=partial(_with_bits, plan.make_codec, bits[role, layer]))
             for role, plan in roles.items()}
            for layer, roles in enumerate(plans)
        ]  # fmt: skip


@dataclass(frozen=True)
class Joint:
    """All layers' keys, and values, stored by the first layer's codecs as one layer of so many more heads (KVTC)."""

    def arrange(self, preset: Preset, trial) -> list[dict[str, RolePlan]]:
        """Return for each layer the plan of its keys and values. Raises ``DataError`` for layers of unequal shapes."""
        shapes = trial.shapes
        if len(set(map(tuple, shapes))) > 1:
            raise DataError(f"{preset.name} stores layers together, but their heads differ: {shapes}")
        heads, *dims = shapes[0]
        first = {role: dataclasses.replace(plan, layers=len(shapes)) for role, plan in _as_stored(preset).items()}
        return [first] + [
            {role: RolePlan(Nothing, Slice(layer * heads * dim, heads * dim), ((role, 0),))
             for role, dim in zip(ROLES, dims, strict=True)}
            for layer in range(1, len(shapes))
        ]  # fmt: skip


@dataclass(frozen=True)
class Graded:
    """Finer steps for early layers (CacheGen): ``bits`` on average, by thirds of the layers as ``STEPS`` make."""

    bits: float

    def arrange(self, preset: Preset, trial) -> list[dict[str, RolePlan]]:
        """Return for each layer the plan of its keys and of its values."""
        less = [math.log2(STEPS[3 * layer // trial.num_layers]) for layer in range(trial.num_layers)]
        bits = [max(LEAST, self.bits - each + sum(less) / len(less)) for each in less]
        return [
            {role: RolePlan(partial(_with_bits, plan.make_codec, each)) for role, plan in _as_stored(preset).items()}
            for each in bits
        ]


@dataclass(frozen=True)
class Shared:
    """KVSharer (Yang et al. 2024, section 3): whole layers read the cache of an earlier layer and store nothing. Layers
    are paired from the least alike on, and a pair is taken if the last hidden states keep a cosine similarity above
    ``threshold``, until there are ``pairs``."""

    pairs: int = 1
    threshold: float = 0.5

    def __post_init__(self):
        check_whole("pairs", self.pairs, 1, 4096)
        if not -1 <= self.threshold < 1:
            raise DataError(f"threshold {self.threshold!r} is no cosine similarity from -1 to below 1")

    def arrange(self, preset: Preset, trial) -> list[dict[str, RolePlan]]:
        """Return for each layer the plan of keys and values. Raises ``DataError`` for too few pairs that may share."""
        if self.pairs >= trial.num_layers:
            raise DataError(  # every layer but the first could read another
                f"{self.pairs} pairs of layers to share, but a model of {trial.num_layers} layers has at most "
                f"{trial.num_layers - 1}: share fewer"
            )
        source: dict[int, int] = {}  # layer -> the earlier one that it reads
        distances, pairs = trial.distances(), torch.triu_indices(trial.num_layers, trial.num_layers, offset=1)
        order = distances[pairs[0], pairs[1]].argsort(descending=True)  # the least alike first
        for earlier, later in pairs[:, order].mT.tolist():
            free = later not in source and earlier not in source and later not in source.values()
            if len(source) < self.pairs and free:
                wider = source | {later: earlier}
                if trial.similarity(self._plan(preset, trial.num_layers, wider)) > self.threshold:
                    source = wider
        if len(source) < self.pairs:
            kept = f"only {len(source)} of {self.pairs} pairs of layers keep a similarity above {self.threshold}"
            raise DataError(f"{kept}: share fewer, or lower the threshold")
        return self._plan(preset, trial.num_layers, source)

    def _plan(self, preset: Preset, num_layers: int, source: dict[int, int]) -> list[dict[str, RolePlan]]:
        return [
            {role: RolePlan(Nothing, Copy(), ((role, source[layer]),)) for role in ROLES}
            if layer in source
            else _as_stored(preset)
            for layer in range(num_layers)
        ]


def _as_stored(preset: Preset) -> dict[str, RolePlan]:
    return {"key": RolePlan(preset.key_codec), "value": RolePlan(preset.value_codec)}


def _with_bits(make_codec, bits: float, head_dim: int | None) -> Codec:
    return make_codec(head_dim).with_bits(bits)


def allocate(curves: dict[Place, Tensor], budget: float) -> dict[Place, float]:
    """Split bits among layers and roles: of each one's points (n, 2) of bits and cost, choose those that keep the sum
    of costs lowest with a mean of at most ``budget`` bits (Lagrange multipliers on the curves' convex hulls; Shoham &
    Gersho 1988). Raises ``DataError`` if even the fewest bits are too many, and for costs that are no numbers."""
    for place, curve in curves.items():
        if not curve.isfinite().all():
            raise DataError(f"what {place} costs is infinite or NaN: check the model's weights and dtype")
    least = sum(curve[:, 0].min().item() for curve in curves.values()) / len(curves)
    if least > budget:
        raise DataError(f"{budget:g} bits a value, but {least:g} is the least that these codecs take: allow more")

    def choose(price: float) -> dict[Place, float]:
        return {place: curve[(curve[:, 1] + price * curve[:, 0]).argmin(), 0].item() for place, curve in curves.items()}

    low, high = -60.0, 60.0  # of the price's logarithm; the highest buys the fewest bits
    for _ in range(60):  # halvings, until the ends are one number
        middle = (low + high) / 2
        affordable = sum(choose(2.0**middle).values()) <= budget * len(curves)
        low, high = (low, middle) if affordable else (middle, high)
    return choose(2.0**high)
