"""Notebook 06: every system of the four sources, and transformers' own cache, at equal bits on the same tokens."""

import dataclasses

from tqdm import tqdm

from vqkv import presets
from vqkv.calibrate import calibrate
from vqkv.evaluate import evaluate
from vqkv.experiments.common import draw, frame, load
from vqkv.models import load_model
from vqkv.peers import TransformersQuantized


def systems(
    models: list[str], corpus: str, train_seqs: int, seq_len: int, num_seqs: int, chunk_size: int, codebook_size: int,
    num_quantizers: list[int], beam: int, seed: int, dtype: str, device: str,
):  # fmt: skip
    """Every quantizer without the tokens that its system keeps exact: bits and damage are the quantizer's own.

    ``chunked`` protocol, chunks of ``chunk_size`` tokens, a multiple of every system's block: all history is packed.
    ``peer`` rows are transformers' cache as it is; its bytes are metered on the model in bfloat16, where its scales
    take 16 bits as ours do. One row per model and system.
    """
    rows, sources = [], {}
    for name in models:
        model, tokenizer = load(name, dtype, device, sources)
        train = draw(corpus, tokenizer, "train", seq_len, train_seqs, seed, sources)
        test = draw(corpus, tokenizer, "test", seq_len, num_seqs, seed, sources)
        short, _ = load_model(name, "bfloat16", device)
        for label, system in tqdm(_systems(codebook_size, num_quantizers, beam, seed), desc=name, disable=None):
            if peer := isinstance(system, TransformersQuantized):
                row = evaluate(model, system, test, chunk_size=chunk_size)
                row["bits_per_value"] = evaluate(short, system, test[:1], chunk_size=chunk_size)["bits_per_value"]
            else:
                compressor = calibrate(model, train, bare(system), progress=False)
                row = evaluate(model, compressor, test, chunk_size=chunk_size)
            row["ppl_increase"] = 100 * (row["ppl"] / row["ppl_exact"] - 1)
            rows.append({"model": name, "system": system.name, "label": label, "peer": peer} | row)
    return frame(rows, sources)


def bare(preset: presets.Preset) -> presets.Preset:
    """The preset without sinks, recent window and a flush block beyond its codec's."""
    return dataclasses.replace(preset, sink_tokens=0, recent_window=0, flush_block=1)


def _systems(codebook_size: int, num_quantizers: list[int], beam: int, seed: int):
    shared = {"codebook_size": codebook_size, "seed": seed}
    chains = [
        *((f"{make.__name__} {bits}", make(bits)) for make in (presets.quanto, presets.hqq) for bits in (2, 3, 4)),
        *((f"kivi {bits}", presets.kivi(bits)) for bits in (2, 3, 4)),
        *((f"kvquant {bits}", presets.kvquant(bits, seed=seed)) for bits in (2, 3, 4)),
        *((f"higgs {bits}", presets.higgs(bits)) for bits in (2, 3, 4)),
        ("vq 8", presets.vq(8, **shared)),
        ("vq 2", presets.vq(2, **shared)),
        ("rvq2", presets.rvq2(**shared)),
        *((f"vqq_product {threshold}", presets.vqq_product(threshold, **shared)) for threshold in (0.3, 0.2)),
        *((f"vqllm {k}", presets.vqllm(k, **shared)) for k in num_quantizers),
        *((f"vqllm {k} beam {beam}", presets.vqllm(k, beam=beam, **shared)) for k in num_quantizers),
        *((f"vqllm {k} entropy", presets.entropy_coded(presets.vqllm(k, **shared))) for k in num_quantizers),
    ]
    peers = [(backend, bits) for backend in ("quanto", "hqq") for bits in (2, 4)]
    return chains + [(f"transformers {name} {bits}", TransformersQuantized(name, bits)) for name, bits in peers]
