"""One function per table of the study: parameters are plain literals, the result is a DataFrame.

``attrs["sources"]`` of a result names the models and corpora by hash, for the provenance.
"""

import statistics

import pandas as pd
import torch
from tqdm import tqdm

from vqkv import presets, probes
from vqkv.calibrate import calibrate
from vqkv.capture import capture
from vqkv.compressor import Compressor
from vqkv.corpus import fingerprint as corpus_fingerprint
from vqkv.corpus import load_corpus
from vqkv.evaluate import evaluate
from vqkv.metrics import code_perplexity
from vqkv.models import describe, kv_sources, load_model, rotary_embedding
from vqkv.models import fingerprint as model_fingerprint
from vqkv.recall import RecallTask


def magnitudes(models: list[str], corpus: str, seq_len: int, num_seqs: int, seed: int, dtype: str, device: str):
    """Notebook 01: one row per model, role, layer and KV head with the largest |value| and the channel outlier ratio.

    Roles are ``key`` (before RoPE), ``value`` and, in a model with RoPE, ``key_post_rope``. ``step`` is max|v| / 16,
    the size that the source calls the 4-bit step.
    """
    rows, sources = [], {}
    for name in models:
        model, tokenizer = _load(name, dtype, device, sources)
        tokens = _tokens(corpus, tokenizer, "test", seq_len, num_seqs, seed, sources)
        keys, values = capture(model, tokens)
        roles = {"key": keys, "value": values}
        if rotary_embedding(model) is not None:
            roles["key_post_rope"] = capture(model, tokens, post_rope=True)[0]
        for role, layers in roles.items():
            for layer, x in enumerate(layers):
                largest, ratio = x.float().abs().amax(dim=(0, 2, 3)), probes.channel_outlier_ratio(x)
                for head in range(x.shape[1]):
                    row = {"model": name, "role": role, "layer": layer, "head": head, "max_abs": largest[head].item()}
                    rows.append(row | {"step": row["max_abs"] / 16, "channel_ratio": ratio[head].item()})
    return _frame(rows, sources)


def phenomena(
    models: list[str], corpus: str, seq_len: int, num_seqs: int, recall_seqs: int, seed: int, dtype: str, device: str
):
    """Notebook 01: what each model shows of sinks, outlier channels, inter-layer predictability and recall."""
    rows, sources = [], {}
    for name in models:
        model, tokenizer = _load(name, dtype, device, sources)
        train = _tokens(corpus, tokenizer, "train", seq_len, num_seqs, seed, sources)
        test = _tokens(corpus, tokenizer, "test", seq_len, num_seqs, seed, sources)
        context = model.config.get_text_config().max_position_embeddings
        found = _sink_rows(model, test) | _channel_rows(model, test) | _evr_rows(model, train, test)
        recall_len = min(context, 2 * seq_len)
        recall = probes.recall_by_distance(model, tokenizer, recall_len, recall_seqs, seed)
        found |= {f"recall accuracy, {distance} tokens back": hit for distance, hit in recall.items()}
        rows += [{"model": name, "quantity": quantity, "value": value} for quantity, value in found.items()]
    return _frame(rows, sources)


def codebook_learning(
    model: str, corpus: str, role: str, layer: int, codebook_size: int, num_quantizers: int, group_size: int,
    vectors_per_step: int, steps: int, every: int, variants: list[dict], seeds: list[int], dtype: str, device: str,
):  # fmt: skip
    """Notebook 02: held-out loss (relative MSE), code perplexity and unused codes against moving-average steps.

    ``variants`` are arguments of ``presets.vqllm`` (init, decay, revive); each is learned with each of ``seeds``, which
    also draw the text. One row per variant, seed, step and stage; a stage's loss is what it and those before leave.
    """
    sources = {}
    loaded, tokenizer = _load(model, dtype, device, sources)
    test = _layer_vectors(loaded, tokenizer, corpus, "test", role, layer, group_size, vectors_per_step, 0, sources)
    rows = []
    for seed in seeds:
        needed = vectors_per_step * (steps + 1)
        train = _layer_vectors(loaded, tokenizer, corpus, "train", role, layer, group_size, needed, seed, sources)
        for variant in variants:
            preset = presets.vqllm(num_quantizers, codebook_size, group_size, seed=seed, **variant)
            codec = (preset.key_codec if role == "key" else preset.value_codec)(train.shape[-1])
            label = {"init": "kmeans", "decay": 0.99, "revive": False} | variant | {"seed": seed}
            rows += [label | row for row in _learning_curve(codec, train.chunk(steps + 1, dim=2), test, every)]
    return _frame(rows, sources)


