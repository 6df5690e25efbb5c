"""Snapshot streams: exact restore, bytes that add up, and files that are cut, altered or forged."""

import errno
import json
import random
import resource
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vqkv import presets, records, snapshots
from vqkv.codec import Chain, Fp16, Hadamard, VectorScale
from vqkv.codec.affine import Uniform
from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.snapshots import MAGIC, SnapshotReader, SnapshotWriter

FRAMING = records.FRAMING


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


@pytest.fixture(scope="module")
def coded():
    """Codecs by name, fitted for 2 heads of 16 channels: scalar, blocks of tokens, ragged, learned, merged heads."""
    x = torch.randn(2, 2, 96, 16, generator=torch.Generator().manual_seed(5))
    made = {
        "fp16": presets.fp16(),
        "quanto": presets.quanto(4, 8),
        "kivi": presets.kivi(2, 4),
        "vqq": presets.vqq(0.2, 4, 16),
        "vqq_product": presets.vqq_product(0.1, 4, 16),
        "kvquant": presets.kvquant(3, 0.1, block=4),
        "vqllm": presets.vqllm(2, 16, 8),
        "higgs": presets.higgs(2, 16),
    }
    return {name: (preset.key_codec().fit(x), preset.value_codec().fit(x)) for name, preset in made.items()}


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


SMALL = {
    "exact": {"keyframes": "fp32", "deltas": "exact"},
    "int4": {},
}


def small(path, name, seed=0):
    """A small stream: its cache, its bytes, and the state of every step."""
    state, steps = cache(1, 1, 1, 6, 3, seed=seed), [1, 2, 1, 2]
    stream = write(path, state, steps, interval=2, **SMALL[name])
    return state, steps, path.read_bytes(), list(stream), [record.end for record in stream._records]


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


def mutate(rng, data, other, ends):
    """One mutation of a stream; ``other``: a stream with the same header; ``ends``: of their records."""
    data, starts = bytearray(data), [len(MAGIC), *ends[:-1]]
    at, i, j = rng.randrange(len(data)), rng.randrange(len(ends)), rng.randrange(len(ends))
    pieces = [bytes(data[a:b]) for a, b in zip(starts, ends, strict=True)]
    swapped = list(pieces)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    kind = rng.choice(
        ["flip", "bytes", "cut", "grow", "repeat", "remove", "swap", "length", "zeros", "graft", "insert"]
    )
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 1, 2, 8])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        data[at : at + rng.randint(1, 40)] = rng.randbytes(rng.randint(1, 40))
    elif kind == "cut":
        del data[at:]
    elif kind == "grow":
        data += rng.randbytes(rng.randint(1, 200))
    elif kind == "length":
        word = int.from_bytes(data[starts[i] : starts[i] + 8], "little")
        word = word >> 38 << 38 | rng.choice([(1 << 38) - 1, 1 << 37, len(data), rng.getrandbits(38), 0])
        data[starts[i] : starts[i] + 8] = word.to_bytes(8, "little")
    elif kind == "zeros":
        data[at:] = bytes(len(data) - at)
    elif kind == "graft":
        i = max(i, 1)  # another stream's header is a header
        data[starts[i] : ends[i]] = other[starts[i] : ends[i]]
    elif kind == "insert":
        data[at:at] = rng.randbytes(rng.randint(1, 30))
    else:
        pieces = {"repeat": [*pieces[: i + 1], *pieces[i:]], "remove": pieces[:i] + pieces[i + 1 :], "swap": swapped}[
            kind
        ]
        data = bytearray(MAGIC + b"".join(pieces))
    return bytes(data)


def fuzz(folder, count, seed=0, name="int4"):
    """``count`` mutated files: each opens to exactly the whole records before its first altered byte, with the
    original's states, or raises ``FormatError`` if that is in the header. Returns how many did which, and the largest
    allocation seen (bytes of Python's allocator) over the file's size."""
    rng, path = random.Random(seed), folder / "mutated"
    _, _, data, states, ends = small(folder / f"original-{seed}", name)
    other = small(folder / f"other-{seed}", name, seed=1)[2]
    outcome = {"refused": 0, "prefix": 0, "whole": 0, "largest": 0.0}
    tracemalloc.start()
    for _ in range(count):
        mutated = mutate(rng, data, other, ends)
        unaltered = next((i for i, (a, b) in enumerate(zip(data, mutated)) if a != b), min(len(data), len(mutated)))
        path.write_bytes(mutated)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            stream = SnapshotReader(path)
        except FormatError:
            assert unaltered < ends[0]
            outcome["refused"] += 1
        else:
            assert unaltered >= ends[0] and len(stream) == sum(end <= unaltered for end in ends) - 1
            assert all(same(a, b) for a, b in zip(stream, states))
            outcome["whole" if len(stream) == len(states) else "prefix"] += 1
        peak = tracemalloc.get_traced_memory()[1] - before
        outcome["largest"] = max(outcome["largest"], peak / max(len(mutated), 1000))
    tracemalloc.stop()
    return outcome


