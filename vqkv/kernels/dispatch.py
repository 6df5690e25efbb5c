"""The choice between implementations of an operation: ``triton`` on a GPU, ``cpu`` elsewhere (compiled
loops for a CPU's tensors, torch for others), and ``naive`` when asked for. ``which`` says so."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from inspect import signature
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from vqkv.errors import DataError, UnknownNameError
from vqkv.kernels import naive

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
NAMES = ("triton", "cpu", "naive")
TRITON = (
    "rvq_encode", "affine_encode", "decode", "decode_attention", "pack_codes", "unpack_codes", "rans_encode",
    "rans_decode",
)  # operations that have a Triton kernel  # fmt: skip
OPERATIONS = (*TRITON, "rvq_decode", "rvq_statistics", "grouped_encode", "trellis_encode", "trellis_decode")

_forced: list[str] = []  # what ``using`` asks for, the innermost last


@contextmanager
def using(name: str) -> Iterator[None]:
    """Within the context, every operation that has an implementation ``name`` (``triton``, ``cpu`` or ``naive``) runs
    it. Raises ``UnknownNameError`` for another name, ``DataError`` where ``triton`` cannot run."""
    if name not in NAMES:
        raise UnknownNameError("kernels", name, NAMES)
    runs = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    if name == "triton" and not (has_triton() and runs):
        raise DataError("no Triton kernels: pip install triton, on a machine with a GPU or with TRITON_INTERPRET=1")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


def which(operation: str, x: Tensor, /, *arguments, **more) -> str:
    """Name the implementation that serves ``operation`` for tensors where ``x`` is, and for these arguments: all that
    the operation takes, or none."""
    on_gpu = x.is_cuda and has_triton() and not torch.compiler.is_compiling()
    name = _forced[-1] if _forced else "triton" if on_gpu else "cpu"
    if name != "triton" or operation not in TRITON:
        return "cpu" if name == "triton" else name
    can_serve = getattr(_module(operation, name), f"can_{operation}", None)
    return name if can_serve is None or not (arguments or more) or can_serve(*arguments, **more) else "cpu"


@cache
def has_triton() -> bool:
    """Tell whether triton can be imported: it cannot on every system that torch runs on."""
    return importlib.util.find_spec("triton") is not None


def _module(operation: str, name: str) -> ModuleType:
    if name == "triton":
        return importlib.import_module(getattr(naive, operation).__module__.replace("naive", "triton"))
    from vqkv.kernels import cpu  # not before: a model needs no numba. A graph can be traced through it

    return cpu if name == "cpu" else naive


def _dispatched(naive_function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function that calls the implementation that ``which`` names."""
    operation, first = naive_function.__name__, next(iter(signature(naive_function).parameters))

    @wraps(naive_function)
    def serve(*arguments: Arguments.args, **more: Arguments.kwargs) -> Result:
        given: Any = arguments[0] if arguments else more[first]
        x = given if isinstance(given, Tensor) else given.codes
        return getattr(_module(operation, which(operation, x, *arguments, **more)), operation)(*arguments, **more)

    serve.__module__ = __name__  # where pickle finds it
    return serve


rvq_encode = _dispatched(naive.rvq_encode)
rvq_decode = _dispatched(naive.rvq_decode)
rvq_statistics = _dispatched(naive.rvq_statistics)
affine_encode = _dispatched(naive.affine_encode)
grouped_encode = _dispatched(naive.grouped_encode)
decode = _dispatched(naive.decode)
decode_attention = _dispatched(naive.decode_attention)
pack_codes = _dispatched(naive.pack_codes)
unpack_codes = _dispatched(naive.unpack_codes)
rans_encode = _dispatched(naive.rans_encode)
rans_decode = _dispatched(naive.rans_decode)
trellis_encode = _dispatched(naive.trellis_encode)
trellis_decode = _dispatched(naive.trellis_decode)
