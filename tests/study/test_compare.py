"""``vqkv compare``: a table of a model's own numbers, planned to the minutes given, kept from row to row."""

import inspect
import json
from types import SimpleNamespace

import pandas as pd
import pytest

from vqkv import recommend
from vqkv.errors import DataError
from vqkv.study import compare as module
from vqkv.study.compare import compare, planned
from vqkv.study.experiments.comparison import SYSTEMS, comparison

SMALL = [((4, 256), (2, 256), 2, (384, 448))]


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Two systems, at a size that takes seconds; nothing of it in the user's cache."""
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SIZES", SMALL)
    monkeypatch.setattr(module, "SYSTEMS", {name: module.SYSTEMS[name] for name in ("int4", "live 2.25")})


def test_table_page_and_notebook(small, tmp_path):
    said = []
    table = compare("vqkv/llama-mini", "python", 15, out=tmp_path / "out", say=said.append)
    assert list(table["system"]) == ["int4", "live 2.25"] and table.notna().all(axis=None)
    assert (table["bits_with_side"] > table["bits"]).all() and (table["kl_low"] <= table["kl"]).all()
    assert "about" in said[0] and table["preset"][1] == "presets.live(bits=2.25)"
    page = (tmp_path / "out/compare.html").read_text()
    assert "presets.quanto(bits=4)" in page and "vqkv/llama-mini" in page
    own = recommend("vqkv/llama-mini", 4096).set_index("system")
    assert own.loc["quanto 4", ["kl", "measured_on"]].tolist() == [table["kl"][0], "vqkv/llama-mini"]
    assert own.loc["live 2.25", "preset"] == table["preset"][1] and own.loc["fp8", "measured_on"] == "SmolLM2-135M"


def test_a_preset_that_does_not_fit_the_model_is_left_out(small, tmp_path, monkeypatch):
    """And the notebook is run where a folder of the package's name hides nothing."""
    monkeypatch.setitem(SYSTEMS, "int4", ("vqllm", {"codebook_size": 1 << 16}, ""))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vqkv").mkdir()
    table, said = compare("vqkv/llama-mini", "python", say=(lines := []).append), "\n".join(lines)
    assert list(table["system"]) == ["live 2.25"] and "left out: int4 (" in said and "in comparison" not in said
    assert "int4" in (tmp_path / "compare-llama-mini/compare.html").read_text()


def test_it_goes_on_after_a_kill(small, tmp_path, monkeypatch):
    row, done = comparison.row, []

    def killed(subject, system, **settings):
        if done and system == "live 2.25" and len(done) == 1:
            done.append("killed")
            raise KeyboardInterrupt
        done.append(system)
        return row(subject=subject, system=system, **settings)

    killed.__signature__ = inspect.signature(row)
    monkeypatch.setattr(comparison, "row", killed)
    with pytest.raises(KeyboardInterrupt):
        compare("vqkv/llama-mini", "python", out=tmp_path / "out", say=lambda _: None)
    assert list(pd.read_csv(tmp_path / "out/compare.csv")["system"]) == ["int4"]
    compare("vqkv/llama-mini", "python", out=tmp_path / "out", say=lambda _: None)
    assert done == ["int4", "killed", "live 2.25"]


def test_the_plan_fits_the_minutes(mini, monkeypatch):
    monkeypatch.setattr(module, "seconds_per_token", lambda model: 1e-3)
    most, some, few = (planned(mini[0], minutes, module.SIZES) for minutes in (60, 5, 0.6))
    for plan, minutes in ((most, 60), (some, 5), (few, 0.6)):
        assert sum(plan.seconds.values()) <= 60 * minutes
    assert most.train[0] * most.train[1] > some.train[0] * some.train[1] and not most.left_out
    assert few.left_out and [*few.seconds] == [*module.SYSTEMS][: len(few.seconds)]
    with pytest.raises(DataError, match="minutes are too few for anything: int4 alone takes"):
        planned(mini[0], 0.01, module.SIZES)


def test_wide_models_go_without_kvtc(mini, monkeypatch):
    monkeypatch.setattr(module, "WIDEST", 100)
    assert "channels takes" in planned(mini[0], 60, module.SIZES).left_out["KVTC 2"]


def test_ten_words_are_too_few(small, tmp_path):
    (tmp_path / "text.txt").write_text("ten words " * 5)
    with pytest.raises(DataError, match="holds only 0 windows"):
        compare("vqkv/llama-mini", str(tmp_path / "text.txt"), out=tmp_path / "out", say=lambda _: None)
    assert not (tmp_path / "out/compare.csv").exists()


def test_what_is_said_of_left_out_systems_is_kept(small, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=iter((0, 10_000)).__next__))
    compare("vqkv/llama-mini", "python", 1, out=tmp_path / "out", say=lambda _: None)
    about = json.loads((tmp_path / "out/compare.json").read_text())
    assert about["left_out"] == {"live 2.25": "the minutes were over"}
