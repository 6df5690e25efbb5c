"""Snapshot streams: exact restore, bytes that add up, writing that breaks off."""

import errno
import io
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_zoo import FRAMING, SMALL, cache, coded_pairs, cut, feed, same, small, write

from vqkv import presets
from vqkv.codecs.exact import Fp16
from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.study.snapshots import MAGIC, SnapshotReader, SnapshotWriter


@pytest.fixture(scope="module")
def coded():
    return coded_pairs()


@settings(deadline=None, max_examples=40)
@given(
    steps=st.lists(st.integers(1, 4), min_size=1, max_size=14),
    interval=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3, 5, 8])),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    stored=st.tuples(st.sampled_from(["exact", "fp32"]), st.sampled_from(["exact", "fp32"])),
    seed=st.integers(0, 1000),
)
def test_exact_streams_restore_every_step_bit_for_bit(tmp_path_factory, steps, interval, sizes, dtype, stored, seed):
    layers, batch, heads, head_dim = sizes
    state = cache(layers, batch, heads, sum(steps), head_dim, dtype, seed)
    path = tmp_path_factory.mktemp("streams") / "s"
    stream = write(path, state, steps, keyframes=stored[0], deltas=stored[1], interval=interval)
    ends = [sum(steps[: i + 1]) for i in range(len(steps))]
    assert len(stream) == len(steps) and stream.report()["seq_len"] == ends[-1]
    for i, end in enumerate(ends):
        assert same(stream.state(i), cut(state, 0, end))
    widths = [4 if name == "fp32" else dtype.itemsize for name in stored]
    token = 2 * layers * batch * heads * head_dim
    report = stream.report()
    keyframed = sum(ends[interval - 1 :: interval])
    assert report["keyframe_token_states"] == keyframed and report["keyframe_bytes"] == keyframed * token * widths[0]
    appended = sum(new for i, new in enumerate(steps, 1) if i % interval)
    assert report["delta_tokens"] == appended and report["delta_bytes"] == appended * token * widths[1]
    assert report["every_fp16_bytes"] == sum(ends) * token * 2 and report["live_fp16_bytes"] == ends[-1] * token * 2
    parts = ("header_bytes", "keyframe_bytes", "delta_bytes", "framing_bytes")
    assert sum(report[part] for part in parts) == report["file_bytes"] == path.stat().st_size


def test_the_sources_arithmetic(tmp_path):
    """512 steps of one token, a keyframe at steps 64, 128, ..., 512: SPEC's 131,328, 2,304 and 55x, from a file."""
    state = cache(1, 1, 1, 512, 64)
    report = write(tmp_path / "s", state, [1] * 512).report()
    assert (report["token_states"], report["keyframe_token_states"], report["delta_tokens"]) == (131_328, 2_304, 504)
    assert report["every_fp32_bytes"] == 131_328 * 128 * 4 and report["live_fp16_bytes"] == 512 * 128 * 2
    assert report["keyframe_bytes"] == 2_304 * 128 * 4
    assert report["delta_bytes"] == 504 * 2 * (32 + 4)  # 64 codes of 4 bits and two fp16 ends, for a key and a value
    written = 2_304 * 512 + 504 * 72 + 513 * FRAMING + len(MAGIC)
    assert report["ratio_every_fp32"] == 131_328 * 512 / written and report["ratio_live_fp16"] == 512 * 256 / written
    assert 50 < report["ratio_every_fp32"] < 56 and report["ratio_live_fp16"] < 1 / 8


NAMES = ["kivi", "vqq", "kvquant", "vqllm"]  # blocks of tokens, ragged, outliers, learned


def through(codec, x):
    """What is documented: whole blocks by the codec, the tokens after them as they are."""
    whole = x.shape[2] - x.shape[2] % codec.tokens_per_row
    head = [codec.decode(codec.encode(x[:, :, :whole]), x.dtype)] if whole else []
    return torch.cat([*head, x[:, :, whole:]], dim=2)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_restores_what_its_codecs_do(coded, tmp_path, name):
    """In keyframes with exact deltas, in deltas, and in both; blocks of 4 tokens leave tokens over."""
    steps, interval = [1, 2, 5, 3, 1, 9], 4
    state = cache(2, 2, 2, sum(steps), 16, torch.bfloat16)
    pairs = {"codec": coded[name], "quanto": coded["quanto"]}
    for keyframes, deltas in (("codec", "exact"), ("exact", "codec"), ("codec", "quanto"), ("codec", "codec")):
        stored = ["exact" if kind == "exact" else [pairs[kind]] * 2 for kind in (keyframes, deltas)]
        stream = write(tmp_path / f"{keyframes}-{deltas}", state, steps, keyframes=stored[0], deltas=stored[1],
                       interval=interval)  # fmt: skip
        for role, x in enumerate(side[0] for side in state):
            keyframe, delta = (
                (lambda x: x) if kind == "exact" else partial(through, pairs[kind][role])
                for kind in (keyframes, deltas)
            )
            expected, done = x[:, :, :0], 0
            for number, new in enumerate(steps, 1):
                part, done = x[:, :, done : done + new], done + new
                whole = number % interval == 0
                expected = keyframe(x[:, :, :done]) if whole else torch.cat([expected, delta(part)], 2)
                assert torch.equal(stream.state(number - 1)[role][0], expected), (keyframes, deltas, number)


