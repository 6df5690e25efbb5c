"""The README's code runs, and its numbers are those of the committed tables."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from vqkv.models import BUNDLED

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
TIMED = {
    ("rvq_encode", "residual 8x2048 d=32"): "encode: residual VQ, 8x2048",
    ("rvq_decode", "residual 8x2048 d=32"): "decode: residual VQ, 8x2048",
    ("affine_encode", "int4"): "encode: int4",
    ("affine_decode", "int4"): "decode: int4",
    ("grid_encode", "grid 256"): "encode: HIGGS, 256 points",
}


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_code_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {})


def test_the_results_table_is_the_committed_one():
    rows = pd.read_csv(ROOT / "results/06_systems.csv").set_index(["label", "model"])
    at_two_bits = rows.query("1.5 < bits_per_value < 2.6").xs("vqkv/llama-mini", level="model")
    for label in at_two_bits.index:
        cells = [label]
        for model in ("vqkv/llama-mini", "vqkv/gpt2-mini"):
            row = rows.loc[(label, model)]
            cells += [f"{row.bits_per_value:.2f}", f"{row.bits_8k:.2f}", f"{row.kl_mean:.4f}"]
        line = f"| {' | '.join(cells)} |"
        assert line in TEXT, line


@pytest.mark.parametrize(
    "label",
    [
        "higgs 2",
        "aqua higgs 2, no predictor",
        "aqua higgs 2",
        "aqua higgs 2, GPTQ 4 bits",
        "vqllm 7",
        "aqua vqllm 7",
        "aqua vqllm 3",
    ],
)
def test_the_predictors_table_is_the_committed_one(label):
    rows = pd.read_csv(ROOT / "results/07_ablation.csv").set_index(["label", "model"])
    cells = [label]
    for model in ("vqkv/llama-mini", "vqkv/gpt2-mini"):
        row = rows.loc[(label, model)]
        cells += [f"{row.bits_per_value:.2f}", f"{row.bits_8k:.2f}", f"{row.kl_mean:.5f}"]
    assert f"| {' | '.join(cells)} |" in TEXT


def test_the_bench_table_is_the_committed_one():
    table = pd.read_csv(ROOT / "results/09_speed.csv")
    for (operation, form), label in TIMED.items():
        rows = table[(table["operation"] == operation) & (table["format"] == form)]
        rows = rows[rows["bound_ms"] == rows["bound_ms"].max()]
        ours = rows[rows["implementation"].str.startswith("vqkv")]["median"].item()
        for row in rows.itertuples():
            line = f"| {label} | {row.implementation} | {row.median:.2f} | {row.median / ours:.1f}x |"
            assert line in TEXT, line


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_the_models_table_is_what_the_cards_say(name):
    log = json.loads((BUNDLED[name] / "training.json").read_text())
    assert re.search(rf"\| `{name}` \|.*\| {log['tokens'] / 1e6:.1f}M \| {log['held_out'][-1][1]:.3f} \|", TEXT)


def test_every_link_to_a_file_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("http") or (ROOT / target).exists(), target
