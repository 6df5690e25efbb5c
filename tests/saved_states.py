"""Caches to be saved, damaged and compared; and their files, taken apart and put together again."""

import hashlib
import json
from dataclasses import dataclass

import small_models
import torch
from preset_zoo import EVERY, PREDICTED
from safetensors.torch import load as read_tensors

from vqkv import CompressedCache, Compressor, calibrate
from vqkv.files import raw_bytes, tensors_sha256
from vqkv.saved import DTYPES, FORMAT

MANY = torch.randint(1, 4096, (12, 96), generator=torch.Generator().manual_seed(0))  # as many as an MLP asks for
TOKENS = MANY[:3]
PADDED = torch.ones(3, 96, dtype=torch.long)
PADDED[0, :7] = PADDED[1, 41:45] = PADDED[2, :3] = 0
CODES = {dtype: code for code, dtype in DTYPES.items()}


def made(name, folder, dtype=None):
    """A small model of architecture ``name``."""
    return small_models.load(name, folder, dtype)


def feed(model, cache, tokens, mask=None, positions=None):
    """Logits of ``tokens`` (batch, new_tokens) after those in ``cache``."""
    kwargs = {} if mask is None else {"attention_mask": mask}
    kwargs |= {} if positions is None else {"position_ids": positions}
    with torch.inference_mode():
        return model(tokens, past_key_values=cache, **kwargs).logits


def half_way(model, cache, tokens=TOKENS):
    """Three sequences with padding, fed, cropped (which leaves holes in blocks) and fed again elsewhere."""
    feed(model, cache, tokens[:, :58], PADDED[:, :58])
    cache.crop(-27)
    feed(model, cache, tokens[:, 31:53], PADDED[:, :53], positions(slice(31, 53)))


def rest(model, cache):
    """Logits of the tokens after ``half_way``."""
    return feed(model, cache, TOKENS[:, 53:], PADDED, positions(slice(53, None)))


def positions(slots):
    """A few further than they would be."""
    return (PADDED.cumsum(dim=1) - 1).clamp(min=0)[:, slots] + 5


def through_file(cache, path, **settings):
    """``cache``, saved and loaded."""
    cache.save(path)
    return type(cache).load(path, cache.compressor, cache.model(), **settings)


def same_state(a, b):
    """Bit for bit, and in the same order: sequences, padding, positions, sinks, payloads, holes and windows."""
    ours, theirs = a.batch, b.batch
    return (
        (ours.slots, ours.size, len(ours.groups)) == (theirs.slots, theirs.size, len(theirs.groups))
        and a.settings.in_place == b.settings.in_place
        and _same(ours.tokens, theirs.tokens)
        and all(_same_group(x, y) for x, y in zip(ours.groups, theirs.groups, strict=True))
    )


def _same_group(a, b):
    roles = [[role for pair in group.roles for role in pair] for group in (a, b)]
    return (
        (a.rows, a.positions.seq_len, len(roles[0])) == (b.rows, b.positions.seq_len, len(roles[1]))
        and _same(a.positions.explicit, b.positions.explicit)
        and all(_same_role(x, y) for x, y in zip(*roles, strict=True))
    )


def _same_role(a, b):
    ours, theirs = (({} if role.packed is None else role.packed.tensors) for role in (a, b))
    return (
        a.history.holes == b.history.holes
        and ours.keys() == theirs.keys()
        and (a.packed is None or a.packed.header() == b.packed.header())
        and all(_same(ours[name], theirs[name]) for name in ours)
        and _same(a.sinks, b.sinks)
        and _same(a.window, b.window)
    )


def _same(x, y):
    if x is None or y is None:
        return x is y
    return x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)


@dataclass
class Original:
    """A saved cache, what it was made for, and the bytes of it and of another one of the same compressor."""

    model: object
    compressor: Compressor
    cache: CompressedCache
    data: bytes
    other: bytes


def original(model, name, path):
    """Of a preset's name; ``path`` is where it may write."""
    compressor = calibrate(model, TOKENS, (EVERY | PREDICTED)[name], progress=False)
    caches = [compressor.new_cache(model) for _ in range(2)]
    data = []
    for cache, tokens in zip(caches, (TOKENS, TOKENS.flip(1)), strict=True):
        half_way(model, cache, tokens)
        cache.save(path)
        data.append(path.read_bytes())
    return Original(model, compressor, caches[0], *data)


def parsed(data):
    """(JSON of the safetensors header, the cache's own header, tensors)."""
    outer = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return outer, json.loads(outer["__metadata__"][FORMAT]), read_tensors(data)


def joined(outer, body):
    """A safetensors file of a header, JSON or text, and what follows it."""
    text = outer if isinstance(outer, bytes) else json.dumps(outer).encode()
    return len(text).to_bytes(8, "little") + text + body


def signed(header, tensors):
    """A file of these with checksums that are right."""
    header = header | {"tensors_sha256": tensors_sha256(sorted(tensors.items()))}
    text, outer, body = json.dumps(header), {}, b""
    outer["__metadata__"] = {FORMAT: text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        data = bytes(raw_bytes(tensors[name]))
        offsets = [len(body), len(body) + len(data)]
        outer[name] = {"dtype": CODES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": offsets}
        body += data
    return joined(outer, body)
