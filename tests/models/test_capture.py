"""Pre-RoPE keys and values of every supported architecture."""

import copy
import shutil
from concurrent.futures import ThreadPoolExecutor

import architectures
import pytest
import small_models
import torch
from projections import kv_sources

from vqkv import DataError, FormatError, UnknownNameError, capture, load_model
from vqkv.models import layers
from vqkv.models.layers import kv_layers
from vqkv.models.load import describe, difference, fingerprint
from vqkv.models.rope import rotations

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


def test_unknown_names_and_broken_inputs(llama):
    with pytest.raises(UnknownNameError, match="Did you mean 'vqkv/llama-mini'"):
        load_model("vqkv/lama-mini")
    with pytest.raises(DataError, match="empty"):
        capture(llama, torch.zeros(0, 5, dtype=torch.long))
    broken = copy.deepcopy(llama)
    with torch.no_grad():
        kv_sources(broken)[1].key_module.weight[0, 0] = float("nan")
    with pytest.raises(DataError, match="layer 1 made NaN"):
        capture(broken, torch.ones(1, 5, dtype=torch.long))


def test_only_learned_positions_limit_the_length():
    tokens = torch.arange(600).remainder(100)[None]
    assert len(capture(architectures.build("bloom"), tokens)[0]) == 4  # ALiBi: its configuration names no length
    with pytest.raises(DataError, match="600 tokens, but the model learned 512 positions"):
        capture(architectures.build("gpt2"), tokens)


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


def test_models_that_cannot_be_loaded(llama_folder, tmp_path):
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


def test_layers_are_asked_for_while_another_thread_runs_the_model(llama_folder):
    model, _ = load_model(llama_folder)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: [model(torch.ones(4, 64, dtype=torch.int64)) for _ in range(20)])
        while not other.done():
            layers._layers.clear()
            assert [each.attention for each in kv_layers(model)] == [each.self_attn for each in model.model.layers]
        other.result()
