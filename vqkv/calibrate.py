"""model + corpus + preset -> compressor, in constant memory."""

import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor
from tqdm import tqdm

from vqkv.capture import capture, check_batch_size, check_rope, check_tokens
from vqkv.codec.base import Codec, whole_blocks
from vqkv.coder import Coder, Known, Place, Prediction, inputs, last_readers, side_by_side
from vqkv.compressor import Compressor
from vqkv.errors import DataError
from vqkv.models import describe, difference
from vqkv.plans import RolePlan, Trial
from vqkv.precision import full_precision
from vqkv.presets import Preset
from vqkv.settings import CacheSettings
from vqkv.sharing import ModelTrial
from vqkv.spill import CapturedTokens, Spill


def calibrate(
    model,
    tokens: torch.Tensor,
    preset: Preset,
    batch_size: int = 8,
    progress: bool = True,
    captured: CapturedTokens | None = None,
) -> Compressor:
    """Fit ``preset`` to ``model`` on ``tokens`` (num_seqs, seq_len), ``batch_size`` sequences at a time, so that memory
    does not grow with the number of tokens.

    The first batch initialises the codebooks, each further batch is one learning step. A preset with predictors is
    fitted layer by layer (AQUA-KV, Algorithm 1), for which keys and values go to a temporary folder; ``captured`` may
    hold them already, in batches of its own. Raises ``DataError`` for an empty input, a head_dim that the preset cannot
    divide, fewer vectors in the first batch than codes, or a disk without room.
    """
    if not isinstance(preset, Preset):
        raise DataError(f"preset must be a Preset such as presets.vqllm(), not {type(preset).__name__}")
    check_tokens(model, tokens)
    check_batch_size(batch_size)
    if preset.plan is not None and tokens.shape[1] <= preset.sink_tokens:
        raise DataError(f"{tokens.shape[1]} tokens a sequence, of which {preset.sink_tokens} are sinks: none is packed")
    if preset.pre_rope:
        check_rope(model, tokens)
    settings = CacheSettings(preset.sink_tokens, preset.recent_window, preset.flush_block, preset.pre_rope)
    if captured is not None:
        _check_captured(captured, model, tokens, preset)
        batch_size = captured.batch_size
    notes = {"arguments": preset.arguments, "tokens": tokens.numel(), "batch_size": batch_size}
    if preset.plan is None:
        codecs, predictions = _fit_codecs(model, tokens, preset, batch_size, progress, captured), {}
    else:
        made = captured or CapturedTokens(model, tokens, batch_size, not preset.pre_rope, progress=progress)
        with nullcontext(made) if made is captured else made:
            codecs, predictions = fit_layers(preset, made, ModelTrial(model, made), model.device, progress)
    return Compressor(preset.name, codecs, settings, describe(model), notes, predictions)


def _fit_codecs(model, tokens, preset: Preset, batch_size, progress, captured) -> list[tuple[Codec, Codec]]:
    """Every layer's codecs in one pass, or from one batch where there is nothing to learn: none depends on another."""
    about = describe(model)
    codecs = [
        (preset.key_codec(about["head_dim"]), preset.value_codec(about["head_dim"])) for _ in range(about["num_layers"])
    ]
    batches = captured.tokens.split(captured.batch_size) if captured else tokens.split(batch_size)
    if not any(codec.learns for codec in codecs[0]):
        batches = batches[:1]
    bar = tqdm(batches, desc=f"calibrate {preset.name}", unit="batch", disable=None if progress else True)
    for number, batch in enumerate(bar):
        if captured:
            keys, values = captured.layers(number, model.device)
        else:
            keys, values = capture(model, batch, batch_size, post_rope=not preset.pre_rope)
        for pair, exact in zip(codecs, zip(keys, values, strict=True), strict=True):
            for codec, x in zip(pair, exact, strict=True):
                if not codec.ready:  # some need no batch at all
                    codec.partial_fit(x)
    for pair in codecs:
        for codec in pair:
            codec.finalize()
    return codecs


def fit_layers(preset: Preset, captured: CapturedTokens, trial: Trial, device="cpu", progress: bool = True):
    """AQUA-KV's Algorithm 1: layer by layer, keys before values, each on what the places before it are read back as.
    Returns a list over layers of (key codec, value codec), and the predictions by place."""
    arranged = preset.plan.arrange(preset, trial)
    plans = {(role, layer): plan for layer, roles in enumerate(arranged) for role, plan in roles.items()}
    head_dim = captured.about["head_dim"]
    unfitted = {place: plan.make_codec(head_dim) for place, plan in plans.items()}
    block = math.lcm(*(codec.tokens_per_row for codec in unfitted.values()))
    with Spill(captured.folder) as restored:
        fitting = LayerFit(captured, restored, _readers(plans), preset.sink_tokens, block, device)
        bar = tqdm(plans.items(), desc=f"calibrate {preset.name}", unit="role", disable=None if progress else True)
        predictions = {place: fitting.fit(place, plan, unfitted[place]) for place, plan in bar}
    codecs = [(unfitted["key", layer], unfitted["value", layer]) for layer in range(len(arranged))]
    return codecs, {place: prediction for place, prediction in predictions.items() if prediction is not None}


def _readers(plans: dict[Place, RolePlan]) -> dict[Place, Place]:
    return last_readers({place: plan for place, plan in plans.items() if plan.predictor is not None})


def _check_captured(captured: CapturedTokens, model, tokens: Tensor, preset: Preset) -> None:
    if not isinstance(captured, CapturedTokens):
        raise DataError(f"captured must be CapturedTokens(model, tokens, ...), not {type(captured).__name__}")
    if not torch.equal(captured.tokens, tokens) or captured.post_rope == preset.pre_rope:
        raise DataError("captured holds other tokens, or keys on the other side of RoPE: capture them for this preset")
    found = difference(captured.about, model) or (captured.dtype != model.dtype and f"{captured.dtype}")
    if found:
        raise DataError(f"captured is of a model with {found}: capture the tokens with this one")


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
        for source in plan.sources:
            if self.readers[source] == place:
                self.restored.drop(source)
        return prediction

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
