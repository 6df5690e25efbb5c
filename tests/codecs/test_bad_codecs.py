"""Odd shapes, extreme values and bad settings of every codec: an answer, or an error saying why."""

import copy
from functools import cache, partial

import pytest
import torch
from codec_zoo import chain, gaussian, same
from preset_zoo import EVERY

from vqkv import DataError, UnknownNameError, presets
from vqkv.codecs.affine import AffineQuantizer
from vqkv.codecs.entropy import Entropy
from vqkv.codecs.entropy_coded_scalar import EntropyCodedScalar
from vqkv.codecs.exact import Fp16
from vqkv.codecs.fallback import Fallback
from vqkv.codecs.grid import Grid
from vqkv.codecs.layout import TokenBlock
from vqkv.codecs.nonuniform import NonUniform, SparseOutliers
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.product import ProductVQ
from vqkv.codecs.residual import ResidualVQ
from vqkv.codecs.scaling import HalfQuadratic, VectorScale
from vqkv.codecs.stage import codec_from_config
from vqkv.codecs.transform import Grouping


@cache
def fitted(name, role="key", head_dim=32):
    codec = getattr(EVERY[name], f"{role}_codec")(head_dim)
    return codec if codec.ready else codec.fit(gaussian(2, 2, 160, head_dim))


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("name", EVERY)
def test_extreme_values_stay_finite_and_layout_does_not_matter(name, role):
    codec = fitted(name, role)
    x = gaussian(1, 2, 2 * codec.tokens_per_row, 32, seed=1)
    spike = x.clamp(-3, 3)
    spike[0, 0, 0, 0] = 6e4
    for bad in (x * 0, x * 0 + 3.3, x.clamp(-1, 1) * 6e4, x * 1e-30, x * 1e-42, spike):
        decoded = codec.decode(codec.encode(bad), torch.float16)
        assert decoded.shape == x.shape and decoded.isfinite().all()
    payload = codec.encode(x)
    assert same(codec.encode(x.transpose(1, 2).contiguous().transpose(1, 2)), payload)
    assert same(codec.encode(x.double()), payload)
    assert not codec.decode(codec.encode(x.clone().requires_grad_())).requires_grad
    with torch.inference_mode():
        assert same(codec.encode(x), payload)
    torch.set_num_threads(2)
    try:
        assert same(codec.encode(x), payload)
    finally:
        torch.set_num_threads(1)
    assert same(copy.deepcopy(codec).to("cpu").encode(x), payload)
    x[0, 1, 0, 3] = float("nan")
    for bad, message in ((x, "NaN or infinite"), (x[:0], "at least one token"), (x[..., :16], "made for 32")):
        with pytest.raises(DataError, match=message):
            codec.encode(bad)


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("name", EVERY)
def test_magnitudes_beyond_fp16_are_refused_not_clipped(name, role):
    codec = fitted(name, role)
    x = gaussian(1, 2, 2 * codec.tokens_per_row, 32, seed=1)
    x[0, 1, -1, 3] = -65504.0
    assert codec.decode(codec.encode(x)).isfinite().all()
    x[0, 1, -1, 3] = -65600.0
    with pytest.raises(DataError, match="the largest magnitude 65600 overflows fp16 .65504.: scale the values first"):
        codec.encode(x)


@pytest.mark.parametrize("name", EVERY)
def test_the_default_dtype_changes_nothing(name):
    expected, x = fitted(name), gaussian(2, 2, 2 * fitted(name).tokens_per_row, 32, seed=1)
    train, payload = gaussian(2, 2, 160, 32), expected.encode(x)
    torch.set_default_dtype(torch.float64)
    try:
        codec = EVERY[name].key_codec(32)
        codec = codec if codec.ready else codec.fit(train)
        again = codec_from_config(codec.config(), codec.state_dict())
        assert same(codec.encode(x), payload) and same(again.encode(x), payload)
        decoded = again.decode(payload)
    finally:
        torch.set_default_dtype(torch.float32)
    assert decoded.dtype == torch.float32 and torch.equal(decoded, expected.decode(payload))


def test_random_starts_and_revived_codes_do_not_depend_on_the_default_dtype():
    found, batches = [], [gaussian(1, 1, 400, 8, seed=seed) for seed in range(3)]
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            codec = Chain([], ResidualVQ(2, 24, 8, init="random", revive=True), 8)
            for x in batches:
                codec.partial_fit(x)
            found.append(codec.finalize().quantizer.codebooks)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*found)


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


def test_no_preset_spends_more_on_scales_than_asked():
    for make in (presets.quanto, presets.hqq):
        with pytest.raises(DataError, match="not divisible by group_size 7"):
            make(group_size=7).key_codec(64)
    codec = presets.quanto(4).key_codec(20).fit(gaussian(1, 1, 8, 20))
    assert codec.encode(gaussian(1, 1, 8, 20)).nbytes == 8 * (10 + 4)  # all 20 channels share two ends


@pytest.mark.parametrize("head_dim", [1, 20])
@pytest.mark.parametrize("name", EVERY)
def test_any_head_dim_is_stored_or_named(name, head_dim):
    try:
        codec = EVERY[name].key_codec(head_dim)
    except DataError as error:
        assert "divisi" in str(error) or "even number" in str(error)
        return
    codec = codec if codec.ready else codec.fit(gaussian(2, 2, 160, head_dim))
    x = gaussian(1, 2, codec.tokens_per_row, head_dim, seed=1)
    assert codec.decode(codec.encode(x)).sub(x).square().sum() < x.square().sum()


