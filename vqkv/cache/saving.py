"""A cache on disk: what it stores of its tokens and what it was made for, in one checked safetensors file.

The metadata (``runtime.files``) is a JSON header: format and version; names and fingerprints of the compressor and the
model; the batch; how many tokens of each group's sequences are sinks, quantized (with holes) and window. Tensors:
``tokens``, uint8 (batch, slots), if some slots hold padding; of group 0 ``0.positions``, unless they are 0, 1, 2, ...;
of its layer 3 ``0.3.key.sinks``, ``0.3.key.window`` and ``0.3.key.payload.codes``.
"""

import json
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vqkv.cache.groups import Group
from vqkv.cache.store import TokenStore
from vqkv.codecs.payload import Payload
from vqkv.codecs.predictive import ROLES
from vqkv.errors import DataError
from vqkv.models.identity import identity, stamp
from vqkv.models.load import outline
from vqkv.runtime.files import claim

FORMAT, VERSION = "vqkv-cache", 6


def header_of(cache) -> dict:
    """Describe a cache apart from its tensors. Raises ``DataError`` for one that cannot be saved."""
    cache.check_complete()
    model = cache.model()
    if cache.with_states:
        raise DataError(f"{type(model).__name__} has states beside keys and values: save its tokens instead")
    if not cache.is_croppable:
        raise DataError("a sliding window has dropped tokens of some layers: save all tokens and read them again")
    if cache.read_by not in (None, stamp(model)):
        raise DataError(
            "the model's weights or adapters changed since this cache's first token: read the tokens into a new cache"
        )
    return {
        "format": FORMAT,
        "version": VERSION,
        **made_for(cache.compressor, model),
        "in_place": cache.settings.in_place,
        "batch_size": cache.batch.size,
        "slots": cache.batch.slots,
        "groups": [group.counts for group in cache.batch.groups],
    }


def made_for(compressor, model) -> dict[str, dict]:
    """Name compressor and model."""
    about = {"name": compressor.name, "fingerprint": compressor.fingerprint}
    return {"compressor": about, "model": model_of(model)}


def model_of(model) -> dict:
    """Describe the model as it is now: names, shapes, identity."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None)  # sinks and window are stored after RoPE
    about = outline(model) | {"dtype": str(model.dtype).removeprefix("torch.")}
    return about | {"rope_parameters": json.dumps(rope, sort_keys=True, default=str), "weights": identity(model)}


def tensors_of(batch, start: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Name all that a batch stores; of quantized tokens those from the ``start``-th on, the first of a block."""
    if batch.padded:
        yield "tokens", torch.stack([group.slots for group in batch.groups]).to(torch.uint8)
    for number, group in enumerate(batch.groups):
        if group.sequences.positions is not None:
            yield f"{number}.positions", group.sequences.positions
        for name, store in _stores(number, group):
            stored = {"sinks": store.sinks, "window": store.window}
            if store.payload is not None:
                payload = store.payload.tokens(start) if start else store.payload
                stored |= {f"payload.{part}": x for part, x in payload.tensors.items()}
            yield from ((f"{name}.{part}", x) for part, x in stored.items() if x is not None)


def _stores(number: int, group: Group) -> Iterator[tuple[str, TokenStore]]:
    """Name the stores of a group as in a file: ``0.3.key``."""
    for layer, pair in enumerate(group.stores):
        yield from ((f"{number}.{layer}.{role}", store) for role, store in zip(ROLES, pair, strict=True))


def fill(cache, header: dict, tensors: dict[str, Tensor], earlier: Sequence[dict[str, Tensor]] = ()) -> None:
    """Hand an empty ``cache`` what was saved; ``earlier``: files with the quantized tokens before those in
    ``tensors``."""
    batch, model = cache.batch, cache.model()
    files = [{name: x.to(model.device) for name, x in file.items()} for file in (*earlier, tensors)]
    cache.read_by = stamp(model)
    batch.size, batch.slots = header["batch_size"], header["slots"]
    for number, about in enumerate(header["groups"]):
        group = batch.new_group(number)
        group.sequences.positions = files[-1].get(f"{number}.positions")
        group.sequences.seq_len = about["sinks"] + about["quantized"] - len(about["holes"]) + about["window"]
        shapes = [(heads, dim) for heads, *both in cache.compressor.model["shapes"] for dim in both]
        for (name, store), shape in zip(_stores(number, group), shapes, strict=True):
            store.sinks, store.window = (files[-1].get(f"{name}.{part}") for part in ("sinks", "window"))
            store.holes = tuple(about["holes"])
            if about["quantized"]:
                parts = [claim(file, f"{name}.payload.") for file in files]
                payloads = [_empty(store, *shape, parts[0]).holding(part) for part in parts]
                store.payload = Payload.concat(payloads) if earlier else payloads[0]
        if "tokens" in tensors:
            group.slots = tensors["tokens"][number].bool()
        batch.groups.append(group)


def _empty(store: TokenStore, heads: int, dim: int, like: dict[str, Tensor]) -> Payload:
    """Encode zeros, so as to know what the payload of a store is made of."""
    codec, device = store.coder.codec, next(iter(like.values())).device
    heads = codec.num_kv_heads or heads  # of all layers, where they are stored together
    return codec.encode(torch.zeros(1, heads, codec.block_tokens, dim, device=device))