@pytest.mark.parametrize("name", SMALL)
def test_mutated_files_open_to_a_correct_prefix_or_are_refused(tmp_path, name):
    outcome = fuzz(tmp_path, 150, seed=7, name=name)
    assert min(outcome[kind] for kind in ("refused", "prefix", "whole")) > 5  # the mutations reach all of them
    assert outcome["largest"] < 100  # a file of 2 kB: objects of Python, not what a length claims


def test_every_bit_of_a_records_kind_tokens_and_length_counts(tmp_path):
    path = tmp_path / "s"
    _, _, data, _, ends = small(path, "exact")
    for whole, start in enumerate(ends[:-1]):
        for bit in range(64):
            altered = bytearray(data)
            altered[start + bit // 8] ^= 1 << bit % 8
            path.write_bytes(altered)
            assert len(SnapshotReader(path)) == whole


def test_lengths_that_claim_gigabytes_cost_nothing(tmp_path):
    path = tmp_path / "s"
    ends = [r.end for r in write(path, cache(2, 1, 2, 64, 64), [1] * 64, deltas="exact", interval=32)._records]
    data = bytearray(path.read_bytes())
    data[ends[40] : ends[40] + 5] = b"\xff" * 5  # the length of step 41
    path.write_bytes(data)
    tracemalloc.start()
    stream = SnapshotReader(path)
    keys, _ = stream.state()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(stream) == 40 and keys[0].shape[2] == 40 and peak < 3 * len(data)


def forge(path, data, contents, keep=slice(None)):
    """Rebuild a file with ``contents`` (record number -> other bytes) under checksums that are right."""
    path.write_bytes(data)
    stream, previous, out = SnapshotReader(path), MAGIC, [MAGIC]
    for i, record in enumerate(stream._records[keep]):
        body = contents.get(i, data[record.offset + records.WORD.size : record.end - records.CHECKSUM])
        out.append(records.frame(record.kind, record.tokens, body, previous))
        previous = out[-1][-records.CHECKSUM :]
    path.write_bytes(b"".join(out))


def header(path):
    """A stream's header as (JSON, bytes of the codecs' tensors); ``joined`` is the inverse."""
    contents = path.read_bytes()[16 : SnapshotReader(path)._records[0].end - 16]
    end = 4 + int.from_bytes(contents[:4], "little")
    return json.loads(contents[4:end]), contents[end:]


def joined(meta, tensors):
    text = json.dumps(meta).encode()
    return len(text).to_bytes(4, "little") + text + tensors


def paths(config, at=()):
    """Every place in nested JSON."""
    yield at
    if isinstance(config, dict | list):
        for key, inner in config.items() if isinstance(config, dict) else enumerate(config):
            yield from paths(inner, (*at, key))


WRONG = (None, -1, 0, 1, 7, 1 << 31, 1 << 62, 0.5, "x", "fp16", "float16", [], {}, [[]], True)


def forge_headers(path, coded, count, seed=0):
    """``count`` times another value somewhere in the header's JSON: ``FormatError``, or a stream of the same steps.
    Returns how many were refused, and by how many bytes the process's peak of memory grew."""
    state, rng = cache(1, 1, 2, 12, 16), random.Random(seed)
    write(path, state, [4, 4, 4], keyframes=[coded["vqq"]], deltas=[coded["vqllm"]], interval=2)
    data, (meta, tensors) = path.read_bytes(), header(path)
    places = list(paths(meta))
    refused, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        forged = [json.loads(json.dumps(meta))]
        *outer, last = (0, *rng.choice(places))
        inner = forged
        for key in outer:
            inner = inner[key]
        inner[last] = rng.choice(WRONG)
        forge(path, data, {0: joined(forged[0], tensors)})
        try:
            keys, values = SnapshotReader(path).state()
            assert len(keys) == len(values) == 1 and keys[0].numel() == values[0].numel() == state[0][0].numel()
        except FormatError:
            refused += 1
    return refused, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


def test_headers_that_claim_gigabytes_are_refused(tmp_path):
    """Right checksums, but a rotation's matrix of 4 GB, or 2^39 layers."""
    path, x = tmp_path / "s", torch.randn(1, 1, 4, 16)
    codec = Chain([VectorScale("absmax"), Hadamard()], Uniform(4, signed=True)).fit(x)
    write(path, ([x], [x]), [4], deltas=codec)
    data, (meta, tensors) = path.read_bytes(), header(path)
    wide = {**meta["codecs"][0], "config": {**meta["codecs"][0]["config"], "head_dim": 32768}}
    for claim in ({"codecs": [wide]}, {"num_layers": 1 << 39}):
        forge(path, data, {0: joined(meta | claim, tensors)})
        with pytest.raises(FormatError, match="too many for so small a file"):
            SnapshotReader(path)


def test_headers_forged_with_right_checksums_are_refused_or_harmless(coded, tmp_path):
    """No exception but ``FormatError``, and no memory by claim, wherever the header lies."""
    refused, grown = forge_headers(tmp_path / "s", coded, 100)
    assert 50 < refused < 100 and grown < 100 << 20


@pytest.mark.parametrize("name", ["kivi", "vqq", "kvquant"])
def test_steps_forged_with_right_checksums_are_refused_or_read(coded, tmp_path, name):
    """Ragged sizes come from the data: altered data must not reach beyond the record."""
    state, path, rng = cache(1, 1, 2, 12, 16), tmp_path / "s", random.Random(1)
    stream = write(path, state, [4, 4, 4], keyframes=[coded[name]], deltas=[coded[name]], interval=2)
    data, refused = path.read_bytes(), 0
    for _ in range(40):
        record = stream._records[number := rng.randrange(1, 4)]
        body = bytearray(data[record.offset + 8 : record.end - 16])
        for _ in range(rng.choice([1, 30])):
            body[rng.randrange(len(body))] = rng.randrange(256)
        body = body[: rng.choice([len(body), len(body), rng.randrange(len(body)) or 1])]
        forge(path, data, {number: bytes(body)})
        try:
            for keys, values in SnapshotReader(path):
                assert keys[0].shape == values[0].shape
        except FormatError:
            refused += 1
    assert 5 < refused < 40


def test_sequences_of_records_that_no_writer_writes_are_refused(tmp_path):
    _, _, data, _, ends = small(tmp_path / "s", "exact")
    forge(tmp_path / "s", data, {}, keep=slice(0, 1))
    assert len(SnapshotReader(tmp_path / "s")) == 0
    with pytest.raises(IndexError, match="step -1 of a stream of 0 steps"):
        SnapshotReader(tmp_path / "s").state()
    for start in (1, 2):
        forge(tmp_path / "s", data, {}, keep=slice(start, None))
        with pytest.raises(FormatError, match="does not start with"):
            SnapshotReader(tmp_path / "s")
    body = data[ends[0] + records.WORD.size : ends[1] - records.CHECKSUM]
    forge(tmp_path / "s", data, {1: body + b"x"})
    with pytest.raises(FormatError, match=f"the record at byte {ends[0]} of .* cannot be read: 1 bytes too many"):
        SnapshotReader(tmp_path / "s").state(0)
    forge(tmp_path / "s", data, {1: body[:-1]})
    with pytest.raises(FormatError, match="step 1, at byte .* does not follow"):
        SnapshotReader(tmp_path / "s")
    forge(tmp_path / "s", data, {2: b""})
    with pytest.raises(FormatError, match="step 2, at byte .* does not follow"):
        SnapshotReader(tmp_path / "s")


def test_a_file_that_changes_under_an_open_stream_is_noticed(tmp_path):
    path = tmp_path / "s"
    _, _, data, _, ends = small(path, "exact")
    stream = SnapshotReader(path)
    path.write_bytes(data[: ends[-1] - 20])
    with pytest.raises(FormatError, match="changed since"):
        stream.state()


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
