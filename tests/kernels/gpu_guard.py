"""What tests of Triton's kernels share: tensors in the midst of garbage, so that a read beyond them shows."""

import math

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARGIN = 32  # elements


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def garbage(shape, like: torch.Tensor) -> torch.Tensor:
    value = math.nan if like.dtype.is_floating_point else 255 if like.dtype == torch.uint8 else -1
    return torch.full(shape, value, dtype=like.dtype, device=DEVICE)


def amid(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous, garbage before and after it."""
    buffer = garbage((x.numel() + 2 * MARGIN,), x)
    return buffer[MARGIN : MARGIN + x.numel()].view(x.shape).copy_(x)


def apart(x: torch.Tensor, by: int = 3) -> torch.Tensor:
    """x with garbage around it along every axis: strided, and at no aligned address."""
    buffer = garbage([size + 2 * by for size in x.shape], x)
    return buffer[tuple(slice(by, by + size) for size in x.shape)].copy_(x)


def poisoned(x: torch.Tensor, strides=None, value=math.nan) -> torch.Tensor:
    """x, of any strides, inside a larger tensor of ``value``: on either side, and between rows that have a gap."""
    strides = strides or x.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    around = torch.full((span + 2 * MARGIN,), value, dtype=x.dtype, device=x.device)
    return around.as_strided(x.shape, strides, MARGIN).copy_(x)


def close(found: torch.Tensor, wanted: torch.Tensor, relative: float) -> None:
    """To ``relative`` of the largest value."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    if found.numel():
        error, size = (found.double() - wanted.double()).abs().max(), wanted.double().abs().max()
        assert error <= relative * size, (error, size)
