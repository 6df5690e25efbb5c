"""Saved caches that were altered, cut, grown or forged: ``FormatError``, or the very cache that was saved.

Run as a script with a number and a folder, it tries that many and prints what became of them.
"""

import hashlib
import json
import random
import resource
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
import torch
from mutations import altered, edited, mutated, spaced
from preset_zoo import EVERY, PREDICTED
from saved_states import TOKENS, joined, made, original, parsed, same_state, signed

from vqkv import CompressedCache, Compressor, FormatError
from vqkv.codec import Nothing
from vqkv.models import describe
from vqkv.saved import FORMAT, inspect
from vqkv.settings import CacheSettings

NAMES = ("kivi", "quanto", "vqq", "vqllm+ans", "aqua-kivi")
FORGED = ("header", "tensors", "both", "layout", "spaces")


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = made("llama", folder / "model")
    return {name: original(model, name, folder / "cache") for name in NAMES}


def forged(rng, data, kind):
    """A change that whoever makes it hides, as far as its kind allows, behind right checksums."""
    outer, header, tensors = parsed(data)
    body = data[8 + int.from_bytes(data[:8], "little") :]
    if kind == "layout":  # safetensors' own header: names, types, shapes and offsets
        return joined(edited(rng, outer), body)
    if kind == "spaces":
        return joined(spaced(rng, outer).encode(), body)
    if kind != "tensors":
        header = edited(rng, header)
    if kind != "header":
        tensors = altered(rng, tensors)
    return signed(header, tensors)


def goes_on(original, cache):
    """A forged file may hold another cache than was saved: it must be one that a model can use."""
    if not cache.batch.size:
        return
    tokens, slots = TOKENS[:1, :5].expand(cache.batch.size, -1), cache.batch.slots
    held = torch.ones(cache.batch.size, slots, dtype=torch.bool) if cache.batch.tokens is None else cache.batch.tokens
    mask = torch.cat([held, torch.ones_like(held[:, :1]).expand(-1, 5)], dim=1).long()
    with torch.inference_mode():
        assert original.model(tokens, attention_mask=mask, past_key_values=cache).logits.isfinite().all()
    cache.crop(-min(slots, 20))
    cache.batch_select_indices(torch.arange(cache.batch.size).repeat(2)[:3])
    assert cache.report().cache_bytes >= 0


def outcome(original, path, data, may_differ):
    path.write_bytes(data)
    try:
        cache = CompressedCache.load(path, original.compressor, original.model)
    except FormatError:
        return "refused"
    if same_state(cache, original.cache):
        return "identical"
    assert may_differ
    goes_on(original, cache)
    return "another cache"


def fuzz(originals, path, count, seed=0):
    """``count`` damaged files; how many of each kind of damage were refused, or loaded. Also the most that the process
    grew by, and the longest time."""
    rng, outcomes, slowest = random.Random(seed), Counter(), 0.0
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        chosen = rng.choice(originals)
        kind = rng.choice(["damage", *FORGED])
        data = mutated(rng, chosen.data, chosen.other) if kind == "damage" else forged(rng, chosen.data, kind)
        start = time.perf_counter()
        outcomes[kind, outcome(chosen, path, data, kind in ("header", "tensors", "both"))] += 1
        slowest = max(slowest, time.perf_counter() - start)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown) << 10
    return outcomes, {"grown": grown, "slowest": slowest}


def test_damaged_files_are_refused_or_load_as_they_were(originals, tmp_path):
    outcomes, seen = fuzz(list(originals.values()), tmp_path / "cache", 300)
    assert min(outcomes[kind, "refused"] for kind in ("damage", "header", "tensors", "both", "layout")) > 20
    assert outcomes["spaces", "refused"] == 0 and outcomes["spaces", "identical"] > 20
    assert outcomes["tensors", "another cache"] > 3  # the changes reach beyond all checks
    assert seen["grown"] < 100 << 20


def of(name, change):
    """A change of the tensors that gives ``name`` (of those with that end) another value."""

    def alter(header, tensors):
        found = next(key for key in sorted(tensors) if key.endswith(name))
        tensors[found] = change(tensors[found].clone())

    return alter


def in_header(**values):
    return lambda header, tensors: header.update(values)


def in_group(number=0, **values):
    return lambda header, tensors: header["groups"][number].update(values)


def without(name):
    return lambda header, tensors: tensors.pop(next(key for key in sorted(tensors) if key.endswith(name)))


