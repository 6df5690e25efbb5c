"""A CPU's loops against naive ones: residual VQ's search and places, affine codes, packing."""

import multiprocessing

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import gaussian

from vqkv.kernels import Coded, cpu, machine, naive, pack_codes, unpack_codes

GROUP_SIZES = st.sampled_from([1, 5, 8, 16, 64])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bits_of(x):
    """The memory of a tensor, so that 0 and -0 differ."""
    return x.contiguous().view(torch.uint8)


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
    assert torch.equal(codes, naive.rvq_encode(x, codebooks))
    expected = sum(codebook.float()[codes[:, k]] for k, codebook in enumerate(codebooks))  # with torch's bits
    assert torch.equal(cpu.rvq_decode(codes.T.contiguous().T, codebooks), expected)


@pytest.mark.parametrize("dim, codebook_size", [(4, 100), (32, 100), (32, 2048)])
@pytest.mark.parametrize("value", [3e38, 1e-38, 1e-44])
@pytest.mark.parametrize("where", ["row", "code"])
def test_values_that_fp32_cannot_rank(dim, codebook_size, value, where):
    x, codebooks = gaussian(130, dim), gaussian(2, codebook_size, dim, seed=1)
    (x if where == "row" else codebooks[1])[77, dim // 2] = value
    assert torch.equal(cpu.rvq_encode(x, codebooks), naive.rvq_encode(x, codebooks))


@pytest.mark.parametrize("dim", [4, 32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_get_codes_and_leave_other_rows_alone(dim, value):
    x, codebooks = gaussian(130, dim), gaussian(2, 100, dim, seed=1)
    expected = naive.rvq_encode(x, codebooks)
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


@pytest.mark.parametrize("dim", [4, 32])
def test_every_thread_does_its_share(monkeypatch, dim):
    monkeypatch.setattr(machine, "WORTH", 1)
    x, codebooks = gaussian(1111, dim), gaussian(2, 100, dim, seed=1)
    codebooks[:, 50:] = codebooks[:, :50].clone()  # ties: all rows are doubtful
    expected, wanted = naive.rvq_encode(x, codebooks), naive.affine_encode(x.view(1, 11, 101, dim), 4, 4)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(cpu.rvq_encode(x, codebooks), expected)
        found = cpu.decode(Coded(pack_codes(expected, 7)[None, None], codebooks[None], 7, 1))
        assert torch.equal(found[0, 0], cpu.rvq_decode(expected, codebooks))
        assert torch.equal(cpu.affine_encode(x.view(1, 11, 101, dim), 4, 4).codes, wanted.codes)
        assert torch.equal(cpu.decode(wanted), naive.decode(wanted))


def test_a_forked_process_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(machine, "WORTH", 1)
    torch.set_num_threads(2)
    assert sum(machine.spread(lambda i, j: j - i, 5, 1)) == 5
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(sum(machine.spread(lambda i, j: j - i, 7, 1))))
    child.start()
    assert queue.get(timeout=60) == 7
    child.join()


@settings(deadline=None, max_examples=60)
@given(bits=st.sampled_from([1, 2, 4, 8]), spare=st.integers(0, 1), dim=st.integers(1, 9), groups=st.integers(1, 9),
       rows=st.integers(0, 9), seed=st.integers(0, 100))  # fmt: skip
def test_one_codebook_is_looked_up_by_byte(bits, spare, dim, groups, rows, seed):
    codebooks = gaussian(1, 1, 2**bits - spare, dim, seed=seed)
    codes = torch.randint(2**bits - spare, (1, 2, rows, groups), generator=torch.Generator().manual_seed(seed))
    packed = Coded(pack_codes(codes, bits), codebooks, bits, groups)
    assert torch.equal(cpu.decode(packed), naive.decode(packed))


def awkward():
    """Groups that are constant, tiny, huge, of zeros of both signs, with ends at fp16's limits."""
    x = gaussian(1, 3, 40, 64)
    x[0, 0, 0] = 3.25
    x[0, 0, 1] = 0
    x[0, 0, 2] = torch.where(x[0, 0, 2] < 0, -0.0, 0.0)
    x[0, 0, 3] = x[0, 0, 3].abs() * torch.where(x[0, 0, 4] < 0, -0.0, 1.0)
    x[0, 0, 5] = -x[0, 0, 3]
    for row, size in enumerate((1e-42, 1e-30, 6e-8, 3e4, 1e38), 6):
        x[0, 0, row] *= size
    x[0, 0, 11] = torch.linspace(-65504, 65504, 64)
    x[0, 1] = x[0, 1].round()
    return x


@settings(deadline=None, max_examples=60)
@given(bits=st.integers(1, 8), size=GROUP_SIZES, dtype=st.sampled_from([torch.float32, torch.float16]),
       strided=st.booleans())  # fmt: skip
def test_affine_codes_and_values_are_naive(bits, size, dtype, strided):
    x = awkward()[..., : 64 - 64 % size].to(dtype).nan_to_num(0, 65504, -65504)
    x = x.mT.contiguous().mT if strided else x
    found, expected = cpu.affine_encode(x, bits, size), naive.affine_encode(x, bits, size)
    for name in ("codes", "low", "high"):
        assert torch.equal(bits_of(getattr(found, name)), bits_of(getattr(expected, name)))
    if x.shape[-1] * bits % 8 == 0:  # else the last byte hides how many channels there are
        assert torch.equal(bits_of(cpu.decode(found)), bits_of(naive.decode(found)))


@st.composite
def codes_and_bits(draw):
    """Codes (..., count) below 2^bits: contiguous, a transposed view or a slice that begins at an odd byte."""
    bits = draw(st.integers(1, 16))
    shape = [*draw(st.lists(st.integers(0, 4), max_size=3)), draw(st.integers(0, 41))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    codes = torch.randint(0, 1 << bits, [*shape, 2], generator=generator)
    types = [torch.int64, torch.int32, *[torch.int16] * (bits < 16), *[torch.uint8] * (bits <= 8)]
    codes = codes.to(draw(st.sampled_from(types)))
    layout = draw(st.sampled_from(["contiguous", "strided", "transposed", "slice"]))
    if layout == "slice":
        return codes.flatten(-2)[..., 1:], bits
    codes = codes[..., 0]
    if layout == "transposed":
        return codes.transpose(0, -1), bits
    return codes.contiguous() if layout == "contiguous" else codes, bits


@settings(deadline=None, max_examples=150)
@given(codes_and_bits())
def test_packing_is_the_bit_string_code_by_code(case):
    codes, bits = case
    packed, expected = cpu.pack_codes(codes, bits), naive.pack_codes(codes, bits)
    string = (codes.long().unsqueeze(-1) >> torch.arange(bits) & 1).flatten(-2)
    assert np.array_equal(expected.numpy(), np.packbits(string.byte().numpy(), axis=-1, bitorder="little"))
    assert packed.dtype == torch.uint8 and packed.is_contiguous()
    assert packed.shape == expected.shape and torch.equal(packed, expected)
    assert torch.equal(unpack_codes(packed, bits, codes.shape[-1]).long(), codes.long())
    assert torch.equal(naive.unpack_codes(expected, bits, codes.shape[-1]), codes.long())
    scattered = packed.unsqueeze(-1).repeat_interleave(3, dim=-1)[..., 1]
    assert torch.equal(cpu.unpack_codes(scattered, bits, codes.shape[-1]).long(), codes.long())
