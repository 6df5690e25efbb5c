"""Which implementation runs, and codecs on each: what they store and read is the same. A CPU's loops against naive
ones: affine codes, packing, threads; attention to packed tokens."""

import multiprocessing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import gaussian
from views import FORMATS, affine, as_decoded, made, mapped, rope
from views import gaussian as on_device

from vqkv import DataError, UnknownNameError, kernels, presets
from vqkv.codecs.layout import TokenBlock
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.scaling import HeadScale, VectorScale
from vqkv.codecs.transform import Grouping
from vqkv.codecs.vector import ProductVQ
from vqkv.kernels import Coded, Rope, cpu, dispatch, machine, naive, pack_codes, unpack_codes
from vqkv.kernels.attention import affine as products
from vqkv.kernels.attention import grouped
from vqkv.kernels.precision import full_precision
from vqkv.kernels.rvq import loops
from vqkv.presets import Preset


@pytest.mark.parametrize("operation", dispatch.OPERATIONS)
def test_every_operation_has_its_implementations(operation):
    door, x = getattr(kernels, operation), torch.zeros(1)
    assert kernels.which(operation, x) == "cpu" and door.__module__ == dispatch.__name__  # for pickle
    for name in dispatch.NAMES:
        with kernels.using(name):
            runs = "cpu" if name == "triton" and operation not in dispatch.TRITON else name
            assert kernels.which(operation, x) == runs and hasattr(dispatch._module(operation, runs), operation)


def test_what_the_kernels_decline_goes_to_the_cpu_path():
    x, books = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.randn(1, 80, 4)
    packed = kernels.affine_encode(torch.randn(1, 2, 5, 64), 4, 32)
    query, partial = torch.randn(1, 2, 1, 64), kernels.Rope(torch.ones(8))
    with kernels.using("triton"):
        cases = (x, books), (x, books, 2), (x, books.repeat(1, 1, 65))
        served = [kernels.which("rvq_encode", *case[:1], *case) for case in cases]
        assert served == ["triton", "cpu", "cpu"]
        assert torch.equal(kernels.rvq_encode(x=x, codebooks=books, beam=2), cpu.rvq_encode(x, books, 2))
        assert kernels.which("decode_attention", query, query, packed, packed, 1.0) == "triton"
        assert kernels.which("decode_attention", query, query, packed, packed, 1.0, partial) == "cpu"
        out, _ = kernels.decode_attention(query, packed, packed, 0.1, partial)
    torch.testing.assert_close(out, naive.decode_attention(query, packed, packed, 0.1, partial)[0])


def test_unknown_names_and_triton_without_a_gpu_and_its_interpreter_are_refused(monkeypatch):
    with pytest.raises(UnknownNameError, match="naive"), kernels.using("cuda"):
        pass
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if not torch.cuda.is_available():
        with pytest.raises(DataError, match="with a GPU"), kernels.using("triton"):
            pass


def product(*stages, num_quantizers: int = 1) -> Preset:
    def codec(head_dim):
        quantizer = ProductVQ(2, 16, 4, num_quantizers=num_quantizers)
        return Chain([*stages, Grouping(group_size=8)], quantizer, head_dim)

    return Preset("product", codec, codec)


READ = {
    **{f"quanto {bits}": presets.quanto(bits, group_size=32) for bits in (2, 4, 8)},
    "hqq 4": presets.hqq(4, 32),
    "vqllm": presets.vqllm(3, 20, group_size=8),
    "vq 8": presets.vq(8, codebook_size=16, block_tokens=8),
    "rvq2": presets.rvq2(codebook_size=16),
    "product": product(TokenBlock(32), HeadScale()),
    "product of tokens": product(VectorScale("rms")),
    "product of stages": product(VectorScale("rms"), num_quantizers=3),
}
NOT_READ = {
    "quanto 3": presets.quanto(3, 16),
    "kivi keys": presets.kivi(2, 8),
    "higgs": presets.higgs(4),
    "kvquant": presets.kvquant(2),
    "vqq": presets.vqq(0.5, codebook_size=16, block_tokens=8),
    "ans": presets.entropy_coded(presets.quanto(4), block_tokens=8),
}