@pytest.mark.parametrize("name", [name for name in EVERY if name != "fp16"])
def test_the_order_of_calls_is_checked(name):
    make = partial(EVERY[name].key_codec, 32)
    with pytest.raises(RuntimeError, match="not fitted"):
        make().encode(gaussian(1, 2, 16, 32))
    with pytest.raises(RuntimeError, match="learned nothing"):
        make().finalize()
    with pytest.raises(RuntimeError, match="frozen"):
        copy.deepcopy(fitted(name)).fit(gaussian(1, 2, 16, 32))
    codec = make()
    for seed in range(3):
        codec.partial_fit(gaussian(1, 2, 70, 32, seed=seed))
    with pytest.raises(DataError, match="NaN"):
        codec.partial_fit(gaussian(1, 2, 70, 32) * float("nan"))
    x = gaussian(1, 2, codec.tokens_per_row, 32)
    assert codec.finalize().finalize().decode(codec.encode(x)).isfinite().all()


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("name", EVERY)
def test_too_little_to_learn_from_is_named(name, tokens):
    codec = EVERY[name].key_codec(32)
    if codec.ready:
        return
    try:
        codec.fit(gaussian(1, 1, tokens, 32))
    except DataError as error:
        assert "distinct" in str(error) or "shorter than the codec's block" in str(error)


SEEDS, DECAYS = (-1, 2**63, "a", 1.0, None, True), (1, -0.1, float("nan"), "x", None)


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        *[(make, "seed", SEEDS) for make in (ResidualVQ, NonUniform, ProductVQ, Grouping)],
        (ResidualVQ, "decay", DECAYS),
        (ResidualVQ, "kmeans_iterations", (-1, 10**9, "x", 2.0)),
        (ResidualVQ, "num_quantizers", (0, 65, True)),
        (ResidualVQ, "beam", (0, 257)),
        (EntropyCodedScalar, "bits", (0, 0.001, 10.5, -1.0, float("nan"), float("inf"), "2", None, True)),
        (HalfQuadratic, "bits", (0, 9, 1000, 2.0, "4", True)),
        (partial(Fallback, Chain([], AffineQuantizer(4))), "block_size", (0, -8, 8.0, True, "8", 1 << 30)),
        (partial(Fallback, Chain([], AffineQuantizer(4))), "threshold", (-1, float("nan"), "x", None)),
    ],
)
def test_settings_beyond_reason_are_named(make, name, values):
    for value in values:
        with pytest.raises(DataError, match=name):
            make(**{name: value})
    assert make()


UNFIT = [
    (lambda: chain(head_dim=20), r"head_dim 20 is not divisible by group_size 8: use one of \[1, 2, 4, 5, 10, 20\]"),
    (lambda: chain(head_dim=None).fit(gaussian(1, 1, 200, 20)), "head_dim 20 is not divisible"),
    (lambda: chain().fit(gaussian(1, 1, 3, 16)), "20 codes need 20 distinct"),
    (lambda: Chain([VectorScale(), VectorScale("rms")], ResidualVQ()), r"store \['scale', 'scale'\]"),
    (lambda: Chain([], Grid(16), 7), "even number"),
    (lambda: Chain([], ProductVQ(2, 16, 4), 16), "add a Grouping"),
    (lambda: Chain([], ResidualVQ(), 128), "group_size 32: add a Grouping"),
    (lambda: Chain([], rvq(), 8).fit(gaussian(1, 1, 31, 8)), "stage 1 of 3.*32 codes need 32.*leaves only 31"),
    (lambda: Chain([], rvq(), 8).fit(gaussian(1, 1, 32, 8)), "stage 2 of 3"),  # every vector its own code
    (lambda: Chain([], rvq(), 8).fit(gaussian(1, 1, 500, 8) * 1e6), "a code overflows fp16"),
    (lambda: Fp16(16).encode(gaussian(1, 1, 1, 16) * 1e6), "overflows fp16"),
    (lambda: Entropy(Entropy(rvq())), "leaves storing its codes to others"),
    (lambda: Entropy(Fallback(Chain([], rvq(), 8))), "leaves storing its codes to others"),
    (lambda: Chain([], Entropy(rvq(group_size=16)), 16), r"rows of \(16,\) do not begin with an axis of tokens"),
    (lambda: AffineQuantizer(9), "bits 9 must be an integer from 1 to 8"),
    (lambda: ResidualVQ(codebook_size=0), "codebook_size 0 must be"),
    (lambda: TokenBlock(0), "tokens 0 must be"),
    (lambda: SparseOutliers(1.5), "share 1.5 must be"),
    (lambda: presets.vqq().key_codec(12), "divisible by blocks of 8"),
    (lambda: presets.vq().key_codec(12), "not divisible by group_size 8"),
    (lambda: presets.kvquant(block=4096).key_codec(64), "at most 16 bits"),
    (lambda: presets.vqq(float("nan")), "threshold of preset 'vqq' must be float, not nan"),
]
UNKNOWN = [
    (lambda: Grouping("stridded"), "strided"), (lambda: VectorScale("sdt"), "std"), (lambda: Grid(17), "16"),
    (lambda: ResidualVQ(init="kmean"), "kmeans"), (lambda: Entropy(rvq(), "positio"), "position"),
    (lambda: Entropy(rvq(), context="head"), "unknown context 'head'"),
]  # fmt: skip


def rvq(**settings):
    return ResidualVQ(**{"num_quantizers": 3, "codebook_size": 32, "group_size": 8, **settings})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [*((make, DataError, message) for make, message in UNFIT), *((make, UnknownNameError, m) for make, m in UNKNOWN)],
)
def test_what_does_not_fit_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
