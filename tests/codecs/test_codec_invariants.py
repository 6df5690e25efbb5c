"""What every codec keeps: payloads cut and join, settings and tensors rebuild it, extremes are stored or named, and
little memory is held in addition to what is stored."""

import copy
import json

import pytest
import torch
from codec_zoo import HEAD_DIM, HEADS, KINDS, gaussian, same, unfitted_codecs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.autograd.profiler import profile

from vqkv import DataError, presets
from vqkv.cache.meter import tensor_bytes
from vqkv.codecs.payload import Payload
from vqkv.codecs.predictive import JointCodec, Prediction, Reconstructions, last_readers
from vqkv.codecs.predictor_kinds import Slice
from vqkv.codecs.stage import codec_from_config

MEANS = ("higgs key", "higgs value", "kvquant key", "rotated")
CODES = ("byte groups", "component groups", "transform coder", "trellis", "levels")
CODED = ("product+ans", "ans", "ans by stage")
WITHOUT_ZERO = (*MEANS, *CODES, *CODED)  # a mean is subtracted from it, or no code means it
EXACT_ZEROS = ("fp16", "contiguous", "strided", "random")  # a zero vector stores the scale 0


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=10)
@given(batch=st.integers(1, 3), blocks=st.integers(1, 4), cut=st.integers(0, 4), seed=st.integers(0, 1000))
@example(batch=3, blocks=4, cut=1, seed=4)  # where HQQ's powers were rounded by their place in the tensor
def test_payloads_commute_with_tokens_and_batch(codecs, kind, batch, blocks, cut, seed):
    codec, cut = codecs[kind], min(cut, blocks)
    rows = codec.block_tokens
    x = gaussian(batch, HEADS, blocks * rows, HEAD_DIM, seed=seed)
    x[:, :, :: blocks + 1] *= 5  # some blocks fit the codebooks, others do not
    payload = codec.encode(x)
    every = codec.decode(payload)
    assert every.shape == x.shape and payload.seq_len == blocks * rows
    parts = [payload.tokens(0, cut * rows), payload.tokens(cut * rows)]
    assert same(Payload.concat(parts), payload)
    if 0 < cut < blocks:
        assert same(Payload.concat([codec.encode(x[:, :, : cut * rows]), codec.encode(x[:, :, cut * rows :])]), payload)
    assert sum(part.nbytes for part in parts) == payload.nbytes
    assert torch.equal(codec.decode(payload.tokens(-rows)), every[:, :, -rows:])
    assert codec.decode(payload.tokens(0, 0)).shape == (batch, HEADS, 0, HEAD_DIM)
    index = torch.tensor([batch - 1, 0])
    assert torch.equal(codec.decode(payload.batch_select(index)), every[index])
    copied = parts[0].holding(payload.tensors)
    assert same(copied, payload) and torch.equal(codec.decode(copied), every)


