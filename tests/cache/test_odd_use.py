"""Interrupted and odd use of caches of every preset, through the library and the command line."""

import copy
from functools import cache

import pytest
import small_models
import torch
from preset_zoo import EVERY, PREDICTED
from typer.testing import CliRunner

from vqkv import Compressor, DataError, calibrate, evaluate, load_model
from vqkv.cache.eviction import H2O
from vqkv.cli import app

TOKENS = torch.randint(1, 4096, (2, 96), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(str(small_models.make("llama", tmp_path_factory.mktemp("llama"))))[0]


@cache
def compressor_of(model, name):
    return calibrate(model, TOKENS, (EVERY | PREDICTED)[name], progress=False)


def feed(model, cache, tokens, *lengths):
    with torch.inference_mode():
        return torch.cat([model(x, past_key_values=cache).logits for x in tokens.split(lengths, dim=1)], dim=1)


@pytest.mark.parametrize("name", EVERY | PREDICTED)
def test_a_cache_can_be_saved_reset_cropped_and_reordered(model, name, tmp_path):
    compressor, tokens = compressor_of(model, name), TOKENS[:2, :60]
    cache = compressor.new_cache(model)
    first = feed(model, cache, tokens, 40, 1, 1, 18)
    compressor.save_pretrained(tmp_path)
    assert torch.equal(feed(model, Compressor.from_pretrained(tmp_path).new_cache(model), tokens, 40, 1, 1, 18), first)
    swapped, more = copy.deepcopy(cache), TOKENS[:2, 60:65]
    swapped.reorder_cache(torch.tensor([1, 0]))
    one = copy.deepcopy(cache)
    one.batch_select_indices(torch.tensor([False, True]))
    expected = feed(model, copy.deepcopy(cache), more, 5)
    torch.testing.assert_close(feed(model, swapped, more.flip(0), 5).flip(0), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(feed(model, one, more[1:], 5), expected[1:], rtol=1e-3, atol=1e-3)
    for length in (37, 16, 3, 0):
        cache.crop(length - cache.get_seq_length())
        held = {sum(store.parts) for group in cache.batch.groups for store in group.all_stores}
        assert held == ({length} if length else set()) and cache.get_seq_length() == length
        if length == 37:
            assert feed(model, copy.deepcopy(cache), tokens[:, 37:], 23).isfinite().all()
    assert torch.equal(feed(model, cache, tokens, 40, 1, 1, 18), first)
    cache.reset()
    assert cache.report().cache_bytes == 0 and cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["kvquant", "kivi+ans", "aqua-kivi"])
def test_generate_is_the_greedy_loop_and_beams_do_not_mix_sequences(model, name):
    compressor, prompt = compressor_of(model, name), TOKENS[:2, :40]
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    out, cache, step = prompt, compressor.new_cache(model), prompt
    for _ in range(6):
        step = feed(model, cache, step, step.shape[1])[:, -1:].argmax(-1)
        out = torch.cat([out, step], dim=1)
    assert torch.equal(model.generate(prompt, past_key_values=compressor.new_cache(model), **settings), out)
    both, alone = (
        model.generate(x, past_key_values=compressor.new_cache(model), num_beams=2, **settings)
        for x in (prompt, prompt[:1])
    )
    assert torch.equal(both[:1], alone)


def test_eviction_names_what_it_cannot_do(model):
    blocks = H2O(compressor_of(model, "kivi"), streaming=True)
    with pytest.raises(DataError, match="packs blocks of 16 tokens"):
        blocks.new_cache(model)
    cache = H2O(compressor_of(model, "vqllm"), 0.5, streaming=True).new_cache(model)
    first = feed(model, cache, TOKENS[:2, :60], 50, 10)
    with pytest.raises(DataError, match="cannot take tokens back"):
        cache.crop(-3)
    cache.reset()
    assert cache.report().cache_bytes == 0 and torch.equal(feed(model, cache, TOKENS[:2, :60], 50, 10), first)


def test_a_failure_between_layers_is_noticed(model, monkeypatch):
    cache = compressor_of(model, "vqllm").new_cache(model)
    feed(model, cache, TOKENS, 96)
    monkeypatch.setattr(cache.layers[1].stores[0], "write", lambda *a: (_ for _ in ()).throw(DataError("no room")))
    with pytest.raises(DataError, match="no room"):
        feed(model, cache, TOKENS[:, :5], 5)
    monkeypatch.undo()
    with pytest.raises(DataError, match="failed half-way"):
        feed(model, cache, TOKENS[:, :5], 5)
    cache.reset()
    assert feed(model, cache, TOKENS, 96).isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kivi", "-p", "bits=16"], "bits 16 must be"),
        (["kivi"], "block of 128 tokens"),
        (["vqq", "-p", "threshold=.nan"], "threshold nan"),
        (["vqq", "-p", "threshold="], "must be float"),
        (["vqllm+ans"], "unknown preset 'vqllm+ans'"),
    ],
)
def test_the_command_line_names_bad_arguments(model, tmp_path, arguments, message):
    base = ["calibrate", model.config._name_or_path, str(tmp_path / "c"), "--num-seqs", "4", "--seq-len", "64"]
    result = CliRunner().invoke(app, [*base, "--preset", *arguments])
    assert result.exit_code == 2 and not (tmp_path / "c").exists()
    assert message in result.output


@pytest.mark.parametrize("settings", [{"step_size": 0}, {"step_size": 1.5}, {"prompt_len": 95}, {"prompt_len": 0}])
def test_evaluate_refuses_impossible_steps(model, settings):
    with pytest.raises(DataError, match=next(iter(settings))):
        evaluate(model, compressor_of(model, "vqllm"), TOKENS, "snapshot", **settings)
