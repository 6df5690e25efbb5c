"""Channels that are quantized together, and their basis: grouping, Hadamard rotation."""

import dataclasses
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from vqkv.codecs.stage import Side, Stage, learned
from vqkv.errors import DataError
from vqkv.kernels import Coded, KernelView
from vqkv.kernels.precision import product
from vqkv.runtime.checks import MAX_SEED

BLOCK = 128  # the largest Hadamard matrix that is multiplied at once
MIN_BLOCK = 8  # smaller groups would spend more on their scales than on their values


@dataclass(eq=False)
class Grouping(Stage):
    """Split head_dim channels into groups: (..., head_dim) -> (..., num_groups, group_size).

    ``contiguous``: 0..g-1, g..2g-1, ... ``strided``: group j has channels j, j + head_dim/g, j + 2 head_dim/g, ...
    (residual VQ paper, section 3.1). ``random``: a permutation drawn from ``seed`` and stored as side information.
    ``shrink``: where group_size does not divide the channels, take the largest ``divisor`` of them from 8 on (or all
    channels, if they are fewer), or the largest ``power of two`` (for ``Hadamard``)."""

    kind: str = "contiguous"
    group_size: int = 32
    seed: int = 0
    shrink: str = ""
    order: Tensor = learned()
    limits = {"group_size": (1, 1 << 24), "seed": (0, MAX_SEED)}
    choices = {"kind": ("contiguous", "strided", "random"), "shrink": ("", "divisor", "power of two")}

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Choose the size of groups. Raises ``DataError`` if group_size does not divide the last axis."""
        *outer, channels = shape
        divisors = [size for size in range(1, channels + 1) if channels % size == 0]
        admitted = [size for size in divisors if size <= self.group_size]
        if self.shrink == "power of two":
            admitted = [size for size in admitted if not size & (size - 1)]
        else:
            least = min(MIN_BLOCK, channels, self.group_size) if self.shrink else self.group_size
            admitted = [size for size in admitted if size >= least]
        if not admitted:
            raise DataError(
                f"head_dim {channels} is not divisible by group_size {self.group_size}: use one of {divisors}"
            )
        self._size = admitted[-1]
        if self.kind == "random":
            order = torch.randperm(channels, generator=torch.Generator().manual_seed(self.seed))
            self.order = order.to(torch.int16)
        return *outer, channels // self._size, self._size

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        """Split channels: (..., head_dim) -> (..., num_groups, group_size)."""
        if self.kind == "strided":
            return x.unflatten(-1, (self._size, -1)).mT.contiguous(), {}
        x = x.gather(-1, self.order.long().expand(x.shape)) if self.kind == "random" else x.contiguous()
        return x.unflatten(-1, (-1, self._size)), {}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        """Join groups again: (..., num_groups, group_size) -> (..., head_dim)."""
        y = (y.mT if self.kind == "strided" else y).flatten(-2)
        return y.gather(-1, self.order.argsort().expand(y.shape)) if self.kind == "random" else y

    def kernel_view_before(self, inner: KernelView, side: Side) -> KernelView | None:
        if self.kind == "strided" and isinstance(inner, Coded):
            return dataclasses.replace(inner, strided=True)
        return inner if self.kind == "contiguous" else None


@dataclass(eq=False)
class Hadamard(Stage):
    """Rotate the last axis by the orthonormal Hadamard matrix, which spreads outlier channels over all others.

    Blocks are the largest power of two that divides the axis. Where these are smaller than 8 values, or with ``whole``,
    an axis that is no power of two is rotated by one random orthogonal matrix, the same for all. The rotation is the
    Kronecker product of ``outer`` and ``matrix``: a large matrix takes longest for one token."""

    whole: bool = False
    matrix: Tensor = learned(saved=False)
    outer: Tensor = learned(saved=False)

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        size = shape[-1] & -shape[-1]
        self.matrix = _hadamard(min(size, BLOCK))
        if size < shape[-1] and (self.whole or size < MIN_BLOCK):
            self.matrix, size = orthogonal(shape[-1]), shape[-1]
        self.outer = _hadamard(max(1, size // len(self.matrix)))
        return shape

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        return self._rotated(x, self.matrix), {}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        return self._rotated(y, self.matrix.mT)

    def _rotated(self, x: Tensor, matrix: Tensor) -> Tensor:
        y = product(x.unflatten(-1, (-1, len(matrix))), matrix)
        if len(self.outer) > 1:
            y = product(y.unflatten(-2, (-1, len(self.outer))).mT, self.outer).mT.flatten(-3, -2)
        return y.flatten(-2)


@dataclass(eq=False)
class RandomSigns(Stage):
    """Change the signs of half of the last axis, drawn from ``seed``: with ``Hadamard`` after it, a random rotation."""

    seed: int = 0
    signs: Tensor = learned(saved=False)
    limits = {"seed": (0, MAX_SEED)}

    def build(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        order = torch.randperm(shape[-1], generator=torch.Generator().manual_seed(self.seed))
        self.signs = (1 - 2 * (order % 2)).to(torch.float32)
        return shape

    def encode(self, x: Tensor) -> tuple[Tensor, Side]:
        return x * self.signs, {}

    def decode(self, y: Tensor, side: Side) -> Tensor:
        return y.mul_(self.signs)


@cache  # all layers of a model share it
def _hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float32)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


@cache
def orthogonal(size: int) -> Tensor:
    """Return Q of a Gaussian matrix, the same on every machine up to rounding."""
    drawn = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, r = torch.linalg.qr(drawn)
    return (q * r.diagonal().sign()).float()
