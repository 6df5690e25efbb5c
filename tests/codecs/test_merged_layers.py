"""What pairs of layers keep when they share a direction."""

import pytest
import torch
from strategies import gaussian

from vqkv import calibrate, presets
from vqkv.codecs.layout import MergeHeads
from vqkv.codecs.merged_layers import MergedLayers
from vqkv.codecs.pipeline import Chain
from vqkv.errors import DataError


def merged(x, **settings):
    """x, two heads in each of three layers, read back."""
    codec = Chain([MergeHeads()], MergedLayers(3, **settings)).fit(x)
    return codec.decode(codec.encode(x)), codec.encode(x)


def by_layer(x):
    """(batch, 6, tokens, dim) -> (3, batch, tokens, 2 * dim)."""
    return x.unflatten(1, (3, 2)).permute(1, 0, 3, 2, 4).flatten(3)


def angle(x, y):
    return torch.cosine_similarity(x, y, dim=-1).clamp(-1, 1).acos()


def test_the_direction_lies_between_and_norms_are_each_layers_own():
    x = gaussian(2, 6, 40, 8)
    found = by_layer(merged(x, position=0.25, retained=0.0)[0])
    alone, first, second = by_layer(x)
    torch.testing.assert_close(found[0], alone, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[1:].norm(dim=-1), torch.stack([first, second]).norm(dim=-1), rtol=2e-3, atol=0)
    whole = angle(first, second)
    torch.testing.assert_close(angle(first, found[1]), 0.25 * whole, rtol=0, atol=2e-3)
    torch.testing.assert_close(angle(second, found[2]), 0.75 * whole, rtol=0, atol=2e-3)


def test_the_tokens_furthest_apart_stay_and_are_paid_for():
    x = gaussian(1, 6, 100, 8)
    found, payload = merged(x, retained=0.1)
    wide = angle(*by_layer(x)[1:])[0] > angle(*by_layer(x)[1:]).quantile(0.9)
    error = (by_layer(found) - by_layer(x)).abs().amax(-1)[:, 0]
    assert (error[:, wide] < 5e-3).all() and (error[1:, ~wide].amax(0) > 0.05).all()
    values = 100 * (16 + 16 + 2) + 10 * 16  # alone, shared, norms; exact
    assert payload.nbytes == 2 * values + 100


def test_opposite_and_equal_directions_stay_finite():
    x = gaussian(1, 6, 8, 8)
    x[:, 4:, :4], x[:, 4:, 4:] = -x[:, 2:4, :4], 2 * x[:, 2:4, 4:]
    x[:, :, 0] = 0
    found, _ = merged(x, retained=0.0)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:, :, 4:], x[:, :, 4:], rtol=2e-3, atol=1e-3)


def test_more_pairs_than_layers_are_refused(llama):
    tokens = torch.randint(100, (2, 24), generator=torch.Generator().manual_seed(0))
    with pytest.raises(DataError, match="merge fewer"):
        calibrate(llama, tokens, presets.minicache(9), progress=False)
