import hashlib
import json

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.colors import is_color_like

from vqkv.errors import DataError
from vqkv.study import figures, tables


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "repository_root", lambda: tmp_path)
    with plt.rc_context():
        figures.use_style()
        yield tmp_path
    plt.close("all")


def toy(seed=0, recompute=False):
    return tables.table("toy", lambda seed: pd.DataFrame({"x": [seed, 1, 2]}), {"seed": seed}, recompute)


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
        assert hashlib.sha256((root / "figures" / name).read_bytes()).hexdigest() == sha256
    assert "<text" in (root / "figures/toy_lines.svg").read_text()


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_equal_figures_give_equal_bytes(root, kind):
    assert figures.render(draw(toy()), kind) == figures.render(draw(toy()), kind)


def test_reading_a_page_rewrites_nothing(root, monkeypatch):
    figures.save(draw(toy()), "toy", toy(recompute=True))
    path = root / "figures/toy.svg"
    path.write_text("committed")
    figures.save(draw(toy()), "toy", toy())
    assert path.read_text() == "committed"
    monkeypatch.setenv("VQKV_OUT", str(root))
    figures.save(draw(toy()), "toy", toy())
    assert path.read_text() != "committed"


def test_missing_figures_are_drawn_and_runs_kept_apart(root):
    toy()
    figures.save(draw(toy()), "toy", toy())
    before = (root / "figures/toy.svg").read_bytes()
    toy(seed=5)
    figures.save(draw(toy(seed=5)), "toy", toy(seed=5))
    (run,) = (root / "runs").iterdir()
    assert (run / "figures/toy.svg").is_file() and (root / "figures/toy.svg").read_bytes() == before


def test_a_table_from_elsewhere_is_refused(root):
    with pytest.raises(DataError, match=r"vqkv\.tables\.table"):
        figures.save(plt.figure(), "toy", pd.DataFrame({"x": [1]}))


def test_colours():
    assert all(is_color_like(colour) for colour in figures.PALETTE.values())
    systems = ["fp16", "vqllm", "quanto", "hqq", "kivi", "kvquant", "higgs", "vq", "vqq", "pq", "aqua"]
    for together in (
        systems,
        ["contiguous", "strided", "random", "value", "key+value"],
        ["key", "key_post_rope", "value"],
    ):
        assert len({figures.PALETTE[name] for name in together}) == len(together)


def test_bars_survive_seeds_that_all_agree():
    """The mean of three equal numbers can round to just beyond them; matplotlib refuses a negative error."""
    value = next(v for v in (k / 997 for k in range(1, 997)) if pd.Series([v] * 3).mean() != v)
    rows = [{"model": "m", "quantised": name, "kl_mean": value} for name in figures.GROUPING_COLOURS for _ in range(3)]
    fig = figures.grouping_bars(pd.DataFrame(rows), {"kl_mean": "KL (nats)"})
    assert len(fig.axes[0].patches) == len(figures.GROUPING_COLOURS)
