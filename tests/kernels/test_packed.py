"""What kernels are told of stored tokens is what codecs decode: every preset that kernels can read."""

import pytest
import torch

from vqkv import kernels, presets
from vqkv.codecs.layout import TokenBlock
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.scaling import HeadScale, VectorScale
from vqkv.codecs.transform import Grouping
from vqkv.codecs.vector import ProductVQ
from vqkv.kernels import naive as reference
from vqkv.presets import Preset


def product(kind: str) -> Preset:
    def codec(head_dim):
        stages = [TokenBlock(32), HeadScale()] if kind == "blocks" else [VectorScale("rms")]
        sizes = {"num_quantizers": 3 if kind == "stages" else 1}
        return Chain([*stages, Grouping(group_size=8)], ProductVQ(2, 16, 4, **sizes), head_dim)

    return Preset("product", codec, codec)


READ = {
    "quanto 4": presets.quanto(4),
    "quanto 2": presets.quanto(2, group_size=32),
    "quanto 8": presets.quanto(8),
    "hqq 4": presets.hqq(4),
    "vqllm": presets.vqllm(3, 20, group_size=16),
    "vq 8": presets.vq(8, codebook_size=16),
    "rvq2": presets.rvq2(codebook_size=16),
    "product": product("blocks"),
    "product of tokens": product("tokens"),
    "product of stages": product("stages"),
}
NOT_READ = {
    "kivi keys": presets.kivi(2),
    "higgs": presets.higgs(2),
    "kvquant": presets.kvquant(2),
    "vqq": presets.vqq(0.3, codebook_size=16),
    "quanto 3": presets.quanto(3),
    "fp16": presets.fp16(),
    "ans": presets.entropy_coded(presets.quanto(4)),
}


def values(seq_len: int = 128, head_dim: int = 64) -> torch.Tensor:
    return torch.randn(2, 3, seq_len, head_dim, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("role", ["key_codec", "value_codec"])
def test_kernels_read_what_a_codec_stores(name, role):
    codec = getattr(READ[name], role)(64).fit(values())
    payload = codec.encode(values())
    view = codec.kernel_view(payload)
    for twin in (reference.decode, kernels.decode):
        torch.testing.assert_close(twin(view), codec.decode(payload), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kernels.decode(view.tokens(64, 128)), kernels.decode(view)[:, :, 64:128])


@pytest.mark.parametrize("name", NOT_READ)
def test_what_kernels_cannot_read_is_not_offered(name):
    codec = NOT_READ[name].key_codec(64)
    codec = codec if codec.ready else codec.fit(values())
    assert codec.kernel_view(codec.encode(values())) is None
