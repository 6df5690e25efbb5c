"""What errors in keys and values cost: predicted from gradients, and measured one layer and role at a time."""

import pytest
import small_models
import torch
from projections import changed

from vqkv import DataError, calibrate, presets
from vqkv.calibration.error_costs import cost_curves, fisher_metrics
from vqkv.codecs.predictive import ROLES
from vqkv.models.capture import capture
from vqkv.models.load import describe
from vqkv.models.metrics import token_kl

TOKENS = torch.randint(1, 4096, (8, 40), generator=torch.Generator().manual_seed(0))
SINKS, BLOCK = 2, 4
PRESET = presets.crossed("uniform", 1.0, rotation="none", block_tokens=BLOCK, sink_tokens=SINKS)


@pytest.fixture(scope="module", params=["gpt2", "qwen3", "glm", "mistral sliding"])
def model(request, tmp_path_factory):
    name, *sliding = request.param.split()
    make = small_models.sliding if sliding else small_models.load
    return make(name, tmp_path_factory.mktemp(name))


@torch.inference_mode()
def cost(model, layer_role, change):
    """KL in nats, mean over tokens."""
    exact = model(TOKENS, use_cache=False).logits
    with changed(model, layer_role, change):
        return token_kl(exact, model(TOKENS, use_cache=False).logits).mean().item()


def layer_roles(model):
    return [(role, layer) for layer in range(describe(model)["num_layers"]) for role in ROLES]


def test_fisher_predicts_what_small_errors_cost(model):
    """Noise of the same size in all channels at every token: half of the trace times its variance, within a third for
    this many tokens."""
    metrics = fisher_metrics(model, TOKENS)
    assert set(metrics) == set(layer_roles(model))
    for layer_role, metric in metrics.items():
        torch.testing.assert_close(metric, metric.mT)
        trace, seeded = metric.diagonal(dim1=1, dim2=2).sum().item(), torch.Generator().manual_seed(1)

        def noisy(x, size=(2 * 2e-3 / trace) ** 0.5, generator=seeded):
            return x + size * torch.randn(x.shape, generator=generator)

        assert sum(cost(model, layer_role, noisy) for _ in range(3)) / 3 == pytest.approx(2e-3, rel=0.35), layer_role


def test_fisher_is_the_same_whatever_was_switched_off_and_leaves_nothing_behind(llama):
    expected = fisher_metrics(llama, TOKENS[:2])
    llama.requires_grad_(False)
    try:
        with torch.inference_mode():
            metrics = fisher_metrics(llama, TOKENS[:2].clone())
    finally:
        llama.requires_grad_(True)
    assert all(torch.equal(metrics[layer_role], metric) for layer_role, metric in expected.items())
    assert all(parameter.grad is None for parameter in llama.parameters())
    with changed(llama, ("value", 2), lambda x: x * torch.nan), pytest.raises(DataError, match="NaN or infinite"):
        fisher_metrics(llama, TOKENS)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in llama.modules())


def test_errors_after_rope_cost_as_much_in_other_directions_also_in_16_bits(tmp_path):
    model = small_models.load("llama", tmp_path)
    before, after = (fisher_metrics(model, TOKENS, pre_rope=pre_rope) for pre_rope in (True, False))
    halves = [fisher_metrics(model.bfloat16(), TOKENS, pre_rope) for pre_rope in (True, False)]
    for layer_role, metric in before.items():
        sums = [x.diagonal(dim1=1, dim2=2).sum() for x in (metric, after[layer_role])]
        torch.testing.assert_close(*sums, rtol=1e-4, atol=0)
        assert torch.allclose(metric, after[layer_role], rtol=1e-3) == (layer_role[0] == "value")
        for half, exact in zip(halves, (metric, after[layer_role]), strict=True):
            assert torch.cosine_similarity(half[layer_role].flatten(), exact.flatten(), 0) > 0.8


def test_a_role_costs_about_what_replacing_it_alone_does(model):
    """e' F e / 2 of what the codec restores, which comes near the KL of a pass with that of one layer and role."""
    compressor, captured = calibrate(model, TOKENS, PRESET, progress=False), capture(model, TOKENS)
    metrics = fisher_metrics(model, TOKENS)
    curves = cost_curves(model, compressor, TOKENS, metrics)
    assert set(curves) == set(layer_roles(model))
    for (role, layer), curve in curves.items():
        last = SINKS + (TOKENS.shape[1] - SINKS) // BLOCK * BLOCK
        rows = captured[ROLES.index(role)][layer][:, :, SINKS:last].float()
        codec = compressor.codecs[layer][ROLES.index(role)]
        restored = codec.decode(codec.encode(rows))

        def change(x, restored=restored, last=last):
            return torch.cat([x[:, :, :SINKS], restored, x[:, :, last:]], dim=2)

        measured = cost(model, (role, layer), change)
        rates, error = codec.quantizer.rates(codec.vectors(rows)), (restored - rows).double().square().mean()
        assert torch.equal(curve[:, 0], rates[:, 0]) and measured > 1e-5
        by_head = zip((restored - rows).unbind(1), metrics[role, layer], strict=True)
        expected = sum(((e @ metric) * e).sum(-1).double().mean() for e, metric in by_head) / 2
        torch.testing.assert_close(curve[:, 1], rates[:, 1] * expected / error, rtol=2e-2, atol=0)
        assert 1 / 3 < (curve[:, 1] / (rates[:, 1] * measured / error)).mean() < 3, (role, layer)
