"""Which implementation runs, and codecs on each: what they store and read is the same."""

import pytest
import torch

from vqkv import DataError, UnknownNameError, kernels, presets
from vqkv.codecs.layout import TokenBlock
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.scaling import HeadScale, VectorScale
from vqkv.codecs.transform import Grouping
from vqkv.codecs.vector import ProductVQ
from vqkv.kernels import cpu, dispatch, naive
from vqkv.presets import Preset


@pytest.mark.parametrize("operation", dispatch.OPERATIONS)
def test_every_operation_has_its_implementations_and_is_exported(operation):
    x = torch.zeros(1)
    assert kernels.which(operation, x) == "cpu"
    for name in dispatch.NAMES:
        with kernels.using(name):
            runs = "cpu" if name == "triton" and operation not in dispatch.TRITON else name
            assert kernels.which(operation, x) == runs
            assert callable(dispatch._find(operation, x))
    assert all(callable(getattr(module, operation)) for module in (kernels, cpu, naive))


def test_what_the_kernels_decline_goes_to_the_cpu_path():
    x, books = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.randn(1, 80, 4)
    packed = kernels.affine_encode(torch.randn(1, 2, 5, 64), 4, 32)
    query, partial = torch.randn(1, 2, 1, 64), kernels.Rope(torch.ones(8))
    with kernels.using("triton"):
        cases = (x, books), (x, books, 2), (x, books.repeat(1, 1, 65))
        served = [kernels.which("rvq_encode", *case[:1], *case) for case in cases]
        assert served == ["triton", "cpu", "cpu"]
        assert torch.equal(kernels.rvq_encode(x, books, beam=2), cpu.rvq_encode(x, books, 2))
        assert kernels.which("decode_attention", query, query, packed, packed) == "triton"
        assert kernels.which("decode_attention", query, query, packed, packed, partial) == "cpu"
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


def values(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [*READ, *NOT_READ])
def test_codecs_store_and_read_alike_on_every_twin(name):
    codec, x = (READ | NOT_READ)[name].key_codec(32).fit(values()), values(1)
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
