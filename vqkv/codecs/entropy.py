"""Entropy-coded codes: rANS streams (``vqkv.kernels.entropy``), one a row, in which frequent codes take fewer bits.

``Entropy`` codes another quantizer's codes, ``FloatBits`` the exponents of 16-bit values."""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vqkv.codecs.payload import Payload
from vqkv.codecs.stage import Quantizer, Side, learned
from vqkv.errors import DataError, FormatError
from vqkv.kernels import rans_decode, rans_encode
from vqkv.kernels.entropy.code import TOTAL, Code, make_code, most_words

SMOOTHING = 0.5  # added to every code's count: one that calibration never saw is rare, not impossible
TABLE_BITS = 10  # of a code that a table distinguishes
TYPES = {7: torch.bfloat16, 10: torch.float16}  # by bits of the mantissa
REACH = 20  # exponents to either side of a channel's own, that a table distinguishes
LEVELS = 4 * REACH + 2
SKEWS = (0.02, 0.2)  # shares of the rarer sign that divide channels into three tables


class StreamQuantizer(Quantizer):
    """A quantizer whose codes are stored as streams. Of each row, codes take turns between ``num_tables`` tables. Where
    tables differ between heads (``by_head``), a stream holds all heads of a row; else each has its own, and any number
    of heads is served."""

    fixed = {"lanes": 4}
    num_tables: int
    heads: int  # that it was built for
    frequencies: Tensor
    _counts: Tensor  # of codes, while it learns
    _made: tuple[Tensor, Code] | None = None

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        self.heads, self.num_tables, self._counts = shape[0], shape[-1], torch.tensor(0)
        return super().build(shape)

    @abstractmethod
    def make_code(self) -> Code:
        """Make the code of ``frequencies``: a channel for each table, those of one head after the other."""

    def code(self) -> Code:
        """Call ``make_code`` once for every tensor of ``frequencies``."""
        if self._made is None or self._made[0] is not self.frequencies:
            self._made = self.frequencies, self.make_code().to(self.frequencies.device)
        return self._made[1]

    def store(self, y: Tensor) -> Payload:
        """Store words of 16 bits, and ``lengths`` (batch, 1 or num_kv_heads, rows), how many each stream has."""
        codes, side = self.encode(y)
        joined = self.heads if self.by_head else 1
        rows = codes.permute(2, 0, 1, 3).unflatten(-1, (-1, self.num_tables)).mT.unflatten(2, (-1, joined))
        values = rows.flatten(3, 4)  # rows, batch, streams, channels, tokens
        words, lengths = rans_encode(values.flatten(0, 2), self.code())
        channels, tokens = values.shape[3:]
        small = most_words(channels, tokens) < 1 << 15
        lengths = lengths.to(torch.int16 if small else torch.int32).view(values.shape[:3]).permute(1, 2, 0)
        return Payload({"lengths": lengths, **side}, ragged={"stream": words})

    def load(self, payload: Payload) -> Tensor:
        """Undo ``store``. Raises ``FormatError`` for streams that were cut or altered, or are another codec's."""
        lengths = payload.counts("stream").permute(2, 0, 1)
        tokens = self.codes_per_row // self.num_tables
        codes, intact = rans_decode(payload.ragged["stream"], lengths.flatten(), self.code(), tokens)
        if not intact.all():
            raise FormatError(
                f"{int((~intact).sum())} of {intact.numel()} streams were cut, extended or altered, or are another "
                "codec's: store the tokens again"
            )
        joined = self.heads if self.by_head else 1
        codes = codes.view(*lengths.shape, tokens, joined, self.num_tables)  # rows, batch, streams before these
        codes = codes.permute(1, 2, 4, 0, 3, 5).flatten(1, 2)
        return self.decode(codes.flatten(3), self.side_of(payload))

    def finalize(self) -> None:
        """Round the frequencies."""
        self.frequencies, self._counts = frequencies(self._counts + SMOOTHING), torch.tensor(0)


def frequencies(counts: Tensor) -> Tensor:
    """Round counts (..., codes), none 0, to uint16 that sum to 4,096 along the last axis, none 0."""
    shares = counts.double() / counts.double().sum(-1, keepdim=True) * TOTAL
    rounded = shares.round().clamp_min(1)
    while (rest := TOTAL - rounded.sum(-1, keepdim=True)).any():  # from or to where a slot changes a code's bits least
        more, less = ((rounded + 1) / rounded).log2(), (rounded / (rounded - 1)).log2()
        gain = shares * torch.where(rest > 0, more, -less)
        gain = gain.masked_fill((rest < 0) & (rounded == 1), -torch.inf)
        rounded.scatter_add_(-1, gain.argmax(-1, keepdim=True), rest.sign())
    return rounded.to(torch.uint16)


