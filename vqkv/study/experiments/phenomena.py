"""Notebook 01: what a model's keys and values are like."""

import statistics

import torch

from vqkv.errors import DataError
from vqkv.evaluation.exact import DTYPES, floor_kl
from vqkv.models.capture import capture
from vqkv.models.layers import kv_layers
from vqkv.models.load import kv_width
from vqkv.models.rope import rotates
from vqkv.study.experiments import probes
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment

STRENGTH = 1e-3  # of AQUA-KV's ridge


@experiment()
def magnitudes(subject: Subject) -> list[dict]:
    """Measure the largest |value| and the channel outlier ratio: a row per role, layer and KV head.

    ``step`` is max|v| / 16, the size that the source calls the 4-bit step.
    """
    keys, values = capture(subject.model, subject.test)
    roles, rows = {"key": keys, "value": values}, []
    if rotates(subject.model):
        roles["key_post_rope"] = capture(subject.model, subject.test, pre_rope=False)[0]
    for role, layers in roles.items():
        for layer, x in enumerate(layers):
            largest, ratio = x.float().abs().amax(dim=(0, 2, 3)), probes.channel_outlier_ratio(x)
            for head in range(x.shape[1]):
                row = {"model": subject.name, "role": role, "layer": layer, "head": head}
                row |= {"max_abs": largest[head].item(), "step": largest[head].item() / 16}
                rows.append(row | {"channel_ratio": ratio[head].item()})
    return rows


@experiment()
def phenomena(subject: Subject) -> list[dict]:
    """Return what a model shows of sinks, outlier channels and inter-layer predictability: a row per ``quantity``."""
    model, tokens = subject.model, subject.test
    strength, uniform = probes.sink_strength(model, tokens), [1 / i for i in range(17, tokens.shape[1] + 1)]
    value_of = {
        "attention to the first token, mean over heads": strength.mean().item(),
        "attention to the first token, strongest head": strength.max().item(),
        "attention to the first token if it were uniform": statistics.mean(uniform),
    }
    for role, layers in zip(("key", "value"), capture(model, tokens), strict=True):
        ratios = torch.cat([probes.channel_outlier_ratio(x) for x in layers])
        value_of[f"outlier channel over median channel, {role}, median head"] = ratios.median().item()
        value_of[f"outlier channel over median channel, {role}, worst head"] = ratios.max().item()
    predictors = {"key": probes.Probe("K", "K-1"), "value": probes.Probe("V", "V-1+K")}  # AQUA-KV's, on exact inputs
    sums, judged = (probes.probe_sums(model, x, [*predictors.values()], skip=0) for x in (subject.train, tokens))
    evr = {
        role: [row["evr"] for row in probes.explained_variance(sums, judged, [probe], len(kv_layers(model)), STRENGTH)]
        for role, probe in predictors.items()
    }
    value_of["hidden size"] = model.config.get_text_config().hidden_size
    value_of["KV width"] = kv_width(subject.about)
    value_of["EVR of K from K of the layer before"] = statistics.mean(evr["key"])
    value_of["EVR of V from V of the layer before and its own K"] = statistics.mean(evr["value"])
    return [{"model": subject.name, "quantity": name, "value": value} for name, value in value_of.items()]


@experiment()
def noise_floors(subject: Subject, chunk_size: int) -> list[dict]:
    """Measure KL between a model and itself with an exact cache that is rounded, or read in pieces: a row each."""
    floors = noise_floor(subject.exact, subject.test.to(subject.model.device), chunk_size)
    return [{"model": subject.name, "cache": cache, "kl": kl} for cache, kl in floors.items()]


def noise_floor(exact, tokens: torch.Tensor, chunk_size: int = 32) -> dict[str, float]:
    """Mean KL in nats of caches in fp16, in bf16, and in the model's own type but read in pieces of ``chunk_size``;
    ``exact``: an ``ExactPass`` of the model. Raises ``DataError`` where no token is left behind the first piece."""
    if not 0 < chunk_size < tokens.shape[1] - 1:
        raise DataError(f"chunk_size {chunk_size} leaves nothing of {tokens.shape[1]} tokens to compare: use less")
    pieces = [len(piece) for piece in torch.arange(tokens.shape[1]).split(chunk_size)]
    logits, _ = exact(tokens)
    kl_of = {name: floor_kl(exact.model, logits, tokens, pieces, dtype) for name, dtype in DTYPES.items()}
    return {name: kl[:, chunk_size:-1].mean().item() for name, kl in kl_of.items()}
