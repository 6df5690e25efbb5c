"""Tables computed from a tensor, remembered with it: rearranging codebooks costs more than encoding a few tokens."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Result = TypeVar("Result")
_known: list[WeakTensorKeyDictionary] = []  # of every function, tensor -> (version, {place of a view and key: result})


def remembered(build: Callable[..., Result]) -> Callable[..., Result]:
    """Decorator: ``build(tensor, *key)`` runs once a key while the tensor, or what it is a view of, lives and is not
    written to; writing through ``.data`` or ``.numpy()`` goes unnoticed."""
    known = WeakTensorKeyDictionary()
    _known.append(known)

    @wraps(build)
    def look_up(tensor: Tensor, *key) -> Result:
        if tensor.is_inference():
            return build(tensor, *key)  # has no version counter to notice writes by
        owner = tensor if tensor._base is None else tensor._base  # a codec makes a new view for every payload
        place = (tensor.storage_offset(), tensor.shape, tensor.stride(), *key)
        version, results = known.get(owner, (None, {}))
        if version != owner._version:
            results = {}
            known[owner] = (owner._version, results)
        if place not in results:
            results[place] = build(tensor.detach(), *key)
        return results[place]

    return look_up


def tables_of(tensor: Tensor) -> list:
    """All that is remembered of a tensor."""
    return [
        result for known in _known if tensor in known for result in [*known[tensor][1].values()]
    ]  # a copy, as other threads add
