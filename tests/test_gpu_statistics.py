"""Triton's RVQ statistics against the float64 reference: in its interpreter without a GPU, compiled with one."""

import pytest
import torch

pytest.importorskip("triton")

from gpu_guard import DEVICE, guarded, poisoned  # noqa: F401, the fixture

from vqkv.kernels import reference
from vqkv.kernels.gpu import statistics


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def random_codes(rows, num_quantizers, size, seed=2):
    return torch.randint(size, (rows, num_quantizers), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_same_statistics(ref, tri, most=1e-5):
    """Counts are equal, and so are sums but for rounding, relative to their norm."""
    for wanted, found in zip(ref, tri, strict=True):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert torch.equal(ref[0], tri[0])
    assert (tri[1] - ref[1]).norm() <= most * ref[1].norm()


@pytest.mark.parametrize(
    ("rows", "num_quantizers", "size", "dim"),
    [(1, 1, 1, 1), (63, 3, 7, 20), (65, 2, 3, 5), (100, 1, 40, 4), (30, 8, 3, 1), (300, 2, 2, 32), (65, 1, 5, 64)],
)
def test_statistics_are_the_references(rows, num_quantizers, size, dim):
    """A code's rows are several pieces and blocks of a piece, one, or none."""
    x, codebooks = gaussian(rows, dim), gaussian(num_quantizers, size, dim, seed=1)
    codes = random_codes(rows, num_quantizers, size)
    expected = reference.rvq_statistics(x, codes, codebooks)
    assert_same_statistics(expected, statistics.rvq_statistics(x, codes, codebooks))


@pytest.mark.parametrize("rows", [128, 129, 700])
def test_one_code_may_have_all_rows(rows):
    x, codebooks = gaussian(rows, 5), gaussian(2, 4, 5, seed=1)
    codes = torch.tensor([3, 0], device=DEVICE).expand(rows, 2)
    expected = reference.rvq_statistics(x, codes, codebooks)
    assert_same_statistics(expected, statistics.rvq_statistics(x, codes, codebooks))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    x, codebooks = gaussian(65, 5).to(dtype), gaussian(2, 4, 5, seed=1).half()
    codes = random_codes(65, 2, 4).to({torch.float16: torch.uint8, torch.bfloat16: torch.int16}.get(dtype, torch.int32))
    expected = reference.rvq_statistics(x, codes, codebooks)
    assert_same_statistics(expected, statistics.rvq_statistics(x, codes, codebooks))


def test_whole_numbers_are_summed_exactly():
    x, codebooks = gaussian(200, 5).mul(4).round(), gaussian(3, 4, 5, seed=1).mul(4).round()
    codes = random_codes(200, 3, 4)
    expected = reference.rvq_statistics(x, codes, codebooks)
    assert_same_statistics(expected, statistics.rvq_statistics(x, codes, codebooks), most=0)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_what_lies_around_the_inputs_is_not_read(garbage):
    """Rows, codes and codebooks have gaps between them; wrong codes would read far away, and be seen."""
    x, codebooks, codes = gaussian(65, 5), gaussian(2, 3, 5, seed=1), random_codes(65, 2, 3)
    found = statistics.rvq_statistics(
        poisoned(x, (11, 2), garbage), poisoned(codes, (1, 70), 2), poisoned(codebooks, (29, 7, 1), garbage)
    )
    assert_same_statistics(reference.rvq_statistics(x, codes, codebooks), found)


def test_nothing_is_written_around_the_outputs(guarded):  # noqa: F811
    x, codebooks, codes = gaussian(65, 5), gaussian(2, 3, 5, seed=1), random_codes(65, 2, 3)
    expected = reference.rvq_statistics(x, codes, codebooks)
    assert_same_statistics(expected, statistics.rvq_statistics(x, codes, codebooks))


def test_equal_inputs_give_equal_bits():
    x, codebooks, codes = gaussian(400, 5), gaussian(2, 3, 5, seed=1), random_codes(400, 2, 3)
    first, second = (statistics.rvq_statistics(x, codes, codebooks) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_nothing_to_count():
    found = statistics.rvq_statistics(gaussian(0, 5), random_codes(0, 2, 3), gaussian(2, 3, 5))
    assert_same_statistics((torch.zeros(2, 3).double().to(DEVICE), torch.zeros(2, 3, 5).double().to(DEVICE)), found)