def test_a_streams_codecs_are_its_own(coded, tmp_path):
    """The file alone restores: no codec is passed to the reader, and one codec may serve all layers."""
    state, codec = cache(3, 1, 2, 5, 16), coded["vqllm"][0]
    stream = write(tmp_path / "s", state, [5], keyframes=codec, deltas="fp32", interval=1)
    assert torch.equal(stream.state()[1][2], codec.decode(codec.encode(state[1][2])))
    assert stream.report()["side_bytes"] == codec.side_bytes < stream.report()["header_bytes"]


@pytest.mark.parametrize("name", SMALL)
def test_every_prefix_opens_to_its_whole_steps(tmp_path, name):
    _, _, data, states, ends = small(tmp_path / "whole", name)
    path = tmp_path / "cut"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        if size < ends[0]:
            with pytest.raises(FormatError, match="whole snapshot header"):
                SnapshotReader(path)
            continue
        stream, whole = SnapshotReader(path), sum(end <= size for end in ends) - 1
        assert len(stream) == whole
        assert stream.report()["tail_bytes"] == size - ends[whole]
        assert stream.report()["file_bytes"] == ends[whole]
        if whole:
            assert same(stream.state(), states[whole - 1])
    path.write_bytes(data + bytes(100))  # a record of which a crash left only the room
    assert same(SnapshotReader(path).state(), states[-1])


def test_a_failed_append_leaves_the_stream_as_it_was(tmp_path):
    """What a step cannot store is refused before anything is written, and the writer goes on."""
    path, state = tmp_path / "s", cache(2, 1, 1, 8, 4)
    writer = SnapshotWriter(path, keyframes="fp16", deltas="exact", interval=2)
    bad = [(lambda x: x * 1e6, "overflows fp16"), (lambda x: x * float("nan"), "NaN"), (lambda x: x.half(), "float16")]
    bad += [
        (lambda x: x[:, :, :0], "empty"),
        (lambda x: x[..., :3], "head_dim 4"),
        (lambda x: x[0], "expected float32"),
    ]
    feed(writer, state, [1])
    for number in (1, 2):  # before a keyframe, before a delta
        size = path.stat().st_size
        for change, message in bad:
            with pytest.raises(DataError, match=message):
                writer.append(*([change(x) for x in role] for role in cut(state, 1, 2)))
        with pytest.raises(DataError, match="2 layers of keys, 1 of values"):
            writer.append(state[0], state[1][:1])
        with pytest.raises(DataError, match="1 layers, but the stream has 2"):
            writer.append(state[0][:1], state[1][:1])
        assert path.stat().st_size == size and writer.seq_len == number
        feed(writer, state, [1], writer.seq_len)
    writer.close()
    assert len(SnapshotReader(path)) == 3
    with pytest.raises(RuntimeError, match="closed"):
        feed(writer, state, [1])


def test_a_full_disk_ends_the_writer_and_leaves_the_whole_steps(tmp_path):
    path, state = tmp_path / "s", cache(1, 1, 1, 6, 3)
    writer = SnapshotWriter(path, "fp32", "exact", 2)
    feed(writer, state, [1, 2])

    class Full(io.BytesIO):
        def write(self, record):
            path.write_bytes(path.read_bytes() + record[:30])
            raise OSError(errno.ENOSPC, "no space left")

    writer._file = Full()
    with pytest.raises(OSError, match="no space"):
        feed(writer, state, [1], 3)
    with pytest.raises(RuntimeError, match="closed"):
        feed(writer, state, [1], 3)
    stream = SnapshotReader(path)
    assert len(stream) == 2 and stream.report()["tail_bytes"] == 30 and same(stream.state(), cut(state, 0, 3))


def test_the_writer_keeps_a_copy(tmp_path):
    """A server may overwrite the tensors that it handed over."""
    state = cache(1, 1, 1, 2, 4)
    scratch = cut(cache(1, 1, 1, 2, 4), 0, 1)
    with SnapshotWriter(tmp_path / "s", "exact", "exact", interval=2) as writer:
        writer.append(*scratch)
        scratch[0][0].zero_()
        writer.append(*cut(state, 1, 2))
    assert same(SnapshotReader(tmp_path / "s").state(), state)


def test_wrong_arguments_are_named(coded, tmp_path):
    path, state = tmp_path / "s", cache(1, 1, 2, 4, 16)
    with pytest.raises(UnknownNameError, match="Did you mean 'exact'"):
        SnapshotWriter(path, keyframes="exakt")
    for wrong in (3, [], [coded["quanto"][0]], [(Fp16(16),)], presets.quanto(), Fp16()):
        with pytest.raises(DataError, match="list over layers of"):
            SnapshotWriter(path, deltas=wrong)
    with pytest.raises(DataError, match="interval"):
        SnapshotWriter(path, interval=0)
    with pytest.raises(DataError, match="codecs of 2 layers for a cache of 1"):
        SnapshotWriter(path, deltas=[coded["quanto"]] * 2).append(*state)
    with pytest.raises(DataError, match="head_dim is 8"):
        SnapshotWriter(path, deltas=coded["quanto"][0]).append(*cache(1, 1, 2, 4, 8))
    with pytest.raises(DataError, match="layer 1 has"):
        SnapshotWriter(path).append([state[0][0], state[0][0][:, :1]], state[1] * 2)
    with pytest.raises(DataError, match="float64"):
        SnapshotWriter(path).append(*([x.double() for x in role] for role in state))
    assert not path.exists() or not SnapshotReader(path)
    path.unlink(missing_ok=True)
    with pytest.raises(FormatError, match="is no file"):
        SnapshotReader(path)
    write(path, state, [4])
    with pytest.raises(FormatError, match="exists: name another"):
        SnapshotWriter(path).append(*state)
