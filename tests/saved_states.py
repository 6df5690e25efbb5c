"""Caches to be saved and compared, and damage to their files."""

import torch

from vqkv.cache import saving

MANY = torch.randint(1, 4096, (12, 96), generator=torch.Generator().manual_seed(0))  # as many as an MLP asks for
TOKENS = MANY[:3]
PADDED = torch.ones(3, 96, dtype=torch.long)
PADDED[0, :7] = PADDED[1, 41:45] = PADDED[2, :3] = 0


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
    """Bit for bit: sequences, padding, positions, sinks, payloads, holes and windows."""
    ours, theirs = (dict(saving.tensors_of(cache.batch)) for cache in (a, b))
    counts = [(x.batch.slots, x.batch.size, [group.counts for group in x.batch.groups]) for x in (a, b)]
    alike = counts[0] == counts[1] and ours.keys() == theirs.keys() and a.settings.in_place == b.settings.in_place
    return alike and all(x.dtype == theirs[name].dtype and torch.equal(x, theirs[name]) for name, x in ours.items())


def mutated(rng, data, other):
    """``data`` with one kind of damage; ``other``: a file of the same kind."""
    size = len(data) if rng.random() < 0.5 else min(len(data), 4096)  # near the beginning, where headers are
    a, b, c = sorted(rng.randrange(size) for _ in range(3))
    noise, length = rng.randbytes(rng.randint(1, 40)), rng.choice([0, 1, len(data), (1 << 63) - 1, rng.getrandbits(16)])
    return rng.choice(
        [
            data[:a] + bytes([data[a] ^ 1 << rng.randrange(8)]) + data[a + 1 :],  # a bit
            data[:a] + noise + data[a + len(noise) :],
            data[:a] + noise + data[a:],
            data + noise,
            data[:a],
            data[:a] + data[b:],  # without a part
            data[:b] + data[a:],  # with a part twice
            data[:a] + data[b:c] + data[a:b] + data[c:],
            data[:a] + bytes(b - a) + data[b:],
            data[:a] + other[a:c] + data[c:],
            length.to_bytes(8, "little") + data[8:],
        ]
    )
