"""Models that profiles name: their configs, fetched or known by heart, and why one cannot be reached."""

import logging
import os
from contextlib import contextmanager

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from vqkv.errors import DataError
from vqkv.evaluation.capacity import REFUSALS
from vqkv.models.load import BUNDLED, LOADING_ERRORS

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
# What sizes depend on, as in the config.json of each of these models, for when that cannot be reached.
KNOWN_CONFIGS = {
    "openai-community/gpt2": {"model_type": "gpt2"},  # transformers' defaults
    "TinyLlama/TinyLlama_v1.1": {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    },
    "meta-llama/Llama-3.2-3B": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
    "meta-llama/Meta-Llama-3-8B": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    },
    "mistralai/Mistral-7B-v0.1": {
        "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    "google/gemma-7b": {"model_type": "gemma"},  # transformers' defaults
    "Qwen/Qwen2.5-7B": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def config_of(name: str) -> PreTrainedConfig:
    """A model's config, fetched if need be. Raises ``DataError`` if neither the hub nor ``vqkv`` knows it."""
    try:
        return AutoConfig.from_pretrained(BUNDLED.get(name, name))
    except REFUSALS as error:
        if name not in KNOWN_CONFIGS:
            raise DataError(f"no estimate is possible: the config of {name!r} cannot be reached") from error
        return AutoConfig.for_model(**KNOWN_CONFIGS[name])


def check_model(name: str) -> None:
    """Fetch config and tokenizer, no weights. Raises ``DataError`` with the remedy: offline, gated, misspelt."""
    path = BUNDLED.get(name, name)
    try:
        AutoConfig.from_pretrained(path)
        AutoTokenizer.from_pretrained(path)
    except LOADING_ERRORS as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        raise DataError(f"{_remedy(name, str(error))} ({reason})") from error


def _remedy(name: str, error: str) -> str:
    if os.path.isdir(name):
        return "the folder lacks a config.json or a tokenizer that transformers can read"
    if "gated" in error.lower():
        return f"ask for access on https://huggingface.co/{name} and log in with `hf auth login`"
    if any(os.environ.get(variable, "").lower() in ("1", "true", "yes", "on") for variable in OFFLINE):
        return f"this process is offline and has no copy: unset {', '.join(OFFLINE)}, or name a local folder"
    if "is not a local folder and is not a valid model identifier" in error:
        return "check the spelling; a private model needs `hf auth login`"
    return "check the network, or name a local folder (-p model=FOLDER)"


@contextmanager
def quiet_hub():
    """Without the hub's line for each of its retries: what cannot be reached is said once, with the remedy."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
