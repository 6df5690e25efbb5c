"""Saved caches and snapshot streams that were altered, cut, grown or mixed up: refused, or what was written."""

import random
import tracemalloc
from collections import Counter

import pytest
from mutations import mutated
from preset_zoo import EVERY, PREDICTED
from saved_states import TOKENS, feed, half_way, made, same_state
from snapshot_zoo import SMALL, cache, ends_of, same, small, write

from vqkv import CompressedCache, FormatError, calibrate
from vqkv.cache.saving import inspect
from vqkv.cache.snapshots import MAGIC, SnapshotReader


@pytest.mark.parametrize("name", ["kivi", "vqllm+ans", "aqua-kivi"])
def test_a_damaged_cache_is_refused_or_loads_as_it_was(tmp_path, name):
    model, path, rng = made("llama", tmp_path / "model"), tmp_path / "cache", random.Random(0)
    compressor = calibrate(model, TOKENS, (EVERY | PREDICTED)[name], progress=False)
    caches = [compressor.new_cache(model) for _ in range(2)]
    half_way(model, caches[0])
    feed(model, caches[1], TOKENS)
    files = []
    for saved in caches:
        saved.save(path)
        files.append(path.read_bytes())
    outcomes = Counter()
    for _ in range(120):
        path.write_bytes(mutated(rng, *files))
        try:
            loaded = CompressedCache.load(path, compressor, model)
        except FormatError:
            outcomes["refused"] += 1
        else:  # white space in a header, a part grafted onto itself
            assert any(same_state(loaded, saved) for saved in caches)
            outcomes["whole"] += 1
    assert outcomes["refused"] > 100
    path.write_bytes(files[0][:-1])
    with pytest.raises(FormatError, match="cut or altered"):
        inspect(path)


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
