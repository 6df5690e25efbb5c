"""Codes on a CPU against naive twins and brute force: residual VQ and its beams; rANS; trellises."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import gaussian

from vqkv.codecs.entropy import frequencies
from vqkv.kernels import cpu, naive
from vqkv.kernels.entropy.code import Code, make_code
from vqkv.kernels.rvq.tables import prepare
from vqkv.kernels.trellis.naive import LARGEST, REACH


@settings(deadline=None, max_examples=150)
@given(
    rows=st.sampled_from([0, 1, 63, 100, 129, 300]),
    dim=st.sampled_from([1, 2, 3, 7, 8, 9, 17, 64]),
    codebook_size=st.sampled_from([1, 3, 64, 65, 200, 300, 2049]),
    quantizers=st.integers(1, 3),
    duplicates=st.booleans(),
    scale=st.sampled_from([1e-22, 1e-3, 1.0, 300.0, 1e15]),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
    seed=st.integers(0, 10**6),
)
def test_codes_are_naive_whichever_loop(rows, dim, codebook_size, quantizers, duplicates, scale, dtype, seed):
    """Vectors that are codes, codes that occur twice, rows of zeros; short vectors and long ones; squares that under-
    and overflow fp32."""
    assume(dtype != torch.float16 or scale < 1e4)  # beyond, all codes are its largest numbers, and ties are rounding's
    x, codebooks = scale * gaussian(rows, dim, seed=seed), gaussian(quantizers, codebook_size, dim, seed=seed + 1)
    codebooks = (scale * codebooks).to(dtype).nan_to_num()
    if duplicates:
        codebooks[:, codebook_size // 2 :] = codebooks[:, : codebook_size - codebook_size // 2].clone()
        x[::3] = codebooks[0].float()[torch.arange(len(x[::3])) % codebook_size]
        x[::7] = 0
    codes = cpu.rvq_encode(x, codebooks)
    assert torch.equal(codes, naive.rvq_encode(x, codebooks))
    expected = sum(codebook.float()[codes[:, k]] for k, codebook in enumerate(codebooks))  # with torch's bits
    assert torch.equal(cpu.rvq_decode(codes.T.contiguous().T, codebooks), expected)


def hard_cases():
    """Vectors and codebooks that fp32 cannot rank."""
    for dim, size in ((4, 100), (32, 100), (32, 2048)):
        for value, where in itertools.product((3e38, 1e-38, 1e-44), ("row", "code")):
            x, codebooks = gaussian(130, dim), gaussian(2, size, dim, seed=1)
            (x if where == "row" else codebooks[1])[77, dim // 2] = value
            yield f"{value} in a {where}, {size} codes of {dim}", x, codebooks
    codebook = torch.cat([torch.full((1, 16), 100.0), gaussian(98, 16), torch.full((1, 16), 101.0)])
    middle = torch.full((41, 16), 100.5).double() + torch.linspace(-1e-5, 1e-5, 41).unsqueeze(-1)
    yield "a hair off the middle between two codes far from the origin", middle, codebook[None]
    first, half = gaussian(70, 12) * 3000, gaussian(35, 12, seed=1)  # fp32 carries another residual along
    between = first[:60].double() + 1e-5 * gaussian(60, 12, seed=3)
    yield "a residual between a code and its opposite", between, torch.stack([first, torch.cat([half, -half])])


@pytest.mark.parametrize(("x", "codebooks"), [pytest.param(*case, id=name) for name, *case in hard_cases()])
def test_values_that_fp32_cannot_rank(x, codebooks):
    assert torch.equal(cpu.rvq_encode(x, codebooks), naive.rvq_encode(x, codebooks))


@pytest.mark.parametrize("dim", [4, 32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_get_codes_and_leave_other_rows_alone(dim, value):
    x, codebooks = gaussian(130, dim), gaussian(2, 100, dim, seed=1)
    expected = naive.rvq_encode(x, codebooks)
    x[77, dim // 2] = value
    codes = cpu.rvq_encode(x, codebooks)
    assert torch.equal(codes[:77], expected[:77]) and torch.equal(codes[78:], expected[78:])
    assert codes.min() >= 0 and codes.max() < 100


def test_tensors_that_loops_cannot_take_get_the_same_codes(monkeypatch):
    """As on other devices, and when traced."""
    x, codebooks = gaussian(1000, 32), gaussian(4, 130, 32, seed=1)
    codes = cpu.rvq_encode(x, codebooks)
    monkeypatch.setattr("vqkv.kernels.rvq.cpu.serves", lambda *tensors: False)
    assert (cpu.rvq_encode(x, codebooks) == codes).all(dim=-1).float().mean() > 0.999


def whole_numbers(*shape, seed=0, size=3):
    return torch.randint(-size, size + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def errors(x, codes, codebooks):
    return (x.double() - naive.rvq_decode(codes, codebooks)).square().sum(dim=-1)


@pytest.mark.parametrize("beam", [1, 3])
def test_reference_is_beam_search_written_out_in_plain_python(beam):
    """With a beam of one, Algorithm 1 of residual VQ."""
    x, codebooks = gaussian(15, 3).double(), gaussian(3, 6, 3, seed=1).double()
    for row, codes in zip(x, naive.rvq_encode(x, codebooks, beam), strict=True):
        kept = [((), row)]
        for codebook in codebooks:
            grown = [((*past, c), left - codebook[c]) for past, left in kept for c in range(6)]
            kept = sorted(grown, key=lambda pair: float(pair[1].square().sum()))[:beam]
        assert list(kept[0][0]) == codes.tolist()


@settings(deadline=None, max_examples=150)
@given(
    rows=st.sampled_from([1, 2, 37]),
    dim=st.sampled_from([1, 2, 7, 16]),
    num_quantizers=st.integers(1, 4),
    codebook_size=st.sampled_from([1, 2, 5, 63, 64, 65, 130]),
    spare=st.integers(0, 3),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
    seed=st.integers(0, 10**6),
)
def test_where_fp32_is_exact_codes_are_as_good_as_the_reference_s(
    rows, dim, num_quantizers, codebook_size, spare, dtype, seed
):
    """Small whole numbers: no rounding, many exact ties, all sequences kept, more candidates than codes."""
    beam = codebook_size ** (num_quantizers - 1) + spare
    assume(beam <= 200)
    x = whole_numbers(rows, dim, seed=seed, size=9)
    codebooks = whole_numbers(num_quantizers, codebook_size, dim, seed=seed + 1).to(dtype)
    expected, codes = (twin.rvq_encode(x, codebooks, beam) for twin in (naive, cpu))
    assert codes.max() < codebook_size
    assert torch.equal(errors(x, codes, codebooks), errors(x, expected, codebooks))


@pytest.mark.parametrize(("dim", "num_quantizers", "codebook_size", "rows"), [(8, 4, 256, 1100), (32, 8, 100, 600)])
def test_gaussian_vectors_get_the_codes_of_the_reference(dim, num_quantizers, codebook_size, rows):
    """What the kernel's docstring promises, over chunk borders (512 rows at beam 4)."""
    x = gaussian(rows, dim, seed=3)
    sizes = 0.8 ** torch.arange(num_quantizers)[:, None, None]
    codebooks = gaussian(num_quantizers, codebook_size, dim, seed=4) * sizes
    expected, codes = naive.rvq_encode(x, codebooks, 4), cpu.rvq_encode(x, codebooks, 4)
    assert (codes == expected).all(dim=-1).double().mean() >= 0.999
    exact, fast = errors(x, expected, codebooks).mean(), errors(x, codes, codebooks).mean()
    assert abs(fast - exact) <= 1e-5 * exact


