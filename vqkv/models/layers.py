"""What a model hands to its cache: which of its layers attend, and the shapes of their keys and values."""

import inspect
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from vqkv.errors import DataError
from vqkv.models.plain import evaluating, plain

LAYERS = (  # transformers' own, that are known
    DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, DummyLayer,
    LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer,
)  # fmt: skip

_layers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> its layers
_thread = threading.local()  # encoder_inputs: a model, tokens, and what its encoder reads beside them
_CALL = nn.Module._call_impl.__code__


class Door(DynamicCache):
    """A cache that keeps nothing, for one forward pass: ``see(layer, keys, values)`` gets what the layer
    ``kv_layers(model)[layer]`` hands over, keys after RoPE, and returns what attention reads instead, or None."""

    def __init__(self, model, see: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor] | None], cross: bool = False):
        super().__init__(config=model.config)
        self.see = see
        layers = enumerate(_layers.get(model, []))
        self.numbers = {layer.layer_idx: number for number, layer in layers if layer.cross == cross}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """As ``see`` says."""
        return self.see(self.numbers.get(layer_idx, layer_idx), key_states, value_states) or (key_states, value_states)


@dataclass(frozen=True)
class KVLayer:
    """A layer that stores what ``attention`` hands over; ``cross``: an encoder's, once and for all."""

    layer_idx: int
    attention: nn.Module
    num_kv_heads: int
    head_dim: int
    value_dim: int
    cross: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_kv_heads, head_dim of keys, head_dim of values)."""
        return self.num_kv_heads, self.head_dim, self.value_dim


def kv_layers(model) -> list[KVLayer]:
    """One ``KVLayer`` for each layer that hands keys and values to a cache; of an encoder-decoder the decoder's own,
    then the cross-attending. Raises ``DataError`` for a model of which no layer does, or that caches more than that."""
    model = plain(model)
    if model not in _layers:
        _layers[model] = _seen_layers(model)
    return _layers[model]


def max_positions(model) -> float:
    """Tokens that the model has positions for, by its configuration; infinity where that names no limit (ALiBi)."""
    named = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return named if named and named > 0 else math.inf


def check_decoder(model, what: str) -> None:
    """Raise ``DataError`` for an encoder-decoder, which ``what`` is not for."""
    if (model := plain(model)).config.is_encoder_decoder:
        raise DataError(
            f"{what} takes decoders: {type(model).__name__} has an encoder. calibrate and new_cache take it"
        )


def _seen_layers(model) -> list[KVLayer]:
    found, asked = dict[tuple[bool, int], KVLayer](), evaluating(model)

    def see(layer_idx: int, keys: Tensor, values: Tensor, cross: bool = False) -> None:
        shape = keys.shape[1], keys.shape[3], values.shape[3]
        found[cross, layer_idx] = KVLayer(layer_idx, _running(), *shape, cross)

    try:
        forward(asked, torch.ones(1, 2, dtype=torch.int64), see, partial(see, cross=True))
    except (ValueError, AssertionError) as error:
        raise DataError(f"{type(model).__name__} does not read into caches of transformers: {error}") from error
    if not found:
        raise DataError(f"{type(model).__name__} hands no keys and values to its cache: it has none to compress")
    if others := {type(x).__name__ for x in DynamicCache(config=model.config).layers if type(x) not in LAYERS}:
        raise DataError(
            f"{type(model).__name__} caches more than keys, values and recurrent states ({', '.join(sorted(others))}), "
            "which is not supported: use DynamicCache"
        )
    own = dict(zip(asked.modules(), model.modules(), strict=True))
    return [replace(found[i], attention=own[found[i].attention]) for i in sorted(found)]


def _running() -> nn.Module:
    """The innermost module that is running in this thread, by its stack: hooks would see every thread's modules."""
    frame = sys._getframe()
    while frame.f_code is not _CALL:
        frame = frame.f_back  # type: ignore[assignment]  # a module asks, so that there is one
    return frame.f_locals["self"]


def door(model, see, see_cross=None):
    """A cache in which ``see`` gets all that is handed over; ``see_cross``, if given, what cross-attention does."""
    own = Door(model, see)
    return EncoderDecoderCache(own, Door(model, see_cross or see, True)) if model.config.is_encoder_decoder else own


@torch.no_grad()  # weights in integers cannot be read in inference mode
def forward(model, tokens: Tensor, see, see_cross=None, **arguments) -> None:
    """Tokens (batch, seq_len) through a ``door``, with as few logits as the model can be asked for."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1
    model(**inputs(model, tokens), past_key_values=door(model, see, see_cross), use_cache=True, **arguments)


def inputs(model, tokens: Tensor) -> dict[str, Tensor]:
    """What ``model`` is called with to read ``tokens``; an encoder ``encoder_reads``, or the tokens, or silence."""
    tokens = tokens.to(model.device)
    if not model.config.is_encoder_decoder:
        return {"input_ids": tokens}
    read = tokens
    if (own := getattr(_thread, "encoder_inputs", None)) and own[0] is model:
        _, known, given = own
        rows = [(known[:, : len(row)] == row).all(1).nonzero()[0, 0] for row in tokens.to(known.device)]
        read = given[torch.stack(rows).to(given.device)].to(model.device)
    elif model.main_input_name != "input_ids":
        config, sizes = model.config, ("num_mel_bins", "max_source_positions")
        if missing := [name for name in sizes if not hasattr(config, name)]:
            raise DataError(
                f"{type(model).__name__} reads {model.main_input_name} of a shape that its configuration does not tell "
                f"({' and '.join(missing)}, as of Whisper), which is not supported: use EncoderDecoderCache"
            )
        read = torch.zeros(len(tokens), config.num_mel_bins, 2 * config.max_source_positions, device=model.device)
    return {model.main_input_name: read, "decoder_input_ids": tokens}


@contextmanager
def encoder_reads(model, tokens: Tensor, given: Tensor | None) -> Iterator[None]:
    """Inside, the encoder reads row i of ``given`` where the decoder reads (a beginning of) row i of ``tokens``. Raises
    ``DataError`` for equal rows."""
    if given is not None:
        if len(tokens.unique(dim=0)) < len(tokens):
            raise DataError("two rows of tokens are equal, so that it is open what the encoder reads: leave one out")
        kv_layers(model)  # which asks with other tokens
    _thread.encoder_inputs = None if given is None else (model, tokens, given)
    try:
        yield
    finally:
        _thread.encoder_inputs = None
