"""Codebooks: k-means, moving averages from counts and sums, residual VQ's learning."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import gaussian

from vqkv.codecs.learning.kmeans import Ema, KMeans, distinct_rows
from vqkv.codecs.vector import ResidualVQ
from vqkv.errors import DataError


@pytest.mark.parametrize("seed", range(5))
def test_a_spread_start_finds_every_far_cluster(seed):
    centres = 100 * torch.arange(20.0).unsqueeze(1)
    x = (centres + gaussian(20, 50, seed=seed)).reshape(-1, 1)
    learned = KMeans(20, seed=seed, spread=True).fit(x)
    torch.testing.assert_close(learned.sort(dim=0).values, centres, atol=0.8, rtol=0)
    with pytest.raises(DataError, match="leaves only 3"):
        KMeans(4, spread=True).fit(gaussian(3, 4))


def test_empty_clusters_move_onto_the_worst_fit():
    learner = KMeans(3)
    learner.codebook = torch.tensor([[0.0], [1.0], [-500.0]])
    learner.step(torch.tensor([[0.0], [0.0], [1.0], [100.0]]))
    assert learner.codebook.tolist() == [[0.0], [50.5], [100.0]]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 1000))
def test_start_is_distinct_whatever_repeats(distinct, repeats, seed):
    x = gaussian(distinct, 3, seed=seed).repeat(repeats, 1)
    assert len(x[distinct_rows(x, distinct, seed)].unique(dim=0)) == distinct
    with pytest.raises(DataError, match=f"leaves only {distinct}: calibrate on more tokens"):
        distinct_rows(x, distinct + 1, seed)


def test_ema_is_the_moving_average_written_out(monkeypatch):
    monkeypatch.setattr("vqkv.codecs.learning.kmeans.EPS", 0.0)
    ema = Ema(torch.tensor([[[1.0], [5.0]]]), torch.tensor([[10.0, 10.0]]), decay=0.9)
    updated = ema.update(torch.tensor([[20.0, 0.0]]).double(), torch.tensor([[[60.0], [0.0]]]).double())
    expected = [[(0.9 * 10 + 0.1 * 60) / (0.9 * 10 + 0.1 * 20)], [5.0]]
    torch.testing.assert_close(updated, torch.tensor([expected]))


def residual_vq(x, **settings):
    quantizer = ResidualVQ(**{"num_quantizers": 3, "codebook_size": 32, "group_size": x.shape[-1], **settings})
    quantizer.build((1, *x.shape[3:]))
    quantizer.partial_fit(x)
    return quantizer


def test_revival_puts_dead_codes_to_use():
    x, dead = gaussian(1, 1, 4000, 8), {}
    for revive in (False, True):
        quantizer = residual_vq(x, decay=0.5, revive=revive)
        for _ in range(10):
            quantizer.partial_fit(x.abs() * 10)
        dead[revive] = int((quantizer.usage(x.abs() * 10) == 0).sum())
    assert dead[True] < dead[False]


def test_a_vocabulary_of_vectors_does_not_run_later_stages_dry():
    """As a first layer's keys before RoPE, which repeat with their tokens: other vectors gain by each stage."""
    words = gaussian(1, 1, 100, 8)
    x = words[:, :, torch.randint(100, (2000,), generator=torch.Generator().manual_seed(1))]
    quantizer = residual_vq(x, num_quantizers=6)
    assert quantizer.loss(x)[-1] < 1e-2
    others = quantizer.loss(gaussian(1, 1, 500, 8, seed=2))
    assert (others[1:] <= others[:-1] * 1.001).all() and others[-1] < 0.8 * others[0]


@pytest.mark.parametrize("beam", [1, 3])
def test_loss_and_usage_are_those_of_the_stored_codes(beam):
    x = gaussian(1, 2, 900, 8)
    quantizer = residual_vq(x, beam=beam)
    codes, side = quantizer.encode(x)
    error = (x - quantizer.decode(codes, side)).square().sum() / x.square().sum()
    torch.testing.assert_close(quantizer.loss(x)[-1].float(), error)
    counts = torch.stack([torch.bincount(stage, minlength=32) for stage in codes.view(-1, 3).T])
    assert torch.equal(quantizer.usage(x), counts)
