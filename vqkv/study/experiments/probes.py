"""Published phenomena measured on a model: outlier channels, attention sinks, EVR between any of its parts."""

import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vqkv.codecs.predictive import side_by_side
from vqkv.errors import DataError
from vqkv.models.capture import capture, check_tokens
from vqkv.models.layers import kv_layers
from vqkv.presets import Preset
from vqkv.study.metrics import bits_saved

Name = Hashable  # what a block of features, (samples, width), is called
PART = re.compile(r"([KV])(?:-([1-9]\d*))?(?:@T-([1-9]\d*))?(?:~(\w+))?")


def channel_outlier_ratio(x: torch.Tensor) -> torch.Tensor:
    """(batch, num_kv_heads, seq_len, head_dim) -> (num_kv_heads,): the largest channel's mean |x| over the median's."""
    size = x.float().abs().mean(dim=(0, 2))
    return size.amax(-1) / size.median(-1).values


@torch.inference_mode()
def sink_strength(model, tokens: torch.Tensor, skip: int = 16, batch_size: int = 1) -> torch.Tensor:
    """Measure the mean attention (num_layers, num_heads) to the first token after position ``skip``, eagerly."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        sums = []
        for batch in tokens.split(batch_size):
            maps = model(batch.to(model.device), output_attentions=True, use_cache=False).attentions
            sums.append(torch.stack([m[:, :, skip:, 0].float().mean(dim=2).sum(dim=0) for m in maps]))
    finally:
        model.set_attn_implementation(before)
    return torch.stack(sums).sum(0).cpu() / len(tokens)


# (captured keys or values, "K" or "V", layer) -> the same shape
Form = Callable[[torch.Tensor, str, int], torch.Tensor]


class Block(NamedTuple):
    """Features of a token that probes read or predict: one role of one layer, ``lag`` tokens back, in some form."""

    role: str
    layer: int
    lag: int = 0
    form: str = ""


@dataclass(frozen=True)
class Probe:
    """A linear map to ``target`` from ``sources``, for every layer in which all of these exist.

    ``K`` and ``V`` are the layer's own keys and values, ``K-1`` those of the layer before, ``K@T-1`` those of the token
    before, ``K~name`` those in the form called ``name``; sources are joined by ``+`` (``V-1+K``).
    """

    target: str
    sources: str

    def blocks(self, layer: int) -> tuple[list[Block], Block]:
        """Return sources and target in ``layer``; a source of a layer that does not exist has a negative one."""
        return [_block(text, layer) for text in self.sources.split("+")], _block(self.target, layer)

    def exists(self, layer: int) -> bool:
        """Tell whether all sources exist there."""
        return min(block.layer for block in self.blocks(layer)[0]) >= 0


class Gram:
    """Counts, sums and sums of products a'b over samples, for the pairs of blocks that the regressions to come need.
    From the sums of some samples follow the coefficients of every regression among the blocks (``solve``), and from
    those of other samples how well they predict there (``explained``): no sample is kept or seen twice."""

    def __init__(self, regressions: Iterable[tuple[Sequence[Name], Name]]):
        self.count = 0
        self.sums: dict[Name, Tensor] = {}
        self.products: dict[tuple[Name, Name], Tensor] = {}
        self._partners: dict[Name, list[Name]] = {}  # of each block, those whose products with it are needed
        for sources, target in regressions:
            for a, b in [*itertools.product(sources, [*sources, target]), (target, target)]:
                if b not in self._partners.get(a, []) and a not in self._partners.get(b, []):
                    self._partners.setdefault(a, []).append(b)

    def accumulate(self, block: Callable[[Name], Tensor]) -> None:
        """Add samples: ``block(name)`` gives (samples, width). Raises ``DataError`` for NaN or infinity."""
        for first, partners in self._partners.items():
            x = block(first).double()
            self.sums[first] = self.sums.get(first, 0) + x.sum(dim=0)
            for second in partners:
                product = x.T @ (x if second == first else block(second).double())
                self.products[first, second] = self.products.get((first, second), 0) + product
        if bad := [name for name, total in self.sums.items() if not total.isfinite().all()]:
            raise DataError(f"block {bad[0]} holds NaN or infinity: check the model's weights and dtype")
        self.count += len(x)

    def mean(self, name: Name) -> Tensor:
        """Return the block's mean (width,)."""
        return self.sums[name] / self.count

    def moment(self, a: Name, b: Name) -> Tensor:
        """Return the mean of a'b, not centred: (width of a, width of b)."""
        return (self.products[b, a].T if (b, a) in self.products else self.products[a, b]) / self.count

    def covariance(self, rows: Sequence[Name], columns: Sequence[Name]) -> Tensor:
        """Return covariances of the blocks ``rows``, side by side, with ``columns``."""
        means = {name: self.mean(name) for name in {*rows, *columns}}
        parts = [[self.moment(a, b) - means[a].outer(means[b]) for b in columns] for a in rows]
        return torch.cat([torch.cat(row, dim=1) for row in parts])

    def solve(self, sources: Sequence[Name], target: Name, strength: float) -> Tensor:
        """Return coefficients W of ``target`` ~ ``sources`` W + bias, ``Ridge``'s penalty; or raise ``DataError``."""
        squares = torch.cat([self.moment(name, name).diagonal() for name in sources])
        penalty = torch.full_like(squares, strength * squares.mean().item()).diag()
        within, cross = self.covariance(sources, sources) + penalty, self.covariance(sources, [target])
        weights, failed = torch.linalg.solve_ex(within, cross)
        if failed or not weights.isfinite().all():
            raise DataError(
                f"sources {', '.join(map(str, sources))} are zero or depend on each other at strength {strength:g}: "
                "leave some out, give a larger strength, or more samples"
            )
        return weights

    def explained(self, weights: Tensor, sources: Sequence[Name], target: Name) -> float:
        """Return the EVR on these samples, 1 - Var(y - x W) / Var(y), of weights that other samples gave."""
        variance = self.covariance([target], [target]).diagonal().sum().item()
        cross, within = self.covariance(sources, [target]), self.covariance(sources, sources)
        return (weights * (2 * cross - within @ weights)).sum().item() / variance

    def mean_share(self, name: Name, mean: Tensor) -> float:
        """Return the part of samples' mean square that a constant (width,) explains, 1 - E|y - mean|^2 / E|y|^2."""
        return (mean @ (2 * self.mean(name) - mean)).item() / self.moment(name, name).diagonal().sum().item()


