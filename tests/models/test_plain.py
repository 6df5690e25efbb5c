"""Models in training mode, in wrappers or with integer weights are read as the plain model is."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from vqkv import calibrate, capture, evaluate, load_model, presets
from vqkv.calibration.finetune import finetune
from vqkv.models.layers import kv_layers
from vqkv.models.rope import rotations

TOKENS = torch.randint(1, 4000, (4, 64), generator=torch.Generator().manual_seed(0))
PRESET = presets.higgs(4, recent_window=4)


@pytest.fixture(scope="module")
def compressor(llama):
    return calibrate(llama, TOKENS, PRESET, progress=False)


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
DROPPING = [  # a third of everything while they train
    LlamaConfig(vocab_size=4096, **SIZES, attention_dropout=0.3),
    GPT2Config(vocab_size=4096, n_embd=64, n_layer=2, n_head=2, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3),
]


@pytest.mark.parametrize("config", DROPPING, ids=lambda config: config.model_type)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_in_training_is_read_in_evaluation_mode_and_goes_on_training(config, checkpointing):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()

    def measured(model):
        fitted = calibrate(model, TOKENS, PRESET, progress=False)
        row = evaluate(model, fitted, TOKENS)
        rotating = [rotation is not None for rotation in rotations(model)]
        return fitted.fingerprint, row, rotating, torch.stack(capture(model, TOKENS)[0])

    *expected, keys = measured(model)
    training = copy.deepcopy(model).train()
    training.get_submodule("lm_head").eval()
    if checkpointing:
        training.gradient_checkpointing_enable()
    modes = [module.training for module in training.modules()]
    *again, keys_again = measured(training)
    assert again == expected and torch.equal(keys_again, keys)
    assert modes == [module.training for module in training.modules()]
    assert {layer.attention for layer in kv_layers(training)} <= {*training.modules()}
    fitted = finetune(training, TOKENS, presets.higgs(4), batch_size=2, progress=False).compressor
    assert fitted is not None and modes == [module.training for module in training.modules()]


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compiled", "parallel"])
def test_a_wrapped_model_is_read_as_it_is(llama, compressor, tmp_path, wrap):
    wrapped = wrap(llama)
    assert calibrate(wrapped, TOKENS, PRESET, progress=False).fingerprint == compressor.fingerprint
    assert evaluate(wrapped, compressor, TOKENS) == evaluate(llama, compressor, TOKENS)
    assert torch.equal(capture(wrapped, TOKENS)[0][0], capture(llama, TOKENS)[0][0])
    cache = compressor.new_cache(wrapped)
    assert cache.model() is llama
    llama(TOKENS, past_key_values=cache)
    cache.save(tmp_path / "cache")
    assert type(cache).load(tmp_path / "cache", compressor, wrapped).get_seq_length() == 64


def test_a_compiled_model_is_read_without_compiling(llama_folder, compressor):
    model = load_model(llama_folder)[0]
    model.compile(backend=lambda *_: pytest.fail("compiled"))
    assert calibrate(model, TOKENS, PRESET, progress=False).fingerprint == compressor.fingerprint


def test_weights_in_four_bits_are_read(llama_folder):
    quanto = pytest.importorskip("optimum.quanto")
    model = load_model(llama_folder)[0]
    quanto.quantize(model, weights=quanto.qint4)
    quanto.freeze(model)
    fitted = calibrate(model, TOKENS, PRESET, progress=False)
    assert evaluate(model, fitted, TOKENS)["kl_mean"] < 0.1
    out = model.generate(TOKENS, past_key_values=fitted.new_cache(model), max_new_tokens=2, do_sample=False)
    assert out.shape == (4, 66)
