"""n-bit codes <-> bytes on a CPU: eight codes, which fill whole bytes, at a time."""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.kernels.machine import compiled, index, serves
from vqkv.kernels.packing import naive

EIGHT, WORD = index(8), index(64)  # bits


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Compute ``naive.pack_codes``."""
    if bits == 8:
        return codes.to(torch.uint8, copy=True).contiguous()
    if not serves(codes) or not codes.numel():
        return naive.pack_codes(codes, bits)
    count = codes.shape[-1]
    padded = F.pad(codes.to(torch.uint8 if bits < 8 else torch.int32), (0, -count % 8)).contiguous()
    packed = torch.empty(*codes.shape[:-1], padded.shape[-1] * bits // 8, dtype=torch.uint8)
    _loops(bits)[0](padded.view(-1, 8).numpy(), packed.view(-1, bits).numpy())
    return packed[..., : -(-count * bits // 8)].contiguous()


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Compute ``naive.unpack_codes`` in uint8 up to 8 bits (at 8, ``packed`` itself), then int16 (at 16, int32)."""
    dtype = torch.uint8 if bits <= 8 else torch.int16 if bits < 16 else torch.int32
    if bits == 8:
        return packed
    if not serves(packed) or not packed.numel():
        return naive.unpack_codes(packed, bits, count).to(dtype)
    units = F.pad(packed, (0, -packed.shape[-1] % bits)).contiguous()
    codes = torch.empty(*packed.shape[:-1], units.shape[-1] * 8 // bits, dtype=dtype)
    _loops(bits)[1](units.view(-1, bits).numpy(), codes.view(-1, 8).numpy())
    return codes[..., :count].contiguous()


@cache
def _loops(bits: int) -> tuple:
    """Compile loops for so many bits, whose shifts are constants: codes (units, 8) -> bytes (units, bits), and back."""
    width, mask = index(bits), np.uint32((1 << bits) - 1)

    @compiled()
    def pack(codes, packed):
        for i in range(index(len(codes))):
            low = high = np.uint64(0)  # words of the unit's string
            for j in range(EIGHT):
                code, start = np.uint64(codes[i, j]), j * width
                if start >= WORD:
                    high |= code << (start - WORD)
                else:
                    low |= code << start
                    high |= code >> (WORD - start) if start + width > WORD else np.uint64(0)
            for j in range(width):
                packed[i, j] = low >> j * EIGHT if j < EIGHT else high >> (j - EIGHT) * EIGHT

    @compiled()
    def unpack(packed, codes):
        for i in range(index(len(packed))):
            for j in range(EIGHT):
                word, first = np.uint32(0), j * width // EIGHT
                for n in range(min(index(3), width - first)):  # bytes that the code may lie in
                    word |= np.uint32(packed[i, first + n]) << np.uint32(n * EIGHT)
                codes[i, j] = word >> np.uint32(j * width % EIGHT) & mask

    return pack, unpack
