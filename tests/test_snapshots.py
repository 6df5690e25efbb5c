"""Snapshot streams: exact restore, bytes that add up, writing that breaks off and is resumed."""

import errno

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_zoo import FRAMING, SMALL, cache, coded_pairs, cut, feed, same, small, write

from vqkv import presets, snapshots
from vqkv.codec import Fp16
from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.snapshots import MAGIC, SnapshotReader, SnapshotWriter


@pytest.fixture(scope="module")
def coded():
    return coded_pairs()


@settings(deadline=None, max_examples=60)
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
    assert len(stream) == len(steps) and [stream.seq_len(i) for i in range(len(steps))] == ends
    for i, (end, walked) in enumerate(zip(ends, stream, strict=True)):
        assert same(stream.state(i), cut(state, 0, end)) and same(walked, cut(state, 0, end)) and stream.exact(i)
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


def test_framing_is_under_three_percent_of_a_step_of_a_small_model(tmp_path):
    report = write(tmp_path / "s", cache(6, 1, 2, 7, 64), [1] * 7).report()
    assert (FRAMING * 7) / (report["delta_bytes"] + FRAMING * 7) < 0.03


NAMES = ["fp16", "quanto", "kivi", "vqq", "vqq_product", "kvquant", "vqllm", "higgs"]


def through(codec, fallback, x):
    """What is documented: whole blocks by the codec, the tokens after them as ``fallback`` says."""
    whole = x.shape[2] - x.shape[2] % codec.tokens_per_row
    head = [codec.decode(codec.encode(x[:, :, :whole]), x.dtype)] if whole else []
    return torch.cat([*head, fallback(x[:, :, whole:])], dim=2)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_restores_what_its_codecs_do(coded, tmp_path, name):
    """In keyframes with exact deltas, in deltas, and in both; blocks of 4 tokens leave tokens over."""
    steps, interval = [1, 2, 5, 3, 1, 9], 4
    state = cache(2, 2, 2, sum(steps), 16, torch.bfloat16)
    pairs = [coded[name]] * 2

    def expected(keyframe, delta, key_or_value):
        """The states of layer 0's keys (0) or values (1), step by step."""
        x, states, done = state[key_or_value][0], [], 0
        for number, new in enumerate(steps, 1):
            part, done = x[:, :, done : done + new], done + new
            states.append(keyframe(x[:, :, :done]) if number == interval else torch.cat([*states[-1:], delta(part)], 2))
        return states

    streams = {
        "k": write(tmp_path / "k", state, steps, keyframes=pairs, deltas="exact", interval=interval),
        "d": write(tmp_path / "d", state, steps, keyframes="exact", deltas=pairs, interval=interval),
        "kq": write(tmp_path / "kq", state, steps, keyframes=pairs, deltas=coded["quanto"][1], interval=interval),
        "kd": write(tmp_path / "kd", state, steps, keyframes=pairs, deltas=pairs, interval=interval),
    }
    for role in (0, 1):
        codec = coded[name][role]
        delta = lambda x: through(codec, lambda rest: rest, x)  # noqa: B023, E731
        wholes = {"k": lambda x: through(codec, lambda rest: rest, x), "d": lambda x: x}  # noqa: B023
        wholes["kd"] = lambda x: through(codec, lambda rest: delta(rest) if rest.shape[2] else rest, x)  # noqa: B023
        scalar = lambda x: through(coded["quanto"][1], lambda rest: rest, x)  # noqa: E731
        wholes["kq"] = lambda x: through(codec, lambda rest: scalar(rest) if rest.shape[2] else rest, x)  # noqa: B023
        deltas = {"k": lambda x: x, "d": delta, "kd": delta, "kq": scalar}
        for kind, stream in streams.items():
            each = expected(wholes[kind], deltas[kind], role)
            for step, states in enumerate(stream):
                assert torch.equal(states[role][0], each[step]), (kind, step)
                assert torch.equal(stream.state(step)[role][0], each[step])
    assert streams["d"].exact(3) and not streams["kd"].exact(3) and not streams["k"].exact(4)
    assert streams["k"].side_bytes == sum(codec.side_bytes for codec in coded[name])  # stored once for both layers


