"""AQUA-KV: predictors in the loop of calibration (Algorithm 1), of writing and reading caches (2 to 4), and on disk."""

import dataclasses

import pytest
import small_models
import torch
from projections import kv_sources
from strategies import TOKENS, feed, run

from vqkv import DataError, UnknownNameError, calibrate, evaluate, presets
from vqkv.codecs.learning.ridge import Ridge
from vqkv.codecs.pipeline import Codec
from vqkv.models.capture import capture

model = small_models.fixture(*small_models.CONFIGS)


@pytest.fixture(scope="module")
def fitted(llama):
    return calibrate(llama, TOKENS, presets.aqua(recent_window=4), progress=False)


def flat(x):
    return x.transpose(1, 2).flatten(2)


def heads(y, like):
    return y.unflatten(-1, (like.shape[1], like.shape[3])).transpose(1, 2)


def by_hand(compressor, keys, values):
    """Algorithms 2 and 3 as the paper writes them: reconstructed keys and values of every layer."""
    out = []
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        key_codec, value_codec = compressor.codecs[layer]
        if layer == 0:
            out.append((key_codec.decode(key_codec.encode(k)), value_codec.decode(value_codec.encode(v))))
            continue
        k_prev, v_prev = out[-1]
        k_pred = heads(compressor.predictions["key", layer].predictor(flat(k_prev)), k)
        k_rec = key_codec.decode(key_codec.encode(k - k_pred)) + k_pred
        both = torch.cat([flat(v_prev), flat(k_rec)], dim=-1)
        v_pred = heads(compressor.predictions["value", layer].predictor(both), v)
        out.append((k_rec, value_codec.decode(value_codec.encode(v - v_pred)) + v_pred))
    return out


def test_writing_and_reading_follow_algorithms_2_to_4(model):
    """A cache without RoPE in between, so that keys go in as they are stored."""
    preset = presets.aqua(presets.higgs(2), sink_tokens=2, recent_window=0, pre_rope=False)
    compressor = calibrate(model, TOKENS, preset, progress=False)
    keys, values = capture(model, TOKENS[:2], pre_rope=False)
    read = feed(compressor.new_cache(model), keys, values, (30, 1, 1, 48))
    expected = by_hand(compressor, [k[:, :, 2:] for k in keys], [v[:, :, 2:] for v in values])
    for layer, (k_rec, v_rec) in enumerate(expected):
        for role, (exact, restored) in enumerate(((keys[layer], k_rec), (values[layer], v_rec))):
            got = read[-1][layer][role]
            torch.testing.assert_close(got[:, :, 2:32], restored[:, :, :30], rtol=1e-4, atol=1e-4)
            assert torch.equal(got[:, :, :2], exact[:, :, :2].half().float())
            assert torch.equal(got[:, :, 32:], exact[:, :, 32:])


@pytest.mark.parametrize(
    ("preset", "within"),
    [(presets.vqllm(3, 16, 16), 1e-3), (presets.aqua(presets.vqllm(2, 16, 16), sink_tokens=0, recent_window=0), 2e-3)],
)
def test_in_place_equals_restoring_every_layer_by_hand(llama, preset, within):
    """In place, the model sees what is restored of x for x; hooks on the projections do the same without a cache."""
    compressor = calibrate(llama, TOKENS, preset, progress=False)
    known, handles = compressor.new_pass(), []
    for source, coders in zip(kv_sources(llama), compressor.coders, strict=True):
        for module, coder in zip((source.key_module, source.value_module), coders, strict=True):

            def through(m, a, out, source=source, coder=coder):
                return coder.through(source.heads(out, 0), known).transpose(1, 2).reshape(out.shape)

            handles.append(module.register_forward_hook(through))
    with torch.inference_mode():
        by_hand = llama(TOKENS[:2], use_cache=False).logits
    for handle in handles:
        handle.remove()
    ours = run(llama, compressor.new_cache(llama, in_place=True), TOKENS[:2], (80,))
    torch.testing.assert_close(ours, by_hand, rtol=within, atol=within)


@pytest.mark.parametrize("protocol", ["in_place", "chunked", "snapshot"])
@pytest.mark.parametrize("combine", [lambda p: presets.aqua(presets.entropy_coded(p, block=16)),
                                     lambda p: presets.entropy_coded(presets.aqua(p), block=16)])  # fmt: skip
def test_predictors_and_entropy_coding_combine_in_either_order(llama, protocol, combine):
    preset = dataclasses.replace(combine(presets.vqllm(2, 16, 16)), recent_window=0, sink_tokens=0)
    compressor = calibrate(llama, TOKENS, preset, progress=False)
    row = evaluate(llama, compressor, TOKENS[:2], protocol, chunk_size=16)
    assert 0 < row["kl_mean"] < 5 and row["bits_per_value"] < 4


def test_predictors_are_fitted_on_reconstructed_inputs(llama):
    compressor = calibrate(llama, TOKENS, presets.aqua(sink_tokens=0), batch_size=4, progress=False)
    keys, values = capture(llama, TOKENS)
    restored = by_hand(compressor, keys, values)
    ridge = Ridge()
    ridge.accumulate(flat(restored[1][0]).flatten(0, 1), flat(keys[2]).flatten(0, 1))
    weights = compressor.predictions["key", 2].predictor.weight
    torch.testing.assert_close(weights.double(), ridge.solve()[:-1], rtol=2e-3, atol=2e-3)
    on_exact = Ridge()
    on_exact.accumulate(flat(keys[1]).flatten(0, 1), flat(keys[2]).flatten(0, 1))
    assert (weights.double() - on_exact.solve()[:-1]).abs().max() > 0.01


