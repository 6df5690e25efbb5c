"""Codecs and predictors fitted layer by layer, each on what those before it are read back as (AQUA-KV, Algorithm 1)."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from vqkv.checkpoint import Checkpoint
from vqkv.codec.base import Codec, codec_from_config
from vqkv.codec.checks import whole_blocks
from vqkv.coder import Coder, Known, Place, Prediction, inputs, last_readers, side_by_side
from vqkv.files import claim
from vqkv.plans import RolePlan, Trial
from vqkv.precision import full_precision
from vqkv.predict import predictor_from_config
from vqkv.presets import Preset
from vqkv.processes import current
from vqkv.spill import CapturedTokens, Spill


def fit_layers(
    preset: Preset, captured: CapturedTokens, trial: Trial, device="cpu", progress: bool = True,
    steps: Checkpoint | None = None,
):  # fmt: skip
    """AQUA-KV's Algorithm 1: layer by layer, keys before values, each on what the places before it are read back as.
    Returns a list over layers of (key codec, value codec), and the predictions by place. ``steps``: a checkpoint that
    keeps each place once it is fitted."""
    return fit_arranged(preset, preset.plan.arrange(preset, trial), captured, trial, device, progress, steps)


def fit_arranged(
    preset: Preset, arranged: list[dict[str, RolePlan]], captured: CapturedTokens, trial: Trial, device="cpu",
    progress: bool = True, steps: Checkpoint | None = None,
):  # fmt: skip
    """``fit_layers`` for plans of every layer that are arranged already."""
    plans = {(role, layer): plan for layer, roles in enumerate(arranged) for role, plan in roles.items()}
    head_dim = captured.about["head_dim"]
    unfitted = {place: plan.make_codec(head_dim) for place, plan in plans.items()}
    for place in (place for place, codec in unfitted.items() if codec.weighted):
        unfitted[place].weigh(trial.metrics[place])
    block = math.lcm(*(codec.tokens_per_row for codec in unfitted.values()))
    with _restored(captured, steps) as restored:
        fitting = LayerFit(captured, restored, _readers(plans), preset.sink_tokens, block, device)
        bar = tqdm(plans.items(), desc=f"calibrate {preset.name}", unit="role", disable=None if progress else True)
        fitted = {place: _fit_or_load(fitting, place, plan, unfitted[place], steps) for place, plan in bar}
    codecs = [(fitted["key", layer][0], fitted["value", layer][0]) for layer in range(len(arranged))]
    return codecs, {place: prediction for place, (_, prediction) in fitted.items() if prediction is not None}


def _restored(captured: CapturedTokens, steps: Checkpoint | None) -> Spill:
    if steps is None:
        return Spill(captured.folder)
    return Spill(steps.folder / f"process-{current().rank}" / "restored", keep=True)


def _fit_or_load(fitting: "LayerFit", place: Place, plan: RolePlan, codec: Codec, steps: Checkpoint | None):
    """(codec, prediction) of one place, from the checkpoint if it is there."""
    name = f"{place[0]}-{place[1]}"
    if steps is not None and (found := steps.load_together(name)) is not None:
        fitting.forget(place, plan.sources)
        return _loaded(*found, plan.sources, fitting.device)
    prediction = fitting.fit(place, plan, codec)
    if steps is not None:
        current().wait()  # until each has written what later places read
        if current().first:
            tensors, notes = _described(codec, prediction)
            steps.save(name, tensors, **notes)
    fitting.forget(place, plan.sources)
    return codec, prediction


def _described(codec: Codec, prediction: Prediction | None) -> tuple[dict[str, Tensor], dict]:
    tensors = {f"codec.{name}": tensor for name, tensor in codec.state().items()}
    notes = {"codec": codec.config(), "predictor": None}
    if prediction is not None:
        tensors |= {f"predictor.{name}": tensor for name, tensor in prediction.predictor.state().items()}
        notes["predictor"] = prediction.predictor.config()
    return tensors, notes


def _loaded(tensors: dict[str, Tensor], notes: dict, sources: tuple[Place, ...], device):
    codec = codec_from_config(notes["codec"], claim(tensors, "codec.")).to(device)
    if notes["predictor"] is None:
        return codec, None
    predictor = predictor_from_config(notes["predictor"], claim(tensors, "predictor."))
    return codec, Prediction(predictor.to(device), sources)


def _readers(plans: dict[Place, RolePlan]) -> dict[Place, Place]:
    return last_readers({place: plan for place, plan in plans.items() if plan.predictor is not None})


class LayerFit:
    """Fits one place after another on captured keys and values, and keeps what later places read of them.

    The first ``sink_tokens`` of a sequence are left out, as a cache keeps them exact, and so are tokens after the last
    whole ``block``.
    """

    def __init__(self, captured: CapturedTokens, restored: Spill, readers, sink_tokens: int, block: int, device):
        self.captured, self.restored, self.readers = captured, restored, readers
        self.sink_tokens, self.block, self.device = sink_tokens, block, device

    def fit(self, place: Place, plan: RolePlan, codec: Codec) -> Prediction | None:
        """Fit the predictor, then the codec on what it leaves; returns the fitted prediction, if there is one."""
        with full_precision(torch.device(self.device)):
            return self._fit(place, plan, codec)

    def _fit(self, place: Place, plan: RolePlan, codec: Codec) -> Prediction | None:
        prediction = None
        if plan.predictor is not None:
            plan.predictor.fit(lambda: self._samples(place, plan.sources))
            prediction = Prediction(plan.predictor, plan.sources)
        coder = Coder(codec, place, prediction)
        self._fit_codec(coder)
        if place in self.readers:
            for number, x, known in self._batches(place, plan.sources):
                self.restored.put(place, number, coder.through(x, known))
        return prediction

    def forget(self, place: Place, sources: tuple[Place, ...]) -> None:
        """Drop the reconstructions that ``place`` was the last to read."""
        for source in sources:
            if self.readers[source] == place:
                self.restored.drop(source)

    def _fit_codec(self, coder: Coder) -> None:
        for _, x, known in self._batches(coder.place, coder.prediction.sources if coder.prediction else ()):
            if coder.codec.ready:
                return
            coder.codec.partial_fit(x if coder.prediction is None else x - coder.prediction(known, x))
            if not coder.codec.learns:
                break
        coder.codec.finalize()

    def _samples(self, place: Place, sources: tuple[Place, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        """A predictor's inputs and targets, (n, in_features) and (n, out_features), batch by batch."""
        for _, x, known in self._batches(place, sources):
            yield inputs(known, sources, x).flatten(0, 1), side_by_side(x).flatten(0, 1)

    def _batches(self, place: Place, sources: tuple[Place, ...]) -> Iterator[tuple[int, Tensor, Known]]:
        for number, x in enumerate(self.captured.batches(place, self.device)):
            known = Known()
            known.update({source: self.restored.get(source, number, self.device) for source in sources})
            yield number, whole_blocks(x[:, :, self.sink_tokens :].float(), self.block), known
