"""Needs of every experiment: what a compressor loses on a subject's text, its bits, and a table of plain rows."""

import dataclasses
import math
from functools import partial
from typing import Any

import pandas as pd
import torch

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.calibration.calibrate import calibrate
from vqkv.codecs.predictive import ROLES, LayerRole, side_by_side
from vqkv.evaluation.evaluate import bootstrap_interval, evaluate
from vqkv.evaluation.questions import FactsBatch, all_right, facts_batch
from vqkv.models.layers import evaluating
from vqkv.models.load import values_per_token
from vqkv.presets import Preset
from vqkv.study.metrics import explained_variance_ratio
from vqkv.study.subject import Subject

FRAMEWORK = {  # codecs of the VQ quality framework; they take keyframe, codebook_size and seed
    "product codes, threshold 0.08": partial(presets.vqq_product, 0.08),
    "product codes, threshold 0.10": partial(presets.vqq_product, 0.1),
    "VQ of 2 values": partial(presets.vq, 2),
    "VQ of 8 values": partial(presets.vq, 8),
    "VQ of 8, threshold 0.07": partial(presets.vqq, 0.07),
}
COPY_FROM = 16  # tokens of a passage after which a model can know which comes again


def bare(preset: Preset) -> Preset:
    """Return the preset without sinks, recent window and a flush block beyond its codec's."""
    return dataclasses.replace(preset, sink_tokens=0, recent_window=0, block_tokens=1)


def exact_compressor(subject: Subject) -> Compressor:
    """Return a compressor that stores everything in 16 bits."""
    return calibrate(subject.model, subject.train[:1], presets.fp16(), progress=False)


def by_window(subject: Subject, compressor, tokens: torch.Tensor | None = None, **read) -> dict[str, Any]:
    """Return ``evaluate``'s row of the held-out text or ``tokens``, with ``ppl_increase`` (%) and ``kl_each``."""
    tokens = subject.test if tokens is None else tokens
    row = evaluate(subject.model, compressor, tokens, per_sequence=True, exact=subject.exact, **read)
    each = {"kl_each": " ".join(f"{kl:.5g}" for kl in row["kl_each"])}
    each["ppl_increase"] = 100 * (row["ppl"] / row["ppl_exact"] - 1)
    return {name: value for name, value in row.items() if not isinstance(value, list)} | each


def facts_answered(
    subject: Subject, compressor, num_facts: int, text_len: int, num_seqs: int, seed: int | None = None
) -> dict[str, float]:
    """Ask for facts in texts: shares answered, ``_exact`` too, and points ``facts_lost`` with its 95% interval."""
    seed = subject.seed if seed is None else seed
    text = subject.text("test", [num_seqs, text_len], seed)
    batch = facts_batch(subject.tokenizer, num_facts, text, text_len, seed)
    exact = subject.exact.remembered("facts", batch.tokens, lambda: (answered(subject.model, None, batch),))[0]
    right = answered(subject.model, compressor, batch)
    low, high = bootstrap_interval(100 * (exact.double() - right.double()).mean(1))
    share, share_exact = right.double().mean().item(), exact.double().mean().item()
    lost = {"facts_lost": 100 * (share_exact - share), "facts_lost_low": low, "facts_lost_high": high}
    return {"facts": share, "facts_exact": share_exact} | lost


@torch.no_grad()
def answered(model, compressor, batch: FactsBatch) -> torch.Tensor:
    """Say which questions of ``batch`` greedy generation would answer with every token right, bool (n, num_facts). The
    text is one prefill; the questions read it as ``compressor`` stores it, or exactly if that is None."""
    model, right = evaluating(model), []
    for tokens, question in zip(batch.tokens.to(model.device), batch.question):
        asked = (question > 0).nonzero().flatten().to(tokens.device)
        cache = None if compressor is None else compressor.new_cache(model)
        first = 0
        if cache is not None:
            first = batch.text_len
            model(tokens[None, :first], past_key_values=cache, use_cache=True, logits_to_keep=1)
        piece = tokens[None, first : asked[-1]]  # the last token answered is not read
        kept = {"use_cache": cache is not None, "logits_to_keep": asked - 1 - first}
        right.append(model(piece, past_key_values=cache, **kept).logits[0].argmax(-1) == tokens[asked])
    return all_right(batch, torch.cat(right).cpu())


def frame(rows: list[dict], sources: dict) -> pd.DataFrame:
    """Return a table whose ``attrs`` carry the sources."""
    table = pd.DataFrame(rows)
    table.attrs["sources"] = dict(sources)
    return table


def bits_with_side(row: dict, about: dict, tokens: int, exact_tokens: float = 0) -> float:
    """Return bits of a value with side information in a cache of ``tokens``, ``exact_tokens`` of them in 16 bits."""
    bits, values = row["bits_per_value"], values_per_token(about)
    return bits + (16 - bits) * exact_tokens / tokens + 8 * row["side_bytes"] / (tokens * values)


def exact_tokens(compressor) -> float:
    """Return tokens that caches keep in 16 bits on average: sinks, window, and what waits for a block to fill."""
    settings = compressor.settings
    block = math.lcm(settings.block_tokens, compressor.block_tokens)
    return settings.sink_tokens + settings.recent_window + (block - 1) / 2


def explained_by_layer(subject: Subject, compressor, tokens: torch.Tensor) -> dict[LayerRole, float]:
    """Return the EVR of keys and values that are read back of ``tokens`` (num_seqs, seq_len), by role and layer."""
    reconstructions, ratios, pre_rope = compressor.new_pass(), {}, compressor.settings.pre_rope
    for layer, pair in enumerate(zip(*subject.exact.keys_and_values(tokens, pre_rope), strict=True)):
        for role, x, x_hat in zip(ROLES, pair, compressor.reconstruct(layer, *pair, reconstructions), strict=True):
            x = x[:, :, : x_hat.shape[2]]
            ratios[role, layer] = explained_variance_ratio(side_by_side(x.float()), side_by_side(x_hat))
    return ratios
