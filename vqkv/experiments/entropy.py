"""Notebook 05: how far from equally likely codes are, and what an entropy coder makes of it."""

import statistics

import torch
from tqdm import tqdm

from vqkv import presets
from vqkv.calibrate import calibrate
from vqkv.capture import capture
from vqkv.experiments.common import draw, frame, load
from vqkv.metrics import code_perplexity


def code_entropy(
    models: list[str], corpus: str, train_seqs: int, num_seqs: int, seq_len: int, codebook_size: int,
    num_quantizers: int, seed: int, dtype: str, device: str,
):  # fmt: skip
    """One row per model, codec, role and stage: ``entropy`` of the stage's held-out codes in bits, over all heads and
    ``by_head`` (mean of each head's own), beside ``code_bits``.

    Beside it, the same for all stages, stored bits a value with packed codes and with ANS on tables learned in
    calibration (``static``; ``table_bytes`` of side information) or also updated while coding (``adaptive``). Means
    over layers.
    """
    rows, sources = [], {}
    for name in models:
        model, tokenizer = load(name, dtype, device, sources)
        train = draw(corpus, tokenizer, "train", seq_len, train_seqs, seed, sources)
        test = draw(corpus, tokenizer, "test", seq_len, num_seqs, seed, sources)
        shared = {"codebook_size": codebook_size, "seed": seed}
        for label, preset in {
            "VQ of 8 values": presets.vq(8, **shared),
            "2 residual stages of 8 values": presets.rvq2(**shared),
            "residual VQ": presets.vqllm(num_quantizers, **shared),
        }.items():
            compressor = calibrate(model, train, presets.entropy_coded(preset), progress=False)
            roles = capture(model, test, post_rope=not preset.pre_rope)
            for i, role in enumerate(("key", "value")):
                codecs = [pair[i] for pair in compressor.codecs]
                layers = tqdm(list(zip(codecs, roles[i], strict=True)), desc=label, leave=False, disable=None)
                found = [_layer(codec, x.float()) for codec, x in layers]
                shown = {"model": name, "codec": label, "role": role}
                rows += [shown | row for row in _mean_rows(found)]
    return frame(rows, sources)


def _layer(codec, x) -> tuple[dict[str, list[float]], dict]:
    """Entropies by stage, and stored bits a value by way of coding the codes."""
    quantizer, inner = codec.quantizer, codec.quantizer.quantizer
    codes = inner.encode(codec.vectors(x)).transpose(0, 1).flatten(1).unflatten(1, (-1, inner.num_quantizers))
    counts = torch.nn.functional.one_hot(codes, inner.codebook_size).sum(1)  # (heads, stages, codebook_size)
    entropies = {"entropy": code_perplexity(counts.sum(0)).log2(), "by_head": code_perplexity(counts).log2().mean(0)}
    numbers = {"code_bits": inner.code_bits, "table_bytes": codec.side_bytes - inner.codebooks.nbytes}
    for tables in ("static", "adaptive"):
        quantizer.tables = tables
        payload = codec.encode(x)
        codes_bytes = payload.nbytes - payload.fields["scale"].nbytes
        numbers[tables] = 8 * codes_bytes / x.numel()
    quantizer.tables = "static"
    numbers["packed"] = codes.numel() * inner.code_bits / x.numel()
    return {name: stages.tolist() for name, stages in entropies.items()}, numbers


def _mean_rows(layers: list[tuple[dict[str, list[float]], dict]]) -> list[dict]:
    numbers = {name: statistics.mean(found[name] for _, found in layers) for name in layers[0][1]}
    stages = range(len(layers[0][0]["entropy"]))
    return [
        {"stage": k + 1} | {name: statistics.mean(e[name][k] for e, _ in layers) for name in layers[0][0]} | numbers
        for k in stages
    ]
