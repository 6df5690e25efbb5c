"""Prompts that come back: found by prefix and by the model that read them, written turn by turn; damage is a miss."""

import copy
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from codec_zoo import EVERY
from torch import nn

from vqkv import CompressedCache, DataError, FormatError, calibrate
from vqkv.cache.prompts import FORMAT, VERSION, PromptCache
from vqkv.models.identity import identity
from vqkv.runtime.files import load_checked, save_checked

TOKENS = torch.randint(1, 400, (6, 96), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=("vqllm", "kivi", "split", "lossless"))
def compressor(request, llama):
    return calibrate(llama, TOKENS, EVERY[request.param], progress=False)


@pytest.fixture(scope="module")
def kivi(llama):
    return calibrate(llama, TOKENS, EVERY["kivi"], progress=False)


@pytest.fixture(scope="module")
def quanto(llama):
    """8 recent tokens."""
    return calibrate(llama, TOKENS, replace(EVERY["quanto"], recent_window=8, block_tokens=8), progress=False)


@torch.inference_mode()
def feed(model, cache, tokens):
    return model(tokens.view(1, -1), past_key_values=cache, use_cache=True).logits


def read(model, compressor, tokens, pieces=(40,)):
    """A cache that was given tokens in pieces of these sizes."""
    cache = compressor.new_cache(model)
    for piece in tokens.split([*pieces, len(tokens) - sum(pieces)]):
        if len(piece):
            feed(model, cache, piece)
    return cache


def test_a_chat_goes_on_as_if_never_saved_and_stores_each_block_once(llama, compressor, tmp_path):
    prompts, text = PromptCache(tmp_path, compressor, llama), TOKENS[0]
    expected = read(llama, compressor, text[:40])
    prompts.save(text[:40], expected)
    for stop in (56, 72, 88):
        cache, count = prompts.find(text[:stop])
        assert count == stop - 16
        assert torch.equal(feed(llama, cache, text[count:stop]), feed(llama, expected, text[count:stop]))
        prompts.save(text[:stop], cache)
    assert len(list(prompts.folder.iterdir())) == 4
    for wrong in (text[:39], TOKENS[:2, :40], text[:0]):
        with pytest.raises(DataError, match="tokens"):
            prompts.save(wrong, expected)
    again, count = PromptCache(tmp_path, compressor, llama).find(text)
    assert count == 88 and torch.equal(feed(llama, again, text[88:]), feed(llama, expected, text[88:]))


def test_what_is_new_is_all_that_is_written(llama, quanto, tmp_path):
    prompts, text = PromptCache(tmp_path, quanto, llama), TOKENS[0].repeat(5)
    cache = read(llama, quanto, text[:400])
    prompts.save(text[:400], cache)
    feed(llama, cache, text[400:408])
    prompts.save(text[:408], cache)
    large, small = sorted((x.stat().st_size for x in prompts.folder.iterdir()), reverse=True)
    assert small < large / 4


def test_the_longest_common_prefix_is_found_and_something_is_left_to_read(llama, quanto, tmp_path):
    prompts, text = PromptCache(tmp_path, quanto, llama), TOKENS[0]
    assert prompts.find(text) == (None, 0)
    for stop in (20, 40):
        prompts.save(text[:stop], read(llama, quanto, text[:stop], (stop,)))
    other = torch.cat([text[:30], TOKENS[1][30:]])
    for tokens, wanted in ((text, 40), (text[:41], 40), (text[:40], 39), (other, 30), (text[:1], 0), (TOKENS[1], 0)):
        cache, count = prompts.find(tokens)
        assert count == wanted and (cache is None or cache.get_seq_length() == wanted)
        if cache is not None:  # as if it had been cropped without a file
            expected = read(llama, quanto, text[:40], (40,))
            expected.crop(count - 40)
            assert torch.equal(feed(llama, cache, tokens[count:]), feed(llama, expected, tokens[count:]))