def test_reconstruct_is_what_a_cache_reads(llama, fitted):
    keys, values = capture(llama, TOKENS[:2])
    known = fitted.new_pass()
    got = [fitted.reconstruct(layer, k, v, known) for layer, (k, v) in enumerate(zip(keys, values, strict=True))]
    for pair, expected in zip(got, by_hand(fitted, keys, values), strict=True):
        torch.testing.assert_close(pair, expected, rtol=1e-5, atol=1e-5)
    assert not known  # forgotten once the last reader has run
    with pytest.raises(DataError, match="of which nothing is known"):
        fitted.reconstruct(2, keys[2], values[2])


def test_a_history_is_decoded_once_a_step(llama, fitted, monkeypatch):
    cache = fitted.new_cache(llama)
    run(llama, cache, TOKENS[:2, :60], (60,))
    lengths, decode = [], Codec.decode
    monkeypatch.setattr(
        Codec, "decode", lambda self, p, *a, **k: (lengths.append(p.seq_len), decode(self, p, *a, **k))[1]
    )
    run(llama, cache, TOKENS[:2, 60:61], (1,))
    history, packed_now = 60 - 4 - 4, 1
    # every layer's keys and values once; what was packed now is decoded where a later place reads it (all but the last)
    assert sorted(lengths) == [packed_now] * 5 + [history] * 6
    assert cache.batch.groups[0].step is None


def test_bytes_are_counted_as_side_information(fitted):
    width, layers = 2 * 32, 2
    assert fitted.predictor_bytes == 2 * layers * ((width + 1) * width + (2 * width + 1) * width)
    grids = sum(codec.side_bytes for pair in fitted.codecs for codec in pair)
    assert fitted.side_bytes == fitted.predictor_bytes + grids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"key_from": "V"}, "of the same layer only a value can read the key"),
        ({"key_from": "K"}, "of the same layer only a value can read the key"),
        ({"value_from": "V"}, "of the same layer only a value can read the key"),
        ({"value_from": "V-1+Q"}, "'V-1[+]Q' of a value"),
        ({"value_from": "V-1+V-1"}, "'V-1[+]V-1' of a value"),
        ({"value_from": ""}, "'' of a value"),
        ({"backbone": "zip"}, "unknown preset 'zip'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises((DataError, UnknownNameError), match=message):
        presets.aqua(**arguments)


def test_sequences_of_sinks_alone_are_refused(llama):
    with pytest.raises(DataError, match="4 tokens a sequence, of which 4 are sinks"):
        calibrate(llama, TOKENS[:, :4], presets.aqua(), progress=False)


def test_autocast_changes_neither_calibration_nor_what_is_read_back(llama):
    preset = presets.aqua(presets.vqllm(2, 16, 16), recent_window=0, sink_tokens=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys, values = capture(llama, TOKENS[:1])
    compressor = calibrate(llama, TOKENS, preset, progress=False)
    known, inside = [compressor.new_pass() for _ in range(2)], []
    for layer, pair in enumerate(zip(keys, values, strict=True)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside.append(compressor.reconstruct(layer, *pair, known[0]))
        assert all(map(torch.equal, inside[-1], compressor.reconstruct(layer, *pair, known[1])))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = compressor.new_cache(llama)
        assert run(llama, cache, TOKENS[:1], (40, 1, 39)).isfinite().all()


@pytest.mark.parametrize("kind", ["linear", "mlp", "gptq"])
def test_one_token_at_a_time_reads_back_what_was_stored(tmp_path, kind):
    """A batch of one, whose matrix products are rounded otherwise for one token than for all of them at once."""
    model = small_models.load("gpt2", tmp_path)
    tokens = torch.randint(1, 4096, (24, 128), generator=torch.Generator().manual_seed(5))
    preset = presets.aqua(predictor=kind, recent_window=0, sink_tokens=0)
    compressor = calibrate(model, tokens, preset, progress=False)
    keys, values = capture(model, TOKENS[:1, :20])
    whole, known, single = compressor.new_pass(), [compressor.new_pass() for _ in range(20)], []
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        stored = [compressor.reconstruct(layer, k[:, :, [i]], v[:, :, [i]], known[i]) for i in range(20)]
        single.append([torch.cat(role, dim=2) for role in zip(*stored, strict=True)])
        together = compressor.reconstruct(layer, k, v, whole)
        for a, b in zip(single[-1], together, strict=True):
            assert (a - b).abs().median() < 1e-5 * b.abs().max()  # a code may fall the other way, few do


def test_an_mlp_wants_samples(llama):
    with pytest.raises(DataError, match="468 samples for an MLP of 64 input features"):
        calibrate(llama, TOKENS[:, :82], presets.aqua(predictor="mlp", sink_tokens=2), progress=False)


def test_in_the_chunked_protocol_prediction_lowers_the_error(llama, fitted):
    """On a random checkpoint, whose later layers are nearly the first one's: a residual stream hardly changes."""
    plain = calibrate(llama, TOKENS, presets.higgs(2, recent_window=4), progress=False)
    rows = [evaluate(llama, compressor, TOKENS, chunk_size=16) for compressor in (plain, fitted)]
    assert rows[1]["key_mse"] < 0.7 * rows[0]["key_mse"] and rows[1]["value_mse"] < 0.7 * rows[0]["value_mse"]
    assert rows[1]["bits_per_value"] == pytest.approx(rows[0]["bits_per_value"] + 2 / 3)  # 4 bits in one layer of three
