"""The shapes of the two bundled models."""

from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from vqkv.reference.data import VOCAB_SIZE
from vqkv.reference.induction import begin_gpt2, begin_llama

CONTEXT = 1024


def llama_mini() -> LlamaForCausalLM:
    """Grouped-query Llama: hidden size three times the KV width, so that no layer's K and V determine its input."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    begin_llama(model)
    return model


def gpt2_mini() -> GPT2LMHeadModel:
    """Multi-head GPT-2; K alone is as wide as the hidden state, as in every GPT-2."""
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=256,
        n_layer=6,
        n_head=4,
        n_positions=CONTEXT,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    begin_gpt2(model)
    return model


ARCHITECTURES = {"llama-mini": llama_mini, "gpt2-mini": gpt2_mini}
