"""Stages: scales at extreme magnitudes, outliers, groups, rotations at every head_dim, tiles, principal components."""

import copy
import itertools
import json
import math

import pytest
import torch
from codec_zoo import gaussian, same
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv import calibrate, presets
from vqkv.codecs.affine import Anchors
from vqkv.codecs.entropy_coded_scalar import EntropyCodedScalar, TrellisCodedScalar
from vqkv.codecs.grid import GaussianLevels
from vqkv.codecs.groups import ComponentGroups
from vqkv.codecs.layout import MergeHeads, TokenBlock
from vqkv.codecs.pca import PCA
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.scaling import ChannelScale, DualScale, MeanRemoval, VectorScale
from vqkv.codecs.stage import codec_from_config
from vqkv.codecs.transform import Grouping, Hadamard

SCALED = {
    "turboquant": presets.turboquant(3),
    "nsnquant": presets.nsnquant(block_tokens=4),
    "grid": presets.crossed("grid", 2, mean=False, rotation="hadamard"),
    "quanto": presets.quanto(4),
}
CODECS = {name: preset.key_codec(64).fit(gaussian(1, 2, 8, 64)) for name, preset in SCALED.items()}
MAX_1960 = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.0095, 5: 0.0025}  # mean squared error of 2^bits levels


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from([*SCALED]), exponent=st.floats(-45, 4), seed=st.integers(0, 99))
def test_small_vectors_keep_their_relative_error_or_become_zeros(name, exponent, seed):
    codec, unit = CODECS[name], gaussian(1, 2, 4, 64, seed=seed)
    x = unit * 10.0**exponent
    restored, expected = codec.quantize_dequantize(x), codec.quantize_dequantize(unit)
    error, at_unit = ((a - b).norm() for a, b in ((restored / 10.0**exponent, unit), (expected, unit)))
    assert error <= 1.5 * at_unit or restored.abs().max() <= 1.01 * x.abs().max()


@pytest.mark.parametrize("offset", [0, 10, 30])
def test_outliers_are_kept_exactly_and_do_not_widen_the_range_of_offset_values(offset):
    x = gaussian(1, 2, 64, 64) + offset
    x[0, 0, 3, 5], x[0, 1, 31, 63] = 400.0, -300.0
    codec = presets.kvquant(2).value_codec(64).fit(x)
    decoded = codec.decode(codec.encode(x))
    assert decoded[0, 0, 3, 5] == 400 and decoded[0, 1, 31, 63] == -300
    assert (decoded - x).square().mean() < 0.16
    assert torch.equal(codec.quantize_dequantize(torch.full_like(x, 9.0)), torch.full_like(x, 9.0))


def test_channel_scale_learns_mean_and_spread_of_a_stream_and_that_of_a_constant_vector_is_its_rms():
    x = gaussian(2, 3, 90, 8) * torch.arange(1.0, 9) + torch.arange(3.0).view(3, 1, 1)
    stage = ChannelScale()
    stage.build((3, 8))
    for part in (x[:, :, :7], x[:, :, 7:50], x[:, :, 50:]):
        stage.partial_fit(part)
    stage.finalize()
    torch.testing.assert_close(stage.mean.float(), x.mean(dim=(0, 2)), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(stage.scale.float(), x.std(dim=(0, 2), correction=0), rtol=2e-3, atol=2e-3)
    _, side = VectorScale().encode(torch.full((1, 1, 1, 16), 5.0))
    assert side["scale"].item() == 5.0  # divided by a deviation of zero it would be far from any code


def test_groups_are_the_channels_the_paper_names():
    channels = torch.arange(12.0).view(1, 1, 1, 12)
    expected = {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
        "strided": [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]],
    }
    orders = []
    for kind, seed in (("contiguous", 0), ("strided", 0), ("random", 0), ("random", 0), ("random", 1)):
        stage = Grouping(kind, 4, seed)
        assert stage.build((12,)) == (3, 4)
        groups = stage.encode(channels)[0][0, 0, 0].tolist()
        assert groups == expected.get(kind, groups)
        orders.append([*itertools.chain(*groups)])
    assert orders[2] == orders[3] != orders[4] and sorted(orders[2]) == list(range(12))


