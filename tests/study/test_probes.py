"""Linear probes from streamed sums: what they find, what they leave out, and that they keep nothing."""

import functools
import itertools
import math

import pytest
import small_models
import torch
from projections import kv_sources
from transformers import AutoModelForCausalLM

from vqkv import capture, presets
from vqkv.errors import DataError
from vqkv.study.experiments.predictability import untrained
from vqkv.study.experiments.probes import Gram, Probe, explained_variance, probe_sums, reconstructed, shuffled
from vqkv.study.metrics import bits_saved, explained_variance_ratio

REACHING = ["K-1", "K-1+V-1", "K@T-1", "V-1+K@T-2", "K-2+V-1@T-1"]
TINY = 1e-12  # a ridge that does nothing


@functools.cache
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_models.CONFIGS["qwen2"]()).eval()


def tokens(num_seqs, seed=0):
    return torch.randint(0, 4096, (num_seqs, 24), generator=torch.Generator().manual_seed(seed))


def evr(model, train, test, *wanted, strength=TINY, **settings):
    """[{layer: EVR}] of each (target, sources)."""
    chosen = [Probe(*names) for names in wanted]
    sums = [probe_sums(model, x, chosen, **settings) for x in (train, test)]
    rows = [explained_variance(*sums, [probe], len(kv_sources(model)), strength) for probe in chosen]
    return [{row["layer"]: row["evr"] for row in layers} for layers in rows]


def by_hand(model, x, names, layer, skip, reach):
    """Features of a layer straight from one capture: every token of every sequence from ``skip + reach`` on."""
    captured = dict(zip("KV", capture(model, x), strict=True))
    columns = []
    for name in names.split("+"):
        source, _, lag = name.partition("@T-")
        start, back = skip + reach - int(lag or 0), int(source[2:] or 0)
        flat = captured[source[0]][layer - back].transpose(1, 2).flatten(2).double()
        columns.append(flat[:, start : start + x.shape[1] - skip - reach].flatten(0, 1))
    return torch.cat(columns, dim=1)


@pytest.mark.parametrize(("target", "sources"), [("V", "V-1+K"), *itertools.product("KV", REACHING)])
def test_equals_least_squares_on_the_features_themselves(target, sources):
    """... of every layer in which the sources exist, for sources from other layers, tokens and roles."""
    train, test = tokens(40), tokens(9, seed=1)
    reach = max([int(part[-1]) for part in sources.split("+") if "@" in part], default=0)
    (by_layer,) = evr(model(), train, test, (target, sources), skip=2, batch_size=7)
    assert list(by_layer) == ([0, 1, 2] if sources == "K@T-1" else [2] if "K-2" in sources else [1, 2])
    for layer, value in by_layer.items():
        x, y, test_x, test_y = (
            by_hand(model(), ids, what, layer, 2, reach)
            for ids, what in ((train, sources), (train, target), (test, sources), (test, target))
        )
        weights = torch.linalg.lstsq(x - x.mean(0), y - y.mean(0)).solution
        expected = explained_variance_ratio(test_y, (test_x - x.mean(0)) @ weights)
        assert value == pytest.approx(expected, abs=1e-5)


def test_nothing_predicts_shuffled_targets():
    """Least squares of p features on n samples without a relation loses p / (n - p) of the variance on others."""
    train, test = tokens(60), tokens(30, seed=1)
    names = ("K~shuffled", "K-1"), ("V~shuffled", "V-1+K")
    by_probe = evr(model(), train, test, *names, forms={"shuffled": shuffled(0)})
    n = 60 * 20
    for width, layers in zip((64, 128), by_probe, strict=True):
        for value in layers.values():
            assert -2 * width / (n - width) < value < 0
    plain = evr(model(), train, test, ("K", "K-1"))
    assert min(plain[0].values()) > 0.2


def test_untrained_is_the_same_shape_with_weights_that_only_the_seed_decides():
    state = torch.get_rng_state()
    first, again, other = (untrained(model(), seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    trained, drawn = ({name: (p.shape, p.dtype) for name, p in s.items()} for s in (model().state_dict(), first))
    assert trained == drawn
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


def test_what_least_squares_cannot_use():
    x, noise = torch.randn(2, 50, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    blocks = {"x": x, "twice": 2 * x, "zero": 0 * x, "y": x + noise}
    gram = Gram([(["x", "twice"], "y"), (["zero"], "y")])
    gram.accumulate(blocks.__getitem__)
    with pytest.raises(DataError, match="sources zero are zero or depend on each other at strength 1e-06"):
        gram.solve(["zero"], "y", 1e-6)
    with pytest.raises(DataError, match="sources x, twice are zero or depend .* at strength 1e-300: leave some out"):
        gram.solve(["x", "twice"], "y", 1e-300)
    with pytest.raises(DataError, match="24 tokens leave none after the first 24: use longer sequences"):
        probe_sums(model(), tokens(2), [Probe("K", "K@T-1")], skip=23)
    with pytest.raises(DataError, match="block y holds NaN"):
        gram.accumulate((blocks | {"y": math.nan * x}).__getitem__)


def test_bits_saved_and_forms():
    assert bits_saved(0) == 0 and bits_saved(0.75) == 1 and bits_saved(1) == 24 and bits_saved(-3) == -1
    x = torch.randn(2, 2, 40, 32)
    assert torch.equal(reconstructed(presets.fp16())(x, "K", 0), x.half().float())  # nothing to fit


def test_batches_and_order_of_sequences_change_nothing():
    train, test, wanted = tokens(9), tokens(4, seed=1), [("V", "V-1+K"), ("K", "K@T-1+V@T-1")]
    complete = evr(model(), train, test, *wanted, batch_size=9, strength=1e-6)
    for batch_size, order in ((1, range(9)), (4, reversed(range(9)))):
        parts = evr(model(), train[list(order)], test, *wanted, batch_size=batch_size, strength=1e-6)
        for mine, theirs in zip(complete, parts, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-6)
