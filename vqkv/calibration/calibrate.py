"""model + corpus + preset -> compressor, in constant memory."""

import warnings
from contextlib import nullcontext
from itertools import chain, product

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from vqkv.cache.compressor import Compressor
from vqkv.calibration.costs import metrics
from vqkv.calibration.layer_fit import fit_layers
from vqkv.calibration.sharing import ModelTrial
from vqkv.calibration.spill import CapturedTokens
from vqkv.calibration.survival import warn_if_destroyed
from vqkv.codecs.pipeline import Codec
from vqkv.codecs.predictive import ROLES
from vqkv.errors import DataError
from vqkv.models.capture import capture, check_batch_size, check_tokens
from vqkv.models.identity import identity
from vqkv.models.load import describe
from vqkv.models.plain import evaluating
from vqkv.presets import Preset
from vqkv.presets.plans import Budgeted

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
    come from all batches, before what they transform is learned from. A preset with predictors is fitted layer by layer
    (AQUA-KV, Algorithm 1), for which keys and values go to a temporary folder; ``captured`` may hold them already, in
    batches of its own.

    Raises ``DataError`` for an empty input, a head_dim that the preset cannot divide, fewer vectors in the first batch
    than codes, or a disk without room.
    ``preset.pre_rope`` None: keys are stored before RoPE where it can be undone. Warns if little of some layer is left.
    """
    if not isinstance(preset, Preset):
        raise DataError(f"preset must be a Preset such as presets.vqllm(), not {type(preset).__name__}")
    model = evaluating(model)
    check_tokens(model, tokens)
    check_batch_size(batch_size)
    preset = preset.fitting(model)
    if preset.plan is not None and tokens.shape[1] <= preset.sink_tokens:
        raise DataError(f"{tokens.shape[1]} tokens a sequence, of which {preset.sink_tokens} are sinks: none is packed")
    if captured is not None:
        _check_captured(captured, model, tokens, preset)
        batch_size = captured.batch_size
    if preset.plan is None:
        codecs, predictions = _fit_codecs(model, tokens, preset, batch_size, progress, captured), {}
    else:
        made = captured or CapturedTokens(model, tokens, batch_size, preset.settings.pre_rope, progress=progress)
        with nullcontext(made) if made is captured else made:
            trial = ModelTrial(model, made)
            plan = preset.plan.arrange(preset, trial)
            codecs, predictions = fit_layers(preset, plan, made, trial, model.device, progress)
            if preset.fallback is not None and (why := _hardly_pays(model, tokens, plan, predictions)):
                warnings.warn(
                    f"{preset.name} predicts layers from each other, which does not pay after calibration on "
                    f"{tokens.numel():,} tokens: {why}. It rotates each head by itself instead",
                    stacklevel=2,
                )
                preset = preset.fallback.fitting(model)
                plan = preset.plan.arrange(preset, trial)  # type: ignore[union-attr]  # a fallback has one, too
                codecs, predictions = fit_layers(preset, plan, made, trial, model.device, progress)
    notes = {"arguments": preset.arguments, "tokens": tokens.numel(), "batch_size": batch_size}
    compressor = Compressor(preset.name, codecs, preset.settings, describe(model), notes, predictions)
    if predictions and any(getattr(x, "sliding_window", None) for x in DynamicCache(config=model.config).layers):
        warnings.warn(
            f"{preset.name} predicts layers from each other, for which sliding windows keep all tokens", stacklevel=2
        )
    if not isinstance(preset.plan, Budgeted):  # which loses on purpose what costs the model little
        warn_if_destroyed(compressor, model, tokens)
    return compressor


def _hardly_pays(model, tokens: Tensor, plan, predictions) -> str:
    """Why: tokens are too few for a basis of all heads, or predictions pay in less than half of the places; or ""."""
    wanted, fewest = sum(bool(role.sources) for layer in plan for role in layer.values()), FEWEST * _width(model)
    if tokens.numel() < fewest:
        return f"calibrate on {fewest:,} or more, or name a shorter context"
    gain = f"predictions gain something in {len(predictions)} of {wanted} layers and roles only: name a shorter context"
    return gain if 2 * len(predictions) < wanted else ""


def _width(model) -> int:
    """Channels of all KV heads."""
    return max(heads * max(dims) for heads, *dims in describe(model)["shapes"])


def _fit_codecs(model, tokens, preset: Preset, batch_size, progress, captured) -> list[tuple[Codec, Codec]]:
    """Every layer's codecs together, or from one batch where there is nothing to learn: none depends on another."""
    about = describe(model)
    pairs = [(preset.key_codec(key_dim), preset.value_codec(value_dim)) for _, key_dim, value_dim in about["shapes"]]
    codecs = [*chain(*pairs)]
    passes = max(codec.passes for codec in codecs)
    if passes > 1 and captured is None:  # the model is to run once
        with CapturedTokens(model, tokens, batch_size, preset.settings.pre_rope, progress=progress) as captured:
            return _fit_codecs(model, tokens, preset, batch_size, progress, captured)
    for costs in {codec.costs for codec in codecs if codec.weighted}:
        how = preset.settings.pre_rope
        found = captured.metrics(model, costs) if captured else metrics(costs, model, tokens, how)
        for place, codec in zip(product(range(len(pairs)), ROLES), codecs, strict=True):
            if codec.weighted and codec.costs == costs:
                codec.weigh(found[place[::-1]])
    batches = tokens.split(batch_size)[: None if any(codec.learns for codec in codecs) else 1]
    steps = [*product(range(passes), enumerate(batches))]
    bar = tqdm(steps, desc=f"calibrate {preset.name}", unit="batch", disable=None if progress else True)
    for turn, (number, batch) in bar:
        if captured:
            keys, values = captured.layers(number, model.device)
        else:
            keys, values = capture(model, batch, pre_rope=preset.settings.pre_rope)
        for codec, x in zip(codecs, chain(*zip(keys, values, strict=True)), strict=True):
            if not codec.ready and turn < codec.passes:
                codec.partial_fit(x)
                if number == len(batches) - 1:
                    codec.end_pass()
    for codec in codecs:
        codec.finalize()
    return pairs


def _check_captured(captured: CapturedTokens, model, tokens: Tensor, preset: Preset) -> None:
    alike = torch.equal(captured.tokens, tokens) and captured.pre_rope == preset.pre_rope
    if not alike or captured.weights != identity(model):
        raise DataError(
            "captured holds other tokens, keys on the other side of RoPE, or those of a model with other weights: "
            "capture the tokens with this model, for this preset"
        )
