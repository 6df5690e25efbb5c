"""Small random models of every causal architecture that transformers ships and that can be built small."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WIDTHS = dict.fromkeys(("hidden_size", "n_embd", "d_model", "lru_width"), 64)
LAYERS = dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 4)
HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4
)
MLPS = dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 96) | {
    "moe_intermediate_size": 32
}
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4) | {
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
STATES = {
    "state_size": 8, "expand": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
SMALL = WIDTHS | LAYERS | HEADS | MLPS | EXPERTS | LATENT | STATES | {
    "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8, "sliding_window": 16, "attention_window_size": 16,
    "encoder_layers": 2, "vocab_size": 128, "max_position_embeddings": 512, "n_positions": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 0,
}  # fmt: skip


def build(model_type: str):
    """A model of this type with random weights. Raises whatever its configuration has against being small."""
    config_class = CONFIG_MAPPING[model_type]
    known = config_class()
    config = config_class(**{name: value for name, value in SMALL.items() if hasattr(known, name)})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    if sum(parameter.numel() for parameter in model.parameters()) > 5e6:
        raise ValueError("parts of it stay large")
    return model
