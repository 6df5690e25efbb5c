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
    found, wanted = decode(packed), naive.decode(packed)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    if found.numel():
        assert (found.double() - wanted.double()).abs().max() <= relative * wanted.double().abs().max()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    "groups, dim", [(4, 32), (1, 80), (5, 16), (3, 32), (64, 2), (1, 4), (4, 20), (3, 10), (4, 3), (7, 5)]
)
def test_shapes_of_heads_and_groups(groups, dim, strided, guarded):
    same(all_amid(coded(groups, dim, strided=strided, **FEW)))


@pytest.mark.parametrize("bits, k", [(1, 9), (3, 5), (8, 2), (11, 8), (16, 1)])
def test_codes_of_any_width(bits, k, guarded):
    same(all_amid(coded(2, 8, k, bits, size=min(2**bits, 300), **FEW)))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("scales, every", [(4, 1), (2, 1), (1, 3), (4, 64)])
def test_scales_of_groups_and_blocks(scales, every, strided, guarded):
    same(all_amid(coded(4, 8, scales=scales, every=every, strided=strided, tokens=7)))


def test_a_table_for_every_group(guarded):
    same(all_amid(coded(4, 8, 1, 8, tables=4, scales=1, **FEW)))
    same(all_amid(coded(4, 8, 2, 3, tables=2, dtype=torch.float32, **FEW)))


@pytest.mark.parametrize("tokens", [0, 1, 63, 100])
def test_tokens_fill_no_tile(tokens, request):
    if tokens:
        request.getfixturevalue("guarded")
    same(all_amid(coded(4, 32, scales=1, strided=True, tokens=tokens, heads=1)))
    same(all_amid(affine(128, 4, 64, tokens=tokens, heads=1)))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("head_dim, group", [(128, 64), (128, 32), (80, 40), (96, 96), (12, 3), (16, 2), (8, 1)])
def test_affine(head_dim, group, bits, guarded):
    same(all_amid(affine(head_dim, bits, group, **FEW)))


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
