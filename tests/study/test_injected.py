"""Injected phenomena: where they are put, which rows there are, and what is made of heads."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from vqkv import load_model
from vqkv.models.capture import capture
from vqkv.models.rope import rotations
from vqkv.study.experiments import injected
from vqkv.study.experiments.injected import (
    BY_HEAD,
    PAIRS,
    _head,
    key_bias,
    largest_magnitude,
    loud_heads,
    outlier_channels,
)
from vqkv.study.injection import normed
from vqkv.study.subject import Subject

injecting = sys.modules["vqkv.study.experiments.injected"]


@pytest.fixture(scope="module", params=["llama-mini", "gpt2-mini"])
def found(request):
    return Subject(f"vqkv/{request.param}", "python-stdlib", [2, 24], [2, 24])


def _asked(monkeypatch, phenomenon, found, size):
    """What the phenomenon asks ``inject`` for."""
    monkeypatch.setattr(injecting, "inject", lambda model, **asked: asked)
    return phenomenon(found, size)


def test_outlier_channels_are_pairs_of_each_head_s_own(found, monkeypatch):
    keys = _asked(monkeypatch, outlier_channels, found, 30.0)["keys"]
    assert ((keys == 30.0).sum(dim=-1) == 2 * PAIRS).all() and ((keys == 30.0) | (keys == 1.0)).all()
    for turn, heads in zip(rotations(found.model), keys, strict=True):
        halves = torch.arange(64).chunk(2) if turn is None else (turn.first, turn.second)
        assert torch.equal(*(heads[:, half] for half in halves))
    assert len({tuple(head.tolist()) for head in keys.flatten(0, 1)}) > 3
    assert not torch.equal(keys, _asked(monkeypatch, outlier_channels, found.changed(seed=1), 30.0)["keys"])


def test_one_head_of_each_layer_is_loud(found, monkeypatch):
    factors = _asked(monkeypatch, loud_heads, found, 10.0)
    assert torch.equal(factors["keys"], factors["values"])
    loud = factors["keys"][:, :, 0] == 10.0
    assert loud.shape[0] == 6 and (loud.sum(dim=1) == 1).all() and loud.any(dim=0).all()


def test_a_bias_is_put_where_it_turns_least(found, monkeypatch):
    bias = _asked(monkeypatch, key_bias, found, 100.0)["key_bias"]
    assert (bias.sum(dim=-1) == 100.0).all() and ((bias > 0).sum(dim=-1) == 1).all()
    turn, channel = rotations(found.model)[0], bias[0, 0].argmax()
    assert channel == (63 if turn is None else turn.first[-1]) and (turn is None or turn.angle[-1] == turn.angle.min())


@torch.no_grad()
def test_a_model_in_other_units_is_the_same_model(found):
    smaller = largest_magnitude(found, 0.45)
    roles = capture(smaller, found.test, pre_rope=False)
    assert all(x.abs().max().item() == pytest.approx(0.45, rel=1e-4) for role in roles for x in role)
    expected = found.model(found.test).logits
    torch.testing.assert_close(smaller(found.test).logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_norms_put_into_a_llama_leave_heads_of_equal_size_as_they_were():
    """One token is as large as the mean over tokens."""
    model, tokens = load_model("vqkv/llama-mini")[0], torch.tensor([[17]])
    changed = normed(model, tokens, ["key", "value"])
    torch.testing.assert_close(changed(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert all(x.square().mean(-1).sub(1).abs().max() < 1e-2 for role in capture(changed, tokens) for x in role)
    assert not torch.allclose(capture(model, tokens)[0][1], capture(changed, tokens)[0][1], rtol=0.1)


def test_rows_of_a_seed_are_those_of_what_it_draws():
    subject = Subject("vqkv/gpt2-mini", "python-stdlib", [2, 264], [1, 264], test_seed=0)
    sizes = {"loud heads": [30.0], "key bias": [300.0]}
    table = injected(subject=subject, sizes=sizes, seeds=[0, 1], chunk_size=132, codebook_size=8)
    seeds = table.groupby(["phenomenon", "system"])["seed"].apply(list)
    assert all(found == ([0, 1] if system.startswith("vq") else [0]) for (_, system), found in seeds.items())
    assert set(seeds.index.get_level_values(0)) == {"loud heads", "key bias"} and len(seeds) == 3 + 9
    assert table["injection_kl"].max() < 1e-7 and (table["kl_mean"] >= 0).all()
    by_head = table.set_index(["phenomenon", "system", "seed"])[[*BY_HEAD]]
    assert by_head.loc["key bias"].isna().all(axis=None)
    assert by_head.loc["loud heads"].loc[["vq", "vq unscaled"]].notna().all(axis=None)
    assert by_head.loc["loud heads"].loc["vqq 0.1", "quiet_codes"].isna().all()
    kl = table.set_index(["phenomenon", "system"])["kl_mean"].groupby(level=[0, 1]).mean()
    assert kl["key bias", "higgs 4"] < 0.1 < kl["key bias", "quanto 4"]
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
    assert row["codes"] == 3
    assert row["effective"] == pytest.approx(math.exp(-sum(p * math.log(p) for p in (0.1, 0.6, 0.3))))
    assert math.isnan(_head(x, x_hat, SimpleNamespace(quantizer=None))["codes"])