def test_a_streams_codecs_are_its_own(coded, tmp_path):
    """The file alone restores: no codec is passed to the reader, and one codec may serve all layers."""
    state, codec = cache(3, 1, 2, 5, 16), coded["vqllm"][0]
    stream = write(tmp_path / "s", state, [5], keyframes=codec, deltas="fp32", interval=1)
    assert torch.equal(stream.state()[1][2], codec.decode(codec.encode(state[1][2])))
    assert stream.report()["side_bytes"] == codec.side_bytes < stream.report()["header_bytes"]


@pytest.mark.parametrize("name", SMALL)
def test_cut_at_every_byte_and_resumed(tmp_path, name, monkeypatch):
    """Every prefix opens to its whole steps; going on from any of them gives the uninterrupted file, byte by byte."""
    monkeypatch.setattr("os.fsync", lambda number: None)  # half a second of waiting for the disk
    state, steps, data, states, ends = small(tmp_path / "whole", name)
    for size in range(len(data)):
        path = tmp_path / "cut"
        path.write_bytes(data[:size])
        if size < ends[0]:
            for reopen in (SnapshotReader, SnapshotWriter.resume):
                with pytest.raises(FormatError, match="whole snapshot header"):
                    reopen(path)
            continue
        stream, whole = SnapshotReader(path), sum(end <= size for end in ends) - 1
        assert len(stream) == whole and not stream.damaged
        assert stream.tail_bytes == size - ends[whole] and stream.file_bytes == ends[whole]
        if whole:
            assert same(stream.state(), states[whole - 1])
        if name == "int4" and size % 5:
            continue  # encoding takes its time
        with SnapshotWriter.resume(path, live=None if name == "exact" else state) as writer:
            assert path.stat().st_size == ends[whole]
            assert (writer.steps, writer.seq_len) == (whole, sum(steps[:whole]))
            feed(writer, state, steps[whole:], writer.seq_len)
        assert path.read_bytes() == data


def test_resuming_needs_the_exact_cache(tmp_path):
    state, _, _, _, ends = small(tmp_path / "s", "int4")
    assert SnapshotReader(tmp_path / "s").exact()  # the last step is a keyframe
    SnapshotWriter.resume(tmp_path / "s").close()
    (tmp_path / "s").write_bytes((tmp_path / "s").read_bytes()[: ends[3]])
    with pytest.raises(DataError, match="pass the live cache"):
        SnapshotWriter.resume(tmp_path / "s")
    with pytest.raises(DataError, match="the live cache has 3 tokens, the stream 4"):
        SnapshotWriter.resume(tmp_path / "s", live=cut(state, 0, 3))
    with pytest.raises(DataError, match="float16, expected float32"):
        SnapshotWriter.resume(tmp_path / "s", live=tuple([x.half() for x in role] for role in state))
    assert not write(tmp_path / "halved", state, [1, 2, 1], keyframes="fp16", deltas="exact", interval=2).exact()


ZEROS = [torch.zeros(1, 1, 6, 16)]


DENSE = {
    "120 values a byte": presets.vq(128, 64, 256),
    "static": presets.entropy_coded(presets.vq(16, 64, 4)),
    "adaptive": presets.entropy_coded(presets.rvq2(16, 64, 4), "adaptive"),
}


@pytest.mark.parametrize("name", DENSE)
def test_what_a_writer_writes_a_reader_reads_however_small(tmp_path, name):
    """Zeros through codecs that store hundreds of values in a byte."""
    x = torch.randn(1, 1, 512, 128, generator=torch.Generator().manual_seed(0))
    codec = DENSE[name].key_codec(128).partial_fit(x).partial_fit(torch.zeros(1, 1, 6400, 128)).finalize()
    state = ([torch.zeros(1, 1, 600, 128)] * 2,) * 2
    stream = write(tmp_path / "s", state, [192, 1, 192, 64, 151], keyframes=codec, deltas=codec, interval=2)
    assert len(stream) == 5 and not stream.damaged
    assert stream.state()[0][0].shape == state[0][0].shape
    assert max(r.tokens * stream._layout.token_values / r.length for r in stream._records[1:]) > 64


