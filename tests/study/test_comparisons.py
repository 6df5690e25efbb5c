"""What pages make of their rows, on rows whose answer is known."""

import json
import math
import re

import numpy as np
import pandas as pd
import pytest

from vqkv import presets
from vqkv.study import tables
from vqkv.study.experiments import against_own, designs, frontier, predictors, retrieval, rule
from vqkv.study.experiments.common import bits_with_side
from vqkv.study.experiments.comparisons import at_equal_bits, paired_ratio
from vqkv.study.experiments.frontier import TRIALS, WORTH, chosen_settings, total_bits, tuning
from vqkv.study.experiments.restoring import FP16, break_even
from vqkv.study.experiments.rule import by_rule, chosen, pays_from, share_of_bits

ALL = designs.factorial()
TRANSFERS = [  # system, train_corpus, train_seqs, test_corpus, bits, KL of two windows
    ("a", "x", 4, "x", 1, "3 5"), ("a", "x", 4, "y", 2, "6 20"), ("a", "y", 4, "y", 1, "3 5"),
    ("a", "y", 4, "x", 2, "6 10"), ("a", "x", 1, "x", 1, "3 5"), ("b", "x", 4, "x", 1, "3 5"),
    ("b", "x", 1, "x", float("nan"), ""),
]  # fmt: skip
ROWS = [  # system, nominal bits, bits at 8k and at 128k, KL
    ("kvtc 1", 0, 4, 1.1, 0.03), ("kvtc 1, rank 480", 0, 1.9, 0.9, 0.1), ("kvtc 2", 0, 8, 2.2, 0.01),
    ("kvtc 2, rank 480", 0, 2.8, 1.9, 0.1), ("short", 0.9, 1.1, 0.9, 0.1), ("long", 0.9, 1.9, 1.0, 0.02),
    ("joint", 0.9, 1.5, 0.95, 0.06),
]  # fmt: skip
SEARCHED = pd.DataFrame(ROWS, columns=["system", "nominal_bits", "bits_8k_x1", "bits_128k_x1", "kl_mean"])


def test_every_design_is_a_preset_and_has_a_name_of_its_own():
    for name, arguments in ALL.items():
        bits = 2 if designs.exists(name, 2) else 1
        assert presets.crossed(**arguments, bits=bits).name == "crossed"
    listed = [tuple(sorted(arguments.items())) for arguments in ALL.values()]
    assert len(set(listed)) == len(ALL) > 70
    assert not designs.exists("grid", 2.5) and designs.exists("uniform", 2.5) and not designs.exists("affine", 0.5)
    assert all(name.startswith(arguments["quantizer"]) for name, arguments in ALL.items())
    published = designs.published({"vqllm 2x16": [2, 16]}, sink_tokens=3, seed=0)
    assert {(preset.sink_tokens, preset.recent_window) for preset in published.values()} == {(3, 0)}


def test_bits_including_side_information():
    about = {"num_layers": 2, "shapes": [[3, 5, 5]] * 2}
    bits = total_bits({"bits_per_value": 2.0, "side_bytes": 30 * 1024}, about, exact_tokens=4)
    assert bits["bits_1k_x1"] == pytest.approx(2 + 14 * 4 / 1024 + 8 * 30 / 60)  # of 60 values a token
    assert bits["bits_8k_x1"] == pytest.approx(2 + 14 * 4 / 8192 + 8 * 30 / 60 / 8) and len(bits) == 5


def row(label, bits, kl, side_bytes=0, predicted=False):
    about = {"model": "m", "label": label, "bits_per_value": bits, "kl_mean": kl, "side_bytes": side_bytes}
    about |= {"predicted": predicted, "width": 64, "ppl_increase": 1.0, "kl_low": 0.8 * kl, "kl_high": 1.2 * kl}
    model = {"num_layers": 2, "shapes": [[1, 64, 64]] * 2}
    return about | {name: bits_with_side(about, model, tokens) for name, tokens in predictors.CONTEXTS.items()}


def test_a_file_of_weights_is_not_read_onto_the_meta_device(monkeypatch):
    monkeypatch.setattr(rule, "config_of", lambda name, get=rule.config_of: rule.torch.ones(1).item() and get(name))
    assert rule.cache_shape("vqkv/llama-mini").width == 128


