"""Injected phenomena: other keys and values, the same outputs; where they are put; and rows that measure them."""

import sys

import pytest
import small_models
import strategies
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vqkv import DataError, capture
from vqkv.models.layers import kv_layers
from vqkv.models.rope import rotations
from vqkv.study.experiments import injected
from vqkv.study.experiments.injected import BY_HEAD, PAIRS, key_bias, loud_heads, outlier_channels
from vqkv.study.injection import inject, normed
from vqkv.study.subject import Subject

TOKENS = strategies.TOKENS[:2, :40]
model = small_models.fixture("qwen2")  # a random one with biases and grouped queries


def factors(model, seed: int, most: float) -> torch.Tensor:
    """(num_layers, num_kv_heads, head_dim) of either sign, alike in the channels that RoPE rotates together."""
    layers, generator = kv_layers(model), torch.Generator().manual_seed(seed)
    shape = (len(layers), *layers[0].shape[:2])
    x = most ** (2 * torch.rand(shape, generator=generator) - 1) * torch.randn(shape, generator=generator).sign()
    for rotation, layer in zip(rotations(model), x, strict=True):
        layer[:, rotation.second] = layer[:, rotation.first]
    return x


@given(seed=st.integers(0, 2**20), most=st.sampled_from([1.0, 3.0, 100.0]), roles=st.sampled_from(["k", "v", "kv"]))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_outputs_stay_and_caches_are_scaled_as_asked(model, seed, most, roles):
    given_to = {"keys": factors(model, seed, most)} if "k" in roles else {}
    given_to |= {"values": factors(model, seed + 1, most)} if "v" in roles else {}
    before = {name: x.clone() for name, x in model.state_dict().items()}
    other = inject(model, **given_to)
    expected, outputs = (strategies.run(each, None, TOKENS, (40,)) for each in (model, other))
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert other.vqkv_name.startswith(f"{model.vqkv_name} injected ")
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
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


def test_attention_whose_norms_undo_what_is_multiplied_is_refused(tmp_path):
    other = small_models.load("qwen3", tmp_path)
    with pytest.raises(DataError, match="inject knows no Qwen3Attention, with k_norm, k_proj"):
        inject(other, keys=torch.tensor(2.0))


def test_where_phenomena_are_put(monkeypatch):
    """Outliers in pairs of each head's own, one loud head in each layer, a bias where RoPE rotates least."""
    monkeypatch.setattr(sys.modules[injected.__module__], "inject", lambda model, **asked: asked)
    subject = Subject("vqkv/llama-mini", "python-stdlib", [2, 24], [2, 24])
    keys, other = (outlier_channels(each, 30.0)["keys"] for each in (subject, subject.changed(seed=1)))
    rotation = rotations(subject.model)[0]
    assert torch.equal(keys[..., rotation.first], keys[..., rotation.second]) and not torch.equal(keys, other)
    assert ((keys == 30.0).sum(dim=-1) == 2 * PAIRS).all() and ((keys == 30.0) | (keys == 1.0)).all()
    factors = loud_heads(subject, 10.0)
    loud = factors["keys"][:, :, 0] == 10.0
    assert torch.equal(factors["keys"], factors["values"]) and (loud.sum(dim=1) == 1).all() and loud.any(dim=0).all()
    bias = key_bias(subject, 100.0)["key_bias"]
    assert (bias.sum(dim=-1) == 100.0).all() and bias[0, 0].argmax() == rotation.first[rotation.angle.argmin()]


@torch.no_grad()
def test_norms_put_into_a_llama_leave_heads_of_equal_size_as_they_were(mini):
    """One token is as large as the mean over tokens."""
    model, tokens = mini[0], torch.tensor([[17]])
    changed = normed(model, tokens, ["key", "value"])
    torch.testing.assert_close(changed(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert all(x.square().mean(-1).sub(1).abs().max() < 1e-2 for role in capture(changed, tokens) for x in role)
    assert not torch.allclose(capture(model, tokens)[0][1], capture(changed, tokens)[0][1], rtol=0.1)


def test_rows_of_a_seed_are_those_of_what_it_draws():
    subject = Subject("vqkv/llama-mini", "python-stdlib", [2, 264], [1, 264], test_seed=0)
    sizes = {"loud heads": [30.0], "key bias": [300.0]}
    given = {"subject": subject, "sizes": sizes, "seeds": [0, 1], "codebook_size": 8}
    assert [case.arguments["system"] for case in injected.cases(**given)].count("vqllm") == 2
    table = injected(**given | {"sizes": {"loud heads": [30.0]}, "seeds": [0], "chunk_size": 132})
    assert table["injection_kl"].max() < 1e-7 and (table["kl_mean"] >= 0).all()
    by_head = table.set_index("system")[[*BY_HEAD]]
    assert by_head.loc[["vq", "vq unscaled"]].notna().all(axis=None)
    assert by_head.loc["vqq 0.1", ["quiet_codes"]].isna().all()
    assert {name.split()[0] for name in table.attrs["sources"]} == {"model", "corpus"}
