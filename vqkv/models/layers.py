"""The model itself, out of its wrappers, and what it hands to its cache: which of its layers attend, and the shapes of
their keys and values."""

import copy
import inspect
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, cache_utils

from vqkv.errors import DataError

LAYERS = (  # of transformers' caches, that are supported
    cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer, cache_utils.DummyLayer,
    cache_utils.LinearAttentionLayer, cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
)  # fmt: skip

_layers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> its layers


def plain(model):
    """Unwrap a model from ``torch.compile``, ``DataParallel``, ``DistributedDataParallel`` and peft, whose adapters its
    own layers hold. Raises ``DataError`` for prompt and prefix tuning, which put other keys and values in the cache."""
    while isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        if adapters := getattr(model, "peft_config", None):
            if any(adapter.is_prompt_learning for adapter in adapters.values()):
                raise DataError(
                    f"{type(model).__name__} with prompt or prefix tuning fills its cache itself, which cannot be "
                    "compressed: use its base model, model.get_base_model(), or LoRA"
                )
            model = cast(Any, model).get_base_model()
        elif (inner := model._modules.get("_orig_mod", model._modules.get("module"))) is None:
            break
        else:
            model = inner
    return model


def evaluating(model):
    """Unwrap a model; copy one that trains or is compiled, with the same weights, in evaluation mode, where dropout and
    gradient checkpointing are off. The model's own mode stays, also for other threads."""
    model = plain(model)
    if not any(module.training or module._compiled_call_impl for module in model.modules()):
        return model
    return copied(model).eval()


def copied(model):
    """Copy a model with its config and hooks, but with the same weights."""
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())  # accelerate's may hold weights
    shared = chain(model.parameters(), model.buffers(), hooks)
    return copy.deepcopy(model, {id(each): each for each in shared if each is not None})


class InterceptingCache(DynamicCache):
    """A cache that keeps nothing, for one forward pass: ``intercept(layer, keys, values)`` gets what the layer
    ``kv_layers(model)[layer]`` hands over, keys after RoPE, and returns what attention reads instead, or None."""

    def __init__(self, model, intercept: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor] | None]):
        super().__init__(config=model.config)
        self.intercept = intercept
        self.numbers = {layer.layer_idx: number for number, layer in enumerate(_layers.get(model, []))}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Return what ``intercept`` says."""
        number = self.numbers.get(layer_idx, layer_idx)
        return self.intercept(number, key_states, value_states) or (key_states, value_states)


@dataclass(frozen=True)
class KVLayer:
    """A layer that stores what ``attention`` hands over."""

    layer_idx: int
    attention: nn.Module
    num_kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_kv_heads, head_dim of keys, head_dim of values)."""
        return self.num_kv_heads, self.head_dim, self.value_dim


def kv_layers(model) -> list[KVLayer]:
    """List the layers that hand keys and values to a cache. Raises ``DataError`` for a model of which no layer does,
    that caches more than that, or that has an encoder."""
    model = plain(model)
    if model not in _layers:
        _layers[model] = _ask(model)
    return _layers[model]


def max_positions(model) -> float:
    """Return how many tokens the model has positions for, by its configuration; infinity without a limit (ALiBi)."""
    named = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return named if named and named > 0 else math.inf


def _ask(model) -> list[KVLayer]:
    if model.config.is_encoder_decoder:
        raise DataError(f"{type(model).__name__} has an encoder: vqkv compresses the caches of decoders")
    layers, asked = dict[int, KVLayer](), evaluating(model)

    def note(layer_idx: int, keys: Tensor, values: Tensor) -> None:
        layers[layer_idx] = KVLayer(layer_idx, _running(), keys.shape[1], keys.shape[3], values.shape[3])

    try:
        forward(asked, torch.ones(1, 2, dtype=torch.int64), note)
    except (ValueError, AssertionError) as error:
        raise DataError(f"{type(model).__name__} does not read into caches of transformers: {error}") from error
    if not layers:
        raise DataError(f"{type(model).__name__} hands no keys and values to its cache: it has none to compress")
    if others := {type(x).__name__ for x in DynamicCache(config=model.config).layers if type(x) not in LAYERS}:
        raise DataError(
            f"{type(model).__name__} caches more than keys, values and recurrent states ({', '.join(sorted(others))}), "
            "which is not supported: use DynamicCache"
        )
    own = dict(zip(asked.modules(), model.modules(), strict=True))
    return [replace(layers[i], attention=own[layers[i].attention]) for i in sorted(layers)]


def _running() -> nn.Module:
    """Find the innermost module that runs in this thread, by its stack: hooks would see every thread's modules."""
    frame = sys._getframe()
    while frame.f_code is not nn.Module._call_impl.__code__ and frame.f_back:
        frame = frame.f_back
    return frame.f_locals["self"]


@torch.no_grad()  # weights in integers cannot be read in inference mode
def forward(model, tokens: Tensor, intercept: Callable, **arguments) -> None:
    """Pass tokens (batch, seq_len) through the model to an ``InterceptingCache``, with as few logits as it can make."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1
    model(tokens.to(model.device), past_key_values=InterceptingCache(model, intercept), use_cache=True, **arguments)
