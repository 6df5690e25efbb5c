"""Triton's residual VQ against brute force in float64: in its interpreter without a GPU, compiled with one."""

import pytest
import torch
from views import DEVICE, amid, gaussian, whole_numbers

from vqkv.kernels import naive
from vqkv.kernels.rvq import triton


def assert_same(x, codebooks):
    expected, codes = naive.rvq_encode(x, codebooks), triton.rvq_encode(x, codebooks)
    assert codes.dtype == expected.dtype and codes.shape == expected.shape and torch.equal(codes, expected)


SIZES = [
    *[(1, 1, 3, 1), (63, 4, 60, 3), (65, 5, 100, 1), (100, 20, 257, 2), (5, 64, 3, 8), (9, 100, 70, 2), (3, 256, 1, 2)],
    (257, 8, 257, 2),  # in programs of the largest size
]


@pytest.mark.parametrize(("rows", "dim", "size", "num_quantizers"), SIZES)
def test_codes_are_naive_where_scores_are_exact(rows, dim, size, num_quantizers, monkeypatch, guarded):
    """Equally near codes included: of those, the lowest."""
    monkeypatch.setattr(triton, "MANY", 257)
    codebooks = whole_numbers(num_quantizers, size, dim, seed=1)
    codebooks[:, -1] = codebooks[:, min(1, size - 1)]  # in another tile
    assert_same(whole_numbers(rows, dim), codebooks)


@pytest.mark.parametrize(("magnitude", "second"), [(1, 0.4), (1e-6, 0.4), (1e4, 1e-4)])
def test_gaussian_codes_are_nearly_always_naive_and_as_good(magnitude, second):
    """Operands are fp16: the first stage's codes differ where two are as near to within 1/1,000 or so. Stages may
    differ in magnitude."""
    x, codebooks = gaussian(200, 32) * magnitude, gaussian(2, 64, 32, seed=1) * magnitude
    codebooks[1] *= second
    expected, codes = naive.rvq_encode(x, codebooks), triton.rvq_encode(x, codebooks)
    assert (expected[:, 0] == codes[:, 0]).float().mean() >= 0.99
    errors = [(x.double() - naive.rvq_decode(each, codebooks)).square().mean() for each in (codes, expected)]
    assert errors[0] <= 1.001 * errors[1]
    assert torch.equal(codes, triton.rvq_encode(x, codebooks))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_residual_needs_more_digits_than_its_vector(dtype):
    """One of 100 after a code of 1,000 cannot be kept in bfloat16."""
    x = (whole_numbers(30, 5) + 100).to(dtype)
    codebooks = whole_numbers(2, 20, 5, seed=1) + torch.tensor([1000, -900], device=DEVICE)[:, None, None]
    assert_same(x, codebooks.half())


X = whole_numbers(2, 3, 2, 16)
VIEWS = {
    "strided groups": X.unflatten(-1, (4, 4)).mT,
    "heads behind tokens": X.transpose(1, 2).unflatten(-1, (4, 4)),
    "expanded": X[:1].expand(2, -1, -1, -1).unflatten(-1, (4, 4)),
    "no two dimensions merge": whole_numbers(2, 2, 2, 3, 4, 4).permute(3, 2, 1, 0, 4, 5),
    "amid NaN": amid(whole_numbers(5, 3, 4), (3 * 8 + 1, 8, 1)),
    "amid large numbers": amid(whole_numbers(5, 3, 4), (3 * 8 + 1, 8, 1), 1e30),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("strides", "garbage"), [(None, float("nan")), ((33 * 7 + 2, 7, 1), 1e30)])
def test_views_are_encoded_like_their_copies_and_nothing_around_them_is_read(view, strides, garbage):
    assert_same(VIEWS[view], amid(whole_numbers(2, 33, 4, seed=1), strides, garbage))


def test_numbers_that_are_none_get_codes_and_leave_other_rows_alone():
    x, codebooks = whole_numbers(9, 2, 4), whole_numbers(3, 33, 4, seed=1)
    expected = naive.rvq_encode(x, codebooks)
    x[1, 0], x[4, 1, 2], x[7, 0, 3] = float("nan"), float("inf"), -float("inf")
    codes, fine = triton.rvq_encode(x, codebooks), x.isfinite().all(dim=-1)
    assert fine.sum() == 15 and torch.equal(expected[fine], codes[fine])
    assert codes.min() >= 0 and codes.max() < 33
