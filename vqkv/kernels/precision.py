"""Real fp32 arithmetic, whatever the caller has set, and products that do not depend on how many rows come at once."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional

ROWS = 32  # multiplied at a time at least: BLAS sums fewer in another order, and a token would depend on its company

NOTHING_TO_CHANGE = nullcontext()
_lock = threading.Lock()
_callers: list[str] = []  # the precision set outside, once for every thread that is inside: it is the process's


def full_precision(device: torch.device) -> AbstractContextManager:
    """Turn TF32, bf16 and autocast off inside: what is decoded must be what was encoded, whatever either ran under."""
    with _lock:
        highest = torch.get_float32_matmul_precision() == "highest" and not _callers
    if highest and not torch.is_autocast_enabled(device.type):
        return NOTHING_TO_CHANGE  # entering what follows takes longer than storing a token
    return _changed(device)


@contextmanager
def _changed(device: torch.device):
    with _lock:
        _callers.append(_callers[0] if _callers else torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        with _lock:  # the last one out restores what was set before the first one
            before = _callers.pop()
            if not _callers:
                torch.set_float32_matmul_precision(before)


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply ``function`` to x (..., rows, channels), each row as if alone: zeros make rows a multiple of ``ROWS``."""
    missing = -x.shape[-2] % ROWS
    return function(functional.pad(x, (0, 0, 0, missing)) if missing else x)[..., : x.shape[-2], :]


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply x (..., channels) by matrix (channels, outputs), each row as if it came alone."""
    return by_rows(lambda rows: rows @ matrix, x.flatten(0, -2)).view(*x.shape[:-1], matrix.shape[-1])
