"""Notebook 01: what a model's keys and values are like."""

import statistics

import torch

from vqkv.errors import DataError
from vqkv.evaluation.exact import DTYPES, ExactPass, floor_kl
from vqkv.models.capture import capture
from vqkv.models.load import describe, kv_width
from vqkv.models.rope import rotates
from vqkv.study.experiments import probes
from vqkv.study.experiments.common import draw, frame, load


def magnitudes(models: list[str], corpus: str, seq_len: int, num_seqs: int, seed: int, dtype: str, device: str):
    """Notebook 01: one row per model, role, layer and KV head with the largest |value| and the channel outlier ratio.

    Roles are ``key`` (before RoPE), ``value`` and, in a model with RoPE, ``key_post_rope``. ``step`` is max|v| / 16,
    the size that the source calls the 4-bit step.
    """
    rows, sources = [], {}
    for name in models:
        model, tokenizer = load(name, dtype, device, sources)
        tokens = draw(corpus, tokenizer, "test", seq_len, num_seqs, seed, sources)
        keys, values = capture(model, tokens)
        roles = {"key": keys, "value": values}
        if rotates(model):
            roles["key_post_rope"] = capture(model, tokens, pre_rope=False)[0]
        for role, layers in roles.items():
            for layer, x in enumerate(layers):
                largest, ratio = x.float().abs().amax(dim=(0, 2, 3)), probes.channel_outlier_ratio(x)
                for head in range(x.shape[1]):
                    row = {"model": name, "role": role, "layer": layer, "head": head, "max_abs": largest[head].item()}
                    rows.append(row | {"step": row["max_abs"] / 16, "channel_ratio": ratio[head].item()})
    return frame(rows, sources)


def phenomena(models: list[str], corpus: str, seq_len: int, num_seqs: int, seed: int, dtype: str, device: str):
    """Notebook 01: what each model shows of sinks, outlier channels and inter-layer predictability."""
    rows, sources = [], {}
    for name in models:
        model, tokenizer = load(name, dtype, device, sources)
        train = draw(corpus, tokenizer, "train", seq_len, num_seqs, seed, sources)
        test = draw(corpus, tokenizer, "test", seq_len, num_seqs, seed, sources)
        found = _sink_rows(model, test) | _channel_rows(model, test) | _evr_rows(model, train, test)
        rows += [{"model": name, "quantity": quantity, "value": value} for quantity, value in found.items()]
    return frame(rows, sources)


def noise_floors(
    models: list[str], corpus: str, seq_len: int, num_seqs: int, chunk_size: int, seed: int, dtype: str, device: str
):
    """KL between each model and itself with an exact cache that is rounded, or read in pieces: a row each."""
    rows, sources = [], {}
    for name in models:
        model, tokenizer = load(name, dtype, device, sources)
        tokens = draw(corpus, tokenizer, "test", seq_len, num_seqs, seed, sources)
        floor = noise_floor(ExactPass(model), tokens.to(model.device), chunk_size)
        rows += [{"model": name, "cache": cache, "kl": kl} for cache, kl in floor.items()]
    return frame(rows, sources)


def _sink_rows(model, tokens) -> dict:
    strength = probes.sink_strength(model, tokens)
    length = tokens.shape[1]
    even = statistics.mean(1 / (i + 1) for i in range(16, length))
    return {
        "attention to the first token, mean over heads": strength.mean().item(),
        "attention to the first token, strongest head": strength.max().item(),
        "attention to the first token if it were uniform": even,
    }


def _channel_rows(model, tokens) -> dict:
    found = {}
    for role, layers in zip(("key", "value"), capture(model, tokens), strict=True):
        ratios = torch.cat([probes.channel_outlier_ratio(x) for x in layers])
        found[f"outlier channel over median channel, {role}, median head"] = ratios.median().item()
        found[f"outlier channel over median channel, {role}, worst head"] = ratios.max().item()
    return found


def _evr_rows(model, train, test) -> dict:
    evr, about = probes.interlayer_evr(model, train, test), describe(model)
    return {
        "hidden size": model.config.get_text_config().hidden_size,
        "KV width": kv_width(about),
        "EVR of K from K of the layer before": statistics.mean(evr["key"]),
        "EVR of V from V of the layer before and its own K": statistics.mean(evr["value"]),
    }


def noise_floor(exact, tokens: torch.Tensor, chunk_size: int = 32) -> dict[str, float]:
    """Mean KL in nats of caches in fp16, in bf16, and in the model's own type but read in pieces of ``chunk_size``;
    ``exact``: an ``ExactPass`` of the model. Raises ``DataError`` where no token is left behind the first piece."""
    if not 0 < chunk_size < tokens.shape[1] - 1:
        raise DataError(f"chunk_size {chunk_size} leaves nothing of {tokens.shape[1]} tokens to compare: use less")
    pieces = [len(piece) for piece in torch.arange(tokens.shape[1]).split(chunk_size)]
    logits, _ = exact(tokens)
    found = {name: floor_kl(exact.model, logits, tokens, pieces, dtype) for name, dtype in DTYPES.items()}
    return {name: kl[:, chunk_size:-1].mean().item() for name, kl in found.items()}