@pytest.mark.parametrize(
    ("bits", "kl", "plain_bits", "saved"),
    [
        (2.0, math.sqrt(1e-2 * 1e-3), 3.5, 1.5),
        (2.0, 1e-5, 4.0, 2.0),  # better than HIGGS of 4 bits: cut off there
        (2.0, 0.5, math.nan, math.nan),  # worse than HIGGS of 2 bits
        (3.2, 1e-2, 3.0, math.nan),  # nothing saved
    ],
)
def test_predictors_pay_where_their_bytes_equal_the_bits_they_save(bits, kl, plain_bits, saved):
    plain = [row(label, bits, 10.0 ** (1 - bits)) for label, bits in zip(predictors.WITHOUT, (2.0, 3.0, 4.0))]
    aqua = row("aqua", bits, kl, side_bytes=1000, predicted=True)
    compared_row = predictors._against_plain(aqua, [*plain, aqua], 2)
    assert compared_row["plain_bits"] == pytest.approx(plain_bits, nan_ok=True)
    assert 8 * 1000 / (compared_row["pays_from"] * 2 * 2 * 64) == pytest.approx(saved, nan_ok=True)


@pytest.mark.parametrize(
    ("table", "held_out"),
    [("11_search", "validation"), ("11_tuning", "validation"), ("11_rule", "validation"), ("11_frontier", "test")],
)
def test_what_page_11_chooses_on_is_not_what_it_reports_on(table, held_out):
    """By what the committed tables say of their text; that no text is in two splits is tested with the splits."""
    sources = json.loads((tables.repository_root() / f"results/{table}.json").read_text())["sources"]
    drawn = {text.group(1) for name in sources if (text := re.fullmatch(r"corpus .+ (\w+) \d+x\d+ seed \d+", name))}
    assert drawn == {"train", held_out}


def compared():
    """Four seeds' rows at bits -> KL of each window."""
    curves = {"mine": {1: [0.1, 0.3], 2: [0.001, 0.003]}, "worse": {1.5: [0.2, 0.4]}, "alike": {1.5: [0.008, 0.04]}}
    curves |= {"better": {3: [1e-4, 2e-4]}, "few": {0.5: [1, 1]}}
    points = [(name, seed, *point) for name, curve in curves.items() for seed in range(4) for point in curve.items()]
    table = pd.DataFrame(points, columns=["system", "seed", "nominal_bits", "kl"])
    kl_each = table["kl"].map(lambda windows: " ".join(map(str, windows)))
    return table.assign(model="m", bits=table["nominal_bits"] + 0.1, kl_mean=table["kl"].map(np.mean), kl_each=kl_each)


def test_at_equal_bits_says_who_is_better_where_the_interval_does():
    table = compared()
    rows = at_equal_bits(table, ["worse", "alike", "better", "few"], ["mine", "absent"], "bits").set_index("system")
    assert rows["better"].to_dict() == {"worse": "ours", "alike": "neither", "better": "theirs", "few": "no rate"}
    assert rows.loc["worse", "our_kl"] == pytest.approx((0.01 + 0.03) / 2)  # between 0.1 and 0.001, 0.3 and 0.003
    assert rows.loc["better", "our_kl"] == pytest.approx(0.002)  # its most bits
    assert rows.loc["alike", "low"] < 1 < rows.loc["alike", "high"]


def test_windows_are_paired_by_seed_and_broken_ones_count_as_lost():
    table = compared()
    without = table[~((table["system"] == "mine") & (table["seed"] == 0))]
    alike = at_equal_bits(without.replace({"mine": "ours"}), ["worse"], ["ours"], "bits")
    assert alike["ratio"].item() == pytest.approx(at_equal_bits(table, ["worse"], ["mine"], "bits")["ratio"].item())
    table.loc[(table["system"] == "mine") & (table["seed"] == 1), "kl_each"] = "nan 0.1"
    assert at_equal_bits(table, ["worse"], ["mine"], "bits")["better"].item() == "neither"


@pytest.mark.parametrize(("name", "function"), [("10_retrieval", retrieval), ("11_frontier", frontier)])
def test_the_code_still_tries_the_systems_of_the_committed_table(name, function):
    tried = {case.arguments["system"] for case in function.cases(**tables.provenance(name)["parameters"])}
    assert tried == set(tables.stored(name)[0]["system"])


def table(*given):
    """(system, nominal bits, bits, KL), with 1 MB of side information in ``mid``."""
    rows = pd.DataFrame(given, columns=["system", "nominal_bits", "bits_per_value", "kl_mean"])
    rows = rows.assign(model="m", seed=0, side_bytes=1e6 * rows["system"].isin(["best-mid"]))
    for name in ("8k", "128k"):
        rows[f"bits_{name}_x1"] = rows["bits_per_value"]
    return rows.assign(kl_each=[f"{kl} {1.5 * kl}" for kl in rows["kl_mean"]])


