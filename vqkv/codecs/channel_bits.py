"""Channels of a head in sets of their own bits: outlier channels (TurboQuant), frequencies of RoPE (Block-GTQ)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.codecs.grid import gaussian_levels, nearest
from vqkv.codecs.payload import Payload
from vqkv.codecs.scaling import FP16_MIN_NORMAL, rms
from vqkv.codecs.stage import Quantizer, Side, learned
from vqkv.codecs.transform import orthogonal
from vqkv.errors import DataError
from vqkv.kernels.precision import product
from vqkv.runtime.checks import FP16_MAX

MAX_BITS = 8


@dataclass(eq=False)
class ChannelBits(Quantizer):
    """Store every head's channels in sets that have the same number of bits.

    A set is divided by its root mean square, stored in fp16, rotated by a random orthogonal matrix and rounded to the
    best levels of a Gaussian. ``bits`` are an average. Without ``pairs`` the channels of largest mean square on the
    first batch have one bit more than the others (TurboQuant, arXiv 2504.19874, section 4.3). With ``pairs`` channels
    i and i + head_dim / 2, which RoPE rotates together, share a width of 1 to 8 bits. The next bit goes where mean
    square of queries and keys, divided by 4 to the power of its bits, is largest; what is read back has the stored
    root mean square (Block-GTQ, arXiv 2606.24033, section 3). Rows: (head_dim,). Side information: ``widths``, uint8
    (num_kv_heads, head_dim).
    """

    bits: float = 2.5
    pairs: bool = False
    widths: Tensor = learned()
    by_head = True
    costs = "attention"
    code_bits = 1
    side_fields = ("size",)
    limits = {"bits": (1.0, 8.0)}

    def __post_init__(self):
        super().__post_init__()
        self.weighted = self.pairs

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Prepare for rows (head_dim,). Raises ``DataError`` for pairs of an odd number of channels."""
        if self.pairs and shape[-1] % 2:
            raise DataError(f"head_dim {shape[-1]} is an odd number: use turboquant, pairs need an even number")
        return super().build(shape)

    def partial_fit(self, x: Tensor) -> None:
        """Let the first batch decide."""
        if self.widths is not None:
            return
        energy = x.square().mean((0, 2))
        if self.pairs:
            # second moments of each head's queries, see ``calibration.error_costs``
            queries = 0.0 if self.metric is None else self.metric.diagonal(dim1=1, dim2=2)
            both = (energy + queries).unflatten(-1, (2, -1)).sum(1)
            widths = torch.stack([_greedy(each, int(self.bits * len(each))) for each in both]).repeat(1, 2)
        else:
            ranks = energy.argsort(dim=1, descending=True).argsort(dim=1)
            more = round((self.bits - int(self.bits)) * x.shape[-1])
            widths = int(self.bits) + (ranks < more).int()
        self.widths = widths.to(torch.uint8)

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Return the codes' bits (batch, 1, rows, all bits) and fp16 sizes (batch, 1, rows, sets) of x (batch,
        num_kv_heads, rows, head_dim)."""
        codes, sizes = [], []
        for head, width, channels in self._sets():
            y = x[:, head, :, channels]
            size = rms(y).clamp_max(FP16_MAX).half()
            y = y / size.float().clamp_min(FP16_MIN_NORMAL).unsqueeze(-1)
            code = nearest(product(y, orthogonal(len(channels)).to(x.device)), gaussian_levels(width).to(x))
            codes.append((code.unsqueeze(-1) >> torch.arange(width, device=x.device) & 1).flatten(-2))
            sizes.append(size)
        return torch.cat(codes, -1).unsqueeze(1), {"size": torch.stack(sizes, -1).unsqueeze(1)}

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        out = codes.new_zeros(len(codes), len(self.widths), codes.shape[2], *self.row_shape, dtype=torch.float32)
        sets = [*self._sets()]
        pieces = codes.squeeze(1).split([width * len(channels) for _, width, channels in sets], dim=-1)
        for (head, width, channels), piece, size in zip(sets, pieces, side["size"].squeeze(1).unbind(-1), strict=True):
            code = (piece.unflatten(-1, (-1, width)).long() << torch.arange(width, device=codes.device)).sum(-1)
            y = gaussian_levels(width).to(out)[code]
            if self.pairs:
                y = F.normalize(y, dim=-1) * len(channels) ** 0.5
            out[:, head, :, channels] = product(y, orthogonal(len(channels)).mT.to(out)) * size.float().unsqueeze(-1)
        return out

    def load(self, payload: Payload) -> Tensor:
        self.codes_per_row = int(self.widths.sum())  # bits of all heads' codes: heads differ, and are stored together
        return super().load(payload)

    def _sets(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield head, bits and channels of each set."""
        for head, widths in enumerate(self.widths):
            for width in widths.unique().tolist():
                yield head, width, (widths == width).nonzero().squeeze(-1)


def _greedy(scores: Tensor, total: int) -> Tensor:
    """Return widths of 1 to 8 bits, ``total`` bits in all, each bit where ``scores`` / 4^bits is largest."""
    widths = torch.ones(len(scores), dtype=torch.int64, device=scores.device)
    for _ in range(min(total, MAX_BITS * len(scores)) - len(scores)):
        gain = (scores.double() * 0.25**widths).masked_fill(widths == MAX_BITS, -1.0)
        widths[gain.argmax()] += 1
    return widths
