"""Pages 03 and 05: what they compute, on cases whose answer is known."""

import numpy as np
import pandas as pd
import pytest
import torch

from vqkv.codecs.learning.kmeans import KMeans
from vqkv.models.metrics import top1_agreement, top2_agreement
from vqkv.study import experiments
from vqkv.study.experiments import product_codes, sequences


def test_two_modes_are_told_from_one():
    rng = np.random.default_rng(0)
    one, skewed = rng.normal(size=64), rng.exponential(size=64)
    two = np.concatenate([rng.normal(-3, 1, 32), rng.normal(3, 1, 32)])
    assert sequences.two_modes(two)["sarle"] > 5 / 9 and sequences.two_modes(two)["p"] < 0.001
    assert sequences.two_modes(one)["sarle"] < 5 / 9 and sequences.two_modes(one)["p"] > 0.05
    assert sequences.two_modes(np.log(np.exp(one))) == sequences.two_modes(one)
    assert sequences.two_modes(skewed)["sarle"] > sequences.two_modes(one)["sarle"]  # a tail counts too: hence the log


def test_modes_count_sequences_and_second_best_tokens():
    table = pd.DataFrame({"kl": [0.01, 0.02, 0.04, 0.3, 0.8], "top1": [1, 1, 0.9, 0.8, 0.5], "tokens": 10})
    table = table.assign(top2=[1, 1, 1, 0.9, 0.6], model="m", codec="c", kl_floor=1e-7, sequence=range(5))
    row = experiments.modes(table).iloc[0]
    assert (row["broken"], row["over 0.1"], row["changed"]) == (0.2, 0.4, 8)
    assert row["worst/median"] == pytest.approx(20) and row["second"] == pytest.approx(0.3 / 0.8)


def test_top2_is_top1_or_the_next():
    reference = torch.tensor([[[0.0, 1, 2, 3]] * 3])
    logits = torch.tensor([[[0.0, 1, 2, 3], [0, 1, 3, 2], [3, 1, 2, 0]]])
    assert top1_agreement(reference, logits).tolist() == [[1, 0, 0]]
    assert top2_agreement(reference, logits).tolist() == [[1, 1, 0]]


def test_claims_stand_beside_the_method_that_they_are_of():
    claims = experiments.claimed_sweep().set_index(["method", "threshold"])
    assert claims.index.is_unique and claims["claimed_ratio"]["vqq", 0.07] == 123
    assert claims.loc[("vqq_product", 0.1), ["claimed_ratio", "claimed_kl"]].tolist() == [308, 0.2]
    live = claims["claimed_live"].dropna()
    assert live.index.get_level_values("method").unique() == ["vqq"] and live.max() == pytest.approx(128 / 9)


def test_product_codes_are_best_where_halves_are_independent_and_residual_stages_where_sums_are():
    generator = torch.Generator().manual_seed(0)
    kmeans = KMeans(4, 20, 0)
    codes = torch.randn(2, 4, 4, generator=generator) * 5
    halves = torch.cat([codes[i][torch.randint(4, (512,), generator=generator)] for i in range(2)], dim=1)
    assert product_codes._product(halves, halves, kmeans) < 1e-6 < product_codes._residual(halves, halves, kmeans)
    coarse, fine = torch.randn(4, 8, generator=generator) * 20, torch.randn(4, 8, generator=generator)
    sums = sum(part[torch.randint(4, (512,), generator=generator)] for part in (coarse, fine))
    assert 10 * product_codes._residual(sums, sums, kmeans) < product_codes._product(sums, sums, kmeans)
