"""The model card of a reference model: what it saw, for how long, and what it can do."""

from pathlib import Path

from vqkv.data.splits import listed
from vqkv.reference.data import VOCAB_SIZE

TEMPLATE = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# vqkv/{name}

A small {architecture} language model of Python source, trained from scratch for the vqkv study so that every machine
can rerun it without a model hub. It is a reference for measuring KV-cache compression, not a model to write code with.

| | |
|---|---|
| parameters | {parameters:,} ({megabytes:.1f} MB in fp16) |
| layers, heads, KV heads, head_dim | {layers}, {heads}, {kv_heads}, {head_dim} |
| hidden size, KV width | {hidden}, {kv_width} |
| context | {context} tokens |
| tokenizer | byte-level BPE, {vocab:,} tokens, shared by both reference models |
| tokens seen | {tokens:,} in {steps:,} steps |

## What it saw

The `train` split of the bundled text ({documents:,} documents: source of Python's library and of the pinned packages,
and their prose), random repeats, and key-value recall of random words. A document of which an edited copy is held out
was left out; `vqkv/data/splits/train.txt` lists the others by content hash. Rows are text, a fifth of
repeats (chunks, functions, random tokens) and a tenth of recall. The model did not begin with random weights alone but
with an induction circuit: a head that looks at the token before and one that finds what followed it earlier
(`vqkv/reference/induction.py`). Without it none that serves the whole vocabulary had appeared after 2.7 million tokens.

| run | tokens | time | on |
|---|---|---|---|
{runs}

## What it can do, on the `test` split with an exact cache

| | |
|---|---|
| bits per byte, windows of 1,024 tokens | **{bits:.3f}** (gzip -9 {gzip:.3f}, xz -9 {xz:.3f} on the same files) |
| recall of 2, 4, 8, 16, 32 pairs | {pairs} |
| recall of 8 pairs behind {gap_names} tokens of text | {gaps} |
| induction score of the best head | {induction:.2f} |

## How it came

Recall on fresh sequences, and held-out bits per byte, against tokens seen; `training.json` holds every measurement.

| tokens | recall of 4, 16, 32 pairs | behind 850 tokens | induction | bits per byte (validation) |
|---|---|---|---|---|
{curve}
"""


def write(folder: Path, name: str, model, log: dict) -> None:
    """Write ``README.md`` into the model's folder from its configuration and training log."""
    config, found = model.config, log["released"]
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds = {"llama": "Llama (RoPE, grouped-query)", "gpt2": "GPT-2 (learned positions, multi-head)"}
    text = TEMPLATE.format(
        name=name,
        architecture=kinds[config.model_type],
        parameters=model.num_parameters(),
        megabytes=model.num_parameters() * 2 / 1e6,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=config.hidden_size,
        kv_width=kv_heads * head_dim,
        context=config.max_position_embeddings,
        vocab=VOCAB_SIZE,
        tokens=log["tokens"],
        steps=log["steps"],
        documents=len(listed("train")),
        runs="\n".join(_run(i, run) for i, run in enumerate(log["runs"], 1)),
        bits=found["bits_per_byte"],
        gzip=found["gzip"],
        xz=found["xz"],
        pairs=_shares(found["recall"]),
        gap_names=", ".join(found["recall_by_gap"]),
        gaps=_shares(found["recall_by_gap"]),
        induction=found["induction"],
        curve="\n".join(_measured(row) for row in log["measured"][:: max(1, len(log["measured"]) // 24)]),
    )
    (folder / "README.md").write_text(text)


def _run(number: int, run: dict) -> str:
    threads = f"{run['threads']} CPU thread{'s' * (run['threads'] > 1)}"
    return f"| {number} | {run['tokens']:,} | {run['seconds'] / 60:.0f} min | {run['device']}, {threads} |"


def _measured(row: dict) -> str:
    recall = ", ".join(f"{row['recall'][pairs]:.2f}" for pairs in ("4", "16", "32"))
    far = f"{row['recall_by_gap']['850']:.2f}" if "recall_by_gap" in row else ""
    bits = f"{row['bits_per_byte']:.3f}" if "bits_per_byte" in row else ""
    return f"| {row['tokens']:,} | {recall} | {far} | {row['induction']:.2f} | {bits} |"


def _shares(by: dict) -> str:
    return ", ".join(f"{share:.2f}" for share in by.values())
