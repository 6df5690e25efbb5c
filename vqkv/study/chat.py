"""A conversation whose cache is compressed: what ``vqkv chat`` runs in the terminal and page 14 shows."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, TextStreamer

from vqkv.errors import DataError
from vqkv.models.layers import evaluating, max_positions
from vqkv.models.load import outline, values_per_token

MARK = "\x00"  # stands for the last answer in the chat template


class Conversation:
    """Turns of a user and a model, ``tokens`` (1, seq_len), and the ``cache`` of ``compressor`` that holds them,
    uncompressed if that is None. A model without a chat template continues the text."""

    def __init__(self, model, tokenizer, compressor=None):
        self.model, self.tokenizer, self.compressor = evaluating(model), tokenizer, compressor
        self.cache = DynamicCache(config=model.config) if compressor is None else compressor.new_cache(self.model)
        self.tokens = torch.empty(1, 0, dtype=torch.int64)

    def answer(self, said: str, max_new_tokens: int = 256, **generation):
        """Return ``generate``'s answer to a user's turn. Raises ``DataError`` where the model's positions end."""
        tokens = torch.cat([self.tokens, turn_tokens(self.tokenizer, said, self.tokens)], dim=1)
        if tokens.shape[1] + max_new_tokens > max_positions(self.model):
            raise DataError(f"the conversation has reached the model's {max_positions(self.model)} positions")
        asked = {"input_ids": tokens.to(self.model.device), "past_key_values": self.cache, **generation}
        asked["attention_mask"] = torch.ones_like(asked["input_ids"])
        made = self.model.generate(**asked, max_new_tokens=max_new_tokens)
        self.tokens = getattr(made, "sequences", made).cpu()
        return made

    @property
    def uncompressed_bytes(self) -> int:
        """Bytes of the tokens read so far in an uncompressed cache in 16 bits."""
        return 2 * values_per_token(outline(self.model)) * self.cache.get_seq_length()

    @property
    def resident_bytes(self) -> int:
        """Bytes in memory to read them, with side information and the tables made from it."""
        return self.uncompressed_bytes if self.compressor is None else self.cache.report().resident_bytes


def chat(
    model, tokenizer, compressor=None, read: Callable[[str], str] = input, max_new_tokens: int = 256, write=print
) -> None:
    """Answer what ``read`` returns, turn by turn, until that is empty, ends (``EOFError``) or is interrupted;
    ``write`` gets the bytes of the ``Conversation``'s cache after every turn."""
    talk = Conversation(model, tokenizer, compressor)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    while said := _asked(read):
        try:
            talk.answer(said, max_new_tokens, streamer=streamer)
        except DataError as error:
            return write(str(error))
        held, length = f"{talk.uncompressed_bytes:,} bytes", talk.cache.get_seq_length()
        if compressor is not None:
            own = talk.cache.report().cache_bytes
            held = f"{own:,} bytes, and {talk.resident_bytes - own:,} that all caches share"
        write(f"[{length:,} tokens: {held}; uncompressed in 16 bits {talk.uncompressed_bytes:,}]")


def _asked(read: Callable[[str], str]) -> str:
    try:
        return read("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def turn_tokens(tokenizer, said: str, before: Tensor | None = None) -> Tensor:
    """Encode a user's turn as tokens (1, n), after a conversation that ends with an answer."""
    first = before is None or not before.shape[1]
    if tokenizer.chat_template is None:
        return tokenizer(said if first else f"\n{said}", add_special_tokens=first, return_tensors="pt").input_ids
    earlier = [{"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}]
    messages = [*([] if first else earlier), {"role": "user", "content": said}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).split(MARK)[-1]
    if before is not None and not first and before[0, -1] == tokenizer.eos_token_id:  # the answer has ended itself
        text = text.removeprefix(tokenizer.eos_token)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
