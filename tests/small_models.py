"""Small random checkpoints of real architectures, saved to a folder and loaded back as a user's own model would be."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GlmConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from vqkv.models.load import load_model
from vqkv.reference.data import TOKENIZER_DIR

COMMON = {
    "vocab_size": 4096,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
CONFIGS = {
    "llama": lambda: LlamaConfig(**COMMON),
    "llama-yarn": lambda: LlamaConfig(**COMMON, rope_parameters=YARN),
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=None),
    "glm": lambda: GlmConfig(**COMMON),
    "gemma": lambda: GemmaConfig(**COMMON),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in COMMON.items() if k != "head_dim"} | {"hidden_size": 128}),
    "qwen3": lambda: Qwen3Config(**COMMON),
    "gpt2": lambda: GPT2Config(
        vocab_size=4096, n_embd=128, n_layer=3, n_head=4, n_positions=256, bos_token_id=0, eos_token_id=0
    ),
    "opt": lambda: OPTConfig(
        vocab_size=4096,
        hidden_size=128,
        word_embed_proj_dim=128,
        ffn_dim=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    ),
}
SLIDING = {
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=10),
    "qwen2": lambda: Qwen2Config(
        **{k: v for k, v in COMMON.items() if k != "head_dim"}
        | {"hidden_size": 128, "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}
    ),
    "gemma2": lambda: Gemma2Config(**COMMON, sliding_window=10),
    "gemma3": lambda: Gemma3TextConfig(**COMMON, sliding_window=10, sliding_window_pattern=2),
}


def load(name: str, folder, dtype: str | None = None, config=None):
    """``make`` it, and load it as a user would."""
    return load_model(str(make(name, folder, config)), dtype)[0]


def fixture(*names: str):
    """A fixture: each of these models in turn."""

    @pytest.fixture(scope="module", params=names)
    def model(request, tmp_path_factory):
        return load(request.param, tmp_path_factory.mktemp(request.param))

    return model


def sliding(name: str, folder):
    """A random model of architecture ``name``, some or all of whose layers attend to the last 10 tokens only."""
    return load(name, folder, config=SLIDING[name]())


def make(name: str, folder, config=None):
    """Write a random checkpoint of architecture ``name`` with the bundled tokenizer into ``folder``; returns it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():  # the default init is so small that every distribution is flat
            parameter.mul_(3 if parameter.ndim > 1 else 1).add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR).save_pretrained(folder)
    return folder
