"""model + corpus + preset -> compressor, in constant memory."""

import dataclasses
import warnings
from itertools import chain

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from vqkv.cache.compressor import Compressor
from vqkv.calibration.captured import CapturedTokens
from vqkv.calibration.damage_warning import warn_if_damaged
from vqkv.calibration.layer_fit import LayerFit, ModelTrial
from vqkv.codecs.pipeline import Codec
from vqkv.codecs.predictive import LayerRole, Prediction
from vqkv.errors import DataError
from vqkv.kernels.precision import full_precision
from vqkv.models.capture import capture, check_tokens
from vqkv.models.layers import evaluating
from vqkv.models.load import describe
from vqkv.presets import Preset
from vqkv.presets.plans import Budgeted
from vqkv.presets.preset import OF_EVERY_PRESET, LayerPlan
from vqkv.runtime.checks import check_whole

FEWEST = 8  # tokens for each channel of all KV heads: with half as many, other text takes a third more bits than said


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

    The first batch initialises the codebooks, each further batch is one learning step; means and principal components
    come from all batches, before what they transform is learned from. Presets that learn in one pass keep nothing of
    the tokens; for others keys and values go to a temporary folder. ``captured`` may hold them already, on the preset's
    side of RoPE and in batches of its own. Layers are fitted one after another, with predictors on reconstructions of
    those before (AQUA-KV, Algorithm 1). ``preset.pre_rope`` None: keys are stored before RoPE where it can be undone.

    Raises ``DataError`` for an empty input, a head_dim that the preset cannot divide, fewer vectors in the first batch
    than codes, or a disk without room. Warns if most of some layer is lost.
    """
    if not isinstance(preset, Preset):
        raise DataError(f"preset must be a Preset such as presets.vqllm(), not {type(preset).__name__}")
    model = evaluating(model)
    check_tokens(model, tokens)
    check_whole("batch_size", batch_size, 1)
    preset = preset.fitting(model)
    if preset.plan is not None and tokens.shape[1] <= preset.sink_tokens:
        raise DataError(f"{tokens.shape[1]} tokens a sequence, of which {preset.sink_tokens} are sinks: none is packed")
    predictions: dict[LayerRole, Prediction] = {}
    codecs = preset.key_codec(None), preset.value_codec(None)
    one_pass = preset.plan is None and all(codec.passes == 1 and not codec.weighted for codec in codecs)
    if captured is not None:
        batch_size = captured.batch_size
        preset, pairs, predictions = _fit(model, preset, captured, progress)
    elif one_pass:
        pairs = _fit_streamed(model, tokens, preset, batch_size, progress)
    else:
        with CapturedTokens(model, tokens, batch_size, preset.settings.pre_rope, progress) as captured:
            preset, pairs, predictions = _fit(model, preset, captured, progress)
    notes = {"arguments": preset.arguments, "tokens": tokens.numel(), "batch_size": batch_size}
    compressor = Compressor(preset.name, pairs, preset.settings, describe(model), notes, predictions)
    if predictions and any(getattr(x, "sliding_window", None) for x in DynamicCache(config=model.config).layers):
        warnings.warn(
            f"{preset.name} predicts layers from each other, for which sliding windows keep all tokens", stacklevel=2
        )
    if not isinstance(preset.plan, Budgeted):  # which loses on purpose what costs the model little
        warn_if_damaged(compressor, model, tokens)
    return compressor


def _fit_streamed(model, tokens: Tensor, preset: Preset, batch_size: int, progress: bool) -> list[tuple[Codec, Codec]]:
    """Fit the codecs of all layers together, as the model makes keys and values: 10M tokens would fill a disk."""
    pairs = [(preset.key_codec(key), preset.value_codec(value)) for _, key, value in describe(model)["shapes"]]
    codecs = [*chain(*pairs)]
    learning = {codec for codec in codecs if not codec.ready}
    batches = tokens.split(batch_size)[: None if any(codec.learns for codec in codecs) else 1]
    bar = tqdm(batches, f"calibrate {preset.name}", unit="batch", disable=None if progress else True)
    with full_precision(model.device):
        for number, batch in enumerate(bar):
            captured = capture(model, batch, None, preset.settings.pre_rope)
            for codec, x in zip(codecs, chain(*zip(*captured, strict=True)), strict=True):
                if codec in learning and (codec.learns or number == 0):
                    codec.partial_fit(x.float())
        for codec in codecs:
            if codec in learning:
                codec.end_pass()
            codec.finalize()
    return pairs


def _fit(model, preset: Preset, captured: CapturedTokens, progress: bool):
    """Fit ``preset``, or ``if_too_few_tokens`` where predictions do not pay; return it, codecs and predictions."""
    plan = (preset.plan or LayerPlan()).arrange(preset, ModelTrial(model, captured))
    fit = LayerFit(model, captured, plan, preset.sink_tokens if preset.plan else 0)
    codecs, predictions = fit.run(f"calibrate {preset.name}" if progress else None)
    if preset.if_too_few_tokens is not None and (why := _hardly_pays(model, captured.tokens, plan, predictions)):
        warnings.warn(
            f"{preset.name} predicts layers from each other, which does not pay after calibration on "
            f"{captured.tokens.numel():,} tokens: {why}. It rotates each head by itself instead",
            stacklevel=3,
        )
        kept = {name: getattr(preset, name) for name in OF_EVERY_PRESET}
        return _fit(model, dataclasses.replace(preset.if_too_few_tokens, **kept), captured, progress)
    return preset, codecs, predictions


def _hardly_pays(model, tokens: Tensor, plan, predictions) -> str:
    """Say why: too few tokens for a basis of all heads, or predictions for less than half of layers and roles."""
    width = max(heads * max(dims) for heads, *dims in describe(model)["shapes"])  # of all KV heads
    wanted, fewest = sum(bool(role.sources) for layer in plan for role in layer.values()), FEWEST * width
    if tokens.numel() < fewest:
        return f"calibrate on {fewest:,} or more, or name a shorter context"
    gain = f"predictions gain something in {len(predictions)} of {wanted} layers and roles only: name a shorter context"
    return gain if 2 * len(predictions) < wanted else ""
