"""Page 11's tuning of its baselines: trials, what is chosen of them, and where that goes."""

import re
import sys

import pytest

from vqkv.study.experiments.comparisons import family
from vqkv.study.experiments.designs import published, since
from vqkv.study.experiments.tuning import TRIALS, chosen_settings, trial, tuning

VQLLM = {"vqllm 3x256": [3, 256], "vqllm 2x256": [2, 256]}
EVERY = [(name, arguments) for name, trials in TRIALS.items() for arguments in trials]
SETTINGS = {
    "corpus": "python-stdlib", "train_seqs": 1, "seq_len": 264, "num_seqs": 1, "chunk_size": 132, "vqllm": VQLLM,
    "sink_tokens": 4, "context": "32k", "seed": 0, "dtype": "", "device": "cpu",
}  # fmt: skip


def systems(tuned=None):
    return published(VQLLM, 4, 0, tuned) | since(VQLLM, 4, 0, tuned)


def described(preset) -> str:
    found = preset.settings, preset.plan, preset.key_codec(64).config(), preset.value_codec(64).config()
    return re.sub(r" at 0x\w+", "", repr(found))


@pytest.mark.parametrize(("name", "arguments"), EVERY)
def test_every_trial_reaches_all_rates_of_its_family(name, arguments):
    tuned = systems({name: arguments})
    ours = {label: preset for label, preset in tuned.items() if name in (label, family(label))}
    assert ours and set(tuned) == set(systems())
    for preset in [trial(name, arguments, VQLLM, 4, 0), *ours.values()]:
        given = preset.arguments | preset.arguments.get("settings", {})
        assert given | arguments == given and described(preset)
        assert (preset.sink_tokens, preset.recent_window) == (4, 0)


def test_other_families_stay_as_they_are():
    untouched, tuned = systems(), systems({"kivi": {"group_size": 32}, "kvtc": {"block": 32}})
    changed = {label for label in tuned if described(tuned[label]) != described(untouched[label])}
    assert {family(label).split(",")[0] for label in changed} == {"kivi", "kvtc"} and len(changed) == 39


@pytest.mark.parametrize("name", TRIALS)
def test_trials_begin_with_what_page_11_had_and_differ(name):
    first, *others = (described(trial(name, arguments, VQLLM, 4, 0)) for arguments in TRIALS[name])
    assert first == described(trial(name, {}, VQLLM, 4, 0))
    assert len({first, *others}) == 1 + len(others) > 1


def test_the_least_mean_over_models_is_chosen(monkeypatch):
    def made_up(model, family, arguments, who, **settings):
        assert who["held_out"] == "validation"
        bits = TRIALS[family].index(arguments) * (-1 if model == "a" else 3)  # "a" likes the last, both the first
        bits = {"quanto 2": bits, "kivi": -bits, "aatc": 0}.get(family, 2.0 - bits)
        if (model, family, bits) == ("b", "kivi", -6):
            return [], {}  # the best, but not with all models
        label = {"model": model, "family": family, "settings": repr(arguments), "arguments": repr(arguments)}
        return [label | {"equivalent_bits": bits}], {}

    monkeypatch.setattr(sys.modules[tuning.__module__], "_row", made_up)
    table = tuning(["a", "b"], **SETTINGS)
    assert len(table) == 2 * len(EVERY) - 1 and table["chosen"].sum() == 2 * len(TRIALS)
    kept = table[table["chosen"]]
    least = {name: trials[-1] for name, trials in TRIALS.items()}
    least |= {"quanto 2": TRIALS["quanto 2"][0], "kivi": TRIALS["kivi"][1], "aatc": TRIALS["aatc"][0]}
    assert dict(zip(kept["family"], kept["arguments"])) == {name: repr(trial) for name, trial in least.items()}
    assert chosen_settings(table) == least
