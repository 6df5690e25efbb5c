"""What a forward pass is given with its tokens, noted as it begins by a hook on the model."""

import inspect
import threading
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from vqkv.errors import DataError

_registering = threading.Lock()


@dataclass
class PassInputs:
    """A mask (batch, slots) that says what is padding; positions; the ``module`` that got them, None if no pass has
    begun; up to how many slots attention may read packed."""

    mask: Tensor | None = None
    position_ids: Tensor | None = None
    module: int | None = None
    packed_slots: int = 0


def first_modules(model) -> list:
    """List the modules that may get a pass's mask and positions first: some models call their decoder themselves
    (OPT)."""
    return [model.base_model, model.get_decoder()]


def watch(model) -> None:
    """Have ``begin_pass`` called of each cache of ``model`` that a forward pass is given; for good, as hooks that come
    and go race with passes of other threads."""
    with _registering:
        for module in first_modules(model):
            if _begin_pass not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_begin_pass, with_kwargs=True)


@torch.compiler.disable
def _begin_pass(module, args, kwargs=None) -> None:
    """Without ``kwargs`` torch is still registering it, for a cache that no pass has yet."""
    kwargs = kwargs or {}
    for cache in (*args, *kwargs.values()):
        if isinstance(cache, Cache) and hasattr(cache, "begin_pass"):
            model = cache.model()  # a copied model has copies of its hooks
            if model is not None and module in first_modules(model):
                given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments if args else kwargs
                cache.begin_pass(id(module), given)


def check_input(held: int, given: dict) -> None:
    """Raise ``DataError`` for arguments that leave a cache of ``held`` slots aside or give some of its tokens again."""
    if given.get("use_cache") is False:
        raise DataError("a cache was given with use_cache=False, which reads none: leave out one of both")
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    new, mask, ids = 1 if tokens is None else tokens.shape[1], given.get("attention_mask"), given.get("position_ids")
    slots = mask.shape[1] if isinstance(mask, Tensor) and mask.ndim == 2 else held + new
    if held and mask is None and ids is not None and ids.ndim == 2 and ids.numel():
        slots = int(ids.max()) + 1  # all that tells that assisted decoding reads its prompt again
    if tokens is not None and (slots < held + new or (held and not new)):
        raise DataError(
            f"the cache holds {held} tokens, {new} came, and the prompt (its attention_mask) has {slots}: pass the "
            "whole prompt, cached tokens included, or crop() the cache; assisted decoding takes an empty one"
        )
