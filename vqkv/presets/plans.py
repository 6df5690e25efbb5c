"""Plans of who is predicted from whom: what a preset with predictors arranges for each layer of a model, of which it
may ask a ``trial`` (``calibration.sharing.ModelTrial``)."""

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from vqkv.codecs.exact import Nothing
from vqkv.codecs.pipeline import Codec
from vqkv.codecs.predictive import ROLES, Place
from vqkv.codecs.predictor_kinds import Copy, Predictor, Slice, make_predictor
from vqkv.errors import DataError
from vqkv.runtime.checks import check_whole

SOURCE = re.compile(r"(K|V)(?:-([1-9]\d?))?")
SYMBOLS = {"K": "key", "V": "value"}
NOT_PREDICTED, CONSTANT = "none", "mean"
LEAST = 0.05  # bits of a layer
BISECTIONS = 60


@dataclass
class RolePlan:
    """One role of one layer: its codec's maker, what predicts it, and how many layers the codec stores together."""

    make_codec: Callable[[int | None], Codec]
    predictor: Predictor | None = None
    sources: tuple[Place, ...] = ()
    cross_fitted: bool = False
    layers: int = 1


@dataclass(frozen=True)
class FromPrevious:
    """AQUA-KV: every layer but the first is predicted from reconstructions of those before it.

    ``key_from`` and ``value_from`` name sources with ``+`` between them: ``K-1`` the keys one layer before, ``V-2`` the
    values two before, ``K`` (for values) the layer's own keys; sources before the first layer are left out. ``mean``
    is a constant, ``none`` no prediction. The first layer is stored as ``first`` (a preset) says. ``cross_fitted``:
    what predictions leave is learned from on held-out tokens, and a linear predictor is there only where these gain by
    it (``calibration.cross_fit``; AQUA-KV does without).
    """

    first: object
    kind: str = "linear"
    key_from: str = "K-1"
    value_from: str = "V-1+K"
    arguments: dict = field(default_factory=dict)
    cross_fitted: bool = False

    def __post_init__(self):
        make_predictor(self.kind, **self.arguments)
        for role, sources in self._sources.items():
            _parse(sources, role)

    def arrange(self, preset, trial) -> list[dict[str, RolePlan]]:
        """For each layer, the plan of its keys and of its values. Raises ``DataError`` for sources that none has."""
        for role, sources in self._sources.items():
            _check_reach(sources, role, trial.num_layers)
        return [_unpredicted(self.first)] + [
            {role: self._role(getattr(preset, f"{role}_codec"), role, self._sources[role], layer) for role in ROLES}
            for layer in range(1, trial.num_layers)
        ]

    @property
    def _sources(self) -> dict[str, str]:
        return {"key": self.key_from, "value": self.value_from}

    def _role(self, make_codec, role: str, sources: str, layer: int) -> RolePlan:
        if sources == NOT_PREDICTED:
            return RolePlan(make_codec)
        places = tuple((name, layer - back) for name, back in _parse(sources, role) if back <= layer)
        predictor = make_predictor(self.kind, **self.arguments) if places else make_predictor("linear")
        return RolePlan(make_codec, predictor, places, self.cross_fitted and bool(places))


@dataclass(frozen=True)
class Unpredicted:
    """Every layer as the preset stores it, none predicted from another."""

    def arrange(self, preset, trial) -> list[dict[str, RolePlan]]:
        """For each layer, the plan of its keys and of its values."""
        return [_unpredicted(preset)] * trial.num_layers


@dataclass(frozen=True)
class Budgeted:
    """Bits where an error costs the model most: all places of ``plan`` together take ``bits`` a value, and each as many
    as keep the expected KL lowest (``costs``, ``allocate``), measured with the preset as it is. Takes
    quantizers whose bits can be chosen, EntropyCodedScalar and ResidualVQ; the bits of scales are not counted."""

    plan: FromPrevious | Unpredicted
    bits: float

    def arrange(self, preset, trial) -> list[dict[str, RolePlan]]:
        """For each layer, the plan of its keys and values. Raises ``DataError`` if they cannot be had for the bits."""
        bits = allocate(trial.cost_curves(preset, self.plan.arrange(preset, trial)), self.bits)
        return [
            {role: dataclasses.replace(plan, make_codec=partial(_with_bits, plan.make_codec, bits[role, layer]))
             for role, plan in roles.items()}
            for layer, roles in enumerate(self.plan.arrange(preset, trial))
        ]  # fmt: skip


@dataclass(frozen=True)
class Together:
    """All layers' keys, and values, stored by the first layer's codecs as one layer of so many more heads (KVTC)."""

    def arrange(self, preset, trial) -> list[dict[str, RolePlan]]:
        """For each layer, the plan of its keys and values. Raises ``DataError`` for layers of unequal shapes."""
        shapes = trial.shapes
        if len(set(map(tuple, shapes))) > 1:
            raise DataError(f"{preset.name} stores layers together, but their heads differ: {shapes}")
        heads, *dims = shapes[0]
        first = {role: dataclasses.replace(plan, layers=len(shapes)) for role, plan in _unpredicted(preset).items()}
        return [first] + [
            {role: RolePlan(Nothing, Slice(layer * heads * dim, heads * dim), ((role, 0),))
             for role, dim in zip(ROLES, dims, strict=True)}
            for layer in range(1, len(shapes))
        ]  # fmt: skip


