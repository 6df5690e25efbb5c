"""Injected phenomena: other keys and values, the same outputs."""

import pytest
import small_models
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from vqkv import DataError, capture
from vqkv.models.layers import kv_layers
from vqkv.models.rope import rotations
from vqkv.study.injection import inject

TOKENS = torch.randint(1, 4096, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random one with biases and grouped queries."""
    return small_models.load("qwen2", tmp_path_factory.mktemp("qwen2"))


def factors(model, seed: int, most: float) -> torch.Tensor:
    """(num_layers, num_kv_heads, head_dim) of either sign, alike in the channels that RoPE rotates together."""
    layers, generator = kv_layers(model), torch.Generator().manual_seed(seed)
    shape = (len(layers), *layers[0].shape[:2])
    x = most ** (2 * torch.rand(shape, generator=generator) - 1) * torch.randn(shape, generator=generator).sign()
    for rotation, layer in zip(rotations(model), x, strict=True):
        layer[:, rotation.second] = layer[:, rotation.first]
    return x


@torch.inference_mode()
def logits(model):
    return model(TOKENS).logits


@given(seed=st.integers(0, 2**20), most=st.sampled_from([1.0, 3.0, 100.0]), roles=st.sampled_from(["k", "v", "kv"]))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_outputs_stay_and_caches_are_scaled_as_asked(model, seed, most, roles):
    given_to = {"keys": factors(model, seed, most)} if "k" in roles else {}
    given_to |= {"values": factors(model, seed + 1, most)} if "v" in roles else {}
    before = {name: x.clone() for name, x in model.state_dict().items()}
    other, expected = inject(model, **given_to), logits(model)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert other.vqkv_name.startswith(f"{model.vqkv_name} injected ")
    torch.testing.assert_close(logits(other), expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    for x, y, name in zip(capture(model, TOKENS), capture(other, TOKENS), ("keys", "values"), strict=True):
        for i, (before, after) in enumerate(zip(x, y, strict=True)):
            wanted = before * given_to[name][i][:, None] if name in given_to else before
            missed = (after - wanted).abs().amax(dim=(0, 2)) / wanted.abs().amax(dim=(0, 2)).clamp_min(1e-3)
            assert missed.max() < 1e-3  # next to an outlier other channels of a rotated key round a little


def test_a_bias_that_attention_does_not_see(model):
    """That of a single position, as only RoPE lets a bias differ among keys."""
    bias = torch.zeros(kv_layers(model)[0].shape[1])
    bias[-1] = 50.0
    other = inject(model, key_bias=bias)
    before, after = (capture(m, TOKENS)[0][0] for m in (model, other))  # a later layer's inputs differ
    torch.testing.assert_close((after - before).mean(dim=(0, 1, 2)), bias, rtol=1e-3, atol=2e-3)
    at_zero = {"position_ids": torch.zeros_like(TOKENS)}
    with torch.inference_mode():
        alike = [m(TOKENS, **at_zero).logits for m in (model, other)]
    torch.testing.assert_close(*alike, rtol=0, atol=1e-3)


def test_attention_whose_norms_undo_what_is_multiplied_is_refused():
    other = AutoModelForCausalLM.from_config(small_models.CONFIGS["qwen3"]()).eval()
    with pytest.raises(DataError, match="inject knows no Qwen3Attention, with k_norm, k_proj"):
        inject(other, keys=torch.tensor(2.0))
