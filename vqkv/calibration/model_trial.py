"""Answers to what plans ask about a model: how unlike layers are, what sharing them (KVSharer) and errors cost."""

from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from vqkv.cache.compressor import Compressor
from vqkv.cache.settings import CacheSettings
from vqkv.calibration.error_costs import cost_curves
from vqkv.calibration.layer_fit import fit_layers
from vqkv.calibration.captured import CapturedTokens
from vqkv.codecs.predictive import ROLES, Place, Prediction
from vqkv.models.load import describe
from vqkv.presets.plans import RolePlan

NUM_SEQS, COST_SEQS = 4, 1  # sequences that shared layers are tried on, and each place's errors


class ModelTrial:
    """Answers from captured keys and values, and from forward passes over the first few of their sequences."""

    def __init__(self, model, captured: CapturedTokens):
        self.model, self.captured = model, captured
        self.num_layers, self.shapes = captured.about["num_layers"], captured.about["shapes"]

    def distances(self) -> Tensor:
        """(num_layers, num_layers): Euclidean distances between layers' keys and values averaged over sequences."""
        means = []
        for layer in range(self.num_layers):
            totals = [sum(x.double().sum(0) for x in self.captured.batches((role, layer))) for role in ROLES]
            means.append(torch.cat([total.flatten() for total in totals]) / len(self.captured.tokens))
        return torch.cdist(torch.stack(means)[None], torch.stack(means)[None])[0]

    def metrics(self, costs: str = "loss") -> dict[Place, Tensor]:
        """``CapturedTokens.metrics``."""
        return self.captured.metrics(self.model, costs)

    def cost_curves(self, preset, plan: list[dict[str, RolePlan]]) -> dict[Place, Tensor]:
        """``costs.cost_curves`` for ``preset`` arranged as ``plan`` says."""
        codecs, predictions = fit_layers(preset, plan, self.captured, self, self.model.device, progress=False)
        settings = CacheSettings(sink_tokens=preset.sink_tokens, pre_rope=preset.pre_rope)
        compressor = Compressor("trial", codecs, settings, describe(self.model), predictions=predictions)
        return cost_curves(self.model, compressor, self.captured.tokens[:COST_SEQS], self.metrics())

    @torch.no_grad()
    def similarity(self, plan: list[dict[str, RolePlan]]) -> float:
        """Cosine similarity, mean over tokens, of the last hidden states with the exact ones, in place."""
        shared = self._last_states(use_cache=True, past_key_values=self._cache(plan))
        return F.cosine_similarity(self._exact, shared, dim=-1).mean().item()

    @cached_property
    def _exact(self) -> Tensor:
        return self._last_states(use_cache=False)

    def _last_states(self, **cache) -> Tensor:
        tokens = self.captured.tokens[:NUM_SEQS].to(self.model.device)
        return self.model(tokens, output_hidden_states=True, **cache).hidden_states[-1].float()

    def _cache(self, plan: list[dict[str, RolePlan]]):
        about = describe(self.model)
        codecs = [
            tuple(roles[role].make_codec(dim) for role, dim in zip(ROLES, dims, strict=True))
            for roles, (_, *dims) in zip(plan, about["shapes"], strict=True)
        ]
        predictions = {
            (role, layer): Prediction(planned.predictor, planned.sources)
            for layer, roles in enumerate(plan)
            for role, planned in roles.items()
            if planned.predictor is not None
        }
        settings = CacheSettings(pre_rope=self.captured.pre_rope)
        compressor = Compressor("trial", codecs, settings, about, predictions=predictions)
        return compressor.new_cache(self.model, in_place=True)
