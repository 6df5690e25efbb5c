"""Bytes of a model and a cache, measured: tensors of the model's shape are encoded and their payloads weighed."""

import json
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from vqkv.cache.compressor import Compressor
from vqkv.cache.meter import tensor_bytes
from vqkv.cache.settings import CacheSettings
from vqkv.codecs.base import Codec
from vqkv.codecs.part import part_from_config
from vqkv.errors import DataError, FormatError
from vqkv.models.layers import kv_layers
from vqkv.presets import Preset
from vqkv.presets.plans import RolePlan

PREDICTING = 7  # fp32 tensors of a layer's keys: three sources, two of them side by side, the prediction, what is left
EXPECTED = "vqkv.recommend expects as many as SmolLM2-135M needs, cache.report() tells those of your text"
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
    block_bytes: int | Fraction
    block: int
    exact: int
    working: int
    values: int
    sink_tokens: int = 0
    recent_window: int = 0

    @property
    def bits_per_value(self) -> float:
        """Stored bits for each value of the packed tokens."""
        return float(8 * self.block_bytes / (self.block * self.values))

    def parts(self, seq_len: int) -> tuple[int, int, int]:
        """Of ``seq_len`` tokens, those in the sinks, packed, and in the window: tokens are packed in whole blocks."""
        sinks = min(seq_len, self.sink_tokens)
        packed = max(0, seq_len - sinks - self.recent_window)
        packed -= packed % self.block
        return sinks, packed, seq_len - sinks - packed

    def kinds(self, seq_len: int, batch_size: int = 1) -> dict[str, int]:
        """Bytes by kind with ``batch_size`` sequences of ``seq_len`` tokens."""
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
        """Packed tokens, sinks and window: ``cache.report().cache_bytes`` without padding."""
        kinds = self.kinds(seq_len, batch_size)
        return kinds["packed"] + kinds["sinks"] + kinds["window"]

    def peak(self, seq_len: int, batch_size: int = 1) -> int:
        """The most bytes while the sequences grow to ``seq_len`` tokens: where packing a block frees more than the next
        tokens take, the longest is not the largest."""
        beyond = seq_len - self.sink_tokens - self.recent_window
        before_packing = seq_len - beyond % self.block - 1 if beyond >= self.block else seq_len
        return max(sum(self.kinds(length, batch_size).values()) for length in (seq_len, before_packing))


def footprint(model, preset: Preset | Compressor) -> Footprint:
    """Bytes of ``model``, which may lie on the ``meta`` device, and of a cache of this preset or compressor. Raises
    what ``capacity`` does."""
    shape, settings = model_shape(model), preset.settings
    if isinstance(preset, Compressor):
        _check_fits(preset, model, shape)
        codecs, side = [codec for pair in preset.codecs for codec in pair], preset.side_bytes
        predicted = bool(preset.predictions) * (shape.num_layers if preset.joint else 1)
    else:
        codecs, predictors = _arranged(preset, shape)
        side, predicted = sum(codec.side_bytes for codec in codecs) + sum(predictors), bool(predictors)
    block = math.lcm(settings.flush_block, *(codec.tokens_per_row for codec in codecs))
    return _of(model, settings, block, _block_bytes(codecs, block, shape), side, predicted)


def expected(model, preset: Preset, bits_per_value: Fraction, side_information: int, predicted: int) -> Footprint:
    """As ``footprint`` of a preset whose bytes depend on the text, if a packed value takes so many bits, and matrices
    and tables so many bytes. ``predicted``: layers that are put together from others while one is read."""
    block, values = preset.settings.flush_block, model_shape(model).values
    return _of(model, preset.settings, block, bits_per_value * block * values / 8, side_information, predicted)


def _of(model, settings: CacheSettings, block: int, stored: int | Fraction, side: int, predicted: int) -> Footprint:
    shape = model_shape(model)
    return Footprint(
        weights=weight_bytes(model),
        side_information=side,
        block_bytes=stored,
        block=block,
        exact=_token_bytes(shape, model),
        working=shape.width * (2 * model.dtype.itemsize + 4 * PREDICTING * predicted),
        values=shape.values,
        sink_tokens=settings.sink_tokens,
        recent_window=settings.recent_window,
    )


