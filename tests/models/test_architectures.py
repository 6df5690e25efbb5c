"""What a model hands to its cache: keys before RoPE and values, which model it is, and what is refused. Every causal
architecture that can be built small works with every preset, or is refused by name; unequal shapes, hybrids, images."""

import copy
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import mul

import pytest
import small_models
import torch
from architectures import LOSSY, NAMES, TOKENS, build, row, table
from projections import kv_sources
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, DynamicCache, T5Config

from vqkv import DataError, FormatError, UnknownNameError, calibrate, capacity, capture, evaluate, load_model, presets
from vqkv.cache.meter import tensor_bytes
from vqkv.models import layers
from vqkv.models.layers import kv_layers
from vqkv.models.load import describe, difference, fingerprint
from vqkv.models.metrics import token_kl
from vqkv.models.rope import rotations
from vqkv.study.eviction import H2O

model = small_models.fixture(*small_models.CONFIGS)


@torch.inference_mode()
def projected(model, tokens):
    """Keys before RoPE and values as the projections make them: two lists over layers."""
    made, handles = {}, []
    for source in kv_sources(model):
        sides = ((source.key_module, source.key_part), (source.value_module, source.value_part))
        for role, (module, part) in enumerate(sides):

            def keep(module, args, output, slot=(role, source.layer_idx), source=source, part=part):
                made[slot] = source.heads(output, part)

            handles.append(module.register_forward_hook(keep))
    model(tokens)
    for handle in handles:
        handle.remove()
    return tuple([made[role, layer] for layer in range(model.config.num_hidden_layers)] for role in (0, 1))


def test_keys_rotated_back_are_those_that_the_projections_made(model):
    tokens = torch.randint(0, 4096, (3, 37), generator=torch.Generator().manual_seed(1))
    before, values = capture(model, tokens, batch_size=2)
    after, cached_values = capture(model, tokens, batch_size=2, pre_rope=False)
    keys, made_values = projected(model, tokens)
    assert len(before) == model.config.num_hidden_layers
    every = zip(before, after, keys, values, cached_values, made_values, rotations(model), strict=True)
    for k, k_rope, k_made, v, v_cached, v_made, rotation in every:
        assert k.shape == k_rope.shape == v.shape == (3, kv_sources(model)[0].num_kv_heads, 37, 32)
        assert torch.equal(v, v_cached)
        torch.testing.assert_close(v, v_made, rtol=1e-5, atol=1e-5)
        factor = getattr(getattr(model.model, "rotary_emb", None), "attention_scaling", 1.0) if rotation else 1.0
        torch.testing.assert_close(k, factor * k_made, rtol=1e-4, atol=1e-5)  # of YaRN, at all positions alike
        assert (rotation is None) == torch.equal(k, k_rope) == (model.config.model_type in ("gpt2", "opt"))
        if rotation is not None:
            torch.testing.assert_close(rotation.rotated(k), k_rope, rtol=1e-5, atol=1e-5)
            rotation.rotated(leaf := k.clone().requires_grad_()).sum().backward()  # gradients pass
            assert leaf.grad.norm() > 0


def test_a_model_is_known_again_in_another_dtype_but_not_with_other_weights(model):
    before, name = describe(model), fingerprint(model)
    for dtype in (torch.float16, torch.bfloat16):
        assert difference(before, copy.deepcopy(model).to(dtype)) is None
    attention = kv_sources(model)[1].attention
    for projection in ("k_proj", "v_proj") if hasattr(attention, "k_proj") else ("c_attn",):
        changed = copy.deepcopy(model)
        with torch.no_grad():
            getattr(kv_sources(changed)[1].attention, projection).weight.mul_(1.5)
        assert difference(before, changed) == "other attention weights" and fingerprint(changed) != name


def test_unknown_names_broken_inputs_and_models_that_cannot_be_loaded(llama, llama_folder, tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'vqkv/llama-mini'"):
        load_model("vqkv/lama-mini")
    with pytest.raises(DataError, match="empty"):
        capture(llama, torch.zeros(0, 5, dtype=torch.long))
    broken = copy.deepcopy(llama)
    with torch.no_grad():
        kv_sources(broken)[1].key_module.weight[0, 0] = float("nan")
    with pytest.raises(DataError, match="layer 1 made NaN"):
        capture(broken, torch.ones(1, 5, dtype=torch.long))
    for name in ("cut", "deeper"):
        shutil.copytree(llama_folder, tmp_path / name)
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"12345678")
    config = tmp_path / "deeper" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    for name in ("cut", "deeper"):
        with pytest.raises(FormatError, match="no model that can be loaded"):
            load_model(str(tmp_path / name))
    with pytest.raises(FormatError, match="'tpu'"):
        load_model(llama_folder, device="tpu")


def test_only_learned_positions_limit_the_length():
    tokens = torch.arange(600).remainder(100)[None]
    assert len(capture(build("bloom"), tokens)[0]) == 4  # ALiBi: its configuration names no length
    with pytest.raises(DataError, match="600 tokens, but the model learned 512 positions"):
        capture(build("gpt2"), tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [1, 3])  # layers of 3
def test_a_large_key_bias_hides_no_rotation(tmp_path, dtype, biased):
    """As of Qwen2.5: next to one channel 500 times as large all others seem to stand still."""
    model, tokens = small_models.load("qwen2", tmp_path).to(dtype), torch.arange(100)[None]
    expected, _ = projected(model, tokens)
    with torch.no_grad():
        for layer in model.model.layers[:biased]:
            layer.self_attn.k_proj.bias[5] += 500 * expected[0].std()
    expected, _ = projected(model, tokens)
    for keys, wanted, rotation in zip(capture(model, tokens)[0], expected, rotations(model), strict=True):
        assert rotation.half_split and len(rotation.first) == 16
        missed = (keys - wanted).float().square().mean(dim=(0, 1, 2)) / wanted.float().square().mean(dim=(0, 1, 2))
        others = [channel for channel in range(32) if channel not in (5, 21)]  # what rotates with it is lost in it
        assert missed[others].max() < max(1e-5, 4 * torch.finfo(dtype).eps) ** 2


def test_layers_are_asked_for_while_another_thread_runs_the_model(llama_folder):
    model, _ = load_model(llama_folder)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: [model(torch.ones(4, 64, dtype=torch.int64)) for _ in range(20)])
        while not other.done():
            layers._layers.clear()
            assert [each.attention for each in kv_layers(model)] == [each.self_attn for each in model.model.layers]
        other.result()


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
