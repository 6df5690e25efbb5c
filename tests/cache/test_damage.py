"""Saved caches and compressors that were altered, cut, grown or mixed up: refused, or as written."""

import random
import subprocess
import sys

import pytest
from mutations import mutated
from preset_zoo import EVERY, PREDICTED
from saved_states import TOKENS, feed, half_way, made, same_state

from vqkv import CompressedCache, Compressor, FormatError, calibrate
from vqkv.cache.compressor import FILE, FORMAT, VERSION
from vqkv.runtime.files import save_checked

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
        "import importlib, pkgutil, vqkv.cache.compressor, vqkv.codecs; from vqkv.codecs.stage import Part\n"
        "known = set(Part.registry)\n"
        "for module in pkgutil.walk_packages(vqkv.codecs.__path__, 'vqkv.codecs.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(*sorted(set(Part.registry) - known))"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split() == []
    )