@pytest.mark.parametrize("kind", KINDS)
def test_rebuilt_or_fitted_under_another_default_dtype_codecs_agree_bit_for_bit(codecs, kind):
    codec, fitted_again = codecs[kind], unfitted_codecs()[kind]
    train, x = gaussian(2, HEADS, 210, HEAD_DIM), gaussian(1, HEADS, 4 * codec.block_tokens, HEAD_DIM, seed=9)
    payload = codec.encode(x)
    torch.set_default_dtype(torch.float64)
    try:
        config = json.loads(json.dumps(codec.config()))
        rebuilt = codec_from_config(config, {name: tensor.clone() for name, tensor in codec.state_dict().items()})
        fitted_again.fit(train)
        for again in (rebuilt, fitted_again):
            assert same(again.encode(x), payload) and again.side_bytes == codec.side_bytes
            decoded = again.decode(payload)
            assert decoded.dtype == torch.float32 and torch.equal(decoded, codec.decode(payload))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_extremes_stay_finite_and_what_cannot_be_stored_is_named(codecs, kind):
    codec = codecs[kind]
    x = gaussian(1, HEADS, 2 * codec.block_tokens, HEAD_DIM, seed=1)
    spike = x.clamp(-3, 3)
    spike[0, 0, 0, 0] = 6e4
    for extreme in (x * 0, x * 0 + 3.3, x.clamp(-1, 1) * 6e4, x * 1e-6, x * 1e-30, x * 1e-42, spike):
        payload = codec.encode(extreme)
        decoded = codec.decode(payload)
        for dtype in (torch.float16, torch.bfloat16, torch.float64):  # rounded from float32
            other, largest = codec.decode(payload, dtype), 65504 if dtype == torch.float16 else torch.inf
            assert torch.equal(other, decoded.clamp(-largest, largest).to(dtype)) and other.isfinite().all()
        assert decoded.shape == x.shape
        if not extreme.any() and kind not in WITHOUT_ZERO:
            assert decoded.abs().max() <= (0 if kind in EXACT_ZEROS else 1e-6)
    beyond, broken = x.clone(), x.clone()
    beyond[0, 1, -1, 3], broken[0, 1, 0, 3] = -65600.0, float("nan")
    bad = {
        "the largest magnitude 65600 overflows fp16 .65504.: scale the values first": beyond,
        r"1 of \d+ values are NaN or infinite, the first .*= \(0, 1, 0, 3\)": broken,
        "at least one token": x[:0],
        "head_dim is 8, but this codec was made for 16": x[..., :8],
        "batch, num_kv_heads, seq_len, head_dim": x[0],
        "int64": x.long(),
    }
    for message, values in bad.items():
        with pytest.raises(DataError, match=message):
            codec.encode(values)
    beyond[0, 1, -1, 3] = -65504.0
    assert codec.decode(codec.encode(beyond)).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_neither_layout_nor_threads_matter_and_no_memory_is_shared(codecs, kind):
    codec = codecs[kind]
    x = gaussian(2, HEADS, 2 * codec.block_tokens, HEAD_DIM)
    values, payload = x.clone(), codec.encode(x)
    assert torch.equal(x, values)
    assert same(codec.encode(x.transpose(1, 2).contiguous().transpose(1, 2)), payload)
    assert same(codec.encode(x.double()), payload) and same(copy.deepcopy(codec).to("cpu").encode(x), payload)
    assert not codec.decode(codec.encode(x.clone().requires_grad_())).requires_grad
    with torch.inference_mode():
        assert same(codec.encode(x), payload)
    torch.set_num_threads(2)
    try:
        assert same(codec.encode(x), payload)
    finally:
        torch.set_num_threads(1)
    stored = {name: tensor.clone() for name, tensor in payload.tensors.items()}
    decoded = codec.decode(payload)
    expected = decoded.clone()
    decoded.fill_(7)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in payload.tensors.items())
    assert torch.equal(codec.decode(payload), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_back_while_learning_is_what_a_cache_gives_later(kind):
    codec = unfitted_codecs()[kind]
    x = gaussian(2, HEADS, 420, HEAD_DIM, seed=9)
    x = x[:, :, : x.shape[2] // codec.block_tokens * codec.block_tokens]
    for early in (codec.encode, codec.quantize_dequantize):
        with pytest.raises(RuntimeError, match="not fitted"):
            early(x)
    with pytest.raises(RuntimeError, match="learned nothing"):
        codec.finalize()
    for _ in range(codec.passes):
        codec.partial_fit(x).partial_fit(x * 2 + 1).end_pass()
    before = codec.quantize_dequantize(x)
    after = codec.finalize().finalize().quantize_dequantize(x)
    assert (
        before - after
    ).square().mean() < 1e-3 * x.square().mean()  # a few vectors are as near to one code as another
    assert torch.equal(after, codec.decode(codec.encode(x)))
    with pytest.raises(RuntimeError, match="frozen"):
        codec.fit(x)


def test_other_numbers_of_heads_are_refused_where_they_matter(codecs):
    x = gaussian(1, 2, 35, HEAD_DIM)
    for kind in ("kvquant key", "kvquant value", "higgs key", "ans", "transform coder", "steps token by token"):
        with pytest.raises(DataError, match="2 KV heads, but this codec was fitted on 3: fit again"):
            codecs[kind].encode(x[:, :, : codecs[kind].block_tokens])
    assert codecs["quanto key"].encode(x).nbytes  # nothing there depends on it


def test_fitting_leaves_out_an_incomplete_block_and_encoding_refuses_it():
    codec = presets.kivi(2, 5).key_codec().fit(gaussian(1, 2, 13, 8))
    with pytest.raises(DataError, match="no multiple of the codec's block of 5 tokens"):
        codec.encode(gaussian(1, 2, 13, 8))


def test_views_do_not_keep_their_base_alive():
    payload = Payload({"values": gaussian(1, 1, 100, 16)[:, :, :1]})
    assert payload.nbytes == 64 and payload.tokens(0, 0).nbytes == 0


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_the_arithmetic_of_decoding_can_be_traced_as_one_graph(bits):
    codec = presets.quanto(bits, 8).key_codec(HEAD_DIM).fit(gaussian(1, 2, 8, HEAD_DIM))
    payload = codec.encode(gaussian(1, 2, 8, HEAD_DIM))
    traced = torch.compile(codec._decode, backend="eager", fullgraph=True)  # around it the precision is asked for
    assert torch.equal(traced(payload), codec.decode(payload))


def components(heads: int) -> torch.Tensor:
    """Random channels of unequal spreads, as principal components have."""
    spreads = torch.logspace(0.5, -2.5, heads * HEAD_DIM).view(1, heads, 1, HEAD_DIM)
    return gaussian(1, heads, 1024, HEAD_DIM) * spreads


def peak(run):
    """What ``run`` returns, and the most bytes that torch held at a time for tensors made in it."""
    with profile(profile_memory=True) as profiler:
        out = run()
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return out, max(torch.tensor(changes).cumsum(0).tolist())


def test_tables_of_an_entropy_coder_are_kept_small():
    """Slots of all layers' tables, 32 KiB each, would outweigh the cache that they decode: below 8 KiB a table."""
    codec = presets.crossed("uniform", merged=False).key_codec(HEAD_DIM).fit(components(HEADS))
    codec.decode(codec.encode(components(HEADS)))
    assert tensor_bytes(codec.quantizer.code()) < 8192 * len(codec.quantizer.code().tables)


def test_layers_stored_together_are_read_one_after_the_other():
    """Never are all layers reconstructed at a time: at 4 bits, where all components are kept, these alone are."""
    layers = 10
    x = components(layers * HEADS)
    codec = presets.kvtc(4.0).key_codec(HEAD_DIM).fit(x)
    payload, decoded = codec.encode(x), codec.decode(codec.encode(x))
    own = [Prediction(Slice(layer * HEADS * HEAD_DIM, HEADS * HEAD_DIM), (("key", 0),)) for layer in range(1, layers)]
    readers = last_readers({("key", 1 + i): prediction for i, prediction in enumerate(own)})

    def read():
        reconstructions = Reconstructions(readers)
        first = JointCodec(codec, ("key", 0), heads=HEADS).decode(payload, reconstructions)
        yield first
        for prediction in own:
            yield prediction(reconstructions, first)

    error, most = peak(
        lambda: max((got - want).abs().max().item() for got, want in zip(read(), decoded.split(HEADS, 1), strict=True))
    )
    assert error < 1e-5
    assert most < 1.75 * decoded.nbytes
