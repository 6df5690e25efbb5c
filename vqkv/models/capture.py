"""Keys and values of a forward pass, by layer, before RoPE or after."""

import torch

from vqkv.errors import DataError
from vqkv.models.layers import evaluating, forward, kv_layers, max_positions
from vqkv.models.rope import rotates, rotations

PASS_TOKENS = 16384  # that go through a model at a time, of whatever length a sequence is


@torch.no_grad()
def capture(model, tokens: torch.Tensor, batch_size: int | None = None, pre_rope: int = True):
    """Capture keys and values of ``tokens`` (num_seqs, seq_len) as the model hands them to its cache, keys rotated back
    as ``pre_rope`` says (``CacheSettings``).

    ``batch_size``: how many sequences go through the model at a time, by default as many as make ``PASS_TOKENS``
    tokens. Returns two lists over layers of (num_seqs, num_kv_heads, seq_len, head_dim), in the model's dtype. Raises
    ``DataError`` for an empty input, for keys that cannot be rotated back, and if the model made NaN or infinity."""
    model = evaluating(model)
    check_tokens(model, tokens)
    batch_size = max(1, PASS_TOKENS // tokens.shape[1]) if batch_size is None else batch_size
    layers = range(len(kv_layers(model)))
    rotation_of = rotations(model, pre_rope) if pre_rope else [None for _ in layers]
    keys: list[list[torch.Tensor]] = [[] for _ in layers]
    values: list[list[torch.Tensor]] = [[] for _ in layers]

    def keep(layer: int, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        if (rotation := rotation_of[layer]) is not None:
            new_keys = rotation.rotated(new_keys.float(), back=True).to(new_keys)
        keys[layer].append(new_keys)
        values[layer].append(new_values)

    for batch in tokens.split(batch_size):
        forward(model, batch, keep)
    for layer in layers:
        if not all(x.isfinite().all() for x in (*keys[layer], *values[layer])):
            raise DataError(f"layer {layer} made NaN or infinite keys or values: check the model's weights and dtype")
    return [torch.cat(layer) for layer in keys], [torch.cat(layer) for layer in values]


def check_tokens(model, tokens: torch.Tensor) -> None:
    """Raise ``DataError`` unless ``tokens`` are (num_seqs, seq_len) int64 that the model has embeddings for."""
    if not isinstance(tokens, torch.Tensor) or tokens.dtype is not torch.int64 or tokens.ndim != 2 or 0 in tokens.shape:
        got = f"{tuple(tokens.shape)} {tokens.dtype}" if isinstance(tokens, torch.Tensor) else type(tokens).__name__
        raise DataError(f"tokens must be an int64 tensor (num_seqs, seq_len), not empty, got {got}")
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise DataError(
            f"token ids from {tokens.min()} to {tokens.max()}, but the model knows 0 to {vocab_size - 1}: "
            "use the model's own tokenizer"
        )
    longest = max_positions(model)
    if longest < tokens.shape[1] and not rotates(model):
        raise DataError(f"{tokens.shape[1]} tokens, but the model learned {longest} positions: use shorter sequences")
