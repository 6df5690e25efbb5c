"""Model name -> config: known by heart, for where no hub can be reached, or fetched."""

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from vqkv.errors import DataError
from vqkv.models.load import BUNDLED, LOADING_ERRORS

REFUSALS = (*LOADING_ERRORS, ArithmeticError, AttributeError, StrictDataclassError)  # what configs raise

# What sizes depend on, as in the config.json of each of these models.
KNOWN_CONFIGS: dict[str, dict] = {
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
    """A model's config. Raises ``DataError`` if it is not known and neither a folder nor the hub has it."""
    if name in KNOWN_CONFIGS:
        return AutoConfig.for_model(**KNOWN_CONFIGS[name])
    try:
        return AutoConfig.from_pretrained(BUNDLED.get(name, name))
    except REFUSALS as error:
        raise DataError(f"the config of {name!r} cannot be reached: name a local folder, or pass a config") from error
