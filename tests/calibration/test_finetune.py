"""Gradients: what errors in keys and values cost, predicted and measured one layer and role at a time; fine-tuning."""

import copy
import dataclasses

import pytest
import small_models
import torch
from projections import changed, kv_sources
from torch.nn import functional as F

from vqkv import DataError, FormatError, calibrate, evaluate, presets
from vqkv.calibration.error_costs import cost_curves, fisher_metrics
from vqkv.calibration.finetune import StraightThrough, attention_weights, finetune
from vqkv.codecs.predictive import ROLES
from vqkv.models.capture import capture
from vqkv.models.layers import kv_layers
from vqkv.models.load import describe
from vqkv.models.metrics import token_kl

TEXT = torch.randint(1, 4096, (8, 40), generator=torch.Generator().manual_seed(0))
SINKS, BLOCK = 2, 4
UNIFORM = presets.crossed("uniform", 1.0, rotation="none", block_tokens=BLOCK, sink_tokens=SINKS)


model = small_models.fixture("gpt2", "qwen3", "glm", "mistral sliding")


@torch.inference_mode()
def cost(model, layer_role, change):
    """KL in nats, mean over tokens."""
    exact = model(TEXT, use_cache=False).logits
    with changed(model, layer_role, change):
        return token_kl(exact, model(TEXT, use_cache=False).logits).mean().item()


def layer_roles(model):
    return [(role, layer) for layer in range(describe(model)["num_layers"]) for role in ROLES]


def test_fisher_predicts_what_small_errors_cost(model):
    """Noise of the same size in all channels at every token: half of the trace times its variance, within a third for
    this many tokens."""
    metrics = fisher_metrics(model, TEXT)
    assert set(metrics) == set(layer_roles(model))
    for layer_role, metric in metrics.items():
        torch.testing.assert_close(metric, metric.mT)
        trace, seeded = metric.diagonal(dim1=1, dim2=2).sum().item(), torch.Generator().manual_seed(1)

        def noisy(x, size=(2 * 2e-3 / trace) ** 0.5, generator=seeded):
            return x + size * torch.randn(x.shape, generator=generator)

        assert sum(cost(model, layer_role, noisy) for _ in range(3)) / 3 == pytest.approx(2e-3, rel=0.35), layer_role


def test_fisher_is_the_same_whatever_was_switched_off_and_leaves_nothing_behind(llama):
    expected = fisher_metrics(llama, TEXT[:2])
    llama.requires_grad_(False)
    try:
        with torch.inference_mode():
            metrics = fisher_metrics(llama, TEXT[:2].clone())
    finally:
        llama.requires_grad_(True)
    assert all(torch.equal(metrics[layer_role], metric) for layer_role, metric in expected.items())
    assert all(parameter.grad is None for parameter in llama.parameters())
    with changed(llama, ("value", 2), lambda x: x * torch.nan), pytest.raises(DataError, match="NaN or infinite"):
        fisher_metrics(llama, TEXT)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in llama.modules())


def test_errors_after_rope_cost_as_much_in_other_directions_also_in_16_bits(tmp_path):
    model = small_models.load("llama", tmp_path)
    before, after = (fisher_metrics(model, TEXT, pre_rope=pre_rope) for pre_rope in (True, False))
    halves = [fisher_metrics(model.bfloat16(), TEXT, pre_rope) for pre_rope in (True, False)]
    for layer_role, metric in before.items():
        sums = [x.diagonal(dim1=1, dim2=2).sum() for x in (metric, after[layer_role])]
        torch.testing.assert_close(*sums, rtol=1e-4, atol=0)
        assert torch.allclose(metric, after[layer_role], rtol=1e-3) == (layer_role[0] == "value")
        for half, exact in zip(halves, (metric, after[layer_role]), strict=True):
            assert torch.cosine_similarity(half[layer_role].flatten(), exact.flatten(), 0) > 0.8


def test_a_role_costs_about_what_replacing_it_alone_does(model):
    """e' F e / 2 of what the codec restores, which comes near the KL of a pass with that of one layer and role."""
    compressor, captured = calibrate(model, TEXT, UNIFORM, progress=False), capture(model, TEXT)
    metrics = fisher_metrics(model, TEXT)
    curves = cost_curves(model, compressor, TEXT, metrics)
    assert set(curves) == set(layer_roles(model))
    for (role, layer), curve in curves.items():
        last = SINKS + (TEXT.shape[1] - SINKS) // BLOCK * BLOCK
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


TOKENS = torch.randint(0, 400, (24, 40), generator=torch.Generator().manual_seed(0))
PRESET = presets.vqllm(2, 16, 8)
AFFINE = dataclasses.replace(presets.quanto(4, 8), pre_rope=True, sink_tokens=3)
QUIET = {"batch_size": 6, "progress": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: small_models.load(name, tmp_path_factory.mktemp(name)) for name in ("llama", "gpt2", "qwen3")}


