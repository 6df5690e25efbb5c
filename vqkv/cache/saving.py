"""A cache on disk: what it stores of its tokens and what it was made for, in one checked safetensors file.

The metadata (``runtime.files``) is a JSON header: format and version; names and fingerprints of the compressor and the
model; the batch; of each group its sequences and how many of their tokens are sinks, quantized (with holes) and window;
the report. Tensors: ``tokens``, uint8 (batch, slots), if some slots hold padding; of group 0 ``0.positions``, unless
they are 0, 1, 2, ...; of its layer 3 ``0.3.key.sinks``, ``0.3.key.window`` and ``0.3.key.payload.codes``.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vqkv.cache.groups import Group
from vqkv.codecs.payload import Payload
from vqkv.codecs.predictive import ROLES
from vqkv.errors import DataError, FormatError
from vqkv.models.identity import identity, stamp, switches
from vqkv.models.load import outline
from vqkv.runtime.files import load_checked, save_checked

FORMAT, VERSION = "vqkv-cache", 6
REMEDY = "save a cache with cache.save(...)"


def save(cache, path) -> None:
    """Write ``cache`` to one file, as ``CompressedCache.save`` says."""
    path = Path(path)
    if path.is_dir():
        raise FormatError(f"{path} is a folder: name a file for the cache")
    save_checked(path, header_of(cache), dict(tensors_of(cache.batch)))


def load(kind: type, path, compressor, model, decoded_cache_bytes: int = 0):
    """Read a cache of class ``kind``, as ``CompressedCache.load`` says."""
    if not hasattr(compressor, "fingerprint"):
        raise DataError(f"a {type(compressor).__name__} is no Compressor: pass the one that the cache was made with")
    header, tensors = load_checked(Path(path), FORMAT, VERSION, REMEDY)
    for part, now in made_for(compressor, model).items():
        was = header[part]
        for key in now:
            if key != "name" and was[key] != now[key]:
                saved, given = (f"{about['name']!r} with {key} {about[key]}" for about in (was, now))
                raise FormatError(
                    f"{path} was saved with {part} {saved}, not {given}: load it with what it was saved with"
                )
    cache = kind(compressor, model, header["in_place"], decoded_cache_bytes)
    fill(cache, header, tensors)
    return cache


def inspect(path) -> dict:
    """Read a saved cache's header and report, without compressor or model. Raises ``FormatError`` for another file."""
    header, tensors = load_checked(Path(path), FORMAT, VERSION, REMEDY)
    about = {key: header[key] for key in ("format", "version", "compressor", "model", "in_place")}
    about["groups"] = [group | {"rows": len(group["rows"])} for group in header["groups"]]
    file_bytes, stored = Path(path).stat().st_size, sum(x.numel() * x.element_size() for x in tensors.values())
    return about | {"file_bytes": file_bytes, "header_bytes": file_bytes - stored} | header["report"]


def header_of(cache) -> dict:
    """Describe a cache beside its tensors. Raises ``DataError`` for one that cannot be saved."""
    cache.check_complete()
    if (model := cache.model()) is None:
        raise DataError("the model that this cache was made for is gone: keep it until the cache is saved")
    if cache.with_states:
        raise DataError(
            f"{type(model).__name__} has states beside keys and values: save the tokens and read them again"
        )
    if not cache.is_croppable:
        raise DataError("a sliding window has dropped tokens of some layers: save all tokens and read them again")
    if cache.read_by not in (None, (stamp(model), switches(model))):
        raise DataError(
            "the model's weights or adapters changed since this cache's first token: read the tokens into a new cache"
        )
    report = cache.report()
    return {
        "format": FORMAT,
        "version": VERSION,
        **made_for(cache.compressor, model),
        "in_place": cache.settings.in_place,
        "batch_size": cache.batch.size,
        "slots": cache.batch.slots,
        "groups": [_about_group(group) for group in cache.batch.groups],
        "report": replace(report, kinds=report.kinds | {"decoded": 0}, derived_bytes=0).as_dict(),
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


def _about_group(group: Group) -> dict:
    """A group's sequences and how many tokens of each are stored how: the same in all layers, keys and values."""
    sinks, _, window = (store := group.all_stores[0]).parts
    return {"rows": group.rows, "sinks": sinks, "quantized": store.quantized, "holes": store.holes, "window": window}


def tensors_of(batch, start: int = 0) -> Iterator[tuple[str, Tensor]]:
    """All that a batch stores, by name; of quantized tokens those from the ``start``-th on, a whole block's first."""
    if batch.padded:
        yield "tokens", torch.stack([group.slots for group in batch.groups]).to(torch.uint8)
    for number, group in enumerate(batch.groups):
        if group.positions.explicit is not None:
            yield f"{number}.positions", group.positions.explicit
        for layer, pair in enumerate(group.stores):
            for role, store in zip(ROLES, pair, strict=True):
                stored = {"sinks": store.sinks, "window": store.window}
                if store.payload is not None:
                    payload = store.payload.tokens(start) if start else store.payload
                    stored |= {f"payload.{name}": x for name, x in payload.tensors.items()}
                yield from ((f"{number}.{layer}.{role}.{name}", x) for name, x in stored.items() if x is not None)


def fill(cache, header: dict, tensors: dict[str, Tensor], earlier: Sequence[dict[str, Tensor]] = ()) -> None:
    """Hand an empty ``cache`` what was saved; ``earlier``: files with the quantized tokens before those in
    ``tensors``."""
    batch, model = cache.batch, cache.model()
    owned, *before = (_by_owner(part, model.device) for part in (tensors, *earlier))
    cache.read_by = stamp(model), switches(model)
    batch.size, batch.slots = header["batch_size"], header["slots"]
    for number, about in enumerate(header["groups"]):
        group = batch.new_group(about["rows"])
        group.positions.explicit = owned[f"{number}"].get("positions")
        group.positions.seq_len = about["sinks"] + about["quantized"] - len(about["holes"]) + about["window"]
        for layer, pair in enumerate(group.stores):
            heads, *dims = batch.settings.shapes[layer]
            for role, store, dim in zip(ROLES, pair, dims, strict=True):
                owner = f"{number}.{layer}.{role}"
                store.sinks, store.window = (owned[owner].get(name) for name in ("sinks", "window"))
                store.holes = tuple(about["holes"])
                if about["quantized"]:
                    parts = [_payload_tensors(each[owner]) for each in (*before, owned)]
                    codec = store.coder.codec  # of all layers' heads, where they are stored together
                    empty = torch.zeros(1, codec.num_kv_heads or heads, codec.tokens_per_row, dim, device=model.device)
                    like = codec.encode(empty.to(next(iter(parts[0].values())).device))
                    payloads = [like.holding(part) for part in parts]
                    store.payload = Payload.concat(payloads) if before else payloads[0]
        batch.groups.append(group)
    if "tokens" in tensors:
        batch.split(tensors["tokens"].bool())
    for layer in cache.compressed:
        layer.is_initialized = bool(batch.slots)


def _by_owner(tensors: dict[str, Tensor], device) -> dict[str, dict[str, Tensor]]:
    """Tensors by group, layer and role (``0.3.key``), and by the rest of their name."""
    owned: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, x in tensors.items():
        *owner, part = name.split(".", 3)
        owned[".".join(owner)][part] = x.to(device)
    return owned


def _payload_tensors(own: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("payload."): x for name, x in own.items() if name.startswith("payload.")}
