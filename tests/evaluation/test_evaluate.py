"""Metrics, protocols and the harness around them."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap

import vqkv
from vqkv import DataError, UnknownNameError, evaluate, presets
from vqkv.cache.eviction import H2O
from vqkv.evaluation.evaluate import bootstrap_interval, evaluate_restored
from vqkv.evaluation.exact import ExactPass
from vqkv.models.capture import capture
from vqkv.models.metrics import token_kl
from vqkv.study import metrics
from vqkv.study.experiments.phenomena import noise_floor


@pytest.fixture(scope="module")
def tokens(mini):
    return vqkv.load_corpus("python-stdlib", mini[1], "test", seq_len=64, num_seqs=3)


@pytest.fixture(scope="module")
def one_bit(mini):
    train = vqkv.load_corpus("python-stdlib", mini[1], "train", seq_len=64, num_seqs=16)
    preset = presets.vqllm(num_quantizers=4, codebook_size=256, group_size=32)
    return vqkv.calibrate(mini[0], train, preset, progress=False)


@pytest.mark.parametrize("protocol", ["in_place", "chunked", "snapshot"])
def test_exact_storage_scores_as_the_model_itself(mini, tokens, protocol):
    exact = vqkv.calibrate(mini[0], tokens, presets.fp16(), progress=False)
    row = evaluate(mini[0], exact, tokens, protocol)
    assert row["kl_mean"] < 1e-5 and row["top1"] > 0.98 and row["key_mse"] < 1e-6
    assert row["ppl"] == pytest.approx(row["ppl_exact"], rel=1e-3)
    assert row["bits_per_value"] == 16 and row["ratio"] == 1


@pytest.mark.parametrize("protocol", ["in_place", "chunked", "snapshot"])
def test_canary_a_coarse_cache_is_seen_by_every_protocol(mini, tokens, one_bit, protocol):
    """If prefill read unquantised states, perplexity would equal fp16's whatever the bits."""
    row = evaluate(mini[0], one_bit, tokens, protocol)
    assert row["kl_mean"] > 1e-3 and abs(math.log(row["ppl"] / row["ppl_exact"])) > 1e-4
    assert row["kl_worst"] >= row["kl_mean"] and row["attention_mse"] > 1e-3
    assert row["bits_per_value"] == 4 * 8 / 32 + 16 / 64


@pytest.mark.parametrize("protocol", ["in_place", "chunked", "snapshot"])
def test_what_the_model_itself_says_is_computed_once(mini, tokens, one_bit, protocol):
    exact, expected = ExactPass(mini[0]), evaluate(mini[0], one_bit, tokens, protocol)
    for _ in range(2):
        assert evaluate(mini[0], one_bit, tokens, protocol, exact=exact) == expected
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
    with pytest.raises(DataError, match="of another model"):
        evaluate(vqkv.load_model("vqkv/llama-mini")[0], one_bit, tokens, exact=exact)


def test_keys_and_values_are_captured_once(mini, tokens, monkeypatch):
    calls, pre_rope = [], True
    monkeypatch.setattr(
        "vqkv.evaluation.exact.capture", lambda *args, **kw: calls.append(args) or vqkv.capture(*args, **kw)
    )
    exact, forgetful = ExactPass(mini[0]), ExactPass(mini[0], most_bytes=0)
    expected = vqkv.capture(mini[0], tokens, pre_rope=pre_rope)
    for _ in range(2):
        for role, wanted in zip(exact.keys_and_values(tokens, pre_rope), expected, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(role, wanted, strict=True))
    assert len(calls) == 1
    other = exact.keys_and_values(tokens, not pre_rope)[0]
    assert len(calls) == 2 and not torch.equal(other[0], expected[0][0])
    for _ in range(2):
        forgetful.keys_and_values(tokens, pre_rope)
    assert len(calls) == 4


def test_only_tokens_that_read_something_packed_are_scored(mini, tokens):
    """Blocks of 16 in pieces of 8: the first two pieces read nothing packed. Each later one sees what waits for its
    block, and its own piece up to itself."""
    compressor = vqkv.calibrate(mini[0], tokens, presets.kivi(2, 16), progress=False)
    settings = dataclasses.replace(compressor.settings, recent_window=0, flush_block=16)
    compressor = vqkv.Compressor(compressor.name, compressor.codecs, settings, compressor.model)
    row = evaluate(mini[0], compressor, tokens, chunk_size=8)
    held = [0, 8, 0, 8, 0, 8]  # exact tokens stored before the pieces from token 16 on
    seen = [stored + i for stored in held for i in range(1, 9)][:-1]  # the last token has no successor to predict
    assert row["scored_tokens"] == 64 - 16 - 1
    assert row["exact_neighbours"] == pytest.approx(sum(seen) / len(seen))
    exact = copy.deepcopy(
        mini[0]
    ).double()  # in fp32 a code of two bits may differ in a batch, by the order of its sums
    together = evaluate(exact, compressor, tokens, chunk_size=8)["kl_mean"]
    alone = [evaluate(exact, compressor, tokens[i : i + 1], chunk_size=8)["kl_mean"] for i in range(3)]
    assert sum(alone) / 3 == pytest.approx(together, rel=1e-4)
    in_place = evaluate(mini[0], compressor, tokens, "in_place")
    assert in_place["exact_neighbours"] == 0 and in_place["scored_tokens"] == 63


