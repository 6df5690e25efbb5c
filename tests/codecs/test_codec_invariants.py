"""What every codec keeps: payloads cut and join, settings and tensors rebuild it, extremes stay finite."""

import json

import pytest
import torch
from codec_zoo import HEAD_DIM, HEADS, KINDS, gaussian, same, unfitted_codecs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vqkv import presets
from vqkv.codecs.payload import Payload
from vqkv.codecs.stage import codec_from_config, load_learned

MEANS = ("higgs key", "higgs value", "kvquant key", "rotated")  # subtracted from zeros
WITHOUT_ZERO = (
    *MEANS,
    "component groups",
    "transform coder",
    "trellis",
    "levels",
    "product+ans",
    "ans",
    "ans by stage",
)
EXACT_ZEROS = ("fp16", "contiguous", "strided", "random")  # a zero vector stores the scale 0


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=15)
@given(batch=st.integers(1, 3), blocks=st.integers(1, 4), cut=st.integers(0, 4), seed=st.integers(0, 1000))
@example(batch=3, blocks=4, cut=1, seed=4)  # where HQQ's powers were rounded by their place in the tensor
def test_payloads_commute_with_tokens_and_batch(codecs, kind, batch, blocks, cut, seed):
    codec, cut = codecs[kind], min(cut, blocks)
    rows = codec.tokens_per_row
    x = gaussian(batch, HEADS, blocks * rows, HEAD_DIM, seed=seed)
    x[:, :, :: blocks + 1] *= 5  # some blocks fit the codebooks, others do not
    payload = codec.encode(x)
    whole = codec.decode(payload)
    assert whole.shape == x.shape and payload.seq_len == blocks * rows
    parts = [payload.tokens(0, cut * rows), payload.tokens(cut * rows)]
    assert same(Payload.concat(parts), payload)
    if 0 < cut < blocks:
        assert same(Payload.concat([codec.encode(x[:, :, : cut * rows]), codec.encode(x[:, :, cut * rows :])]), payload)
    assert sum(part.nbytes for part in parts) == payload.nbytes
    assert torch.equal(codec.decode(payload.tokens(-rows)), whole[:, :, -rows:])
    assert codec.decode(payload.tokens(0, 0)).shape == (batch, HEADS, 0, HEAD_DIM)
    index = torch.tensor([batch - 1, 0])
    assert torch.equal(codec.decode(payload.batch_select(index)), whole[index])
    copied = parts[0].holding(payload.tensors)
    assert same(copied, payload) and torch.equal(codec.decode(copied), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_reloaded_codecs_agree_bit_for_bit(codecs, kind):
    codec = codecs[kind]
    x = gaussian(1, HEADS, 4 * codec.tokens_per_row, HEAD_DIM, seed=9)
    config = json.loads(json.dumps(codec.config()))
    again = codec_from_config(config, {name: tensor.clone() for name, tensor in codec.state_dict().items()})
    payload = codec.encode(x)
    assert same(again.encode(x), payload)
    assert torch.equal(again.decode(payload), codec.decode(payload))
    assert again.side_bytes == codec.side_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_small_and_extremes_finite(codecs, kind):
    codec = codecs[kind]
    for size in (0.0, 1e-30, 1e-6, 60000.0):
        x = gaussian(1, HEADS, codec.tokens_per_row, HEAD_DIM).clamp(-1, 1) * size
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            decoded = codec.decode(codec.encode(x), dtype=dtype)
            assert decoded.dtype == dtype and torch.isfinite(decoded).all()
        if size == 0 and kind not in WITHOUT_ZERO:  # a mean is subtracted from it, or no code means it
            assert decoded.abs().max() <= 1e-6
        if size == 0 and kind in EXACT_ZEROS:
            assert decoded.abs().max() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_back_while_learning_is_what_a_cache_gives_later_and_another_process_can_take_it_over(kind):
    codec, twin = (unfitted_codecs()[kind] for _ in range(2))
    x = gaussian(2, HEADS, 420, HEAD_DIM, seed=9)
    x = x[:, :, : x.shape[2] // codec.tokens_per_row * codec.tokens_per_row]
    if not codec.ready:
        with pytest.raises(RuntimeError, match="not fitted"):
            codec.quantize_dequantize(x)
        for _ in range(codec.passes):
            codec.partial_fit(x).partial_fit(x * 2 + 1).end_pass()
        before = codec.quantize_dequantize(x)
        twin.prepare(HEADS, HEAD_DIM)
        load_learned(twin, codec.state_dict())
        assert torch.equal(twin.quantize_dequantize(x), before)
        error = (before - codec.finalize().quantize_dequantize(x)).square().mean() / x.square().mean()
        assert error < 1e-3  # a few vectors are as near to one code as to another
    assert torch.equal(codec.quantize_dequantize(x), codec.decode(codec.encode(x)))


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
    if "scale" in payload.fields and payload.fields["scale"].is_floating_point():
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