def test_a_codec_of_which_a_byte_could_be_anything_is_refused_before_anything_is_written(tmp_path):
    """Or a file of a few kB could make a reader allocate gigabytes."""
    codec = presets.entropy_coded(presets.vq(8, 1 << 15, 4), "adaptive").key_codec(16)
    codec.fit(torch.randn(1, 1, 1 << 15, 16, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(DataError, match="more than 32768 values a byte: use smaller blocks"):
        SnapshotWriter(tmp_path / "s", keyframes=codec).append(ZEROS, ZEROS)
    assert not (tmp_path / "s").exists()


def test_damage_is_not_cut_away_unasked(tmp_path):
    path = tmp_path / "s"
    state, steps, data, states, ends = small(path, "exact")
    altered = bytearray(data)
    altered[ends[2] + 12] ^= 1
    path.write_bytes(altered)
    stream = SnapshotReader(path)
    assert len(stream) == 2 and stream.damaged and stream.tail_bytes == len(data) - ends[2]
    with pytest.raises(FormatError, match=rf"damaged after step 2, at byte {ends[2]}: .*discard_damage"):
        SnapshotWriter.resume(path)
    assert path.read_bytes() == altered
    with SnapshotWriter.resume(path, discard_damage=True) as writer:
        feed(writer, state, steps[2:], writer.seq_len)
    assert path.read_bytes() == data
    path.write_bytes(data + bytes(100))  # a record of which a crash left only the room
    assert not SnapshotReader(path).damaged and same(SnapshotReader(path).state(), states[-1])


def test_a_failed_append_leaves_the_stream_as_it_was(tmp_path):
    """What a step cannot store is refused before anything is written, and the writer goes on."""
    path, state = tmp_path / "s", cache(2, 1, 1, 8, 4)
    writer = SnapshotWriter(path, keyframes="fp16", deltas="exact", interval=2)
    bad = [(lambda x: x * 1e6, "beyond fp16"), (lambda x: x * float("nan"), "NaN"), (lambda x: x.half(), "float16")]
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
        with pytest.raises(DataError, match="lists over layers"):
            writer.append(state[0][0], state[1][0])
        assert path.stat().st_size == size and writer.seq_len == number
        feed(writer, state, [1], writer.seq_len)
    writer.close()
    assert len(SnapshotReader(path)) == 3
    with pytest.raises(RuntimeError, match="closed"):
        feed(writer, state, [1])


def test_a_full_disk_ends_the_writer_and_resume_goes_on(tmp_path, monkeypatch):
    state, steps, _, states, ends = small(tmp_path / "whole", "exact")

    class Full(snapshots.FileIO):
        room = ends[2] + 30

        def write(self, data):
            Full.room, room = Full.room - len(data), Full.room
            if room <= 0:
                raise OSError(errno.ENOSPC, "no space left")
            return super().write(data[:room])

    with monkeypatch.context() as patched:
        patched.setattr(snapshots, "FileIO", Full)
        writer = SnapshotWriter(tmp_path / "s", "fp32", "exact", 2)
        with pytest.raises(OSError, match="no space"):
            feed(writer, state, steps)
        with pytest.raises(RuntimeError, match="resume"):
            feed(writer, state, [1])
        writer.close()
    assert (tmp_path / "s").stat().st_size == ends[2] + 30
    with SnapshotWriter.resume(tmp_path / "s") as writer:
        assert writer.steps == 2
        feed(writer, state, steps[2:], writer.seq_len)
    assert all(map(same, SnapshotReader(tmp_path / "s"), states))


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
    for wrong in (3, [], [coded["quanto"][0]], [(Fp16(16),)], presets.quanto()):
        with pytest.raises(DataError, match="list over layers of"):
            SnapshotWriter(path, deltas=wrong)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(DataError, match="interval"):
            SnapshotWriter(path, interval=wrong)
    with pytest.raises(DataError, match="codecs of 2 layers for a cache of 1"):
        SnapshotWriter(path, deltas=[coded["quanto"]] * 2).append(*state)
    with pytest.raises(DataError, match="head_dim is 8"):
        SnapshotWriter(path, deltas=coded["quanto"][0]).append(*cache(1, 1, 2, 4, 8))
    with pytest.raises(DataError, match="layer 1 has"):
        SnapshotWriter(path).append([state[0][0], state[0][0][:, :1]], state[1] * 2)
    with pytest.raises(DataError, match="float64"):
        SnapshotWriter(path).append(*([x.double() for x in role] for role in state))
    with pytest.raises(DataError, match="not fitted"):
        SnapshotWriter(path, deltas=Fp16()).append(*state)
    assert not path.exists()
    with pytest.raises(FormatError, match="is no file"):
        SnapshotReader(path)
    write(path, state, [4])
    with pytest.raises(FormatError, match="exists: SnapshotWriter.resume"):
        SnapshotWriter(path).append(*state)
