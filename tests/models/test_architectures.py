"""Every causal architecture that can be built small works with every preset, or is refused by name. What is stored of
layers of unequal shape, of one KV head, of hybrids and of images; what hybrids are refused."""

from dataclasses import replace
from operator import mul

import pytest
import torch
from architectures import LOSSY, NAMES, TOKENS, build, row, table
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, DynamicCache, T5Config

from vqkv import DataError, calibrate, capacity, evaluate, presets
from vqkv.cache.meter import tensor_bytes
from vqkv.models.layers import kv_layers
from vqkv.models.metrics import token_kl
from vqkv.study.eviction import H2O


@pytest.mark.parametrize("name", NAMES)
def test_the_table_says_what_becomes_of_each_architecture(name):
    """With fp16 and one preset of those in the table, in turn; ``architectures.py`` asks for all."""
    label = [*LOSSY][NAMES.index(name) % len(LOSSY)]
    cells = row(name, {label: LOSSY[label]})
    if cells is None:
        assert name not in table()
        pytest.skip("cannot be built small")
    committed = table().get(name, "no row: run python tests/models/architectures.py")
    assert cells[:3] == committed[:3]
    what, alone = committed[3], cells[3]
    assert alone == what if alone.startswith("refused") else alone.removeprefix("all but ") in f"{what}; all"
    assert (f"{label}: " in what) == alone.startswith("all but")


# layers that store, KV heads and head_dim of each, as the configurations say
SHAPES = {
    "falcon": [(1, 16)] * 4,  # multi-query
    "gpt_bigcode": [(1, 16)] * 4,
    "gemma4_text": [(2, 16), (2, 32)] * 2,
    "jamba": [(2, 16)] * 2,  # of four layers
    "qwen3_next": [(2, 16)],
}
SEEN = {name: [40] * len(shapes) for name, shapes in SHAPES.items()} | {"gemma4_text": [15, 40] * 2}  # by later queries


@pytest.mark.parametrize("name", SHAPES)
def test_bits_are_those_of_what_each_layer_stores(name):
    """4-bit codes, and a 16-bit scale and zero point for each group of 16 channels: 6 bits a value."""
    model = build(name)
    assert [(layer.num_kv_heads, layer.head_dim) for layer in kv_layers(model)] == SHAPES[name]
    preset = replace(presets.quanto(4, 16), block_tokens=8)
    cache = calibrate(model, TOKENS, preset, progress=False).new_cache(model)
    dynamic = DynamicCache(config=model.config)
    with torch.inference_mode():
        for each in (cache, dynamic):
            model(TOKENS[:2], past_key_values=each, use_cache=True)
    widths, report = [heads * dim for heads, dim in SHAPES[name]], cache.report()
    seen = sum(tokens * width for tokens, width in zip(SEEN[name], widths, strict=True))
    theirs = [x for layer in dynamic.layers for x in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    assert report.dynamic_values == 2 * 2 * seen == sum(x.numel() for x in theirs if x is not None)
    packed = [sum(store.parts[1] for store in layer.stores) for layer in cache.compressed]
    assert report.packed_values == 2 * sum(map(mul, packed, widths))
    assert report.packed_bytes == report.packed_values * 6 / 8 and report.bits_per_value == 6
    assert report.cache_bytes == tensor_bytes(cache.batch) - tensor_bytes(cache.compressor)


@pytest.mark.parametrize("name", ["lfm2_moe", "falcon_h1"])  # convolutions in separate layers; states with the keys
def test_states_that_a_file_has_no_place_for_are_refused_and_sequences_chosen_with_them(name):
    model = build(name)
    compressor = calibrate(model, TOKENS, presets.fp16(), progress=False)
    cache, exact = compressor.new_cache(model), DynamicCache(config=model.config)
    with torch.inference_mode():
        for each in (cache, exact):
            model(TOKENS[:3, :20], past_key_values=each)
        cache.batch_select_indices(torch.tensor([True, False, True]))
        exact.reorder_cache(torch.tensor([0, 2]))
        ours, theirs = (model(TOKENS[[0, 2], 20:], past_key_values=each).logits for each in (cache, exact))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    with pytest.raises(DataError, match="has states beside keys and values"):
        cache.save("nowhere")
    with pytest.raises(DataError, match="layers with a sliding window or states, whose DynamicCache stops growing"):
        capacity(model, compressor, memory_gb=1)
    if name == "falcon_h1":
        with pytest.raises(DataError, match="states beside keys and values, which forget nothing"):
            H2O(compressor).new_cache(model)


def test_a_sliding_window_is_no_gain_and_padding_after_it_is_refused():
    model = build("mistral")  # windows of 16 tokens
    compressor = calibrate(model, TOKENS, presets.fp16(), progress=False)
    assert evaluate(model, compressor, TOKENS, chunk_size=8)["ratio"] <= 1
    cache, mask = compressor.new_cache(model), torch.ones(2, 40, dtype=torch.int64)
    mask[0, 30:34] = 0
    with torch.inference_mode():
        model(TOKENS[:2, :30], past_key_values=cache)
        with pytest.raises(DataError, match="padding came after a sliding window had dropped tokens"):
            model(TOKENS[:2, 30:], attention_mask=mask, past_key_values=cache)
    with pytest.warns(UserWarning, match="sliding windows keep all tokens"):
        calibrate(model, TOKENS, presets.aqua(presets.higgs(4), recent_window=4), progress=False)


def test_a_model_with_an_encoder_is_refused():
    config = T5Config(vocab_size=512, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4)
    with pytest.raises(DataError, match="has an encoder: vqkv compresses the caches of decoders"):
        calibrate(AutoModelForSeq2SeqLM.from_config(config).eval(), TOKENS, presets.fp16(), progress=False)


IMAGE = 100  # token id, beyond those of ``TOKENS``
TEXT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
CONFIGS = {
    "llava": {
        "text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION | {"model_type": "clip_vision_model"},
        "image_token_index": IMAGE,
    },
    "gemma3": {
        "text_config": TEXT | {"head_dim": 16, "sliding_window": 16}, "vision_config": VISION,
        "image_token_id": IMAGE, "boi_token_index": 101, "eoi_token_index": 102, "mm_tokens_per_image": 4,
    },
    # no image: that its positions have three parts is what matters
    "qwen2_vl": {"text_config": TEXT | {"rope_parameters": ROPE}, "vision_config": {"depth": 1}},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_generate_reads_images_from_a_compressed_cache(name):
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[name](**CONFIGS[name])).eval()
    given = {"input_ids": TOKENS[:2].clone()}
    if name != "qwen2_vl":
        given["input_ids"][:, 3:7] = IMAGE
        given["pixel_values"] = torch.randn(2, 3, 16, 16)
    if name == "gemma3":
        given["token_type_ids"] = (given["input_ids"] == IMAGE).long()
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    exact = model.generate(**given, **options)
    for preset, most in ((presets.fp16(), 1e-6), (presets.best(4.0, 1 << 20, 1, block_tokens=8), 1e-3)):
        compressor = calibrate(model, TOKENS, preset, progress=False)
        cache = compressor.new_cache(model)
        read = model.generate(**given, **options, past_key_values=cache)
        kl = token_kl(*(torch.stack(out.logits) for out in (exact, read)))
        alike = (exact.sequences == read.sequences)[:, 39:-1].cumprod(dim=1).bool().T  # until a near tie
        assert kl[alike].mean() < most and alike[:4].all() and cache.report().seq_len == 51
    assert compressor.settings.pre_rope is (name != "qwen2_vl")
