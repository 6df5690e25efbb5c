"""Plans: which layer is predicted from which, and how many bits each gets."""

import dataclasses
import itertools
import math
import re
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from vqkv.codecs.exact import Nothing
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.predictive import ROLES, LayerRole
from vqkv.codecs.predictor_kinds import Copy, Slice, make_predictor
from vqkv.errors import DataError
from vqkv.presets.preset import LayerPlan, Preset, RolePlan

SOURCE = re.compile(r"(K|V)(?:-([1-9]\d?))?")
SYMBOLS = {"K": "key", "V": "value"}
NOT_PREDICTED, CONSTANT = "none", "mean"
MIN_BITS = 0.05  # bits of a layer
STEPS = (0.5, 1.0, 1.5)  # of the first, second and last third of the layers, relative to each other


@dataclass(frozen=True)
class FromPrevious(LayerPlan):
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
        for role, names in zip(ROLES, (self.key_from, self.value_from)):
            parse_sources(role, names)

    def arrange(self, preset: Preset, trial) -> list[dict[str, RolePlan]]:
        plans = super().arrange(self.first, trial)[:1] + super().arrange(preset, trial)[1:]
        named = zip(ROLES, (self.key_from, self.value_from))
        for layer, (role, names) in itertools.product(range(1, len(plans)), named):
            if names == NOT_PREDICTED:
                continue
            sources = tuple((source, layer - back) for source, back in parse_sources(role, names) if back <= layer)
            predictor = make_predictor(self.kind, **self.arguments) if sources else make_predictor("linear")
            cross_fitted = self.cross_fitted and bool(sources)
            plans[layer][role] = RolePlan(plans[layer][role].make_codec, predictor, sources, cross_fitted)
        return plans


def parse_sources(role: str, names: str) -> list[tuple[str, int]]:
    """Parse ``"V-1+K"`` to ``[("value", 1), ("key", 0)]``, roles and how many layers back, of which ``role`` is
    predicted. Raises ``DataError`` for other names, and for roles that come later."""
    if names in (NOT_PREDICTED, CONSTANT):
        return []
    matches = [SOURCE.fullmatch(name) for name in names.split("+")]
    sources = [(SYMBOLS[match[1]], int(match[2] or 0)) for match in matches if match]
    unknown = any(back == 0 and (role, source) != ("value", "key") for source, back in sources)
    if unknown or len(set(sources)) < len(matches):
        raise DataError(
            f"sources {names!r} of a {role}: write e.g. 'K-1', 'V-1+K', 'mean' or 'none'; of the same layer only a "
            "value can read the key"
        )
    return sources


@dataclass(frozen=True)
class Budgeted(LayerPlan):
    """Bits where an error costs the model most: all layers and roles of ``plan`` together take ``bits`` a value, split
    for the lowest expected KL (``allocate``), measured with the preset as it is. Takes quantizers whose bits can be
    chosen; the bits of scales are not counted."""

    plan: LayerPlan
    bits: float

    def arrange(self, preset: Preset, trial) -> list[dict[str, RolePlan]]:
        bits = allocate(trial.cost_curves(preset, self.plan.arrange(preset, trial)), self.bits)
        plans = self.plan.arrange(preset, trial)  # predictors that have not learned yet
        return [
            {role: _with_bits(plan, bits[role, layer]) for role, plan in roles.items()}
            for layer, roles in enumerate(plans)
        ]


@dataclass(frozen=True)
class Joint(LayerPlan):
    """All layers' keys, and values, of equal shapes, stored by the first layer's codecs as one layer (KVTC)."""

    def arrange(self, preset: Preset, trial) -> list[dict[str, RolePlan]]:
        shapes = trial.shapes
        if len(set(map(tuple, shapes))) > 1:
            raise DataError(f"{preset.name} stores layers together, but their heads differ: {shapes}")
        heads, *dims = shapes[0]
        plans = super().arrange(preset, trial)
        plans[0] = {role: dataclasses.replace(plan, layers=len(shapes)) for role, plan in plans[0].items()}
        for layer in range(1, len(shapes)):
            slices = [Slice(layer * heads * dim, heads * dim) for dim in dims]
            plans[layer] = {role: RolePlan(Nothing, part, ((role, 0),)) for role, part in zip(ROLES, slices)}
        return plans


