"""Inter-layer predictors: known maps come back, noise does not, GPTQ loses less than rounding."""

import math
import weakref

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from predictor_zoo import SMALL, correlated, gaussian, known_map, small, stream

from vqkv.codecs.learning.gptq import gptq
from vqkv.codecs.learning.ridge import Ridge
from vqkv.codecs.predictor_kinds import KINDS, MLP, Linear, ReducedRank, make_predictor
from vqkv.errors import DataError
from vqkv.study.metrics import explained_variance_ratio, relative_mse


@pytest.mark.parametrize("mean", [0.0, 3.0, 1000.0])
def test_a_known_linear_map_comes_back(mean):
    """The penalty decides how well: it is a share of the mean square, so a mean of 1000 spreads needs a smaller share,
    and the solver must not lose it to rounding. What storing in fp16 adds is no more than its last bit."""
    x, y, weights, _ = known_map(mean=mean)
    strength = 1e-12 if mean > 100 else 1e-8
    ridge = Ridge(strength)
    ridge.accumulate(x, y)
    error = (ridge.solve()[:-1] - weights).norm() / weights.norm()
    assert error <= 1e-4
    predictor = Linear(strength=strength).fit(stream(x, y.float()))
    assert relative_mse(y, predictor(x)) <= 1e-4
    assert relative_mse(y, predictor(x)) <= 2 * 2**-22