def probe_sums(
    model, tokens: torch.Tensor, probes: list[Probe], skip: int = 4, batch_size: int = 4, pre_rope: int = True,
    forms: dict[str, Form] | None = None,
) -> Gram:  # fmt: skip
    """Return sums that all ``probes`` need of ``tokens`` (num_seqs, seq_len), in memory that does not grow with them.

    Sequences are independent. The first ``skip`` tokens of each (attention sinks), and for all probes alike as many
    more as the furthest token back that any of them reads, are no samples. At most ``batch_size`` sequences are held at
    a time. ``forms``: what ``~name`` stands for. Raises ``DataError`` for too short sequences.
    """
    check_tokens(model, tokens)
    layers, forms = range(len(kv_layers(model))), forms or {}
    regressions = [probe.blocks(layer) for probe in probes for layer in layers if probe.exists(layer)]
    used = {block for sources, target in regressions for block in (*sources, target)}
    start = skip + max((block.lag for block in used), default=0)
    if tokens.shape[1] <= start:
        raise DataError(f"{tokens.shape[1]} tokens leave none after the first {start}: use longer sequences")
    gram = Gram(regressions)
    for batch in tokens.tensor_split(math.ceil(len(tokens) / batch_size)):  # even shares, none of one sequence alone
        gram.accumulate(_features(capture(model, batch, batch_size, pre_rope), forms, start))
    return gram


def explained_variance(train: Gram, test: Gram, probes: list[Probe], num_layers: int, strength: float) -> list[dict]:
    """Fit on ``train``, judge on ``test``: a row per probe and layer with held-out EVR and the ``bits`` that it saves.

    ``mean_share``: how much of the target's mean square its training mean explains. ``strength``: of the ridge.
    """
    rows = []
    for probe in probes:
        for layer in filter(probe.exists, range(num_layers)):
            sources, target = probe.blocks(layer)
            weights = train.solve(sources, target, strength)
            evr = test.explained(weights, sources, target)
            row = {"target": probe.target, "sources": probe.sources, "layer": layer}
            row |= {"train_tokens": train.count, "evr": evr, "bits": bits_saved(evr)}
            rows.append(row | {"mean_share": test.mean_share(target, train.mean(target))})
    return rows


def shuffled(seed: int) -> Form:
    """Make a form for targets: tokens in random order, with random signs as the order alone leaves a mean."""
    generator = torch.Generator().manual_seed(seed)

    def form(x: torch.Tensor, role: str, layer: int) -> torch.Tensor:
        tokens = x.transpose(1, 2).flatten(0, 1)
        order = torch.randperm(len(tokens), generator=generator)
        signs = 2 * torch.randint(2, (len(tokens), 1, 1), generator=generator) - 1
        mixed = tokens[order.to(x.device)] * signs.to(x)
        return mixed.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)

    return form


def reconstructed(preset: Preset) -> Form:
    """Make a form: reconstructions by ``preset``'s codecs, one per role and layer, fitted on their first batch."""
    codecs = {}

    def form(x: torch.Tensor, role: str, layer: int) -> torch.Tensor:
        if (role, layer) not in codecs:
            make = {"K": preset.key_codec, "V": preset.value_codec}[role]
            codec = make(x.shape[-1])
            codecs[role, layer] = (codec if codec.ready else codec.fit(x)).to(x.device)  # fp16 has nothing to learn
        return codecs[role, layer].decode(codecs[role, layer].encode(x))

    return form


def _block(text: str, layer: int) -> Block:
    match = PART.fullmatch(text)
    assert match, text
    role, back, lag, form = match.groups()
    return Block(role, layer - int(back or 0), int(lag or 0), form or "")


def _features(captured, forms: dict[str, Form], start: int):
    """Return a function of a block to its features (samples, width): all heads, tokens from ``start`` on."""
    roles, formed = dict(zip("KV", captured, strict=True)), {}

    def features(block: Block) -> torch.Tensor:
        key = block.role, block.layer, block.form
        if key not in formed:
            x = roles[block.role][block.layer]
            formed[key] = forms[block.form](x, block.role, block.layer) if block.form else x
        x = formed[key]
        return side_by_side(x[:, :, start - block.lag : x.shape[2] - block.lag]).flatten(0, 1).float()

    return features