def filled_with(byte):
    return lambda x: torch.full_like(x.reshape(-1).view(torch.uint8), byte).view(x.dtype).view(x.shape)


def padding_moved_to_another_sequence(header, tensors):
    tensors["tokens"] = tensors["tokens"].flip(0)


def one_group_twice(header, tensors):
    header["groups"].append(header["groups"][0])


def a_group_of_nothing(header, tensors):
    header["groups"].append({"rows": [], "sinks": 0, "packed": 0, "window": 0, "holes": []})


def a_sink_among_the_recent(header, tensors):
    header["groups"][0]["sinks"] -= 1
    header["groups"][0]["window"] += 1
    for name in [name for name in tensors if name.startswith("0.") and name.endswith(".sinks")]:
        window = name.replace("sinks", "window")
        tensors[window] = torch.cat([tensors[name][:, :, -1:], tensors[window]], dim=2)
        tensors[name] = tensors[name][:, :, :-1].contiguous()


CHANGES = {
    "no version of this": ("kivi", in_header(version=2), "'vqkv-cache' 2; this vqkv reads 'vqkv-cache' 1"),
    "true for one": ("kivi", in_header(version=True), "'vqkv-cache' True; this"),
    "more fields": ("kivi", in_header(more=[]), "its header has more than"),
    "in place": ("kivi", in_header(in_place=True), "0 are sinks, 0 are recent and 16 are packed together"),
    "negative": ("kivi", in_header(slots=-1), "slots -1 is no number"),
    "more slots": ("kivi", in_header(slots=54), r"'tokens' is \(3, 53\) .*expected \(3, 54\)"),
    "more sequences": ("kivi", in_header(batch_size=4), "groups of 3 sequences that are no division of 4"),
    "rows twice": ("kivi", in_group(1, rows=[0]), "no division of 3"),
    "rows as words": ("kivi", in_group(rows=["0"]), "no saved cache of this version, or was altered"),
    "a group twice": ("kivi", one_group_twice, "no division of 3"),
    "a group of none": ("kivi", a_group_of_nothing, "4 groups of 3 sequences in 53 slots"),
    "padding": ("kivi", padding_moved_to_another_sequence, "leaves other tokens than the"),
    "padding of 2": ("kivi", of("tokens", filled_with(2)), "leaves other tokens than the"),
    "no padding": ("kivi", without("tokens"), "tokens in 53 slots without padding"),
    "holes beyond": ("kivi", in_group(0, holes=[[24, 33]]), r"holes \[\[24, 33\]\] in 32 packed tokens"),
    "holes at odd places": ("kivi", in_group(0, holes=[[24, 27]]), r"with holes \[\[24, 27\]\], where"),
    "more packed": ("kivi", in_group(2, packed=48), "tokens in 53 slots|expected|sinks"),
    "half a block": ("kivi", in_group(0, packed=40), "are packed together"),
    "a window too long": ("quanto", in_group(0, window=500, packed=0), "are recent and"),
    "a sink too few": ("aqua-kivi", a_sink_among_the_recent, "tokens, with holes .*, where 4 are sinks"),
    "no window": ("kivi", without("window"), "'window' is missing"),
    "no codes": ("kivi", without("packed.codes"), "'packed.codes' is missing"),
    "another type": ("kivi", of("window", lambda x: x.bfloat16()), "torch.bfloat16, expected .* torch.float16"),
    "another shape": ("vqllm+ans", of("stream", lambda x: x[None]), r"expected \(1,\) torch.uint8"),
    "NaN in the window": ("kivi", of("window", filled_with(255)), "'window' holds NaN or infinity"),
    "NaN among scales": ("vqllm+ans", of("scale", filled_with(255)), "'packed.scale' holds NaN or infinity"),
    "numbers beyond all bounds": ("vqq", of("scale", filled_with(0x7E)), "packed tokens read as .* numbers up to"),
    "streams of nothing": ("vqllm+ans", of("lengths", filled_with(0)), "rows own .* pieces of 'stream', but there are"),
    "streams of noise": ("vqllm+ans", of("stream", filled_with(255)), "a stream is longer than its codes"),
    "a mask of ones": ("vqq", of("mask", filled_with(255)), "rows own .* pieces of 'codes', but there are 0"),
    "one tensor more": ("kivi", lambda header, tensors: tensors.update(x=tensors["tokens"]), r"\['x'\] have no place"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_forged_is_named(originals, tmp_path, name):
    """Checksums are right, but no cache of this compressor and model can have been saved so."""
    preset, change, message = CHANGES[name]
    _, header, tensors = parsed(originals[preset].data)
    change(header, tensors)
    (tmp_path / "cache").write_bytes(signed(header, tensors))
    with pytest.raises(FormatError, match=message):
        CompressedCache.load(tmp_path / "cache", originals[preset].compressor, originals[preset].model)


def test_every_character_of_the_header_counts(originals, tmp_path):
    """Also of what loading does not need: names, and bytes of side information."""
    kivi, path = originals["kivi"], tmp_path / "cache"
    start = kivi.data.index(b'{\\"format')
    end = kivi.data.index(b"tensors_sha256", start)
    for at in range(start, end, 7):
        data = bytearray(kivi.data)
        data[at] ^= 1
        path.write_bytes(data)
        for read in (inspect, lambda path: CompressedCache.load(path, kivi.compressor, kivi.model)):
            with pytest.raises(FormatError):
                read(path)


def test_numbers_that_only_bf16_can_hold_are_refused(tmp_path):
    """They would make infinities of attention."""
    model = made("llama", tmp_path / "model", "bfloat16")
    saved = original(model, "kivi", tmp_path / "cache")
    _, header, tensors = parsed(saved.data)
    of("window", lambda x: x.fill_(3e38))(header, tensors)
    (tmp_path / "cache").write_bytes(signed(header, tensors))
    with pytest.raises(FormatError, match=r"keys or values reach 3\..*e\+38"):
        CompressedCache.load(tmp_path / "cache", saved.compressor, model)


def test_nothing_does_not_stand_for_any_number_of_tokens(originals, tmp_path):
    """Of a codec that stores no bytes, a file of no bytes could hold them all."""
    model, path = originals["kivi"].model, tmp_path / "cache"
    compressor = Compressor("nothing", [(Nothing(32), Nothing(32))] * 3, CacheSettings(), describe(model))
    cache = compressor.new_cache(model)
    with torch.inference_mode():
        model(TOKENS[:1, :4], past_key_values=cache)
    cache.save(path)
    _, header, tensors = parsed(path.read_bytes())
    header["slots"] = header["groups"][0]["packed"] = 1 << 40
    path.write_bytes(signed(header, {name: x.new_empty(1, 2, 1 << 40, 0) for name, x in tensors.items()}))
    with pytest.raises(FormatError, match=f"{1 << 40} packed tokens in 0 bytes"):
        CompressedCache.load(path, compressor, model)


def sealed(text, size):
    """A file of ``size`` bytes whose header is ``text``."""
    metadata = {FORMAT: text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return joined(
        {"__metadata__": metadata, "x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}, bytes(size)
    )


def test_headers_that_claim_gigabytes_cost_nothing(originals, tmp_path):
    """A file of 4 MB: objects of Python may take a few times that, whatever a header says."""
    kivi, path, size = originals["kivi"], tmp_path / "cache", 4 << 20
    _, header, tensors = parsed(kivi.data)
    empty = {"sinks": 0, "packed": 0, "window": 0, "holes": []}
    many = [{"rows": [row], **empty} for row in range(7000)]
    padding = {"tokens": torch.zeros(7000, 4, dtype=torch.uint8), "x": torch.zeros(size, dtype=torch.uint8)}
    for data in (
        sealed(json.dumps(header)[:-1] + ', "more": [' + "[]," * 100_000 + "[]]}", size),
        sealed(json.dumps(header)[:-1] + ', "more": ' + "[" * 200_000 + "]" * 200_000 + "}", size),
        sealed(json.dumps(header)[:-1] + ', "more": [' + "[]," * 1_000_000 + "[]]}", size),
        signed(header | {"groups": many, "batch_size": 7000, "slots": 4}, padding),
        signed(header | {"slots": 1 << 40, "batch_size": 1 << 40}, tensors | padding),
        signed(header | {"groups": [{**empty, "rows": [0], "packed": 1 << 40}], "batch_size": 1}, tensors | padding),
    ):
        path.write_bytes(data)
        tracemalloc.start()
        with pytest.raises(FormatError):
            CompressedCache.load(path, kivi.compressor, kivi.model)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * len(data)


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    model = made("llama", folder / "model")
    every = [original(model, name, folder / "cache") for name in EVERY | PREDICTED]
    found, seen = fuzz(every, folder / "cache", int(sys.argv[1]))
    print(*sorted(found.items()), seen, sep="\n")
