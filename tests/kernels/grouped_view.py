"""Random components in groups of a byte, heads with sizes of their own, and a map to channels."""

import torch

from vqkv.kernels import Grouped, Mapped


def view(batch: int, seq_len: int, sizes: list[list[int]], head_dim: int, offset: bool = True, device="cpu") -> Mapped:
    heads, components = len(sizes), max(head_dim // 2, *map(sum, sizes))
    used = sorted({size for head in sizes for size in head})
    starts = [[256 * sum(used[: used.index(size)]) for size in head] for head in sizes]
    firsts = [[sum(head[:i]) for i in range(len(head))] for head in sizes]
    codes = torch.randint(0, 256, (batch, heads, seq_len, len(sizes[0])), dtype=torch.uint8)
    places = torch.tensor([sizes, starts, firsts])
    table, scale = torch.randn(256 * sum(used)), torch.rand(heads, components).half()
    mean = torch.randn(heads, head_dim).half().to(device) if offset else None
    matrix = torch.randn(heads, components, head_dim) / head_dim**0.5
    return Mapped(Grouped(*(x.to(device) for x in (codes, table, places, scale))), matrix.to(device), mean)
