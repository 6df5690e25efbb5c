"""Residual VQ: learning, and what it says about itself."""

import pytest
import torch
from strategies import gaussian

from vqkv.codecs.residual import ResidualVQ


def fitted(x, **settings):
    quantizer = ResidualVQ(**{"num_quantizers": 3, "codebook_size": 32, "group_size": x.shape[-1], **settings})
    quantizer.build((1, *x.shape[3:]))
    quantizer.partial_fit(x)
    return quantizer


def test_revival_puts_dead_codes_to_use():
    x = gaussian(1, 1, 4000, 8)
    dead = {}
    for revive in (False, True):
        quantizer = fitted(x, decay=0.5, revive=revive)
        for _ in range(10):
            quantizer.partial_fit(x.abs() * 10)
        dead[revive] = int((quantizer.usage(x.abs() * 10) == 0).sum())
    assert dead[True] < dead[False]


def test_learning_is_deterministic():
    x = gaussian(1, 1, 2000, 8)
    runs = [fitted(x, seed=s) for s in (0, 0, 1)]
    for quantizer in runs:
        quantizer.partial_fit(x)
    assert torch.equal(runs[0].codebooks, runs[1].codebooks) and not torch.equal(runs[0].codebooks, runs[2].codebooks)


def test_a_vocabulary_of_vectors_does_not_run_later_stages_dry():
    """As a first layer's keys before RoPE, which repeat with their tokens: unseen vectors gain by each stage."""
    words = gaussian(1, 1, 100, 8)
    x = words[:, :, torch.randint(100, (2000,), generator=torch.Generator().manual_seed(1))]
    quantizer = fitted(x, num_quantizers=6)
    assert quantizer.loss(x)[-1] < 1e-2
    unseen = quantizer.loss(gaussian(1, 1, 500, 8, seed=2))
    assert (unseen[1:] <= unseen[:-1] * 1.001).all() and unseen[-1] < 0.8 * unseen[0]


@pytest.mark.parametrize("beam", [1, 3])
def test_loss_and_usage_are_those_of_the_stored_codes(beam):
    x = gaussian(1, 2, 900, 8)
    quantizer = fitted(x, beam=beam)
    codes, side = quantizer.encode(x)
    error = (x - quantizer.decode(codes, side)).square().sum() / x.square().sum()
    torch.testing.assert_close(quantizer.loss(x)[-1].float(), error)
    counts = torch.stack([torch.bincount(stage, minlength=32) for stage in codes.view(-1, 3).T])
    assert torch.equal(quantizer.usage(x), counts)
