"""What is left between page 11's best design and Shannon's bound, and what wins some of it: bits at equal error."""

import itertools

import numpy as np
import torch
from torch import Tensor

from vqkv import presets
from vqkv.calibration.costs import restored_places
from vqkv.codecs.entropy_coded_scalar import TOWARDS_ZERO
from vqkv.codecs.trellis_coded_scalar import FINER, TrellisCodedScalar
from vqkv.study.experiments.common import calibrated, frame, subject
from vqkv.study.experiments.designs import factorial
from vqkv.study.sweep import sweep

SCALES = (0.8, 1.0, 1.25)  # of the step, finer ones last: the curve that bits at equal error are read from
REACH = 400  # codes that a table of frequencies tells apart
UNSEEN = 0.02  # count of a code that calibration never saw
WEIGHT = 0.1  # squared steps that a bit is worth, of the steps' own optimised rounding
TECHNIQUES = ("to the nearest", "rate-distortion optimised", "means of codes", "trellis of 4 states",
              "trellis of 8 states", "trellis of 8 states, least squared error", "tables by the component above",
              "tables by the token before", "predicted from the token before")  # fmt: skip


def further_down(
    models: list[str], corpus: str, designs: list[str], bits: list[float], seed: int, train_seqs: int, seq_len: int,
    num_seqs: int, dtype: str, device: str,
):  # fmt: skip
    """What each of ``TECHNIQUES`` would save a design with uniform steps: a row per model, design and nominal bits.

    ``saved``: bits a value at equal squared error, in what the design's rotation makes of held-out keys and values (in
    units of each place's step, so that errors cost alike everywhere), all places together. Rates are cross-entropies of
    the codes of ``num_seqs`` sequences of ``test`` under frequencies of ``train``, shared by channels of like spread as
    the codec does; ``rate`` is that of the steps as they are, rounded ``TOWARDS_ZERO``.
    """
    text = {"train": [train_seqs, seq_len], "test": [num_seqs, seq_len], "corpus": corpus, "seed": seed}
    settings = {"who": text | {"dtype": dtype, "device": device}}
    named = itertools.product(models, designs, bits)
    cases = [{"model": name, "design": design, "bits": each} for name, design, each in named]
    return frame(*sweep(_rows, cases, settings, "further down"))


def _rows(model: str, design: str, bits: float, who: dict):
    who = who | {"name": model}
    found = subject(**who)
    compressor = calibrated(presets.crossed(**factorial()[design], bits=bits), who, who["train"][0])
    fits, tests = (_in_steps(found.model, compressor, tokens) for tokens in (found.train, found.test))
    sums = np.zeros((len(SCALES) + len(TECHNIQUES), 2))  # bits and squared error
    for fit, test in zip(fits, tests, strict=True):
        sums += _measured(fit, test) * test.numel()
    rates, errors = (sums / sum(test.numel() for test in tests)).T
    known = np.log2(errors[: len(SCALES)])[::-1], rates[: len(SCALES)][::-1]
    slope = (known[1][-1] - known[1][0]) / (known[0][-1] - known[0][0])
    label, rows = {"model": model, "design": design, "nominal_bits": bits, "rate": rates[1]}, []
    for name, rate, error in zip(TECHNIQUES, rates[len(SCALES) :], np.log2(errors[len(SCALES) :])):
        inside = np.clip(error, known[0][0], known[0][-1])
        equal = np.interp(inside, *known) + slope * (error - inside)
        rows.append(label | {"technique": name, "saved": equal - rate})
    return rows, found.sources


def _in_steps(model, compressor, tokens: Tensor) -> list[Tensor]:
    """What each place's quantizer is given, over its step: a tensor (rows of tokens, tokens, channels) for each place
    and head."""
    found = []
    for _, codec, rows, _ in restored_places(model, compressor, tokens):
        y = codec.vectors(rows) / codec.quantizer.step
        found += [head.flatten(0, 1) for head in y.unbind(1)]
    return found


def _measured(fit: Tensor, test: Tensor) -> np.ndarray:
    """(curve and techniques, 2): bits a value and squared error of one place."""
    rows = [_coded(*(_rounded(x * scale) for x in (fit, test)), test, 1 / scale) for scale in SCALES]
    codes = [_rounded(x) for x in (fit, test)]
    rows.append(_coded(*(_rounded(x, 0.0) for x in (fit, test)), test))
    rows.append(_optimised(fit, test))
    rows.append((rows[1][0], _from_means(*codes, fit, test)))
    rows += [_trellis(fit, test, TrellisCodedScalar(states=states)) for states in (4, 8)]
    rows.append(_trellis(fit, test, TrellisCodedScalar(weight=0.3)))
    for axis in (-1, -2):
        rows.append(_coded(*codes, test, 1.0, *(_neighbours(code, axis) for code in codes)))
    rows.append(_along_tokens(fit, test))
    return np.array(rows)


