"""model + compressor + tokens + protocol -> one row of a table."""

import torch
from safetensors.torch import load, save
from torch import Tensor

from vqkv.cache.compressed import full_cache
from vqkv.errors import DataError, UnknownNameError
from vqkv.evaluation.exact import ExactPass, attention_outputs
from vqkv.evaluation.metrics import token_kl, token_nll, top1_agreement
from vqkv.models.capture import check_batch_size, check_tokens
from vqkv.models.load import describe
from vqkv.runtime.processes import current

PROTOCOLS = ("in_place", "chunked", "snapshot")
MEASURED = ("packed_bytes", "packed_values", "values", "cache_bytes", "seq_len", "side_bytes")  # of a cache's report
LOGITS = 1 << 30  # of all tokens of a batch; a comparison needs several times their bytes
Sums = dict[str, Tensor]  # what one batch adds to a row


@torch.inference_mode()
def evaluate(
    model,
    compressor,
    tokens: torch.Tensor,
    protocol: str = "chunked",
    answers: torch.Tensor | None = None,
    chunk_size: int = 32,
    prompt_len: int | None = None,
    step_size: int = 1,
    batch_size: int | None = None,
    reconstruction: bool = True,
    per_sequence: bool = False,
    exact: ExactPass | None = None,
) -> dict:
    """Compare ``model`` reading a compressed cache with itself reading everything exactly, on the same tokens.

    ``compressor``: a fitted ``Compressor``, or someone else's cache from ``vqkv.evaluation.peers``.
    ``tokens`` (num_seqs, seq_len) int64; ``answers`` of the same shape marks tokens whose greedy prediction is scored
    as recall. ``protocol``: ``in_place`` (one pass, the current token packed too), ``chunked`` (pieces of
    ``chunk_size`` tokens, each reading packed history; the default), ``snapshot`` (prefill ``prompt_len`` tokens, pack
    them, then decode and score the rest ``step_size`` tokens at a time). ``batch_size``: sequences at a time, by
    default 8, or as few as keep logits below ``LOGITS`` values. ``reconstruction``: whether to measure the MSE of K
    and V; ``per_sequence``: whether to add ``kl_each`` and ``top1_each``, lists with one number a sequence.

    Returns perplexities, KL(exact || compressed) in nats (mean, and std and worst over sequences), top-1 agreement,
    relative MSE of K, V and attention output, and the byte meter's numbers.

    ``exact``: an ``ExactPass`` of ``model``, which remembers the model's own predictions where many compressors are
    compared on the same tokens; for as long as the model is not changed. Within ``processes.launched()`` every process
    calls this with the same arguments, takes its turn at the batches and returns the same row.

    Raises ``UnknownNameError`` for another protocol, ``DataError`` for tokens too short to score, or too few for any
    packed token to be read.
    """
    exact = ExactPass(model, entries=0) if exact is None else exact
    _check_arguments(model, tokens, protocol, answers, exact)
    if batch_size is None:
        batch_size = max(1, min(8, LOGITS // (model.config.get_text_config().vocab_size * tokens.shape[1])))
    check_batch_size(batch_size)
    pieces, start = _pieces(protocol, tokens.shape[1], chunk_size, prompt_len, step_size)
    batches = tokens.split(batch_size)
    marked = [None] * len(batches) if answers is None else answers.split(batch_size)

    def measure(number: int) -> Sums:
        batch, marks = batches[number].to(model.device), marked[number]
        cache = compressor.new_cache(model, in_place=protocol == "in_place")
        sums = _compare(exact, cache, batch, pieces, start, None if marks is None else marks.to(model.device))
        return sums | (_reconstruction(exact, compressor, batches[number]) if reconstruction else {})

    totals = _all_batches(measure, len(batches))
    row = {"protocol": protocol, **_summary(totals)}
    if per_sequence:
        row |= {f"{name}_each": torch.cat([batch[name] for batch in totals]).tolist() for name in ("kl", "top1")}
    return row | (_reconstruction_summary(totals) if reconstruction else {})


def _check_arguments(model, tokens: Tensor, protocol: str, answers: Tensor | None, exact) -> None:
    if protocol not in PROTOCOLS:
        raise UnknownNameError("protocol", protocol, PROTOCOLS)
    check_tokens(model, tokens)
    if tokens.shape[1] < 3:
        raise DataError(f"tokens of shape {tuple(tokens.shape)}: need at least 3 tokens each")
    if answers is not None and (answers.dtype is not torch.bool or answers.shape != tokens.shape or not answers.any()):
        raise DataError(f"answers must be booleans of shape {tuple(tokens.shape)}, some of them True")
    if exact.model is not model:
        raise DataError("exact= is an ExactPass of another model: make one of this")


def _all_batches(measure, count: int) -> list[Sums]:
    """Sums of every batch, in their order: each measured by one process."""
    mine = {}
    for number in range(current().rank, count, current().count):
        mine |= {f"{number}.{name}": tensor.cpu().contiguous() for name, tensor in measure(number).items()}
    everybody = {name: x for message in current().exchange(save(mine)) for name, x in load(message).items()}
    totals = [{} for _ in range(count)]
    for name, tensor in everybody.items():
        number, name = name.split(".")
        totals[int(number)][name] = tensor
    return totals


@torch.inference_mode()
def evaluate_restored(exact: ExactPass, tokens: Tensor, keys: list[Tensor], values: list[Tensor]) -> dict:
    """Go on from a restored cache: score the ``tokens`` (num_seqs, seq_len) after those whose keys, as attention reads
    them, and values are given, over layers (num_seqs, num_kv_heads, prompt_len, head_dim). The ``snapshot`` protocol's
    KL (mean, and std and worst over sequences) and top-1 agreement with the exact cache. ``exact``: see ``evaluate``.
    Raises ``DataError`` for a cache that is not its model's, of other sequences, or not finite.
    """
    model = exact.model
    check_tokens(model, tokens)
    tokens, start = tokens.to(model.device), _restored_tokens(model, tokens, keys, values)
    expected = exact(tokens)[0][:, start:-1]
    logits = model(tokens[:, start:], past_key_values=full_cache(model, keys, values), use_cache=True).logits[:, :-1]
    kl, top1 = token_kl(expected, logits).mean(1), top1_agreement(expected, logits).mean(1)
    spread = {"kl_std": kl.std(correction=0).item(), "kl_worst": kl.max().item()}
    return {"kl_mean": kl.mean().item(), **spread, "top1": top1.mean().item()}


def _restored_tokens(model, tokens: torch.Tensor, keys, values) -> int:
    """Number of tokens in keys and values. Raises ``DataError`` if they are no cache to go on from."""
    about = describe(model)
    if not len(keys) == len(values) == about["num_layers"]:
        raise DataError(f"keys of {len(keys)} layers, values of {len(values)}: the model has {about['num_layers']}")
    length = keys[0].shape[-2]
    shape = (len(tokens), about["num_kv_heads"], length, about["head_dim"])
    for layer, x in enumerate(x for pair in zip(keys, values, strict=True) for x in pair):
        if tuple(x.shape) != shape or not x.isfinite().all():
            raise DataError(f"layer {layer // 2}: {tuple(x.shape)} is not {shape}, or holds NaN or infinity")
    if not 0 < length < tokens.shape[1] - 1:
        raise DataError(f"{length} restored tokens must leave at least two of the {tokens.shape[1]} tokens to decode")
    return length


def reconstruction_error(exact: ExactPass, compressor, tokens: torch.Tensor, batch_size: int = 8) -> dict:
    """Relative MSE of the stored keys and values of ``tokens``, averaged over layers. The model itself reads exact keys
    and values; only predictors read reconstructed ones."""
    return _reconstruction_summary([_reconstruction(exact, compressor, batch) for batch in tokens.split(batch_size)])


def _reconstruction(exact: ExactPass, compressor, batch: Tensor) -> Sums:
    """(num_layers, 2) for keys and for values: squared error and squared size, float64."""
    keys, values = exact.keys_and_values(batch, post_rope=not compressor.settings.pre_rope)
    known, sums = compressor.new_pass(), {"key_mse": [], "value_mse": []}
    for layer, pair in enumerate(zip(keys, values, strict=True)):
        stored = compressor.reconstruct(layer, *pair, known)
        for x, x_hat, found in zip(pair, stored, sums.values(), strict=True):
            x, x_hat = x[:, :, : x_hat.shape[2]].double(), x_hat.double()
            found.append(torch.stack([(x - x_hat).square().sum(), x.square().sum()]).cpu())
    return {name: torch.stack(layers) for name, layers in sums.items()}


def _reconstruction_summary(batches: list[Sums]) -> dict:
    sums = {name: sum(batch[name] for batch in batches) for name in ("key_mse", "value_mse")}
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


def _compare(exact_pass: ExactPass, cache, tokens, pieces, start, answers) -> dict:
    """Per-sequence sums and means of one batch."""
    model = exact_pass.model
    exact, exact_attention = exact_pass(tokens)
    exact = exact[:, start:-1]
    with attention_outputs(model) as packed_attention:
        logits = _read_packed(model, cache, tokens.split(pieces, dim=1))
    logits, targets = torch.cat(logits, dim=1)[:, start:-1], tokens[:, start + 1 :]
    out = {
        "nll_exact": token_nll(exact, targets).mean(1),
        "nll": token_nll(logits, targets).mean(1),
        "kl": token_kl(exact, logits).mean(1),
        "top1": top1_agreement(exact, logits).mean(1),
        "attention": _attention_sums(exact_attention, packed_attention, start),
        "report": torch.tensor([getattr(cache.report(), name) for name in MEASURED]),
    }
    if answers is not None:
        marked = answers[:, start + 1 :]
        out["recall_exact"] = (exact.argmax(-1) == targets)[marked]
        out["recall"] = (logits.argmax(-1) == targets)[marked]
    return out


def _read_packed(model, cache, pieces) -> list[torch.Tensor]:
    """Logits of each piece. Raises ``DataError`` if the last one, which may be the only one, reads nothing packed."""
    logits = []
    for number, piece in enumerate(pieces, 1):
        if number == len(pieces) > 1:
            _check_packed(cache)
        logits.append(model(piece, past_key_values=cache, use_cache=True).logits)
    if len(pieces) == 1:  # in place: packed before it is read
        _check_packed(cache)
    return logits


def _check_packed(cache) -> None:
    if not cache.report().packed_values:
        raise DataError("no packed token was read: use longer sequences, or a smaller window or flush block")


def _summary(batches: list[Sums]) -> dict:
    kept_apart = ("report", "attention", "key_mse", "value_mse")
    joined = {k: torch.cat([b[k].float() for b in batches]) for k in batches[0] if k not in kept_apart}
    report = dict(zip(MEASURED, sum(b["report"] for b in batches).tolist(), strict=True))
    first = dict(zip(MEASURED, batches[0]["report"].tolist(), strict=True))
    packed, kl = report["packed_values"], joined["kl"]
    row = {
        "num_seqs": len(kl),
        "seq_len": first["seq_len"],
        "ppl_exact": joined["nll_exact"].mean().exp().item(),
        "ppl": joined["nll"].mean().exp().item(),
        "kl_mean": kl.mean().item(),
        "kl_std": kl.std(correction=0).item(),
        "kl_worst": kl.max().item(),
        "top1": joined["top1"].mean().item(),
        "attention_mse": _mean_ratio([b["attention"] for b in batches]),
        "bits_per_value": 8 * report["packed_bytes"] / packed if packed else float("nan"),
        "ratio": 2 * report["values"] / report["cache_bytes"],
        "side_bytes": first["side_bytes"],
    }
    for name in ("recall_exact", "recall"):
        if name in joined:
            row[name] = joined[name].mean().item()
    return row


def _attention_sums(exact: dict, packed: dict, start: int) -> torch.Tensor:
    """(num_layers, 2): squared error and squared size of the attention blocks' outputs, earlier errors included."""
    rows = []
    for layer in exact:
        x, x_hat = (torch.cat(outputs[layer], 1)[:, start:].double() for outputs in (exact, packed))
        rows.append(torch.stack([(x - x_hat).square().sum(), x.square().sum()]).cpu())
    return torch.stack(rows)


def _mean_ratio(sums: list[torch.Tensor]) -> float:
    """Relative MSE per layer over all batches, averaged over layers."""
    error, size = sum(sums).unbind(-1)
    return (error / size).mean().item()