def test_shares_of_bits_are_those_of_straight_lines_in_the_logarithm():
    curve = [("best-long", b, b, 4.0**-b) for b in (1, 3)] + [("kvtc 4", 0, 4, 4.0**-2), ("kvtc 2", 0, 2, 4.0**-1)]
    seen = by_rule(table(*curve), ["128k"], 192)
    shares = share_of_bits(seen, "128k")
    assert shares["lowest"] == pytest.approx(0.5) == shares["highest"]
    assert shares["lowest_low"] == pytest.approx(0.5) == shares["highest_high"]  # windows are as far apart for both
    assert np.isnan(share_of_bits(seen, "128k", most=1)["lowest"])
    single = share_of_bits(seen.assign(kl_each=seen["kl_mean"]), "128k")  # one window: a number, once read from a file
    assert single["lowest"] == pytest.approx(0.5)
    assert np.isnan(list(share_of_bits(seen[seen["family"] == "best"], "128k").values())).all()
    broken = pd.concat([table(*curve), table(("kvtc 1", 0, 1, np.nan), ("kvtc 8", 0, 8, np.nan))], ignore_index=True)
    assert share_of_bits(by_rule(broken, ["128k"], 192), "128k") == shares


def test_side_information_pays_from_where_the_bits_that_it_saves_outweigh_it():
    points = ("best-short", 1, 2, 0.1), ("best-short", 2, 4, 0.001), ("best-mid", 1, 1, 0.2), ("best-mid", 2, 2, 0.01)
    thresholds = pays_from(table(*points), "best-short", "best-mid", 1000)
    at = 1 + np.log(0.2 / 0.1) / np.log(0.2 / 0.01)
    assert thresholds.index.tolist() == [1] and thresholds.item() == pytest.approx(8e6 / 1000 / (2 - at))


def test_break_even_is_where_both_files_are_ready_at_once():
    rows = [(FP16, 8e6, 10.0), ("small", 1e6, 45.0), ("small and fast", 1e6, 9.0)]
    times = pd.DataFrame(rows, columns=["system", "file_bytes", "ready_ms"]).assign(model="m", tokens=9, again_ms=90.0)
    ready = break_even(times).set_index("system")
    speed = ready.loc["small", "bandwidth"] * 1e6  # bytes a second
    assert 8e6 / speed + 0.010 == pytest.approx(1e6 / speed + 0.045)
    assert ready.loc["small", ["smaller", "faster"]].tolist() == [8, 2]
    assert math.isinf(ready.loc["small and fast", "bandwidth"])


def test_the_least_is_chosen_and_the_default_where_others_are_hardly_better(monkeypatch):
    def made_up(family, arguments):
        number = TRIALS[family].index(arguments)
        bits = {"quanto 2": number, "aatc": -0.9 * WORTH * number}.get(family, -number)
        label = {"family": family, "settings": repr(arguments), "arguments": repr(arguments)}
        return label | {"equivalent_bits": float(bits)}

    monkeypatch.setattr(tuning, "row", made_up)
    table = tuning(families=[])
    assert len(table) == sum(map(len, TRIALS.values())) and table["chosen"].sum() == len(TRIALS)
    least = {name: trials[-1] for name, trials in TRIALS.items()}
    least |= {name: TRIALS[name][0] for name in ("quanto 2", "aatc")}
    assert chosen_settings(table) == least
    assert table["equivalent_bits"].max() == 2 and table["equivalent_bits"].min() == -4  # nothing was taken off


def test_other_calibrations_are_paired_window_by_window():
    names = ["system", "train_corpus", "train_seqs", "test_corpus", "bits_per_value", "kl_each"]
    table = pd.DataFrame(TRANSFERS, columns=names).assign(model="m", nominal_bits=0)
    kl = table["kl_each"].str.split().map(lambda each: sum(map(float, each)) / len(each) if each else float("nan"))
    against = against_own(table.assign(kl_mean=kl), train_seqs=4)
    ratios = against.set_index(["system", "train_corpus", "train_seqs", "test_corpus"])[["ratio", "low", "high"]]
    assert ratios.loc["a", "y", 4, "x"].tolist() == [2, 2, 2]  # every window's is 2
    assert ratios.loc["a", "x", 4, "y"].tolist() == pytest.approx([3.25, 2, 4])
    assert ratios.loc["b", "x", 1, "x"].isna().all() and against["more_bits"].tolist()[:2] == [1, 1]


def test_sequences_are_drawn_in_pairs():
    theirs = np.random.default_rng(0).uniform(0.01, 1.0, 12)
    assert paired_ratio(2 * theirs, theirs) == pytest.approx((2.0, 2.0, 2.0))  # apart, their intervals would be wide
    _, low, high = paired_ratio(theirs + theirs[::-1], theirs)
    assert low < 1.95 and high > 2.05


def test_what_lies_above_a_line_between_others_is_not_chosen():
    kept = {name: chosen(SEARCHED, name) for name in ("8k", "128k")}
    assert kept["8k"]["system"].tolist() == ["short", "long", "kvtc 1, rank 480", "kvtc 1", "kvtc 2"]
    assert kept["128k"]["bits"].tolist() == [0.9, 1.0, 0.9, 1.1, 2.2]
