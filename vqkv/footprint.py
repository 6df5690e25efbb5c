"""What a model and a cache occupy, measured: tensors of the model's shape are encoded and their payloads weighed."""

import json
import math
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from vqkv.capture import check_tokens
from vqkv.codec.ragged import RaggedPayload
from vqkv.coder import ROLES
from vqkv.compressor import Compressor
from vqkv.errors import DataError, FormatError
from vqkv.meter import tensor_bytes
from vqkv.models import kv_sources, rotary_embedding
from vqkv.plans import RolePlan
from vqkv.presets import Preset
from vqkv.settings import CacheSettings
from vqkv.workspace import (
    Shape,
    Stored,
    Workspace,
    dynamic_workspace,
    expected_workspace,
    predictor_bytes,
    random_values,
    untrained_codec,
    workspace,
)

MEASURE = (
    "calibrate a compressor and pass it with the loaded model and tokens like those to be cached, "
    "capacity(model, compressor, memory_gb, tokens=...)"
)


@dataclass(frozen=True)
class Footprint:
    """Bytes that a model and a cache occupy, for any number of tokens and sequences.

    Once: ``weights`` and ``side_information``. For each sequence: ``packed`` for ``block`` packed tokens, ``exact`` for
    a token in sinks or window, and ``working`` for what a forward pass makes and drops beside the cache in the layer
    that needs most, None where that was not asked for. ``values``: elements of K and V in a token.
    """

    weights: int
    side_information: int
    packed: int | Fraction
    block: int
    exact: int
    working: Workspace | None
    values: int
    sink_tokens: int = 0
    recent_window: int = 0

    @property
    def bits_per_value(self) -> float:
        """Stored bits for each value of the packed tokens."""
        return float(8 * self.packed / (self.block * self.values))

    @property
    def fixed(self) -> int:
        """Bytes before the first token."""
        return self.weights + self.side_information

    def parts(self, seq_len: int) -> tuple[int, int, int]:
        """Of ``seq_len`` tokens, those in the sinks, packed, and in the window: tokens are packed in whole blocks."""
        sinks = min(seq_len, self.sink_tokens)
        packed = max(0, seq_len - sinks - self.recent_window)
        packed -= packed % self.block
        return sinks, packed, seq_len - sinks - packed

    def kinds(self, seq_len: int, batch_size: int = 1) -> dict[str, int]:
        """Bytes by kind with ``batch_size`` sequences of ``seq_len`` tokens."""
        sinks, packed, window = self.parts(seq_len)
        found = {
            "weights": self.weights,
            "side_information": self.side_information,
            "packed": math.ceil(batch_size * (packed // self.block) * self.packed),
            "sinks": batch_size * sinks * self.exact,
            "window": batch_size * window * self.exact,
        }
        return found if self.working is None else found | {"working": self.working.at(batch_size * seq_len)}

    def cache_bytes(self, seq_len: int, batch_size: int = 1) -> int:
        """Packed tokens, sinks and window: ``cache.report().cache_bytes`` without padding."""
        kinds = self.kinds(seq_len, batch_size)
        return kinds["packed"] + kinds["sinks"] + kinds["window"]

    def peak(self, seq_len: int, batch_size: int = 1) -> int:
        """The most bytes while the sequences grow to ``seq_len`` tokens: where packing a block frees more than the next
        tokens take, the longest is not the largest. Raises ``DataError`` where ``working`` was left out."""
        if self.working is None:
            raise DataError("a peak without what a forward pass needs is none: ask for footprint(..., working=True)")
        beyond = seq_len - self.sink_tokens - self.recent_window
        before_packing = seq_len - beyond % self.block - 1 if beyond >= self.block else seq_len
        return max(sum(self.kinds(length, batch_size).values()) for length in (seq_len, before_packing))


def footprint(model, preset: Preset | Compressor, tokens: Tensor | None = None, working: bool = True) -> Footprint:
    """What ``model``, which may lie on the ``meta`` device, and a cache of this preset or compressor occupy. Most of
    the time goes into what a forward pass needs: leave ``working`` out where it does not matter. See
    ``capacity.capacity``, which raises what this raises."""
    shape, fitted = model_shape(model), isinstance(preset, Compressor)
    if fitted:
        _check_fits(preset, model, shape)
    elif tokens is not None:
        raise DataError(f"tokens cannot be cached with a preset that was fitted to no model, {preset.name}: {MEASURE}")
    settings = _settings(preset.settings if fitted else preset, model)
    stored = _stored_in(preset) if fitted else _stored_by(preset, shape)
    rows = math.lcm(*(_codec(one, shape).tokens_per_row for one in stored))
    block = math.lcm(rows, settings.flush_block)
    if tokens is None:
        packed = sum(_row_bytes(one.codec, *shape[1:]) * block // _codec(one, shape).tokens_per_row for one in stored)
        needed = expected_workspace(stored, settings, rows, shape, model.dtype) if working else None
    else:
        packed, needed = _measured(model, preset, tokens, block, shape)
    return Footprint(
        weights=weight_bytes(model),
        side_information=preset.side_bytes if fitted else _side_bytes(stored, shape),
        packed=packed,
        block=block,
        exact=_token_bytes(shape, model),
        working=needed,
        values=shape.values,
        sink_tokens=settings.sink_tokens,
        recent_window=settings.recent_window,
    )


def dynamic_footprint(model) -> Footprint:
    """What ``model`` and transformers' ``DynamicCache`` in 16 bits occupy."""
    shape = model_shape(model)
    token, working = _token_bytes(shape, model), dynamic_workspace(shape, _sixteen_bits(model))
    return Footprint(weight_bytes(model), 0, token, 1, token, working, shape.values)


def model_shape(model) -> Shape:
    """Raises ``DataError`` for a model without KV heads, or with layers of unequal ones."""
    shapes = {(source.num_kv_heads, source.head_dim) for source in kv_sources(model)}
    if len(shapes) != 1:
        found = ", ".join(f"{heads} of {head_dim}" for heads, head_dim in sorted(shapes)) or "none"
        raise DataError(
            f"{type(model).__name__} has layers with KV heads {found}: a cache needs the same in all layers"
        )
    return Shape(model.config.get_text_config(decoder=True).num_hidden_layers, *shapes.pop())


def weight_bytes(model) -> int:
    """Bytes of a model's parameters and buffers, tied ones once."""
    held = [*model.parameters(), *model.buffers()]
    if model.device.type == "meta":  # where every storage lies at address 0
        return sum(tensor.untyped_storage().nbytes() for tensor in held)
    return tensor_bytes(held)


def _sixteen_bits(model) -> torch.dtype:
    """What a cache keeps exact tokens in: the model's dtype if it has 16 bits, else fp16."""
    return model.dtype if model.dtype.itemsize == 2 else torch.float16


def _token_bytes(shape: Shape, model) -> int:
    """Of an exact token in all layers."""
    return tensor_bytes(torch.empty(shape.values, dtype=_sixteen_bits(model)))


def _settings(settings: Preset | CacheSettings, model) -> CacheSettings:
    """Without RoPE to apply where the model has none."""
    known = {field.name: getattr(settings, field.name) for field in fields(CacheSettings)}
    return CacheSettings(**known | {"pre_rope": settings.pre_rope and rotary_embedding(model) is not None})


def _check_fits(compressor: Compressor, model, shape: Shape) -> None:
    """Raises ``FormatError`` for a compressor of another model, as far as a model without weights can tell."""
    if model.device.type != "meta":
        compressor.check(model)
    elif different := [name for name, value in shape._asdict().items() if compressor.model[name] != value]:
        raise FormatError(
            f"compressor {compressor.name!r} was fitted to {compressor.model['name']!r}, where {', '.join(different)} "
            "differ: calibrate a compressor for this model"
        )


def _stored_in(compressor: Compressor) -> tuple[Stored, ...]:
    """How a fitted compressor stores each role of each layer."""
    stored = []
    for coder in (coder for pair in compressor.coders for coder in pair):
        predictor = coder.prediction and json.dumps(coder.prediction.predictor.config())
        sources = coder.prediction.sources if coder.prediction else ()
        stored.append(Stored(coder.place, json.dumps(coder.codec.config()), predictor, sources))
    return tuple(stored)


class _AnyModel:
    """Answers what plans ask about a model of which only the depth is known; sizes do not depend on the answers."""

    def __init__(self, num_layers: int):
        self.num_layers = num_layers

    def distances(self) -> Tensor:
        """See ``plans.Trial``."""
        return torch.ones(self.num_layers, self.num_layers)

    def similarity(self, plan) -> float:
        """See ``plans.Trial``."""
        return 1.0

    def cost_curves(self, preset, plan) -> dict:
        """Raises ``DataError``: these answers do change sizes."""
        raise DataError(f"how many bits each layer gets depends on what errors cost the model: {MEASURE}")


def _stored_by(preset: Preset, shape: Shape) -> tuple[Stored, ...]:
    """How a preset would store each role of each layer."""
    if preset.plan is None:
        layers = [{"key": RolePlan(preset.key_codec), "value": RolePlan(preset.value_codec)}] * shape.num_layers
    else:
        layers = preset.plan.arrange(preset, _AnyModel(shape.num_layers))
    return tuple(_planned((role, layer), plans[role], shape) for layer, plans in enumerate(layers) for role in ROLES)


def _planned(place, plan: RolePlan, shape: Shape) -> Stored:
    if plan.predictor is not None:
        width = shape.num_kv_heads * shape.head_dim
        plan.predictor.in_features, plan.predictor.out_features = width * len(plan.sources), width
    predictor = plan.predictor and json.dumps(plan.predictor.config())
    return Stored(place, json.dumps(plan.make_codec(shape.head_dim).config()), predictor, plan.sources)


def _codec(stored: Stored, shape: Shape):
    return untrained_codec(stored.codec, shape.num_kv_heads, shape.head_dim)


def _side_bytes(stored: tuple[Stored, ...], shape: Shape) -> int:
    predictors = sum(predictor_bytes(one.predictor) for one in stored if one.predictor)
    return predictors + sum(_codec(one, shape).side_bytes for one in stored)


@cache
def _row_bytes(config: str, num_kv_heads: int, head_dim: int) -> int:
    """Of a row of the payload that the codec makes. Raises ``DataError`` if it depends on what is in the row."""
    codec = untrained_codec(config, num_kv_heads, head_dim)
    one, four = (codec.encode(random_values(n, num_kv_heads, n * codec.tokens_per_row, head_dim)) for n in (1, 2))
    if isinstance(one, RaggedPayload) or four.nbytes != 4 * one.nbytes:
        raise DataError(f"how many bytes a token takes depends on what is stored here, so it has to be seen: {MEASURE}")
    return one.nbytes


def _measured(model, compressor: Compressor, tokens: Tensor, block: int, shape: Shape) -> tuple[Fraction, Workspace]:
    """Bytes of a packed block, and those that a pass needs, with ``tokens`` (num_seqs, seq_len) cached for real, one
    sequence at a time."""
    if model.device.type == "meta":
        raise DataError(f"a model without weights cannot cache tokens: {MEASURE}")
    check_tokens(model, tokens)
    tokens = tokens.to(model.device)
    lengths = _lengths(compressor.settings, block, tokens.shape[1])
    packed_bytes = packed_values = 0
    for sequence in tokens.split(1):
        cache = compressor.new_cache(model)
        with torch.inference_mode():
            model.base_model(sequence, past_key_values=cache, use_cache=True)
        report = cache.report()
        packed_bytes, packed_values = packed_bytes + report.packed_bytes, packed_values + report.packed_values
    packed = Fraction(packed_bytes, packed_values) * block * shape.values
    return packed, workspace(model, compressor.new_cache, tokens[:1], lengths)


def _lengths(settings: CacheSettings, block: int, most: int) -> tuple[int, int]:
    """For ``workspace``, of at most ``most`` tokens: packed are a power of two of blocks, and twice as many, so that
    what is aligned is so in both; a token after the last block so that the pass packs none. Raises ``DataError`` if
    ``most`` is too few for it."""
    rest = settings.sink_tokens + settings.recent_window + (block > 1)
    blocks = (most - rest) // (2 * block)
    if blocks < 1:
        raise DataError(
            f"{most} tokens a sequence are too few to measure with: sinks, window and two blocks take "
            f"{rest + 2 * block}. Pass longer sequences"
        )
    packed = block << (blocks.bit_length() - 1)
    return rest + packed, rest + 2 * packed
