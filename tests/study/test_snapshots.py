"""Snapshot streams: exact restore, what codecs restore, bytes that add up."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv.study.snapshots import MAGIC_BYTES, RECORD_BYTES, Stream


def cache(layers=2, batch=1, heads=1, tokens=9, head_dim=4, dtype=torch.float32, seed=0):
    """(keys, values) of a random cache, with zeros of both signs in it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, layers, batch, heads, tokens, head_dim, generator=generator).to(dtype)
    x[0, 0, 0, 0, 0, 0] = -0.0
    return list(x[0]), list(x[1])


def cut(state, start, stop):
    return tuple([x[:, :, start:stop] for x in role] for role in state)


def same(a, b):
    """Bit for bit."""
    bits = ([x.contiguous().view(torch.uint8) for role in state for x in role] for state in (a, b))
    return all(torch.equal(x, y) for x, y in zip(*bits, strict=True))


@settings(deadline=None, max_examples=40)
@given(
    steps=st.integers(1, 14),
    interval=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3, 5, 8])),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    stored=st.tuples(st.sampled_from(["exact", "fp32"]), st.sampled_from(["exact", "fp32"])),
    seed=st.integers(0, 1000),
)
def test_exact_streams_restore_every_step_bit_for_bit(steps, interval, sizes, dtype, stored, seed):
    layers, batch, heads, head_dim = sizes
    state = cache(layers, batch, heads, steps, head_dim, dtype, seed)
    stream = Stream(state, *stored, interval)
    assert len(stream) == steps
    for i in range(steps):
        assert same(stream.state(i), cut(state, 0, i + 1))
    widths = [4 if name == "fp32" else dtype.itemsize for name in stored]
    token = 2 * layers * batch * heads * head_dim
    report = stream.report()
    assert report["keyframe_bytes"] == sum(range(interval, steps + 1, interval)) * token * widths[0]
    assert report["delta_bytes"] == (steps - steps // interval) * token * widths[1]
    assert report["every_fp32_bytes"] == sum(range(steps + 1)) * token * 4
    assert report["live_fp16_bytes"] == steps * token * 2
    framing = MAGIC_BYTES + RECORD_BYTES * (1 + steps)
    parts = ("header_bytes", "keyframe_bytes", "delta_bytes")
    assert framing + sum(report[part] for part in parts) == report["file_bytes"]
