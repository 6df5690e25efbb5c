"""Notebook 01: what a model's keys and values are like, what it can do, and how it came to."""

import json
import math
import statistics
from functools import partial

import numpy as np
import torch

from vqkv.data.recall import RecallTask
from vqkv.evaluation.exact import ExactPass, noise_floor
from vqkv.models.capture import capture
from vqkv.models.layers import max_positions
from vqkv.models.load import BUNDLED, describe, kv_width
from vqkv.models.rope import rotates
from vqkv.reference.measure import PAIRS, induction_score
from vqkv.study.experiments import probes
from vqkv.study.experiments.common import draw, frame, load

FAR_PAIRS, GAPS = 8, (0, 64, 128, 256, 512, 850)  # pairs, and tokens of text between them and their queries


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
            roles["key_post_rope"] = capture(model, tokens, post_rope=True)[0]
        for role, layers in roles.items():
            for layer, x in enumerate(layers):
                largest, ratio = x.float().abs().amax(dim=(0, 2, 3)), probes.channel_outlier_ratio(x)
                for head in range(x.shape[1]):
                    row = {"model": name, "role": role, "layer": layer, "head": head, "max_abs": largest[head].item()}
                    rows.append(row | {"step": row["max_abs"] / 16, "channel_ratio": ratio[head].item()})
    return frame(rows, sources)


def phenomena(
    models: list[str], corpus: str, seq_len: int, num_seqs: int, recall_seqs: int, seed: int, dtype: str, device: str
):
    """Notebook 01: what each model shows of sinks, outlier channels, inter-layer predictability and recall."""
    rows, sources = [], {}
    for name in models:
        model, tokenizer = load(name, dtype, device, sources)
        train = draw(corpus, tokenizer, "train", seq_len, num_seqs, seed, sources)
        test = draw(corpus, tokenizer, "test", seq_len, num_seqs, seed, sources)
        context = max_positions(model)
        text = draw(corpus, tokenizer, "test", min(context, GAPS[-1] + 1), recall_seqs, seed, sources)[:, 1:]
        found = _sink_rows(model, test) | _channel_rows(model, test) | _evr_rows(model, train, test)
        found |= _recall_rows(model, tokenizer, context, recall_seqs, seed, text)
        task = RecallTask(tokenizer)
        words = np.array([*task.keys, *task.values, *task.newline])
        found["induction score, best head"] = induction_score(model, words)
        rows += [{"model": name, "quantity": quantity, "value": value} for quantity, value in found.items()]
    return frame(rows, sources)


def _recall_rows(model, tokenizer, context: float, num_seqs: int, seed: int, text) -> dict[str, float]:
    """Of lists that fit into the context, and of a few pairs behind more and more of ``text``."""
    recall = partial(probes.recall, model, tokenizer, num_seqs=num_seqs, seed=seed)
    pair = 2 * RecallTask(tokenizer).line  # tokens, asked for once
    found = {f"recall of {count} pairs": recall(count) for count in PAIRS if pair * count < context}
    gaps = [gap for gap in GAPS if gap + pair * FAR_PAIRS < context]
    far = {gap: recall(FAR_PAIRS, between=text[:, :gap]) for gap in gaps}
    return found | {f"recall of {FAR_PAIRS} pairs behind {gap} tokens": hit for gap, hit in far.items()}


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


def training_curves(models: list[str]):
    """What was measured of each bundled model while it was trained: a row per model, ability and number of tokens; of
    other models nothing is known, which is a row of NaN."""
    rows = []
    for name in models:
        log = json.loads((BUNDLED[name] / "training.json").read_text()) if name in BUNDLED else {"measured": []}
        for row in log["measured"]:
            found = {f"recall of {pairs} pairs": row["recall"][str(pairs)] for pairs in PAIRS}
            found |= {f"recall behind {gap} tokens": hit for gap, hit in row.get("recall_by_gap", {}).items()}
            found |= {key: row[key] for key in ("induction", "bits_per_byte") if key in row}
            about = {"model": name, "tokens": row["tokens"]}
            rows += [about | {"quantity": quantity, "value": value} for quantity, value in found.items()]
        if name not in BUNDLED:
            rows.append({"model": name, "tokens": 0, "quantity": "induction", "value": math.nan})
    return frame(rows, {})


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
