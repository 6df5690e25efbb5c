"""Pages on other models: every profile's entries are parameters, and a page runs on any model and text to its end."""

import pytest
import small_models

from vqkv.data.corpus import HUB_CORPORA, SPLITS, of_split
from vqkv.models.load import KNOWN_CONFIGS
from vqkv.study.driver import Study
from vqkv.study.pages import HOLDS, load_profile, notebook_parameters
from vqkv.study.tables import repository_root

NAMES = {
    "gpt2": "gpt2", "tinyllama-1.1b": "llama", "llama3.2-3b": "llama", "llama3-8b": "llama", "mistral-7b": "mistral",
    "gemma-7b": "gemma", "qwen2.5-7b": "qwen2",
}  # fmt: skip


@pytest.fixture(scope="module")
def pages():
    return {path.stem: notebook_parameters(path) for path in sorted(repository_root().glob("notebooks/*.ipynb"))}


@pytest.mark.parametrize("name", [*NAMES, "smoke", "quick"])
def test_every_entry_is_a_parameter_of_the_right_type(name, pages):
    study, settings = Study(profile=name), load_profile(name)
    parameters = pages | {"*": {parameter for page in pages.values() for parameter in page}}
    assert all(set(entries) <= set(parameters[page]) for page, entries in settings.items())
    for path, injected in study.injected.items() if name in NAMES else ():
        corpus, timed = injected.get("corpus", "pg19"), path.stem[:2] in ("08", "09")
        assert {of_split(corpus, split) for split in SPLITS} <= set(HUB_CORPORA)
        assert injected.get("second_model", "") == ""
        if "device" in pages[path.stem]:
            assert injected["device"] in (("cuda",) if timed else ("cuda", "auto"))
        assert injected.get("model", settings["*"]["model"]) in KNOWN_CONFIGS, path.stem


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
