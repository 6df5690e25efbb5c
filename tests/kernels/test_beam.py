"""Beam search in residual VQ: the fast kernel against brute force in float64."""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import gaussian

from vqkv.codecs.vector import ResidualVQ
from vqkv.kernels import cpu
from vqkv.kernels.rvq import naive as reference


def whole_numbers(*shape, seed=0, size=3):
    return torch.randint(-size, size + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def errors(x, codes, codebooks):
    return (x.double() - reference.rvq_decode(codes, codebooks)).square().sum(dim=-1)


def fitted(x, **settings):
    quantizer = ResidualVQ(**{"num_quantizers": 4, "codebook_size": 64, "group_size": x.shape[-1], **settings})
    quantizer.build((1, *x.shape[3:]))
    quantizer.partial_fit(x)
    return quantizer


@pytest.mark.parametrize("beam", [4, 16, 64])
def test_a_beam_that_keeps_everything_is_exhaustive_search(beam):
    """Kept sequences: all 4, 16 (exhaustive from there on, as the last of 3 stages extends each)."""
    x, codebooks = gaussian(30, 5), gaussian(3, 4, 5, seed=1)
    every = torch.tensor(list(itertools.product(range(4), repeat=3)))
    distances = (x[:, None].double() - reference.rvq_decode(every, codebooks)).square().sum(dim=-1)
    best = every[distances.argmin(dim=-1)]
    for kernels in (reference, cpu):
        found = kernels.rvq_encode(x, codebooks, beam)
        assert torch.equal(found, best) if beam >= 16 else (errors(x, found, codebooks) >= distances.amin(-1)).all()
    ranked = reference.rvq_candidates(x, codebooks, 64)
    assert torch.equal(ranked, every[distances.sort(stable=True).indices])


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
    codebooks = fitted(gaussian(1, 1, 4000, dim), num_quantizers=num_quantizers, codebook_size=codebook_size).codebooks
    expected, codes = reference.rvq_encode(x, codebooks, 4), cpu.rvq_encode(x, codebooks, 4)
    assert (codes == expected).all(dim=-1).double().mean() >= 0.999
    exact, fast = errors(x, expected, codebooks).mean(), errors(x, codes, codebooks).mean()
    assert abs(fast - exact) <= 1e-5 * exact
