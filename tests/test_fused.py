"""Decoding into memory that is there: what the fused kernel and every codec write is what ``decode`` returns."""

import pytest
import torch
from codec_zoo import HEAD_DIM, HEADS, KINDS, fitted_codecs, gaussian
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv import FormatError, presets
from vqkv.codec import Chain, Grouping, MinMax, TokenBlock, Uniform
from vqkv.kernels.fused import affine_decode


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """With more than two threads torch's own passes are chosen."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def codecs():
    return fitted_codecs()


def into(codec, payload, like, dtype=torch.float32):
    """Decoded into the middle of a larger tensor of NaN, all of which must stay as it was."""
    batch, heads, tokens, head_dim = like.shape
    frame = torch.full((batch, heads + 2, tokens + 5, head_dim + 1), torch.nan, dtype=dtype)
    out = frame[:, 1:-1, 2:-3, :-1]
    assert codec.decode(payload, out=out) is out
    inside = torch.zeros_like(frame, dtype=torch.bool)
    inside[:, 1:-1, 2:-3, :-1] = True
    assert frame[~inside].isnan().all()
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_codec_decodes_into_any_strides(codecs, kind, dtype):
    codec = codecs[kind]
    x = gaussian(2, HEADS, 5 * codec.tokens_per_row, HEAD_DIM, seed=1)
    payload = codec.encode(x)
    assert torch.equal(into(codec, payload, x, dtype), codec.decode(payload, dtype))


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from([1, 2, 4, 8, 3]),
    groups=st.integers(1, 3),
    size=st.sampled_from([8, 16, 24, 40]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40)),
    by_channel=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_affine_kernel_gives_torchs_bits(bits, groups, size, shape, by_channel, seed):
    """Odd shapes, channels-first blocks and a batch: the same bits as unpacking, scaling and adding in turn."""
    batch, heads, rows = shape
    stage = TokenBlock(size, channels_first=True) if by_channel else Grouping(group_size=size)
    codec = Chain([stage, MinMax()], Uniform(bits))
    tokens, head_dim = (rows * size, groups) if by_channel else (rows, groups * size)
    x = gaussian(batch, heads, tokens, head_dim, seed=seed) * 7
    payload = codec.fit(x).encode(x)
    assert torch.equal(into(codec, payload, x), codec.decode(payload))


def test_the_kernel_is_what_runs(monkeypatch):
    """For each preset that the kernel is for, keys and values; not with many threads."""
    called, affine = [], affine_decode.affine
    monkeypatch.setattr(affine_decode, "affine", lambda *a: (called.append(a[0].shape), affine(*a))[1])
    x = gaussian(1, 2, 128, 64)
    for preset in (presets.quanto(4), presets.quanto(2), presets.hqq(4), presets.hqq(1), presets.kivi(2)):
        for codec in (preset.key_codec(64).fit(x), preset.value_codec(64).fit(x)):
            codec.decode(codec.encode(x), out=torch.empty_like(x))
    assert len(called) == 10
    torch.set_num_threads(affine_decode.THREADS + 1)
    codec.decode(codec.encode(x), out=torch.empty_like(x))
    assert len(called) == 10
    torch.set_num_threads(1)
    codec.decode(codec.encode(x), out=torch.empty_like(x, dtype=torch.float16))
    assert len(called) == 11  # in float32, then rounded


@pytest.mark.parametrize("name", ["codes", "low", "high"])
def test_the_kernel_never_reads_beyond_a_field(name):
    """A payload whose fields do not fit each other is refused, as it is without the kernel."""
    x = gaussian(1, 2, 6, 64)
    codec = presets.quanto(4, 16).key_codec(64).fit(x)
    payload = codec.encode(x)
    payload.fields[name] = payload.fields[name][..., :-1].clone()
    with pytest.raises((FormatError, RuntimeError)):
        codec.decode(payload, out=torch.empty_like(x))
