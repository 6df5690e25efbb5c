"""Damage to files: bytes anywhere, and other values in their JSON."""

import copy
import json

import torch

from vqkv.runtime.files import raw_bytes

WRONG = (None, -1, 0, 1, 2, 7, 16, 4096, 8192, 32768, 65536, 1 << 20, 1 << 31, 1 << 62, 10**30, 0.5, float("nan"),
         "x", "", "fp16", "0", [], {}, [[]], [0, 1], [[0, 1]], True, False)  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BYTES = ("flip", "bytes", "cut", "grow", "insert", "remove", "repeat", "swap", "zeros", "graft", "length")


def mutated(rng, data, other, kind=None):
    """``data`` with one kind of damage; ``other``: a file of the same kind."""
    data, size = bytearray(data), len(data)
    a, b, c = sorted(rng.randrange(size) for _ in range(3))
    if rng.random() < 0.5:  # near the beginning, where headers are
        a, b, c = sorted(rng.randrange(min(size, 4096)) for _ in range(3))
    kind = kind or rng.choice(BYTES)
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 1, 2, 8])):
            data[rng.choice([a, b, c, rng.randrange(size)])] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        data[a : a + rng.randint(1, 40)] = rng.randbytes(rng.randint(1, 40))
    elif kind == "cut":
        del data[rng.choice([a, size - rng.randint(1, 9)]) :]
    elif kind == "grow":
        data += rng.choice([bytes, rng.randbytes])(rng.randint(1, 200))
    elif kind == "insert":
        data[a:a] = rng.choice([rng.randbytes(rng.randint(1, 30)), b" ", b"\n", bytes(8)])
    elif kind == "remove":
        del data[a : a + rng.choice([1, 8, b - a + 1])]
    elif kind == "repeat":
        data[b:b] = data[a:b]
    elif kind == "swap":
        data = data[:a] + data[b:c] + data[a:b] + data[c:]
    elif kind == "zeros":
        data[a:b] = bytes(b - a)
    elif kind == "graft":
        data[a:c] = other[a:c]
    else:
        word = rng.choice([0, 1, 8, size - 8, size, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, rng.getrandbits(16)])
        data[:8] = word.to_bytes(8, "little")
    return bytes(data)


def edited(rng, config):
    """Nested JSON with one or two other values, or one too many or too few."""
    config = copy.deepcopy(config)
    for _ in range(rng.choice([1, 1, 1, 2])):
        inner, first = config, rng.choice(list(config))  # or most changes would be among a model's sampled weights
        *outer, last = rng.choice(list(paths(config[first], (first,))))
        for key in outer:
            inner = inner[key]
        _edit(rng, inner, last)
    return config


def _edit(rng, inner, key):
    kind, old = rng.choice(["wrong", "wrong", "near", "near", "drop", "again", "rename", "swap"]), inner[key]
    number = isinstance(old, int | float) and not isinstance(old, bool)
    if kind == "near" and number:
        inner[key] = rng.choice([old + 1, old - 1, old * 2, old // 2, -old, old + 0.0])
    elif kind == "near" and isinstance(old, str) and old:
        inner[key] = rng.choice([old[:-1], old + old[-1], old.upper(), old[::-1]])
    elif kind == "drop":
        del inner[key]
    elif kind == "again" and isinstance(inner, list):
        inner.insert(key, copy.deepcopy(old))
    elif kind == "rename" and isinstance(inner, dict):
        inner[key + "x"] = inner.pop(key)
    elif kind == "swap":
        other = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        inner[key], inner[other] = inner[other], old
    else:
        inner[key] = rng.choice(WRONG)


def paths(config, at=()):
    """Every place in nested JSON."""
    yield at
    if isinstance(config, dict | list):
        for key, inner in config.items() if isinstance(config, dict) else enumerate(config):
            yield from paths(inner, (*at, key))


def spaced(rng, config):
    """The same JSON, written with other white space and its keys in another order."""
    if isinstance(config, dict):
        config = dict(sorted(config.items(), reverse=rng.random() < 0.5))
    return json.dumps(config, indent=rng.choice([None, 1, 7]), separators=rng.choice([None, (" , ", " : ")]))


def altered(rng, tensors):
    """Named tensors with other bytes, types, shapes or names, one too many or one too few."""
    tensors, name = dict(tensors), rng.choice(sorted(tensors))
    x = tensors[name]
    kind = rng.choice(["bytes", "fill", "type", "shape", "drop", "rename", "swap", "add", "rows"])
    if kind == "bytes" and x.numel():
        data = bytearray(raw_bytes(x))
        for _ in range(rng.choice([1, 30])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        tensors[name] = torch.frombuffer(data, dtype=x.dtype).view(x.shape)
    elif kind == "fill" and x.numel():
        filling = rng.choice([0, 1, 255, 127, 0x7C])
        tensors[name] = torch.full_like(x.reshape(-1).view(torch.uint8), filling).view(x.dtype).view(x.shape)
    elif kind == "type":
        tensors[name] = x.reshape(-1).view(torch.uint8) if rng.random() < 0.3 else x.to(rng.choice(DTYPES))
    elif kind == "shape":
        tensors[name] = rng.choice([x.flatten(), x[None], x.transpose(0, -1).contiguous(), x[:0]])
    elif kind == "drop":
        del tensors[name]
    elif kind == "rename":
        tensors[name.replace(*rng.choice([("key", "value"), ("0.", "1."), (".", "")])) + rng.choice(["", "x"])] = x
    elif kind == "swap":
        other = rng.choice(sorted(tensors))
        tensors[name], tensors[other] = tensors[other], x
    elif kind == "rows":
        axis = rng.randrange(x.ndim)
        tensors = {n: t.narrow(axis, 0, t.shape[axis] // 2).clone() if t.ndim > axis else t for n, t in tensors.items()}
    else:
        tensors[rng.choice(["x", "0.x", "0.0.key.x", "9.0.key.window", "0.0.key.packed.x"])] = x
    return tensors
