"""A conversation in the terminal whose cache is compressed: what ``vqkv chat`` runs."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, TextStreamer

from vqkv.models.layers import kv_layers, max_positions
from vqkv.models.plain import evaluating

MARK = "\x00"  # stands for the last answer in the chat template


def chat(
    model, tokenizer, compressor=None, read: Callable[[str], str] = input, max_new_tokens: int = 256, write=print
) -> None:
    """Answer what ``read`` returns, turn by turn, until that is empty, ends (``EOFError``) or is interrupted.

    One cache of ``compressor`` (uncompressed if it is None) holds the conversation; ``write`` gets its bytes after
    every turn. A model without a chat template continues the text.
    """
    model = evaluating(model)
    cache = DynamicCache(config=model.config) if compressor is None else compressor.new_cache(model)
    tokens = torch.empty(1, 0, dtype=torch.int64)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    uncompressed = 2 * sum(layer.num_kv_heads * (layer.head_dim + layer.value_dim) for layer in kv_layers(model))
    while said := _asked(read):
        tokens = torch.cat([tokens, _turn(tokenizer, said, tokens)], dim=1)
        if tokens.shape[1] + max_new_tokens > max_positions(model):
            write(f"the conversation has reached the model's {max_positions(model)} positions")
            return
        asked = {"input_ids": tokens.to(model.device), "attention_mask": torch.ones_like(tokens).to(model.device)}
        made = model.generate(**asked, past_key_values=cache, streamer=streamer, max_new_tokens=max_new_tokens)
        tokens, seq_len = made.cpu(), cache.get_seq_length()
        held = seq_len * uncompressed if compressor is None else cache.report().resident_bytes
        write(f"[{seq_len:,} tokens: {held:,} bytes in memory; uncompressed in 16 bits {seq_len * uncompressed:,}]")


def _asked(read: Callable[[str], str]) -> str:
    try:
        return read("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _turn(tokenizer, said: str, before: Tensor) -> Tensor:
    """Tokens (1, n) of a user's turn, after a conversation that ends with an answer."""
    first = not before.shape[1]
    if tokenizer.chat_template is None:
        return tokenizer(said if first else f"\n{said}", add_special_tokens=first, return_tensors="pt").input_ids
    earlier = [{"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}]
    messages = [*([] if first else earlier), {"role": "user", "content": said}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).split(MARK)[-1]
    if not first and before[0, -1] == tokenizer.eos_token_id:  # the answer has ended itself
        text = text.removeprefix(tokenizer.eos_token)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
