"""Codecs and predictors fitted layer by layer, each on what those before it are read back as (AQUA-KV, Algorithm 1)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from vqkv.calibration.cross_fit import cross_fit, folds_of
from vqkv.calibration.spill import CapturedTokens, Spill
from vqkv.codecs.pipeline import Codec
from vqkv.codecs.predictive import ROLES, Known, Place, Prediction, PredictiveCodec, inputs, last_readers, side_by_side
from vqkv.kernels.precision import full_precision
from vqkv.presets import Preset
from vqkv.presets.plans import RolePlan
from vqkv.runtime.checks import whole_blocks


def fit_layers(
    preset: Preset, plan: list[dict[str, RolePlan]], captured: CapturedTokens, trial, device="cpu",
    progress: bool = True,
):  # fmt: skip
    """AQUA-KV's Algorithm 1 for the plans of every layer: layer by layer, keys before values, each on what the places
    before it are read back as. Returns a list over layers of (key codec, value codec), and the predictions by place."""
    plans = {(role, layer): roles[role] for layer, roles in enumerate(plan) for role in roles}
    dims = {(role, i): shape[1 + j] for i, shape in enumerate(captured.about["shapes"]) for j, role in enumerate(ROLES)}
    codecs = {place: each.make_codec(dims[place]) for place, each in plans.items()}
    for place, codec in codecs.items():
        if codec.weighted:
            found, (role, first) = trial.metrics(codec.costs), place
            codec.weigh(torch.cat([found[role, first + more] for more in range(plans[place].layers)]))
    block, predictions = math.lcm(*(codec.tokens_per_row for codec in codecs.values())), {}
    readers = last_readers({place: each for place, each in plans.items() if each.predictor and each.predictor.learns})
    with Spill(captured.folder) as restored, full_precision(torch.device(device)):
        fitting = LayerFit(captured, restored, plans, readers, preset.sink_tokens, block, device)
        for place, role_plan in tqdm(
            plans.items(), f"calibrate {preset.name}", unit="role", disable=None if progress else True
        ):
            if prediction := fitting.fit(place, role_plan, codecs[place]):
                predictions[place] = prediction
    return [(codecs["key", layer], codecs["value", layer]) for layer in range(len(plan))], predictions


@dataclass
class LayerFit:
    """Fits one place after another on captured keys and values without their sinks and an incomplete ``block``, and
    keeps what later places read of them."""

    captured: CapturedTokens
    restored: Spill
    plans: dict[Place, RolePlan]
    readers: dict[Place, Place]
    sink_tokens: int
    block: int
    device: object

    def fit(self, place: Place, plan: RolePlan, codec: Codec) -> Prediction | None:
        """Fit the predictor, then the codec on what it leaves; returns the fitted prediction, if there is one."""
        if plan.predictor is not None and not plan.predictor.learns:
            return Prediction(plan.predictor, plan.sources)  # of a place that stores nothing
        prediction, by_fold = None, []
        if plan.cross_fitted:
            if found := cross_fit(self._samples(place, plan.sources, folds=True), plan.predictor):
                prediction = Prediction(found.whole, plan.sources)
                by_fold = [Prediction(each, plan.sources) for each in found.folds]
        elif plan.predictor is not None:
            plan.predictor.fit(lambda: self._samples(place, plan.sources))
            prediction = Prediction(plan.predictor, plan.sources)
        coder = PredictiveCodec(codec, place, prediction)
        self._fit_codec(coder, by_fold)
        if place in self.readers:
            for number, x, known in self._batches(place, plan.sources):
                predicted = self._predicted(coder, by_fold, number, x, known)
                restored = codec.quantize_dequantize(x if predicted is None else x - predicted)
                self.restored.put(place, number, restored if predicted is None else restored + predicted)
        for source in plan.sources:
            if self.readers[source] == place:  # the last to read it
                self.restored.drop(source)
        return prediction

    def _fit_codec(self, coder: PredictiveCodec, by_fold: list[Prediction]) -> None:
        if coder.codec.ready:
            return
        for _ in range(coder.codec.passes):
            for number, x, known in self._batches(coder.place, coder.prediction.sources if coder.prediction else ()):
                predicted = self._predicted(coder, by_fold, number, x, known)
                coder.codec.partial_fit(x if predicted is None else x - predicted)
                if not coder.codec.learns:
                    break
            coder.codec.end_pass()
        coder.codec.finalize()

    def _predicted(self, coder: PredictiveCodec, by_fold: list[Prediction], number: int, x: Tensor, known: Known):
        """What the prediction says of a batch: of each fold, if there are any, the one that has not seen it."""
        if not by_fold:
            return None if coder.prediction is None else coder.prediction(known, x)
        rows, fold = inputs(known, by_fold[0].sources, x), self._folds(number, x)
        predicted = torch.empty_like(side_by_side(x))
        for held_out, prediction in enumerate(by_fold):
            predicted[fold == held_out] = prediction.predictor(rows[fold == held_out])
        return predicted.unflatten(-1, (x.shape[1], x.shape[3])).transpose(1, 2)

    def _folds(self, number: int, x: Tensor) -> Tensor:
        return folds_of(number, len(x), x.shape[2], len(self.captured.tokens)).to(x.device)

    def _samples(self, place: Place, sources: tuple[Place, ...], folds: bool = False) -> Iterator[tuple[Tensor, ...]]:
        """A predictor's inputs and targets, (n, in_features) and (n, out_features), batch by batch, and their
        ``folds`` (n,) if these are asked for."""
        for number, x, known in self._batches(place, sources):
            rows = [inputs(known, sources, x), side_by_side(x)]
            if folds:
                rows.append(self._folds(number, x))
            yield tuple(each.flatten(0, 1) for each in rows)

    def _batches(self, place: Place, sources: tuple[Place, ...]) -> Iterator[tuple[int, Tensor, Known]]:
        role, first = place
        together = [(role, first + more) for more in range(self.plans[place].layers)]
        for number, parts in enumerate(zip(*(self.captured.batches(each, self.device) for each in together))):
            x = torch.cat(parts, dim=1)
            known = Known()
            known.update({source: self.restored.get(source, number, self.device) for source in sources})
            yield number, whole_blocks(x[:, :, self.sink_tokens :].float(), self.block), known
