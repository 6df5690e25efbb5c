"""Snapshot streams: exact restore, what codecs restore, bytes that add up."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import gaussian

from vqkv.study.snapshots import MAGIC_BYTES, RECORD_BYTES, Stream


def bits(state, tokens=None):
    """The bytes of all keys and values of the first tokens."""
    return [x[:, :, :tokens].contiguous().view(torch.uint8) for role in state for x in role]


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
    state = gaussian(2, layers, batch, heads, steps, head_dim, seed=seed).to(dtype)
    state[0, 0, 0, 0, 0, 0] = -0.0
    stream = Stream(tuple(map(list, state)), *stored, interval)
    assert len(stream) == steps
    for i in range(steps):
        assert all(torch.equal(*each) for each in zip(bits(stream.state(i)), bits(state, i + 1), strict=True))
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