def test_a_file_that_went_is_a_miss_and_only_a_damaged_one_of_a_chat_is_removed(llama, quanto, tmp_path, monkeypatch):
    prompts, text = PromptCache(tmp_path, quanto, llama), TOKENS[0]
    cache = read(llama, quanto, text[:40])
    prompts.save(text[:40], cache)
    (first,) = prompts.folder.iterdir()
    feed(llama, cache, text[40:80])
    prompts.save(text[:80], cache)
    (second,) = {*prompts.folder.iterdir()} - {first}
    content = first.read_bytes()
    first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert prompts.find(TOKENS[0]) == (None, 0) and [*prompts.folder.iterdir()] == [second]
    first.write_bytes(content)
    with monkeypatch.context() as patch:  # what cannot be read now is a miss and stays
        patch.setattr(Path, "read_bytes", Mock(side_effect=OSError("Too many open files")))
        assert prompts.find(TOKENS[0]) == (None, 0)
    assert prompts.find(TOKENS[0])[1] == 80
    first.unlink()
    assert prompts.find(TOKENS[0]) == (None, 0)
    prompts.save(TOKENS[0][:80], cache)
    assert PromptCache(tmp_path, quanto, llama).find(TOKENS[0])[1] == 80
    about, tensors = load_checked(second, FORMAT, VERSION, "")
    save_checked(second, about | {"version": VERSION + 1}, tensors)
    assert prompts.find(TOKENS[0]) == (None, 0) and second.exists()


@pytest.mark.parametrize("change", ["a weight", "a module", "RoPE", "dtype"])
def test_a_model_changed_in_place_is_another_and_its_prompts_stay(llama, kivi, quanto, tmp_path, change):
    model = copy.deepcopy(llama)
    prompts, before = PromptCache(tmp_path, kivi, model), identity(model)
    cache = read(model, kivi, TOKENS[0])
    cache.save(tmp_path / "cache")
    prompts.save(TOKENS[0], cache)
    mlp = model.model.layers[0].mlp
    if change == "a weight":
        mlp.up_proj.weight.data *= 1.5
    elif change == "a module":
        mlp.up_proj = copy.deepcopy(mlp.gate_proj)
    elif change == "RoPE":
        model.model.rotary_emb.inv_freq *= 0.5
    else:
        model.half()
    assert identity(model) != before and prompts.find(TOKENS[0]) == (None, 0)
    with pytest.raises(FormatError, match="weights|fitted to|dtype"):
        CompressedCache.load(tmp_path / "cache", kivi, model)
    with pytest.raises(DataError, match="changed since"):
        prompts.save(TOKENS[0], cache)
    assert PromptCache(tmp_path, kivi, llama).find(TOKENS[0])[1] == 95
    assert PromptCache(tmp_path, quanto, llama).find(TOKENS[0])[1] == 0  # another compressor


class Lora(nn.Module):
    """A linear layer and what its active adapters add, with the names, switches and in-place merges of peft's."""

    def __init__(self, base_layer: nn.Linear):
        super().__init__()
        self.base_layer, self.scaling = base_layer, {"a": 2.0, "b": 2.0}
        self.lora = nn.ParameterDict({name: 0.05 * torch.randn(base_layer.weight.shape) for name in "ab"})
        self._active_adapter, self._disable_adapters, self.merged_adapters = ["a"], False, []

    def forward(self, x):
        y = self.base_layer(x)
        for name in [] if self._disable_adapters or self.merged_adapters else self._active_adapter:
            y = y + self.scaling[name] * x @ self.lora[name].T
        return y


@pytest.mark.parametrize("where", ["self_attn.q_proj", "mlp.up_proj"])
def test_each_adapter_finds_its_own_prompts_and_tokens_of_two_are_saved_under_neither(llama, tmp_path, where):
    model = copy.deepcopy(llama)
    adapter = Lora(model.model.layers[0].get_submodule(where)).eval()
    model.model.layers[0].set_submodule(where, adapter)
    kivi = calibrate(model, TOKENS, EVERY["kivi"], progress=False)
    prompts, text = PromptCache(tmp_path, kivi, model), TOKENS[0]
    for adapter._active_adapter, adapter._disable_adapters in ((["a"], False), (["b"], False), (["b"], True)):
        assert prompts.find(text) == (None, 0)
        prompts.save(text, read(model, kivi, text))
        assert prompts.find(text)[1] == 95
    mixed, adapter._disable_adapters = kivi.new_cache(model), False
    for adapter._active_adapter in (["b"], ["a"]):  # the first before any token
        feed(model, mixed, text[:32])
    with pytest.raises(DataError, match="weights or adapters changed"):
        mixed.save(tmp_path / "cache")
    adapter.base_layer.weight.data += adapter.scaling["a"] * adapter.lora["a"]
    adapter.merged_adapters = ["a"]
    assert prompts.find(text) == (None, 0)
    adapter.merged_adapters = []  # of a merge that is undone the rounding stays
    assert prompts.find(text) == (None, 0) and len(list(tmp_path.glob("*/*.prompt"))) == 3
