"""Triton's rANS against the naive twin, in its interpreter without a GPU."""

import pytest
import torch
from test_rans import SIGMAS, code_of, drawn
from views import DEVICE

from vqkv.kernels import naive
from vqkv.kernels.entropy.triton import rans_decode, rans_encode


@pytest.mark.parametrize("tokens", [1, 9, 33])
def test_streams_are_naive(tokens, request):
    """Whole ones, two of them with the farthest values there are, and what is made of damaged ones."""
    tables = torch.arange(7) % len(SIGMAS)
    shifts = torch.tensor([0, 0, 0, 3, 0, 16, 0])
    code, x = code_of(tables, shifts), drawn(tables, shifts, 3, tokens, 5)
    x[1:, 2, tokens // 2] = torch.tensor([-(2**23), 2**23 - 1])
    expected, sizes = naive.rans_encode(x, code)
    altered = expected.clone()
    altered[len(altered) // 3] ^= 64
    cases = (expected, sizes), (altered, sizes), (expected[:-1], sizes - torch.tensor([0, 0, 1]))
    wanted = [naive.rans_decode(*case, code, tokens) for case in cases]
    request.getfixturevalue("guarded")  # not before: naive results may be of bools
    there = code.to(DEVICE)
    words, lengths = rans_encode(x.to(DEVICE), there)
    assert torch.equal(words.cpu(), expected) and torch.equal(lengths.cpu(), sizes)
    for case, (values, valid) in zip(cases, wanted, strict=True):
        gpu_values, gpu_valid = rans_decode(*(part.to(DEVICE) for part in case), there, tokens)
        assert torch.equal(gpu_values.cpu(), values) and torch.equal(gpu_valid.cpu(), valid)


def test_no_streams():
    code = code_of(torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long)).to(DEVICE)
    words, lengths = rans_encode(torch.zeros(0, 3, 5, dtype=torch.int32, device=DEVICE), code)
    values, valid = rans_decode(words, lengths, code, 5)
    assert values.shape == (0, 5, 3) and not len(words) and not len(valid)
