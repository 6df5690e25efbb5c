"""Real fp32 arithmetic, whatever the caller has set."""

from contextlib import contextmanager

import torch


@contextmanager
def full_precision(device: torch.device):
    """No TF32, bf16 or autocast inside: error bounds hold for real fp32 only, and what is decoded must be what was
    encoded, whatever either ran under."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
