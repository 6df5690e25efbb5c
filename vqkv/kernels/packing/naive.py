"""Bit strings code by code."""

import torch
import torch.nn.functional as F
from torch import Tensor


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., count), below 2^bits, into uint8 (..., ceil(count * bits / 8)): code i is the bits i * bits to
    (i + 1) * bits of its row's string, lowest first; zeros fill the last byte."""
    string = (codes.to(torch.int32).unsqueeze(-1) >> torch.arange(bits, device=codes.device) & 1).flatten(-2)
    octets = F.pad(string, (0, -string.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (octets << torch.arange(8, device=codes.device)).sum(dim=-1).to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo ``pack_codes``: uint8 (..., ceil(count * bits / 8)) -> codes (..., count) in some integer type,
    naive int64; for 8 bits perhaps ``packed`` itself."""
    string = (packed.to(torch.int32).unsqueeze(-1) >> torch.arange(8, device=packed.device) & 1).flatten(-2)
    codes = string[..., : count * bits].unflatten(-1, (count, bits))
    return (codes << torch.arange(bits, device=packed.device)).sum(dim=-1)
