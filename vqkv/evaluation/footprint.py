"""Bytes of a model and a cache, asked of the byte meter: codecs of the model's shape encode random values, and their
payloads are weighed.

Counted: weights and buffers, tied ones once; side information; packed tokens, sinks, the window and the block that is
not packed yet; and as ``working`` a stated reserve for what a pass makes and drops again: the keys and
values of the layer that is being read, decoded in the model's dtype, and where layers are predicted from others seven
fp32 tensors of that size. Of ``DynamicCache`` it is the keys of a layer, which ``torch.cat`` copies. Sequences have no
padding and grow token by token.

Not counted: activations and logits, above all of a prompt in one piece; decoded tokens that a cache may keep;
the framework itself, and memory that its allocator cannot use.
"""

import copy
import json
import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from vqkv.cache.compressor import Compressor
from vqkv.cache.meter import tensor_bytes
from vqkv.cache.settings import CacheSettings
from vqkv.codecs.pipeline import Codec
from vqkv.codecs.predictive import ROLES, Prediction
from vqkv.codecs.stage import part_from_config
from vqkv.errors import DataError, FormatError
from vqkv.models.layers import kv_layers, plain
from vqkv.models.load import config_of
from vqkv.presets import Preset
from vqkv.presets.preset import LayerPlan

GB = 10**9
EXACT = 2  # bytes of an exact value
PREDICTING = 7  # fp32 tensors of a layer's keys: three sources, two of them side by side, the prediction, what is left
UNKNOWN = (
    "how many bytes a token takes depends on what is stored: vqkv.recommend expects as many as SmolLM2-135M needs, "
    "cache.report() tells those of your text"
)
ENOUGH = 1 << 24  # random values that a codec is given to learn from, at most


class Shape(NamedTuple):
    """Sizes that a model's cache depends on."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Elements of one layer's keys of one token."""
        return self.num_kv_heads * self.head_dim

    @property
    def values(self) -> int:
        """Elements of K and V of one token."""
        return 2 * self.num_layers * self.width