@pytest.mark.parametrize("size", [1, 2, 8, 64, 96, 100, 1024])
def test_a_rotation_is_orthonormal_and_does_not_depend_on_how_many_come(size):
    stage, x = Hadamard(whole=True), gaussian(1, 1, 70, size)
    stage.build((1, size))
    y, _ = stage.encode(x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(stage.decode(y, {}), x, rtol=0, atol=1e-5)
    assert all(torch.equal(stage.encode(x[:, :, :rows].clone())[0], y[:, :, :rows]) for rows in (1, 2, 3, 5, 65))
    if size > 1 and not size & (size - 1):  # one outlier is spread evenly
        spike = torch.zeros(1, 1, 1, size)
        spike[..., 1] = 1
        torch.testing.assert_close(stage.encode(spike)[0].abs(), torch.full((1, 1, 1, size), size**-0.5))


@pytest.mark.parametrize("bits", MAX_1960)
def test_levels_are_those_of_lloyd_and_max(bits):
    levels = GaussianLevels(bits).levels.double()
    x = torch.linspace(-8, 8, 1_000_001, dtype=torch.float64)
    nearest = levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]
    error = ((x - nearest).square() * torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)).sum() * 16 / 1_000_000
    assert error.item() == pytest.approx(MAX_1960[bits], rel=2e-3)


def test_both_axes_of_a_tile_end_with_nearly_the_same_spread():
    """Not exactly: means stay, and vary less along one axis than along the other."""
    x = (
        gaussian(2, 3, 4, 32 * 16).unflatten(-1, (32, 16))
        * (1 + torch.arange(32.0)).unsqueeze(-1)
        * torch.linspace(0.05, 1, 16)
    )
    y, side = DualScale(iterations=30).encode(x)
    assert x.std(dim=-2, correction=0).log().std() > 0.5
    even = y / y.std(dim=-1, correction=0, keepdim=True)  # which the ends of an affine quantizer stand for
    assert even.std(dim=-2, correction=0).log().std(dim=-1).max() < 0.02
    assert side["inner"].float().log().mean(-1).abs().max() < 1e-3
    assert torch.allclose(DualScale().decode(y, side), x, rtol=1e-5)


def test_tokens_differ_from_their_anchor_as_it_is_read_back():
    """So that the error of an anchor is not the error of its followers."""
    x = gaussian(1, 1, 1, 20 * 8).unflatten(-1, (20, 8))
    y, side = Anchors(10).encode(x)
    read = Anchors(10).decode(y.clone(), side)
    followers = [i for i in range(20) if i % 10]
    assert torch.allclose(read[..., followers, :], x[..., followers, :], atol=1e-6)
    assert 0 < (read[..., [0, 10], :] - x[..., [0, 10], :]).abs().max() < 0.02


def test_early_layers_get_finer_steps(llama):
    text = torch.randint(1, 400, (6, 96), generator=torch.Generator().manual_seed(0))
    compressor = calibrate(llama, text, presets.cachegen(3.0, group=4, block_tokens=16), progress=False)
    bits = [pair[0].quantizer.bits for pair in compressor.codecs]
    assert sum(bits) / len(bits) == pytest.approx(3.0)
    assert [a - b for a, b in itertools.pairwise(bits)] == pytest.approx([1, math.log2(1.5)])


def test_fp8_and_nvfp4_are_the_numbers_that_their_formats_name():
    x = torch.tensor([0.3, -0.3, 17.0, 500.0, -500.0, 0.0, 2.0**-9, 1e-4]).view(1, 1, 1, 8)
    read = presets.fp8().key_codec(8).fit(x).quantize_dequantize(x)
    assert read.flatten().tolist() == [0.3125, -0.3125, 16.0, 448.0, -448.0, 0.0, 2.0**-9, 0.0]
    x = torch.tensor([6.0, -3.2, 0.2, 0.3, 1.3, 2.4, 2.6, 5.1, *[0.0] * 24, *[600.0] * 16]).view(1, 1, 1, 48)
    read = presets.nvfp4().key_codec(48).fit(x).quantize_dequantize(x).flatten()
    assert read[:8].tolist() == [6.0, -3.0, 0.0, 0.5, 1.5, 2.0, 3.0, 6.0] and (read[8:32] == 0).all()
    assert (read[32:] == 6 * 96.0).all()  # 100 lies between 96 and 104, which is odd


HEADS, WIDTH = 3, 8
MERGED = pytest.mark.parametrize("before", [(), (MergeHeads(),)], ids=["per head", "merged"])


def mixed(tokens, seed=0, batch=1):
    """Channels that depend on each other, otherwise in every head; most of the variance in a few directions."""
    mixing = gaussian(HEADS, WIDTH, WIDTH, seed=100) * 2.0 ** -torch.arange(WIDTH)
    return gaussian(batch, HEADS, tokens, WIDTH, seed=seed) @ mixing.mT


def metric(seed=7):
    """(heads, channels, channels), symmetric: what errors cost."""
    root = gaussian(HEADS, WIDTH, WIDTH, seed=seed) * 3.0 ** -torch.arange(WIDTH)
    return root @ root.mT


def chain(*before, weighted=False, bits=2.0):
    codec = Chain([*before, PCA(weighted), TokenBlock(4)], EntropyCodedScalar(bits))
    if weighted:
        codec.weigh(metric())
    return codec