def tuned(model, preset=PRESET, **settings):
    """A fine-tuned copy of ``model``, and what ``finetune`` returned."""
    twin = copy.deepcopy(model)
    return twin, finetune(twin, TOKENS, preset, **{"lr": 1e-3} | QUIET | settings)


def apart(a, b):
    """The largest difference between two models' attention weights."""
    return max((x - y).abs().max().item() for x, y in zip(attention_weights(a), attention_weights(b), strict=True))


@pytest.mark.parametrize(
    ("name", "preset"),
    [("llama", PRESET), ("gpt2", None), ("qwen3", AFFINE), ("llama", presets.vqllm(2, 16, 8, beam=3))],
)
def test_all_attention_weights_are_trained_and_nothing_else(models, name, preset):
    model = copy.deepcopy(models[name])
    frozen = model.get_input_embeddings().weight
    frozen.requires_grad_(False)
    model.get_submodule("lm_head").train()
    attention = {id(weight) for weight in attention_weights(model)}
    before = copy.deepcopy(model.state_dict())
    result = finetune(model, TOKENS, preset, lr=1e-3, **QUIET)
    for key, weight in model.named_parameters():
        changed = not torch.equal(weight, before[key])
        assert changed == (id(weight) in attention), key
        assert weight.grad is None and weight.requires_grad == (weight is not frozen)
        assert weight.dtype == torch.float32
    if preset:
        assert model.vqkv_name == f"{models[name].vqkv_name} fine-tuned" == result.compressor.model["name"]
        result.compressor.check(model)
        with pytest.raises(FormatError, match="other attention weights"):
            result.compressor.check(models[name])
    assert not model.training and model.get_submodule("lm_head").training
    assert preset is None or result.compressor.settings.sink_tokens == preset.sink_tokens
    assert len(result.losses) == 3 and (result.compressor is None) == (preset is None)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("name", "preset"),
    [("llama", PRESET), ("gpt2", PRESET), ("qwen3", AFFINE), ("llama", presets.vqllm(2, 16, 8, pre_rope=False))],
)
def test_the_forward_pass_is_the_in_place_protocol_and_gradients_pass_straight_through(models, name, preset):
    model = models[name]
    compressor = calibrate(model, TOKENS, dataclasses.replace(preset, sink_tokens=0), progress=False)
    reading = StraightThrough(model, compressor.codecs, compressor.settings)
    with torch.inference_mode():
        expected = model(TOKENS[:4], past_key_values=compressor.new_cache(model, in_place=True)).logits
        uncompressed = model(TOKENS[:4], use_cache=False).logits
        logits = reading.logits(TOKENS[:4])
    # a few values are as near to one code as to another, and the cache rotates keys there and back
    assert (logits - expected).norm() < 0.02 * (expected - uncompressed).norm()
    reading = StraightThrough(model, compressor.codecs, dataclasses.replace(compressor.settings, sink_tokens=2))
    for number, layer in enumerate(kv_layers(model)):
        shape = (2, layer.num_kv_heads, 7, layer.head_dim)
        pair = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in (1, 2)]
        for x, read in zip(pair, reading._read({}, number, *pair), strict=True):
            flowing = torch.randn(shape, generator=torch.Generator().manual_seed(3))
            assert torch.equal(torch.autograd.grad(read, x, flowing)[0], flowing)
            torch.testing.assert_close(read[:, :, :2], x[:, :, :2], rtol=1e-5, atol=1e-5)


