"""A two-layer perceptron trained on a stream of samples, in memory that does not grow with their number."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.codecs.learning.ridge import Ridge
from vqkv.errors import DataError

Samples = Callable[[], Iterator[tuple[Tensor, Tensor]]]
Weights = list[Tensor]  # first (in, hidden), its bias, LayerNorm's gain and shift (hidden,), second (hidden, out), bias
START_STRENGTH = 1e-5  # of the ridge regression that training starts from
WEIGHT_DECAY = 0.1
SAMPLES_PER_INPUT = 8  # with fewer the fit makes rounding errors larger, layer after layer (4 did, with 24 layers)


def mlp(x: Tensor, weights: Weights) -> Tensor:
    """GELU(LayerNorm(x W1 + b1)) W2 + b2: x (..., in_features) -> (..., out_features)."""
    first, first_bias, gain, shift, second, second_bias = weights
    hidden = F.layer_norm(x @ first + first_bias, gain.shape, gain, shift)
    return F.gelu(hidden) @ second + second_bias


def train_mlp(samples: Samples, width: int, epochs: int, learning_rate: float, minibatch: int, seed: int) -> Weights:
    """Return weights for raw x and y, in float32, with ``width`` times y's features hidden: AdamW on the squared error,
    cosine decay to 0. ``samples`` is passed over ``epochs`` + 1 times. Raises ``DataError`` for too few samples.

    While it trains, inputs are whitened, as gradient descent hardly moves along directions of small variance, which
    keys have; targets have one scale, so that the squared error stays that of y."""
    ridge, power, steps = Ridge(START_STRENGTH), torch.zeros((), dtype=torch.float64), 0
    for x, y in samples():
        ridge.accumulate(x.detach(), y.detach())
        power, steps = power + y.detach().double().square().sum(), steps + math.ceil(len(x) / minibatch)
    count, features = int(ridge.xx[-1, -1]), ridge.xx.shape[0] - 1
    if count < SAMPLES_PER_INPUT * features:
        raise DataError(
            f"{count} samples for an MLP of {features} input features, at least {SAMPLES_PER_INPUT} each are needed: "
            "calibrate on more tokens, or use the linear predictor"
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False):  # whose tensors could not be trained
        ridge.xx, ridge.xy = ridge.xx.clone(), ridge.xy.clone()
        mean_x, whiten, mean_y, scale, linear = _start(ridge, power.clone())
        weights = _initial(linear, width, generator)
        optimizer = torch.optim.AdamW(weights, learning_rate, weight_decay=WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    for _ in range(epochs):
        for x, y in samples():
            rows = torch.randperm(len(x), generator=generator).to(x.device)
            for part in rows.tensor_split(math.ceil(len(x) / minibatch)):
                with torch.inference_mode(False), torch.enable_grad():
                    inputs, targets = x[part].clone().float() - mean_x, y[part].clone().float() - mean_y
                    optimizer.zero_grad()
                    F.mse_loss(mlp(inputs @ whiten, weights), targets / scale).backward()
                    optimizer.step()
                schedule.step()
    first, first_bias, gain, shift, second, second_bias = (tensor.detach() for tensor in weights)
    first = whiten @ first  # what was done to x and y becomes part of both layers
    return [first, first_bias - mean_x @ first, gain, shift, second * scale, second_bias * scale + mean_y]


def _start(ridge: Ridge, power: Tensor) -> Weights:
    """Return x's mean, its whitening (in, in), y's mean and scale, and the ridge regression between the two as they are
    then, (in, out); float32. ``power``: the sum of y squared."""
    (mean_x, mean_y), count = ridge.means(), ridge.xx[-1, -1]
    variance = (power - count * mean_y.square().sum()) / (count * len(mean_y))
    scale = variance.sqrt() if variance > 1e-12 * power / count else torch.ones_like(variance)
    sizes, directions = torch.linalg.eigh(ridge.penalized() / count)
    linear = sizes.sqrt()[:, None] * (directions.T @ ridge.solve()[:-1]) / scale
    return [x.float() for x in (mean_x, directions / sizes.sqrt(), mean_y, scale, linear)]


def _initial(linear: Tensor, width: int, generator: torch.Generator) -> Weights:
    """Random weights, except that 2 * out hidden units begin as the regression ``linear`` (in, out), if there are so
    many: GELU(z) - GELU(-z) = z."""
    inputs, outputs = linear.shape
    hidden = width * outputs
    first = torch.randn(inputs, hidden, generator=generator, dtype=torch.float32) / max(1, inputs) ** 0.5
    second = torch.zeros(hidden, outputs, dtype=torch.float32)
    if width > 1:
        first[:, : 2 * outputs] = torch.cat([linear, -linear], dim=1)
        second[: 2 * outputs] = torch.cat([torch.eye(outputs), -torch.eye(outputs)])
    zeros, ones = torch.zeros(hidden, dtype=torch.float32), torch.ones(hidden, dtype=torch.float32)
    weights = [first, zeros, ones, zeros.clone(), second, torch.zeros(outputs, dtype=torch.float32)]
    return [tensor.to(linear.device).requires_grad_() for tensor in weights]
