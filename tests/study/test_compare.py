"""``vqkv compare``: a table of a model's own numbers, planned to the minutes given, kept from row to row."""

import inspect
import json
from types import SimpleNamespace

import pandas as pd
import pytest

from vqkv import recommend
from vqkv.errors import DataError
from vqkv.study import compare as module
from vqkv.study.compare import SYSTEMS, compare, comparison, planned


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Two systems, at a size that takes seconds, into the current folder; nothing of it in the user's cache."""
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "SIZES", [((2, 256), (2, 256), 2, (300, 364))])
    monkeypatch.setattr(module, "SYSTEMS", {name: module.SYSTEMS[name] for name in ("int4", "HIGGS 3")})


def test_table_page_and_what_recommend_then_says(small, tmp_path, monkeypatch):
    """The notebook is run where a folder of the package's name hides nothing. Time is that of reading in place."""
    timed, attended = module.timed_run, set()
    record = lambda going, *about, **more: attended.add(going[""].model.config._attn_implementation)  # noqa: E731
    monkeypatch.setattr(module, "timed_run", lambda *about, **more: record(*about, **more) or timed(*about, **more))
    (tmp_path / "vqkv").mkdir()
    table, said = compare("vqkv/llama-mini", "python", say=(lines := []).append), "\n".join(lines)
    assert list(table["system"]) == ["int4", "HIGGS 3"] and table.notna().all(axis=None) and "about" in said
    assert attended == {"vqkv_packed"} and (table["bits_with_side"] > table["bits"]).all()
    assert (table["kl_low"] <= table["kl"]).all()
    page = (tmp_path / "compare-llama-mini/compare.html").read_text()
    assert "presets.quanto(bits=4)" in page and "vqkv/llama-mini" in page
    own = recommend("vqkv/llama-mini", 4096).set_index("system")
    assert own.loc["quanto 4", ["kl", "measured_on"]].tolist() == [table["kl"][0], "vqkv/llama-mini"]
    assert own.loc["higgs 3", "preset"] == table["preset"][1] == "presets.higgs(bits=3, recent_window=0)"
    assert own.loc["fp8", "measured_on"] == "SmolLM2-135M"


def test_it_goes_on_after_a_kill_and_what_is_left_out_is_kept(small, tmp_path, monkeypatch):
    done = []

    def killed(subject, system, **settings):
        done.append(system)
        if len(done) == 2:
            raise KeyboardInterrupt
        return {"system": system, "kl": 0.1}

    killed.__signature__ = inspect.signature(comparison.row)
    monkeypatch.setattr(comparison, "row", killed)
    monkeypatch.setattr(module, "show", lambda folder: None)
    with pytest.raises(KeyboardInterrupt):
        compare("vqkv/llama-mini", "python", out=tmp_path / "out", say=lambda _: None)
    assert list(pd.read_csv(tmp_path / "out/compare.csv")["system"]) == ["int4"]
    compare("vqkv/llama-mini", "python", out=tmp_path / "out", say=lambda _: None)
    assert done == ["int4", "HIGGS 3", "HIGGS 3"]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=iter((0, 10_000)).__next__))
    compare("vqkv/llama-mini", "python", 1, out=tmp_path / "out", say=lambda _: None)
    left_out = json.loads((tmp_path / "out/compare.json").read_text())["left_out"]
    assert left_out == {"HIGGS 3": "the minutes were over"}


def test_what_does_not_fit_the_model_is_left_out_and_ten_words_are_too_few(small, tmp_path, monkeypatch):
    monkeypatch.setitem(SYSTEMS, "int4", ("vqllm", {"codebook_size": 1 << 16}, ""))
    monkeypatch.setattr(module, "SYSTEMS", {"int4": SYSTEMS["int4"]})
    with pytest.raises(DataError, match="none of the presets can be calibrated on vqkv/llama-mini"):
        compare("vqkv/llama-mini", "python", say=lambda _: None)
    (tmp_path / "text.txt").write_text("ten words " * 5)
    with pytest.raises(DataError, match="holds only 0 windows"):
        compare("vqkv/llama-mini", str(tmp_path / "text.txt"), say=lambda _: None)


def test_the_plan_fits_the_minutes(mini, monkeypatch):
    monkeypatch.setattr(module, "seconds_per_token", lambda model: 1e-3)
    most, some, few = (planned(mini[0], minutes, module.SIZES) for minutes in (60, 5, 0.6))
    for plan, minutes in ((most, 60), (some, 5), (few, 0.6)):
        assert sum(plan.seconds.values()) <= 60 * minutes
    assert most.train[0] * most.train[1] > some.train[0] * some.train[1] and not most.left_out
    assert few.left_out and [*few.seconds] == [*module.SYSTEMS][: len(few.seconds)]
    with pytest.raises(DataError, match="minutes are too few for anything: int4 alone takes"):
        planned(mini[0], 0.01, module.SIZES)
    monkeypatch.setattr(module, "WIDEST", 100)
    assert "channels takes" in planned(mini[0], 60, module.SIZES).left_out["KVTC 2"]
