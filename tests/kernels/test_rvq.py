"""Residual VQ on a CPU against brute force in float64: the compiled search, beams, and what fp32 cannot tell apart."""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import gaussian

from vqkv.kernels import cpu
from vqkv.kernels import naive as reference
from vqkv.kernels.rvq.tables import prepare


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
    assert torch.equal(codes, reference.rvq_encode(x, codebooks))
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
    assert torch.equal(cpu.rvq_encode(x, codebooks), reference.rvq_encode(x, codebooks))


@pytest.mark.parametrize("dim", [4, 32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_get_codes_and_leave_other_rows_alone(dim, value):
    x, codebooks = gaussian(130, dim), gaussian(2, 100, dim, seed=1)
    expected = reference.rvq_encode(x, codebooks)
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
    return (x.double() - reference.rvq_decode(codes, codebooks)).square().sum(dim=-1)


@pytest.mark.parametrize("beam", [1, 3])
def test_reference_is_beam_search_written_out_in_plain_python(beam):
    """With a beam of one, Algorithm 1 of residual VQ."""
    x, codebooks = gaussian(15, 3).double(), gaussian(3, 6, 3, seed=1).double()
    for row, codes in zip(x, reference.rvq_encode(x, codebooks, beam), strict=True):
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
    expected, codes = (twin.rvq_encode(x, codebooks, beam) for twin in (reference, cpu))
    assert codes.max() < codebook_size
    assert torch.equal(errors(x, codes, codebooks), errors(x, expected, codebooks))


@pytest.mark.parametrize(("dim", "num_quantizers", "codebook_size", "rows"), [(8, 4, 256, 1100), (32, 8, 100, 600)])
def test_gaussian_vectors_get_the_codes_of_the_reference(dim, num_quantizers, codebook_size, rows):
    """What the kernel's docstring promises, over chunk borders (512 rows at beam 4)."""
    x = gaussian(rows, dim, seed=3)
    codebooks = (
        gaussian(num_quantizers, codebook_size, dim, seed=4) * 0.8 ** torch.arange(num_quantizers)[:, None, None]
    )
    expected, codes = reference.rvq_encode(x, codebooks, 4), cpu.rvq_encode(x, codebooks, 4)
    assert (codes == expected).all(dim=-1).double().mean() >= 0.999
    exact, fast = errors(x, expected, codebooks).mean(), errors(x, codes, codebooks).mean()
    assert abs(fast - exact) <= 1e-5 * exact


@pytest.mark.parametrize("beam", [1, 3])
def test_reduced_precision_settings_do_not_reach_the_kernel(beam):
    x, codebooks = gaussian(500, 32), gaussian(2, 200, 32, seed=1)
    expected = cpu.rvq_encode(x, codebooks, beam)
    assert beam > 1 or torch.equal(expected, reference.rvq_encode(x, codebooks))
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
    assert torch.equal(cpu.rvq_encode(x, codebooks), reference.rvq_encode(x, codebooks))
    with torch.inference_mode():
        frozen = codebooks.clone()
        assert torch.equal(cpu.rvq_encode(x, frozen), reference.rvq_encode(x, frozen))


@pytest.mark.parametrize("beam", [4, 16, 64])
def test_a_beam_that_keeps_everything_is_exhaustive_search(beam):
    """Kept sequences: all 4, 16 (exhaustive from there on, as the last of 3 stages extends each)."""
    x, codebooks = gaussian(30, 5), gaussian(3, 4, 5, seed=1)
    every = torch.tensor(list(itertools.product(range(4), repeat=3)))
    distances = (x[:, None].double() - reference.rvq_decode(every, codebooks)).square().sum(dim=-1)
    best = every[distances.argmin(dim=-1)]
    for kernels in (reference, cpu):
        codes = kernels.rvq_encode(x, codebooks, beam)
        assert torch.equal(codes, best) if beam >= 16 else (errors(x, codes, codebooks) >= distances.amin(-1)).all()
