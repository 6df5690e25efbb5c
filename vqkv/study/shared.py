"""What several cases of a sweep need, made once in a process for each set of plain literals, and its memory."""

import ctypes
import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import wraps

from vqkv.errors import DataError

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
LARGEST_INT = 2**31 - 1  # bytes that stay
_held: list[OrderedDict] = []


def plain(value, what: str):
    """Return ``value`` as JSON gives it back, a dataclass as its arguments. Raises ``DataError`` where JSON cannot."""
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=_arguments))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{what}: {error}. They are stored as JSON: "
            "use finite numbers, strings, booleans, None, and lists or mappings of these."
        ) from error


def digest(value) -> str:
    """Return ten hex digits that name a set of parameters."""
    return hashlib.sha256(json.dumps(plain(value, "parameters"), sort_keys=True).encode()).hexdigest()[:10]


def _arguments(value) -> dict:
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} is not JSON serializable")
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


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


def keep_freed_memory() -> None:
    """Keep freed memory in this process from now on; ``give_back`` returns what is free at that moment.

    By default glibc returns large tensors to the system at once, and gets the next ones page by page. That takes longer
    than many an operation on them (a softmax of 9M values: 22 ms, of which 15). Elsewhere nothing happens.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, LARGEST_INT)


def give_back() -> None:
    """Return freed memory to the system now."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
