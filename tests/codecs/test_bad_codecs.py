"""Settings and sizes that do not fit each other: an error that says why, and what does."""

from functools import partial

import pytest
import torch
from codec_zoo import chain, gaussian
from preset_zoo import EVERY

from vqkv import DataError, UnknownNameError, presets
from vqkv.codecs.affine import AffineQuantizer, Anchors, HalfQuadratic
from vqkv.codecs.entropy import Entropy
from vqkv.codecs.entropy_coded_scalar import EntropyCodedScalar
from vqkv.codecs.exact import Fallback, Fp16
from vqkv.codecs.grid import GaussianLevels, Grid
from vqkv.codecs.groups import ByteGroups
from vqkv.codecs.layout import TokenBlock
from vqkv.codecs.pca import PCA
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.predictor_kinds import make_predictor
from vqkv.codecs.scaling import VectorScale
from vqkv.codecs.transform import Grouping
from vqkv.codecs.vector import ProductVQ, ResidualVQ

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
FALLBACK = partial(Fallback, Chain([], AffineQuantizer(4)))
BAD_SETTINGS = [
    *[(make, "seed", (-1, 2**63, "a", 1.0, None, True)) for make in (ResidualVQ, ProductVQ, Grouping)],
    (ResidualVQ, "decay", (1, -0.1, NAN, "x", None)), (ResidualVQ, "num_quantizers", (0, 65, True)),
    (EntropyCodedScalar, "bits", (0, 10.5, NAN, float("inf"), "2", True)), (HalfQuadratic, "bits", (0, 9, 2.0, "4")),
    (LINEAR, "strength", (NAN, "high", -1.0)), (partial(make_predictor, "mlp"), "learning_rate", (True,)),
    (FALLBACK, "block_size", (0, 8.0, True, 1 << 30)), (FALLBACK, "threshold", (-1, NAN, "x")),
]  # fmt: skip


@pytest.mark.parametrize(("make", "name", "values"), BAD_SETTINGS)
def test_settings_beyond_reason_are_named(make, name, values):
    for value in values:
        with pytest.raises(DataError, match=f"{name} .* must be "):
            make(**{name: value})
    assert make()


def rvq(**settings):
    return ResidualVQ(**{"num_quantizers": 3, "codebook_size": 32, "group_size": 8, **settings})


UNFIT = [
    (lambda: chain(head_dim=20), r"head_dim 20 is not divisible by group_size 8: use one of \[1, 2, 4, 5, 10, 20\]"),
    (lambda: chain(head_dim=None).fit(gaussian(1, 1, 200, 20)), "head_dim 20 is not divisible"),
    (lambda: Chain([VectorScale(), VectorScale("rms")], ResidualVQ()), r"store \['scale', 'scale'\]"),
    (lambda: Chain([], Grid(16), 7), "7 channels are not divisible by the 2 values of a code"),
    (lambda: Chain([], ProductVQ(2, 16, 4), 16), "add a Grouping"),
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
