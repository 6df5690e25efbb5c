"""Predictors fitted without the tokens that they are judged on, so that later stages see what other text will leave."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vqkv.codecs.learning.ridge import Ridge
from vqkv.codecs.predictor_kinds import Regression

FOLDS = 4
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # of the ridge's penalty
WORTH = 0.9  # of the error of the mean: where a prediction leaves more of it, on held-out tokens, there is none


@dataclass
class CrossFit:
    """One place's predictor: ``whole``, fitted to all samples, and for each fold one fitted to the others."""

    whole: Regression
    folds: list[Regression]


def cross_fit(samples: Iterable[tuple[Tensor, Tensor, Tensor]], like: Regression) -> CrossFit | None:
    """Predictors ``like`` one for samples x (n, in_features), y (n, out_features) and their folds (n,), with the
    strength whose error on held-out folds is least; None if it leaves more than ``WORTH`` of what the mean leaves."""
    ridges, squares = [Ridge() for _ in range(FOLDS)], [0.0] * FOLDS
    for x, y, fold in samples:
        for number in range(FOLDS):
            mine = fold == number
            if mine.any():
                ridges[number].accumulate(x[mine], y[mine])
                squares[number] += float(y[mine].double().square().sum())
    there = [number for number in range(FOLDS) if ridges[number].xx.ndim]
    if len(there) < 2:
        return None
    totals = sum(ridges[number].xx for number in there), sum(ridges[number].xy for number in there)
    others = {number: _ridge(totals[0] - ridges[number].xx, totals[1] - ridges[number].xy) for number in there}
    errors = {None: 0.0} | dict.fromkeys(STRENGTHS, 0.0)
    solved = {}
    for number, ridge in others.items():
        for strength in errors:
            weights = solved[number, strength] = _solved(ridge, strength)
            held = ridges[number]  # squared error on its samples, from their sums
            errors[strength] += squares[number] - 2 * float((weights * held.xy).sum())
            errors[strength] += float((weights * (held.xx @ weights)).sum())
    best = min(STRENGTHS, key=errors.get)
    if errors[best] > WORTH * errors[None]:
        return None
    made = {number: _made(like, others[number], solved[number, best], best) for number in there}
    every = _ridge(*totals)
    whole = _made(like, every, _solved(every, best), best)
    return CrossFit(whole, [made.get(number, made[there[0]]) for number in range(FOLDS)])


def folds_of(number: int, batch: int, tokens: int, total: int) -> Tensor:
    """Folds of the tokens of a batch's sequences, int64 (batch, tokens): by sequence, or, where there are fewer than
    folds, by stretches of tokens. ``number``: of the batch; ``total``: of all sequences."""
    by_token = torch.arange(tokens) * FOLDS // max(1, tokens)
    by_row = (torch.arange(batch) + number * batch) % FOLDS
    return by_row.unsqueeze(1).expand(-1, tokens) if total >= FOLDS else by_token.expand(batch, -1)


def _ridge(xx: Tensor, xy: Tensor, strength: float = 1e-3) -> Ridge:
    ridge = Ridge(strength)
    ridge.xx, ridge.xy = xx, xy
    return ridge


def _solved(ridge: Ridge, strength: float | None) -> Tensor:
    """Weights; with no strength the mean alone."""
    if strength is None:
        weights = torch.zeros_like(ridge.xy)
        weights[-1] = ridge.moments().mean_y
        return weights
    ridge.strength = strength
    return ridge.solve()


def _made(like: Regression, ridge: Ridge, weights: Tensor, strength: float) -> Regression:
    made = replace(like, strength=strength)
    made.take(ridge, weights)
    return made
