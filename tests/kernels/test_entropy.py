"""rANS and trellis-coded quantization on the CPU against naive twins, damaged streams, the best path against all."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv.codecs.entropy import frequencies
from vqkv.kernels import cpu, naive
from vqkv.kernels.entropy.code import Code, make_code
from vqkv.kernels.trellis.naive import LARGEST, REACH

SIGMAS = (0.05, 0.15, 0.3, 0.6, 1.5, 30.0)  # of the tables' codes: units of 8, 8, 4, 2 values, and single ones


def table(sigma: float) -> tuple[np.ndarray, int]:
    reach = max(1, int(4 * sigma))
    ends = (torch.arange(-reach, reach + 2) - 0.5) / (sigma * 2**0.5)
    shares = (ends[1:].double().erf() - ends[:-1].double().erf()) / 2
    return frequencies(torch.cat([shares, (1 - shares.sum())[None]]) + 1e-5).numpy().astype(np.int64), -reach


TABLES = [table(sigma) for sigma in SIGMAS]


def code_of(tables: torch.Tensor, shifts: torch.Tensor) -> Code:
    return make_code([t for t, _ in TABLES], [least for _, least in TABLES], tables, shifts)


def drawn(tables: torch.Tensor, shifts: torch.Tensor, streams: int, tokens: int, seed: int) -> torch.Tensor:
    sigmas = torch.tensor(SIGMAS)[tables] * 2.0**shifts
    noise = torch.randn(streams, len(tables), tokens, generator=torch.Generator().manual_seed(seed))
    return (noise * sigmas[None, :, None]).round().int()


@settings(deadline=None, max_examples=80)
@given(
    channels=st.integers(1, 20),
    tokens=st.sampled_from([1, 3, 8, 31, 32, 65]),
    streams=st.integers(0, 3),
    shifted=st.booleans(),
    far=st.sampled_from([0, 40, -(2**23), 2**23 - 1]),
    seed=st.integers(0, 10**6),
)
def test_streams_are_naive_and_lossless(channels, tokens, streams, shifted, far, seed):
    generator = torch.Generator().manual_seed(seed)
    tables = torch.randint(0, len(SIGMAS), (channels,), generator=generator)
    shifts = torch.randint(0, 17, (channels,), generator=generator) * shifted
    code, x = code_of(tables, shifts), drawn(tables, shifts, streams, tokens, seed)
    if far and streams:
        x[-1, channels // 2, tokens // 2] = far
    words, lengths = cpu.rans_encode(x, code)
    expected, sizes = naive.rans_encode(x, code)
    assert torch.equal(words, expected) and torch.equal(lengths, sizes)
    for module in (cpu, naive):
        values, valid = module.rans_decode(words, lengths, code, tokens)
        assert torch.equal(values.mT, x) and valid.all()


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(["cut", "extended", "altered", "lengths", "noise"]))
def test_damaged_streams_are_recognized_by_their_ends_and_never_crash(seed, kind):
    rng = np.random.default_rng(seed)
    tables, shifts = torch.arange(12) % len(SIGMAS), torch.arange(12) % 3 * (torch.arange(12) % 2)
    code, x = code_of(tables, shifts), drawn(tables, shifts, 3, 33, seed)
    words, lengths = cpu.rans_encode(x, code)
    at = int(rng.integers(len(words)))
    if kind == "cut":
        words, lengths = words[:-1], lengths - torch.tensor([0, 0, 1])
    elif kind == "extended":
        words, lengths = torch.cat([words, words[:1]]), lengths + torch.tensor([0, 0, 1])
    elif kind == "altered":
        words[at] ^= 1 << int(rng.integers(15))
    elif kind == "lengths":
        lengths = lengths + torch.tensor([1, -1, 0])
    else:
        words = torch.from_numpy(rng.integers(-(2**15), 2**15, len(words)).astype(np.int16))
    values, valid = cpu.rans_decode(words, lengths, code, 33)
    assert values.shape == (3, 33, 12)
    assert torch.equal(values[valid].mT, x[valid])
    assert not valid.all() or kind == "altered"  # a bit of the zeros that fill a unit is no value's


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
