"""The models that the published figures are about, laid out without weights, and what caches of their shapes take."""

from functools import cache

import torch
from torch import nn

from vqkv.evaluation.footprint import Footprint, architecture, dynamic_footprint, footprint
from vqkv.evaluation.recommend import capacity
from vqkv.models.load import KNOWN_CONFIGS
from vqkv.presets import Preset, fp16


def _llama(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int = 0, vocab: int = 32000) -> dict:
    return {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads or heads,
    }  # fmt: skip


CONFIGS = {
    "LLaMA-7B": _llama(4096, 11008, 32, 32),  # Touvron et al. 2023, table 2
    "LLaMA-13B": _llama(5120, 13824, 40, 40),
    "LLaMA-30B": _llama(6656, 17920, 60, 52),
    "LLaMA-65B": _llama(8192, 22016, 80, 64),
    "Llama-2-7B": _llama(4096, 11008, 32, 32),
    "Llama-3-8B": KNOWN_CONFIGS["meta-llama/Meta-Llama-3-8B"],
    "Llama-3.2-3B": KNOWN_CONFIGS["meta-llama/Llama-3.2-3B"],
    "Llama-3.1-70B": _llama(8192, 28672, 80, 64, kv_heads=8, vocab=128256),
}
WEIGHED: dict[tuple[str, str], Footprint] = {}  # by model and preset


@cache
def model_of(name: str) -> nn.Module:
    """Lay out one of ``CONFIGS`` in 16 bits, on the ``meta`` device."""
    return architecture(CONFIGS[name], "float16")


def _footprint(name: str, preset: Preset | None) -> Footprint:
    """Return bytes of a model and a cache of real payloads, weighed once; None: transformers' uncompressed cache."""
    key = name, "" if preset is None else f"{preset.name} {preset.arguments}"
    if key not in WEIGHED:
        model = model_of(name)
        WEIGHED[key] = dynamic_footprint(model) if preset is None else footprint(model, preset)
    return WEIGHED[key]


def bits_per_value(name: str, preset: Preset) -> float:
    """Return the stored bits of each value, without side information."""
    return _footprint(name, preset).bits_per_value


def side_bytes(name: str, preset: Preset) -> int:
    """Return bytes of codebooks and predictors."""
    return _footprint(name, preset).side_information


def weight_bytes(name: str) -> int:
    """Return bytes of a model in 16 bits."""
    return _footprint(name, None).weights


def stored_bytes(name: str, preset: Preset | None, tokens: int, batch: int = 1) -> int:
    """Return bytes of sequences of so many tokens, those in 16 bits included, and of the side information."""
    needed = _footprint(name, preset)
    return needed.cache_bytes(int(tokens), int(batch)) + needed.side_information


def total_bytes(name: str, preset: Preset | None, tokens: int) -> int:
    """Return bytes of model, side information, cache and the layer that is being read."""
    return sum(_footprint(name, preset).kinds(int(tokens)).values())


def longest_context(name: str, preset: Preset | None, memory_gb: float, reserve_gb: float = 0) -> int:
    """Return the tokens that fit a memory of which ``reserve_gb`` is taken by something else."""
    longest = capacity(model_of(name), preset or fp16(), memory_gb - reserve_gb)
    return longest.fp16_context if preset is None else longest.context


def encoded_bits(preset: Preset) -> float:
    """Return the bits of a value of random keys, (1, 4, 512, 64), by a codec fitted to them."""
    x = torch.randn(1, 4, 512, 64, generator=torch.Generator().manual_seed(0))
    return 8 * preset.key_codec(64).fit(x).encode(x).nbytes / x.numel()
