"""Real fp32 arithmetic, whatever the caller has set."""

from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

NOTHING_TO_CHANGE = nullcontext()


def full_precision(device: torch.device) -> AbstractContextManager:
    """No TF32, bf16 or autocast inside: what is decoded must be what was encoded, whatever either ran under."""
    if torch.get_float32_matmul_precision() == "highest" and not torch.is_autocast_enabled(device.type):
        return NOTHING_TO_CHANGE  # entering what follows takes longer than storing a token
    return _changed(device)


@contextmanager
def _changed(device: torch.device):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
