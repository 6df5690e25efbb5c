"""Triton's decoder against the naive one: affine codes, residual and product VQ, grids."""

import pytest
import torch
from gpu_guard import DEVICE, amid, apart, close, gaussian

from vqkv.kernels import naive
from vqkv.kernels.decoding.triton import decode
from vqkv.kernels.view import Affine, Coded, KernelView

FP32 = 1e-6  # sums in the same order, but products may be fused


def random(*shape, dtype=torch.float32) -> torch.Tensor:
    return gaussian(*shape, seed=sum(shape)).to(dtype)


def coded(groups: int, dim: int, tokens=3, k=2, bits=5, tables=1, size=0, scales=0, every=1, **more) -> Coded:
    shape = (1, more.pop("heads", 1), tokens)
    size, dtype = size or 2**bits, more.pop("dtype", torch.float16)
    codes = torch.randint(0, size, (*shape, groups * k), generator=torch.Generator().manual_seed(groups)).to(DEVICE)
    scale = random(*shape[:2], -(-tokens // every), scales, dtype=torch.float16) if scales else None
    books = amid(random(tables, k, size, dim, dtype=dtype))
    packed = amid(naive.pack_codes(codes, bits))
    return Coded(packed, books, bits, groups, None if scale is None else amid(scale), every, **more)


def affine(head_dim: int, group_size: int, bits: int, tokens=3, heads=1) -> Affine:
    packed = naive.affine_encode(random(1, heads, tokens, head_dim), bits, group_size)
    return Affine(amid(packed.codes), amid(packed.low), amid(packed.high), bits)


def same(packed: KernelView) -> None:
    close(decode(packed), naive.decode(packed), FP32)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    "groups, dim", [(4, 32), (1, 80), (5, 16), (3, 32), (64, 2), (1, 4), (4, 20), (3, 10), (4, 3), (7, 5)]
)
def test_shapes_of_heads_and_groups(groups, dim, strided, guarded):
    same(coded(groups, dim, strided=strided))


@pytest.mark.parametrize("bits, k", [(1, 9), (3, 5), (8, 2), (11, 8), (16, 1)])
def test_codes_of_any_width(bits, k, guarded):
    same(coded(2, 8, tokens=5, k=k, bits=bits, size=min(2**bits, 300)))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("scales, every", [(4, 1), (2, 1), (1, 3), (4, 64)])
def test_scales_of_groups_and_blocks(scales, every, strided, guarded):
    same(coded(4, 8, tokens=7, scales=scales, every=every, strided=strided, heads=2))


def test_a_table_for_every_group(guarded):
    same(coded(4, 8, k=1, bits=8, tables=4, scales=1))
    same(coded(4, 8, k=2, bits=3, tables=2, dtype=torch.float32))


@pytest.mark.parametrize("tokens", [1, 63, 100])
@pytest.mark.parametrize("packed", [lambda n: coded(4, 32, n, scales=1, strided=True), lambda n: affine(128, 64, 4, n)])
def test_tokens_fill_no_tile(packed, tokens, guarded):
    same(packed(tokens))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("head_dim, group_size", [(128, 64), (128, 32), (80, 40), (96, 96), (12, 3), (16, 2), (8, 1)])
def test_affine(head_dim, group_size, bits, guarded):
    same(affine(head_dim, group_size, bits, heads=2))


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_heads_and_batch_entries(heads, guarded):
    one, other = (coded(4, 8, tokens=3, heads=heads, scales=1, strided=True) for _ in "ab")
    both = Coded(torch.cat([one.codes, other.codes.flip(2)]), one.codebooks, 5, 4, torch.cat([one.scale] * 2), 1, True)
    same(both)


def test_slices_of_longer_caches():
    for packed in (
        coded(4, 8, 9, k=4, bits=8, heads=2, scales=1),
        coded(3, 8, 9, heads=2, scales=1, every=2),
        affine(32, 16, 4, 9, 2),
    ):
        same(packed.tokens(2, 7))


def test_codes_at_no_aligned_address():
    packed = coded(4, 8, 5, bits=11, size=64)
    moved = Coded(apart(packed.codes), packed.codebooks, 11, 4)
    close(decode(moved), naive.decode(packed), FP32)
    packed = affine(32, 16, 4, 5)
    moved = Affine(apart(packed.codes), apart(packed.low), packed.high, 4)
    close(decode(moved), naive.decode(packed), FP32)


def test_extremes():
    x = torch.zeros(1, 1, 4, 32, device=DEVICE)
    x[0, 0, 1], x[0, 0, 2, :16], x[0, 0, 2, 16:], x[0, 0, 3] = 5.0, 65504, -65504, 1e-7
    for bits in (2, 4, 8):
        packed = naive.affine_encode(x, bits, 32)
        for token in range(4):
            close(decode(packed.tokens(token, token + 1)), naive.decode(packed.tokens(token, token + 1)), FP32)
    packed = coded(4, 8, scales=1)
    packed.scale[0, 0, 1], packed.scale[0, 0, 2] = 0, 65504
    same(packed)
    assert not decode(packed)[0, 0, 1].any()


def test_a_code_beyond_its_codebook_stands_for_the_last():
    packed = coded(2, 8, k=1, bits=5, size=20)
    packed.codes.fill_(255)
    last = packed.codebooks[0, 0, -1].float().repeat(2)
    assert torch.equal(decode(packed), last.expand(packed.shape))


@pytest.mark.parametrize("packed", [coded(4, 8, 0), affine(32, 16, 4, 0)])
def test_no_tokens(packed):
    assert decode(packed).shape == (1, 1, 0, 32)
