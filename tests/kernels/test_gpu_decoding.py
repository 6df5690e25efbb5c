"""Triton's decoder against the naive one: affine codes, residual and product VQ, grids."""

import dataclasses

import pytest
import torch
from views import DEVICE, affine, all_amid, apart, coded

from vqkv.kernels import naive
from vqkv.kernels.formats.triton import decode
from vqkv.kernels.view import KernelView

FEW = {"tokens": 3, "heads": 2, "batch": 1}


def same(packed: KernelView, relative: float = 1e-6) -> None:
    """To so much of the largest value: sums are in the same order, but products may be fused."""
    values, wanted = decode(packed), naive.decode(packed)
    assert values.shape == wanted.shape and values.dtype == wanted.dtype
    if values.numel():
        assert (values.double() - wanted.double()).abs().max() <= relative * wanted.double().abs().max()


SHAPES = [(4, 32), (1, 80), (5, 16), (3, 32), (64, 2), (1, 4), (4, 20), (3, 10), (4, 3), (7, 5)]  # groups, dim
HEADS = [(128, 64), (128, 32), (80, 40), (96, 96), (12, 3), (16, 2), (8, 1)]  # head_dim, group
PACKED = [
    *(coded(*shape, strided=strided, **FEW) for shape in SHAPES for strided in (False, True)),
    *(coded(2, 8, k, bits, min(2**bits, 300), **FEW) for bits, k in ((1, 9), (3, 5), (8, 2), (11, 8), (16, 1))),
    *(coded(4, 8, scales=n, every=every, tokens=7) for n, every in ((4, 1), (2, 1), (1, 3), (4, 64))),
    *(coded(4, 8, scales=n, every=every, strided=True, tokens=7) for n, every in ((4, 1), (2, 1), (1, 3), (4, 64))),
    coded(4, 8, 1, 8, tables=4, scales=1, **FEW),
    coded(4, 8, 2, 3, tables=2, dtype=torch.float32, **FEW),
    *(coded(4, 32, scales=1, strided=True, tokens=tokens, heads=1) for tokens in (0, 1, 63, 100)),
    *(affine(128, 4, 64, tokens=tokens, heads=1) for tokens in (0, 1, 63, 100)),
    *(affine(head_dim, bits, group, **FEW) for head_dim, group in HEADS for bits in (2, 4, 8)),
]


@pytest.mark.parametrize("packed", PACKED)
def test_values_are_naive_whatever_the_shape(packed, request):
    """Groups, widths, scales and tables of any size, and tokens that fill no tile."""
    if packed.codes.numel():
        request.getfixturevalue("guarded")
    same(all_amid(packed))


def test_slices_of_longer_caches_and_codes_at_no_aligned_address():
    for packed in (coded(4, 8, 4, 8, scales=1), coded(3, 8, scales=1, every=2), affine(32, 4, 16)):
        same(packed.tokens(2, 7))
        same(dataclasses.replace(packed, codes=apart(packed.codes)))


def test_extremes():
    x = torch.zeros(1, 1, 4, 32, device=DEVICE)
    x[0, 0, 1], x[0, 0, 2, :16], x[0, 0, 2, 16:], x[0, 0, 3] = 5.0, 65504, -65504, 1e-7
    for bits in (2, 4, 8):
        packed = naive.affine_encode(x, bits, 32)
        for token in range(4):
            same(packed.tokens(token, token + 1))
    packed = coded(4, 8, scales=1, **FEW)
    packed.scale[0, 0, 1], packed.scale[0, 0, 2] = 0, 65504
    same(packed)
    assert not decode(packed)[0, 0, 1].any()


def test_a_code_beyond_its_codebook_stands_for_the_last():
    packed = coded(2, 8, 1, 5, size=20, **FEW)
    packed.codes.fill_(255)
    last = packed.codebooks[0, 0, -1].float().repeat(2)
    assert torch.equal(decode(packed), last.expand(packed.shape))
