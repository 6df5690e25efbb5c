"""What the model itself makes of tokens, to which every compressed cache is compared."""

import hashlib
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor

from vqkv.capture import capture
from vqkv.codec.checks import check_whole
from vqkv.errors import DataError
from vqkv.files import raw_bytes
from vqkv.models import kv_sources

REMEMBERED = 1 << 28  # bytes of what is made of one batch: more is computed again
PROBED = 32  # tokens


class ExactPass:
    """Logits, attention outputs, keys and values of ``model`` without any compression, each of the last ``entries``
    batches of tokens remembered, for as long as the model says the same (see ``behaviour``). What is returned is not to
    be changed."""

    def __init__(self, model, entries: int = 2):
        check_whole("entries", entries, 0, 1 << 20)
        self.model, self.entries = model, entries
        self._held: dict[str, dict[str, tuple]] = {}  # what is remembered -> behaviour -> what was made

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, dict[int, list[Tensor]]]:
        """Of tokens (batch, seq_len): logits (batch, seq_len, vocabulary), and what ``attention_outputs`` gives. Raises
        ``DataError`` for a model that makes NaN or infinity."""

        def compute() -> tuple[tuple, int]:
            with attention_outputs(self.model) as attention:
                logits = self.model(tokens, use_cache=False).logits
            if not logits.isfinite().all():
                raise DataError("the model itself makes NaN or infinite logits: check its weights and dtype")
            return (logits, attention), logits.nbytes + sum(x.nbytes for layer in attention.values() for x in layer)

        return self._remembered("logits", tokens, compute)

    def keys_and_values(self, tokens: Tensor, post_rope: bool) -> tuple[list[Tensor], list[Tensor]]:
        """See ``capture``, whose errors it raises."""

        def compute() -> tuple[tuple, int]:
            roles = capture(self.model, tokens, post_rope=post_rope)
            return roles, sum(x.nbytes for role in roles for x in role)

        return self._remembered("keys after RoPE" if post_rope else "keys before RoPE", tokens, compute)

    def _remembered(self, what: str, tokens: Tensor, compute: Callable[[], tuple[tuple, int]]) -> tuple:
        """What ``compute`` returns, with its bytes, or returned for the same tokens before."""
        held, name = self._held.setdefault(what, {}), behaviour(self.model, tokens) if self.entries else ""
        if name in held:
            return held[name]
        found, size = compute()
        if self.entries and size <= REMEMBERED:
            while len(held) >= self.entries:
                del held[next(iter(held))]
            held[name] = found
        return found


@torch.inference_mode()
def behaviour(model, tokens: Tensor) -> str:
    """A name for these tokens and for what the model makes of the first few: other weights, settings or hooks that
    change its predictions have another one."""
    logits = model(tokens[:1, :PROBED].to(model.device), use_cache=False).logits
    parts = (str([*tokens.shape]).encode(), raw_bytes(tokens.to(torch.int64)), raw_bytes(logits))
    return hashlib.sha256(b"".join(parts)).hexdigest()


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
