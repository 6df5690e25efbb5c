"""Saved caches, compressors and snapshot streams that were altered, cut, grown or mixed up: refused, or as written."""

import random
import subprocess
import sys
import tracemalloc
from collections import Counter

import pytest
from mutations import mutated
from preset_zoo import EVERY, PREDICTED
from saved_states import TOKENS, feed, half_way, made, same_state
from snapshot_zoo import SMALL, cache, ends_of, same, small, write

from vqkv import CompressedCache, Compressor, FormatError, calibrate
from vqkv.cache.compressor import FILE, FORMAT, VERSION
from vqkv.runtime.files import save_checked
from vqkv.study.snapshots import MAGIC, SnapshotReader

PRESETS = EVERY | PREDICTED


@pytest.mark.parametrize("name", ["kivi", "aqua-vqllm"])
def test_damaged_files_are_refused_or_load_as_they_were(tmp_path, name):
    """A cache, then its compressor: bytes that change nothing (a part grafted onto itself) are no damage."""
    model, rng, path = made("llama", tmp_path / "model"), random.Random(0), tmp_path / "c" / FILE
    compressors = [calibrate(model, tokens, PRESETS[name], progress=False) for tokens in (TOKENS, TOKENS + 1)]
    caches = [compressor.new_cache(model) for compressor in compressors[:1] * 2]
    half_way(model, caches[0])
    feed(model, caches[1], TOKENS)
    kinds = [
        (caches, lambda x, to: x.save(to), lambda: CompressedCache.load(path, compressors[0], model), same_state),
        (compressors, lambda x, to: x.save_pretrained(to.parent), lambda: Compressor.from_pretrained(path.parent),
         lambda a, b: a.fingerprint == b.fingerprint),
    ]  # fmt: skip
    path.parent.mkdir()
    for wholes, save, load, alike in kinds:
        files = []
        for whole in wholes:
            save(whole, path)
            files.append(path.read_bytes())
        refused = 0
        for data in [*(mutated(rng, *files) for _ in range(120)), files[0][:-1]]:
            path.write_bytes(data)
            try:
                loaded = load()
            except FormatError as error:
                refused += f"{path} is missing, cut or altered, or no vqkv-c" in str(error) and ": save a" in str(error)
            else:
                assert any(alike(loaded, whole) for whole in wholes)
        assert refused > 100


def test_other_versions_and_unknown_parts_are_named(tmp_path):
    about = {"format": FORMAT, "version": 99}
    save_checked(tmp_path / FILE, about, {})
    with pytest.raises(FormatError, match="is vqkv-compressor 99; this vqkv reads vqkv-compressor"):
        Compressor.from_pretrained(tmp_path)
    about |= {"version": VERSION, "predictions": [], "codecs": [[{"part": "Newer"}, {"part": "Newer"}]]}
    save_checked(tmp_path / FILE, about, {})
    with pytest.raises(FormatError, match="unknown codec part 'Newer'"):
        Compressor.from_pretrained(tmp_path)


def test_a_new_process_knows_every_part():
    """As ``vqkv evaluate`` reads a saved compressor, which imports no preset's module."""
    script = (
        "import importlib, pkgutil, vqkv.cache.compressor, vqkv.codecs; from vqkv.codecs.part import Part\n"
        "known = set(Part.registry)\n"
        "for module in pkgutil.walk_packages(vqkv.codecs.__path__, 'vqkv.codecs.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(*sorted(set(Part.registry) - known))"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split() == []
    )


def opened(path, data, states):
    """How many steps a stream of these bytes opens to: the first of ``states``, as they were; None if refused."""
    path.write_bytes(data)
    try:
        stream = SnapshotReader(path)
    except FormatError:
        return None
    assert all(same(stream.state(i), states[i]) for i in range(len(stream)))
    return len(stream)


@pytest.mark.parametrize("name", SMALL)
def test_a_damaged_stream_opens_to_the_steps_before_the_damage(tmp_path, name):
    path, rng, outcomes = tmp_path / "damaged", random.Random(7), Counter()
    _, _, data, states, ends = small(tmp_path / "s", name)
    other = small(tmp_path / "other", name, seed=1)[2]
    for _ in range(400):
        altered = mutated(rng, data, other)
        if altered[: ends[0]] == other[: ends[0]]:
            continue  # its header and all that was before the damage are the other one's
        intact = next((i for i, (a, b) in enumerate(zip(data, altered)) if a != b), min(len(data), len(altered)))
        steps = opened(path, altered, states)
        assert steps == (sum(end <= intact for end in ends) - 1 if intact >= ends[0] else None)
        outcomes[steps] += 1
    assert len(outcomes) == len(ends) + 1  # the damage reaches all of the file


def test_steps_of_another_stream_or_in_another_order_are_noticed(tmp_path):
    path = tmp_path / "s"
    _, _, data, states, ends = small(path, "exact")
    other = small(tmp_path / "other", "exact")[2]  # of the same values, under its own header
    header, *steps = (data[a:b] for a, b in zip([len(MAGIC), *ends[:-1]], ends, strict=True))
    foreign = other[ends[1] : ends[2]]
    for order, whole in (([0, 1, 3], 2), ([1, 0, 2, 3], 0), ([0, 0, 1], 1), ([0], 1), ([], 0)):
        assert opened(path, MAGIC + header + b"".join(steps[i] for i in order), states) == whole
    assert opened(path, MAGIC + header + steps[0] + foreign + b"".join(steps[2:]), states) == 1
    assert opened(path, MAGIC + b"".join(steps), states) is None


def test_a_length_that_claims_gigabytes_costs_nothing(tmp_path):
    path = tmp_path / "s"
    ends = ends_of(write(path, cache(2, 1, 2, 64, 64), [1] * 64, deltas="exact", interval=32))
    data = bytearray(path.read_bytes())
    data[ends[40] : ends[40] + 5] = b"\xff" * 5  # the length of step 41
    path.write_bytes(data)
    tracemalloc.start()
    keys, _ = SnapshotReader(path).state()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert keys[0].shape[2] == 40 and peak < 3 * len(data)