def dynamic_footprint(model) -> Footprint:
    """Bytes of ``model`` and transformers' ``DynamicCache`` in 16 bits, which copies a layer's keys to append to."""
    shape = model_shape(model)
    token = _token_bytes(shape, model)
    return Footprint(weight_bytes(model), 0, token, 1, token, token // (2 * shape.num_layers), shape.values)


def model_shape(model) -> Shape:
    """Raises ``DataError`` for a model without KV heads, or with layers of unequal ones."""
    layers = kv_layers(model)
    shapes = {layer.shape for layer in layers}
    heads, key_dim, value_dim = next(iter(shapes))
    if len(shapes) > 1 or key_dim != value_dim:
        found = ", ".join(f"{heads} heads of {key_dim} and {value_dim}" for heads, key_dim, value_dim in sorted(shapes))
        raise DataError(f"{type(model).__name__} has layers with {found}: capacities are known for equal layers only")
    return Shape(len(layers), heads, key_dim)


def weight_bytes(model) -> int:
    """Bytes of a model's parameters and buffers, tied ones once."""
    held = [*model.parameters(), *model.buffers()]
    if model.device.type == "meta":  # where every storage lies at address 0
        return sum(tensor.untyped_storage().nbytes() for tensor in held)
    return tensor_bytes(held)


def _token_bytes(shape: Shape, model) -> int:
    """Bytes of an exact token in all layers: in the model's dtype if that has 16 bits, else in fp16."""
    dtype = model.dtype if model.dtype.itemsize == 2 else torch.float16
    return tensor_bytes(torch.empty(shape.values, dtype=dtype))


def _check_fits(compressor: Compressor, model, shape: Shape) -> None:
    """Raises ``FormatError`` for a compressor of another model, as far as a model without weights can tell."""
    if model.device.type != "meta":
        compressor.check(model)
    elif compressor.model["shapes"] != [[shape.num_kv_heads, shape.head_dim, shape.head_dim]] * shape.num_layers:
        raise FormatError(
            f"compressor {compressor.name!r} was fitted to {compressor.model['name']!r}, of which layers, KV heads or "
            "head_dim differ: calibrate a compressor for this model"
        )


class _AnyModel:
    """Answers to what plans ask about a model of which only the depth is known; sizes do not depend on them."""

    def __init__(self, num_layers: int):
        self.num_layers = num_layers

    def distances(self) -> Tensor:
        return torch.ones(self.num_layers, self.num_layers)

    def similarity(self, plan) -> float:
        return 1.0

    @property
    def shapes(self) -> list:
        """Raises ``DataError``: who stores layers together stores what it depends on."""
        raise DataError(f"how many bytes a token takes depends on what is stored: {EXPECTED}")

    def cost_curves(self, preset, plan) -> dict:
        """Raises ``DataError``: these answers do change sizes."""
        raise DataError(f"how many bits each layer gets depends on what errors cost the model: {EXPECTED}")


def _arranged(preset: Preset, shape: Shape) -> tuple[list[Codec], list[int]]:
    """The codec of each role of each layer, untrained, and the bytes of each predictor."""
    layers = [{"key": RolePlan(preset.key_codec), "value": RolePlan(preset.value_codec)}] * shape.num_layers
    if preset.plan is not None:
        layers = preset.plan.arrange(preset, _AnyModel(shape.num_layers))
    plans = [plan for layer in layers for plan in layer.values()]
    configs = [json.dumps(plan.make_codec(shape.head_dim).config()) for plan in plans]
    codecs = [_untrained(config, shape.num_kv_heads, shape.head_dim) for config in configs]
    layouts = [x.predictor.layout(shape.width * len(x.sources), shape.width) for x in plans if x.predictor is not None]
    return codecs, [sum(math.prod(size) * dtype.itemsize for size, dtype in each.values()) for each in layouts]


@cache
def _untrained(config: str, num_kv_heads: int, head_dim: int) -> Codec:
    """The codec that ``config`` (JSON) describes, fitted to as few random values as it takes."""
    settings, tokens = _hasty(json.loads(config)), 1
    while True:
        codec = part_from_config(settings)
        codec.weigh(torch.eye(head_dim).expand(num_kv_heads, -1, -1))
        x = _random(num_kv_heads, math.ceil(tokens / codec.tokens_per_row) * codec.tokens_per_row, head_dim)
        try:
            return codec if codec.ready else codec.fit(x)
        except DataError:  # fewer vectors than codes; or something else, which more of them do not mend
            if not codec.learns or x.numel() > ENOUGH:
                raise
        tokens *= 2


def _hasty(config):
    """The same settings, but codebooks are drawn, not learned: no better, and as large."""
    if isinstance(config, list):
        return [_hasty(item) for item in config]
    if not isinstance(config, dict):
        return config
    return {key: "random" if key == "init" else _hasty(value) for key, value in config.items()}


def _random(num_kv_heads: int, tokens: int, head_dim: int) -> Tensor:
    return torch.randn(1, num_kv_heads, tokens, head_dim, generator=torch.Generator().manual_seed(0))


def _block_bytes(codecs: list[Codec], block: int, shape: Shape) -> int:
    """Bytes of ``block`` packed tokens in all layers; a codec with the settings of another is weighed once."""
    each = {codec: _row_bytes(codec, shape) for codec in set(codecs)}
    return sum(each[codec] * block // codec.tokens_per_row for codec in codecs)


def _row_bytes(codec: Codec, shape: Shape) -> int:
    """Bytes of a row of the codec's payload. Raises ``DataError`` if they depend on what is in the row."""
    heads = codec.num_kv_heads or shape.num_kv_heads  # more where layers are stored together
    one, two = (codec.encode(_random(heads, n * codec.tokens_per_row, shape.head_dim)) for n in (1, 2))
    if one.ragged or two.nbytes != 2 * one.nbytes:
        raise DataError(f"how many bytes a token takes depends on what is stored: {EXPECTED}")
    return one.nbytes
