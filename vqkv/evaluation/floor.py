"""The noise floor: KL between a model and itself when its cache is exact but for rounding, or for the order of sums."""

import torch
from torch import Tensor
from transformers import DynamicCache

from vqkv.errors import DataError
from vqkv.evaluation.metrics import token_kl

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32, read in pieces": torch.float32}


class RoundedCache(DynamicCache):
    """transformers' cache of everything, rounded to ``dtype`` as it is stored."""

    def __init__(self, model, dtype: torch.dtype):
        super().__init__(config=model.config)
        self.dtype = dtype

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """All keys and values of a layer so far, rounded, in the type that came."""
        rounded = (x.to(self.dtype).to(x.dtype) for x in (key_states, value_states))
        return super().update(*rounded, layer_idx, *args, **kwargs)


@torch.inference_mode()
def floor_kl(model, exact: Tensor, tokens: Tensor, pieces: list[int], dtype: torch.dtype) -> Tensor:
    """KL (batch, seq_len) in nats between ``exact`` logits and those of the model that reads tokens (batch, seq_len) in
    ``pieces`` of these lengths from a ``RoundedCache``. What lies below it is no storage error."""
    cache = RoundedCache(model, dtype)
    read = [model(piece, past_key_values=cache, use_cache=True).logits for piece in tokens.split(pieces, dim=1)]
    return token_kl(exact, torch.cat(read, dim=1))


def noise_floor(exact, tokens: Tensor, chunk_size: int = 32) -> dict[str, float]:
    """Mean KL in nats of caches in fp16, in bf16, and in the model's own type but read in pieces of ``chunk_size``;
    ``exact``: an ``ExactPass`` of the model. Raises ``DataError`` where no token is left behind the first piece."""
    if not 0 < chunk_size < tokens.shape[1] - 1:
        raise DataError(f"chunk_size {chunk_size} leaves nothing of {tokens.shape[1]} tokens to compare: use less")
    pieces = [len(piece) for piece in torch.arange(tokens.shape[1]).split(chunk_size)]
    logits, _ = exact(tokens)
    found = {name: floor_kl(exact.model, logits, tokens, pieces, dtype) for name, dtype in DTYPES.items()}
    return {name: kl[:, chunk_size:-1].mean().item() for name, kl in found.items()}
