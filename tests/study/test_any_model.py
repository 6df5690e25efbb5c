"""Pages on models of other shapes than the committed ones and on one text file: they run to the end."""

import pytest
import small_models

from vqkv.study.driver import Study
from vqkv.study.pages import HOLDS

PAGES = {  # shape -> a page, its parameters where `smoke` has too long a text for a model of 256 positions
    "gemma3": ("01", {"num_seqs": 1, "seq_len": 64}),  # most of its layers attend to the last 10 tokens only
    "gpt2": (
        "02",
        {"layer": 15, "seq_len": 132, "chunk_size": 33, "train_seqs": 2, "sizes": [1], "systems": ["higgs 2"]},
    ),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "mine.txt"
    path.write_text("".join(f"Line {i} is about {i * i} and {i % 7} of them.\n" for i in range(3000)), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("shape", PAGES)
def test_a_page_runs_on_any_model_and_says_which_claims_hold(shape, text, tmp_path):
    page, parameters = PAGES[shape]
    model = str(small_models.make(shape, tmp_path / "mine", small_models.SLIDING.get(shape, lambda: None)()))
    study = Study(
        only=[page], profile="smoke", parameters=parameters | {"model": model, "corpus": text}, out=tmp_path / "out"
    )
    assert study.run() == {} and study.refused == {study.notebooks[0].stem: []}
    verdicts = [*study.claims[study.notebooks[0].stem].values()]
    asserted = sum('"assert ' in line for line in study.notebooks[0].read_text().splitlines())
    assert len(verdicts) == asserted
    assert all(verdict.startswith((HOLDS, "does not hold", "cannot be asked")) for verdict in verdicts)
    assert any(verdict.startswith("does not hold here") for verdict in verdicts)
    assert (tmp_path / "out" / "figures").is_dir() and not (tmp_path / "out" / "failed").exists()
