"""What fits a memory: every size against caches that were really filled, every search against counting by hand."""

from dataclasses import replace

import pytest
import small_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from preset_zoo import CODED, PREDICTED, SMALL
from transformers import AutoConfig, DynamicCache, GPT2Config, LlamaConfig, T5Config

from vqkv import DataError, FormatError, calibrate, capacity, load_model, presets
from vqkv.cache.meter import tensor_bytes
from vqkv.evaluation.footprint import GB, Footprint, architecture, dynamic_footprint, footprint, weight_bytes

TOKENS = torch.randint(1, 4096, (6, 48), generator=torch.Generator().manual_seed(0))
LONG = torch.randint(1, 4096, (3, 320), generator=torch.Generator().manual_seed(1))
PIECES = (1, 1, 4, 17, 18, 1, 128, 5, 88, 1)  # sinks half full, blocks of 16 and of 128 almost full and packed
RAGGED = {name: SMALL[name] for name in ("lossless", "cachegen", "vqq", "vqq_product")}
RAGGED |= {f"{name}+ans": preset for name, preset in CODED.items()} | {"kvtc": PREDICTED["kvtc"]}
LEARNED_SIZE = ("block_gtq",)  # how many norms a token takes is learned
FIXED = {name: preset for name, preset in (SMALL | PREDICTED).items() if name not in (*RAGGED, *LEARNED_SIZE)}
FIXED["kivi held"] = replace(SMALL["kivi"], sink_tokens=3, block_tokens=24)
MODEL = architecture(small_models.CONFIGS["llama"](), "float32")


def feed(model, cache, tokens, pieces):
    """Yields the tokens in the cache after each piece."""
    for part in tokens[:, : sum(pieces)].split(list(pieces), dim=1):
        with torch.inference_mode():
            model(part, past_key_values=cache, use_cache=True)
        yield cache.get_seq_length()


# Sizes


@pytest.mark.parametrize("name", [*FIXED])
def test_every_length_and_batch_takes_what_was_foretold(llama, name):
    """From the preset alone, before anything is calibrated, and from the fitted compressor."""
    foretold = footprint(llama, FIXED[name])
    compressor = calibrate(llama, TOKENS, FIXED[name], progress=False)
    assert foretold.side_information == compressor.side_bytes
    assert footprint(llama, compressor) == foretold
    for batch, pieces in ((3, PIECES[:6]), (1, PIECES)):
        cache = compressor.new_cache(llama)
        for seq_len in feed(llama, cache, LONG[:batch], pieces):
            report = cache.report()
            assert report.cache_bytes == foretold.cache_bytes(seq_len, batch)
            assert foretold.parts(seq_len)[1] * batch * foretold.values == report.packed_values
        assert tensor_bytes(cache) - tensor_bytes(compressor) == foretold.cache_bytes(sum(pieces), batch)
    assert report.bits_per_value == foretold.bits_per_value


@pytest.mark.parametrize("name", ["llama-yarn", "gemma", "qwen2", "gpt2", "opt"])
def test_a_config_alone_tells_what_the_loaded_model_does(name, tmp_path):
    model = small_models.load(name, tmp_path)
    laid_out = architecture(str(tmp_path), "float32")
    assert laid_out.device.type == "meta" and not any(x.device.type != "meta" for x in laid_out.parameters())
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in model.state_dict().values()}
    assert weight_bytes(model) >= sum(held.values())  # tied ones once, and buffers that are not saved
    assert footprint(laid_out, presets.kivi(block_tokens=16)) == footprint(model, presets.kivi(block_tokens=16))
    assert dynamic_footprint(laid_out) == dynamic_footprint(model)
    for source in (model, model.config, AutoConfig.from_pretrained(tmp_path).to_dict()):
        assert weight_bytes(architecture(source, "bfloat16")) < 0.51 * weight_bytes(model)


def test_the_baseline_is_dynamic_cache(llama):
    model, cache = load_model(llama.vqkv_name, dtype="bfloat16")[0], DynamicCache()
    needed = dynamic_footprint(model)
    for seq_len in feed(model, cache, LONG, (5, 40, 1)):
        assert tensor_bytes(cache) == needed.cache_bytes(seq_len, 3)
    keys = tensor_bytes(cache.layers[0].keys)  # torch.cat copies them while the old ones are there
    assert needed.kinds(seq_len, 3)["working"] == keys
    assert dynamic_footprint(llama).exact == needed.exact  # an fp32 model's baseline has 16 bits too


