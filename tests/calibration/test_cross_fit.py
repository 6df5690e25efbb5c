"""Predictors judged on tokens that they were not fitted to."""

import pytest
import torch
from strategies import gaussian

from vqkv.calibration.cross_fit import FOLDS, cross_fit, folds_of
from vqkv.codecs.predictor_kinds import Linear

WIDTH = 64


def samples(count, noise, seed=0):
    """x, y = x W + noise with a mean, and folds, of ``count`` tokens."""
    mix, x = gaussian(WIDTH, WIDTH) / WIDTH**0.5, gaussian(count, WIDTH, seed=seed + 1)
    y = x @ mix + noise * gaussian(count, WIDTH, seed=seed + 2) + 3
    return x, y, torch.arange(count) % FOLDS


def left(predictor, x, y):
    return float((y - predictor(x)).square().mean())


@pytest.mark.parametrize("count", [96, 256, 4096])
def test_what_folds_leave_is_what_other_text_will_leave(count):
    x, y, fold = samples(count, 1.0)
    fit = cross_fit([(x, y, fold)], Linear())
    other = left(fit.complete, *samples(4096, 1.0, seed=7)[:2])
    folds = float((y - fit.held_out(x, fold, WIDTH)).square().mean())
    assert torch.equal(fit.held_out(x, fold, WIDTH)[fold == 1], fit.folds[1](x[fold == 1]))
    assert folds == pytest.approx(other, rel=0.25)
    itself = left(Linear().fit(lambda: iter([(x, y)])), x, y)
    assert itself < 0.6 * other or count == 4096


def test_a_prediction_that_gains_nothing_is_none():
    x, y, fold = samples(256, 1.0)
    assert cross_fit([(gaussian(256, WIDTH, seed=9), y, fold)], Linear()) is None
    assert cross_fit([(x, y, fold * 0)], Linear()) is None  # nothing to judge by


def test_batches_add_up_and_few_samples_take_a_stronger_penalty():
    x, y, fold = samples(160, 1.0)
    fit = cross_fit([(x, y, fold)], Linear())
    split = cross_fit([(x[:50], y[:50], fold[:50]), (x[50:], y[50:], fold[50:])], Linear())
    torch.testing.assert_close(fit.complete.weight, split.complete.weight)
    assert fit.complete.strength > cross_fit([samples(8192, 1.0)], Linear()).complete.strength


def test_folds_are_sequences_or_stretches_of_tokens():
    assert folds_of(1, 2, 3, 8).tolist() == [[2] * 3, [3] * 3]
    assert folds_of(0, 1, 8, 1).tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]]
