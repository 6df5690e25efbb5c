"""Small random checkpoints of real architectures, saved to a folder and loaded back as a user's own model would be."""

from functools import partial

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from vqkv.models.load import load_model
from vqkv.reference.rows import TOKENIZER_DIR

SPECIAL = {"vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 0}
LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0} | SPECIAL
WIDE = LAYERS | {"hidden_size": 128, "intermediate_size": 64, "num_key_value_heads": 2}
COMMON = WIDE | {"hidden_size": 48, "head_dim": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
GPT2 = SPECIAL | {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 256}
LATER = {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}
CONFIGS = {
    "llama": partial(CONFIG_MAPPING["llama"], **COMMON),
    "llama-yarn": partial(CONFIG_MAPPING["llama"], **COMMON, rope_parameters=YARN),
    "mistral": partial(CONFIG_MAPPING["mistral"], **COMMON, sliding_window=None),
    "glm": partial(CONFIG_MAPPING["glm"], **COMMON),
    "gemma": partial(CONFIG_MAPPING["gemma"], **COMMON),
    "qwen2": partial(CONFIG_MAPPING["qwen2"], **WIDE),
    "qwen3": partial(CONFIG_MAPPING["qwen3"], **COMMON),
    "gpt2": partial(CONFIG_MAPPING["gpt2"], **GPT2),
    "opt": partial(CONFIG_MAPPING["opt"], **LAYERS, hidden_size=128, word_embed_proj_dim=128, ffn_dim=128),
}
SLIDING = {
    "mistral": partial(CONFIG_MAPPING["mistral"], **COMMON, sliding_window=10),
    "qwen2": partial(CONFIG_MAPPING["qwen2"], **WIDE | LATER),
    "gemma2": partial(CONFIG_MAPPING["gemma2"], **COMMON, sliding_window=10),
    "gemma3": partial(CONFIG_MAPPING["gemma3_text"], **COMMON, sliding_window=10, sliding_window_pattern=2),
}


def load(name: str, folder, dtype: str | None = None, config=None):
    """``make`` it, and load it as a user would."""
    return load_model(str(make(name, folder, config)), dtype)[0]


def fixture(*names: str):
    """A fixture: each of these models in turn; "mistral sliding", say, is one of ``SLIDING``."""

    @pytest.fixture(scope="module", params=names)
    def model(request, tmp_path_factory):
        name, *is_sliding = request.param.split()
        return (sliding if is_sliding else load)(name, tmp_path_factory.mktemp(name))

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
