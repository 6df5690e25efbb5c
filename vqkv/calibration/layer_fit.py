"""Codecs and predictors fitted layer by layer, each on reconstructions of those before it (AQUA-KV, Algorithm 1)."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from vqkv.cache.compressor import Compressor
from vqkv.cache.settings import CacheSettings
from vqkv.calibration.captured import CapturedTokens, TensorFolder
from vqkv.calibration.cross_fit import CrossFit, cross_fit, folds_of
from vqkv.calibration.error_costs import cost_curves
from vqkv.codecs.pipeline import Codec
from vqkv.codecs.predictive import ROLES, LayerRole, Prediction, inputs, last_readers, side_by_side
from vqkv.codecs.predictor_kinds import Linear
from vqkv.kernels.precision import full_precision
from vqkv.models.load import describe
from vqkv.presets.preset import RolePlan
from vqkv.runtime.checks import whole_blocks

Plan = list[dict[str, RolePlan]]
SHARED_SEQS, COST_SEQS = 4, 1  # sequences that shared layers are tried on, and that errors are measured on


class ModelTrial:
    """Answers to what plans ask about a model: how unlike layers are, what sharing them (KVSharer) and errors cost.

    From captured keys and values, and from forward passes over the first few of their sequences."""

    def __init__(self, model, captured: CapturedTokens):
        self.model, self.captured = model, captured
        self.num_layers, self.shapes = captured.about["num_layers"], captured.about["shapes"]

    def distances(self) -> Tensor:
        """Compute Euclidean distances (num_layers, num_layers) between keys and values averaged over sequences."""
        rows = []
        for layer in range(self.num_layers):
            batches = (self.captured.batches(role, layer) for role in ROLES)
            sums = [sum((x.double().sum(0) for x in each), torch.zeros(())).flatten() for each in batches]
            rows.append(torch.cat(sums) / len(self.captured.tokens))
        means = torch.stack(rows)[None]
        return torch.cdist(means, means)[0]

    def cost_curves(self, preset, plan: Plan) -> dict[LayerRole, Tensor]:
        """Compute ``error_costs.cost_curves`` for ``preset`` arranged as ``plan`` says."""
        compressor, metrics = self._compressor(plan, preset.sink_tokens), self.captured.metrics(self.model)
        return cost_curves(self.model, compressor, self.captured.tokens[:COST_SEQS], metrics)

    @torch.no_grad()
    def similarity(self, plan: Plan) -> float:
        """Compute the cosine similarity, mean over tokens, of the last hidden states with the uncompressed ones."""
        tokens = self.captured.tokens[:SHARED_SEQS].to(self.model.device)
        cache = self._compressor(plan).new_cache(self.model, in_place=True)
        states, shared = (
            self.model(tokens, output_hidden_states=True, **reading).hidden_states[-1].float()
            for reading in ({"use_cache": False}, {"use_cache": True, "past_key_values": cache})
        )
        return F.cosine_similarity(states, shared, dim=-1).mean().item()

    def _compressor(self, plan: Plan, sink_tokens: int = 0) -> Compressor:
        codecs, predictions = LayerFit(self.model, self.captured, plan, sink_tokens).run()
        settings = CacheSettings(sink_tokens=sink_tokens, pre_rope=self.captured.pre_rope)
        return Compressor("trial", codecs, settings, describe(self.model), predictions=predictions)


class LayerFit:
    """The codecs and predictors of a ``plan``, and what is needed to fit them to ``captured`` tokens but the sinks.

    ``plans``, ``codecs`` and ``predictions`` are by role and layer, as is ``last_reader``: of what a layer restores."""

    def __init__(self, model, captured: CapturedTokens, plan: Plan, sink_tokens: int):
        self.captured, self.sink_tokens, self.device = captured, sink_tokens, model.device
        self.plans = {(role, layer): roles[role] for layer, roles in enumerate(plan) for role in ROLES}
        self.codecs: dict[LayerRole, Codec] = {}
        self.predictions: dict[LayerRole, Prediction] = {}
        for (role, layer), each in self.plans.items():
            codec = each.make_codec(captured.about["shapes"][layer][1 + ROLES.index(role)])
            if codec.weighted:
                metrics = captured.metrics(model, codec.costs)
                codec.weigh(torch.cat([metrics[role, layer + more] for more in range(each.layers)]))
            self.codecs[role, layer] = codec
        learning = {
            role_layer: Prediction(each.predictor, each.sources)
            for role_layer, each in self.plans.items()
            if each.predictor is not None and each.predictor.learns
        }
        self.last_reader = last_readers(learning)
        self.block = math.lcm(*(codec.block_tokens for codec in self.codecs.values())) if learning else 1

    def run(self, title: str | None = None) -> tuple[list[tuple[Codec, Codec]], dict[LayerRole, Prediction]]:
        """Fit layer by layer, keys before values. Returns (key codec, value codec) of every layer, and the predictions.
        ``title``: of the progress bar, if there is to be one."""
        with TensorFolder() as self.restored, full_precision(self.device):
            for role, layer in tqdm(self.plans, title, unit="role", disable=None if title else True):
                self._fit(role, layer)
        layers = range(len(self.plans) // len(ROLES))
        return [(self.codecs["key", layer], self.codecs["value", layer]) for layer in layers], self.predictions

    def _fit(self, role: str, layer: int) -> None:
        """Fit the predictor, if there is one, then the codec to its residual."""
        plan, codec, folds = self.plans[role, layer], self.codecs[role, layer], None
        predictor = plan.predictor
        if plan.cross_fitted and isinstance(predictor, Linear):
            folds = cross_fit(self._samples(role, layer), predictor)
            predictor = folds.complete if folds else None
        elif predictor is not None and predictor.learns:
            predictor.fit(lambda: ((x, y) for x, y, _ in self._samples(role, layer)))
        if predictor is not None:
            self.predictions[role, layer] = Prediction(predictor, plan.sources)
            if not predictor.learns:  # nothing is stored
                return
        for _ in range(0 if codec.ready else codec.passes):
            for _, residual, _ in self._residuals(role, layer, folds):
                codec.partial_fit(residual)
                if not codec.learns:
                    break
            codec.end_pass()
        codec.finalize()
        if (role, layer) in self.last_reader:
            for number, residual, predicted in self._residuals(role, layer, folds):
                self.restored.put(role, layer, number, codec.quantize_dequantize(residual) + predicted)
        for source in plan.sources:
            if self.last_reader[source] == (role, layer):
                self.restored.drop(*source)

    def _residuals(self, role: str, layer: int, folds: CrossFit | None) -> Iterator[tuple[int, Tensor, Tensor | float]]:
        """Yield number, residual and prediction of each batch; of a fold by the predictor that was not fitted to it."""
        prediction = self.predictions.get((role, layer))
        for number, x, restored in self._batches(role, layer, prediction.sources if prediction else ()):
            predicted: Tensor | float = 0.0
            if prediction and folds:
                rows, width = inputs(restored, prediction.sources, x), x.shape[1] * x.shape[3]
                flat = folds.held_out(rows, self._folds(number, x), width)
                predicted = flat.unflatten(-1, (x.shape[1], x.shape[3])).transpose(1, 2)
            elif prediction:
                predicted = prediction(restored, x)
            yield number, x - predicted, predicted

    def _samples(self, role: str, layer: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield a predictor's inputs (n, in_features), targets (n, out_features) and folds (n,), batch by batch."""
        sources = self.plans[role, layer].sources
        for number, x, restored in self._batches(role, layer, sources):
            rows = inputs(restored, sources, x)
            yield rows.flatten(0, 1), side_by_side(x).flatten(0, 1), self._folds(number, x).flatten()

    def _folds(self, number: int, x: Tensor) -> Tensor:
        return folds_of(number, len(x), x.shape[2], len(self.captured.tokens)).to(x.device)

    def _batches(self, role: str, layer: int, sources: tuple[LayerRole, ...]):
        """Yield number, fp32 keys or values (of all layers stored together) and restored sources of each batch."""
        layers = range(layer, layer + self.plans[role, layer].layers)
        for number, parts in enumerate(zip(*(self.captured.batches(role, each, self.device) for each in layers))):
            x = torch.cat(parts, dim=1)[:, :, self.sink_tokens :].float()
            restored = {source: self.restored.get(*source, number, self.device) for source in sources}
            yield number, whole_blocks(x, self.block), restored
