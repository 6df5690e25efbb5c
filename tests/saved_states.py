"""Caches to be saved and compared."""

import small_models
import torch

MANY = torch.randint(1, 4096, (12, 96), generator=torch.Generator().manual_seed(0))  # as many as an MLP asks for
TOKENS = MANY[:3]
PADDED = torch.ones(3, 96, dtype=torch.long)
PADDED[0, :7] = PADDED[1, 41:45] = PADDED[2, :3] = 0


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
        and all(_same_group(x, y) for x, y in zip(ours.groups, theirs.groups, strict=True))
    )


def _same_group(a, b):
    return (
        (a.row, a.sequences.seq_len, len(a.stores)) == (b.row, b.sequences.seq_len, len(b.stores))
        and _same(a.slots, b.slots)
        and _same(a.sequences.positions, b.sequences.positions)
        and all(map(_same_store, a.all_stores, b.all_stores))
    )


def _same_store(a, b):
    ours, theirs = (({} if store.payload is None else store.payload.tensors) for store in (a, b))
    return (
        a.holes == b.holes
        and ours.keys() == theirs.keys()
        and (a.payload is None or a.payload.seq_len == b.payload.seq_len)
        and all(_same(ours[name], theirs[name]) for name in ours)
        and _same(a.sinks, b.sinks)
        and _same(a.window, b.window)
    )


def _same(x, y):
    if x is None or y is None:
        return x is y
    return x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)
