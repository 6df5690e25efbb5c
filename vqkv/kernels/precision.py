"""Real fp32 arithmetic, whatever the caller has set."""

import threading
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

NOTHING_TO_CHANGE = nullcontext()
_lock = threading.Lock()
_callers: list[str] = []  # the precision set outside, once for every thread that is inside: it is the process's


def full_precision(device: torch.device) -> AbstractContextManager:
    """No TF32, bf16 or autocast inside: what is decoded must be what was encoded, whatever either ran under."""
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
        with _lock:  # the last one out puts back what the first one found
            before = _callers.pop()
            if not _callers:
                torch.set_float32_matmul_precision(before)
