"""The transformers model itself: out of its wrappers, and not in training mode."""

import copy
from itertools import chain
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from vqkv.errors import DataError


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
