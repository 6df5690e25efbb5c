"""Where codecs read and write: any strides, nothing around them, neither the values nor the payload changed."""

import pytest
import torch
from codec_zoo import HEAD_DIM, HEADS, KINDS, gaussian
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv import presets
from vqkv.codecs import AffineQuantizer, Chain, Grouping, Payload, TokenBlock
from vqkv.errors import DataError, FormatError


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
def test_every_codec_decodes_into_any_strides_and_types(codecs, kind):
    codec = codecs[kind]
    x = gaussian(2, HEADS, 5 * codec.tokens_per_row, HEAD_DIM, seed=1)
    payload = codec.encode(x)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(into(codec, payload, x, dtype), codec.decode(payload, dtype))


@settings(deadline=None, max_examples=40)
@given(
    bits=st.sampled_from([1, 2, 4, 8, 3]),
    groups=st.integers(1, 3),
    size=st.sampled_from([8, 24]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40)),
    by_channel=st.booleans(),
)
def test_affine_codecs_decode_into_any_strides(bits, groups, size, shape, by_channel):
    """Odd shapes, channels-first blocks and a batch."""
    batch, heads, rows = shape
    stage = TokenBlock(size, channels_first=True) if by_channel else Grouping(group_size=size)
    codec = Chain([stage], AffineQuantizer(bits))
    tokens, head_dim = (rows * size, groups) if by_channel else (rows, groups * size)
    x = gaussian(batch, heads, tokens, head_dim) * 7
    payload = codec.fit(x).encode(x)
    assert torch.equal(into(codec, payload, x), codec.decode(payload))


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_payload_stay_as_they_are(codecs, kind):
    """What is decoded shares no memory with the payload."""
    codec = codecs[kind]
    x = gaussian(2, HEADS, 2 * codec.tokens_per_row, HEAD_DIM)
    values = x.clone()
    payload = codec.encode(x)
    assert torch.equal(x, values)
    before = {name: tensor.clone() for name, tensor in payload.tensors.items()}
    first = codec.decode(payload)
    expected = first.clone()
    first.fill_(7)
    assert all(torch.equal(tensor, before[name]) for name, tensor in payload.tensors.items())
    assert torch.equal(codec.decode(payload), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_other_types_are_rounded_from_float32(codecs, kind):
    codec = codecs[kind]
    payload = codec.encode(gaussian(1, HEADS, codec.tokens_per_row, HEAD_DIM))
    if "scale" in payload.fields:
        payload.fields["scale"].fill_(60000.0)  # times a code beyond 1.1: more than fp16 holds
    exact = codec.decode(payload)
    assert kind != "contiguous" or exact.abs().max() > 65504
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        expected = exact.clamp(-65504, 65504) if dtype == torch.float16 else exact
        assert torch.equal(codec.decode(payload, dtype), expected.to(dtype))


@settings(deadline=None, max_examples=30)
@given(place=st.integers(0, 2 * 2 * 5 * 33 - 1), value=st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_one_bad_value_anywhere_is_found(place, value):
    x = gaussian(2, 2, 5, 33)
    x.view(-1)[place] = value
    with pytest.raises(DataError, match="1 of 660 values are NaN or infinite"):
        presets.quanto(4).key_codec(33).fit(gaussian(1, 1, 1, 33)).encode(x)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_the_arithmetic_of_decoding_can_be_traced_as_one_graph(bits):
    codec = presets.quanto(bits, 8).key_codec(HEAD_DIM).fit(gaussian(1, 2, 8, HEAD_DIM))
    payload = codec.encode(gaussian(1, 2, 8, HEAD_DIM))
    traced = torch.compile(codec._decode, backend="eager", fullgraph=True)  # around it the precision is asked for
    assert torch.equal(traced(payload), codec.decode(payload))


@pytest.mark.parametrize("preset", [presets.quanto(4, 8), presets.quanto(3, 8), presets.higgs(2), presets.higgs(3)])
def test_rows_of_the_wrong_size_or_type_are_refused(preset):
    codec = preset.key_codec(HEAD_DIM).fit(gaussian(1, 2, 8, HEAD_DIM))
    payload = codec.encode(gaussian(1, 2, 8, HEAD_DIM))
    for broken in (payload.fields["codes"][..., :-1], payload.fields["codes"].to(torch.int16)):
        with pytest.raises(FormatError, match="bytes, got"):
            codec.decode(Payload(payload.fields | {"codes": broken}))
    for name in payload.fields.keys() - {"codes"}:
        with pytest.raises((FormatError, RuntimeError)):
            short = payload.fields[name][..., :-1].clone()
            codec.decode(Payload(payload.fields | {name: short}), out=torch.empty(1, 2, 8, HEAD_DIM))
