import hashlib
import json

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.colors import is_color_like

from vqkv import figures, tables
from vqkv.errors import DataError
from vqkv.experiments.predictability import catalogue


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


def evr_rows(models, reach, seeds):
    """A table like ``experiments.predictability``'s, with an EVR that tells the sources apart."""
    variants = [("trained", 0), *(("untrained", seed) for seed in seeds)]
    return pd.DataFrame(
        {"model": model, "variant": variant, "seed": seed, "group": group, "target": probe.target}
        | {"sources": probe.sources, "layer": layer, "evr": 1 - 0.5 / (1 + i + layer + seed), "bits": 0.5 + i}
        for model in models
        for variant, seed in variants
        for group, probes in catalogue(reach).items()
        for i, probe in enumerate(probes)
        for layer in range(4)
        if probe.exists(layer)
    )


@pytest.mark.parametrize(
    ("models", "reach", "seeds"), [(["m"], 1, []), (["vqkv/llama-mini", "vqkv/gpt2-mini"], 3, [0, 1])]
)
def test_evr_bars_show_every_source_once(models, reach, seeds):
    table = evr_rows(models, reach, seeds)
    fig = figures.evr_bars(table, tables.published("aqua_quantizer_evr"))
    for ax, target in zip(fig.axes, "KV", strict=True):
        labels = [label.get_text() for label in ax.get_yticklabels()]
        assert len(labels) == len(set(labels)) >= 8 and len(ax.patches) == len(labels) * len(models)
        assert sum("★" in label for label in labels) == (2 if target == "V" else 0)
        mine = table[
            (table["target"] == target) & (table["sources"] == f"{target}-1") & (table["variant"] == "trained")
        ]
        assert ax.patches[0].get_width() == pytest.approx(mine[mine["model"] == models[0]]["evr"].mean())
        diamonds = [line for line in ax.lines if line.get_marker() == "D" and len(line.get_xdata())]
        assert len(diamonds) == (len(labels) * len(models) if seeds else 0)
    assert fig.axes[0].patches[0].get_y() < fig.axes[0].patches[1].get_y()
    plt.close(fig)


def test_evr_heatmap_has_a_cell_for_every_layer_and_leaves_out_what_does_not_exist():
    fig = figures.evr_heatmap(evr_rows(["m", "n"], 3, [0]))
    panels = [ax for ax in fig.axes if ax.images]
    assert len(panels) == 4
    for ax in panels:
        image = ax.images[0].get_array()
        assert image.shape == (len(ax.get_yticklabels()), 4)
        texts = [text.get_text() for text in ax.texts]
        assert sum(text == "" for text in texts) == int(pd.isna(pd.DataFrame(image)).to_numpy().sum()) > 0
    plt.close(fig)


def test_quantised_inputs_draws_a_line_per_source():
    rows = [
        {"model": "m", "target": "V", "sources": sources, "inputs": inputs, "layer": layer, "evr": 0.9 - 0.1 * i}
        for sources in ("K", "V-1+K", "K-1+V-1")
        for i, inputs in enumerate(("exact", "2 bits"))
        for layer in range(2)
    ]
    fig = figures.quantised_inputs(pd.DataFrame(rows))
    assert [list(line.get_ydata()) for line in fig.axes[0].lines] == [[0.9, 0.8]] * 3
    assert [label.get_text() for label in fig.axes[0].get_xticklabels()] == ["exact", "2 bits"]
    plt.close(fig)
