"""model + compressor + tokens + protocol -> one row of a table."""

from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from vqkv.errors import DataError, UnknownNameError
from vqkv.evaluation.exact import ExactPass, attention_outputs
from vqkv.evaluation.metrics import token_kl, token_nll, top1_agreement, top2_agreement
from vqkv.models.capture import check_batch_size, check_tokens
from vqkv.models.layers import kv_layers, max_positions

PROTOCOLS = ("in_place", "chunked", "snapshot")
MEASURED = ("packed_bytes", "packed_values", "dynamic_values", "cache_bytes", "seq_len", "side_bytes")  # of a report
ROLES_MSE = ("key_mse", "value_mse")
TAIL = (1 - 0.95) / 2  # on each side of an interval
LOGITS = 1 << 27  # of all tokens of a batch; a comparison needs several times their bytes
Sums = dict[str, Tensor]  # what one batch adds to a row
NOTHING_LEFT = (
    "nothing is left to score behind the tokens that read nothing packed: use longer sequences, or a smaller window or "
    "flush block"
)


@torch.no_grad()
def evaluate(
    model,
    compressor,
    tokens: Tensor,
    protocol: str = "chunked",
    answers: Tensor | None = None,
    chunk_size: int = 32,
    prompt_len: int | None = None,
    step_size: int = 1,
    batch_size: int | None = None,
    reconstruction: bool = True,
    per_sequence: bool = False,
    exact: ExactPass | None = None,
) -> dict:
    """Compare ``model`` reading a compressed cache with itself reading everything exactly, on the same tokens.

    ``compressor``: a fitted ``Compressor``, or someone else's cache from ``vqkv.study.peers``. ``tokens``
    (num_seqs, seq_len) int64; ``answers`` of the same shape marks tokens whose greedy prediction is scored as recall.
    ``protocol``: ``in_place`` (one pass, the current token packed too), ``chunked`` (pieces of ``chunk_size`` tokens,
    each reading packed history; the default), ``snapshot`` (prefill ``prompt_len`` tokens, pack them, then decode and
    score the rest ``step_size`` tokens at a time). Only tokens that read something packed are scored. ``batch_size``:
    sequences at a time, by default 8, or as few as keep logits below ``LOGITS`` values. ``reconstruction``: whether to
    measure the MSE of K and V; ``per_sequence``: whether to add ``kl_each``, ``top1_each`` and ``top2_each``, lists
    with one number a sequence, and ``recall_each``, with one an answer. ``exact``: an ``ExactPass`` of ``model``, for
    comparing many compressors on the same tokens.

    Returns perplexities; KL(exact || compressed) in nats: mean with a 95% bootstrap interval over sequences, std, worst
    and ``kl_floor``, the mean that an fp16 cache has, below which nothing is a storage error; top-1 agreement; relative
    MSE of K, V and attention output; the byte meter's numbers; how many tokens of a sequence were scored, and how many
    exact tokens (its own piece's included) such a token saw on average.

    Raises ``UnknownNameError`` for another protocol, ``DataError`` for tokens too short to score,
    or too few for any packed token to be read.
    """
    exact = ExactPass(model) if exact is None else exact
    model = exact.model if model is exact.given else model
    _check_arguments(model, compressor, tokens, protocol, answers, exact)
    if batch_size is None:
        batch_size = max(1, min(8, LOGITS // (model.config.get_text_config().vocab_size * tokens.shape[1])))
    check_batch_size(batch_size)
    pieces = _pieces(protocol, tokens.shape[1], chunk_size, prompt_len, step_size)
    marked = [None] * len(tokens) if answers is None else answers.split(batch_size)
    measure = partial(_measured, exact, compressor, protocol, *pieces, reconstruction)
    totals = [measure(*batch) for batch in zip(tokens.split(batch_size), marked)]
    return _row(protocol, totals, per_sequence)


def _measured(exact, compressor, protocol, pieces, start, reconstruction: bool, batch, marks) -> Sums:
    model, in_place = exact.model, protocol == "in_place"
    cache = compressor.new_cache(model, in_place=in_place)
    first = compressor.settings.sink_tokens if in_place else start
    marks = None if marks is None else marks.to(model.device)
    sums = _compare(exact, cache, batch.to(model.device), pieces, first, marks)
    return sums | (_reconstruction(exact, compressor, batch) if reconstruction else {})


def _row(protocol: str, totals: list[Sums], per_sequence: bool) -> dict:
    recall = tuple(name for name in ("recall", "recall_exact") if name in totals[0])
    if recall and not any(len(batch["recall"]) for batch in totals):
        raise DataError(NOTHING_LEFT)
    row = {"protocol": protocol, **_summary(totals)}
    if per_sequence:
        names = ("kl", "top1", "top2", *recall)
        row |= {f"{name}_each": torch.cat([batch[name] for batch in totals]).tolist() for name in names}
    return row | (_mean_ratios(totals, *ROLES_MSE) if ROLES_MSE[0] in totals[0] else {})


def _check_arguments(model, compressor, tokens: Tensor, protocol: str, answers: Tensor | None, exact) -> None:
    if protocol not in PROTOCOLS:
        raise UnknownNameError("protocol", protocol, PROTOCOLS)
    if not hasattr(compressor, "new_cache"):
        raise DataError(f"{type(compressor).__name__} stores nothing yet: vqkv.calibrate(model, text, preset) fits one")
    check_tokens(model, tokens)
    if tokens.shape[1] < 3:
        raise DataError(f"tokens of shape {tuple(tokens.shape)}: need at least 3 tokens each")
    if (longest := max_positions(model)) < tokens.shape[1]:
        raise DataError(f"windows of {tokens.shape[1]} tokens, but the model has {longest} positions: use shorter ones")
    if answers is not None and (answers.dtype is not torch.bool or answers.shape != tokens.shape or not answers.any()):
        raise DataError(f"answers must be booleans of shape {tuple(tokens.shape)}, some of them True")
    if exact.model is not model:
        raise DataError("exact= is an ExactPass of another model: make one of this")


@torch.no_grad()
def evaluate_restored(exact: ExactPass, tokens: Tensor, keys: list[Tensor], values: list[Tensor]) -> dict:
    """Go on from a restored cache: score the ``tokens`` (num_seqs, seq_len) after those whose keys, as attention reads
    them, and values are given, over layers (num_seqs, num_kv_heads, prompt_len, head_dim). Returns the ``snapshot``
    protocol's KL, top-1 agreement and perplexities. ``exact``: see ``evaluate``."""
    model, start = exact.model, keys[0].shape[2]
    tokens = tokens.to(model.device)
    expected = exact(tokens)[0][:, start:-1]
    pairs = zip(keys, values, strict=True)
    cache = DynamicCache([tuple(x.to(model.device, model.dtype) for x in pair) for pair in pairs])
    logits = model(tokens[:, start:], past_key_values=cache, use_cache=True).logits[:, :-1]
    floor = exact.floor(tokens, [start, tokens.shape[1] - start])[:, start:-1].mean().item()
    row = _spread(token_kl(expected, logits).mean(1)) | {"kl_floor": floor}
    nll = [token_nll(found, tokens[:, start + 1 :]).mean().exp().item() for found in (expected, logits)]
    return row | dict(zip(("ppl_exact", "ppl", "top1"), (*nll, top1_agreement(expected, logits).mean().item())))


def _spread(kl: Tensor) -> dict:
    low, high = bootstrap_interval(kl)
    std, worst = kl.std(correction=0).item(), kl.max().item()
    return {"kl_mean": kl.mean().item(), "kl_low": low, "kl_high": high, "kl_std": std, "kl_worst": worst}


def bootstrap_interval(x: Tensor) -> tuple[float, float]:
    """95% percentile interval of the mean of ``x`` (num_seqs) (Efron & Tibshirani 1993, chapter 13); NaN below two."""
    if len(x) < 2 or not x.isfinite().all():
        return float("nan"), float("nan")
    values = x.double().cpu().numpy()
    drawn = np.random.default_rng(0).integers(0, len(x), (2000, len(x)))
    low, high = np.quantile(values[drawn].mean(-1), [TAIL, 1 - TAIL])
    return float(low), float(high)


def reconstruction_error(exact: ExactPass, compressor, tokens: Tensor, batch_size: int = 8) -> dict:
    """Relative MSE of the stored keys and values of ``tokens``, averaged over layers; the model reads exact ones."""
    return _mean_ratios([_reconstruction(exact, compressor, batch) for batch in tokens.split(batch_size)], *ROLES_MSE)


def _reconstruction(exact: ExactPass, compressor, batch: Tensor) -> Sums:
    """(num_layers, 2) for keys and for values: squared error and squared size, float64."""
    keys, values = exact.keys_and_values(batch, pre_rope=compressor.settings.pre_rope)
    known, sums = compressor.new_pass(), {name: [] for name in ROLES_MSE}
    for layer, pair in enumerate(zip(keys, values, strict=True)):
        stored = compressor.reconstruct(layer, *pair, known)
        for x, x_hat, found in zip(pair, stored, sums.values(), strict=True):
            found.append(_squares(x[:, :, : x_hat.shape[2]], x_hat))
    return {name: torch.stack(layers) for name, layers in sums.items()}


def _mean_ratios(batches: list[Sums], *names: str) -> dict:
    """Relative MSE per layer over all batches, averaged over layers."""
    sums = {name: sum(batch[name] for batch in batches) for name in names}
    return {name: sum((error / size).item() for error, size in layers) / len(layers) for name, layers in sums.items()}


def _pieces(protocol: str, seq_len: int, chunk_size: int, prompt_len: int | None, step_size: int):
    """Lengths of the pieces that the tokens are fed in, and the first position whose prediction is scored."""
    if protocol == "in_place":
        return [seq_len], 0
    if protocol == "chunked":
        if type(chunk_size) is not int or not 0 < chunk_size < seq_len:
            raise DataError(
                f"chunk_size {chunk_size} leaves none of {seq_len} tokens that reads packed history: "
                f"use 1 to {seq_len - 1}"
            )
        whole, rest = divmod(seq_len, chunk_size)
        return [chunk_size] * whole + [rest] * (rest > 0), 0
    prompt_len = seq_len * 3 // 4 if prompt_len is None else prompt_len
    if type(prompt_len) is not int or not 0 < prompt_len < seq_len - 1:
        raise DataError(f"prompt_len {prompt_len} must leave at least two of the {seq_len} tokens to decode")
    if type(step_size) is not int or step_size < 1:
        raise DataError(f"step_size {step_size!r} must be a positive integer")
    whole, rest = divmod(seq_len - prompt_len, step_size)
    return [prompt_len] + [step_size] * whole + [rest] * (rest > 0), prompt_len


def _compare(exact_pass: ExactPass, cache, tokens, pieces, start, answers) -> Sums:
    """Per-sequence means over the scored tokens of one batch, and sums."""
    model = exact_pass.model
    exact, exact_attention = exact_pass(tokens)
    with attention_outputs(model) as packed_attention:
        logits, exact_tokens = _read_packed(model, cache, tokens.split(pieces, dim=1))
    read = [sum(pieces[:i]) for i, count in enumerate(exact_tokens) if count is not None]
    start = max(start, read[0])
    if start >= tokens.shape[1] - 1:
        raise DataError(NOTHING_LEFT)
    exact, logits, targets = exact[:, start:-1], torch.cat(logits, dim=1)[:, start:-1], tokens[:, start + 1 :]
    out = {
        "nll_exact": token_nll(exact, targets).mean(1),
        "nll": token_nll(logits, targets).mean(1),
        "kl": token_kl(exact, logits).mean(1),
        "top1": top1_agreement(exact, logits).mean(1),
        "top2": top2_agreement(exact, logits).mean(1),
        "kl_floor": exact_pass.floor(tokens, pieces)[:, start:-1].mean(1),
        "exact_neighbours": _exact_neighbours(pieces, exact_tokens)[start:-1].mean().expand(len(tokens)),
        "attention_mse": torch.stack(
            [  # of the attention blocks' outputs, earlier errors included
                _squares(*(torch.cat(found[layer], 1)[:, start:] for found in (exact_attention, packed_attention)))
                for layer in exact_attention
            ]
        ),
        "report": torch.tensor([getattr(cache.report(), name) for name in MEASURED] + [targets.shape[1]]),
    }
    if answers is not None:
        marked = answers[:, start + 1 :]
        out["recall_exact"] = (exact.argmax(-1) == targets)[marked]
        out["recall"] = (logits.argmax(-1) == targets)[marked]
    return out


def _read_packed(model, cache, pieces) -> tuple[list[Tensor], list[float | None]]:
    """Logits of each piece, and how many exact tokens the cache held when it was read; None while nothing was packed.
    Raises ``DataError`` if the last piece, which may be the only one, reads nothing packed."""
    logits, exact_tokens = [], []
    for piece in pieces:
        exact_tokens.append(_exact_tokens(model, cache))
        logits.append(model(piece, past_key_values=cache, use_cache=True).logits)
    if len(pieces) == 1:  # in place: packed before it is read
        exact_tokens = [_exact_tokens(model, cache)]
    if exact_tokens[-1] is None:
        raise DataError("no packed token was read: use longer sequences, or a smaller window or flush block")
    return logits, exact_tokens


def _exact_tokens(model, cache) -> float | None:
    """Tokens of a sequence that are stored exact, on average over layers and heads; None while none is packed."""
    report = cache.report()
    per_token = sum(heads * (key + value) for heads, key, value in (layer.shape for layer in kv_layers(model)))
    values = max(1, per_token * report.batch_size)
    return (report.values - report.packed_values) / values if report.packed_values else None


def _exact_neighbours(pieces: list[int], exact_tokens: list[float | None]) -> Tensor:
    """Exact tokens that each token reads: those before its piece, and the piece's up to itself unless it is alone."""
    own = [torch.arange(1.0, length + 1) * (len(pieces) > 1) for length in pieces]
    return torch.cat([mine + (count or 0) for mine, count in zip(own, exact_tokens, strict=True)])


def _summary(batches: list[Sums]) -> dict:
    kept_apart = ("report", "attention_mse", *ROLES_MSE)
    joined = {k: torch.cat([b[k].float() for b in batches]) for k in batches[0] if k not in kept_apart}
    names = (*MEASURED, "scored_tokens")
    report = dict(zip(names, sum(b["report"] for b in batches).tolist(), strict=True))
    first = dict(zip(names, batches[0]["report"].tolist(), strict=True))
    packed, kl = report["packed_values"], joined["kl"]
    recall = {name: joined[name].mean().item() for name in ("recall_exact", "recall") if name in joined}
    return {
        "num_seqs": len(kl),
        "seq_len": first["seq_len"],
        "scored_tokens": first["scored_tokens"],
        "exact_neighbours": joined["exact_neighbours"].mean().item(),
        "ppl_exact": joined["nll_exact"].mean().exp().item(),
        "ppl": joined["nll"].mean().exp().item(),
        **_spread(kl),
        "kl_floor": joined["kl_floor"].mean().item(),
        "top1": joined["top1"].mean().item(),
        **_mean_ratios(batches, "attention_mse"),
        "bits_per_value": 8 * report["packed_bytes"] / packed if packed else float("nan"),
        "ratio": 2 * report["dynamic_values"] / report["cache_bytes"],
        "side_bytes": first["side_bytes"],
        **recall,
    }


def _squares(x: Tensor, x_hat: Tensor) -> Tensor:
    """Squared error and squared size."""
    x, x_hat = x.double(), x_hat.double()
    return torch.stack([(x - x_hat).square().sum(), x.square().sum()]).cpu()
