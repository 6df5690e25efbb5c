"""What numba compiles gives the bits of the plain ways: residual VQ's search and places, affine codes."""

import multiprocessing
import subprocess
import sys

import numpy as np
import pytest
import torch
from codec_zoo import gaussian
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv import presets
from vqkv.codec import Chain, Grouping, MinMax, ResidualVQ, Uniform
from vqkv.errors import FormatError
from vqkv.kernels import Coded, cpu, fused, pack_codes, pieces, reference


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bits_of(x):
    return x.contiguous().view(torch.uint8)


def torch_only(monkeypatch):
    monkeypatch.setattr(fused.affine, "takes", lambda x: False)
    monkeypatch.setattr(fused.jit, "serves", lambda *tensors: False)


@settings(deadline=None, max_examples=150)
@given(
    rows=st.sampled_from([1, 63, 100, 129, 300]),
    dim=st.sampled_from([1, 2, 3, 4, 7, 8, 9, 17, 64]),
    codebook_size=st.sampled_from([1, 3, 64, 65, 200, 256, 300, 2049]),
    quantizers=st.integers(1, 3),
    duplicates=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
    seed=st.integers(0, 10**6),
)
def test_codes_equal_the_reference_whichever_kernel(rows, dim, codebook_size, quantizers, duplicates, dtype, seed):
    """Vectors that are codes, codes that occur twice, rows of zeros; short vectors and long ones."""
    x, codebooks = gaussian(rows, dim, seed=seed), gaussian(quantizers, codebook_size, dim, seed=seed + 1).to(dtype)
    if duplicates:
        codebooks[:, codebook_size // 2 :] = codebooks[:, : codebook_size - codebook_size // 2].clone()
        x[::3] = codebooks[0].float()[torch.arange(len(x[::3])) % codebook_size]
        x[::7] = 0
    assert torch.equal(cpu.rvq_encode(x, codebooks), reference.rvq_encode(x, codebooks))


@pytest.mark.parametrize("dim, codebook_size", [(4, 100), (32, 100), (32, 2048)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, 1e-38, 1e-44])
@pytest.mark.parametrize("where", ["row", "code"])
def test_values_that_fp32_cannot_rank_are_left_to_the_reference(dim, codebook_size, value, where):
    x, codebooks = gaussian(130, dim), gaussian(2, codebook_size, dim, seed=1)
    (x if where == "row" else codebooks[1])[77, dim // 2] = value
    assert torch.equal(cpu.rvq_encode(x, codebooks), reference.rvq_encode(x, codebooks))


@pytest.mark.parametrize("dim", [4, 32])
def test_machine_code_and_torch_agree(monkeypatch, dim):
    x, codebooks = gaussian(1000, dim), gaussian(4, 130, dim, seed=1)
    codes = cpu.rvq_encode(x, codebooks)
    values = cpu.rvq_decode(codes, codebooks)
    torch_only(monkeypatch)
    codebooks = codebooks.clone()
    assert torch.equal(cpu.rvq_encode(x, codebooks), codes)
    assert torch.equal(bits_of(cpu.rvq_decode(codes, codebooks)), bits_of(values))


@pytest.mark.parametrize("dim", [4, 32])
def test_every_thread_does_its_share(monkeypatch, dim):
    monkeypatch.setattr(fused.jit, "WORTH", 1)
    x, codebooks = gaussian(1111, dim), gaussian(2, 100, dim, seed=1)
    codebooks[:, 50:] = codebooks[:, :50].clone()  # ties: all rows are left over
    expected = reference.rvq_encode(x, codebooks)
    packed = pack_codes(expected, 7)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(cpu.rvq_encode(x, codebooks), expected)
        found = pieces.decode(Coded(packed[None, None], codebooks[None], 7, 1))
        assert torch.equal(found[0, 0], cpu.rvq_decode(expected, codebooks))


def test_a_forked_process_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(fused.jit, "WORTH", 1)
    assert fused.jit.spread(lambda i, j: j - i, 5, 1) == [5]
    torch.set_num_threads(2)
    assert sum(fused.jit.spread(lambda i, j: j - i, 5, 1)) == 5
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(sum(fused.jit.spread(lambda i, j: j - i, 7, 1))))
    child.start()
    assert queue.get(timeout=60) == 7
    child.join()


@settings(deadline=None, max_examples=150)
@given(
    bits=st.integers(1, 16),
    count=st.integers(1, 40),
    rows=st.integers(1, 5),
    stages=st.integers(1, 5),
    seed=st.integers(0, 10**6),
)
def test_places_are_codes_and_offsets(bits, count, rows, stages, seed):
    size = max(1, (1 << bits) - seed % 3)
    codes = torch.randint(0, size, (rows, stages * count), generator=torch.Generator().manual_seed(seed))
    offsets = (torch.arange(stages, dtype=torch.int32) * size).repeat(3)
    expected = codes + offsets[:stages].repeat(count)
    for dtype in (torch.int64, torch.int32, torch.int16 if bits < 16 else torch.int32):
        assert torch.equal(fused.decode.places(codes.to(dtype), offsets.numpy(), size), expected.int())
    packed = pack_codes(codes, bits)
    args = bits, offsets.numpy(), codes.shape[1]
    assert torch.equal(fused.decode.places_packed(packed, *args, size), expected.int())
    if size > 1:
        most = int(codes.max())
        assert fused.decode.places(codes, offsets.numpy(), most or 1) is None or not most
        assert fused.decode.places_packed(packed, *args, most or 1) is None or not most
    assert fused.decode.places(-1 - codes, offsets.numpy(), size) is None


@pytest.mark.parametrize("codebook_size", [30, 200])
def test_a_packed_code_beyond_the_codebook_is_refused_by_name(codebook_size):
    quantizer = ResidualVQ(num_quantizers=3, codebook_size=codebook_size, group_size=8)
    codec = Chain([Grouping(group_size=8)], quantizer).fit(gaussian(1, 1, 1200, 16))
    payload = codec.encode(gaussian(1, 2, 5, 16))
    values = codec.decode(payload)
    payload.fields["codes"][0, 1, 3] = 255
    with pytest.raises(FormatError, match=f"is not below codebook_size {codebook_size}"):
        codec.decode(payload)
    assert values.shape == (1, 2, 5, 16)


def affine_inputs():
    """Groups that are constant, tiny, huge, of zeros of both signs, with ends at fp16's limits; and NaN."""
    x = gaussian(1, 3, 40, 64)
    x[0, 0, 0] = 3.25
    x[0, 0, 1] = 0
    x[0, 0, 2] = torch.where(x[0, 0, 2] < 0, -0.0, 0.0)
    x[0, 0, 3] = x[0, 0, 3].abs() * torch.where(x[0, 0, 4] < 0, -0.0, 1.0)
    x[0, 0, 5] = -x[0, 0, 3]
    x[0, 0, 6] *= 1e-42
    x[0, 0, 7] *= 1e-30
    x[0, 0, 8] *= 6e-8
    x[0, 0, 9] *= 3e4
    x[0, 0, 10] = torch.linspace(-65504, 65504, 64)
    x[0, 0, 11] *= 1e38
    x[0, 0, 12] = torch.inf
    x[0, 0, 13, 5] = -torch.inf
    x[0, 1] = x[0, 1].round()
    return x


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("size", [1, 5, 8, 16, 64])
@pytest.mark.parametrize("nan", [False, True])
def test_affine_codes_have_torchs_bits(monkeypatch, bits, size, nan):
    """Whatever the values, all in one tensor: whether any group has a zero end decides how torch finds all of them."""
    x = affine_inputs()[..., : 64 - 64 % size].unflatten(-1, (-1, size)).contiguous()
    for part in (x, x[:, 1:].contiguous() + 7, x[:, 2:].contiguous()):
        if nan:
            part[0, 0, 20, 0, size // 2] = torch.nan
        quantizer = Uniform(bits)
        quantizer.build(part.shape[1:2] + part.shape[3:])
        both, (y, side) = MinMax().encode_codes(quantizer, part), MinMax().encode(part)
        codes = Uniform(bits).encode(y)
        with monkeypatch.context() as patch:
            torch_only(patch)
            plain, plain_side = MinMax().encode(part)
            plain_codes = Uniform(bits).encode(plain)
            assert all(torch.equal(bits_of(side[name]), bits_of(plain_side[name])) for name in ("low", "high"))
        assert torch.equal(bits_of(y.nan_to_num(7)), bits_of(plain.nan_to_num(7))) and torch.equal(codes, plain_codes)
        assert (both is None) == (bits not in (1, 2, 4, 8) or codes.shape[-1] * bits % 8 != 0)
        if both:
            assert torch.equal(both[0].fields["codes"], pack_codes(plain_codes, bits))
            assert all(torch.equal(bits_of(both[1][name]), bits_of(side[name])) for name in side)


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from([1, 2, 3, 4, 8]),
    size=st.sampled_from([1, 4, 24, 64, 128]),
    rows=st.sampled_from([1, 31, 100]),
    scale=st.sampled_from([1e-8, 1e-3, 1.0, 1e4]),
    seed=st.integers(0, 10**6),
)
def test_affine_codecs_store_and_read_torchs_bits(bits, size, rows, scale, seed):
    x = gaussian(2, 2, rows, 2 * size, seed=seed) * scale
    codec = Chain([Grouping(group_size=size), MinMax()], Uniform(bits)).fit(x)
    payload, values = codec.encode(x), codec.decode(codec.encode(x))
    with pytest.MonkeyPatch.context() as patch:
        torch_only(patch)
        plain = codec.encode(x)
        assert all(torch.equal(bits_of(payload.fields[name]), bits_of(plain.fields[name])) for name in plain.fields)
        assert torch.equal(bits_of(codec.decode(payload)), bits_of(values))


def test_no_folder_to_keep_machine_code_in(monkeypatch):
    def refuse(function, cache=False, **settings):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return function

    monkeypatch.setattr(fused.jit.numba, "njit", refuse)
    assert fused.jit.compiled()(len) is len


def test_the_kernels_are_what_runs(monkeypatch):
    called = []
    for name in ("pack_between_ends", "shift_and_divide", "rounded"):
        kernel = getattr(fused.affine, name)
        monkeypatch.setattr(fused.affine, name, lambda *a, k=kernel, n=name: (called.append(n), k(*a))[1])
    x = gaussian(1, 2, 8, 64)
    for preset in (presets.quanto(4), presets.hqq(4)):
        codec = preset.key_codec(64).fit(x)
        codec.encode(x)
    assert called == ["pack_between_ends", "shift_and_divide", "rounded"]
    torch.set_num_threads(fused.affine.THREADS + 1)
    codec.encode(x)
    assert len(called) == 3


def test_machine_tables_share_memory_with_torchs():
    tables = cpu.prepare(gaussian(2, 128, 8))
    assert np.shares_memory(tables.machine.codebooks, tables.flat.numpy())
    assert np.shares_memory(tables.machine.weights, tables.weights.numpy())


def test_without_numba_torch_does_it_all():
    """The same codes and values, in a process that cannot import it."""
    script = """
import sys
sys.modules["numba"] = None
import torch
from vqkv import presets
from vqkv.kernels import cpu, fused, reference
assert fused.jit.numba is None
x = torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(0))
for preset in (presets.quanto(4), presets.vqllm(2, 16), presets.higgs(2)):
    codec = preset.key_codec(64).fit(x)
    assert (codec.decode(codec.encode(x)) - x).square().mean() < x.square().mean()
books = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(1))
rows = x.reshape(-1, 8)
assert torch.equal(cpu.rvq_encode(rows, books), reference.rvq_encode(rows, books))
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_codebooks_become_rows_once_and_again_when_they_change():
    codebooks, codes = gaussian(2, 16, 8), torch.zeros(1, 1, 3, 1, dtype=torch.uint8)
    first = pieces._rows(codebooks.unsqueeze(0))
    assert pieces._rows(codebooks.unsqueeze(0)) is first
    assert pieces._rows(codebooks[:1].unsqueeze(0)).shape == (16, 8)
    codebooks.neg_()
    expected = codebooks[:, 0].sum(dim=0).expand(1, 1, 3, 8)
    assert torch.equal(pieces.decode(Coded(codes, codebooks.unsqueeze(0), 4, 1)), expected)
