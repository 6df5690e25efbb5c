"""Values of 16 bits, bit for bit: their exponents vary little within a channel, and take few bits by rANS."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vqkv.codecs.entropy import SMOOTHING, StreamQuantizer, frequencies
from vqkv.codecs.stage import Side, learned
from vqkv.kernels.entropy.code import Code, make_code

TYPES = {7: torch.bfloat16, 10: torch.float16}  # by bits of the mantissa
REACH = 20  # exponents to either side of a channel's own, that a table distinguishes
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

    mantissa: Tensor = learned()
    exponents: Tensor = learned()
    kinds: Tensor = learned()
    frequencies: Tensor = learned()
    by_head = True

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        self.heads, self.num_tables, self._counts = shape[0], shape[-1], torch.tensor(0)
        return super().build(shape)

    def partial_fit(self, x: Tensor) -> None:
        """The first batch decides the type, exponents and signs; symbols of all batches are counted."""
        if self.mantissa is None:
            fitting = [bits for bits, dtype in TYPES.items() if torch.equal(x.to(dtype).float(), x)]
            self.mantissa = torch.tensor([*fitting, 10][0], dtype=torch.uint8)
            _, exponent, sign = (part.transpose(0, 1).flatten(1, -2) for part in self._parts(x))
            self.exponents = exponent.mode(1).values.to(torch.int16)  # of heads, tokens, channels
            most = (2 * sign.sum(1) > sign.shape[1]).to(torch.uint8)
            rarer = (sign != most.unsqueeze(1)).double().mean(1)
            self.kinds = 2 * torch.stack([rarer > skew for skew in SKEWS]).sum(0).to(torch.uint8) + most
        symbols = self.encode(x)[0].unflatten(-1, (-1, self.num_tables)) >> int(self.mantissa)
        places = symbols + 2 * REACH
        places = torch.where((places >= 0) & (places < LEVELS), places, LEVELS)
        places = places + (self.kinds.long() >> 1).view(1, self.heads, 1, 1, -1) * (LEVELS + 1)
        counts = torch.bincount(places.flatten(), minlength=(len(SKEWS) + 1) * (LEVELS + 1))
        self._counts = self._counts + counts.view(len(SKEWS) + 1, LEVELS + 1)

    def finalize(self) -> None:
        self.frequencies, self._counts = frequencies(self._counts + SMOOTHING), torch.tensor(0)

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """(batch, heads, rows, *row_shape) -> int32 (batch, heads, rows, codes of a row): from the mantissa's lowest
        bit up, the mantissa, whether the sign is the rarer one, the exponent less its channel's."""
        mantissa, exponent, sign = self._parts(x)
        symbol = 2 * (exponent - self._of_channels(self.exponents)) + (sign ^ self._of_channels(self.kinds & 1))
        return (symbol << int(self.mantissa) | mantissa).flatten(3), {}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        codes, shift = codes.unflatten(-1, self.row_shape), int(self.mantissa)
        high, bits = codes >> shift, codes & (1 << shift) - 1
        bits |= (high & 1).bitwise_xor_(self._of_channels(self.kinds & 1)).bitwise_left_shift_(15)
        exponent = high.bitwise_right_shift_(1).add_(self._of_channels(self.exponents))
        bits |= exponent.bitwise_left_shift_(shift)
        return bits.to(torch.int16).view(TYPES[shift]).float()

    def make_code(self) -> Code:
        shifts = torch.full((self.kinds.numel(),), int(self.mantissa))
        tables = [*self.frequencies.cpu().numpy().astype(np.int64)]
        return make_code(tables, [-2 * REACH] * len(tables), self.kinds.flatten().cpu().long() >> 1, shifts)

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mantissa, exponent and sign, int32 like x."""
        shift = int(self.mantissa)
        bits = x.to(TYPES[shift]).contiguous().view(torch.int16).int() & 0xFFFF
        return bits & (1 << shift) - 1, bits >> shift & (1 << 15 - shift) - 1, bits >> 15

    def _of_channels(self, x: Tensor) -> Tensor:
        """(heads, channels) against rows (batch, heads, rows, ..., channels)."""
        return x.int().view(1, self.heads, 1, *[1] * (len(self.row_shape) - 1), self.num_tables)
