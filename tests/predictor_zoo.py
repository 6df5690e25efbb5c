"""Small predictors of every kind and samples for them."""

import torch
from strategies import gaussian

from vqkv.codecs.predictor_kinds import make_predictor

SMALL = {"linear": {}, "reduced_rank": {"rank": 3}, "mlp": {"epochs": 2, "minibatch": 64}, "gptq": {"group_size": 4}}


def correlated(rows, features, seed=0, mean=3.0):
    """Inputs as keys are: correlated channels of unequal size, away from zero."""
    mix = (
        torch.eye(features) + gaussian(features, features, seed=seed + 1) / (2 * max(1, features) ** 0.5)
    ) * torch.linspace(0.2, 3, features)
    return gaussian(rows, features, seed=seed) @ mix + mean * gaussian(features, seed=seed + 2)


def stream(x, y, size=100):
    return lambda: zip(x.split(size), y.split(size))


def known_map(rows=2000, inputs=24, outputs=12, mean=3.0):
    x = correlated(rows, inputs, mean=mean)
    weights, bias = gaussian(inputs, outputs, seed=7).double(), gaussian(outputs, seed=8).double()
    return x, (x.double() @ weights + bias), weights, bias


def small(kind, rows=300, inputs=9, outputs=6):
    """A fitted predictor and its samples."""
    x, y, _, _ = known_map(rows, inputs, outputs)
    return make_predictor(kind, **SMALL[kind]).fit(stream(x, y)), x, y
