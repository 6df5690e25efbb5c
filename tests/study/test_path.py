"""The way of a row: from ``evaluate`` to the figure through few files."""

import sys
from pathlib import Path

import pandas as pd

import vqkv
from vqkv.study import experiments, figures, steering, tables

PACKAGE = str(Path(vqkv.__file__).parent) + "/"
ASKED = {"seeds": [0], "facts": {}, "chunk_size": 16}


def holds(value, number: float) -> bool:
    """Whether an argument or a result has the number in it."""
    if isinstance(value, dict | list | tuple):
        return any(holds(each, number) for each in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, pd.DataFrame):
        return "kl_mean" in value and number in set(value["kl_mean"])
    return isinstance(value, float) and float(f"{value:.6g}") == number


def test_a_row_passes_eight_files_at_most(llama_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(steering, "current", steering.Steering(str(tmp_path)))
    subject, seen = experiments.Subject(llama_folder, "python-stdlib", [1, 64], [2, 64]), []

    def watch(frame, event, result):
        path = frame.f_code.co_filename
        if event in ("call", "return") and path.startswith(PACKAGE):
            given = result if event == "return" else [*frame.f_locals.values()]
            if isinstance(given, dict | list | tuple | pd.DataFrame):
                seen.append((path.removeprefix(PACKAGE), given))

    quantizer = {"num_quantizers": 1, "codebook_size": 4, "group_size": 32}
    sys.setprofile(watch)
    try:
        rows = tables.table("toy", experiments.grouping, {"subject": subject} | ASKED | {"quantizer": quantizer})
        figures.show(figures.grouping_bars(rows), "toy", rows)
    finally:
        sys.setprofile(None)
    passed = {path for path, given in seen if holds(given, rows["kl_mean"][0])}
    assert {"evaluation/evaluate.py", "study/tables.py", "study/figures/codebooks.py"} <= passed and len(passed) <= 8
