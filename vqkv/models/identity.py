"""Which model stored keys and values are of: all of its weights and its adapters, as they are now."""

import hashlib
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vqkv.runtime.files import raw_bytes, tensors_sha256

# Of adapters (peft): which act, and whether they are merged into the weights.
SWITCHES = {
    "active_adapter", "active_adapters", "_active_adapter", "disable_adapters", "_disable_adapters", "merged",
    "merged_adapters",
}  # fmt: skip
FACTORS = SWITCHES | {"scaling", "attention_scaling"}
SAMPLES = 8  # elements of a tensor that a stamp looks at

_digests: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> by stamp the sha256 of a weight
_switched: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> its modules with SWITCHES, weakly


def identity(model) -> str:
    """Sixteen hex digits of all weights (bytes, types, shapes), adapters, merged or not, and RoPE parameters.

    Only weights whose ``stamp`` changed are read again. Writes past torch's version counters (through ``.data``, or
    into weights made in inference mode) are noticed if they change a sampled element; those into weights that a device
    map keeps elsewhere are not."""
    before, now = _digests.get(model, {}), dict[tuple, str]()
    weights, state = _asked(model)
    for mark, read in weights:
        now[mark] = before.get(mark) or now.get(mark) or tensors_sha256(("", x) for x in read())
    _digests[model] = now
    return hashlib.sha256(repr([state, [now[mark] for mark, _ in weights]]).encode()).hexdigest()[:16]


def stamp(model) -> int:
    """Changes, within this process, when the ``identity`` does; takes milliseconds and reads a few elements."""
    weights, state = _asked(model)
    return hash((repr(state), *(mark for mark, _ in weights)))


def switches(model) -> str:
    """Which adapters act, as of the modules that had any when ``stamp`` was last asked; for every forward pass."""
    modules = (module() for module in _switched.get(model, ()))
    return repr([_state(module, SWITCHES) for module in modules if module is not None])


def packed(module: nn.Module) -> list[Tensor]:
    """What torch's quantized modules hold beside parameters and buffers, unpacked."""
    if not any(isinstance(x, torch.ScriptObject) for x in vars(module).values()):
        return []
    found = [x for value in module.state_dict().values() for x in (value if isinstance(value, tuple) else (value,))]
    return [x.dequantize() for x in found if isinstance(x, Tensor)]


def fetched(module: nn.Module):
    """A context in which the module's own weights are here, also those that a device map keeps elsewhere."""
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


@torch.no_grad()
def _asked(model) -> tuple[list[tuple[tuple, partial[list[Tensor]]]], list]:
    """(stamp, how to read it) of each weight; RoPE and adapters."""
    modules = [*model.modules()]
    _switched[model] = [weakref.ref(module) for module in modules if not SWITCHES.isdisjoint(vars(module))]
    held = [(number, module, name, x) for number, module in enumerate(modules) for name, x in _held(module)]
    samples = _samples([x for *_, x in held if isinstance(x, Tensor) and not (x.is_meta or x.is_quantized)])
    weights = [(_mark(n, name, x, samples), partial(_read, module, name, x)) for n, module, name, x in held]
    rope = getattr(model.config.get_text_config(), "rope_parameters", None)
    return weights, [rope, *(entry for module in modules for entry in _state(module, FACTORS))]


def _mark(number: int, name: str, x, samples: dict[int, bytes]) -> tuple:
    if not isinstance(x, Tensor):
        return (id(x),)
    if x.is_meta:
        return number, name
    return x.data_ptr(), None if x.is_inference() else x._version, x.dtype, x.shape, samples.get(id(x))


def _read(module: nn.Module, name: str, x) -> list[Tensor]:
    if not isinstance(x, Tensor):
        return packed(module)
    if not x.is_meta:
        return [x]
    with fetched(module):
        return [x.clone() for own, x in _held(module) if own == name]


def _state(module: nn.Module, names: set[str]) -> list:
    """Attributes of plain values, a name as a list of one: others' text may be an address."""
    kept = [(name, vars(module)[name]) for name in sorted(names & vars(module).keys())]
    plain = (bool, int, float, str, list, tuple, dict)
    return [(name, [x] if isinstance(x, str) else x) for name, x in kept if isinstance(x, plain)]


def _held(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters and buffers; of a module without others in it also tensors that it holds in other ways (hqq)."""
    boxes: list[dict[str, Any]] = [module._parameters, module._buffers]
    changing = any(kind in str(vars(module).get("rope_type")) for kind in ("dynamic", "longrope"))  # with the length
    if not module._modules and not type(module).__module__.startswith("torch.nn."):
        boxes = [vars(module), *(x for x in vars(module).values() if isinstance(x, dict) and x)]
    for box in boxes:
        for name, x in box.items():
            if isinstance(x, (Tensor, torch.ScriptObject)) and not (changing and name == "inv_freq"):
                yield from ((name, part) for part in _parts(x))


def _parts(x) -> Iterator:
    """A wrapper (quanto's, torchao's) has a storage in name only: the tensors that it wraps stand for it."""
    if hasattr(type(x), "__tensor_flatten__"):
        for name in x.__tensor_flatten__()[0]:
            yield from _parts(getattr(x, name))
    else:
        yield x


def _samples(weights: list[Tensor]) -> dict[int, bytes]:
    """A few elements of each, by id; all of a type and device are read at once."""
    alike, found = defaultdict[tuple, list[Tensor]](list), dict[int, bytes]()
    for x in filter(Tensor.numel, weights):
        alike[x.dtype, x.device].append(x)
    for (dtype, _), group in alike.items():
        flat = (x if x.is_contiguous() else x.flatten() for x in group)
        data = bytes(raw_bytes(torch.cat([x.as_strided((SAMPLES,), (x.numel() // SAMPLES,)) for x in flat])))
        size = SAMPLES * dtype.itemsize
        found |= {id(x): data[i * size : (i + 1) * size] for i, x in enumerate(group)}
    return found
