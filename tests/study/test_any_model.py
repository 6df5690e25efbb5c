"""A page on a model of another shape than the committed ones and on one text file: it runs to the end."""

import small_models

from vqkv.study.driver import Study
from vqkv.study.pages import HOLDS


def test_a_page_runs_on_any_model_and_says_which_claims_hold(tmp_path):
    """Most layers of this Gemma attend to the last 10 tokens only."""
    text = "".join(f"Line {i} is about {i * i} and {i % 7} of them.\n" for i in range(3000))
    (tmp_path / "mine.txt").write_text(text, encoding="utf-8")
    model = str(small_models.make("gemma3", tmp_path / "mine", small_models.SLIDING["gemma3"]()))
    parameters = {"model": model, "corpus": str(tmp_path / "mine.txt"), "num_seqs": 1, "seq_len": 64}
    study = Study(only=["01"], profile="smoke", parameters=parameters, out=tmp_path / "out")
    (page,) = study.notebooks
    assert study.run() == {} and study.refused == {page.stem: []}
    verdicts = [*study.claims[page.stem].values()]
    assert len(verdicts) == sum('"assert ' in line for line in page.read_text().splitlines())
    assert all(verdict.startswith((HOLDS, "does not hold", "cannot be asked")) for verdict in verdicts)
    assert any(verdict.startswith("does not hold here") for verdict in verdicts)
    assert (tmp_path / "out" / "figures").is_dir() and not (tmp_path / "out" / "failed").exists()
