"""Pre-RoPE keys and values of every supported architecture."""

import copy

import pytest
import small_models
import torch

from vqkv import DataError, UnknownNameError, capture, load_model
from vqkv.kernels.rope import rotate, unrotate
from vqkv.models.load import describe, difference, fingerprint, kv_sources, rotary_embedding


@pytest.fixture(scope="module", params=sorted(small_models.CONFIGS))
def model(request, tmp_path_factory):
    folder = small_models.make(request.param, tmp_path_factory.mktemp(request.param))
    return load_model(str(folder))[0]


def test_hooked_keys_rotate_to_what_the_cache_sees_and_back(model):
    tokens = torch.randint(0, 4096, (3, 37), generator=torch.Generator().manual_seed(1))
    before, values = capture(model, tokens, batch_size=2)
    after, cached_values = capture(model, tokens, batch_size=2, post_rope=True)
    rotary = rotary_embedding(model)
    assert len(before) == model.config.num_hidden_layers
    for k, k_rope, v, v_cached in zip(before, after, values, cached_values, strict=True):
        assert k.shape == k_rope.shape == v.shape == (3, kv_sources(model)[0].num_kv_heads, 37, 32)
        assert torch.equal(v, v_cached)
        if rotary is None:
            assert torch.equal(k, k_rope)
            continue
        cos, sin = rotary(k, torch.arange(37)[None])
        assert not torch.allclose(k, k_rope)
        torch.testing.assert_close(rotate(k, cos, sin), k_rope, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(unrotate(k_rope, cos, sin), k, rtol=1e-5, atol=1e-5)


def test_a_model_is_known_again_in_another_dtype_but_not_with_other_weights(model):
    before, name = describe(model), fingerprint(model)
    for dtype in (torch.float16, torch.bfloat16):
        assert difference(before, copy.deepcopy(model).to(dtype)) is None
    attention = kv_sources(model)[1].attention
    for projection in ("k_proj", "v_proj") if hasattr(attention, "k_proj") else ("c_attn",):
        changed = copy.deepcopy(model)
        with torch.no_grad():
            getattr(kv_sources(changed)[1].attention, projection).weight.mul_(1.5)
        assert difference(before, changed) == "other key or value weights" and fingerprint(changed) != name


def test_unknown_model_names_the_known_ones():
    with pytest.raises(UnknownNameError, match="did you mean 'vqkv/llama-mini'|Did you mean 'vqkv/llama-mini'"):
        load_model("vqkv/lama-mini")


def test_empty_and_broken_inputs(tmp_path):
    model, _ = load_model(str(small_models.make("llama", tmp_path)))
    with pytest.raises(DataError, match="empty"):
        capture(model, torch.zeros(0, 5, dtype=torch.long))
    with torch.no_grad():
        kv_sources(model)[1].key_module.weight[0, 0] = float("nan")
    with pytest.raises(DataError, match="layer 1 made NaN"):
        capture(model, torch.ones(1, 5, dtype=torch.long))
