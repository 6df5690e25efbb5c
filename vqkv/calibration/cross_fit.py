"""Predictors fitted without the tokens that they are judged on, so that residuals are those of other text."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vqkv.codecs.learning.ridge import Ridge
from vqkv.codecs.predictor_kinds import Linear

FOLDS = 4
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # of the ridge's penalty
MEAN = math.inf  # the strength at which a ridge predicts the mean alone
WORTH = 0.9  # share of the mean's error on held-out tokens: above it a prediction is dropped


@dataclass
class CrossFit:
    """A predictor fitted to all samples (``complete``), and for each fold one fitted to the other folds."""

    complete: Linear
    folds: list[Linear]

    def held_out(self, x: Tensor, fold: Tensor, width: int) -> Tensor:
        """Predict (..., width) from x (..., in_features), each row by the predictor that was not fitted to its fold."""
        predicted = x.new_empty(*fold.shape, width)
        for number, predictor in enumerate(self.folds):
            predicted[fold == number] = predictor(x[fold == number])
        return predicted


def cross_fit(samples: Iterable[tuple[Tensor, Tensor, Tensor]], like: Linear) -> CrossFit | None:
    """Fit predictors ``like`` one to samples x (n, in_features), y (n, out_features) and their folds (n,).

    The strength is that of the least error on held-out folds. Returns None if the error is more than ``WORTH`` of the
    mean's, or if there is one fold only."""
    ridges: dict[int, Ridge] = {}
    squares: dict[int, float] = {}
    for x, y, numbers in samples:
        for number in numbers.unique().tolist():
            rows = numbers == number
            ridges.setdefault(number, Ridge()).accumulate(x[rows], y[rows])
            squares[number] = squares.get(number, 0.0) + float(y[rows].double().square().sum())
    if len(ridges) < 2:
        return None
    ridges, zero = dict(sorted(ridges.items())), torch.zeros(())
    total = _ridge(sum((fold.xx for fold in ridges.values()), zero), sum((fold.xy for fold in ridges.values()), zero))
    others = {number: _ridge(total.xx - fold.xx, total.xy - fold.xy) for number, fold in ridges.items()}
    errors, solved = dict.fromkeys((MEAN, *STRENGTHS), 0.0), {}
    for number, fold in ridges.items():
        for strength in errors:
            weights = solved[number, strength] = _weights(others[number], strength)
            errors[strength] += squares[number] - 2 * float((weights * fold.xy).sum())
            errors[strength] += float((weights * (fold.xx @ weights)).sum())
    best = min(STRENGTHS, key=lambda strength: errors[strength])
    if errors[best] > WORTH * errors[MEAN]:
        return None
    complete = replace(like, strength=best)
    complete.take(total, _weights(total, best))
    folds = {number: replace(like, strength=best) for number in others}
    for number, predictor in folds.items():
        # GPTQ rounds these with the penalty of the last strength that was tried: the study's tables are made so
        predictor.take(others[number], solved[number, best])
    return CrossFit(complete, [folds.get(number, folds[min(folds)]) for number in range(FOLDS)])


def folds_of(number: int, batch: int, tokens: int, total: int) -> Tensor:
    """Number the folds of a batch's tokens, int64 (batch, tokens): by sequence, or by stretches of tokens where there
    are fewer sequences than folds. ``number``: of the batch; ``total``: of all sequences."""
    by_token = torch.arange(tokens) * FOLDS // max(1, tokens)
    by_row = (torch.arange(batch) + number * batch) % FOLDS
    return by_row.unsqueeze(1).expand(-1, tokens) if total >= FOLDS else by_token.expand(batch, -1)


def _ridge(xx: Tensor, xy: Tensor) -> Ridge:
    ridge = Ridge()
    ridge.xx, ridge.xy = xx, xy
    return ridge


def _weights(ridge: Ridge, strength: float) -> Tensor:
    ridge.strength = strength
    if strength < MEAN:
        return ridge.solve()
    weights = torch.zeros_like(ridge.xy)
    weights[-1] = ridge.means()[1]
    return weights
