"""Tables and the figures drawn from them, in files with their provenance."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from vqkv.errors import DataError, FormatError
from vqkv.study import figures, steering, tables

calls = []


def experiment(seed: int = 0, scale: float = 1.0, sizes=()) -> pd.DataFrame:
    calls.append(seed)
    rows = [["vq", "01", 1, 1.0, scale / 3, True], ["none", "1e3", 2, 2.0, np.nan, False]]
    rows.append(["NA", None, 3, 3.0, np.inf, True])
    return pd.DataFrame(rows, columns=["system", "code", "count", "whole", "mse", "on"])


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "repository_root", lambda: tmp_path)
    calls.clear()
    yield tmp_path
    plt.close("all")


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_fresh_and_stored_are_the_same_frame_with_its_types_and_words(root):
    fresh = tables.table("toy", experiment, {"seed": 1, "sizes": (2, 3)})
    stored = tables.table("toy", experiment, {"seed": 1, "sizes": [2, 3]})
    pd.testing.assert_frame_equal(fresh, stored)
    assert calls == [1]
    assert fresh.attrs["vqkv"] == {"root": str(root), "name": "toy", "fresh": True}
    assert stored.attrs["vqkv"]["fresh"] is False
    assert stored["system"].tolist() == ["vq", "none", "NA"]
    assert stored["code"].tolist()[:2] == ["01", "1e3"] and stored["code"].isna().tolist() == [False, False, True]
    kinds = stored[["count", "whole", "mse", "on"]].dtypes.astype(str).tolist()
    assert kinds == ["int64", "float64", "float64", "bool"]
    assert stored["mse"][0] == 0.333333 and np.isnan(stored["mse"][1]) and np.isinf(stored["mse"][2])


def test_other_parameters_leave_the_committed_table_alone(root, monkeypatch):
    tables.table("toy", experiment, {"seed": 1})
    committed = contents(root)
    other, again = (tables.table("toy", experiment, {"seed": 2, "scale": 5.0}) for _ in range(2))
    folder = Path(other.attrs["vqkv"]["root"])
    assert folder.parent == root / "runs" and folder.name.startswith("toy-") and len(folder.name) == len("toy-") + 10
    assert contents(root).items() >= committed.items()
    assert calls == [1, 2] and not again.attrs["vqkv"]["fresh"]
    monkeypatch.setattr(steering, "current", steering.Steering(str(root / "elsewhere")))  # there the last one stays
    for seed in (1, 2):
        tables.table("toy", experiment, {"seed": seed})
    assert tables.provenance("toy", root / "elsewhere")["parameters"] == {"seed": 2}
    assert not (root / "elsewhere/runs").exists()


def test_recompute_gives_equal_bytes_and_a_failing_function_loses_nothing(root, monkeypatch):
    tables.table("toy", experiment, {"seed": 1})
    before = (root / "results/toy.csv").read_bytes()
    assert tables.table("toy", experiment, {"seed": 1}, recompute=True).attrs["vqkv"]["fresh"]
    monkeypatch.setattr(steering, "current", steering.Steering(recompute=True))
    tables.table("toy", experiment, {"seed": 1})
    assert calls == [1, 1, 1] and (root / "results/toy.csv").read_bytes() == before

    def broken(seed):
        raise KeyboardInterrupt

    before = contents(root)
    with pytest.raises(KeyboardInterrupt):
        tables.table("toy", broken, {"seed": 1})
    assert contents(root) == before


@pytest.mark.parametrize("change", [lambda data: data[:-20], lambda data: data.replace(b"0.333333", b"0.1")[1:]])
def test_altered_files_are_refused_until_recomputed(root, change):
    tables.table("toy", experiment, {"seed": 1})
    for name, remedy in (("toy.csv", "git checkout.*--recompute"), ("toy.json", "restore it with git, or remove it")):
        path = root / "results" / name
        path.write_bytes(change(path.read_bytes()))
        with pytest.raises(FormatError, match=rf"{name}.*{remedy}"):
            tables.table("toy", experiment, {"seed": 1})
        if name == "toy.csv":
            tables.table("toy", experiment, {"seed": 1}, recompute=True)


def test_parameters_are_literals_results_fit_a_csv_and_a_named_index_becomes_columns(root):
    for value in (np.ones(2), float("nan"), object()):
        with pytest.raises(DataError, match="parameters of table 'toy'"):
            tables.table("toy", experiment, {"seed": value})
    with pytest.raises(DataError, match="column 'x'"):
        tables.table("toy", lambda: pd.DataFrame({"x": [[1], [2]]}), {})
    assert not (root / "results").exists()
    frame = tables.table("toy", lambda: pd.DataFrame({"k": ["a", "b"], "v": [1, 2]}).set_index("k"), {})
    assert frame.columns.tolist() == ["k", "v"]


def test_reading_a_page_rewrites_nothing_and_runs_are_kept_apart(root, monkeypatch):
    def show(seed=0):
        makes = ("toy", lambda seed: pd.DataFrame({"x": [seed, 1, 2]}), {"seed": seed})
        _, table = (tables.table(*makes) for _ in range(2))  # computed, then loaded
        fig, ax = plt.subplots()
        ax.plot(table["x"])
        figures.show(fig, "toy", table)

    path = root / "figures/toy.svg"
    show()  # missing figures are drawn
    assert path.is_file() and path.write_text("committed")
    show()
    show(seed=5)
    (run,) = (root / "runs").iterdir()
    assert (run / "figures/toy.svg").is_file() and path.read_text() == "committed"
    monkeypatch.setattr(steering, "current", steering.Steering(str(root)))
    show()
    assert path.read_text() != "committed"
