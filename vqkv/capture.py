"""The keys and values of a forward pass, per layer, before RoPE (or after)."""

from contextlib import contextmanager

import torch
from transformers import DynamicCache

from vqkv.errors import DataError
from vqkv.models import KVSource, kv_sources


@contextmanager
def recording(model):
    """Within the context, every forward pass appends each layer's pre-RoPE keys and values to the yielded dict:
    ``{layer_idx: ([keys, ...], [values, ...])}``, each (batch, num_kv_heads, seq_len, head_dim)."""
    record = {source.layer_idx: ([], []) for source in kv_sources(model)}
    handles = []
    for source in kv_sources(model):
        keys, values = record[source.layer_idx]
        handles.append(source.key_module.register_forward_hook(_hook(source, source.key_part, keys)))
        handles.append(source.value_module.register_forward_hook(_hook(source, source.value_part, values)))
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def capture(model, tokens: torch.Tensor, batch_size: int = 8, post_rope: bool = False):
    """Keys and values of ``tokens`` (num_seqs, seq_len) in one pass: two lists over layers of
    (num_seqs, num_kv_heads, seq_len, head_dim), in the model's dtype; the sequences are independent.

    ``post_rope``: keys as attention (and transformers' caches) see them, after RoPE. Raises ``DataError`` for an empty
    input or if the model made NaN or infinity.
    """
    if tokens.numel() == 0:
        raise DataError(f"tokens of shape {tuple(tokens.shape)}: nothing to capture; give at least one token")
    one_pass = _post_rope_pass if post_rope else _pre_rope_pass
    passes = [one_pass(model, batch.to(model.device)) for batch in tokens.split(batch_size)]
    keys, values = ([torch.cat(layer) for layer in zip(*role, strict=True)] for role in zip(*passes, strict=True))
    for index, layer in enumerate(zip(keys, values, strict=True)):
        if not all(x.isfinite().all() for x in layer):
            raise DataError(f"layer {index} made NaN or infinite keys or values: check the model's weights and dtype")
    return keys, values


def _pre_rope_pass(model, tokens):
    with recording(model) as record:
        model(tokens, use_cache=False)
    return [record[i][0][0] for i in sorted(record)], [record[i][1][0] for i in sorted(record)]


def _post_rope_pass(model, tokens):
    cache = model(tokens, past_key_values=DynamicCache(), use_cache=True).past_key_values
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]


def _hook(source: KVSource, part: int, into: list):
    def keep(module, args, output):
        into.append(source.heads(output.detach(), part))

    return keep
