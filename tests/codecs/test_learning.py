"""Codebooks: k-means, moving averages, residual VQ. Predictors: known maps come back, noise does not, GPTQ loses less
than rounding, bytes are foretold."""

import copy

import pytest
import torch
from codec_zoo import PREDICTORS as SMALL
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import gaussian

from vqkv.codecs.learning.gptq import gptq
from vqkv.codecs.learning.kmeans import Ema, KMeans, distinct_rows
from vqkv.codecs.learning.ridge import Ridge
from vqkv.codecs.predictor_kinds import KINDS, MLP, Linear, ReducedRank, make_predictor
from vqkv.codecs.stage import codec_from_config
from vqkv.codecs.vector import ResidualVQ
from vqkv.errors import DataError
from vqkv.study.metrics import explained_variance_ratio, relative_mse


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


def stream(x, y, size=100):
    return lambda: zip(x.split(size), y.split(size))


def known_map(rows=2000, inputs=24, outputs=12, mean=3.0):
    """Inputs as keys are (correlated channels of unequal size, away from zero), outputs, and the map between them."""
    mix = torch.eye(inputs) + gaussian(inputs, inputs, seed=1) / (2 * inputs**0.5)
    x = gaussian(rows, inputs) @ (mix * torch.linspace(0.2, 3, inputs)) + mean * gaussian(inputs, seed=2)
    weights, bias = gaussian(inputs, outputs, seed=7).double(), gaussian(outputs, seed=8).double()
    return x, (x.double() @ weights + bias), weights, bias


def layout_bytes(predictor, inputs, outputs):
    predictor = copy.deepcopy(predictor)
    predictor.lay_out(inputs, outputs)
    return predictor.side_bytes


