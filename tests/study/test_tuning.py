"""Page 11's tuning of its baselines: trials, what is chosen of them, and where that goes."""

import re

import pytest

from vqkv.study.experiments.comparisons import family
from vqkv.study.experiments.designs import published, since
from vqkv.study.experiments.tuning import TRIALS, WORTH, chosen_settings, trial, tuning

VQLLM = {"vqllm 3x256": [3, 256], "vqllm 2x256": [2, 256]}
EVERY = [(name, arguments) for name, trials in TRIALS.items() for arguments in trials]


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


def test_the_least_is_chosen_and_the_default_where_others_are_hardly_better(monkeypatch):
    def made_up(family, arguments):
        number = TRIALS[family].index(arguments)
        bits = {"quanto 2": number, "aatc": -0.9 * WORTH * number}.get(family, -number)
        label = {"family": family, "settings": repr(arguments), "arguments": repr(arguments)}
        return label | {"equivalent_bits": float(bits)}

    monkeypatch.setattr(tuning, "row", made_up)
    table = tuning(families=[])
    assert len(table) == len(EVERY) and table["chosen"].sum() == len(TRIALS)
    least = {name: trials[-1] for name, trials in TRIALS.items()}
    least |= {name: TRIALS[name][0] for name in ("quanto 2", "aatc")}
    assert chosen_settings(table) == least
    assert table["equivalent_bits"].max() == 2 and table["equivalent_bits"].min() == -4  # nothing was taken off
