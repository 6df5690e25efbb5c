"""Small GGUF files of a random Llama, written with the gguf package as llama.cpp's converter lays them out."""

import json

import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from vqkv.reference.data import TOKENIZER_DIR

CONFIG = LlamaConfig(
    vocab_size=4096, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
)  # fmt: skip
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write(path) -> LlamaForCausalLM:
    """Write a random Llama to ``path`` with matrices in Q8_0; return it."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    model = LlamaForCausalLM(CONFIG)
    out = GGUFWriter(path, "llama")
    out.add_context_length(CONFIG.max_position_embeddings)
    out.add_embedding_length(CONFIG.hidden_size)
    out.add_block_count(CONFIG.num_hidden_layers)
    out.add_feed_forward_length(CONFIG.intermediate_size)
    out.add_head_count(CONFIG.num_attention_heads)
    out.add_head_count_kv(CONFIG.num_key_value_heads)
    out.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    out.add_rope_freq_base(10000.0)
    out.add_vocab_size(CONFIG.vocab_size)
    _add_tokenizer(out)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":
            data = _permuted(name, weight.numpy())
            kind = GGMLQuantizationType.Q8_0 if data.ndim == 2 else GGMLQuantizationType.F32
            out.add_tensor(_name(name), quantize(data, kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return model


def _add_tokenizer(out) -> None:
    model = json.loads((TOKENIZER_DIR / "tokenizer.json").read_text())["model"]
    out.add_tokenizer_model("gpt2")
    out.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    out.add_token_types([1] * len(model["vocab"]))
    out.add_token_merges([" ".join(pair) for pair in model["merges"]])
    out.add_bos_token_id(0)
    out.add_eos_token_id(0)


def _name(name: str) -> str:
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed:
        return fixed[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def _permuted(name: str, weight: np.ndarray) -> np.ndarray:
    """Rows of query and key matrices in llama.cpp's order, in which pairs that RoPE rotates are neighbours."""
    heads = {"q_proj": CONFIG.num_attention_heads, "k_proj": CONFIG.num_key_value_heads}
    for part, count in heads.items():
        if part in name:
            return weight.reshape(count, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
    return weight
