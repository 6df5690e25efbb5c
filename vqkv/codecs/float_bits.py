"""Values of 16 bits, bit for bit: their exponents vary little within a channel, and take few bits by rANS."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vqkv.codecs.stage import Side
from vqkv.codecs.streams import MOST_LANES, SMOOTHING, StreamQuantizer, frequencies
from vqkv.kernels.entropy.code import Code, make_code

MANTISSA = {torch.bfloat16: 7, torch.float16: 10}  # bits
REACH = 20  # exponents to either side of a channel's own, that a table tells apart
LEVELS = 4 * REACH + 2
SKEWS = (0.02, 0.2)  # shares of the rarer sign that divide channels into three tables


@dataclass(eq=False)
class FloatBits(StreamQuantizer):
    """bfloat16 or float16 values bit for bit: sign and exponent entropy-coded, the mantissa as it is (as ZipNN and
    DFloat11 do for weights). The type is the first of the two that holds all values of the first batch; values that
    neither holds, of a model in float32, are rounded to float16.

    Exponents are counted from each channel's most frequent one, int16 ``exponents`` (num_kv_heads, channels), signs
    from its more frequent one; ``kinds``, uint8 of that shape, are 2 * table + sign. There are three tables, of
    channels whose sign varies more or less: uint16 ``frequencies`` (3, symbols), that of the escape last.
    """

    lanes: int = 4
    limits = {"lanes": (1, MOST_LANES)}
    by_head = True

    def build(self, shape: tuple[int, ...]) -> None:
        super().build(shape)
        self.heads, self.num_tables, self._counts = shape[0], shape[-1], None
        for name in ("mantissa", "exponents", "kinds", "frequencies"):
            self.register_buffer(name, None)

    def partial_fit(self, x: Tensor) -> None:
        """The first batch decides the type, exponents and signs; symbols of all batches are counted."""
        if self.mantissa is None:
            fitting = (bits for dtype, bits in MANTISSA.items() if torch.equal(x.to(dtype).float(), x))
            self.mantissa = torch.tensor(next(fitting, MANTISSA[torch.float16]), dtype=torch.uint8)
            high = self._bits(x).transpose(0, 1).flatten(1, -2) >> int(self.mantissa)  # heads, tokens, channels
            sign = high >> self._exponent_bits
            self.exponents = (high & ((1 << self._exponent_bits) - 1)).mode(1).values.to(torch.int16)
            most = (2 * sign.sum(1) > sign.shape[1]).to(torch.uint8)
            rarer = (sign != most.unsqueeze(1)).double().mean(1)
            self.kinds = 2 * sum((rarer > skew).to(torch.uint8) for skew in SKEWS) + most
            self._counts = torch.zeros(len(SKEWS) + 1, LEVELS + 1, dtype=torch.int64, device=x.device)
        symbols = self.encode(x)[0].unflatten(-1, (-1, self.num_tables)) >> int(self.mantissa)
        places = symbols + 2 * REACH
        places = torch.where((places >= 0) & (places < LEVELS), places, LEVELS)
        places = places + (self.kinds.long() >> 1).view(1, self.heads, 1, 1, -1) * (LEVELS + 1)
        self._counts += torch.bincount(places.flatten(), minlength=self._counts.numel()).view_as(self._counts)

    def finalize(self) -> None:
        self.frequencies, self._counts = frequencies(self._counts + SMOOTHING), None

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """(batch, heads, rows, *row_shape) -> int32 (batch, heads, rows, codes of a row): from the mantissa's lowest
        bit up, the mantissa, whether the sign is the rarer one, the exponent less its channel's."""
        bits, shift = self._bits(x), int(self.mantissa)
        sign = bits >> 15 ^ self._of_channels(self.kinds & 1)
        exponent = (bits >> shift & (1 << self._exponent_bits) - 1) - self._of_channels(self.exponents)
        return ((2 * exponent + sign) << shift | bits & (1 << shift) - 1).flatten(3), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        codes, shift = codes.unflatten(-1, self.row_shape), int(self.mantissa)
        high, bits = codes >> shift, codes & (1 << shift) - 1
        bits |= (high & 1).bitwise_xor_(self._of_channels(self.kinds & 1)).bitwise_left_shift_(15)
        exponent = high.bitwise_right_shift_(1).add_(self._of_channels(self.exponents))
        bits |= exponent.bitwise_left_shift_(shift)
        return bits.to(torch.int16).view(self._dtype).float()

    def make_code(self) -> Code:
        shifts = torch.full((self.kinds.numel(),), int(self.mantissa))
        tables = [*self.frequencies.cpu().numpy().astype(np.int64)]
        return make_code(tables, [-2 * REACH] * len(tables), self.kinds.flatten().cpu().long() >> 1, shifts, self.lanes)

    @property
    def _dtype(self) -> torch.dtype:
        return next(dtype for dtype, bits in MANTISSA.items() if bits == int(self.mantissa))

    @property
    def _exponent_bits(self) -> int:
        return 15 - int(self.mantissa)

    def _bits(self, x: Tensor) -> Tensor:
        """int32, 0 to 2^16 - 1."""
        return x.to(self._dtype).contiguous().view(torch.int16).int() & 0xFFFF

    def _of_channels(self, x: Tensor) -> Tensor:
        """(heads, channels) against rows (batch, heads, rows, ..., channels)."""
        return x.int().view(1, self.heads, 1, *[1] * (len(self.row_shape) - 1), self.num_tables)
