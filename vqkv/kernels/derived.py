"""Tables computed from a tensor, remembered with it: rearranging codebooks costs more than encoding a few tokens."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Result = TypeVar("Result")
_tables: list[WeakTensorKeyDictionary] = []  # of every function, tensor -> (version, {view of it and key: result})


def remembered(build: Callable[..., Result]) -> Callable[..., Result]:
    """Decorator: ``build(tensor, *key)`` runs once a key while the tensor, or what it is a view of, lives and is not
    written to; writing through ``.data`` or ``.numpy()`` goes unnoticed."""
    results_of = WeakTensorKeyDictionary()
    _tables.append(results_of)

    @wraps(build)
    def look_up(tensor: Tensor, *key) -> Result:
        if tensor.is_inference():
            return build(tensor, *key)  # has no version counter to notice writes by
        owner = tensor if tensor._base is None else tensor._base  # a codec makes a new view for every payload
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), *key)
        version, results = results_of.get(owner, (None, {}))
        if version != owner._version:
            results = {}
            results_of[owner] = (owner._version, results)
        if view not in results:
            results[view] = build(tensor.detach(), *key)
        return results[view]

    return look_up


def tables_of(tensor: Tensor) -> list:
    """List all that is remembered of a tensor."""
    return [
        result for results_of in _tables if tensor in results_of for result in [*results_of[tensor][1].values()]
    ]  # a copy, as other threads add