BYTES = {  # by hand, for 9 inputs and 6 outputs
    "linear": 2 * (9 * 6 + 6),
    "reduced_rank": 2 * (9 * 3 + 3 * 6 + 6),
    "mlp": 2 * (9 * 12 + 3 * 12 + 12 * 6 + 6),
    "gptq": 6 * 5 + 2 * 2 * 3 * 6 + 2 * 6,  # 9 codes of 4 bits take 5 bytes; groups of 4, 4 and 1 inputs
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_predictor_takes_its_bytes_and_comes_back_bit_for_bit(kind):
    x, y, _, _ = known_map(300, 9, 6)
    predictor = make_predictor(kind, **SMALL[kind]).fit(stream(x, y))
    assert predictor.side_bytes == layout_bytes(predictor, 9, 6) == BYTES[kind]
    again = codec_from_config(predictor.config(), predictor.state_dict())
    assert type(again) is type(predictor) and again.config() == predictor.config()
    expected = predictor(x)
    assert torch.equal(again(x), expected) and expected.dtype == torch.float32
    assert torch.equal(copy.deepcopy(predictor).to("cpu")(x.double()), expected)
    assert torch.equal(predictor(x.view(3, 2, 50, 9)).view(300, 6), expected)
    assert all(tensor.is_contiguous() for tensor in predictor.state_dict().values())
    with torch.inference_mode():
        inside = make_predictor(kind, **SMALL[kind]).fit(stream(x.clone(), y.float().clone()))
    assert torch.equal(inside(x), expected) and not inside(x.clone().requires_grad_()).requires_grad


@pytest.mark.parametrize("kind, mebibytes", [("linear", 162), ("mlp", 540), ("reduced_rank", 68), ("gptq", 43)])
def test_sizes_are_those_published_for_a_3b_model(kind, mebibytes):
    """AQUA-KV's table: 28 layers, K and V 1024 wide. For GPTQ it has 41: scales and zeros of groups of 128 take 2.5 MiB
    with 40.5 MiB of codes."""
    size = sum(layout_bytes(make_predictor(kind), inputs, 1024) for inputs in (1024, 2048))
    assert abs(27 * size / 2**20 - mebibytes) < 1


@pytest.mark.parametrize("mean", [0.0, 3.0, 1000.0])
def test_a_known_linear_map_comes_back(mean):
    """The penalty decides how well: it is a share of the mean square, so a mean of 1000 spreads needs a smaller share,
    and the solver must not lose it to rounding. What storing in fp16 adds is no more than its last bit."""
    x, y, weights, _ = known_map(mean=mean)
    strength = 1e-12 if mean > 100 else 1e-8
    ridge = Ridge(strength)
    ridge.accumulate(x, y)
    assert (ridge.solve()[:-1] - weights).norm() <= 1e-4 * weights.norm()
    assert relative_mse(y, Linear(strength=strength).fit(stream(x, y.float()))(x)) <= 2 * 2**-22


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(2, 200), size=st.integers(1, 70), inputs=st.integers(0, 600), seed=st.integers(0, 1000))
@example(rows=7, size=7, inputs=255, seed=0)  # with the bias a complete block, one more than a block, two
@example(rows=7, size=3, inputs=256, seed=0)
@example(rows=7, size=7, inputs=511, seed=0)
def test_sums_are_those_of_all_samples_however_they_are_cut(rows, size, inputs, seed):
    x, y, ridge = gaussian(rows, inputs, seed=seed) + 2, gaussian(rows, 3, seed=seed + 1), Ridge()
    for part in zip(x.split(size), y.split(size)):
        ridge.accumulate(*part)
    biased = torch.cat([x.double(), torch.ones(rows, 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(ridge.xx, biased.T @ biased, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ridge.xy, biased.T @ y.double(), rtol=1e-12, atol=1e-12)
    assert torch.equal(ridge.xx, ridge.xx.T)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x", [torch.zeros(60, 0), torch.zeros(60, 5), torch.full((60, 5), 2.5)])
def test_inputs_that_say_nothing_give_the_mean(kind, x):
    y = gaussian(60, 3) + 1
    predictor = make_predictor(kind, **SMALL[kind] | ({"epochs": 200} if kind == "mlp" else {})).fit(stream(x, y))
    predicted = predictor(x.view(2, 30, -1 if x.numel() else 0))
    torch.testing.assert_close(predicted, y.mean(0).expand(2, 30, 3), rtol=0, atol=0.1 if kind == "mlp" else 2e-3)


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
    reduced = ReducedRank(rank=rank, strength=0.0).fit(stream(x, y))
    assert (reduced._weights(inputs).double() - expected).norm() <= 2e-3 * full.norm()
    assert reduced.side_bytes <= Linear().fit(stream(x, y)).side_bytes


def slow_gptq(weights, hessian, bits, group_size, damping=0.01):
    """One output at a time, the remaining inputs' Hessian inverted again at every step (Optimal Brain Quantization)."""
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


@pytest.mark.parametrize("bits, group_size", [(2, 4), (3, 6), (4, 100)])
def test_gptq_equals_its_slow_twin(bits, group_size):
    position = torch.arange(11).double()
    weights, hessian = gaussian(11, 3), 0.9 ** (position[:, None] - position).abs()  # each input like its neighbours
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [192, 576])
def test_a_row_is_predicted_alike_alone_and_among_others(kind, inputs):
    """Else a token stored alone would differ from the same token stored among others."""
    settings = {"mlp": {"epochs": 1}, "reduced_rank": {"rank": 48}}.get(kind, {})
    x = gaussian(8 * inputs, inputs)
    predictor = make_predictor(kind, **settings).fit(stream(x, gaussian(8 * inputs, 192, seed=1) + x[:, :192], 4096))
    every = predictor(x[:200])
    for rows in (*range(1, 10), 64, 65):
        assert torch.equal(predictor(x[:rows].clone()), every[:rows])
        assert torch.equal(predictor(x[130 : 130 + rows, None].clone()), every[130 : 130 + rows, None])