def test_an_fp16_cache_lies_at_its_own_floor(mini, tokens, one_bit):
    fp16 = vqkv.calibrate(mini[0], tokens, presets.fp16(), progress=False)
    for protocol in ("in_place", "chunked", "snapshot"):
        row = evaluate(mini[0], fp16, tokens, protocol, reconstruction=False)
        assert 0.2 < row["kl_mean"] / row["kl_floor"] < 5
        assert evaluate(mini[0], one_bit, tokens, protocol, reconstruction=False)["kl_floor"] < 1e-2 * row["top1"]
    floor = noise_floor(ExactPass(mini[0]), tokens)
    assert floor["fp32, read in pieces"] < floor["fp16"] < floor["bf16"] < 1e-3


def test_bootstrap_interval_holds_the_mean_and_narrows_with_more_sequences():
    x = torch.arange(400.0) % 7
    (low, high), (few_low, few_high) = bootstrap_interval(x), bootstrap_interval(x[:20])
    half = 1.96 * x.std(correction=0).item() / 20
    assert low == pytest.approx(x.mean().item() - half, abs=0.03)
    assert high == pytest.approx(x.mean().item() + half, abs=0.03)
    assert few_high - few_low > 3 * (high - low)
    assert all(math.isnan(end) for end in bootstrap_interval(x[:1]))


@pytest.mark.parametrize("count", [2, 9, 64])
def test_bootstrap_interval_is_scipys(count):
    x = torch.rand(count, generator=torch.Generator().manual_seed(count)).exp()
    made = bootstrap((x.double().numpy(),), np.mean, n_resamples=2000, method="percentile", rng=0).confidence_interval
    assert bootstrap_interval(x) == pytest.approx((made.low, made.high), rel=1e-12)  # which rounds in another order


def test_unknown_protocol_and_tokens_too_many(mini, one_bit, tokens):
    with pytest.raises(UnknownNameError, match="Did you mean 'chunked'"):
        evaluate(mini[0], one_bit, tokens, "chunkd")
    with pytest.raises(DataError, match="windows of 1025 tokens, but the model has 1024 positions"):
        evaluate(mini[0], one_bit, torch.ones(1, 1025, dtype=torch.int64))
    with pytest.raises(DataError, match="calibrate"):
        evaluate(mini[0], presets.vqllm(), tokens)


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
    stored = [layer.decoded() for layer in cache.layers]
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
        with pytest.raises(DataError, match="no packed token was read"):
            evaluate(mini[0], system, tokens, protocol, reconstruction=False)
    settings = dataclasses.replace(compressor.settings, recent_window=8, flush_block=1)
    fewer = vqkv.Compressor(compressor.name, compressor.codecs, settings, compressor.model)
    assert evaluate(mini[0], fewer, tokens, protocol, chunk_size=16)["kl_mean"] > 0
    assert evaluate(mini[0], compressor, tokens, "in_place")["kl_mean"] > 0  # no window there


def test_in_place_with_less_than_a_block_reads_nothing_packed(mini, tokens):
    compressor = vqkv.calibrate(mini[0], tokens, presets.kivi(2, 64), progress=False)
    with pytest.raises(DataError, match="no packed token was read"):
        evaluate(mini[0], compressor, tokens[:, :60], "in_place", reconstruction=False)


def test_packed_tokens_that_nothing_is_scored_behind_are_not_enough(mini, tokens):
    compressor = vqkv.calibrate(mini[0], tokens, presets.kivi(4, 16, 0), progress=False)
    early = torch.zeros(3, 40, dtype=torch.bool).index_fill(1, torch.tensor([4]), True)
    how = {"chunk_size": 16, "batch_size": 1, "reconstruction": False}
    for rows, answers in ((tokens[:, :17], None), (tokens[:, :40], early)):
        with pytest.raises(DataError, match="nothing is left to score"):
            evaluate(mini[0], compressor, rows, answers=answers, **how)
    early[1, 30] = True  # in one batch of three
    assert evaluate(mini[0], compressor, tokens[:, :40], answers=early, **how)["recall"] in (0, 1)


@pytest.mark.parametrize("preset", [presets.kivi(2), presets.kvquant(3), presets.vqq(0.2), presets.higgs(3)])
def test_every_kind_of_codec_goes_through_every_protocol(mini, preset):
    """Also where the tokens are no multiple of a block: what is left of it stays exact in the window."""
    model, tokenizer = mini
    train = vqkv.load_corpus("python-stdlib", tokenizer, "train", seq_len=150, num_seqs=8)
    test = vqkv.load_corpus("python-stdlib", tokenizer, "test", seq_len=141, num_seqs=2)
    compressor = vqkv.calibrate(model, train, dataclasses.replace(preset, recent_window=0), progress=False)
    for protocol in ("in_place", "chunked", "snapshot"):
        row = evaluate(model, compressor, test, protocol)
        assert 0 < row["kl_mean"] < 1 and 0 < row["key_mse"] < 1 and row["ratio"] > 1
