"""Which implementation runs."""

import pytest
import torch

from vqkv import DataError, UnknownNameError, kernels
from vqkv.kernels import cpu, dispatch, naive


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
