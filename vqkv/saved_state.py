"""What a saved cache keeps of a ``CompressedCache``: its stored tokens as named tensors, and how they are divided.

Tensors: ``tokens``, uint8 (batch, slots), if some slots hold padding; of group 0 ``0.positions``, unless they are 0, 1,
2, ...; of its layer 3 ``0.3.key.sinks``, ``0.3.key.window`` and the payload's, such as ``0.3.key.packed.codes``. What a
payload consists of, and of which types and shapes, follows from the compressor.

A file is trusted no further than it can be read: whoever alters it can make its checksums right again. So all counts,
types and shapes must be what this compressor and model can have stored, and every packed token is read back once, with
as much work as one forward pass spends on it: what is wrong shows on loading, not in some later forward pass.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from vqkv.cache import CompressedCache
from vqkv.codec.base import Codec
from vqkv.codec.checks import FP16_MAX
from vqkv.codec.part import take
from vqkv.codec.payload import Payload, payload_from
from vqkv.coder import ROLES
from vqkv.errors import DataError, FormatError
from vqkv.group import Group
from vqkv.history import History
from vqkv.role import Role, Settings
from vqkv.snapshot_forms import STORED, payload_layout

GROUP = {"rows": list, "sinks": int, "packed": int, "window": int, "holes": list}
LARGEST = 16 * FP16_MAX  # magnitude of a key or value: no codec takes in more than fp16's
AT_ONCE, PIECES = 1 << 22, 16  # values that are read back together, but all of a role's in so many pieces at most
EMPTY_ROLES = 1 << 13  # keys or values of a layer of which nothing is stored: sequences that are all padding


def about_group(group: Group) -> dict:
    """A group's sequences and how many tokens of each are stored how: the same in all layers, keys and values."""
    role = group.roles[0][0]
    sinks, _, window = role.parts
    holes = [[int(edge) for edge in hole] for hole in role.history.holes]
    return {"rows": group.rows, "sinks": sinks, "packed": role.history.packed, "window": window, "holes": holes}


def counts_of(about: dict) -> dict[str, int]:
    """Tokens of each sequence of a group that are read, by how they are stored."""
    packed = about["packed"] - sum(stop - start for start, stop in about["holes"])
    return {"sinks": about["sinks"], "packed": packed, "window": about["window"]}


def tensors_of(cache: CompressedCache) -> Iterator[tuple[str, Tensor]]:
    """Every tensor to be saved. Raises ``DataError`` for values that no cache would be loaded with."""
    if cache.batch.tokens is not None:
        yield "tokens", cache.batch.tokens.to(torch.uint8)
    for number, group in enumerate(cache.batch.groups):
        if group.positions.explicit is not None:
            yield f"{number}.positions", group.positions.explicit
        for layer, pair in enumerate(group.roles):
            for name, role in zip(ROLES, pair, strict=True):
                yield from ((f"{number}.{layer}.{name}.{part}", x) for part, x in _parts(role))


def _parts(role: Role) -> Iterator[tuple[str, Tensor]]:
    for name in ("sinks", "window"):
        x = getattr(role, name)
        if x is not None:
            _check_values(x)
            yield name, x
    if role.packed is not None:
        yield from ((f"packed.{name}", x) for name, x in role.packed.tensors.items())


def _check_values(x: Tensor) -> None:
    if not (largest := float(x.abs().max())) <= LARGEST:  # nor NaN
        raise DataError(f"keys or values reach {largest:g}, with which no model goes on: reset() the cache")


def check_groups(header: dict) -> None:
    """Raise ``FormatError`` unless the groups are a division of the batch, with holes only in packed tokens."""
    groups, size = header["groups"], header["batch_size"]
    rows = [row for group in groups for row in group["rows"]]
    if len(rows) != size or sorted(rows) != list(range(size)) or not all(_ascends(group["rows"]) for group in groups):
        raise FormatError(f"groups of {len(rows)} sequences that are no division of {size}")
    if not all(group["rows"] for group in groups) or bool(groups) != bool(header["slots"]):
        raise FormatError(f"{len(groups)} groups of {size} sequences in {header['slots']} slots")
    for group in groups:
        edges = [edge for hole in group["holes"] for edge in hole]
        if not all(len(hole) == 2 for hole in group["holes"]) or not _ascends([-1, *edges, group["packed"] + 1]):
            raise FormatError(f"holes {str(group['holes'])[:80]} in {group['packed']} packed tokens")


def _ascends(numbers: list) -> bool:
    return all(type(x) is int for x in numbers) and all(a < b for a, b in pairwise(numbers))


def fill(cache: CompressedCache, header: dict, tensors: dict[str, Tensor]) -> None:
    """Hand every part of an empty ``cache`` its own tensors. Raises ``FormatError`` for what this compressor and this
    model cannot have stored."""
    batch, layouts, groups, owned = cache.batch, _layouts(cache), header["groups"], defaultdict(dict)
    if 2 * len(cache.layers) * len(groups) > len(tensors) + EMPTY_ROLES:
        raise FormatError(f"{len(groups)} groups of sequences, but {len(tensors)} tensors")
    for name, tensor in tensors.items():
        *owner, part = name.split(".", 3)
        owned[tuple(owner)][part] = tensor
    batch.groups = [_group(cache, number, about, owned, layouts) for number, about in enumerate(groups)]
    batch.size, batch.slots = header["batch_size"], header["slots"]
    batch.tokens = _token_mask(batch, owned[()])
    left = [".".join([*owner, part]) for owner, own in owned.items() for part in own]
    if left:
        raise FormatError(f"tensors {sorted(left)[:3]} have no place in this cache")
    if batch.slots:
        for layer in cache.layers:
            layer.lazy_initialization(None, None)


