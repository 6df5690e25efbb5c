"""Triton's residual VQ against brute force in float64: in its interpreter without a GPU, compiled with one."""

import pytest
import torch
from views import DEVICE, amid, gaussian, whole_numbers

from vqkv.kernels import naive
from vqkv.kernels.rvq import triton


def assert_same(x, codebooks):
    expected, found = naive.rvq_encode(x, codebooks), triton.rvq_encode(x, codebooks)
    assert found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)


def assert_as_good(x, codebooks, found, expected, most=1.001):
    """The squared error of the codes ``found`` is at most that of those expected, but for rounding."""
    errors = [(x.double() - naive.rvq_decode(codes, codebooks)).square().mean() for codes in (found, expected)]
    assert errors[0] <= most * errors[1]


@pytest.mark.parametrize(
    ("rows", "dim", "size", "num_quantizers"),
    [(1, 1, 3, 1), (63, 4, 60, 3), (65, 5, 100, 1), (100, 20, 257, 2), (5, 64, 3, 8), (9, 100, 70, 2), (3, 256, 1, 2)],
)
def test_codes_are_naive_where_scores_are_exact(rows, dim, size, num_quantizers, guarded):
    """Equally near codes included: of those, the lowest."""
    codebooks = whole_numbers(num_quantizers, size, dim, seed=1)
    codebooks[:, -1] = codebooks[:, min(1, size - 1)]  # in another tile
    assert_same(whole_numbers(rows, dim), codebooks)


def test_programs_of_many_vectors(monkeypatch, guarded):
    monkeypatch.setattr(triton, "MANY", 1)
    assert_same(whole_numbers(257, 8), whole_numbers(2, 257, 8, seed=1))


@pytest.mark.parametrize(("magnitude", "second"), [(1, 0.4), (1e-6, 0.4), (1e4, 1e-4)])
def test_gaussian_codes_are_nearly_always_naive_and_as_good(magnitude, second):
    """Operands are fp16: the first stage's codes differ where two are as near to within 1/1,000 or so. Stages may
    differ in magnitude."""
    x, codebooks = gaussian(200, 32) * magnitude, gaussian(2, 64, 32, seed=1) * magnitude
    codebooks[1] *= second
    expected, found = naive.rvq_encode(x, codebooks), triton.rvq_encode(x, codebooks)
    assert (expected[:, 0] == found[:, 0]).float().mean() >= 0.99
    assert_as_good(x, codebooks, found, expected)
    assert torch.equal(found, triton.rvq_encode(x, codebooks))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_residual_needs_more_digits_than_its_vector(dtype):
    """One of 100 after a code of 1,000 cannot be kept in bfloat16."""
    x = (whole_numbers(30, 5) + 100).to(dtype)
    codebooks = whole_numbers(2, 20, 5, seed=1) + torch.tensor([1000, -900], device=DEVICE)[:, None, None]
    assert_same(x, codebooks.half())


@pytest.mark.parametrize("strides", [None, (33 * 7 + 2, 7, 1)])
@pytest.mark.parametrize("garbage", [float("nan"), 1e30])
def test_what_lies_around_the_inputs_is_not_read(strides, garbage):
    """Codes and vectors have gaps between them, too."""
    x, codebooks = whole_numbers(5, 3, 5), whole_numbers(2, 33, 5, seed=1)
    books = amid(codebooks, strides, garbage)
    found = triton.rvq_encode(amid(x, (3 * 8 + 1, 8, 1), garbage), books)
    assert torch.equal(found, naive.rvq_encode(x, codebooks))


@pytest.mark.parametrize("view", ["strided groups", "heads behind tokens", "expanded", "no two dimensions merge"])
def test_views_are_encoded_like_their_copies(view):
    x = whole_numbers(2, 3, 2, 16)
    views = {
        "strided groups": x.unflatten(-1, (4, 4)).mT,
        "heads behind tokens": x.transpose(1, 2).unflatten(-1, (4, 4)),
        "expanded": x[:1].expand(2, -1, -1, -1).unflatten(-1, (4, 4)),
        "no two dimensions merge": whole_numbers(2, 2, 2, 3, 4, 4).permute(3, 2, 1, 0, 4, 5),
    }
    assert_same(views[view], whole_numbers(2, 7, 4, seed=1))


def test_numbers_that_are_none_get_codes_and_leave_other_rows_alone():
    x, codebooks = whole_numbers(9, 2, 4), whole_numbers(3, 33, 4, seed=1)
    expected = naive.rvq_encode(x, codebooks)
    x[1, 0], x[4, 1, 2], x[7, 0, 3] = float("nan"), float("inf"), -float("inf")
    codes, fine = triton.rvq_encode(x, codebooks), x.isfinite().all(dim=-1)
    assert fine.sum() == 15 and torch.equal(expected[fine], codes[fine])
    assert codes.min() >= 0 and codes.max() < 33
