"""The keys and values of a forward pass, per layer, before RoPE (or after)."""

import inspect
from contextlib import contextmanager
from functools import partial

import torch
from transformers import DynamicCache

from vqkv.errors import DataError
from vqkv.kernels.rope import rotate
from vqkv.models.load import kv_sources, position_rotary, rotary_embedding

PASS_TOKENS = 16384  # that go through a model at a time, of whatever length a sequence is


@contextmanager
def hooked(model, hook):
    """Within the context, ``hook(source, role, part, output)`` gets the outputs of the modules that make each layer's
    ``"key"`` and ``"value"`` before RoPE; what it returns, if anything, takes their place."""

    def called(about, module, args, output):
        return hook(*about, output)

    handles = [
        module.register_forward_hook(partial(called, (source, role, part)))
        for source in kv_sources(model)
        for role, (module, part) in zip(("key", "value"), source.sides, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def capture(model, tokens: torch.Tensor, batch_size: int | None = None, post_rope: bool = False):
    """Keys and values of ``tokens`` (num_seqs, seq_len): two lists over layers of (num_seqs, num_kv_heads, seq_len,
    head_dim), in the model's dtype; the sequences are independent. ``batch_size``: how many go through the model at a
    time, by default as many as make ``PASS_TOKENS`` tokens.

    ``post_rope``: keys as attention (and transformers' caches) see them, after RoPE. Raises ``DataError`` for an empty
    input, and if the model made NaN or infinity.
    """
    check_tokens(model, tokens)
    batch_size = max(1, PASS_TOKENS // tokens.shape[1]) if batch_size is None else batch_size
    check_batch_size(batch_size)
    one_pass = _post_rope_pass if post_rope else _pre_rope_pass
    passes = [one_pass(model, batch.to(model.device)) for batch in tokens.split(batch_size)]
    keys, values = ([torch.cat(layer) for layer in zip(*role, strict=True)] for role in zip(*passes, strict=True))
    for index, layer in enumerate(zip(keys, values, strict=True)):
        if not all(x.isfinite().all() for x in layer):
            raise DataError(f"layer {index} made NaN or infinite keys or values: check the model's weights and dtype")
    return keys, values


def check_tokens(model, tokens: torch.Tensor) -> None:
    """Raise ``DataError`` unless ``tokens`` are (num_seqs, seq_len) int64 that the model has embeddings for."""
    if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or tokens.dtype is not torch.int64:
        got = f"{tuple(tokens.shape)} {tokens.dtype}" if isinstance(tokens, torch.Tensor) else type(tokens).__name__
        raise DataError(f"tokens must be an int64 tensor (num_seqs, seq_len), got {got}")
    if tokens.numel() == 0:
        raise DataError(f"tokens of shape {tuple(tokens.shape)} are empty: give at least one token")
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise DataError(
            f"token ids from {tokens.min()} to {tokens.max()}, but the model knows 0 to {vocab_size - 1}: "
            "use the model's own tokenizer"
        )
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest and rotary_embedding(model) is None and tokens.shape[1] > longest:
        raise DataError(f"{tokens.shape[1]} tokens, but the model learned {longest} positions: use shorter sequences")


def check_batch_size(batch_size: int) -> None:
    """Raise ``DataError`` unless it is a positive integer."""
    if type(batch_size) is not int or batch_size < 1:
        raise DataError(f"batch_size {batch_size!r} must be a positive integer")


def check_rope(model, tokens: torch.Tensor) -> None:
    """Raise ``DataError`` if ``rope.rotate`` does not turn the captured keys into those that attention reads."""
    rotary, tokens = position_rotary(model), tokens[:1, :16]
    for index, (before, after) in enumerate(
        zip(capture(model, tokens)[0], capture(model, tokens, post_rope=True)[0], strict=True)
    ):
        if rotary is not None:
            cos, sin = rotary.forward(before, torch.arange(tokens.shape[1], device=before.device)[None])
            before = rotate(before.float(), cos.float(), sin.float())
        if (before - after).abs().max() > 0.05 * after.abs().max():
            raise DataError(
                f"layer {index} of {type(model).__name__} does not rotate its keys as the Llama family does, so they "
                "cannot be stored before RoPE: use a preset with pre_rope=False"
            )


def _pre_rope_pass(model, tokens):
    made = {"key": {}, "value": {}}

    def keep(source, role, part, output) -> None:
        made[role][source.layer_idx] = source.heads(output.detach(), part)

    with hooked(model, keep):
        model(tokens, use_cache=False, **_few_logits(model))
    return tuple([layers[i] for i in sorted(layers)] for layers in made.values())


def _post_rope_pass(model, tokens):
    cache = DynamicCache()
    model(tokens, past_key_values=cache, use_cache=True, **_few_logits(model))
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]


def _few_logits(model) -> dict:
    """Arguments without which the logits of 128,000 words would take more memory than all keys and values."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