def grouping(
    models: list[str], corpus: str, codebook_size: int, num_quantizers: int, group_size: int, train_seqs: int,
    seq_len: int, num_seqs: int, recall_seqs: int, chunk_size: int, seeds: list[int], dtype: str, device: str,
):  # fmt: skip
    """Notebook 03: Table 1's rows (what is quantised, and how key channels are grouped) in MSE, chunked perplexity, KL
    and recall. One row per model, row of the table and seed; seeds draw the calibration text, the k-means start and the
    random permutation, while the held-out text and recall sequences stay the same.
    """
    rows, sources = [], {}
    for name in models:
        model, tokenizer = _load(name, dtype, device, sources)
        test = _tokens(corpus, tokenizer, "test", seq_len, num_seqs, 0, sources)
        recall = RecallTask(tokenizer).batch(seq_len, recall_seqs, 0)
        for seed in seeds:
            train = _tokens(corpus, tokenizer, "train", seq_len, train_seqs, seed, sources)
            settings = {"num_quantizers": num_quantizers, "codebook_size": codebook_size, "group_size": group_size}
            for label, compressor in _table_1(model, train, settings | {"seed": seed}).items():
                row = evaluate(model, compressor, test, "chunked", chunk_size=chunk_size)
                answers = {"answers": recall.answers, "chunk_size": chunk_size, "reconstruction": False}
                hits = evaluate(model, compressor, recall.tokens, "chunked", **answers)
                row |= {"recall": hits["recall"], "recall_exact": hits["recall_exact"]}
                row["ppl_increase"] = 100 * (row["ppl"] / row["ppl_exact"] - 1)
                row["recall_lost"] = 100 * (row["recall_exact"] - row["recall"])
                rows.append({"model": name, "quantised": label, "seed": seed} | row)
    return _frame(rows, sources)


def _table_1(model, train, settings: dict) -> dict[str, Compressor]:
    """The rows of the residual VQ paper's Table 1; a codec that two rows share is fitted once."""
    exact = calibrate(model, train[:1], presets.fp16(), progress=False)
    fitted = {
        kind: calibrate(model, train, presets.vqllm(key_grouping=kind, quantize="key", **settings), progress=False)
        for kind in tqdm(("contiguous", "strided", "random"), desc="key codebooks", leave=False, disable=None)
    }
    value = calibrate(model, train, presets.vqllm(quantize="value", **settings), progress=False)
    keys = {f"key ({kind})": _join(compressor, exact) for kind, compressor in fitted.items()}
    return keys | {"value": _join(exact, value, like=value), "key (strided) + value": _join(fitted["strided"], value)}


def _join(keys: Compressor, values: Compressor, like: Compressor | None = None) -> Compressor:
    """The key codecs of one compressor with the value codecs of another."""
    like = like or keys
    pairs = [(key, value) for (key, _), (_, value) in zip(keys.codecs, values.codecs, strict=True)]
    return Compressor(like.name, pairs, like.settings, like.model)


def _learning_curve(codec, train: list[torch.Tensor], test: torch.Tensor, every: int) -> list[dict]:
    """Step 0 is the initial codebooks; each further batch (1, 1, vectors, head_dim) is one step."""
    rows, steps = [], len(train) - 1
    for step, batch in enumerate(tqdm(train, desc="moving-average steps", leave=False, disable=None)):
        codec.partial_fit(batch)
        if step % every == 0 or step == steps:
            vectors = codec.vectors(test)
            loss, usage = codec.quantizer.loss(vectors), codec.quantizer.usage(vectors)
            effective, unused = code_perplexity(usage), (usage == 0).float().mean(dim=1)
            for stage in range(len(loss)):
                row = {"step": step, "stage": stage + 1, "loss": loss[stage].item()}
                rows.append(row | {"perplexity": effective[stage].item(), "unused": unused[stage].item()})
    return rows


def _layer_vectors(model, tokenizer, corpus, split, role, layer, group_size, count, seed, sources) -> torch.Tensor:
    """Keys or values of one layer, cut into batches that hold ``count`` group vectors in all (test: one batch)."""
    source = kv_sources(model)[layer]
    per_token = source.num_kv_heads * source.head_dim // group_size
    seq_len = min(512, count // per_token)
    num_seqs = -(-count // (per_token * seq_len))
    tokens = _tokens(corpus, tokenizer, split, seq_len, num_seqs, seed, sources)
    which = 0 if role == "key" else 1  # of each batch only this layer and role are kept
    x = torch.cat([capture(model, batch)[which][layer].float() for batch in tokens.split(8)])
    return x.flatten(0, 2)[: count * group_size // source.head_dim][None, None]  # (1, 1, vectors, head_dim)


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
        "KV width": about["num_kv_heads"] * about["head_dim"],
        "EVR of K from K of the layer before": statistics.mean(evr["key"]),
        "EVR of V from V of the layer before and its own K": statistics.mean(evr["value"]),
    }


def _load(name: str, dtype: str, device: str, sources: dict):
    model, tokenizer = load_model(name, dtype or None, device)
    sources[f"model {name}"] = model_fingerprint(model)
    return model, tokenizer


def _tokens(corpus, tokenizer, split, seq_len, num_seqs, seed, sources) -> torch.Tensor:
    tokens = load_corpus(corpus, tokenizer, split, seq_len, num_seqs, seed)
    sources[f"corpus {corpus} {split} {num_seqs}x{seq_len} seed {seed}"] = corpus_fingerprint(tokens)
    return tokens


def _frame(rows: list[dict], sources: dict) -> pd.DataFrame:
    frame = pd.DataFrame(rows)
    frame.attrs["sources"] = sources
    return frame
