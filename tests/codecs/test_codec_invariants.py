"""What every codec keeps: payloads cut and join, settings and tensors rebuild it, extremes are stored or named, little
memory is held in addition. Settings and sizes that do not fit each other: an error that says why, and what does."""

import copy
import json
from functools import partial

import pytest
import torch
from codec_zoo import EVERY, HEAD_DIM, HEADS, KINDS, chain, gaussian, same, unfitted_codecs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.autograd.profiler import profile

from vqkv import DataError, UnknownNameError, presets
from vqkv.cache.meter import tensor_bytes
from vqkv.codecs.affine import AffineQuantizer, Anchors, HalfQuadratic
from vqkv.codecs.entropy import Entropy
from vqkv.codecs.entropy_coded_scalar import EntropyCodedScalar
from vqkv.codecs.exact import Fallback, Fp16
from vqkv.codecs.grid import GaussianLevels, Grid
from vqkv.codecs.groups import ByteGroups
from vqkv.codecs.layout import TokenBlock
from vqkv.codecs.payload import Payload
from vqkv.codecs.pca import PCA
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.predictive import JointCodec, Prediction, Reconstructions, last_readers
from vqkv.codecs.predictor_kinds import Slice, make_predictor
from vqkv.codecs.scaling import VectorScale
from vqkv.codecs.stage import codec_from_config
from vqkv.codecs.transform import Grouping
from vqkv.codecs.vector import ResidualVQ

MEANS = ("higgs key", "higgs value", "kvquant key", "rotated")
CODES = ("byte groups", "component groups", "transform coder", "trellis", "levels")
CODED = ("product+ans", "ans", "ans by stage")
WITHOUT_ZERO = (*MEANS, *CODES, *CODED)  # a mean is subtracted from it, or no code means it
EXACT_ZEROS = ("fp16", "contiguous", "strided", "random")  # a zero vector stores the scale 0


@pytest.fixture(scope="module")
def codec(codecs, request):
    """One of them: hypothesis writes out what a test gets, at an ``example``."""
    return codecs[request.param]


@pytest.mark.parametrize("codec", KINDS, indirect=True)
@settings(deadline=None, max_examples=10)
@given(batch=st.integers(1, 3), blocks=st.integers(1, 4), cut=st.integers(0, 4), seed=st.integers(0, 1000))
@example(batch=3, blocks=4, cut=1, seed=4)  # where HQQ's powers were rounded by their place in the tensor
def test_payloads_commute_with_tokens_and_batch(codec, batch, blocks, cut, seed):
    rows, cut = codec.block_tokens, min(cut, blocks)
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

    wanted = decoded.split(HEADS, 1)
    error, most = peak(lambda: max((a - b).abs().max().item() for a, b in zip(read(), wanted, strict=True)))
    assert error < 1e-5 and most < 1.75 * decoded.nbytes


GROUPS = [  # channels, group_size -> the affine presets' groups, and HIGGS's
    *[(64, 64, 64, 64), (64, 128, 64, 64), (128, 64, 64, 64), (128, 1024, 128, 128), (256, 1024, 256, 256)],
    *[(96, 64, 48, 32), (80, 64, 40, 16), (20, 64, 20, 4), (40, 16, 10, 8), (5, 64, 5, 1), (12, 4, 4, 4)],
    *[(64, 7, None, 4), (67, 64, None, 1), (34, 16, None, 2), (1, 7, 1, 1), (768, 1000, 768, 256)],
]


