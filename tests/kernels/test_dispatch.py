"""Which implementation runs, and codecs on Triton's kernels (in its interpreter) as on the CPU's."""

import pytest
import torch

from vqkv import DataError, UnknownNameError, kernels, presets
from vqkv.kernels import cpu, dispatch, naive

PRESETS = {
    "quanto 4": presets.quanto(4, 32),
    "quanto 3": presets.quanto(3, 16),
    "hqq 4": presets.hqq(4, 32),
    "vqllm 20 codes": presets.vqllm(2, 20, group_size=8),
    "vq 8": presets.vq(8, codebook_size=16, keyframe=8),
    "higgs 4": presets.higgs(4),
    "kivi 2": presets.kivi(2, 8),
    "vqq": presets.vqq(0.5, codebook_size=16, keyframe=8),
}


def values(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, 2, 24, 32, generator=torch.Generator().manual_seed(seed))


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


@pytest.mark.parametrize("name", PRESETS)
def test_codecs_store_and_read_alike_on_both(name):
    codec = PRESETS[name].key_codec(32).fit(values())
    expected = codec.encode(values(1))
    with kernels.using("triton"):
        payload = codec.encode(values(1))
        decoded = codec.decode(expected)
        own = codec.decode(payload)
    assert payload.nbytes == expected.nbytes and payload.fields.keys() == expected.fields.keys()
    torch.testing.assert_close(decoded, codec.decode(expected), rtol=1e-5, atol=1e-6)
    errors = [float((x - values(1)).square().mean()) for x in (own, codec.decode(expected))]
    assert abs(errors[0] - errors[1]) <= 1e-3 * errors[1]
    if "quanto" in name:
        assert all(torch.equal(payload.fields[field], expected.fields[field]) for field in payload.fields)
