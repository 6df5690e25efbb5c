"""Compressors that were altered, cut, grown or forged: ``FormatError``, or the very compressor that was saved.

Run as a script with a number and a folder, it tries that many and prints what became of them.
"""

import json
import random
import resource
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import small_models
import torch
from mutations import altered, edited, mutated, spaced
from preset_zoo import EVERY, PREDICTED
from safetensors.torch import load_file, save_file

from vqkv import Compressor, DataError, FormatError, calibrate, load_model
from vqkv.cache.compressor_folder import config_sha256, sha256

TOKENS = torch.randint(1, 4096, (4, 48), generator=torch.Generator().manual_seed(0))
NAMES = ("vqllm", "kivi", "vqq", "vqllm+ans", "aqua-higgs", "kvsharer")
FORGED = ("config", "tensors", "spaces")


def forged(rng, folder, kind):
    """Alter ``folder`` and make its checksums right again; ``spaces``: the same JSON, written otherwise."""
    path, text = next(folder.glob("codecs-*")), (folder / "config.json").read_text()
    if kind == "spaces":
        (folder / "config.json").write_text(spaced(rng, json.loads(text)))
        return
    config = json.loads(text)
    if kind == "config":
        config = edited(rng, config)
    elif tensors := load_file(path):
        save_file({name: x.clone() for name, x in altered(rng, tensors).items()}, path)
        config["codecs_sha256"] = sha256(path.read_bytes())
    config["config_sha256"] = config_sha256(config)
    (folder / "config.json").write_text(json.dumps(config))


def outcome(model, folder, whole, may_differ):
    try:
        found = Compressor.from_pretrained(folder)
    except FormatError:
        return "refused"
    if (found.fingerprint, found.name, found.model, found.notes) == whole:
        return "identical"
    assert may_differ
    try:
        with torch.inference_mode():
            model(TOKENS[:2], past_key_values=found.new_cache(model))
    except (FormatError, DataError):  # of another model, or of numbers that a codec cannot store
        return "refused in use"
    return "another compressor"


def fuzz(model, folders, copy, count, seed=0):
    """``count`` damaged copies of compressors; how many of each kind of damage were refused, or loaded. Also the most
    that the process grew by, and the longest time."""
    rng, outcomes, slowest = random.Random(seed), Counter(), 0.0
    wholes = {f: (c.fingerprint, c.name, c.model, c.notes) for f in folders for c in [Compressor.from_pretrained(f)]}
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        chosen, kind = rng.choice(folders), rng.choice(["damage", "damage", *FORGED, "config", "config"])
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(chosen, copy)
        if kind == "damage":
            path, other = (rng.choice(sorted(f.iterdir())) for f in (copy, rng.choice(folders)))
            path.write_bytes(mutated(rng, path.read_bytes(), other.read_bytes()))
        else:
            forged(rng, copy, kind)
        start = time.perf_counter()
        outcomes[kind, outcome(model, copy, wholes[chosen], kind in ("config", "tensors"))] += 1
        slowest = max(slowest, time.perf_counter() - start)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown) << 10
    return outcomes, {"grown": grown, "slowest": slowest}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(str(small_models.make("llama", tmp_path_factory.mktemp("llama"))))[0]


def many(model, folder, names):
    for name in names:
        calibrate(model, TOKENS, (EVERY | PREDICTED)[name], progress=False).save_pretrained(folder / name)
    return [folder / name for name in names]


def test_damaged_compressors_are_refused_or_load_as_they_were(model, tmp_path):
    outcomes, seen = fuzz(model, many(model, tmp_path, NAMES), tmp_path / "copy", 150)
    assert all(outcomes[kind, "refused"] > 5 for kind in ("damage", "config", "tensors"))
    assert not outcomes["spaces", "refused"] and outcomes["spaces", "identical"] > 5
    assert outcomes["config", "another compressor"] > 1  # the changes reach beyond all checks
    assert seen["grown"] < 100 << 20


if __name__ == "__main__":
    where = Path(sys.argv[2])
    llama = load_model(str(small_models.make("llama", where / "model")))[0]
    found, seen = fuzz(llama, many(llama, where, EVERY | PREDICTED), where / "copy", int(sys.argv[1]))
    print(*sorted(found.items()), seen, sep="\n")
