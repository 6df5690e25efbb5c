"""Triton's kernels of codes against the naive twins, in its interpreter without a GPU: packing, affine codes, decoding
of affine codes, residual and product VQ and grids, rANS; residual VQ's search against brute force in float64."""

import dataclasses

import pytest
import torch
from test_codes import SIGMAS, code_of, drawn
from views import DEVICE, affine, all_amid, amid, apart, coded, gaussian, whole_numbers

from vqkv.kernels import cpu, naive
from vqkv.kernels.entropy.triton import rans_decode, rans_encode
from vqkv.kernels.formats.triton import affine_encode, can_affine_encode, decode
from vqkv.kernels.packing.triton import pack_codes, unpack_codes
from vqkv.kernels.rvq import triton as rvq
from vqkv.kernels.rvq.triton import rvq_encode
from vqkv.kernels.view import KernelView


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 15, 16])
def test_packing(bits, request):
    """Spare bits of a row are zeros, and are not read."""
    if bits != 8:  # which needs no kernel
        request.getfixturevalue("guarded")
    for shape in ((3, 5), (2, 3, 40), (1, 1), (7, 33), (1500,), (2, 1025), (0, 5), (3, 0), (2, 0, 4)):
        codes = torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(bits)).to(DEVICE)
        wanted = naive.pack_codes(codes, bits)
        packed = pack_codes(amid(codes), bits)
        assert packed.dtype == torch.uint8 and torch.equal(packed, wanted)
        spare = -shape[-1] * bits % 8
        if spare and wanted.numel():
            wanted[..., -1] |= 0xFF << (8 - spare) & 0xFF
        unpacked = unpack_codes(amid(wanted), bits, shape[-1])
        assert torch.equal(unpacked.long(), codes)
        assert unpacked.dtype == cpu.unpack_codes(wanted, bits, shape[-1]).dtype


def same_affine(x: torch.Tensor, group_size: int) -> None:
    for bits in (2, 4, 8):
        assert can_affine_encode(x, bits, group_size)
        coded, wanted = affine_encode(x, bits, group_size), naive.affine_encode(x, bits, group_size)
        for name in ("codes", "low", "high"):
            assert torch.equal(getattr(coded, name), getattr(wanted, name))
        assert coded.shape == wanted.shape and coded.group_size == group_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape, group_size",
    [((1, 2, 100, 128), 64), ((1, 2, 63, 80), 40), ((2, 1, 1, 96), 96), ((1, 2, 7, 12), 12), ((1, 2, 7, 8), 4)],
)
def test_affine_codes_and_ends(shape, group_size, dtype, guarded):
    same_affine(amid((gaussian(*shape) * 3).to(dtype)), group_size)


def test_affine_values_with_any_strides_and_none(guarded):
    x = gaussian(2, 3, 7, 32)
    for view in (apart(x), amid(x.transpose(1, 2).contiguous()).transpose(1, 2), amid(x.mT.contiguous()).mT):
        same_affine(view, 16)
    same_affine(x[:, :1].expand(-1, 3, -1, -1), 16)
    same_affine(x[:, :, :0], 16)
    assert not can_affine_encode(x, 4, 1) and not can_affine_encode(x, 3, 16)


def test_affine_extremes():
    x = torch.zeros(1, 1, 8, 16, device=DEVICE)
    x[0, 0, 1] = 3.7  # a constant group
    x[0, 0, 2] = gaussian(16) * 1e-9  # fp16 has one number for all
    x[0, 0, 3, :8], x[0, 0, 3, 8:] = 65504, -65504
    x[0, 0, 4] = gaussian(16) * 1e6  # ends beyond fp16
    x[0, 0, 5] = 1000 + gaussian(16) * 1e-2  # ends that fp16 moves inwards
    x[0, 0, 6] = 1e6
    x[0, 0, 7] = gaussian(16) * 1e-7
    same_affine(x, 16)
    for levels in (3, 15, 255):  # values midway between levels go to the even one
        x = torch.zeros(levels + 5, device=DEVICE)
        x[0], x[1 : levels + 1] = levels, torch.arange(levels, device=DEVICE) + 0.5
        same_affine(x.view(1, 1, 1, -1), levels + 5)


FEW = {"tokens": 3, "heads": 2, "batch": 1}


def same_values(packed: KernelView, relative: float = 1e-6) -> None:
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
    same_values(all_amid(packed))


def test_slices_of_longer_caches_and_codes_at_no_aligned_address():
    for packed in (coded(4, 8, 4, 8, scales=1), coded(3, 8, scales=1, every=2), affine(32, 4, 16)):
        same_values(packed.tokens(2, 7))
        same_values(dataclasses.replace(packed, codes=apart(packed.codes)))