@dataclass(frozen=True)
class Graded(LayerPlan):
    """Finer steps for early layers (CacheGen): ``bits`` on average, by thirds of the layers as ``STEPS`` make."""

    bits: float

    def arrange(self, preset: Preset, trial) -> list[dict[str, RolePlan]]:
        less = [math.log2(STEPS[3 * layer // trial.num_layers]) for layer in range(trial.num_layers)]
        bits = [max(MIN_BITS, self.bits - each + sum(less) / len(less)) for each in less]
        plans = super().arrange(preset, trial)
        return [{role: _with_bits(plan, b) for role, plan in roles.items()} for roles, b in zip(plans, bits)]


@dataclass(frozen=True)
class Shared(LayerPlan):
    """KVSharer (Yang et al. 2024, section 3): layers read the cache of an earlier layer and store nothing. Layers are
    paired from the least alike on, and a pair is taken if the last hidden states keep a cosine similarity above
    ``threshold``, until there are ``pairs``."""

    pairs: int = 1
    threshold: float = 0.5

    def arrange(self, preset: Preset, trial) -> list[dict[str, RolePlan]]:
        source: dict[int, int] = {}  # layer -> the earlier one that it reads
        distances, pairs = trial.distances(), torch.triu_indices(trial.num_layers, trial.num_layers, offset=1)
        order = distances[pairs[0], pairs[1]].argsort(descending=True)  # the least alike first
        for earlier, later in pairs[:, order].mT.tolist():
            free = later not in source and earlier not in source and later not in source.values()
            if len(source) < self.pairs and free:
                wider = source | {later: earlier}
                if trial.similarity(self._reading(wider, preset, trial)) > self.threshold:
                    source = wider
        if len(source) < self.pairs:
            kept = f"only {len(source)} of {self.pairs} pairs of layers keep a similarity above {self.threshold}"
            raise DataError(f"{kept}: share fewer, or lower the threshold")
        return self._reading(source, preset, trial)

    def _reading(self, source: dict[int, int], preset: Preset, trial) -> list[dict[str, RolePlan]]:
        plans = super().arrange(preset, trial)
        for layer, earlier in source.items():
            plans[layer] = {role: RolePlan(Nothing, Copy(), ((role, earlier),)) for role in ROLES}
        return plans


def _with_bits(plan: RolePlan, bits: float) -> RolePlan:
    def make_codec(head_dim):
        return cast(Chain, plan.make_codec(head_dim)).with_bits(bits)

    return dataclasses.replace(plan, make_codec=make_codec)


def allocate(curves: dict[LayerRole, Tensor], budget: float) -> dict[LayerRole, float]:
    """Split bits among layers and roles: of each one's points (n, 2) of bits and cost, choose those that keep the sum
    of costs lowest with a mean of at most ``budget`` bits (Lagrange multipliers on the curves' convex hulls; Shoham &
    Gersho 1988). Raises ``DataError`` if even the fewest bits are too many, and for costs that are no numbers."""
    for (role, layer), curve in curves.items():
        if not curve.isfinite().all():
            raise DataError(f"the {role}s of layer {layer} cost infinity or NaN: check the model's weights and dtype")
    least = sum(curve[:, 0].min().item() for curve in curves.values()) / len(curves)
    if least > budget:
        raise DataError(f"{budget:g} bits a value, but {least:g} is the least that these codecs take: allow more")

    def choose(price: float) -> dict[LayerRole, float]:
        return {at: curve[(curve[:, 1] + price * curve[:, 0]).argmin(), 0].item() for at, curve in curves.items()}

    low, high = -60.0, 60.0  # of the price's logarithm; the highest buys the fewest bits
    for _ in range(60):  # halvings, until the ends are one number
        middle = (low + high) / 2
        affordable = sum(choose(2.0**middle).values()) <= budget * len(curves)
        low, high = (low, middle) if affordable else (middle, high)
    return choose(2.0**high)
