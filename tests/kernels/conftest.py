"""Tests of Triton's kernels, left out where there is no Triton: outputs between elements that nothing may write."""

import math
from importlib.util import find_spec

import pytest
import torch
from views import MARGIN

SENTINEL = 77
collect_ignore_glob = [] if find_spec("triton") else ["test_gpu_*.py"]


@pytest.fixture
def guarded(monkeypatch):
    """What a kernel's wrapper allocates lies between elements that nothing may write."""
    buffers = []

    def empty(*shape, dtype=None, device=None):
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        count = math.prod(shape)
        buffers.append((torch.full((count + 2 * MARGIN,), SENTINEL, dtype=dtype, device=device), count))
        return buffers[-1][0][MARGIN : MARGIN + count].view(shape)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "zeros", lambda *shape, **kind: empty(*shape, **kind).zero_())
    yield
    monkeypatch.undo()
    assert buffers
    for buffer, count in buffers:
        assert (buffer[:MARGIN] == SENTINEL).all() and (buffer[MARGIN + count :] == SENTINEL).all()
