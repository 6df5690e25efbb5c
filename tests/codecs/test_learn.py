"""k-means and moving averages from counts and sums."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv.codecs.learning.kmeans import Ema, KMeans, distinct_rows
from vqkv.errors import DataError
from vqkv.kernels.cpu import sums_by_code


def gaussian(rows, dim=4, seed=0):
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


def mse(x, codebook):
    return torch.cdist(x, codebook).amin(dim=-1).square().mean() / x.shape[-1]


@pytest.mark.parametrize("seed", range(5))
def test_kmeans_reaches_the_optimum_of_two_known_clusters(seed):
    """Two far apart are found from any start; more are not, which is why the study reports a spread over seeds."""
    centres = torch.tensor([[20.0, 0, 0, 0], [-20.0, 0, 0, 0]])
    x = (centres[:, None] + gaussian(400, seed=seed).view(2, 200, 4)).reshape(-1, 4)
    assert mse(x, KMeans(2, seed=seed).fit(x)) <= mse(x, centres)


@pytest.mark.parametrize("seed", range(5))
def test_a_spread_start_finds_every_far_cluster(seed):
    centres = 100 * torch.arange(20.0).unsqueeze(1)
    x = (centres + gaussian(20 * 50, 1, seed).view(20, 50)).reshape(-1, 1)
    learned = KMeans(20, seed=seed, spread=True).fit(x)
    torch.testing.assert_close(learned.sort(dim=0).values, centres, atol=0.8, rtol=0)
    with pytest.raises(DataError, match="leaves only 3"):
        KMeans(4, spread=True).fit(gaussian(3))


def test_every_iteration_improves_on_its_start():
    x = gaussian(3000)
    errors = [mse(x, KMeans(64, iterations=n).fit(x)) for n in (0, 1, 3, 10)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.85 * errors[0]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 1000))
def test_statistics_are_counts_and_sums(rows, size, seed):
    x, codes = gaussian(rows, 3, seed), torch.randint(size, (rows,), generator=torch.Generator().manual_seed(seed))
    counts, sums = sums_by_code(x, codes, size)
    assert counts.tolist() == [int((codes == j).sum()) for j in range(size)]
    expected = torch.stack([x[codes == j].double().sum(dim=0) for j in range(size)])
    torch.testing.assert_close(sums, expected)


def test_empty_clusters_move_onto_the_worst_fit():
    x = torch.tensor([[0.0], [0.0], [1.0], [100.0]])
    learner = KMeans(3, iterations=1)
    learner.codebook = torch.tensor([[0.0], [1.0], [-500.0]])
    codes = learner.assign(x)
    learner.solve(*sums_by_code(x, codes, 3), spare=learner._worst(x, codes))
    assert learner.codebook[2].item() == 100.0


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 1000))
def test_start_is_distinct_whatever_repeats(distinct, repeats, seed):
    x = gaussian(distinct, 3, seed).repeat(repeats, 1)
    rows = x[distinct_rows(x, distinct, seed)]
    assert len(rows.unique(dim=0)) == distinct
    with pytest.raises(DataError, match=f"leaves only {distinct}: calibrate on more tokens"):
        distinct_rows(x, distinct + 1, seed)


def test_ema_is_the_moving_average_written_out(monkeypatch):
    monkeypatch.setattr("vqkv.codecs.learning.kmeans.EPS", 0.0)
    ema = Ema(torch.tensor([[[1.0], [5.0]]]), torch.tensor([[10.0, 10.0]]), decay=0.9)
    found = ema.update(torch.tensor([[20.0, 0.0]]).double(), torch.tensor([[[60.0], [0.0]]]).double())
    expected = [[(0.9 * 10 + 0.1 * 60) / (0.9 * 10 + 0.1 * 20)], [5.0]]
    torch.testing.assert_close(found, torch.tensor([expected]))
