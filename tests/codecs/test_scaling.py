"""Scales at extreme magnitudes, outliers on offset values, rotations at every head_dim."""

import pytest
import torch
from codec_zoo import gaussian
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv import presets
from vqkv.codecs.transform import Hadamard

SCALED = {
    "turboquant": presets.turboquant(3),
    "nsnquant": presets.nsnquant(tile=4),
    "grid": presets.crossed("grid", 2, mean=False, rotation="hadamard"),
    "quanto": presets.quanto(4),
}
CODECS = {name: preset.key_codec(64).fit(gaussian(1, 2, 8, 64)) for name, preset in SCALED.items()}


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from([*SCALED]), exponent=st.floats(-45, 4), seed=st.integers(0, 99))
def test_small_vectors_keep_their_relative_error_or_become_zeros(name, exponent, seed):
    codec, unit = CODECS[name], gaussian(1, 2, 4, 64, seed=seed)
    x = unit * 10.0**exponent
    restored, expected = codec.quantize_dequantize(x), codec.quantize_dequantize(unit)
    error, at_unit = ((a - b).norm() for a, b in ((restored / 10.0**exponent, unit), (expected, unit)))
    assert error <= 1.5 * at_unit or restored.abs().max() <= 1.01 * x.abs().max()


@pytest.mark.parametrize("offset", [0, 10, 30])
def test_outliers_do_not_widen_the_range_of_offset_values(offset):
    x = gaussian(1, 2, 64, 64)
    codec = presets.kvquant(2).value_codec(64).fit(x + offset)
    assert (codec.quantize_dequantize(x + offset) - x - offset).square().mean() < 0.16
    assert torch.equal(codec.quantize_dequantize(torch.full_like(x, 9.0)), torch.full_like(x, 9.0))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_turboquant_stores_one_norm_a_head(head_dim):
    x = gaussian(1, 2, 40, head_dim)
    payload = presets.turboquant(3).key_codec(head_dim).fit(x).encode(x)
    assert 8 * payload.nbytes / x.numel() == 3 + 16 / head_dim


@pytest.mark.parametrize("size", [64, 96, 100, 1024])
def test_a_rotation_is_orthonormal_and_does_not_depend_on_how_many_come(size):
    stage, x = Hadamard(whole=True), gaussian(1, 1, 70, size)
    stage.build((1, size))
    y, _ = stage.encode(x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(stage.decode(y, {}), x, rtol=0, atol=1e-5)
    assert all(torch.equal(stage.encode(x[:, :, :rows].clone())[0], y[:, :, :rows]) for rows in (1, 2, 3, 5, 65))
