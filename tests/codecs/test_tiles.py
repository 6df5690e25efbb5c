"""Tiles, anchors, fixed levels of the systems that came after the four sources."""

import itertools
import math

import pytest
import torch
from strategies import gaussian

from vqkv import DataError, calibrate, presets
from vqkv.codecs.layout import TokenBlock
from vqkv.codecs.nonuniform import GaussianLevels
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.tiles import Anchors, DualScale, TileMean

MAX_1960 = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.0095, 5: 0.0025}  # mean squared error of 2^bits levels


@pytest.mark.parametrize("bits", MAX_1960)
def test_levels_are_those_of_lloyd_and_max(bits):
    levels = GaussianLevels(bits).levels.double()
    x = torch.linspace(-8, 8, 1_000_001, dtype=torch.float64)
    nearest = levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]
    error = ((x - nearest).square() * torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)).sum() * 16 / 1_000_000
    assert error.item() == pytest.approx(MAX_1960[bits], rel=2e-3)


def test_both_axes_of_a_tile_end_with_nearly_the_same_spread():
    """Not exactly: means stay, and vary less along one axis than along the other."""
    x = gaussian(2, 3, 4, 32 * 16).unflatten(-1, (32, 16)) * (1 + torch.arange(32.0)).unsqueeze(-1) * torch.rand(16)
    y, side = DualScale(iterations=30).encode(x)
    assert x.std(dim=-2, correction=0).log().std() > 0.5
    even = y / y.std(dim=-1, correction=0, keepdim=True)  # which the ends of an affine quantizer stand for
    assert even.std(dim=-2, correction=0).log().std(dim=-1).max() < 0.02
    assert side["inner"].float().log().mean(-1).abs().max() < 1e-3
    assert torch.allclose(DualScale().decode(y, side), x, rtol=1e-5)


def test_what_is_no_tile_is_named():
    for stages in ([DualScale()], [Anchors()], [TokenBlock(16), Anchors(10)]):
        with pytest.raises(DataError, match="put a TokenBlock first"):
            Chain(stages, GaussianLevels(2), 16)


def test_a_constant_tile_comes_back():
    x = torch.full((1, 1, 2, 8, 4), 3.0)
    for stage in (DualScale(), TileMean(), Anchors(4)):
        y, side = stage.encode(x)
        assert torch.allclose(stage.decode(y, side), x, rtol=1e-2), stage


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
    compressor = calibrate(llama, text, presets.cachegen(3.0, group=4, block=16), progress=False)
    bits = [pair[0].quantizer.bits for pair in compressor.codecs]
    assert sum(bits) / len(bits) == pytest.approx(3.0)
    assert [a - b for a, b in itertools.pairwise(bits)] == pytest.approx([1, math.log2(1.5)])


def test_fp8_and_nvfp4_are_the_numbers_that_their_formats_name():
    x = torch.tensor([0.3, -0.3, 17.0, 500.0, -500.0, 0.0, 2.0**-9, 1e-4]).view(1, 1, 1, 8)
    read = presets.fp8().key_codec(8).fit(x).quantize_dequantize(x)
    assert read.flatten().tolist() == [0.3125, -0.3125, 16.0, 448.0, -448.0, 0.0, 2.0**-9, 0.0]
    x = torch.tensor([6.0, -3.2, 0.2, 0.3, 1.3, 2.4, 2.6, 5.1, *[0.0] * 8, *[0.0] * 16, *[600.0] * 16]).view(
        1, 1, 1, 48
    )
    read = presets.nvfp4().key_codec(48).fit(x).quantize_dequantize(x).flatten()
    assert read[:8].tolist() == [6.0, -3.0, 0.0, 0.5, 1.5, 2.0, 3.0, 6.0] and (read[8:32] == 0).all()
    assert (read[32:] == 6 * 96.0).all()  # 100 lies between 96 and 104, which is odd