@pytest.mark.parametrize("name", [*READ, *NOT_READ])
def test_codecs_store_and_read_alike_on_every_twin(name):
    codec, x = (READ | NOT_READ)[name].key_codec(32).fit(gaussian(1, 2, 64, 32)), gaussian(1, 2, 64, 32, seed=1)
    x = x[:, :, :8] if name == "ans" else x  # Triton's interpreter is slow
    expected = codec.encode(x)
    wanted, view = codec.decode(expected), codec.kernel_view(expected)
    assert (view is None) == (name in NOT_READ)
    for twin in ("naive", "triton"):
        with kernels.using(twin):
            payload = codec.encode(x)
            decoded, own = codec.decode(expected), codec.decode(payload)
        assert payload.nbytes == expected.nbytes and payload.fields.keys() == expected.fields.keys()
        torch.testing.assert_close(decoded, wanted, rtol=1e-5, atol=1e-6)
        errors = [float((restored - x).square().mean()) for restored in (own, wanted)]
        assert abs(errors[0] - errors[1]) <= 1e-3 * errors[1]
        if "quanto" in name:
            assert all(torch.equal(payload.fields[field], expected.fields[field]) for field in payload.fields)
    if view is not None:
        torch.testing.assert_close(kernels.decode(view.tokens(32, 64)), wanted[:, :, 32:])


GROUP_SIZES = st.sampled_from([1, 5, 8, 16, 64])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bits_of(x):
    """The memory of a tensor, so that 0 and -0 differ."""
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dim", [4, 32])
def test_every_thread_does_its_share(monkeypatch, dim):
    monkeypatch.setattr(machine, "WORTH", 1)
    x, codebooks = gaussian(1111, dim), gaussian(2, 100, dim, seed=1)
    codebooks[:, 50:] = codebooks[:, :50].clone()  # ties: all rows are doubtful
    expected, wanted = naive.rvq_encode(x, codebooks), naive.affine_encode(x.view(1, 11, 101, dim), 4, 4)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(cpu.rvq_encode(x, codebooks), expected)
        decoded = cpu.decode(Coded(pack_codes(expected, 7)[None, None], codebooks[None], 7, 1))
        assert torch.equal(decoded[0, 0], cpu.rvq_decode(expected, codebooks))
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


def test_full_precision_lasts_until_the_last_leaves():
    """Of two threads, say, the first that enters leaves first."""
    torch.set_float32_matmul_precision("high")
    try:
        first, second = (full_precision(torch.device("cpu")) for _ in range(2))
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert torch.get_float32_matmul_precision() == "highest"
        second.__exit__(None, None, None)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


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
    coded, expected = cpu.affine_encode(x, bits, size), naive.affine_encode(x, bits, size)
    for name in ("codes", "low", "high"):
        assert torch.equal(bits_of(getattr(coded, name)), bits_of(getattr(expected, name)))
    if x.shape[-1] * bits % 8 == 0:  # else the last byte hides how many channels there are
        assert torch.equal(bits_of(cpu.decode(coded)), bits_of(naive.decode(coded)))


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


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith("live")])
@pytest.mark.parametrize("piece", [1, 1 << 12])
def test_the_cpu_reads_piece_by_piece(name, piece, monkeypatch):
    monkeypatch.setattr("vqkv.kernels.attention.cpu.PIECE", piece)
    keys, values = made(name, tokens=130)
    rotation = Rope(rope(keys.shape[3]).inv_freq[: 4 if piece == 1 else None], 3)  # partial rotary, or all of it
    as_decoded(cpu, on_device(2, 6, 2, keys.shape[3]), keys, values, rotation, 1e-5)


SIZES = {"batch": st.integers(1, 2), "heads": st.integers(1, 3), "shared": st.integers(1, 5),
         "new_tokens": st.integers(1, 2), "tokens": st.integers(1, 70)}  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(**SIZES, head_dim=st.sampled_from([4, 6, 16]), rotation=st.sampled_from([None, (0, 16), (4, 16), (37, 8)]),
       sizes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5), offset=st.booleans())  # fmt: skip
def test_queries_rotated_by_block_on_a_cpu(batch, heads, shared, new_tokens, tokens, head_dim, rotation, sizes, offset):
    keys, values = (mapped([sizes] * heads, head_dim, offset, tokens, batch, seed) for seed in (1, 5))
    rotation = rotation and rope(head_dim, *rotation)
    assert grouped.serves(keys, values, rotation)
    as_decoded(cpu, on_device(batch, heads * shared, new_tokens, head_dim), keys, values, rotation, 2e-5)


@settings(max_examples=25, deadline=None)
@given(**SIZES, bits=st.tuples(*[st.sampled_from([2, 4, 8])] * 2), groups=st.tuples(*[st.sampled_from([1, 2, 3])] * 2),
       size=st.sampled_from([4, 12]))  # fmt: skip
def test_products_with_affine_codes_on_a_cpu(batch, heads, shared, new_tokens, tokens, bits, groups, size):
    keys, values = (affine(6 * size, b, 6 * size // g, tokens, heads, batch, b) for b, g in zip(bits, groups))
    assert products.serves(keys, values, None)
    as_decoded(cpu, on_device(batch, heads * shared, new_tokens, 6 * size), keys, values, None, 2e-5)


def test_an_outlying_code_does_not_send_every_row_to_float64():
    assert 0 < loops.reach(-8.0, 4.0, 1e-7, 3000.0, 16) + 8 < 1e-3
