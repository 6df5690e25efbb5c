"""What the model itself makes of tokens, to which every compressed cache is compared."""

from contextlib import contextmanager

import torch
from torch import Tensor

from vqkv.corpus import fingerprint
from vqkv.errors import DataError
from vqkv.models import kv_sources

REMEMBERED = 1 << 28  # bytes of logits of one batch: more are computed again


class ExactPass:
    """Logits and attention outputs of ``model`` without any compression, the last ``entries`` batches of tokens
    remembered. Make another one when the model's weights have changed."""

    def __init__(self, model, entries: int = 2):
        self.model, self.entries = model, entries
        self._held: dict[str, tuple[Tensor, dict[int, list[Tensor]]]] = {}

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, dict[int, list[Tensor]]]:
        """Of tokens (batch, seq_len): logits (batch, seq_len, vocabulary), and what ``attention_outputs`` gives. Raises
        ``DataError`` for a model that makes NaN or infinity."""
        name = fingerprint(tokens)
        if name in self._held:
            return self._held[name]
        with attention_outputs(self.model) as attention:
            logits = self.model(tokens, use_cache=False).logits
        if not logits.isfinite().all():
            raise DataError("the model itself makes NaN or infinite logits: check its weights and dtype")
        if self.entries and logits.nbytes <= REMEMBERED:
            while len(self._held) >= self.entries:
                del self._held[next(iter(self._held))]
            self._held[name] = logits, attention
        return logits, attention


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
