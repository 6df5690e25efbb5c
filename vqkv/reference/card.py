"""The model card of a reference model: what it was trained on, for how long, and how good it became."""

from pathlib import Path

from vqkv.reference.data import VOCAB_SIZE

DATA = (
    "Python source installed with the pinned environment (standard library and packages), deduplicated by content "
    "hash, 6% of the modules held out by name; besides, generated key-value recall sequences, their share named below"
)
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
| data | {data} |
| tokens seen | {tokens:,} in {steps:,} steps |
| learning rate | 2e-3: warm-up, constant, decay over the last fifth of the last run |
| held-out bits per byte | **{bits:.3f}** |
{runs}
## Loss

Mean training loss (nats a token) against tokens seen; `training.json` holds the whole curve.

| tokens | loss |
|---|---|
{curve}

What the model can and cannot show of the published phenomena (sinks, outlier channels, recall by distance) is in the
table of notebook 01.
"""


def write(folder: Path, name: str, model, log: dict) -> None:
    """Write ``README.md`` into the model's folder from its configuration and training log."""
    config = model.config
    parameters = model.num_parameters()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    runs = "".join(_run_line(i, run) for i, run in enumerate(log["runs"], 1))
    stride = max(1, len(log["loss"]) // 12)
    curve = "\n".join(f"| {tokens:,} | {loss:.3f} |" for tokens, loss in log["loss"][::stride])
    text = TEMPLATE.format(
        name=name,
        architecture={"llama": "Llama (RoPE, grouped-query)", "gpt2": "GPT-2 (learned positions, multi-head)"}[
            config.model_type
        ],
        parameters=parameters,
        megabytes=parameters * 2 / 1e6,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=config.hidden_size,
        kv_width=kv_heads * head_dim,
        context=config.max_position_embeddings,
        vocab=VOCAB_SIZE,
        data=DATA,
        tokens=log["tokens"],
        steps=log["steps"],
        bits=log["held_out"][-1][1],
        runs=runs,
        curve=curve,
    )
    (folder / "README.md").write_text(text)


def _run_line(number: int, run: dict) -> str:
    threads = f"{run['threads']} CPU thread{'s' * (run['threads'] > 1)}"
    how = f"{run['optimizer']}, {run['recall_share']:.0%} recall sequences, torch {run['torch']}"
    where = f"{run['seconds'] / 60:.0f} minutes on {run['device']}, {threads}"
    return f"| run {number} | {run['tokens']:,} tokens in {where}, {how} |\n"