def _rounded(x: Tensor, towards_zero: float = TOWARDS_ZERO) -> Tensor:
    return (x.abs() + 0.5 - towards_zero).floor().copysign(x)


def _coded(fit: Tensor, test: Tensor, exact: Tensor, step: float = 1.0, contexts=None, others=None) -> tuple:
    """Bits and squared error of codes; ``contexts`` (of ``fit``) and ``others``: which table each has."""
    return _bits(fit, test, contexts, others), (test * step - exact).square().mean(dtype=torch.float64).item()


def _bits(fit: Tensor, test: Tensor, contexts: Tensor | None = None, others: Tensor | None = None) -> float:
    group, costs = _tables(fit, contexts)
    place = group if others is None else group + others.long() * (int(group.max()) + 1)
    return costs[place.expand(test.shape), _index(test)].mean().item()


def _tables(codes: Tensor, contexts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Table of each channel, and bits of each code in each table of each context."""
    spread = codes.double().square().mean((0, 1)).sqrt().clamp_min(2.0**-8)
    group = torch.unique((2 * spread.log2()).round(), return_inverse=True)[1]
    groups = int(group.max()) + 1
    place = group if contexts is None else group + contexts.long() * groups
    tables = groups * (1 if contexts is None else int(contexts.max()) + 1)
    flat = place.expand(codes.shape) * (2 * REACH + 1) + _index(codes)
    counts = torch.bincount(flat.flatten(), minlength=tables * (2 * REACH + 1)).view(tables, -1).double() + UNSEEN
    return group, -(counts / counts.sum(1, keepdim=True)).log2()


def _index(codes: Tensor) -> Tensor:
    return codes.long().clamp(-REACH, REACH) + REACH


def _optimised(fit: Tensor, test: Tensor) -> tuple:
    """Of the nearest code and the one below it, whichever costs less with its bits."""
    group, costs = _tables(_rounded(fit))
    chosen = []
    for x in (fit, test):
        near = x.round()
        below = near - near.sign()
        price = [(x - code).square() + WEIGHT * costs[group.expand(x.shape), _index(code)] for code in (near, below)]
        chosen.append(torch.where(price[1] < price[0], below, near))
    return _coded(*chosen, test)


def _from_means(fit: Tensor, test: Tensor, exact_fit: Tensor, exact: Tensor) -> float:
    """Squared error where codes of size 1, 2 and 3 are read back as the means of what had them, by spread."""
    group, _ = _tables(fit)
    restored = test.clone()
    for table, size in itertools.product(range(int(group.max()) + 1), (1, 2, 3)):
        known = (fit.abs() == size) & (group == table)
        if known.sum() > 30:
            here = (test.abs() == size) & (group == table)
            restored[here] = test[here].sign() * exact_fit[known].abs().mean()
    return (restored - exact).square().mean(dtype=torch.float64).item()


def _trellis(fit: Tensor, test: Tensor, quantizer: TrellisCodedScalar) -> tuple:
    quantizer.build((1, *fit.shape[1:]))
    codes = quantizer.set_step(1 / FINER, fit.flatten(0, 1)[None]).view(fit.shape)
    tested = quantizer.encode(test[None, None])[0].view(test.shape)
    error = (quantizer.decode(tested.flatten(1)[None, None], {})[0, 0] - test).square().mean(dtype=torch.float64)
    return _bits(codes, tested), error.item()


def _neighbours(codes: Tensor, axis: int) -> Tensor:
    """0 to 3: the size of the code before along an axis; 0 of the first."""
    size = codes.abs().clamp_max(3)
    return torch.cat([torch.zeros_like(size.narrow(axis, 0, 1)), size.narrow(axis, 0, size.shape[axis] - 1)], axis)


def _along_tokens(fit: Tensor, test: Tensor) -> tuple:
    """Each token less what its restored predecessor in the block says of it, channel by channel."""
    before, here = _rounded(fit)[:, :-1], fit[:, 1:]
    slope = (before * here).sum((0, 1)) / before.square().sum((0, 1)).clamp_min(1e-9)
    codes = []
    for x in (fit, test):
        restored, found = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            found.append(_rounded(token - slope * restored))
            restored = slope * restored + found[-1]
        codes.append(torch.stack(found, dim=1))
    restored, error = torch.zeros_like(test[:, 0]), 0.0
    for code, token in zip(codes[1].unbind(1), test.unbind(1), strict=True):
        restored = slope * restored + code
        error += (restored - token).square().mean(dtype=torch.float64).item()
    return _bits(*codes), error / test.shape[1]