@pytest.mark.parametrize(("channels", "group_size", "divisor", "power"), GROUPS)
def test_groups_shrink_to_what_divides_the_channels_or_say_what_does(channels, group_size, divisor, power):
    assert Grouping(group_size=group_size, shrink="power of two").build((2, channels)) == (2, channels // power, power)
    affine = Grouping(group_size=group_size, shrink="divisor")
    if divisor:
        assert affine.build((2, channels)) == (2, channels // divisor, divisor)
        return
    with pytest.raises(DataError, match=rf"head_dim {channels} is not divisible by group_size {group_size}: .*\[1, "):
        affine.build((2, channels))


@pytest.mark.parametrize(("head_dim", "tokens"), [(1, 160), (20, 160), (32, 1), (32, 16)])
@pytest.mark.parametrize("name", EVERY)
def test_any_head_dim_is_stored_or_named_and_so_is_too_little_to_learn_from(name, head_dim, tokens):
    try:
        codec = EVERY[name].key_codec(head_dim)
        codec = codec if codec.ready else codec.fit(gaussian(2, 2, tokens, head_dim))
    except DataError as error:
        assert any(part in str(error) for part in ("divisible", "even number", "distinct", "shorter than the codec's"))
        return
    x = gaussian(1, 2, codec.block_tokens, head_dim, seed=1)
    assert tokens < 160 or codec.decode(codec.encode(x)).sub(x).square().sum() < x.square().sum()


NAN, LINEAR = float("nan"), partial(make_predictor, "linear")


def rvq(**settings):
    return ResidualVQ(**{"num_quantizers": 3, "codebook_size": 32, "group_size": 8, **settings})


UNFIT = [
    *[(partial(ResidualVQ, seed=seed), "seed .* must be ") for seed in (-1, 2**63, "a", 1.0, None, True)],
    *[(partial(ResidualVQ, decay=decay), "decay .* must be ") for decay in (1, NAN, "x", None)],
    *[(partial(EntropyCodedScalar, bits), "bits .* must be ") for bits in (0, 10.5, NAN, float("inf"), "2")],
    (partial(HalfQuadratic, bits=2.0), "bits .* must be "),
    *[(partial(ResidualVQ, count), "num_quantizers .* must be ") for count in (0, 65, True)],
    *[(partial(LINEAR, strength=strength), "strength .* must be ") for strength in (NAN, "high", -1.0)],
    (partial(Fallback, Chain([], AffineQuantizer(4)), block_size=1 << 30), "block_size .* must be "),
    (lambda: chain(head_dim=20), r"head_dim 20 is not divisible by group_size 8: use one of \[1, 2, 4, 5, 10, 20\]"),
    (lambda: chain(head_dim=None).fit(gaussian(1, 1, 200, 20)), "head_dim 20 is not divisible"),
    (lambda: Chain([VectorScale(), VectorScale("rms")], ResidualVQ()), r"store \['scale', 'scale'\]"),
    (lambda: Chain([], ResidualVQ(), 128), "group_size 32: add a Grouping"),
    (lambda: ByteGroups(0.5).build((2, 12)), "0.5 bits of 12 components are no byte: use at least 0.666"),
    (lambda: Chain([PCA()], GaussianLevels()).fit(gaussian(1, 1, 7, 8)), "components of 8 channels from 7 tokens"),
    (lambda: Chain([PCA(weighted=True)], GaussianLevels()).fit(gaussian(1, 1, 9, 8)), "not told what errors cost"),
    (lambda: presets.kvquant(2, fisher=True).key_codec().fit(gaussian(1, 1, 99, 8)), "not told what errors cost"),
    (lambda: LINEAR(strength=0.0).fit(lambda: [(gaussian(20, 2) * torch.tensor([0, 1]), gaussian(20, 2))]), "singular"),
    (lambda: LINEAR().fit(lambda: [(gaussian(40, 4) * 1e-9, gaussian(40, 3) * 1e4)]), "beyond fp16"),
    (lambda: Chain([TokenBlock(16), Anchors(10)], GaussianLevels(2), 16), "put a TokenBlock first"),
    (lambda: Chain([], rvq(), 8).fit(gaussian(1, 1, 31, 8)), "stage 1 of 3.*32 codes need 32.*leaves only 31"),
    (lambda: Chain([], rvq(), 8).fit(gaussian(1, 1, 500, 8) * 1e6), "a code overflows fp16"),
    (lambda: Fp16(16).encode(gaussian(1, 1, 1, 16) * 1e6), "overflows fp16"),
    (lambda: Entropy(Entropy(rvq())), "leaves storing its codes to others"),
    (lambda: presets.entropy_coded(presets.fp16()).key_codec(), "fp16 has no codes"),
    (lambda: Chain([], Entropy(rvq(group_size=16)), 16), r"rows of \(16,\) do not begin with an axis of tokens"),
    (lambda: presets.vq().key_codec(12), "not divisible by group_size 8"),
    (lambda: presets.higgs().key_codec().fit(gaussian(1, 3, 9, 8)).encode(gaussian(1, 2, 1, 8)), "2 KV heads, .* on 3"),
    (lambda: Chain([], EntropyCodedScalar()).fit(gaussian(1, 3, 99, 8)).encode(gaussian(1, 2, 1, 8)), "2 KV .* on 3"),
    (lambda: presets.kivi(2, 5).key_codec().fit(x := gaussian(1, 1, 13, 8)).encode(x), "no multiple of .* 5 tokens"),
    (lambda: presets.kvquant(block_tokens=4096).key_codec(64), "at most 16 bits"),
    (lambda: presets.vqq(float("nan")), "threshold of preset 'vqq' must be float, not nan"),
]
UNKNOWN = [
    (lambda: Grouping("stridded"), "strided"), (lambda: VectorScale("sdt"), "std"), (lambda: Grid(17), "16"),
    (lambda: ResidualVQ(init="kmean"), "kmeans"), (lambda: Entropy(rvq(), "positio"), "unknown context 'positio'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [*((make, DataError, message) for make, message in UNFIT), *((make, UnknownNameError, m) for make, m in UNKNOWN)],
)
def test_what_does_not_fit_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
