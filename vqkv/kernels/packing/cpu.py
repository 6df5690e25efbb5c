"""n-bit codes <-> bytes, and bytes -> rows of a table: plain torch, any device.

Codes that lie side by side in a word are moved apart, one to a lane of 8 or 16 bits, by halves: the upper half of a
word's codes first, then the upper half of each half. That takes two operations a step on whole words, however many
codes they hold; code by code it would be several for each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.kernels.machine import serves
from vqkv.kernels.packing import naive

WIDE = {1: torch.int64, 2: torch.int32, 4: torch.int16}  # a byte's codes fill this type, at 8 bits each
ELEMENT = {4: torch.float32, 8: torch.float64, 16: torch.complex128}  # bytes -> a type of that size


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """``naive.unpack_codes`` in uint8 up to 8 bits (at 8, ``packed`` itself), then int16 (at 16,
    int32)."""
    if bits == 8:
        return packed
    if not packed.numel():
        return packed.new_empty(*packed.shape[:-1], count)
    if bits in WIDE:
        words, lane = packed.contiguous().to(WIDE[bits]), torch.uint8
    elif bits < 8:
        words, lane = F.pad(_units(packed, bits), (0, 8 - bits)).view(torch.int64), torch.uint8
    else:
        words, lane = _fours(_units(packed, bits), bits), torch.int16
    row = packed.shape[-1] * (8 // bits) if bits in WIDE else count + -count % 8
    codes = _spread(words, bits, lane.itemsize * 8).view(lane).view(*packed.shape[:-1], row)[..., :count].contiguous()
    return codes if bits < 16 else codes.to(torch.int32) & 0xFFFF


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """``naive.pack_codes``."""
    if bits == 8:
        return codes.to(torch.uint8, copy=True).contiguous()
    count = codes.shape[-1]
    size = (count * bits + 7) // 8
    if not codes.numel():
        return codes.new_empty(*codes.shape[:-1], size, dtype=torch.uint8)
    lanes = codes.to(torch.uint8 if bits < 8 else torch.int16)
    if bits in WIDE:
        rows = F.pad(lanes, (0, -count % (8 // bits))).reshape(-1)  # a row on its own may have any strides
        return _join(rows.view(WIDE[bits]), bits, 8).to(torch.uint8).view(*codes.shape[:-1], size)
    words = F.pad(lanes, (0, -count % 8)).reshape(-1, 8).view(torch.int64)
    units = _bytes(_join(words, bits, lanes.itemsize * 8), bits)
    return units.reshape(*codes.shape[:-1], -(-count // 8) * bits)[..., :size].contiguous()


def by_byte(table: Tensor, bits: int) -> Tensor:
    """Values that each byte of codes stands for: table (2^bits, values), ``bits`` dividing 8 -> (256, values of all
    codes of a byte), for ``lookup``."""
    shifts = torch.arange(0, 8, bits, device=table.device)
    codes = (torch.arange(256, device=table.device).unsqueeze(-1) >> shifts) & (2**bits - 1)
    return table[codes].flatten(1).contiguous()


def lookup(packed: Tensor, table: Tensor) -> Tensor:
    """``naive.lookup``, for which a byte's values are gathered as one wide element."""
    wide = ELEMENT.get(table.shape[1] * table.itemsize)
    if wide is None or not serves(packed):
        return naive.lookup(packed, table.to(packed.device))
    values = table.view(wide).view(-1).index_select(0, packed.reshape(-1).to(torch.int32)).view(table.dtype)
    return values.view(*packed.shape[:-1], packed.shape[-1] * table.shape[1])


def _units(packed: Tensor, bits: int) -> Tensor:
    """(..., size) -> (units, bits): as many bytes as eight codes fill; zeros to the end of each row's last unit."""
    missing = -packed.shape[-1] % bits
    return (F.pad(packed, (0, missing)) if missing else packed).reshape(-1, bits)


def _fours(units: Tensor, bits: int) -> Tensor:
    """Units of 9 to 16 bits a code -> int64 (units, 2): in each word the bits of four codes, and zeros."""
    if bits % 2 == 0:
        return F.pad(units.view(-1, bits // 2), (0, 8 - bits // 2)).view(torch.int64).view(-1, 2)
    words, width = F.pad(units, (0, 16 - bits)).view(torch.int64), 4 * bits
    low, high = words.unbind(-1)
    torch.bitwise_left_shift(high, 64 - width, out=high)
    high |= (low >> width) & (1 << 64 - width) - 1  # the shift drags the sign along
    low &= (1 << width) - 1
    return words


def _bytes(words: Tensor, bits: int) -> Tensor:
    """The inverse of what ``unpack_codes`` makes of units: words (units, 1 or 2) -> uint8 (units, bits)."""
    width = 4 * bits
    if bits < 8:
        return words.view(torch.uint8)[:, :bits]
    if bits % 2 == 0:
        return words.view(-1, 1).view(torch.uint8)[:, : bits // 2]
    low, high = words.unbind(-1)
    return torch.stack([low | high << width, high >> 64 - width], dim=-1).view(torch.uint8)[:, :bits]


def _spread(words: Tensor, bits: int, lane: int) -> Tensor:
    """Codes side by side at the low end of each word -> one every ``lane`` bits."""
    half = words.itemsize * 8 // lane // 2
    while half and bits < lane:
        upper = words & _blocks(half * bits, 2 * half * lane, words.itemsize * 8) << half * bits
        words = torch.add(words, upper, alpha=(1 << half * (lane - bits)) - 1)  # moves it up
        half //= 2
    return words


def _join(words: Tensor, bits: int, lane: int) -> Tensor:
    """The inverse of ``_spread``."""
    half = 1
    while half * lane < words.itemsize * 8 and bits < lane:
        shift = half * (lane - bits)
        upper = words >> shift & _blocks(half * bits, 2 * half * lane, words.itemsize * 8) << half * bits
        words = torch.sub(words, upper, alpha=(1 << shift) - 1)
        half *= 2
    return words


def _blocks(ones: int, apart: int, width: int) -> int:
    """A mask of runs of ``ones`` ones, one run every ``apart`` bits."""
    return sum(((1 << ones) - 1) << start for start in range(0, width, apart))
