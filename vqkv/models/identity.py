"""Which model stored keys and values are of: all of its weights and its adapters, as they are now."""

import hashlib
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vqkv.errors import DataError
from vqkv.runtime.files import raw_bytes, tensors_sha256

# Of adapters (peft): which act, whether they are merged into the weights, and their factors.
ADAPTERS = {
    "active_adapter", "active_adapters", "_active_adapter", "disable_adapters", "_disable_adapters", "merged",
    "merged_adapters", "scaling", "attention_scaling",
}  # fmt: skip
SAMPLES = 8  # elements of a tensor that a stamp looks at

_digests: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> by stamp the sha256 of a weight


def identity(model) -> str:
    """Name a model in sixteen hex digits by all weights (bytes, types, shapes), adapters and RoPE parameters.

    Only weights whose ``stamp`` changed are read again. Writes past torch's version counters (through ``.data``, or
    into weights made in inference mode) are noticed if they change a sampled element, unless a device map keeps it."""
    before, now = _digests.get(model, {}), dict[tuple, str]()
    weights, state = _ask(model)
    for mark, module, name, x in weights:
        if not (digest := before.get(mark) or now.get(mark)):
            with fetched(module):
                here = [part for own, part in _held(module) if own == name] if x.is_meta else [x]
                digest = tensors_sha256(("", part) for part in here)
        now[mark] = digest
    _digests[model] = now
    return hashlib.sha256(repr([state, [now[mark] for mark, *_ in weights]]).encode()).hexdigest()[:16]


def stamp(model) -> int:
    """Return what changes, within this process, when the ``identity`` does, in milliseconds, from a few elements."""
    weights, state = _ask(model)
    return hash((repr(state), *(mark for mark, *_ in weights)))


def fetched(module: nn.Module):
    """Open a context in which the module's own weights are here, also those that a device map keeps elsewhere."""
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


@torch.no_grad()
def _ask(model) -> tuple[list[tuple[tuple, nn.Module, str, Tensor]], list]:
    """Return stamp, module, name and tensor of each weight; RoPE and adapters."""
    weights, state = [], [getattr(model.config.get_text_config(), "rope_parameters", None)]
    for number, module in enumerate(model.modules()):
        for name in sorted(ADAPTERS & vars(module).keys()):
            x = vars(module)[name]
            if isinstance(x, (bool, int, float, str, list, tuple, dict)):  # others' text may be an address
                state.append((name, [x] if isinstance(x, str) else x))
        for name, x in _held(module):
            version = None if x.is_inference() else x._version
            mark: tuple = number, name
            if not x.is_meta:
                sample = b"" if x.is_quantized else bytes(raw_bytes(x.flatten()[:: max(1, x.numel() // SAMPLES)]))
                mark = x.data_ptr(), version, x.dtype, x.shape, sample
            weights.append((mark, module, name, x))
    return weights, state


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """List parameters and buffers; of a module without others in it also tensors held in other ways (hqq)."""
    boxes: list[dict[str, Any]] = [module._parameters, module._buffers]
    changing = any(kind in str(vars(module).get("rope_type")) for kind in ("dynamic", "longrope"))  # with the length
    if not module._modules and not type(module).__module__.startswith("torch.nn."):
        boxes = [vars(module), *(x for x in vars(module).values() if isinstance(x, dict) and x)]
    for box in boxes:
        for name, x in box.items():
            if isinstance(x, torch.ScriptObject):
                remedy = "quantize with torchao, quanto or bitsandbytes"
                raise DataError(f"{type(module).__name__} packs its weights where they cannot be read: {remedy}")
            if isinstance(x, Tensor) and not (changing and name == "inv_freq"):
                yield from ((name, part) for part in _parts(x))


def _parts(x: Tensor) -> Iterator[Tensor]:
    """A wrapper (quanto's, torchao's) has a storage in name only: the tensors that it wraps stand for it."""
    if (flatten := getattr(x, "__tensor_flatten__", None)) is not None:
        for name in flatten()[0]:
            yield from _parts(getattr(x, name))
    else:
        yield x
