"""Notebook 08: which context and which batch fit a GPU, by model and preset."""

import hashlib
import json
import math

import pandas as pd

from vqkv import presets
from vqkv.evaluation.capacity import Capacity, architecture, capacity
from vqkv.evaluation.footprint import Footprint, dynamic_footprint
from vqkv.study.experiments.common import frame

# What sizes depend on, out of the config.json that each model's hub page has under the name given as source.
MODELS = {
    "Llama-2-7B": {  # the blog's model
        "source": "meta-llama/Llama-2-7b-chat-hf", "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    "Mistral-7B": {  # v0.1 has a sliding window of 4,096 tokens, v0.3 has none
        "source": "mistralai/Mistral-7B-v0.3", "model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 32768, "tie_word_embeddings": False, "sliding_window": None,
    },
    "Llama-3.1-8B": {
        "source": "meta-llama/Llama-3.1-8B", "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "Qwen2.5-7B": {
        "source": "Qwen/Qwen2.5-7B", "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "use_sliding_window": False,
    },
}  # fmt: skip

BASELINE = "fp16 (DynamicCache)"
PRESETS = {
    "quanto 4": presets.quanto(4),
    "hqq 4": presets.hqq(4),
    "higgs 4": presets.higgs(4),
    "higgs 3": presets.higgs(3),
    "vqllm 8x2048": presets.vqllm(),
    "quanto 2": presets.quanto(2),
    "kivi 2": presets.kivi(2),
    "aqua (higgs 2)": presets.aqua(presets.higgs(2)),
    "higgs 2": presets.higgs(2),
}


def capacity_table(
    models: list[str], labels: list[str], memory_gb: list[float], batch_size: int, context: int, dtype: str
) -> pd.DataFrame:
    """The longest context at ``batch_size`` and the largest batch at ``context`` tokens, for each model of ``MODELS``,
    memory (GB of 10^9 bytes) and preset of ``PRESETS``, after a row for transformers' ``DynamicCache`` in 16 bits.

    ``ratio``: context over that row's. ``cache_bytes`` (packed tokens, sinks, window) and ``working_bytes`` (what a
    layer needs while it is read) are those at ``context``; ``vqkv.capacity`` says what is counted. ``model_limit``:
    positions that the model was made for.
    """
    rows, sources = [], {}
    for name in models:
        config = dict(MODELS[name])
        sources[f"config {config.pop('source')}"] = hashlib.sha256(json.dumps(config).encode()).hexdigest()[:16]
        model = architecture(config, dtype)
        for size in memory_gb:
            found = {label: capacity(model, PRESETS[label], size, batch_size, context) for label in labels}
            first = found[labels[0]]
            common = {"model": name, "memory_gb": size, "model_limit": first.model_limit}
            rows.append(common | _baseline(dynamic_footprint(model), first, batch_size))
            rows += [common | _row(label, result) for label, result in found.items()]
    return frame(rows, sources)


def _row(label: str, found: Capacity) -> dict:
    ratio = found.context / found.fp16_context if found.fp16_context else math.nan
    sizes = {"context": found.context, "batch_size": found.batch_size, "ratio": ratio}
    sizes |= {"bits_per_value": found.bits_per_value, "side_bytes": found.side_bytes}
    return {"label": label, "system": found.preset} | sizes | _bytes(found.kinds)


def _baseline(exact: Footprint, found: Capacity, batch_size: int) -> dict:
    limits = {"context": found.fp16_context, "batch_size": found.fp16_batch_size, "ratio": 1.0}
    about = {"label": BASELINE, "system": "fp16"} | limits | {"bits_per_value": exact.bits_per_value, "side_bytes": 0}
    return about | _bytes(exact.kinds(found.fp16_context, batch_size))


def _bytes(kinds: dict[str, int]) -> dict:
    cache = kinds["packed"] + kinds["sinks"] + kinds["window"]
    return {"weights_bytes": kinds["weights"], "cache_bytes": cache, "working_bytes": kinds["working"]}
