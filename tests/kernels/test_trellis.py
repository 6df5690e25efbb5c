"""Trellis-coded quantization: the compiled loops against the naive twin, the best path against all paths."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv.kernels import cpu, naive
from vqkv.kernels.trellis.naive import LARGEST, REACH


def costs(tables: int, seed: int = 0) -> torch.Tensor:
    """Made up: longer codes farther out, and 40 bits where no table reaches."""
    far = torch.arange(-REACH, REACH + 1).abs().float()
    noise = torch.rand(tables, 2 * REACH + 1, generator=torch.Generator().manual_seed(seed))
    return torch.cat([1 + 2 * (1 + far).log2() + noise, torch.full((tables, 1), 40.0)], dim=1)


def spent(x, codes, bits, tables, shifts, weight: float) -> torch.Tensor:
    """Squared error and weighted bits of each row."""
    value = torch.nan_to_num(x, nan=0.0).clamp(-2.0 * LARGEST, 2.0 * LARGEST)
    high = codes >> shifts
    held = (high >= -REACH) & (high <= REACH)
    rate = bits[tables.long(), torch.where(held, high + REACH, 2 * REACH + 1).long()] + held * shifts
    error = naive.trellis_decode(codes, torch.tensor(1.0)).double() - value
    return (error.square() + weight * rate).sum(1)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.sampled_from([0, 1, 3]),
    channels=st.sampled_from([1, 2, 7, 65]),
    spread=st.sampled_from([0.1, 1.0, 30.0, 1e5]),
    shifted=st.booleans(),
    odd=st.sampled_from([0.0, float("nan"), float("inf"), -3e38, 2.0 * LARGEST]),
    seed=st.integers(0, 10**6),
)
def test_codes_are_naive(rows, channels, spread, shifted, odd, seed):
    generator = torch.Generator().manual_seed(seed)
    x = spread * torch.randn(rows, channels, generator=generator)
    if rows:
        x[-1, channels // 2] = odd
    tables = torch.randint(0, 3, (channels,), generator=generator, dtype=torch.int32)
    shifts = torch.randint(0, 16, (channels,), generator=generator, dtype=torch.int32) * shifted
    arguments = x, costs(3, seed), tables, shifts, 0.3
    codes = cpu.trellis_encode(*arguments)
    assert torch.equal(codes, naive.trellis_encode(*arguments))
    values = cpu.trellis_decode(codes, torch.tensor(0.37))
    assert torch.equal(values, naive.trellis_decode(codes, torch.tensor(0.37)))
    assert values.isfinite().all()


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_the_path_is_the_best_of_all(weight):
    """Of every path of codes from -2 to 2 over five channels, none costs less."""
    x = 1.2 * torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).clamp(-1.5, 1.5)
    bits, zeros = costs(1), torch.zeros(5, dtype=torch.int32)
    paths = torch.tensor([*itertools.product(range(-2, 3), repeat=5)], dtype=torch.int32)
    problem = bits, zeros, zeros, weight
    cost = spent(x, cpu.trellis_encode(x, *problem), *problem)
    every = torch.stack([spent(row.expand(len(paths), -1), paths, *problem) for row in x])
    assert (cost <= every.amin(1) + 1e-6).all()
