"""Uniform steps with entropy-coded codes: the rate that was asked for, near Shannon's bound, lossless as streams."""

import math

import pytest
import torch
from codec_zoo import gaussian

from vqkv.codecs.entropy_coded_scalar import LARGEST_CODE, EntropyCodedScalar, TrellisCodedScalar
from vqkv.codecs.layout import TokenBlock
from vqkv.codecs.pipeline import Chain

CHANNELS = 16
WIDTHS = {  # standard deviations of the channels
    "alike": torch.ones(CHANNELS),
    "unlike": 2.0 ** torch.linspace(4, -4, CHANNELS),
    "one wide": torch.tensor([1000.0] + [1.0] * (CHANNELS - 1)),
}


def chain(bits=2.0, tokens=4):
    return Chain([TokenBlock(tokens)], EntropyCodedScalar(bits))


def drawn(widths, tokens, seed=0):
    return gaussian(1, 1, tokens, CHANNELS, seed=seed) * WIDTHS[widths]


@pytest.fixture(scope="module")
def fitted():
    """For 3 heads, whose channels vary by very different amounts."""
    return chain().fit(unlike_heads(2, 200))


def unlike_heads(batch, tokens, seed=0):
    return gaussian(batch, 3, tokens, CHANNELS, seed=seed) * torch.tensor([0.1, 1.0, 10.0]).view(3, 1, 1)


def bound(widths, bits):
    """Shannon's: the least mean squared error of independent Gaussian channels at ``bits`` a value, by reverse
    water-filling; every channel has the error ``level``, or its variance if that is less."""
    variances, low, high = WIDTHS[widths].double().square(), 1e-9, 1e9
    for _ in range(200):
        level = math.sqrt(low * high)
        rate = (variances / level).log2().clamp_min(0).mean().item() / 2
        low, high = (level, high) if rate > bits else (low, level)
    return variances.clamp_max(level).mean().item()


@pytest.mark.parametrize("bits", [1.0, 2.0, 3.0, 6.0, 10.0])
@pytest.mark.parametrize("widths", WIDTHS)
def test_the_rate_is_met_and_the_error_near_shannons_bound(widths, bits):
    """Within 2%, and 112 bits a row for its length and what is left in four states; at the bytes that the payload
    takes, less than 0.4 bit more than the bound."""
    train, test = drawn(widths, 4096), drawn(widths, 2048, seed=1)
    codec = chain(bits, tokens=256).fit(train)
    for x in (train, test):
        payload = codec.encode(x)
        error = (codec.decode(payload) - x).double().square().mean().item()
        rate = 8 * payload.nbytes / x.numel()
        assert 0.98 * bits <= rate <= 1.02 * bits + 112 / (256 * CHANNELS)
        assert 0 < math.log2(error / bound(widths, rate)) / 2 < 0.4


@pytest.mark.parametrize("widths", WIDTHS)
def test_no_value_is_cut_off(widths):
    x = drawn(widths, 4096)
    codec = chain(3.0, tokens=64).fit(x)
    largest = (codec.decode(codec.encode(x)) - x).abs().max().item()
    assert largest <= 0.61 * codec.quantizer.state_dict()["step"].item()


@pytest.mark.parametrize("value", [40.0, 6e4, -6e4])
def test_values_farther_out_than_any_seen_are_kept_at_some_bytes_more(fitted, value):
    x, step = unlike_heads(1, 4), fitted.quantizer.state_dict()["step"].item()
    usual = fitted.encode(x).nbytes
    x[0, :, 2, 5] = value
    payload = fitted.encode(x)
    assert torch.equal(fitted.decode(payload), fitted.quantize_dequantize(x))
    assert (fitted.decode(payload) - x).abs().max() <= 0.61 * step and payload.nbytes <= usual + 3 * 8


def test_what_no_code_reaches_is_cut_off(fitted):
    quantizer, rows = fitted.quantizer, torch.full((1, 3, 1, 4, CHANNELS), -1e30)
    largest = LARGEST_CODE * quantizer.state_dict()["step"]
    assert torch.equal(quantizer.decode(*quantizer.encode(rows)), -largest.expand(rows.shape))


