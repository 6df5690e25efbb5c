"""The model's own logits, attention outputs, keys and values, to which compressed caches are compared; and the noise
floor: KL between a model and itself when its cache is exact but for rounding, or for the order of sums."""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache

from vqkv.cache.meter import tensor_bytes
from vqkv.errors import DataError
from vqkv.models.capture import capture
from vqkv.models.layers import evaluating, kv_layers
from vqkv.models.metrics import token_kl

REMEMBERED = 1 << 31  # bytes
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32, read in pieces": torch.float32}


class ExactPass:
    """Logits, attention outputs, keys and values of ``model`` without any compression, the latest
    ``most_bytes`` of them remembered. Make another one when the model has changed; do not change what is returned."""

    def __init__(self, model, most_bytes: int = REMEMBERED):
        self.given, self.model, self.most_bytes = model, evaluating(model), most_bytes
        self._held: list[tuple[str, Tensor, tuple]] = []  # kind, tokens, what was made of them; oldest first

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, dict[int, list[Tensor]]]:
        """Compute logits and ``attention_outputs`` of tokens (batch, seq_len). Raises ``DataError`` for NaN."""

        def compute() -> tuple:
            with attention_outputs(self.model) as attention:
                logits = self.model(tokens, use_cache=False).logits
            if not logits.isfinite().all():
                raise DataError("the model itself makes NaN or infinite logits: check its weights and dtype")
            return logits, attention

        return self.remembered("logits", tokens, compute)

    def keys_and_values(self, tokens: Tensor, pre_rope: int) -> tuple[list[Tensor], list[Tensor]]:
        """Capture keys and values of tokens (batch, seq_len), by layer; see ``capture``, whose errors it raises."""
        kind = f"pre_rope {int(pre_rope)}"
        return self.remembered(kind, tokens, lambda: capture(self.model, tokens, pre_rope=pre_rope))

    def floor(self, tokens: Tensor, pieces: list[int]) -> Tensor:
        """Measure the KL (batch, seq_len) between the model and itself with an fp16 cache, read in these pieces."""
        compute = partial(floor_kl, self.model, self(tokens)[0], tokens, pieces, torch.float16)
        return self.remembered(f"floor of {pieces}", tokens, lambda: (compute(),))[0]

    def remembered(self, kind: str, tokens: Tensor, compute: Callable[[], tuple]) -> tuple:
        """Call ``compute``, or return what it was for the same tokens."""
        for held_kind, held_tokens, result in self._held:
            if kind == held_kind and torch.equal(held_tokens, tokens):
                return result
        result = compute()
        self._held.append((kind, tokens.clone(), result))
        while sum(tensor_bytes(each) for _, _, each in self._held) > self.most_bytes:
            self._held.pop(0)
        return result


@contextmanager
def attention_outputs(model):
    """Collect attention blocks' outputs (batch, tokens, hidden_size) of this thread's passes: by layer, a list."""
    layers, thread = {layer.attention: layer.layer_idx for layer in kv_layers(model)}, threading.get_ident()
    outputs: dict[int, list[Tensor]] = {index: [] for index in layers.values()}

    def keep(module, args, output) -> None:
        if module in layers and threading.get_ident() == thread:  # a copy of the model has these hooks, too
            outputs[layers[module]].append(output[0])

    handles = [attention.register_forward_hook(keep) for attention in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


class RoundedCache(DynamicCache):
    """transformers' cache of everything, rounded to ``dtype`` as it is stored."""

    def __init__(self, model, dtype: torch.dtype):
        super().__init__(config=model.config)
        self.dtype = dtype

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Store keys and values rounded; return all of a layer so far, in the type that came."""
        rounded = (x.to(self.dtype).to(x.dtype) for x in (key_states, value_states))
        return super().update(*rounded, layer_idx, *args, **kwargs)


@torch.no_grad()
def floor_kl(model, exact: Tensor, tokens: Tensor, pieces: list[int], dtype: torch.dtype) -> Tensor:
    """Measure the KL (batch, seq_len) in nats between ``exact`` logits and those of the model that reads tokens (batch,
    seq_len) in ``pieces`` of these lengths from a ``RoundedCache``. What lies below it is no storage error."""
    cache = RoundedCache(model, dtype)
    read = [model(piece, past_key_values=cache, use_cache=True).logits for piece in tokens.split(pieces, dim=1)]
    return token_kl(exact, torch.cat(read, dim=1))
