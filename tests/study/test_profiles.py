"""The profiles of published models: every entry is a parameter, every size fits, every architecture runs on a page."""

import pytest

from vqkv.data.corpus import HUB_CORPORA, SPLITS, of_split
from vqkv.models.load import KNOWN_CONFIGS
from vqkv.study.driver import Study
from vqkv.study.pages import load_profile, notebook_parameters
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
    known = pages | {"*": {parameter for page in pages.values() for parameter in page}}
    assert all(set(entries) <= set(known[page]) for page, entries in settings.items())
    for path, injected in study.injected.items() if name in NAMES else ():
        corpus, timed = injected.get("corpus", "pg19"), path.stem[:2] in ("08", "09")
        assert {of_split(corpus, split) for split in SPLITS} <= set(HUB_CORPORA)
        assert injected.get("second_model", "") == ""
        if "device" in pages[path.stem]:
            assert injected["device"] in (("cuda",) if timed else ("cuda", "auto"))
        assert injected.get("model", settings["*"]["model"]) in KNOWN_CONFIGS, path.stem
