"""Stored keys and values are served to the model that made them, weight for weight, and to no other."""

import copy

import pytest
import torch
from adapters import adapt, switch
from preset_zoo import EVERY
from test_prompts import TOKENS, feed, read

from vqkv import CompressedCache, DataError, FormatError, calibrate
from vqkv.cache.prompts import PromptCache
from vqkv.models.identity import identity


@pytest.fixture(scope="module")
def kivi(llama):
    return calibrate(llama, TOKENS, EVERY["kivi"], progress=False)


@torch.no_grad()
def add(model):
    model.model.layers[0].mlp.up_proj.weight[3, 5] += 0.25


def write_data(model):
    model.model.layers[0].mlp.up_proj.weight.data *= 1.5


def load_weights(model):
    model.load_state_dict({name: 1.01 * x for name, x in model.state_dict().items()})


def new_module(model):
    model.model.layers[0].mlp.up_proj = copy.deepcopy(model.model.layers[0].mlp.up_proj)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 0.25


def turn(model):
    model.model.rotary_emb.inv_freq *= 0.5


def infer(model):
    with torch.inference_mode():
        torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.weight)


def key_projection(model):
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.5)


@pytest.mark.parametrize("change", [add, write_data, load_weights, new_module, turn, infer, key_projection])
def test_a_model_changed_in_place_is_another_and_its_prompts_stay(llama, kivi, tmp_path, change):
    model = copy.deepcopy(llama)
    known, before = PromptCache(tmp_path, kivi, model), identity(model)
    cache = read(model, kivi, TOKENS[0])
    cache.save(tmp_path / "cache")
    known.save(TOKENS[0], cache)
    if change is infer:
        with torch.inference_mode():  # weights without version counters
            model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(64, 48), requires_grad=False)
        assert identity(model) == identity(model) != before
        before = identity(model)
    change(model)
    assert identity(model) != before and known.find(TOKENS[0]) == (None, 0)
    with pytest.raises(FormatError, match="weights|fitted to"):
        CompressedCache.load(tmp_path / "cache", kivi, model)
    with pytest.raises(DataError, match="changed since"):
        known.save(TOKENS[0], cache)
    assert PromptCache(tmp_path, kivi, llama).find(TOKENS[0])[1] == 95


@pytest.mark.parametrize("where", [("self_attn", "q_proj"), ("mlp", "up_proj")])
def test_each_adapter_finds_its_own_prompts(llama, tmp_path, where):
    model, adapters = adapt(copy.deepcopy(llama), *where)
    kivi = calibrate(model, TOKENS, EVERY["kivi"], progress=False)
    known = PromptCache(tmp_path, kivi, model)
    text = TOKENS[0]
    for state in ({}, {"_active_adapter": ["b"]}, {"_disable_adapters": True}):
        switch(adapters, **state)
        assert known.find(text) == (None, 0)
        known.save(text, read(model, kivi, text))
        assert known.find(text)[1] == 95
    switch(adapters, _disable_adapters=False)
    for adapter in adapters:
        adapter.merge()
    assert known.find(text) == (None, 0)
    for adapter in adapters:  # of a merge that is undone the rounding stays
        adapter.merged_adapters = []
    assert known.find(text) == (None, 0)
    assert len(list(tmp_path.glob("*/*.prompt"))) == 3


def test_tokens_of_two_adapters_are_saved_under_neither_name(llama, kivi, tmp_path):
    model, adapters = adapt(copy.deepcopy(llama), "mlp", "up_proj")
    cache = kivi.new_cache(model)
    for active in ("b", "a", "b"):  # the first before any token
        switch(adapters, _active_adapter=[active])
        feed(model, cache, TOKENS[0][:32])
        if active == "b" and cache.get_seq_length() == 32:
            cache.save(tmp_path / "cache")
    with pytest.raises(DataError, match="weights or adapters changed"):
        cache.save(tmp_path / "cache")
    assert CompressedCache.load(tmp_path / "cache", kivi, model).get_seq_length() == 32
    cache.reset()
    feed(model, cache, TOKENS[0])
    cache.save(tmp_path / "cache")
    switch(adapters, _active_adapter=["a"])
    with pytest.raises(FormatError, match="with weights"):
        CompressedCache.load(tmp_path / "cache", kivi, model)


def test_peft(llama, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(llama), config).eval()
    model.add_adapter("other", config)
    kivi = calibrate(model, TOKENS, EVERY["kivi"], progress=False)
    known, text = PromptCache(tmp_path, kivi, model), TOKENS[0]
    cache = kivi.new_cache(model)
    made = model.generate(text[None, :40], past_key_values=cache, max_new_tokens=4, do_sample=False)[0]
    known.save(made[:-1], cache)
    model.set_adapter("other")
    assert known.find(made)[1] == 0
    with pytest.raises(DataError, match="adapters changed"):
        known.save(made[:-1], cache)
    model.set_adapter("default")
    assert known.find(made)[1] == 43
    with model.disable_adapter():
        assert known.find(made)[1] == 0
    model.merge_adapter()
    assert known.find(made)[1] == 0