def _layouts(cache: CompressedCache) -> list[list[dict]]:
    """What the payloads of each layer's codecs, keys and values, consist of; see ``payload_layout``."""
    _, heads, head_dim = cache.settings.shape
    known = {}

    def layout(codec: Codec) -> dict:
        alike = json.dumps(codec.config(), sort_keys=True)
        if alike not in known:
            nothing = torch.zeros(1, heads, codec.tokens_per_row, head_dim, device=cache.model().device)
            known[alike] = payload_layout(codec.encode(nothing))
        return known[alike]

    return [[layout(codec) for codec in pair] for pair in cache.compressor.codecs]


def _token_mask(batch, tensors: dict[str, Tensor]) -> Tensor | None:
    """Bool (batch, slots), None where every slot holds a token. Raises ``FormatError`` unless each sequence has as many
    as are stored."""
    lengths = torch.empty(batch.size, dtype=torch.int64)
    for group in batch.groups:
        lengths[group.rows] = group.positions.seq_len
    if "tokens" not in tensors:
        if len(batch.groups) > 1 or not (lengths == batch.slots).all():
            raise FormatError(f"sequences of {lengths.tolist()[:5]} tokens in {batch.slots} slots without padding")
        return None
    mask = take(tensors, "tokens", (batch.size, batch.slots), torch.uint8)
    if not (mask <= 1).all() or not torch.equal(mask.sum(dim=1), lengths):
        raise FormatError(f"its padding leaves other tokens than the {lengths.tolist()[:5]} that are stored")
    return mask.bool()


def _group(cache: CompressedCache, number: int, about: dict, owned: dict, layouts: list[list[dict]]) -> Group:
    _check_counts(about, cache.settings)
    group, device = cache.batch.make_group(len(about["rows"])), cache.model().device
    group.rows, group.positions.seq_len = about["rows"], sum(counts_of(about).values())
    own = owned[str(number),]
    if "positions" in own and cache.batch.rotary is not None:
        sequences = 1 if own["positions"].shape[:1] == (1,) else len(group.rows)
        explicit = take(own, "positions", (sequences, group.positions.seq_len), torch.int32)
        group.positions.explicit = explicit.to(device)
    for layer, pair in enumerate(group.roles):
        for name, role, layout in zip(ROLES, pair, layouts[layer], strict=True):
            own = owned[str(number), str(layer), name]
            for part in ("sinks", "window"):
                setattr(role, part, _exact(own, part, about, cache.settings, device))
            role.history = _history(own, about, layout, device)
    stored = sum(role.packed.nbytes for pair in group.roles for role in pair if role.packed is not None)
    if about["packed"] > stored * cache.settings.rows:  # from nothing, any number of tokens could be read
        raise FormatError(f"{about['packed']} packed tokens in {stored} bytes")
    return group


def _check_counts(about: dict, settings: Settings) -> None:
    """Raise ``FormatError`` unless a cache with these settings can have come to these counts."""
    counts, rows = counts_of(about), settings.rows
    whole = not about["packed"] % rows and all(start % rows for start, _ in about["holes"])
    whole = whole and all(stop == start - start % rows + rows for start, stop in about["holes"])
    if (
        not whole
        or counts["sinks"] != min(settings.sink_tokens, sum(counts.values()))
        or counts["window"] >= settings.recent_window + settings.block
    ):
        raise FormatError(
            f"{counts} tokens, with holes {str(about['holes'])[:80]}, where {settings.sink_tokens} are sinks, "
            f"{settings.recent_window} are recent and {settings.block} are packed together"
        )


def _exact(tensors: dict[str, Tensor], name: str, about: dict, settings: Settings, device) -> Tensor | None:
    """Sinks or window, (sequences, num_kv_heads, tokens, head_dim)."""
    _, heads, head_dim = settings.shape
    if not about[name]:
        return None
    x = take(tensors, name, (len(about["rows"]), heads, about[name], head_dim), settings.exact)
    _check_values(x)
    return x.to(device)


def _history(tensors: dict[str, Tensor], about: dict, layout: dict, device) -> History:
    if not about["packed"]:
        return History()
    header, found = layout["payload"], {}
    rows = (len(about["rows"]), layout["heads"], about["packed"] // header["tokens_per_row"])
    for name, (kind, size) in layout["tensors"].items():
        own = f"packed.{name}"
        ragged = name not in header["fields"] and own in tensors
        pieces = tuple(tensors[own].shape[:1]) if ragged else rows
        found[name] = take(tensors, own, (*pieces, *size), STORED[kind])
    return History(payload_from(header, found).to(device), tuple(map(tuple, about["holes"])))


def read_back(cache: CompressedCache) -> None:
    """Raise ``FormatError`` unless every packed token can be read, as numbers that a model can go on with."""
    _, heads, head_dim = cache.settings.shape
    for group in cache.batch.groups:
        roles = [role for pair in group.roles for role in pair]
        packed, rows = roles[0].history.packed, cache.settings.rows
        tokens = rows * max(1, AT_ONCE // (len(group.rows) * heads * head_dim * rows), -(-packed // (PIECES * rows)))
        for start in range(0, packed, tokens):
            known = cache.compressor.new_pass()
            for role in roles:
                piece: Payload = role.packed.tokens(start, start + tokens)
                x = role.coder.decode(piece, known)
                _check_read(x, (len(group.rows), heads, piece.seq_len, head_dim), cache.settings.dtype)


def _check_read(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    largest = float(x.abs().max())
    if tuple(x.shape) != shape or not largest <= min(LARGEST, torch.finfo(dtype).max):
        raise FormatError(f"packed tokens read as {tuple(x.shape)} numbers up to {largest:g}, not as {shape}")