@pytest.mark.parametrize("name", ["cachegen", "kivi+ans", "kvtc"])
def test_sizes_that_depend_on_the_text_are_refused(llama, name):
    for sizes in (RAGGED[name], calibrate(llama, TOKENS, RAGGED[name], progress=False)):
        with pytest.raises(DataError, match="depends on what is stored"):
            footprint(llama, sizes)


# Searches


@st.composite
def footprints(draw):
    names = ("weights", "side_information", "working")
    return Footprint(
        **{name: draw(st.integers(0, 40)) for name in names},
        block_bytes=draw(st.integers(0, 300)),
        block=draw(st.integers(1, 9)),
        exact=draw(st.integers(1, 40)),
        values=4,
        sink_tokens=draw(st.integers(0, 5)),
        recent_window=draw(st.integers(0, 9)),
    )


@settings(max_examples=80, deadline=None)
@given(footprints(), st.integers(1, 4), st.integers(1, 80))
def test_the_peak_is_the_largest_total_on_the_way(needed, batch, seq_len):
    totals = [sum(needed.kinds(n, batch).values()) for n in range(seq_len + 1)]
    assert needed.peak(seq_len, batch) == max(totals)
    assert all(sum(needed.parts(n)) == n and min(needed.parts(n)) >= 0 for n in range(seq_len + 1))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 150), st.integers(0, 400_000), st.sampled_from(["kivi", "higgs", "vqllm", "fp16"])
)
def test_context_and_batch_are_found_as_by_counting(batch, context, spare, name):
    memory = weight_bytes(MODEL) + spare
    needed = footprint(MODEL, SMALL[name])
    if needed.weights + needed.side_information > memory:
        with pytest.raises(DataError, match="does not fit"):
            capacity(MODEL, SMALL[name], memory / GB, batch, context)
        return
    fits = capacity(MODEL, SMALL[name], memory / GB, batch, context)
    totals = ((n, sum(needed.kinds(n, batch).values())) for n in range(1, 100_000))
    assert fits.context == next(n for n, total in totals if total > memory) - 1
    peaks = ((n, needed.peak(context, n)) for n in range(1, 100_000))
    assert fits.batch_size == next(n for n, peak in peaks if peak > memory) - 1
    assert sum(fits.kinds.values()) <= memory


def test_the_models_own_limit_is_reported_and_nothing_drawn():
    config, state = GPT2Config(n_layer=2, n_positions=256), torch.random.get_rng_state()
    fits = capacity(config, presets.quanto(2), 0.9)
    assert fits.model_limit == 256 and fits.dtype == "float16" and fits.preset == "quanto"
    assert capacity(config, presets.vqllm(2, 8, 16), 1).context > 0
    assert torch.equal(torch.random.get_rng_state(), state)  # nothing is drawn from the caller's random numbers


# Bad input


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"context": 0}, "context 0"),
        ({"preset": "quanto"}, "pass a Preset"),
        ({"preset": presets.vqllm(group_size=24)}, "24"),  # does not divide a head_dim of 32
        ({"memory_gb": 1e-4}, r"a memory of 0\.0001 GB: weights of 0\.00"),
        ({"model_or_config": T5Config()}, "neither what is kept of an encoder"),
        ({"model_or_config": {"model_type": "llama", "num_attention_heads": 0}}, "no causal language model"),
        ({"model_or_config": LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4})}, "quantized weight"),
        ({"model_or_config": LlamaConfig(num_hidden_layers=0)}, "hands no keys and values"),
        ({"model_or_config": small_models.SLIDING["mistral"]()}, "sliding_window=None"),
    ],
)
def test_bad_arguments_name_their_remedy(changes, message):
    with pytest.raises(DataError, match=message):
        capacity(**{"model_or_config": MODEL, "preset": presets.fp16(), "memory_gb": 1} | changes)


def test_a_compressor_of_another_model(llama, tmp_path):
    compressor = calibrate(llama, TOKENS, SMALL["quanto"], progress=False)
    assert capacity(llama.config, compressor, 1).context == capacity(llama.config, SMALL["quanto"], 1).context
    with pytest.raises(FormatError, match="layers, KV heads or head_dim differ"):
        capacity(GPT2Config(n_layer=2, n_head=2, n_embd=32), compressor, 1)
    with pytest.raises(FormatError, match="was fitted to"):
        capacity(small_models.load("qwen3", tmp_path), compressor, 1)