def test_extremes_are_decoded_and_a_code_beyond_its_codebook_stands_for_the_last():
    x = torch.zeros(1, 1, 4, 32, device=DEVICE)
    x[0, 0, 1], x[0, 0, 2, :16], x[0, 0, 2, 16:], x[0, 0, 3] = 5.0, 65504, -65504, 1e-7
    for bits in (2, 4, 8):
        packed = naive.affine_encode(x, bits, 32)
        for token in range(4):
            same_values(packed.tokens(token, token + 1))
    packed = coded(4, 8, scales=1, **FEW)
    packed.scale[0, 0, 1], packed.scale[0, 0, 2] = 0, 65504
    same_values(packed)
    assert not decode(packed)[0, 0, 1].any()
    packed = coded(2, 8, 1, 5, size=20, **FEW)
    packed.codes.fill_(255)
    last = packed.codebooks[0, 0, -1].float().repeat(2)
    assert torch.equal(decode(packed), last.expand(packed.shape))


@pytest.mark.parametrize("tokens", [1, 33])
def test_streams_are_naive(tokens, request):
    """Complete ones, two of them with the farthest values there are, what is made of damaged ones, and none."""
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
    words, lengths = rans_encode(x[:0].to(DEVICE), there)
    values, valid = rans_decode(words, lengths, there, tokens)
    assert values.shape == (0, tokens, 7) and not len(words) and not len(valid)


def same_codes(x, codebooks):
    expected, codes = naive.rvq_encode(x, codebooks), rvq_encode(x, codebooks)
    assert codes.dtype == expected.dtype and codes.shape == expected.shape and torch.equal(codes, expected)


SIZES = [
    *[(1, 1, 3, 1), (63, 4, 60, 3), (65, 5, 100, 1), (100, 20, 257, 2), (5, 64, 3, 8), (9, 100, 70, 2), (3, 256, 1, 2)],
    (257, 8, 257, 2),  # in programs of the largest size
]


@pytest.mark.parametrize(("rows", "dim", "size", "num_quantizers"), SIZES)
def test_codes_are_naive_where_scores_are_exact(rows, dim, size, num_quantizers, monkeypatch, guarded):
    """Equally near codes included: of those, the lowest."""
    monkeypatch.setattr(rvq, "MANY", 257)
    codebooks = whole_numbers(num_quantizers, size, dim, seed=1)
    codebooks[:, -1] = codebooks[:, min(1, size - 1)]  # in another tile
    same_codes(whole_numbers(rows, dim), codebooks)


@pytest.mark.parametrize(("magnitude", "second"), [(1, 0.4), (1e-6, 0.4), (1e4, 1e-4)])
def test_gaussian_codes_are_nearly_always_naive_and_as_good(magnitude, second):
    """Operands are fp16: the first stage's codes differ where two are as near to within 1/1,000 or so. Stages may
    differ in magnitude."""
    x, codebooks = gaussian(200, 32) * magnitude, gaussian(2, 64, 32, seed=1) * magnitude
    codebooks[1] *= second
    expected, codes = naive.rvq_encode(x, codebooks), rvq_encode(x, codebooks)
    assert (expected[:, 0] == codes[:, 0]).float().mean() >= 0.99
    errors = [(x.double() - naive.rvq_decode(each, codebooks)).square().mean() for each in (codes, expected)]
    assert errors[0] <= 1.001 * errors[1]
    assert torch.equal(codes, rvq_encode(x, codebooks))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_residual_needs_more_digits_than_its_vector(dtype):
    """One of 100 after a code of 1,000 cannot be kept in bfloat16."""
    x = (whole_numbers(30, 5) + 100).to(dtype)
    codebooks = whole_numbers(2, 20, 5, seed=1) + torch.tensor([1000, -900], device=DEVICE)[:, None, None]
    same_codes(x, codebooks.half())


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
    same_codes(VIEWS[view], amid(whole_numbers(2, 33, 4, seed=1), strides, garbage))


def test_numbers_that_are_none_get_codes_and_leave_other_rows_alone():
    x, codebooks = whole_numbers(9, 2, 4), whole_numbers(3, 33, 4, seed=1)
    expected = naive.rvq_encode(x, codebooks)
    x[1, 0], x[4, 1, 2], x[7, 0, 3] = float("nan"), float("inf"), -float("inf")
    codes, fine = rvq_encode(x, codebooks), x.isfinite().all(dim=-1)
    assert fine.sum() == 15 and torch.equal(expected[fine], codes[fine])
    assert codes.min() >= 0 and codes.max() < 33
