"""Damage to files: bytes anywhere."""

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
