"""What several cases of a sweep need, made once in a process."""

import json
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps

from vqkv.study.allocator import give_back
from vqkv.study.literals import plain

_held: list[OrderedDict] = []


def per_process(maxsize: int) -> Callable:
    """Decorator: keep the last ``maxsize`` results of a function of plain literals, given by keyword, until the sweep
    ends. What several cases need goes here (a model, a calibration), so that memory stays bounded; an old result goes
    before a new one is made. The result must depend on the arguments alone."""

    def decorate(function: Callable) -> Callable:
        held: OrderedDict = OrderedDict()
        _held.append(held)

        @wraps(function)
        def remembered(**arguments):
            key = json.dumps(plain(arguments, f"arguments of {function.__name__}"), sort_keys=True)
            if key in held:
                value = held.pop(key)
            else:
                while len(held) >= maxsize:
                    held.popitem(last=False)
                value = function(**arguments)
            held[key] = value
            return value

        return remembered

    return decorate


def forget() -> None:
    """Drop what ``per_process`` keeps in this process, and its memory."""
    for held in _held:
        held.clear()
    give_back()