def test_channels_of_less_than_a_step_cost_next_to_nothing():
    """Reverse water-filling: half of the channels take all of the bits."""
    x = gaussian(1, 1, 2048, CHANNELS) * torch.tensor([1.0, 0.01]).repeat_interleave(CHANNELS // 2)
    codec = chain(1.0, tokens=64).fit(x)
    decoded = codec.decode(codec.encode(x))
    assert (decoded[..., CHANNELS // 2 :] == 0).all()
    alone = chain(2.0, tokens=64).fit(x[..., : CHANNELS // 2])
    assert alone.quantizer.state_dict()["step"] == pytest.approx(codec.quantizer.state_dict()["step"].item(), rel=1e-3)


def test_one_token_is_enough_to_learn_from():
    x = gaussian(1, 2, 1, 8)
    codec = chain(2.0, 1).fit(x)
    assert codec.decode(codec.encode(x)).isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 1e-30, 6e4])
def test_zeros_and_extremes_can_be_learned_from(size):
    x = gaussian(1, 2, 64, 8).clamp(-1, 1) * size
    codec = chain().fit(x)
    decoded = codec.decode(codec.encode(x))
    assert (decoded - x).abs().max() <= 0.7 * max(size, torch.finfo(torch.float32).tiny) and decoded.isfinite().all()
    assert codec.decode(codec.encode(x * 0)).abs().max() == 0


def test_a_first_batch_of_zeros_decides_nothing():
    x = drawn("alike", 256)
    late = chain().partial_fit(x * 0).partial_fit(x * 60).finalize()
    assert torch.equal(late.quantizer.state_dict()["step"], chain().fit(x * 60).quantizer.state_dict()["step"])
    assert (late.decode(late.encode(x * 60)) - x * 60).abs().max() < 60


def test_every_batch_is_counted_but_the_first_decides_the_step():
    first, second = drawn("alike", 64), drawn("alike", 64, seed=1) * 3
    codec = chain().partial_fit(first)
    step = codec.quantizer.step.clone()
    both = codec.partial_fit(second).finalize()
    alone = chain().fit(first)
    assert both.quantizer.state_dict()["step"] == step == alone.quantizer.state_dict()["step"]
    assert both.encode(second).nbytes < alone.encode(second).nbytes


def test_rates_are_those_of_codecs_with_these_bits():
    """Each point's error is that of a codec fitted with its bits."""
    x = drawn("unlike", 1024)
    curve = chain().fit(x).rates(x)
    assert curve.dtype == torch.float64 and curve.shape[1] == 2
    usable = curve[(curve[:, 0] > 0.3) & (curve[:, 0] < 5)]
    assert len(usable) >= 6 and (usable.diff(dim=0)[:, 0] > 0).all() and (usable.diff(dim=0)[:, 1] < 0).all()
    for bits, expected in usable[::3].tolist():
        codec = chain().with_bits(bits).fit(x)
        error = (codec.decode(codec.encode(x)) - x).double().square().mean().item()
        assert error == pytest.approx(expected, rel=0.02)
    assert chain().fit(x * 0).rates(x * 0).isfinite().all()


def test_steps_tables_and_reaches_are_side_information(fitted):
    tables, reaches = (2 * len(fitted.state_dict()[f"quantizer.{name}"]) for name in ("frequencies", "reaches"))
    assert fitted.side_bytes == 4 + 2 * 3 * CHANNELS + reaches + tables


@pytest.mark.parametrize("bits, gained", [(1.0, 0.06), (2.0, 0.08), (4.0, 0.15)])
def test_a_trellis_is_nearer_to_shannons_bound(bits, gained):
    """On Gaussian channels that vary alike, by so many bits a value at least; the rate is met within 2%."""
    train, test = gaussian(1, 1, 2048, 128), gaussian(1, 1, 1024, 128, seed=1)
    left = []
    for quantizer in (EntropyCodedScalar(bits), TrellisCodedScalar(bits)):
        codec = Chain([TokenBlock(256)], quantizer).fit(train)
        payload = codec.encode(test)
        rate = 8 * payload.nbytes / test.numel()
        assert rate == pytest.approx(bits, rel=0.02)
        error = (codec.decode(payload) - test).double().square().mean().item()
        left.append(rate + math.log2(error) / 2)
    assert 0 < left[1] <= left[0] - gained
