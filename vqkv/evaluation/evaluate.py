"""model + compressor + tokens + protocol -> one row of a table."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from vqkv.cache.meter import total
from vqkv.errors import DataError, UnknownNameError
from vqkv.evaluation.exact import ExactPass, attention_outputs
from vqkv.models.capture import check_tokens
from vqkv.models.layers import max_positions
from vqkv.models.load import outline, values_per_token
from vqkv.models.metrics import token_kl, token_nll, top1_agreement, top2_agreement
from vqkv.runtime.checks import check_whole

PROTOCOLS = ("in_place", "chunked", "snapshot")
ROLES_MSE = ("key_mse", "value_mse")
TAIL = (1 - 0.95) / 2  # on each side of an interval
LOGITS = 1 << 27  # of all tokens of a batch; a comparison needs several times their bytes
Sums = dict[str, Any]  # what one batch adds to a row: tensors and the byte meter's report
NOTHING_LEFT = (
    "nothing is left to score that read anything packed: use longer sequences, or a preset with a smaller "
    "recent_window= or block_tokens="
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
    """Compare ``model`` reading a compressed cache with itself reading an uncompressed one, on the same tokens.

    ``compressor``: a fitted ``Compressor``, or another library's cache from ``vqkv.study.peers``. ``tokens``
    (num_seqs, seq_len) int64; ``answers`` of the same shape marks tokens whose greedy prediction is scored as recall.
    ``protocol``: ``in_place`` (one pass, the current token packed too), ``chunked`` (pieces of ``chunk_size`` tokens,
    each reading packed history; the default), ``snapshot`` (prefill ``prompt_len`` tokens, pack them, then decode and
    score the rest ``step_size`` tokens at a time). Only tokens that read something packed are scored. ``batch_size``:
    sequences at a time, by default 8, or as few as keep logits below ``LOGITS`` values. ``reconstruction``: whether to
    measure the MSE of K and V, where layers are stored apart; ``per_sequence``: whether to add ``kl_each``,
    ``top1_each`` and ``top2_each``, lists with one number a sequence, and ``recall_each``, with one an answer.
    ``exact``: an ``ExactPass`` of ``model``, for comparing many compressors on the same tokens.

    Returns perplexities; KL(exact || compressed) in nats: mean with a 95% bootstrap interval over sequences, std, worst
    and ``kl_floor``, the mean that an fp16 cache has, below which nothing is a storage error; top-1 agreement; relative
    MSE of K, V and attention output; the byte meter's numbers; how many tokens of a sequence were scored, and how many
    exact tokens (its own piece's included) such a token saw on average.

    Raises ``UnknownNameError`` for another protocol, ``DataError`` for tokens too short to score, or too few for any
    packed token to be read.
    """
    exact = ExactPass(model) if exact is None else exact
    model = exact.model if model is exact.given else model
    if protocol not in PROTOCOLS:
        raise UnknownNameError("protocol", protocol, PROTOCOLS)
    if not hasattr(compressor, "new_cache"):
        raise DataError(f"{type(compressor).__name__} stores nothing yet: vqkv.calibrate(model, text, preset) fits one")
    check_tokens(model, tokens)
    if (longest := max_positions(model)) < tokens.shape[1]:
        raise DataError(f"windows of {tokens.shape[1]} tokens, but the model has {longest} positions: use shorter ones")
    if exact.model is not model:
        raise DataError("exact= is an ExactPass of another model: make one of this")
    if batch_size is None:
        batch_size = max(1, min(8, LOGITS // (model.config.get_text_config().vocab_size * tokens.shape[1])))
    check_whole("batch_size", batch_size, 1)
    pieces, start = _pieces(protocol, tokens.shape[1], chunk_size, prompt_len, step_size)
    start = compressor.settings.sink_tokens if protocol == "in_place" else start
    marked = [None] * len(tokens) if answers is None else answers.to(model.device).split(batch_size)
    sums: list[Sums] = []
    for batch, marks in zip(tokens.split(batch_size), marked):
        cache = compressor.new_cache(model, in_place=protocol == "in_place")
        sums.append(_compare(exact, cache, batch.to(model.device), pieces, start, marks))
        if reconstruction and not getattr(compressor, "joint", False):
            sums[-1] |= _reconstruction(exact, compressor, batch)
    return _row(protocol, sums, per_sequence)


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
    nll_exact, nll = (token_nll(each, tokens[:, start + 1 :]).mean() for each in (expected, logits))
    row |= {"ppl_exact": nll_exact.exp().item(), "ppl": nll.exp().item()}
    return row | {"top1": top1_agreement(expected, logits).mean().item()}


def _spread(kl: Tensor) -> dict:
    low, high = bootstrap_interval(kl)
    std, worst = kl.std(correction=0).item(), kl.max().item()
    return {"kl_mean": kl.mean().item(), "kl_low": low, "kl_high": high, "kl_std": std, "kl_worst": worst}


def bootstrap_interval(x: Tensor) -> tuple[float, float]:
    """Draw a 95% interval of the mean of ``x`` (num_seqs) (Efron & Tibshirani 1993, chapter 13); NaN below two."""
    if len(x) < 2 or not x.isfinite().all():
        return float("nan"), float("nan")
    values = x.double().cpu().numpy()
    drawn = np.random.default_rng(0).integers(0, len(x), (2000, len(x)))
    low, high = np.quantile(values[drawn].mean(-1), [TAIL, 1 - TAIL])
    return float(low), float(high)


def reconstruction_error(exact: ExactPass, compressor, tokens: Tensor, batch_size: int = 8) -> dict:
    """Measure the relative MSE, mean over layers, of stored keys and values that the model makes of ``tokens``."""
    return _mean_ratios([_reconstruction(exact, compressor, batch) for batch in tokens.split(batch_size)], *ROLES_MSE)


def _reconstruction(exact: ExactPass, compressor, batch: Tensor) -> Sums:
    """Sum squared errors and sizes, float64 (num_layers, 2) for keys and for values."""
    keys, values = exact.keys_and_values(batch, pre_rope=compressor.settings.pre_rope)
    reconstructions, layers = compressor.new_pass(), []
    for layer, pair in enumerate(zip(keys, values, strict=True)):
        restored = compressor.reconstruct(layer, *pair, reconstructions)
        layers.append([_squares(x[:, :, : y.shape[2]], y) for x, y in zip(pair, restored, strict=True)])
    return {name: torch.stack(squares) for name, squares in zip(ROLES_MSE, zip(*layers), strict=True)}


def _mean_ratios(batches: list[Sums], *names: str) -> dict:
    """Average over layers the relative MSE of each over all batches."""
    sums = {name: sum(batch[name] for batch in batches) for name in names}
    return {name: sum((error / size).item() for error, size in layers) / len(layers) for name, layers in sums.items()}


def _pieces(protocol: str, seq_len: int, chunk_size: int, prompt_len: int | None, step_size: int):
    """Return lengths of the pieces that the tokens are fed in, and the first position whose prediction is scored."""
    if protocol == "in_place":
        return [seq_len], 0
    if protocol == "chunked":
        check_whole("chunk_size", chunk_size, 1, seq_len - 1)  # a single piece reads no packed history
        return _steps(seq_len, chunk_size), 0
    prompt_len = seq_len * 3 // 4 if prompt_len is None else prompt_len
    check_whole("prompt_len", prompt_len, 1, seq_len - 2)
    check_whole("step_size", step_size, 1, seq_len)
    return [prompt_len, *_steps(seq_len - prompt_len, step_size)], prompt_len


def _steps(tokens: int, size: int) -> list[int]:
    return [min(size, tokens - start) for start in range(0, tokens, size)]


def _compare(exact_pass: ExactPass, cache, tokens, pieces, start, answers) -> Sums:
    """Average over the scored tokens of each sequence of one batch, and sum squared errors."""
    model = exact_pass.model
    exact, exact_attention = exact_pass(tokens)
    with attention_outputs(model) as packed_attention:
        logits, exact_tokens = _read_packed(model, cache, tokens.split(pieces, dim=1))
    read = [sum(pieces[:i]) for i, count in enumerate(exact_tokens) if count is not None]
    start = max([start, *read[:1]])
    if not read or start >= tokens.shape[1] - 1:
        raise DataError(NOTHING_LEFT)
    exact, logits, targets = exact[:, start:-1], logits[:, start:-1], tokens[:, start + 1 :]
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
                _squares(*(torch.cat(outputs, 1)[:, start:] for outputs in (exact_outputs, packed_attention[layer])))
                for layer, exact_outputs in exact_attention.items()
            ]
        ),
        "scored_tokens": torch.full((len(tokens),), targets.shape[1]),
        "report": cache.report(),
    }
    if answers is not None:
        marked = answers[:, start + 1 :]
        out["recall_exact"] = (exact.argmax(-1) == targets)[marked]
        out["recall"] = (logits.argmax(-1) == targets)[marked]
    return out


def _read_packed(model, cache, pieces) -> tuple[Tensor, list[float | None]]:
    """Return logits, and how many exact tokens the cache held when each piece was read; None while none was packed."""
    logits, exact_tokens = [], []
    for piece in pieces:
        exact_tokens.append(_exact_tokens(model, cache))
        logits.append(model(piece, past_key_values=cache, use_cache=True).logits)
    if len(pieces) == 1:  # in place: packed before it is read
        exact_tokens = [_exact_tokens(model, cache)]
    return torch.cat(logits, dim=1), exact_tokens


def _exact_tokens(model, cache) -> float | None:
    """Count tokens of a sequence that are stored exact, on average over layers and heads; None while none is packed."""
    report = cache.report()
    values = max(1, values_per_token(outline(model)) * report.batch_size)
    return (report.values - report.packed_values) / values if report.packed_values else None


def _exact_neighbours(pieces: list[int], exact_tokens: list[float | None]) -> Tensor:
    """Count exact tokens that each token reads: those before its piece, and its piece's up to itself unless alone."""
    own = [torch.arange(1.0, length + 1) * (len(pieces) > 1) for length in pieces]
    return torch.cat([mine + (count or 0) for mine, count in zip(own, exact_tokens, strict=True)])


def _row(protocol: str, batches: list[Sums], per_sequence: bool) -> dict:
    joined = {
        name: torch.cat([batch[name] for batch in batches])
        for name in batches[0]
        if name not in ("report", "attention_mse", *ROLES_MSE)
    }
    means = {name: x.float().mean().item() for name, x in joined.items()}
    recall = [name for name in ("recall_exact", "recall") if name in joined]
    if recall and not len(joined["recall"]):
        raise DataError(NOTHING_LEFT)
    report = total([batch["report"] for batch in batches])
    row = {
        "protocol": protocol,
        "num_seqs": len(joined["kl"]),
        "seq_len": report.seq_len,
        "scored_tokens": int(joined["scored_tokens"][0]),
        "exact_neighbours": means["exact_neighbours"],
        "ppl_exact": joined["nll_exact"].mean().exp().item(),
        "ppl": joined["nll"].mean().exp().item(),
        **_spread(joined["kl"]),
        **{name: means[name] for name in ("kl_floor", "top1")},
        **_mean_ratios(batches, "attention_mse"),
        **{name: getattr(report, name) for name in ("bits_per_value", "ratio", "side_bytes")},
        **{name: means[name] for name in recall},
    }
    if per_sequence:
        row |= {f"{name}_each": joined[name].tolist() for name in ("kl", "top1", "top2", *reversed(recall))}
    return row | (_mean_ratios(batches, *ROLES_MSE) if ROLES_MSE[0] in batches[0] else {})


def _squares(x: Tensor, x_hat: Tensor) -> Tensor:
    """Sum the squared error and the squared size."""
    x, x_hat = x.double(), x_hat.double()
    return torch.stack([(x - x_hat).square().sum(), x.square().sum()]).cpu()