@pytest.mark.parametrize("beam", [1, 3])
def test_reduced_precision_settings_do_not_reach_the_kernel(beam):
    x, codebooks = gaussian(500, 32), gaussian(2, 200, 32, seed=1)
    expected = cpu.rvq_encode(x, codebooks, beam)
    assert beam > 1 or torch.equal(expected, naive.rvq_encode(x, codebooks))
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(cpu.rvq_encode(x, codebooks, beam), expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_tables_notice_that_a_codebook_was_written_to():
    x, codebooks = gaussian(100, 8), gaussian(2, 16, 8, seed=1)
    before = prepare(codebooks)
    assert prepare(codebooks) is before and prepare(codebooks[:1]).codebooks.shape == (1, 16, 8)
    codebooks.neg_()
    assert torch.equal(cpu.rvq_encode(x, codebooks), naive.rvq_encode(x, codebooks))
    with torch.inference_mode():
        frozen = codebooks.clone()
        assert torch.equal(cpu.rvq_encode(x, frozen), naive.rvq_encode(x, frozen))


@pytest.mark.parametrize("beam", [4, 16, 64])
def test_a_beam_that_keeps_everything_is_exhaustive_search(beam):
    """Kept sequences: all 4, 16 (exhaustive from there on, as the last of 3 stages extends each)."""
    x, codebooks = gaussian(30, 5), gaussian(3, 4, 5, seed=1)
    every = torch.tensor(list(itertools.product(range(4), repeat=3)))
    distances = (x[:, None].double() - naive.rvq_decode(every, codebooks)).square().sum(dim=-1)
    best = every[distances.argmin(dim=-1)]
    for kernels in (naive, cpu):
        codes = kernels.rvq_encode(x, codebooks, beam)
        assert torch.equal(codes, best) if beam >= 16 else (errors(x, codes, codebooks) >= distances.amin(-1)).all()


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