def test_the_control_is_plain_training(models):
    plain = copy.deepcopy(models["llama"])
    optimizer = torch.optim.AdamW(attention_weights(plain), lr=1e-3, weight_decay=0)
    losses = []
    for batch in TOKENS[6:].split(6):
        losses.append(plain(batch, labels=batch).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    control, result = tuned(models["llama"], None)
    torch.testing.assert_close(torch.tensor(result.losses), torch.stack(losses).detach(), rtol=1e-5, atol=0)
    assert apart(plain, models["llama"]) > 2e-3 and apart(plain, control) < 2e-5


def test_codebooks_follow_the_moving_average_of_changing_keys_and_values(models):
    model, preset = copy.deepcopy(models["gpt2"]), presets.vqllm(1, 16, 8)
    source, recorded = kv_sources(model)[2], []
    hook = source.key_module.register_forward_hook(lambda m, a, out: recorded.append(out.detach().clone()))
    result = finetune(model, TOKENS, preset, lr=1e-3, **QUIET, micro_batch=3)
    hook.remove()
    passes = [source.heads(x, source.key_part) for x in recorded if len(x) == 3]
    assert len(passes) == 2 + 3 * 2  # every batch in two parts
    steps = [torch.cat(passes[i : i + 2]) for i in (2, 4, 6)]
    codec = preset.key_codec(32).partial_fit(torch.cat(passes[:2]))
    start, ema = codec.quantizer.codebooks[0].double(), codec.quantizer._ema
    codebook, counts, sums = start, ema.counts[0], ema.sums[0]
    for x in steps:
        scaled = x / x.std(-1, correction=0, keepdim=True).half().float()
        rows = scaled.unflatten(-1, (8, 4)).mT.reshape(-1, 8).double()
        chosen = F.one_hot(torch.cdist(rows, codebook).argmin(-1), 16).double()
        counts, sums = 0.99 * counts + 0.01 * chosen.sum(0), 0.99 * sums + 0.01 * chosen.T @ rows
        smoothed = (counts + 1e-5) / (counts.sum() + 16e-5) * counts.sum()
        codebook = sums / smoothed.unsqueeze(-1)
    learned = result.compressor.codecs[2][0].state_dict()["quantizer.codebooks"][0].double()
    assert (codebook - start).abs().max() > 1e-2
    torch.testing.assert_close(learned, codebook, rtol=1e-3, atol=1e-3)


def test_parts_of_a_batch_add_up_to_the_batch(models):
    (one_batch, result), (parts, also) = tuned(models["llama"]), tuned(models["llama"], micro_batch=2)
    assert result.losses == pytest.approx(also.losses, rel=1e-5)
    assert apart(one_batch, parts) < 2e-5 < 1e-3 < apart(one_batch, models["llama"])


@pytest.mark.parametrize(("name", "dtype", "lr"), [("llama", torch.bfloat16, 4e-4), ("gpt2", torch.float16, 5e-5)])
def test_steps_too_small_for_16_bits_add_up(models, name, dtype, lr):
    model, tokens = copy.deepcopy(models[name]).to(dtype), TOKENS[:12, :20].repeat(4, 1)
    half = copy.deepcopy(model)
    settings = {"lr": lr, **QUIET}
    result = finetune(half, tokens, PRESET, **settings)
    assert {weight.dtype for weight in half.parameters()} == {dtype}
    before, after = (torch.cat([w.detach().flatten() for w in attention_weights(m)]) for m in (model, half))
    large = before.abs() > 0.125
    assert torch.equal(before[large] + before[large].sign() * lr, before[large])  # one step would be rounded away
    assert large.sum() > 100 and (before != after)[large].float().mean() > 0.3
    result.compressor.check(half)
    assert result.losses == pytest.approx(finetune(model.float(), tokens, PRESET, **settings).losses, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": presets.kvquant(3, block_tokens=8)}, "kvquant.*blocks of tokens"),
        ({"preset": presets.entropy_coded(PRESET, block_tokens=16)}, "blocks of tokens"),
        ({"preset": presets.aqua()}, "aqua.*predicted"),
        ({"lr": 0}, "lr 0"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": 24}, "a second batch"),
        ({"tokens": TOKENS[:, :1]}, "2 tokens"),
    ],
)
def test_bad_arguments_are_named(models, settings, message):
    with pytest.raises(DataError, match=message):
        finetune(models["llama"], **{"tokens": TOKENS, "preset": PRESET} | QUIET | settings)


def test_a_loss_that_is_not_finite_names_its_step_and_leaves_the_model_alone(models):
    model, before = copy.deepcopy(models["llama"]), models["llama"]
    with torch.no_grad():
        model.lm_head.weight[TOKENS[-1, -1]] = float("inf")  # read in the last batch only
    with pytest.raises(DataError, match="step 1 of fine-tuning: loss nan"):
        finetune(model, TOKENS, PRESET, **QUIET)
    model.lm_head.load_state_dict(before.lm_head.state_dict())
    assert all(map(torch.equal, model.state_dict().values(), before.state_dict().values()))
    assert not any(module._forward_hooks for module in model.modules())


def test_losses_are_of_the_quantized_model_and_fall(models):
    model, first = models["llama"], TOKENS[:6]
    same = torch.cat([first] * 9)
    quantized = finetune(copy.deepcopy(model), same, PRESET, lr=1e-3, **QUIET).losses
    control = finetune(copy.deepcopy(model), same, None, lr=1e-3, **QUIET).losses
    row = evaluate(model, calibrate(model, first, PRESET, progress=False), first, "in_place", reconstruction=False)
    assert quantized[0] == pytest.approx(torch.tensor(row["ppl"]).log().item(), rel=1e-3)
    assert control[0] == pytest.approx(torch.tensor(row["ppl_exact"]).log().item(), rel=1e-5)
    assert quantized[-1] < quantized[0] - 0.1 and control[-1] < control[0] - 0.1
