"""The models that the published figures are about, laid out without weights, and what caches of their shapes take."""

from functools import cache

import torch
from torch import nn

from vqkv.evaluation.capacity import architecture
from vqkv.evaluation.footprint import Footprint, dynamic_footprint, footprint
from vqkv.models.load import KNOWN_CONFIGS
from vqkv.presets import Preset

CONTEXTS = {"8K": 8192, "32K": 32768, "128K": 131072}  # tokens
# Touvron et al. 2023, table 2: hidden size, MLP, layers, heads
LLAMA_1 = {
    "7B": (4096, 11008, 32, 32),
    "13B": (5120, 13824, 40, 40),
    "30B": (6656, 17920, 60, 52),
    "65B": (8192, 22016, 80, 64),
}
CONFIGS = {
    "Llama-2-7B": {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    "Llama-3-8B": KNOWN_CONFIGS["meta-llama/Meta-Llama-3-8B"],
    "Llama-3.2-3B": KNOWN_CONFIGS["meta-llama/Llama-3.2-3B"],
    "Llama-3.1-70B": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    },
}  # fmt: skip
CONFIGS |= {
    f"LLaMA-{name}": {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
    }
    for name, (hidden, mlp, layers, heads) in LLAMA_1.items()
}  # fmt: skip


@cache
def model_of(name: str) -> nn.Module:
    """One of ``CONFIGS`` in 16 bits, on the ``meta`` device."""
    return architecture(CONFIGS[name], "float16")


def stored(name: str, preset: Preset) -> Footprint:
    """Bytes of a cache of this preset in this model: real payloads, weighed."""
    return footprint(model_of(name), preset)


def exact(name: str) -> Footprint:
    """Bytes of transformers' uncompressed cache."""
    return dynamic_footprint(model_of(name))


def bits_of(preset: Preset, num_kv_heads: int = 4, head_dim: int = 64, tokens: int = 512) -> float:
    """Bits a value of keys that are encoded here: random ones, by a codec fitted to them."""
    x = torch.randn(1, num_kv_heads, tokens, head_dim, generator=torch.Generator().manual_seed(0))
    return 8 * preset.key_codec(head_dim).fit(x).encode(x).nbytes / x.numel()
