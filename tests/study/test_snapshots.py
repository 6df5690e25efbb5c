"""Snapshot streams: exact restore, what codecs restore, bytes that add up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv import presets
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


def test_the_sources_arithmetic():
    """512 steps of one token, a keyframe at steps 64, 128, ..., 512: 2,304 tokens in keyframes and 504 in deltas."""
    report = Stream(cache(1, 1, 1, 512, 64)).report()
    assert report["every_fp32_bytes"] == 131_328 * 128 * 4 and report["keyframe_bytes"] == 2_304 * 128 * 4
    assert report["delta_bytes"] == 504 * 2 * (32 + 4)  # 64 codes of 4 bits and two fp16 ends, for a key and a value
    written = 2_304 * 512 + 504 * 72 + 513 * RECORD_BYTES + MAGIC_BYTES
    assert report["ratio_every_fp32"] == 131_328 * 512 / written and report["ratio_live_fp16"] == 512 * 256 / written


PRESETS = {  # blocks of tokens, ragged, outliers, learned
    "kivi": presets.kivi(2, 4),
    "vqq": presets.vqq(0.2, 4, 16),
    "kvquant": presets.kvquant(3, 0.1, block=4),
    "vqllm": presets.vqllm(2, 16, 8),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_stream_restores_what_its_codecs_do(name):
    """By layer and role."""
    x, preset = torch.randn(2, 2, 96, 16, generator=torch.Generator().manual_seed(5)), PRESETS[name]
    pair, delta = (preset.key_codec().fit(x), preset.value_codec().fit(x)), presets.quanto(4, 8).key_codec().fit(x)
    state = cache(2, 2, 2, 8, 16, torch.bfloat16)
    stream = Stream(state, [pair] * 2, delta, interval=4)
    for role, codec in enumerate(pair):
        whole = state[role][1]
        first, second, then = (
            c.decode(c.encode(y)) for c, y in ((codec, whole[:, :, :4]), (codec, whole), (delta, whole[:, :, 4:7]))
        )
        assert torch.equal(stream.state(6)[role][1], torch.cat([first, then], dim=2).bfloat16())
        assert torch.equal(stream.state(7)[role][1], second.bfloat16())
    assert stream.report()["side_bytes"] == sum(codec.side_bytes for codec in pair) < stream.report()["header_bytes"]