@MERGED
@pytest.mark.parametrize("weighted", [False, True])
def test_channels_are_uncorrelated_and_come_back(before, weighted):
    x = mixed(400)
    codec = chain(*before, weighted=weighted).fit(x)
    y = codec.vectors(x).flatten(2, 3)  # blocks of tokens
    moment = (y.mT @ y)[0] / y.shape[2]
    size = moment.diagonal(dim1=1, dim2=2).sqrt()
    correlations = moment / (size.unsqueeze(1) * size.unsqueeze(2))
    strong = (size > 1e-2 * size.amax(1, keepdim=True)).float()  # the matrix is rounded to fp16
    both = strong.unsqueeze(1) * strong.unsqueeze(2) * (1 - torch.eye(len(size[0])))
    assert both.sum() > 6 and (correlations.abs() * both).max() < 0.1
    assert (size[:, 0] > size[:, -1]).all()
    stage, rows = codec.stages[len(before)], x
    for earlier in before:
        rows, _ = earlier.encode(rows)
    assert (stage.decode(stage.encode(rows)[0], {}) - rows).abs().max() < 1e-4 * rows.abs().max()
    assert tuple(stage.matrix.shape) == ((1, 24, 24) if before else (HEADS, WIDTH, WIDTH))


def test_the_weighted_error_is_what_the_quantizer_sees_and_loaded_it_needs_no_metric():
    x = mixed(400)
    codec = chain(weighted=True).fit(x)
    restored = codec.decode(codec.encode(x))
    error = (restored - x)[0].double()
    cost = ((error @ metric().double()) * error).sum()
    quantized = (codec.vectors(restored) - codec.vectors(x)).double().square().sum()
    mean = torch.linalg.eigvalsh(metric().double()).mean()  # the scale is arbitrary; rare directions cost a little more
    assert 0.98 < quantized * mean / cost < 1.4
    loaded = codec_from_config(json.loads(json.dumps(codec.config())), dict(codec.state_dict()))
    assert same(loaded.encode(x), codec.encode(x))


def test_means_are_known_before_components():
    """Channels of a mean far from 0, which two batches differ in: what is stored is centred all the same."""
    x, codec = mixed(200) + 10.0, chain(MeanRemoval())
    x[:, :, 100:] += 5.0
    assert codec.passes == 3
    at_once = chain(MeanRemoval()).fit(x)
    for _ in range(codec.passes):
        codec.partial_fit(x[:, :, :100]).partial_fit(x[:, :, 100:]).end_pass()
    torch.testing.assert_close(codec.finalize().vectors(x), at_once.vectors(x), atol=1e-2, rtol=0)


def test_zeros_and_one_token_again_and_again_leave_an_orthonormal_matrix():
    for x in (mixed(40) * 0, mixed(4)[:, :, :1].expand(-1, -1, 8, -1)):
        codec = chain().fit(x)
        matrix = codec.stages[0].matrix.float()
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(WIDTH).expand_as(matrix), atol=2e-3, rtol=0)
        assert codec.decode(codec.encode(x)).isfinite().all()


def test_of_fewer_components_comes_the_value_whose_error_costs_least():
    """Not the shortest such value, which would change what costs much to save what costs nothing."""
    x = gaussian(1, 1, 512, 12) * 1.5 ** -torch.arange(12)  # what varies most costs least
    root = gaussian(1, 12, 12, seed=1) * 1.3 ** torch.arange(12).unsqueeze(1)
    costs = root @ root.mT
    stage = PCA(weighted=True, rank=5)
    stage.build((1, 12))
    stage.weigh(costs)
    stage.partial_fit(x)
    stage.settle()
    coded = stage.encode(x)[0]

    def cost(restored):
        error = (x - restored)[0, 0]
        return float((error @ costs * error).sum())

    values, vectors = torch.linalg.eigh(costs)
    scale = vectors @ values.sqrt().diag_embed() @ vectors.mT
    left_out = float(torch.linalg.svdvals((x[0] @ scale)[0])[5:].square().sum())  # Eckart and Young 1936
    assert cost(stage.decode(coded, {})) == pytest.approx(left_out, rel=0.01)
    assert cost(coded @ torch.linalg.pinv(stage.matrix.float())) > 1.2 * left_out


@pytest.mark.parametrize("quantizer", [ComponentGroups(2.0), EntropyCodedScalar(2.0), TrellisCodedScalar(2.0)])
@pytest.mark.parametrize("rank", [0, 32])
def test_bits_are_a_values_whatever_the_rank(quantizer, rank):
    x = gaussian(1, 1, 2048, 64) * 2.0 ** -torch.arange(0, 16, 0.25)
    codec = Chain([PCA(rank=rank), TokenBlock(64)], copy.deepcopy(quantizer)).fit(x)
    assert 8 * codec.encode(x).nbytes / x.numel() == pytest.approx(2, rel=0.12)
