"""Metrics, protocols and the harness around them."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap
from strategies import with_settings

import vqkv
from vqkv import DataError, UnknownNameError, evaluate, presets
from vqkv.evaluation.evaluate import PROTOCOLS, bootstrap_interval, evaluate_restored
from vqkv.evaluation.exact import ExactPass
from vqkv.models.capture import capture
from vqkv.models.metrics import token_kl
from vqkv.study import metrics
from vqkv.study.eviction import H2O
from vqkv.study.experiments.phenomena import noise_floor


@pytest.fixture(scope="module")
def tokens(mini):
    return vqkv.load_corpus("python-stdlib", mini[1], "test", seq_len=64, num_seqs=3)


@pytest.fixture(scope="module")
def one_bit(mini):
    train = vqkv.load_corpus("python-stdlib", mini[1], "train", seq_len=64, num_seqs=16)
    preset = presets.vqllm(num_quantizers=4, codebook_size=256, group_size=32)
    return vqkv.calibrate(mini[0], train, preset, progress=False)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_exact_storage_scores_as_the_model_itself_and_lies_at_its_floor(mini, tokens, protocol):
    fp16 = vqkv.calibrate(mini[0], tokens, presets.fp16(), progress=False)
    row = evaluate(mini[0], fp16, tokens, protocol)
    assert row["kl_mean"] < 1e-5 and row["top1"] > 0.98 and row["key_mse"] < 1e-6
    assert row["ppl"] == pytest.approx(row["ppl_exact"], rel=1e-3)
    assert row["bits_per_value"] == 16 and row["ratio"] == 1
    assert 0.2 < row["kl_mean"] / row["kl_floor"] < 5


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_canary_a_coarse_cache_is_seen_by_every_protocol(mini, tokens, one_bit, protocol):
    """If prefill read uncompressed states, perplexity would equal fp16's whatever the bits. What the model itself says
    is computed once."""
    exact, row = ExactPass(mini[0]), evaluate(mini[0], one_bit, tokens, protocol)
    assert row["kl_mean"] > 1e-3 and abs(math.log(row["ppl"] / row["ppl_exact"])) > 1e-4
    assert row["kl_worst"] >= row["kl_mean"] and row["attention_mse"] > 1e-3 and row["kl_floor"] < 1e-2 * row["top1"]
    assert row["bits_per_value"] == 4 * 8 / 32 + 16 / 64
    assert evaluate(mini[0], one_bit, tokens, protocol, exact=exact) == row
    with pytest.raises(DataError, match="of another model"):
        evaluate(mini[0], one_bit, tokens, protocol, exact=ExactPass(copy.deepcopy(mini[0])))
    passes = []
    handle = mini[0].register_forward_hook(lambda _, __, out: passes.extend([1] * (out.logits.shape[1] == 64)))
    try:
        exact(tokens)
        assert not passes and len(exact(tokens[:2])[0]) == 2 and len(passes) == 1
        exact.most_bytes = 1  # nothing has room
        exact(tokens[:1])
        exact(tokens)
        assert len(passes) == 3
    finally:
        handle.remove()


def test_only_tokens_that_read_something_packed_are_scored(mini, tokens):
    """Blocks of 16 in pieces of 8: the first two pieces read nothing packed. Each later one sees what waits for its
    block, and its own piece up to itself."""
    compressor = vqkv.calibrate(mini[0], tokens, presets.kivi(2, 16), progress=False)
    compressor = with_settings(compressor, recent_window=0, block_tokens=16)
    row = evaluate(mini[0], compressor, tokens, chunk_size=8)
    held = [0, 8, 0, 8, 0, 8]  # exact tokens stored before the pieces from token 16 on
    seen = [stored + i for stored in held for i in range(1, 9)][:-1]  # the last token has no successor to predict
    assert row["scored_tokens"] == 64 - 16 - 1
    assert row["exact_neighbours"] == pytest.approx(sum(seen) / len(seen))
    exact = copy.deepcopy(mini[0]).double()  # in fp32 a code may differ in a batch, by the order of its sums
    together = evaluate(exact, compressor, tokens, chunk_size=8)["kl_mean"]
    alone = [evaluate(exact, compressor, tokens[i : i + 1], chunk_size=8)["kl_mean"] for i in range(3)]
    assert sum(alone) / 3 == pytest.approx(together, rel=1e-4)
    in_place = evaluate(mini[0], compressor, tokens, "in_place")
    assert in_place["exact_neighbours"] == 0 and in_place["scored_tokens"] == 63


def test_noise_floors_grow_with_rounding(mini, tokens):
    floor = noise_floor(ExactPass(mini[0]), tokens)
    assert floor["fp32, read in pieces"] < floor["fp16"] < floor["bf16"] < 1e-3


@pytest.mark.parametrize("count", [2, 9, 64])
def test_bootstrap_interval_is_scipys(count):
    x = torch.rand(count, generator=torch.Generator().manual_seed(count)).exp()
    made = bootstrap((x.double().numpy(),), np.mean, n_resamples=2000, method="percentile", rng=0).confidence_interval
    assert bootstrap_interval(x) == pytest.approx((made.low, made.high), rel=1e-12)  # which rounds in another order
    assert all(math.isnan(end) for end in bootstrap_interval(x[:1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"protocol": "chunkd"}, "Did you mean 'chunked'"),
        ({"chunk_size": 64}, "chunk_size 64 .* from 1 to 63"),  # would read no packed history and look perfect
        ({"batch_size": 0}, "batch_size 0"),
        ({"protocol": "snapshot", "prompt_len": 63}, "prompt_len 63"),
        ({"answers": torch.zeros(3, 64, dtype=torch.bool)}, "nothing is left to score"),
        ({"tokens": torch.ones(1, 64, dtype=torch.int32)}, "int64"),
        ({"tokens": torch.full((1, 64), 10**6)}, "the model knows 0 to"),
        ({"tokens": torch.ones(1, 1025, dtype=torch.int64)}, "1025 tokens, but the model has 1024 positions"),
        ({"compressor": presets.vqllm()}, "calibrate"),
    ],
)
def test_evaluate_refuses_what_it_cannot_measure(mini, one_bit, tokens, arguments, message):
    with pytest.raises((DataError, UnknownNameError), match=message):
        evaluate(mini[0], **{"compressor": one_bit, "tokens": tokens} | arguments)


def test_metrics_against_numbers_worked_out_by_hand():
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
    kl = token_kl(p.log().view(1, 1, 2), q.log().view(1, 1, 2))
    assert kl.item() == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), rel=1e-5)
    x = torch.tensor([3.0, 4.0])
    assert metrics.relative_mse(x, torch.tensor([3.0, 0.0])) == pytest.approx(16 / 25)
    y = torch.tensor([[1.0], [3.0]])
    assert metrics.explained_variance_ratio(y, y - 5) == pytest.approx(1.0)  # a constant offset explains all variance
    assert metrics.explained_variance_ratio(y, torch.zeros(2, 1)) == pytest.approx(0.0)
    assert metrics.code_perplexity(torch.tensor([4, 4, 0, 0])).item() == pytest.approx(2.0)


def test_going_on_from_a_restored_cache(mini, tokens, one_bit):
    """The exact cache restores to the exact model; a coarse one scores as the snapshot protocol does."""
    model = mini[0]
    keys, values = capture(model, tokens[:, :48], pre_rope=False)
    exact = ExactPass(model)
    assert evaluate_restored(exact, tokens, keys, values)["kl_mean"] < 1e-6
    cache = one_bit.new_cache(model)
    with torch.inference_mode():
        model(tokens[:, :48], past_key_values=cache)
    cache.expect(None, None)
    stored = [cache.update(*(x[:, :, :0] for x in pair), i) for i, pair in enumerate(zip(keys, values, strict=True))]
    restored = evaluate_restored(exact, tokens, *zip(*stored, strict=True))
    row = evaluate(model, one_bit, tokens, "snapshot", prompt_len=48, step_size=16, per_sequence=True)
    assert restored["kl_mean"] == pytest.approx(row["kl_mean"], rel=1e-4)  # in one step, all it reads is the prompt
    assert len(row["kl_each"]) == 3 and sum(row["kl_each"]) / 3 == pytest.approx(row["kl_mean"])


@pytest.mark.parametrize("protocol", ["chunked", "snapshot"])
@pytest.mark.parametrize("preset", [presets.quanto(), presets.vqllm(1, 8, 32)], ids=lambda preset: preset.name)
def test_quality_that_no_packed_token_had_a_part_in_is_not_reported(mini, tokens, preset, protocol):
    """64 tokens wait for 128, or all lie in the window: KL 0 would be the model against itself."""
    compressor = vqkv.calibrate(mini[0], tokens, dataclasses.replace(preset, recent_window=64), progress=False)
    for system in (compressor, H2O(compressor, 0.5, 0.1)):
        with pytest.raises(DataError, match="nothing is left to score"):
            evaluate(mini[0], system, tokens, protocol, step_size=16, reconstruction=False)
    fewer = with_settings(compressor, recent_window=8, block_tokens=1)
    assert evaluate(mini[0], fewer, tokens, protocol, chunk_size=16, step_size=16)["kl_mean"] > 0
    assert evaluate(mini[0], compressor, tokens, "in_place")["kl_mean"] > 0  # no window there
    kivi = vqkv.calibrate(mini[0], tokens, presets.kivi(2, 64), progress=False)
    with pytest.raises(DataError, match="nothing is left to score"):  # less than a block
        evaluate(mini[0], kivi, tokens[:, :60], "in_place", reconstruction=False)


def test_layers_that_are_stored_together_are_scored_without_errors_by_layer(mini, tokens):
    model, tokenizer = mini
    text = vqkv.load_corpus("python-stdlib", tokenizer, seq_len=256, num_seqs=8)
    joint = vqkv.calibrate(model, text, presets.kvtc(2.0, recent_window=0), progress=False)
    row = evaluate(model, joint, text[:1])
    assert row["kl_mean"] > 0 and "key_mse" not in row


def test_packed_tokens_that_nothing_is_scored_behind_are_not_enough(mini, tokens):
    compressor = vqkv.calibrate(mini[0], tokens, presets.kivi(4, 16, recent_window=0), progress=False)
    early = torch.zeros(3, 40, dtype=torch.bool).index_fill(1, torch.tensor([4]), True)
    how = {"chunk_size": 16, "batch_size": 1, "reconstruction": False}
    for rows, answers in ((tokens[:, :17], None), (tokens[:, :40], early)):
        with pytest.raises(DataError, match="nothing is left to score"):
            evaluate(mini[0], compressor, rows, answers=answers, **how)
    early[1, 30] = True  # in one batch of three
    assert evaluate(mini[0], compressor, tokens[:, :40], answers=early, **how)["recall"] in (0, 1)