def test_shuffled_targets_cannot_be_predicted():
    """Of noise, in_features / n of the variance is explained in sample, and held out as much is lost. The bound on the
    spread is for outputs that all move together: four deviations of the correlation with the held-out targets."""
    x, y, _, _ = known_map(4000, 16, 8)
    y = y[torch.randperm(4000, generator=torch.Generator().manual_seed(5))].float()
    train, test = slice(0, 2000), slice(2000, 4000)
    predictor = Linear().fit(stream(x[train], y[train]))
    expected = 16 / 2000
    noise = 4 * 2 * math.sqrt(expected / 2000)
    assert abs(explained_variance_ratio(y[test], predictor(x[test])) + expected) < noise
    assert 0 < explained_variance_ratio(y[train], predictor(x[train])) < expected + noise


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 200), st.integers(1, 70), st.integers(0, 5), st.integers(0, 1000))
def test_sums_do_not_depend_on_how_samples_are_cut(rows, size, inputs, seed):
    x, y = gaussian(rows, inputs, seed=seed) + 2, gaussian(rows, 3, seed=seed + 1)
    whole, cut = Ridge(), Ridge()
    whole.accumulate(x, y)
    for part in zip(x.split(size), y.split(size)):
        cut.accumulate(*part)
    torch.testing.assert_close(cut.solve(), whole.solve(), rtol=1e-8, atol=1e-9)
    one, many = Linear().fit(lambda: iter([(x, y)])), Linear().fit(stream(x, y, size))
    torch.testing.assert_close(one(x), many(x), rtol=1e-2, atol=1e-3)  # a last bit of fp16 may differ


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 40), st.integers(0, 600), st.integers(0, 1000))
@example(7, 255, 0)  # with the bias a whole block, one more than a block, two
@example(7, 256, 0)
@example(7, 511, 0)
def test_half_of_the_sums_makes_the_whole(rows, inputs, seed):
    x, ridge = gaussian(rows, inputs, seed=seed), Ridge()
    ridge.accumulate(x, gaussian(rows, 2, seed=seed + 1))
    whole = torch.cat([x.double(), torch.ones(rows, 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(ridge.xx, whole.T @ whole, rtol=1e-12, atol=1e-12)
    assert torch.equal(ridge.xx, ridge.xx.T)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x", [torch.zeros(60, 0), torch.zeros(60, 5), torch.full((60, 5), 2.5)])
def test_inputs_that_say_nothing_give_the_mean(kind, x):
    y = gaussian(60, 3) + 1
    predictor = make_predictor(kind, **SMALL[kind] | ({"epochs": 200} if kind == "mlp" else {})).fit(stream(x, y))
    tolerance = 0.1 if kind == "mlp" else 2e-3
    torch.testing.assert_close(
        predictor(x.view(2, 30, -1 if x.numel() else 0)), y.mean(0).expand(2, 30, 3), rtol=0, atol=tolerance
    )


@settings(deadline=None, max_examples=15)
@given(st.integers(3, 12), st.integers(3, 12), st.integers(1, 12), st.integers(0, 1000))
def test_reduced_rank_is_svd_truncation_on_white_inputs(inputs, outputs, rank, seed):
    rank = min(rank, inputs, outputs)
    x, y = gaussian(400, inputs, seed=seed), gaussian(400, outputs, seed=seed + 1)
    x = torch.linalg.qr(x - x.mean(0)).Q * 20  # exactly white
    y = x @ gaussian(inputs, outputs, seed=seed + 2) + 0.1 * y
    full = torch.linalg.lstsq(x.double(), (y - y.mean(0)).double()).solution
    left, sizes, right = torch.linalg.svd(full, full_matrices=False)
    expected = left[:, :rank] * sizes[:rank] @ right[:rank]
    found = ReducedRank(rank=rank, strength=0.0).fit(stream(x, y))._weights(inputs).double()
    assert (found - expected).norm() <= 2e-3 * full.norm()


def test_full_rank_is_no_restriction_and_takes_no_more_bytes():
    x, y, _, _ = known_map()
    linear = Linear().fit(stream(x, y.float()))
    for rank in (12, 256):
        reduced = ReducedRank(rank=rank).fit(stream(x, y.float()))
        assert relative_mse(linear(x), reduced(x)) < 1e-6 and reduced.side_bytes == linear.side_bytes


def slow_gptq(weights, hessian, bits, group_size, damping=0.01):
    """One output at a time, the remaining inputs' Hessian inverted anew at every step (Optimal Brain Quantization)."""
    weights, codes = weights.double().clone(), torch.zeros(weights.shape, dtype=torch.int64)
    hessian = hessian.double() + damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    for column in range(weights.shape[1]):
        w = weights[:, column]
        for i in range(len(w)):
            if i % group_size == 0:
                low, high = w[i : i + group_size].min(), w[i : i + group_size].max()
                zero = low.half().double()
                scale = ((high - zero) / (2**bits - 1)).half().double()
            codes[i, column] = ((w[i] - zero) / scale).round().clamp(0, 2**bits - 1)
            inverse = torch.linalg.inv(hessian[i:, i:])
            error = (w[i] - (zero + scale * codes[i, column])) / inverse[0, 0]
            w[i + 1 :] -= error * inverse[0, 1:]
    return codes


def gram(inputs):
    """X'X of inputs each like its neighbours."""
    place = torch.arange(inputs).double()
    return 0.9 ** (place[:, None] - place).abs()


@pytest.mark.parametrize("bits, group_size", [(2, 4), (3, 6), (4, 100)])
def test_gptq_equals_its_slow_twin(bits, group_size):
    weights, hessian = gaussian(11, 3), gram(11)
    codes, scales, zeros = gptq(weights, hessian, bits, group_size)
    assert codes.tolist() == slow_gptq(weights, hessian, bits, group_size).tolist()
    assert scales.shape == zeros.shape == (-(-11 // group_size), 3)


def test_mlp_learns_what_no_line_can():
    x = gaussian(1500, 4) * torch.tensor([1.0, 10, 0.1, 3]) + 5
    y = torch.stack([(x[:, 0] - 5).abs(), (x[:, 1] - 5) * (x[:, 2] - 5), x[:, 3]], dim=1)
    held_out = slice(1200, None)
    fits = [p.fit(stream(x[:1200], y[:1200])) for p in (Linear(), MLP(width=8, epochs=30, minibatch=50))]
    linear, mlp = (explained_variance_ratio(y[held_out], fit(x[held_out])) for fit in fits)
    assert mlp > 0.9 and mlp > linear + 0.05


def test_mlp_draws_from_its_seed_alone():
    x, y, _, _ = known_map(300, 5, 4)
    before = torch.get_rng_state()
    same = [MLP(seed=3, minibatch=20).fit(stream(x, y.float()))(x) for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state()) and torch.equal(*same)
    assert not torch.equal(same[0], MLP(seed=4, minibatch=20).fit(stream(x, y.float()))(x))


@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode_makes_no_difference(kind):
    expected, x, y = small(kind)
    with torch.inference_mode():
        inside = make_predictor(kind, **SMALL[kind]).fit(stream(x.clone(), y.float().clone()))
        assert torch.equal(inside(x), expected(x))
    assert torch.equal(inside(x), expected(x)) and not inside(x.clone().requires_grad_()).requires_grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [1, 8])
def test_one_batch_is_held_at_a_time(kind, times):
    held, most = weakref.WeakSet(), 0

    def batches():
        nonlocal most
        for seed in range(4 * times):
            x, y = correlated(50, 6, seed), gaussian(50, 3, seed=seed)
            held.update((x, y))
            most = max(most, len(held))
            yield x, y

    make_predictor(kind, **SMALL[kind]).fit(batches)
    assert most <= 4  # two of x, two of y: the one in use and the one being made


def test_inputs_that_depend_on_each_other_need_a_penalty():
    x = torch.cat([torch.ones(20, 1), gaussian(20, 2)], dim=1)
    x[:, 0] = 0
    with pytest.raises(DataError, match="singular at strength 0: give a larger one"):
        Linear(strength=0.0).fit(stream(x, gaussian(20, 2)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [192, 576])
def test_a_row_is_predicted_alike_alone_and_among_others(kind, inputs):
    """Else a token stored alone would differ from the same token stored among others."""
    settings = {"mlp": {"epochs": 1}, "reduced_rank": {"rank": 48}}.get(kind, {})
    x = gaussian(8 * inputs, inputs)
    predictor = make_predictor(kind, **settings).fit(stream(x, gaussian(8 * inputs, 192, seed=1) + x[:, :192], 4096))
    whole = predictor(x[:200])
    for rows in (*range(1, 10), 64, 65):
        assert torch.equal(predictor(x[:rows].clone()), whole[:rows])
        assert torch.equal(predictor(x[130 : 130 + rows, None].clone()), whole[130 : 130 + rows, None])
