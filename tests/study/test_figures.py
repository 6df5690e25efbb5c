import hashlib
import json

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from vqkv.study import figures, tables


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "repository_root", lambda: tmp_path)
    with plt.rc_context():
        figures.use_style()
        yield tmp_path
    plt.close("all")


def toy(seed=0):
    return tables.table("toy", lambda seed: pd.DataFrame({"x": [seed, 1, 2]}), {"seed": seed})


def draw(table):
    fig, ax = plt.subplots()
    ax.plot(table["x"], label="vqllm", color=figures.PALETTE["vqllm"])
    ax.legend()
    return fig


def test_files_and_their_hashes(root):
    table = toy()
    figures.save(draw(table), "toy_lines", table)
    recorded = json.loads((root / "results/toy.json").read_text())["figures"]
    assert sorted(recorded) == ["toy_lines.png", "toy_lines.svg"]
    for name, sha256 in recorded.items():
        again = figures.render(draw(table), name[-3:])  # equal figures give equal bytes
        assert (root / "figures" / name).read_bytes() == again and hashlib.sha256(again).hexdigest() == sha256
    assert "<text" in (root / "figures/toy_lines.svg").read_text()


def test_reading_a_page_rewrites_nothing_and_runs_are_kept_apart(root, monkeypatch):
    path = root / "figures/toy.svg"
    figures.save(draw(toy()), "toy", toy())  # missing figures are drawn
    path.write_text("committed")
    figures.save(draw(toy()), "toy", toy())
    toy(seed=5)
    figures.save(draw(toy(seed=5)), "toy", toy(seed=5))
    (run,) = (root / "runs").iterdir()
    assert (run / "figures/toy.svg").is_file() and path.read_text() == "committed"
    monkeypatch.setenv("VQKV_OUT", str(root))
    figures.save(draw(toy()), "toy", toy())
    assert path.read_text() != "committed"


def test_bars_survive_seeds_that_all_agree():
    """The mean of three equal numbers can round to just beyond them; matplotlib refuses a negative error."""
    value = next(v for v in (k / 997 for k in range(1, 997)) if pd.Series([v] * 3).mean() != v)
    rows = [{"model": "m", "quantised": name, "kl_mean": value} for name in figures.GROUPING_COLOURS for _ in range(3)]
    fig = figures.grouping_bars(pd.DataFrame(rows), {"kl_mean": "KL (nats)"})
    assert len(fig.axes[0].patches) == len(figures.GROUPING_COLOURS)
