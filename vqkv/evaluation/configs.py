"""Configs of models: fetched, known by heart, and laid out as models without memory."""

import copy
import logging
import os
from contextlib import contextmanager

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedConfig

from vqkv.errors import DataError
from vqkv.evaluation.footprint import model_shape
from vqkv.models.load import BUNDLED, LOADING_ERRORS

REFUSALS = (*LOADING_ERRORS, ArithmeticError, AttributeError, StrictDataclassError)  # what configs raise
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
# What sizes depend on, as in the config.json of each model that profiles name, for when that cannot be reached.
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


def config_of(name: str) -> tuple[PreTrainedConfig, str]:
    """A model's config, fetched if need be, and where it is from. Raises ``DataError`` if neither the hub nor ``vqkv``
    knows it."""
    try:
        return AutoConfig.from_pretrained(BUNDLED.get(name, name)), "its config"
    except REFUSALS as error:
        if name not in KNOWN_CONFIGS:
            raise DataError(f"no estimate is possible: the config of {name!r} cannot be reached") from error
        return AutoConfig.for_model(**KNOWN_CONFIGS[name]), "the sizes that vqkv knows of it"


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


def architecture(model_or_config, dtype: torch.dtype | str | None = None) -> nn.Module:
    """A loaded model as it is; or one laid out from a config, or its contents as a dict, on the ``meta`` device, which
    knows shapes but holds no numbers. See ``capacity``."""
    model = model_or_config
    if isinstance(model, (PreTrainedConfig, dict)):
        model = _laid_out(model, dtype)
    elif dtype is not None or not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise DataError(
            f"pass a transformers model without a dtype, or its config, not {type(model).__name__}, {dtype}"
        )
    model_shape(model)  # refuses layers of unequal KV heads
    if any(layer.is_sliding for layer in DynamicCache(config=model.config.get_text_config(decoder=True)).layers):
        raise DataError(
            f"{type(model).__name__} has layers with a sliding window, whose DynamicCache stops growing: set "
            "sliding_window=None (and layer_types to full_attention) in the config to count every token"
        )
    return model


def _laid_out(config: PreTrainedConfig | dict, dtype) -> nn.Module:
    try:
        config = AutoConfig.for_model(**config) if isinstance(config, dict) else copy.deepcopy(config)
        dtype = dtype or getattr(config, "dtype", None) or torch.float16
        dtype = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
        if getattr(config, "quantization_config", None):
            raise ValueError("it has quantized weights, whose bytes it does not tell")
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    except REFUSALS as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise DataError(f"no causal language model can be laid out of this config in {dtype}: {reason}") from error
