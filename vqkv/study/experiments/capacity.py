"""Notebook 08: which context and which batch fit a GPU, by model and preset."""

import hashlib
import json

import pandas as pd

from vqkv import presets
from vqkv.evaluation.capacity import GB, Capacity, architecture, capacity
from vqkv.evaluation.footprint import Footprint, dynamic_footprint, footprint
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
        model = _laid_out(name, dtype, sources)
        for size in memory_gb:
            found = {label: capacity(model, PRESETS[label], size, batch_size, context) for label in labels}
            first = found[labels[0]]
            common = {"model": name, "memory_gb": size, "model_limit": first.model_limit}
            rows.append(common | _baseline(dynamic_footprint(model), first))
            rows += [common | _row(label, result) for label, result in found.items()]
    return frame(rows, sources)


def blog_claims(memory_gb: float, worked_tokens: int, fp16_tokens: int, int4_tokens: int, dtype: str) -> pd.DataFrame:
    """Statements of the blog on Llama-2-7B's cache beside what is counted here: its worked size of ``worked_tokens``,
    and the longest contexts that it gives for a GPU of ``memory_gb``, ``fp16_tokens`` and ``int4_tokens``.

    GB of 10^9 bytes: ``cache_gb`` at the claim's ``tokens``, ``counted_gb`` with weights and what a layer needs, and
    ``left_gb``, what of the GPU that leaves. ``context`` would leave nothing; ``context_beside_rest`` is what fits if
    all but what fp16's claim needs were taken up by something else.
    """
    sources = {}
    model = _laid_out("Llama-2-7B", dtype, sources)
    fp16, int4 = dynamic_footprint(model), footprint(model, PRESETS["quanto 4"])
    rest = memory_gb - sum(fp16.kinds(fp16_tokens).values()) / GB
    whole, beside = (capacity(model, PRESETS["quanto 4"], memory_gb, reserve_gb=kept) for kept in (0, rest))
    contexts = {BASELINE: (whole.fp16_context, beside.fp16_context), "quanto 4": (whole.context, beside.context)}
    claims = [
        ("worked size", BASELINE, fp16, worked_tokens),
        ("longest context", BASELINE, fp16, fp16_tokens),
        ("longest context", "quanto 4", int4, int4_tokens),
    ]
    rows = [
        {"claim": claim, "cache": cache, "tokens": tokens, "cache_gb": needed.cache_bytes(tokens) / GB}
        | _against(sum(needed.kinds(tokens).values()) / GB, memory_gb)
        | dict(zip(("context", "context_beside_rest"), contexts[cache], strict=True))
        for claim, cache, needed, tokens in claims
    ]
    return frame(rows, sources)


def _against(counted: float, memory: float) -> dict:
    return {"counted_gb": counted, "left_gb": memory - counted}


def _laid_out(name: str, dtype: str, sources: dict):
    """A model without weights; ``sources`` takes the hash of what it was made from."""
    settings = dict(MODELS[name])
    sources[f"config {settings.pop('source')}"] = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    return architecture(settings, dtype)


def _baseline(needed: Footprint, found: Capacity) -> dict:
    kinds = needed.kinds(found.fp16_context, found.at_batch_size)
    return {
        "label": BASELINE,
        "system": "fp16",
        "context": found.fp16_context,
        "batch_size": found.fp16_batch_size,
        "ratio": 1.0,
        "bits_per_value": needed.bits_per_value,
        "side_bytes": 0,
        **_bytes(kinds),
    }


def _row(label: str, found: Capacity) -> dict:
    return {
        "label": label,
        "system": found.preset,
        "context": found.context,
        "batch_size": found.batch_size,
        "ratio": found.ratio,
        "bits_per_value": found.bits_per_value,
        "side_bytes": found.side_bytes,
        **_bytes(found.kinds),
    }


def _bytes(kinds: dict[str, int]) -> dict:
    cache = kinds["packed"] + kinds["sinks"] + kinds["window"]
    return {"weights_bytes": kinds["weights"], "cache_bytes": cache, "working_bytes": kinds["working"]}
