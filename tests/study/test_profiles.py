"""The profiles of published models: every entry is a parameter, every size fits, every architecture runs on a page."""

import corpus_folders as folders
import pytest
import small_models
from transformers import AutoConfig

from vqkv.data.corpus import HUB_CORPORA, SPLITS, of_split
from vqkv.evaluation.footprint import architecture
from vqkv.models.load import KNOWN_CONFIGS
from vqkv.study.driver import Study
from vqkv.study.experiments.audit.shapes import CONFIGS
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


def test_a_profile_has_what_it_leaves_out_from_the_one_it_is_like():
    qwen, base = load_profile("qwen2.5-7b"), load_profile("llama3-8b")  # through Llama-3.2-3B's
    assert qwen["09_kernels"] == base["09_kernels"] and qwen["02_codebook_learning"] == {
        "layer": 14, "vectors_per_step": base["02_codebook_learning"]["vectors_per_step"]
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_the_model_s(name, pages):
    settings = load_profile(name)
    config = AutoConfig.for_model(**KNOWN_CONFIGS[settings["*"]["model"]])
    assert config.model_type == NAMES[name]
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    assert head_dim % settings["*"]["group_size"] == 0
    for page, defaults in pages.items():
        found = defaults | {k: v for k, v in settings["*"].items() if k in defaults} | settings.get(page, {})
        longest = max(found.get("seq_len", 0), found.get("longest", 0), found.get("prompt_len", 0))
        if page.startswith("05"):
            longest = max(found["prompt_len"], found["steps"]) + found["new_tokens"]
        if page.startswith("08"):
            longest = max(longest, found["loss"]["seq_len"])
            assert found["loss"]["chunk_size"] < found["loss"]["seq_len"]
        if "model" in defaults:
            assert longest <= text.max_position_embeddings
            assert longest <= (getattr(text, "sliding_window", None) or longest)
        if "layer" in found:
            assert found["layer"] < text.num_hidden_layers
        assert found.get("chunk_size", 1) < found.get("seq_len", 2)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("openai-community/gpt2", 124.4), ("TinyLlama/TinyLlama_v1.1", 1100), ("meta-llama/Llama-3.2-3B", 3213),
     ("meta-llama/Meta-Llama-3-8B", 8030), ("mistralai/Mistral-7B-v0.1", 7242), ("google/gemma-7b", 8538),
     ("Qwen/Qwen2.5-7B", 7616), ("Llama-2-7B", 6738)],
)  # fmt: skip
def test_known_sizes_make_the_published_number_of_parameters(name, millions):
    settings = (KNOWN_CONFIGS | CONFIGS)[name] | ({"sliding_window": None} if "mistral" in name else {})
    model = architecture({key: value for key, value in settings.items() if key != "source"}, "bfloat16")
    assert abs(sum(parameter.numel() for parameter in model.parameters()) / 1e6 / millions - 1) < 0.002


def test_the_first_page_of_a_profile_runs_with_other_models_and_data(tmp_path, monkeypatch):
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "cache"))
    model = str(small_models.make("gpt2", tmp_path / "model"))
    corpus = f"wikitext@{folders.wikitext(tmp_path / 'wiki', articles=200)}"
    small = {"model": model, "corpus": corpus, "device": "cpu", "seq_len": 64, "num_seqs": 2}
    small |= {"chunk_size": 16}
    study = Study(only=["01"], profile="gpt2", parameters=small, out=tmp_path / "out")
    assert study.run() == {}
    assert (tmp_path / "out/results/01_magnitudes.csv").is_file()
