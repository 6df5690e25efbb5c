"""Small caches written to snapshot streams, for the tests of streams and of damage to them."""

import functools
from itertools import accumulate

import torch

from vqkv import presets
from vqkv.study.snapshots import MAGIC, WORDS, SnapshotReader, SnapshotWriter

FRAMING = WORDS.size


def cache(layers=2, batch=1, heads=1, tokens=9, head_dim=4, dtype=torch.float32, seed=0):
    """(keys, values) of a random cache, with zeros of both signs in it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, layers, batch, heads, tokens, head_dim, generator=generator).to(dtype)
    x[0, 0, 0, 0, 0, 0] = -0.0
    return list(x[0]), list(x[1])


def cut(state, start, stop):
    return tuple([x[:, :, start:stop] for x in role] for role in state)


def feed(writer, state, steps, done=0):
    """Append ``steps`` (tokens of each) of a cache."""
    for new in steps:
        writer.append(*cut(state, done, done + new))
        done += new


def write(path, state, steps, **arguments):
    with SnapshotWriter(path, **arguments) as writer:
        feed(writer, state, steps)
    return SnapshotReader(path)


def bits(state):
    return [x.contiguous().view(torch.uint8) for role in state for x in role]


def same(a, b):
    """Bit for bit."""
    return len(a[0]) == len(b[0]) and all(map(torch.equal, bits(a), bits(b)))


@functools.cache
def coded_pairs():
    """Codecs by name, fitted for 2 heads of 16 channels: scalar, blocks of tokens, ragged, learned."""
    x = torch.randn(2, 2, 96, 16, generator=torch.Generator().manual_seed(5))
    made = {
        "quanto": presets.quanto(4, 8),
        "kivi": presets.kivi(2, 4),
        "vqq": presets.vqq(0.2, 4, 16),
        "kvquant": presets.kvquant(3, 0.1, block=4),
        "vqllm": presets.vqllm(2, 16, 8),
    }
    return {name: (preset.key_codec().fit(x), preset.value_codec().fit(x)) for name, preset in made.items()}


SMALL = {"exact": {"keyframes": "fp32", "deltas": "exact"}, "int4": {}}


def ends_of(stream):
    """The byte after each record."""
    header = len(MAGIC) + FRAMING + stream.header_bytes
    return list(accumulate((FRAMING + len(step.contents) for step in stream._steps), initial=header))


def small(path, name, seed=0, layers=1, heads=1, head_dim=3):
    """A small stream: its cache, its bytes, and the state of every step."""
    state, steps = cache(layers, 1, heads, 6, head_dim, seed=seed), [1, 2, 1, 2]
    stream = write(path, state, steps, interval=2, **SMALL[name])
    states = [stream.state(i) for i in range(len(stream))]
    return state, steps, path.read_bytes(), states, ends_of(stream)
