"""AQUA-KV: predictors in calibration (Algorithm 1), in writing and reading caches (2 to 4); and KVSharer."""

from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
import small_models
import torch
from projections import changed
from strategies import TOKENS, feed, run

from vqkv import DataError, calibrate, evaluate, presets
from vqkv.codecs.learning.ridge import Ridge
from vqkv.codecs.predictive import ROLES, side_by_side
from vqkv.models.capture import capture

model = small_models.fixture("llama", "gpt2", "qwen3", "glm")


def by_hand(compressor, keys, values):
    """Algorithms 2 and 3 as the paper writes them: reconstructed keys and values of every layer."""
    out = []

    def predicted(role, layer, x, *sources):
        y = compressor.predictions[role, layer].predictor(torch.cat([*map(side_by_side, sources)], dim=-1))
        return y.unflatten(-1, (x.shape[1], x.shape[3])).transpose(1, 2)

    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        key_codec, value_codec = compressor.codecs[layer]
        if layer == 0:
            out.append((key_codec.decode(key_codec.encode(k)), value_codec.decode(value_codec.encode(v))))
            continue
        k_pred = predicted("key", layer, k, out[-1][0])
        k_rec = key_codec.decode(key_codec.encode(k - k_pred)) + k_pred
        v_pred = predicted("value", layer, v, out[-1][1], k_rec)
        out.append((k_rec, value_codec.decode(value_codec.encode(v - v_pred)) + v_pred))
    return out


def test_writing_and_reading_follow_algorithms_2_to_4(model):
    """A cache without RoPE in between, so that keys go in as they are stored."""
    preset = presets.aqua(presets.higgs(2), sink_tokens=2, recent_window=0, pre_rope=False)
    compressor = calibrate(model, TOKENS, preset, progress=False)
    keys, values = capture(model, TOKENS[:2], pre_rope=False)
    read = feed(compressor.new_cache(model), keys, values, (30, 1, 1, 48))
    packed, reconstructions = [[x[:, :, 2:] for x in role] for role in (keys, values)], compressor.new_pass()
    for layer, expected in enumerate(by_hand(compressor, *packed)):
        again = compressor.reconstruct(layer, packed[0][layer], packed[1][layer], reconstructions)
        torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)
        for exact, restored, got in zip((keys[layer], values[layer]), expected, read[-1][layer], strict=True):
            torch.testing.assert_close(got[:, :, 2:32], restored[:, :, :30], rtol=1e-4, atol=1e-4)
            assert torch.equal(got[:, :, :2], exact[:, :, :2].half().float())
            assert torch.equal(got[:, :, 32:], exact[:, :, 32:])
    assert not reconstructions  # forgotten once the last reader has run


@pytest.mark.parametrize(
    ("preset", "within"),
    [(presets.vqllm(3, 16, 16), 1e-3), (presets.aqua(presets.vqllm(2, 16, 16), sink_tokens=0, recent_window=0), 2e-3)],
)
def test_in_place_equals_restoring_every_layer_by_hand(llama, preset, within):
    """In place, the model sees what is restored of x for x; hooks on the projections do the same without a cache."""
    compressor = calibrate(llama, TOKENS, preset, progress=False)
    reconstructions = compressor.new_pass()
    with torch.inference_mode(), ExitStack() as stack:
        for layer, coders in enumerate(compressor.coders):
            for role, coder in zip(ROLES, coders, strict=True):
                restored = partial(coder.through, reconstructions=reconstructions)
                stack.enter_context(changed(llama, (role, layer), restored))
        by_hand = llama(TOKENS[:2], use_cache=False).logits
    ours = run(llama, compressor.new_cache(llama, in_place=True), TOKENS[:2], (80,))
    torch.testing.assert_close(ours, by_hand, rtol=within, atol=within)


def test_predictors_are_fitted_on_reconstructed_inputs(llama):
    compressor = calibrate(llama, TOKENS, presets.aqua(sink_tokens=0), batch_size=4, progress=False)
    keys, values = capture(llama, TOKENS)
    weights, solved = compressor.predictions["key", 2].predictor.weight.double(), []
    for source in (by_hand(compressor, keys, values)[1][0], keys[1]):
        ridge = Ridge()
        ridge.accumulate(side_by_side(source).flatten(0, 1), side_by_side(keys[2]).flatten(0, 1))
        solved.append(ridge.solve()[:-1])
    torch.testing.assert_close(weights, solved[0], rtol=2e-3, atol=2e-3)
    assert (weights - solved[1]).abs().max() > 0.01


def test_kvsharer_shares_whole_layers(llama):
    compressor = calibrate(llama, TOKENS, presets.kvsharer(threshold=-1.0), progress=False)
    ((_, later), (_, again)) = compressor.predictions
    (source,) = compressor.predictions["key", later].sources
    assert later == again and source[1] < later
    row = evaluate(llama, compressor, TOKENS, chunk_size=16)
    assert row["bits_per_value"] == pytest.approx(16 * 2 / 3) and row["side_bytes"] == 0
    read = feed(compressor.new_cache(llama), *capture(llama, TOKENS[:2]), (79, 1))
    assert torch.equal(read[1][later][1][:, :, :-1], read[1][source[1]][1][:, :, :-1])


def test_pairs_are_taken_least_alike_first_and_only_above_the_threshold():
    def similarity(plan):
        return 0.2 if plan[1]["key"].predictor is not None else 0.9

    apart = torch.tensor([[0.0, 8, 4, 9], [0, 0, 6, 7], [0, 0, 0, 5], [0, 0, 0, 0]])
    trial = SimpleNamespace(num_layers=4, distances=apart.clone, similarity=similarity)

    def sources(pairs, threshold):
        plan = presets.kvsharer(pairs, threshold).plan.arrange(presets.fp16(), trial)
        return {i: roles["value"].sources[0][1] for i, roles in enumerate(plan) if roles["value"].sources}

    assert sources(1, 0.5) == {3: 0} and sources(2, 0.1) == {3: 0, 1: 0}
    assert sources(2, 0.5) == {3: 0, 2: 1}  # 1 costs too much, 3 is already shared
    with pytest.raises(DataError, match="only 2 of 3 pairs"):
        sources(3, 0.5)