@dataclass(frozen=True)
class Footprint:
    """Bytes that a model and a cache occupy. Once: ``weights`` and ``side_information``. For each sequence:
    ``block_bytes`` for ``block`` packed tokens, ``exact`` for a token in sinks or window, and ``working`` for a token
    of the layer that is being read. ``values``: elements of K and V in a token."""

    weights: int
    side_information: int
    block_bytes: float
    block: int
    exact: int
    working: int
    values: int
    sink_tokens: int = 0
    recent_window: int = 0

    @property
    def bits_per_value(self) -> float:
        """Stored bits for each value of the packed tokens."""
        return 8 * self.block_bytes / (self.block * self.values)

    def parts(self, seq_len: int) -> tuple[int, int, int]:
        """Divide ``seq_len`` tokens into those in the sinks, packed in complete blocks, and in the window."""
        sinks = min(seq_len, self.sink_tokens)
        packed = max(0, seq_len - sinks - self.recent_window)
        packed -= packed % self.block
        return sinks, packed, seq_len - sinks - packed

    def kinds(self, seq_len: int, batch_size: int = 1) -> dict[str, int]:
        """Count bytes by kind with ``batch_size`` sequences of ``seq_len`` tokens."""
        sinks, packed, window = self.parts(seq_len)
        return {
            "weights": self.weights,
            "side_information": self.side_information,
            "packed": math.ceil(batch_size * (packed // self.block) * self.block_bytes),
            "sinks": batch_size * sinks * self.exact,
            "window": batch_size * window * self.exact,
            "working": batch_size * seq_len * self.working,
        }

    def cache_bytes(self, seq_len: int, batch_size: int = 1) -> int:
        """Count bytes of packed tokens, sinks and window: ``cache.report().cache_bytes`` without padding."""
        kinds = self.kinds(seq_len, batch_size)
        return kinds["packed"] + kinds["sinks"] + kinds["window"]

    def peak(self, seq_len: int, batch_size: int = 1) -> int:
        """Find the most bytes while the sequences grow to ``seq_len`` tokens: where packing a block frees more than the
        next tokens take, the longest is not the largest."""
        beyond = seq_len - self.sink_tokens - self.recent_window
        before_packing = seq_len - beyond % self.block - 1 if beyond >= self.block else seq_len
        return max(sum(self.kinds(length, batch_size).values()) for length in (seq_len, before_packing))


def footprint(model, preset: Preset | Compressor) -> Footprint:
    """Weigh ``model``, which may lie on the ``meta`` device, and a cache of this preset or compressor. Raises
    ``DataError`` for sizes that depend on the text, ``FormatError`` for a compressor of another model."""
    shape = model_shape(model)
    compressor = preset if isinstance(preset, Compressor) else _untrained(preset, shape)
    if compressor is preset and model.device.type != "meta":
        compressor.check(model)
    elif compressor is preset and compressor.model["shapes"] != [[*layer.shape] for layer in kv_layers(model)]:
        about = f"compressor {compressor.name!r} was fitted to {compressor.model['name']!r}"
        raise FormatError(f"{about}, of which layers, KV heads or head_dim differ: calibrate one for this model")
    codecs = [codec for pair in compressor.codecs for codec in pair]
    rows = {codec: _row_bytes(codec, shape) for codec in set(codecs)}
    block = math.lcm(compressor.settings.block_tokens, compressor.block_tokens)
    stored = sum(rows[codec] * (block // codec.block_tokens) for codec in codecs)
    predicted = bool(compressor.predictions) * (shape.num_layers if compressor.joint else 1)
    return _footprint(model, compressor.settings, block, stored, compressor.side_bytes, predicted)


def expected(model, preset: Preset, bits_per_value: float, side_information: int, predicted: int) -> Footprint:
    """Weigh a preset whose bytes depend on the text, if a packed value takes so many bits, and matrices and tables so
    many bytes. ``predicted``: layers that are put together from others while one is read."""
    stored = bits_per_value * preset.settings.block_tokens * model_shape(model).values / 8
    return _footprint(model, preset.settings, preset.settings.block_tokens, stored, side_information, predicted)


def dynamic_footprint(model) -> Footprint:
    """Weigh ``model`` and transformers' ``DynamicCache`` in 16 bits, which copies a layer's keys to append to."""
    shape = model_shape(model)
    token = EXACT * shape.values
    return Footprint(weight_bytes(model), 0, token, 1, token, EXACT * shape.width, shape.values)


def _footprint(model, settings: CacheSettings, block: int, stored: float, side: int, predicted: int) -> Footprint:
    shape = model_shape(model)
    return Footprint(
        weights=weight_bytes(model),
        side_information=side,
        block_bytes=stored,
        block=block,
        exact=EXACT * shape.values,
        working=shape.width * (2 * model.dtype.itemsize + 4 * PREDICTING * predicted),
        values=shape.values,
        sink_tokens=settings.sink_tokens,
        recent_window=settings.recent_window,
    )


def architecture(model_or_config, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
    """Return a loaded model as it is; lay out one by its name, its config or the contents of that, a dict, on the
    ``meta`` device. ``dtype``: of the weights to lay out, by default the config's own, else float16.

    Raises ``DataError`` for sliding windows, encoders, and layers without KV heads or with unequal ones."""
    model = plain(config_of(model_or_config) if isinstance(model_or_config, str) else model_or_config)
    if dtype is not None or not isinstance(model, PreTrainedModel):
        model = _laid_out(getattr(model, "config", model), dtype)
    model_shape(model)
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=model.config.get_text_config()).layers):
        raise DataError(
            f"{type(model).__name__} has layers with a sliding window or states, whose DynamicCache stops growing: "
            "every token is counted with sliding_window=None and layer_types full_attention in the config"
        )
    return model


def _laid_out(config: PreTrainedConfig | dict, dtype: torch.dtype | str | None) -> PreTrainedModel:
    try:
        config = AutoConfig.for_model(**config) if isinstance(config, dict) else copy.deepcopy(config)
        dtype = dtype or config.dtype or torch.float16
        if config.is_encoder_decoder or getattr(config, "quantization_config", None):
            raise ValueError("neither what is kept of an encoder nor quantized weights are counted")
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    except Exception as error:  # transformers raises a dozen types
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise DataError(f"no causal language model can be laid out of this config in {dtype}: {reason}") from error


def model_shape(model) -> Shape:
    """Read the shape of a model's cache. Raises ``DataError`` for no KV heads, or layers of unequal ones."""
    layers = kv_layers(model)
    shapes = {layer.shape for layer in layers}
    heads, key_dim, value_dim = next(iter(shapes))
    if len(shapes) > 1 or key_dim != value_dim:
        unequal = ", ".join(f"{heads} heads of {key} and {value}" for heads, key, value in sorted(shapes))
        raise DataError(f"{type(model).__name__} has layers with {unequal}: capacity takes equal layers only")
    return Shape(len(layers), heads, key_dim)


def weight_bytes(model) -> int:
    """Weigh a model's parameters and buffers, tied ones once."""
    held = [*model.parameters(), *model.buffers()]
    if model.device.type == "meta":  # where every storage lies at address 0
        return sum(tensor.untyped_storage().nbytes() for tensor in held)
    return tensor_bytes(held)


class _AnyModel:
    """Answers what plans ask of a model, where sizes do not depend on it."""

    def __init__(self, num_layers: int):
        self.num_layers = num_layers

    def distances(self) -> Tensor:
        return torch.ones(self.num_layers, self.num_layers)

    def similarity(self, plan) -> float:
        return 1.0

    def __getattr__(self, asked: str):
        raise DataError(UNKNOWN)  # shapes, cost_curves: the bits of each layer follow from the text


def _untrained(preset: Preset, shape: Shape) -> Compressor:
    """Make ``preset`` a compressor as if fitted to a model of this shape, but for what is learned."""
    codecs: list[tuple[Codec, Codec]] = []
    predictions = {}
    for layer, roles in enumerate((preset.plan or LayerPlan()).arrange(preset, _AnyModel(shape.num_layers))):
        configs = (json.dumps(roles[role].make_codec(shape.head_dim).config()) for role in ROLES)
        key, value = (_fitted(config, shape.num_kv_heads, shape.head_dim) for config in configs)
        codecs.append((key, value))
        for role, plan in roles.items():
            if plan.predictor is not None:
                plan.predictor.lay_out(shape.width * len(plan.sources), shape.width)
                predictions[role, layer] = Prediction(plan.predictor, plan.sources)
    return Compressor(preset.name, codecs, preset.settings, {}, predictions=predictions)


@cache
def _fitted(config: str, num_kv_heads: int, head_dim: int) -> Codec:
    """Make the codec that ``config`` (JSON) describes, fitted to as few random values as it takes."""
    config, tokens = config.replace('"init": "kmeans"', '"init": "random"'), 1  # codebooks as large, in less time
    while True:
        codec = part_from_config(json.loads(config))
        codec.weigh(torch.eye(head_dim).expand(num_kv_heads, -1, -1))
        x = _random(num_kv_heads, math.ceil(tokens / codec.block_tokens) * codec.block_tokens, head_dim)
        try:
            return codec if codec.ready else codec.fit(x)
        except DataError:  # fewer vectors than codes; or something else, which more of them do not mend
            if not codec.learns or x.numel() > ENOUGH:
                raise
        tokens *= 2


def _random(num_kv_heads: int, tokens: int, head_dim: int) -> Tensor:
    return torch.randn(1, num_kv_heads, tokens, head_dim, generator=torch.Generator().manual_seed(0))


def _row_bytes(codec: Codec, shape: Shape) -> int:
    """Weigh a row of the codec's payload. Raises ``DataError`` if its size depends on what is in it."""
    heads = codec.num_kv_heads or shape.num_kv_heads  # more where layers are stored together
    payload = codec.encode(_random(heads, codec.block_tokens, shape.head_dim))
    if payload.ragged:
        raise DataError(UNKNOWN)
    return payload.nbytes
