"""The model's own logits, attention outputs, keys and values, to which every compressed cache is compared."""

from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor

from vqkv.cache.meter import tensor_bytes
from vqkv.errors import DataError
from vqkv.evaluation.floor import floor_kl
from vqkv.models.capture import capture
from vqkv.models.load import kv_sources

REMEMBERED = 1 << 28  # bytes of what is made of one batch: more is computed again


class ExactPass:
    """Logits, attention outputs, keys and values of ``model`` without any compression, each of the last ``entries``
    batches of tokens remembered. Make another one when the model has changed; what is returned is not to be changed."""

    def __init__(self, model, entries: int = 2):
        self.model, self.entries = model, entries
        self._held: dict[str, list[tuple[Tensor, tuple]]] = {}  # kind -> (tokens, what was made of them), oldest first

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, dict[int, list[Tensor]]]:
        """Of tokens (batch, seq_len): logits (batch, seq_len, vocabulary), and what ``attention_outputs`` gives. Raises
        ``DataError`` for a model that makes NaN or infinity."""

        def compute() -> tuple:
            with attention_outputs(self.model) as attention:
                logits = self.model(tokens, use_cache=False).logits
            if not logits.isfinite().all():
                raise DataError("the model itself makes NaN or infinite logits: check its weights and dtype")
            return logits, attention

        return self._remembered("logits", tokens, compute)

    def keys_and_values(self, tokens: Tensor, post_rope: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of tokens (batch, seq_len), by layer; see ``capture``, whose errors it raises."""
        kind = "keys after RoPE" if post_rope else "keys before RoPE"
        return self._remembered(kind, tokens, lambda: capture(self.model, tokens, post_rope=post_rope))

    def floor(self, tokens: Tensor, pieces: list[int]) -> Tensor:
        """KL (batch, seq_len) between the model and itself with an fp16 cache that is read in these pieces."""

        def compute() -> tuple:
            return (floor_kl(self.model, self(tokens)[0], tokens, pieces, torch.float16),)

        return self._remembered(f"floor of {pieces}", tokens, compute)[0]

    def _remembered(self, kind: str, tokens: Tensor, compute: Callable[[], tuple]) -> tuple:
        """``compute()``, or what it was for the same tokens."""
        held = self._held.setdefault(kind, [])
        for known, found in held:
            if torch.equal(known, tokens):
                return found
        found = compute()
        if self.entries and tensor_bytes(found) <= REMEMBERED:
            del held[: len(held) - self.entries + 1]
            held.append((tokens.clone(), found))
        return found


@contextmanager
def attention_outputs(model):
    """{layer: the attention block's outputs (batch, tokens, hidden_size) of every forward pass within the context}."""
    outputs, handles = {}, []
    for source in kv_sources(model):
        found = outputs.setdefault(source.layer_idx, [])
        handles.append(source.attention.register_forward_hook(lambda m, a, o, found=found: found.append(o[0])))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
