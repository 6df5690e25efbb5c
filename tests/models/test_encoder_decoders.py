"""T5, UMT5, BART and Whisper: what the decoder keeps of itself and, once, of the encoder."""

import pytest
import torch
import transformers
from architectures import missed
from transformers import DynamicCache, EncoderDecoderCache

from vqkv import DataError, calibrate, capacity, evaluate, presets
from vqkv.cache.eviction import H2O
from vqkv.calibration.finetune import finetune
from vqkv.evaluation.metrics import token_kl

TOKENS = torch.randint(3, 100, (16, 40), generator=torch.Generator().manual_seed(0))
SOUND = torch.randn(16, 8, 60, generator=torch.Generator().manual_seed(1))  # (num_seqs, mel bins, frames)
SMALL = {"vocab_size": 128, "d_model": 64, "decoder_start_token_id": 3, "pad_token_id": 0, "eos_token_id": 2}
LAYERS = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in
          (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96))}  # fmt: skip
GREEDY = {"max_new_tokens": 24, "max_length": None, "do_sample": False}


def t5():
    config = transformers.T5Config(**SMALL, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


def umt5():
    config = transformers.UMT5Config(**SMALL, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    return transformers.UMT5ForConditionalGeneration(config)  # asks each layer how many tokens it has


def bart():
    config = transformers.BartConfig(**SMALL, **LAYERS, max_position_embeddings=256, forced_eos_token_id=None)
    return transformers.BartForConditionalGeneration(config)


def whisper():
    config = transformers.WhisperConfig(**SMALL, **LAYERS, num_mel_bins=8, max_source_positions=30)
    return transformers.WhisperForConditionalGeneration(config)


@pytest.fixture(scope="module", params=[t5, umt5, bart, whisper], ids=lambda make: make.__name__)
def case(request):
    """A model, what its encoder reads of three sequences, and what ``calibrate`` is told of them."""
    torch.manual_seed(0)
    model = request.param().eval()
    if model.main_input_name == "input_ids":
        return model, {"input_ids": TOKENS[:3]}, {}
    return model, {"input_features": SOUND[:3]}, {"encoder_inputs": SOUND}


@torch.inference_mode()
def logits(model, read, cache):
    steps = TOKENS[:3].split([20] + [1] * 20, dim=1)
    return torch.cat([model(**read, decoder_input_ids=x, past_key_values=cache).logits for x in steps], dim=1)


@pytest.mark.parametrize(
    "preset, bits",
    [
        (presets.fp16(), 16),
        (presets.vqllm(4, 16, 4, kmeans_iterations=1), 4 * 4 / 4 + 16 / 16),  # codes, a scale a vector
        (presets.kivi(4, 8, recent_window=4), 4 + 4 * 8 / 8),  # codes, two ends of 16 bits for 8 values
    ],
    ids=["fp16", "vqllm", "kivi"],
)
def test_both_caches_store_what_they_should(case, preset, bits):
    model, read, told = case
    compressor = calibrate(model, TOKENS, preset, progress=False, **told)
    cache = compressor.new_cache(model)
    config = model.config
    theirs = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    exact = logits(model, read, theirs)
    assert token_kl(exact, logits(model, read, cache)).mean() < (1e-6 if preset.name == "fp16" else 0.01)
    both = [(c.self_attention_cache, c.cross_attention_cache) for c in (cache, theirs)]
    for own, other, length in zip(*both, (40, 30 if told else 40), strict=True):
        assert missed(own, other) < (1e-6 if preset.name == "fp16" else 0.3)
        report = own.report()
        assert report.seq_len == length and report.values == 3 * length * 2 * 2 * 64
        assert report.bits_per_value == bits
    with pytest.raises(DataError, match="has two caches"):
        cache.self_attention_cache.save("nowhere")


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_makes_the_same_text(case, beams):
    model, read, told = case
    compressor = calibrate(model, TOKENS, presets.fp16(), progress=False, **told)
    options = GREEDY | {"num_beams": beams}
    expected = model.generate(**read, **options)
    assert torch.equal(model.generate(**read, **options, past_key_values=compressor.new_cache(model)), expected)


def test_what_cannot_be_is_refused(case):
    model, _, told = case
    with pytest.raises(DataError, match="aqua-higgs predicts layers .* use a preset without predictors"):
        calibrate(model, TOKENS, presets.aqua(presets.higgs(4)), progress=False, **told)
    compressor = calibrate(model, TOKENS, presets.fp16(), progress=False, **told)
    with pytest.raises(DataError, match=f"evaluate takes decoders: {type(model).__name__} has an encoder"):
        evaluate(model, compressor, TOKENS)
    with pytest.raises(DataError, match="capacity takes decoders"):
        capacity(model, compressor, memory_gb=1)
    with pytest.raises(DataError, match="finetune takes decoders"):
        finetune(model, TOKENS, presets.vq())
    with pytest.raises(DataError, match="H2O takes decoders"):
        H2O(compressor).new_cache(model)
    with pytest.raises(DataError, match="two rows of tokens are equal"):
        calibrate(model, TOKENS[[0, 0]], presets.fp16(), progress=False, encoder_inputs=TOKENS[:2])
    if told:
        with pytest.raises(DataError, match="Whisper.* reads input_features: pass them as encoder_inputs"):
            calibrate(model, TOKENS, presets.fp16(), progress=False)
