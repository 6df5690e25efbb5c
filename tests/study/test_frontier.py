"""Page 11's search and designs, and what it and page 06 make of their rows."""

import itertools
import json
import math
import re

import pandas as pd
import pytest

from vqkv import presets
from vqkv.study import figures, tables
from vqkv.study.experiments import beside_published, designs, frontier, predictors, retrieval
from vqkv.study.experiments.common import bits_with_side
from vqkv.study.experiments.comparisons import (
    at_equal_bits,
    family,
    paired_ablation,
    proxy_correlations,
    what_to_use,
)
from vqkv.study.experiments.frontier import CONTEXTS, design_search, total_bits

ALL = designs.factorial()


def test_a_part_is_worth_what_its_twin_lacks():
    designs = {
        "uniform, fisher_pca": 3.0,
        "trellis, fisher_pca": 2.5,
        "trellis, fisher_pca, mixed": 1.0,
        "rvq, mixed": 0.0,
    }
    rows = [{"design": name, "equivalent_bits_1k": bits} for name, bits in designs.items()]
    found = paired_ablation(pd.DataFrame(rows), ["1k"])
    assert found.to_dict("list") == {
        "part": ["trellis, not uniform", "mixed"],
        "design": ["trellis, fisher_pca", "trellis, fisher_pca, mixed"],
        "saved_1k": [0.5, 1.5],
    }
    none = paired_ablation(pd.DataFrame(rows[:1]), ["1k"])
    assert none.empty and all(figures.ablation_dots(pairs, {"1k": "1,024 tokens"}).axes for pairs in (found, none))


def test_a_search_tries_what_exists_of_all_designs_or_of_those_named():
    tried = [case.arguments["design"] for case in design_search.cases(bits=[2])]
    assert tried == [name for name in ALL if designs.exists(name, 2)]
    few = [case.arguments for case in design_search.cases(bits=[2, 0.5], designs=["uniform", "grid, predicted"])]
    assert [(case["design"], case["bits"]) for case in few] == [
        ("uniform", 2), ("uniform", 0.5), ("grid, predicted", 2),
    ]  # fmt: skip


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
    bits = total_bits({"bits_per_value": 2.0, "side_bytes": 30 * 1024}, about, exact_tokens=4)  # of 60 values a token
    assert bits["bits_1k_x1"] == pytest.approx(2 + 14 * 4 / 1024 + 8 * 30 / 60)
    assert bits["bits_8k_x1"] == pytest.approx(2 + 14 * 4 / 8192 + 8 * 30 / 60 / 8) and len(bits) == 5


def table():
    """Two seeds; "a" has few bytes of side information, "b" many and a lower KL, "p" is published."""
    rows = []
    systems = (("a", 1, 0.04), ("a", 2, 0.01), ("b", 1, 0.004), ("b", 2, 0.001), ("p", 0, 0.02))
    for (system, nominal, kl), seed in itertools.product(systems, (0, 1)):
        bits = nominal + 0.05 * seed if nominal else 2.0
        side = {"a": 0.1, "b": 1.5, "p": 0.0}[system]
        row = {"system": system, "nominal_bits": nominal, "seed": seed, "bits_per_value": bits, "kl_floor": 1e-7}
        row |= {f"bits_{name}_x1": bits + side * 1024 / n for name, n in CONTEXTS.items()}
        rows.append(row | {"kl_mean": kl * (1 + seed)})
    return pd.DataFrame(rows)


def test_what_to_use_stays_within_the_budget_with_every_seed():
    found = what_to_use(table(), [0.5, 1.3, 2.5])
    assert list(found.index) == [0.5, 1.3, 2.5]
    assert found.loc[0.5, "1k"] == "none"
    assert found.loc[1.3, "1k"] == "a, 1 bits: 0.06"  # "b" has 2.55 there
    assert found.loc[1.3, "32k"] == "b, 1 bits: 0.006"
    assert found.loc[2.5, "128k"] == "b, 2 bits: 0.0015"


def test_what_broke_with_one_seed_is_not_to_be_used():
    broken = table()
    broken.loc[(broken["system"] == "b") & (broken["seed"] == 1), "kl_mean"] = math.nan
    assert what_to_use(broken, [2.5]).loc[2.5, "128k"] == "a, 2 bits: 0.015"
    assert what_to_use(broken.assign(kl_mean=math.nan), [2.5]).loc[2.5, "1k"] == "none"
    assert what_to_use(table().assign(kl_mean=1e-8), [9]).loc[9, "1k"].endswith(": at the fp16 floor")


ABOUT = {"num_layers": 2, "shapes": [[1, 64, 64]] * 2}


def row(label, bits, kl, side_bytes=0, predicted=False):
    found = {"model": "m", "label": label, "bits_per_value": bits, "kl_mean": kl, "side_bytes": side_bytes}
    found |= {"predicted": predicted, "width": 64, "ppl_increase": 1.0, "kl_low": 0.8 * kl, "kl_high": 1.2 * kl}
    return found | {name: bits_with_side(found, ABOUT, tokens) for name, tokens in predictors.CONTEXTS.items()}


PLAIN = [row(label, bits, 10.0 ** (1 - bits)) for label, bits in zip(predictors.WITHOUT, (2.0, 3.0, 4.0))]


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
    aqua = row("aqua", bits, kl, side_bytes=1000, predicted=True)
    found = predictors._against_plain(aqua, [*PLAIN, aqua], 2)
    assert found["plain_bits"] == pytest.approx(plain_bits, nan_ok=True)
    assert 8 * 1000 / (found["pays_from"] * 2 * 2 * 64) == pytest.approx(saved, nan_ok=True)