@dataclass(eq=False)
class Entropy(StreamQuantizer):
    """Store ``quantizer``'s codes through an entropy coder. Lossless.

    Each row of codes is a stream, with a few bytes of overhead: fold blocks of tokens into rows first (``TokenBlock``).
    ``context`` says which codes share a table of frequencies. ``stage``: all of the same codebook (the quantizer's
    ``num_tables``). ``position``: only those of the same KV head and the same position in a token, where a row's first
    axis is its tokens; k-means leaves all codes of a codebook about equally frequent.

    Tables are counted in calibration, with the codebooks as they were at each batch. Side information: uint16 (heads,
    tables, codes). Of codes of more than 10 bits, the low bits are stored as they are.
    """

    quantizer: Quantizer
    context: str = "position"
    frequencies: Tensor = learned()
    choices = {"context": ("position", "stage")}

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.quantizer, StreamQuantizer) or type(self.quantizer).encode is Quantizer.encode:
            raise DataError("Entropy takes a Quantizer that leaves storing its codes to others")
        self.by_head, self.side_fields = self.context == "position", self.quantizer.side_fields

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Prepare the quantizer. Raises ``DataError`` if ``position`` has no meaning in such rows."""
        self.quantizer.build(shape)
        self.codes_per_row = self.quantizer.codes_per_row
        codes = getattr(self.quantizer, "codebook_size", 1 << self.quantizer.code_bits)
        self.heads, self.num_tables = 1, getattr(self.quantizer, "num_tables", 1)
        if self.context == "position":
            self.heads, (self.num_tables, rest) = shape[0], divmod(self.codes_per_row, shape[1])
            if rest:
                raise DataError(f"rows of {shape[1:]} do not begin with an axis of tokens: put a TokenBlock first")
        self.shift = max(0, (codes - 1).bit_length() - TABLE_BITS)
        self._shape, self._counts = (self.heads, self.num_tables, (codes - 1 >> self.shift) + 1), torch.tensor(0)
        return shape

    def partial_fit(self, x: Tensor) -> None:
        """Let the quantizer learn, then count the codes it now has for x."""
        self.quantizer.partial_fit(x)
        heads, tables, size = self._shape
        first = torch.arange(heads * tables, device=x.device).view(heads, tables, 1) * size
        codes = self.encode(x)[0].permute(2, 0, 1, 3).unflatten(-1, (-1, tables)).mT
        codes = (codes.long() >> self.shift) + first
        self._counts = self._counts + torch.bincount(codes.flatten(), minlength=first.numel() * size).view(self._shape)

    def finalize(self) -> None:
        self.quantizer.finalize()
        super().finalize()

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        return self.quantizer.encode(x)

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return self.quantizer.decode(codes, side)

    def make_code(self) -> Code:
        tables = self.frequencies.flatten(0, 1).cpu().numpy().astype(np.int64)
        escaped = [np.append(table, 0) for table in tables]  # no code ever is
        channels = torch.arange(len(tables))
        return make_code(escaped, [0] * len(tables), channels, torch.full_like(channels, self.shift))


@dataclass(eq=False)
class FloatBits(StreamQuantizer):
    """Store bfloat16 or float16 values bit for bit: sign and exponent entropy-coded, the mantissa as it is (as ZipNN
    and DFloat11 do for weights). The type is the first of the two that holds all values of the first batch; values that
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

    def partial_fit(self, x: Tensor) -> None:
        """Take type, exponents and signs from the first batch; count symbols of all batches."""
        if self.mantissa is None:
            fitting = [bits for bits, dtype in TYPES.items() if torch.equal(x.to(dtype).float(), x)]
            self.mantissa = torch.tensor([*fitting, 10][0], dtype=torch.uint8)
            _, exponent, sign = (part.transpose(0, 1).flatten(1, -2) for part in self._parts(x))
            self.exponents = exponent.mode(1).values.to(torch.int16)  # of heads, tokens, channels
            usual = (2 * sign.sum(1) > sign.shape[1]).to(torch.uint8)
            rarer = (sign != usual.unsqueeze(1)).double().mean(1)
            self.kinds = 2 * torch.stack([rarer > skew for skew in SKEWS]).sum(0).to(torch.uint8) + usual
        symbols = self.encode(x)[0].unflatten(-1, (-1, self.num_tables)) >> int(self.mantissa)
        symbols = symbols + 2 * REACH
        symbols = torch.where((symbols >= 0) & (symbols < LEVELS), symbols, LEVELS)
        symbols = symbols + (self.kinds.long() >> 1).view(1, self.heads, 1, 1, -1) * (LEVELS + 1)
        counts = torch.bincount(symbols.flatten(), minlength=(len(SKEWS) + 1) * (LEVELS + 1))
        self._counts = self._counts + counts.view(len(SKEWS) + 1, LEVELS + 1)

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Return int32 codes (batch, heads, rows, codes of a row) of x (batch, heads, rows, *row_shape). From the
        lowest bit up: the mantissa, whether the sign is the rarer one, the exponent less its channel's."""
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
        """Split x into mantissa, exponent and sign, int32."""
        shift = int(self.mantissa)
        bits = x.to(TYPES[shift]).contiguous().view(torch.int16).int() & 0xFFFF
        return bits & (1 << shift) - 1, bits >> shift & (1 << 15 - shift) - 1, bits >> 15

    def _of_channels(self, x: Tensor) -> Tensor:
        """Shape (heads, channels) to meet rows (batch, heads, rows, ..., channels)."""
        return x.int().view(1, self.heads, 1, *[1] * (len(self.row_shape) - 1), self.num_tables)
