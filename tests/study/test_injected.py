"""Injected phenomena: where they are put, which rows there are, and what is made of heads."""

import math
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from vqkv import load_model
from vqkv.models.rope import rotations
from vqkv.study import figures
from vqkv.study.experiments import injected
from vqkv.study.experiments.injected import BY_HEAD, PAIRS, _head, key_bias, loud_heads, outlier_channels

SMALL = {
    "corpus": "python-stdlib", "seeds": [0, 1], "train_seqs": 2, "seq_len": 264, "num_seqs": 1, "chunk_size": 132,
    "codebook_size": 8, "dtype": "", "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module", params=["llama-mini", "gpt2-mini"])
def model(request):
    return load_model(f"vqkv/{request.param}")[0]


def test_outlier_channels_are_pairs_of_each_head_s_own(model):
    keys = outlier_channels(model, 30.0, seed=0)["keys"]
    assert ((keys == 30.0).sum(dim=-1) == 2 * PAIRS).all() and ((keys == 30.0) | (keys == 1.0)).all()
    for turn, heads in zip(rotations(model), keys, strict=True):
        halves = torch.arange(64).chunk(2) if turn is None else (turn.first, turn.second)
        assert torch.equal(*(heads[:, half] for half in halves))
    assert len({tuple(head.tolist()) for head in keys.flatten(0, 1)}) > 3
    assert not torch.equal(keys, outlier_channels(model, 30.0, seed=1)["keys"])


def test_one_head_of_each_layer_is_loud(model):
    factors = loud_heads(model, 10.0, seed=0)
    assert torch.equal(factors["keys"], factors["values"])
    loud = factors["keys"][:, :, 0] == 10.0
    assert loud.shape[0] == 6 and (loud.sum(dim=1) == 1).all() and loud.any(dim=0).all()


def test_a_bias_is_put_where_it_turns_least(model):
    bias = key_bias(model, 100.0, seed=0)["key_bias"]
    assert (bias.sum(dim=-1) == 100.0).all() and ((bias > 0).sum(dim=-1) == 1).all()
    turn, channel = rotations(model)[0], bias[0, 0].argmax()
    assert channel == (63 if turn is None else turn.first[-1]) and (turn is None or turn.angle[-1] == turn.angle.min())


def test_rows_of_a_seed_are_those_of_what_it_draws():
    table = injected(["vqkv/gpt2-mini"], sizes={"loud heads": [30.0], "key bias": [300.0]}, **SMALL)
    seeds = table.groupby(["phenomenon", "system"])["seed"].apply(list)
    assert all(found == ([0, 1] if system.startswith("vq") else [0]) for (_, system), found in seeds.items())
    assert set(seeds.index.get_level_values(0)) == {"loud heads", "key bias"} and len(seeds) == 3 + 12
    assert table["injection_kl"].max() < 1e-7 and (table["kl_mean"] >= 0).all()
    by_head = table.set_index(["phenomenon", "system", "seed"])[[*BY_HEAD]]
    assert by_head.loc["key bias"].isna().all(axis=None)
    assert by_head.loc["loud heads"].loc[["vq", "vq unscaled"]].notna().all(axis=None)
    assert by_head.loc["loud heads"].loc["vqq 0.1", "quiet_codes"].isna().all()
    kl = table.set_index(["phenomenon", "system"])["kl_mean"].groupby(level=[0, 1]).mean()
    assert kl["key bias", "higgs 4"] < 0.1 < kl["key bias", "quanto 4"] < kl["key bias", "quanto 2"] * 10
    assert table.loc[table["system"] == "quanto 4", "warned"].all() and not table["warned"].all()
    assert {name.split()[0] for name in table.attrs["sources"]} == {"model", "corpus"}


def test_what_is_made_of_a_head():
    x = torch.zeros(1, 1, 128, 2)
    x[0, 0, 3, 0], x[0, 0, 100, 1] = 8.0, 2.0  # one in each keyframe
    x_hat = x.clone()
    x_hat[0, 0, 100, 1], x_hat[0, 0, 4, 0] = 1.0, 2.0
    quantizer = SimpleNamespace(usage=lambda y: torch.tensor([[1, 0, 6, 3]]))
    row = _head(x, x_hat, SimpleNamespace(vectors=lambda x: x, quantizer=quantizer))
    assert row["error"] == pytest.approx(5 / 68) and row["worst"] == 0.5  # 1 of 2, not 2 of 8
    assert row["codes"] == 3 and row["most"] == 2  # 6 + 3 of 10 are nine tenths
    assert row["effective"] == pytest.approx(math.exp(-sum(p * math.log(p) for p in (0.1, 0.6, 0.3))))
    assert math.isnan(_head(x, x_hat, SimpleNamespace(quantizer=None))["codes"])


def made_up(phenomenon: str, systems: list[str], sizes: list[float]) -> pd.DataFrame:
    rows = [
        {"model": model, "phenomenon": phenomenon, "system": system, "size": size, "seed": seed, "kl_mean": kl,
         "kl_low": kl / 2, "kl_high": 2 * kl, "kl_floor": 1e-6, "quiet_effective": 100 / (1 + size), "quiet_error": 0.3}
        for model in ("vqkv/llama-mini", "vqkv/gpt2-mini")
        for number, system in enumerate(systems)
        for size in sizes
        for seed in ((0, 1) if system.startswith("vq") else (0,))
        for kl in [1e-3 * (1 + number) * (1 + size) * (1 + seed)]
    ]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize(("phenomenon", "sizes"), [("outlier channels", [1.0, 10.0]), ("key bias", [0.0, 10.0])])
def test_lines_by_size(phenomenon, sizes):
    systems = [*figures.SHOWN[phenomenon][1]]
    fig = figures.kl_by_size(made_up(phenomenon, [*systems, "another"], sizes), phenomenon)
    assert [ax.get_title() for ax in fig.axes] == ["llama-mini", "gpt2-mini"]
    for ax in fig.axes:
        drawn = [container.lines[0] for container in ax.containers]
        assert len(drawn) == len(systems) <= 6 and all(list(line.get_xdata()) == sizes for line in drawn)
    first = fig.axes[0].containers[0].lines[0].get_ydata()[0]
    assert first == pytest.approx((1.5e-3 if systems[0].startswith("vq") else 1e-3) * (1 + sizes[0]))


def test_quiet_heads_are_drawn_for_both_codebooks():
    fig = figures.quiet_heads(made_up("loud heads", ["vq unscaled", "vq", "vqq 0.1"], [1.0, 30.0]))
    assert all(len(ax.containers) == 4 for ax in fig.axes)
    assert fig.axes[0].containers[0].lines[0].get_ydata()[1] == pytest.approx(100 / 31)