STEPS = (0.5, 1.0, 1.5)  # of the first, second and last third of the layers, relative to each other


@dataclass(frozen=True)
class Graded:
    """Finer steps for early layers (CacheGen): ``bits`` on average, by thirds of the layers as ``STEPS`` make."""

    bits: float

    def arrange(self, preset, trial) -> list[dict[str, RolePlan]]:
        """For each layer, the plan of its keys and of its values."""
        less = [math.log2(STEPS[3 * layer // trial.num_layers]) for layer in range(trial.num_layers)]
        bits = [max(LEAST, self.bits - each + sum(less) / len(less)) for each in less]
        return [
            {role: RolePlan(partial(_with_bits, getattr(preset, f"{role}_codec"), each)) for role in ROLES}
            for each in bits
        ]


def _unpredicted(preset) -> dict[str, RolePlan]:
    return {"key": RolePlan(preset.key_codec), "value": RolePlan(preset.value_codec)}


def _with_bits(make_codec, bits: float, head_dim: int | None) -> Codec:
    return make_codec(head_dim).with_bits(bits)


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

    def arrange(self, preset, trial) -> list[dict[str, RolePlan]]:
        """For each layer, the plan of keys and values. Raises ``DataError`` for too few pairs above the threshold."""
        if self.pairs >= trial.num_layers:
            raise DataError(  # every layer but the first could read another
                f"{self.pairs} pairs of layers to share, but a model of {trial.num_layers} layers has at most "
                f"{trial.num_layers - 1}: share fewer"
            )
        source: dict[int, int] = {}
        distances, pairs = trial.distances(), torch.triu_indices(trial.num_layers, trial.num_layers, offset=1)
        order = distances[pairs[0], pairs[1]].argsort(descending=True)  # the least alike first
        for earlier, later in pairs[:, order].mT.tolist():
            if len(source) == self.pairs:
                break
            if later in source or earlier in source or later in source.values():
                continue
            wider = source | {later: earlier}
            if trial.similarity(self._plan(preset, trial.num_layers, wider)) > self.threshold:
                source = wider
        if len(source) < self.pairs:
            kept = f"only {len(source)} of {self.pairs} pairs of layers keep a similarity above {self.threshold}"
            raise DataError(f"{kept}: share fewer, or lower the threshold")
        return self._plan(preset, trial.num_layers, source)

    def _plan(self, preset, num_layers: int, source: dict[int, int]) -> list[dict[str, RolePlan]]:
        own = _unpredicted(preset)
        return [
            {role: RolePlan(Nothing, Copy(), ((role, source[layer]),)) for role in own} if layer in source else own
            for layer in range(num_layers)
        ]


def _check_reach(sources: str, role: str, num_layers: int) -> None:
    """Raise ``DataError`` if ``sources`` are named, but exist in no layer after the first."""
    nearest = min((back for _, back in _parse(sources, role)), default=0)
    if nearest >= num_layers > 1:
        raise DataError(
            f"sources {sources!r} of a {role}: a model of {num_layers} layers has none of them, "
            f"name one at most {num_layers - 1} layers back"
        )


def _parse(sources: str, role: str) -> list[tuple[str, int]]:
    """``"V-1+K"`` -> [("value", 1), ("key", 0)]: role and how many layers back."""
    if sources in (NOT_PREDICTED, CONSTANT):
        return []
    found = [SOURCE.fullmatch(part) for part in sources.split("+")]
    if len({match[0] for match in found if match}) < len(found):
        raise DataError(f"sources {sources!r} of a {role}: write e.g. 'K-1', 'V-1+K', 'mean' or 'none'")
    places = [(SYMBOLS[match[1]], int(match[2] or 0)) for match in found if match]
    if any(back == 0 and (role, name) != ("value", "key") for name, back in places):
        raise DataError(f"sources {sources!r} of a {role}: of the same layer only a value can read the key")
    return places


def allocate(curves: dict[Place, Tensor], budget: float) -> dict[Place, float]:
    """Bits of each place: of its points (n, 2) of bits and cost, the one that keeps the sum of costs lowest with a mean
    of at most ``budget`` bits (Lagrange multipliers on the curves' convex hulls; Shoham & Gersho 1988). Raises
    ``DataError`` if even the fewest bits are too many, and for costs that are no numbers."""
    for place, curve in curves.items():
        if not curve.isfinite().all():
            raise DataError(f"what {place} costs is infinite or NaN: check the model's weights and dtype")
    least = sum(curve[:, 0].min().item() for curve in curves.values()) / len(curves)
    if least > budget:
        raise DataError(f"{budget:g} bits a value, but {least:g} is the least that these codecs take: allow more")

    def choose(price: float) -> dict[Place, float]:
        return {place: curve[(curve[:, 1] + price * curve[:, 0]).argmin(), 0].item() for place, curve in curves.items()}

    low, high = -60.0, 60.0  # of the price's logarithm; the highest buys the fewest bits
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        affordable = sum(choose(2.0**middle).values()) <= budget * len(curves)
        low, high = (low, middle) if affordable else (middle, high)
    return choose(2.0**high)
