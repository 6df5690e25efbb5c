"""Snapshot streams that were altered, cut, grown or forged: a correct prefix, or an error."""

import json
import random
import resource
import tracemalloc

import pytest
import torch
from snapshot_zoo import SMALL, cache, coded_pairs, same, small, write

from vqkv import records
from vqkv.codec import Chain, Hadamard, VectorScale
from vqkv.codec.affine import Uniform
from vqkv.errors import FormatError
from vqkv.snapshots import MAGIC, SnapshotReader


@pytest.fixture(scope="module")
def coded():
    return coded_pairs()


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


def fuzz(folder, count, seed=0, name="int4", **sizes):
    """``count`` mutated files: each opens to exactly the whole records before its first altered byte, with the
    original's states, or raises ``FormatError`` if that is in the header. Returns how many did which, and the largest
    allocation seen (bytes of Python's allocator) over the file's size."""
    rng, path = random.Random(seed), folder / "mutated"
    _, _, data, states, ends = small(folder / f"original-{seed}", name, **sizes)
    other = small(folder / f"other-{seed}", name, seed=1, **sizes)[2]
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
    assert outcome["largest"] < 20  # of 1 kB: objects of Python, not what a length claims


@pytest.mark.parametrize("name", SMALL)
def test_no_mutated_file_takes_more_than_ten_times_its_size(tmp_path, name):
    """Once a file is larger than the objects that read it: 150 kB here."""
    assert fuzz(tmp_path, 40, seed=3, name=name, layers=8, heads=4, head_dim=64)["largest"] < 10


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
