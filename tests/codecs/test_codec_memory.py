"""Where codecs read and write: neither the values nor the payload are changed."""

import pytest
import torch
from codec_zoo import HEAD_DIM, HEADS, KINDS, gaussian

from vqkv import presets


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


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_the_arithmetic_of_decoding_can_be_traced_as_one_graph(bits):
    codec = presets.quanto(bits, 8).key_codec(HEAD_DIM).fit(gaussian(1, 2, 8, HEAD_DIM))
    payload = codec.encode(gaussian(1, 2, 8, HEAD_DIM))
    traced = torch.compile(codec._decode, backend="eager", fullgraph=True)  # around it the precision is asked for
    assert torch.equal(traced(payload), codec.decode(payload))
