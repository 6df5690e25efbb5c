"""Whether two caches hold the same."""

import torch


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