def test_every_published_row_is_one_of_ours_and_the_sources():
    ours = {label for block in predictors._table(16, [2], 4, 8, 4, 0).values() for label in block}
    published = tables.published("aqua_detailed")
    assert set(predictors.PUBLISHED) <= ours and set(predictors.PUBLISHED.values()) <= set(published["config"])
    joined = beside_published(pd.DataFrame([row("higgs 2", 2.0, 0.1)]), published)
    assert joined.loc["higgs 2", "m kl_mean"] == 0.1
    assert joined.loc["aqua higgs 2", "published ppl_increase"] == pytest.approx(100 * (7.03 / 6.98 - 1))


SOURCE = re.compile(r"corpus .+ (?P<split>\w+) \d+x\d+ seed \d+")


@pytest.mark.parametrize(
    ("table", "held_out"),
    [("11_search", "validation"), ("11_tuning", "validation"), ("11_rule", "validation"), ("11_frontier", "test")],
)
def test_what_page_11_chooses_on_is_not_what_it_reports_on(table, held_out):
    """By what the committed tables say of their text; that no text is in two splits is tested with the splits."""
    sources = json.loads((tables.repository_root() / f"results/{table}.json").read_text())["sources"]
    drawn = {match["split"] for name in sources if (match := SOURCE.fullmatch(name))}
    assert drawn == {"train", held_out}


def test_families_share_all_but_numbers():
    labels = ["kvtc 0.75, rANS", "vqllm 8x1024", "aqua higgs 3, first 2", "turboquant 3", "kvarn 4+2"]
    found = [family(label) for label in labels]
    assert found == ["kvtc, rANS", "vqllm", "aqua higgs, first", "turboquant", "kvarn"]


def rates(system, seed, curve):
    """Rows at bits -> KL of each window."""
    for bits, windows in curve.items():
        row = {"model": "m", "system": system, "nominal_bits": bits, "seed": seed, "bits": bits + 0.1}
        yield row | {"kl_mean": sum(windows) / len(windows), "kl_each": " ".join(map(str, windows))}


def compared():
    ours = {1: [0.1, 0.3], 2: [0.001, 0.003]}
    theirs = {
        "worse": {1.5: [0.2, 0.4]},
        "alike": {1.5: [0.008, 0.04]},
        "better": {3: [1e-4, 2e-4]},
        "few": {0.5: [1, 1]},
    }
    rows = [row for seed in range(4) for row in rates("mine", seed, ours)]
    rows += [row for name, curve in theirs.items() for seed in range(4) for row in rates(name, seed, curve)]
    return pd.DataFrame(rows)


def test_at_equal_bits_says_who_is_better_where_the_interval_does():
    table = compared()
    found = at_equal_bits(table, ["worse", "alike", "better", "few"], ["mine", "absent"], "bits").set_index("system")
    assert found["better"].to_dict() == {"worse": "ours", "alike": "neither", "better": "theirs", "few": "no rate"}
    assert found.loc["worse", "our_kl"] == pytest.approx((0.01 + 0.03) / 2)  # between 0.1 and 0.001, 0.3 and 0.003
    assert found.loc["better", "our_kl"] == pytest.approx(0.002)  # its most bits
    assert found.loc["alike", "low"] < 1 < found.loc["alike", "high"]


def test_windows_are_paired_by_seed_and_broken_ones_count_as_lost():
    table = compared()
    without = table[~((table["system"] == "mine") & (table["seed"] == 0))]
    alike = at_equal_bits(without.replace({"mine": "ours"}), ["worse"], ["ours"], "bits")
    assert alike["ratio"].item() == pytest.approx(at_equal_bits(table, ["worse"], ["mine"], "bits")["ratio"].item())
    table.loc[(table["system"] == "mine") & (table["seed"] == 1), "kl_each"] = "nan 0.1"
    assert at_equal_bits(table, ["worse"], ["mine"], "bits")["better"].item() == "neither"


def test_a_proxy_that_ranks_as_the_task_does_has_correlation_1_and_bands_are_kept_apart():
    rows = [
        {"model": "m", "system": f"s{i}", "nominal_bits": 0, "bits_per_value": i / 10, "x": 1 - i / 40, "x_exact": 1.0,
         "good": i, "bad": (7 * i) % 12, "top1": 1 - i, "evr": 0.5}
        for i in range(12)
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    found = proxy_correlations(table, ["good", "bad", "top1"], ["x"], {"all": [0, 9], "few": [0.55, 9]})
    found = found.set_index(["bits", "proxy"])
    assert found.loc[("all", "good"), "correlation"] == pytest.approx(1) == found.loc[("all", "top1"), "low"]
    assert found.loc[("all", "bad"), "low"] < found.loc[("all", "bad"), "correlation"] < 1
    assert found.loc[("few", "good"), "systems"] == 6


@pytest.mark.parametrize(("name", "function"), [("10_retrieval", retrieval), ("11_frontier", frontier)])
def test_the_code_still_tries_the_systems_of_the_committed_table(name, function):
    tried = {case.arguments["system"] for case in function.cases(**tables.provenance(name)["parameters"])}
    assert tried == set(tables.stored(name)[0]["system"])
