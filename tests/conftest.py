"""Every test runs offline, without a display, and on one thread: under xdist the processes share the cores."""

import gc
import os

os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "OMP_NUM_THREADS"), "1")
os.environ["MPLBACKEND"] = "Agg"

import pytest
import torch

if not torch.cuda.is_available():  # kernels then run on CPU tensors; real compiles happen in processes of their own
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

from vqkv.study.shared import keep_freed_memory

gc.disable()  # while tests are collected: half of that time goes into looking through what thousands of modules hold
torch.set_num_threads(1)
keep_freed_memory()  # faster, see there

LONGEST = ("test_architectures.py", "test_golden.py", "test_architecture.py", "test_readme.py")


def pytest_collection_modifyitems(items) -> None:
    """The longest files go first: at the end one process would wait for the other. Notebooks stay last."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    """A random Llama with 3 layers of 2 KV heads of 32 channels."""
    import small_models

    return str(small_models.make("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def llama(llama_folder):
    """The same, loaded."""
    from vqkv import load_model

    return load_model(llama_folder)[0]


@pytest.fixture(scope="module")
def mini():
    """A bundled model and its tokenizer."""
    from vqkv import load_model

    return load_model("vqkv/llama-mini")


@pytest.fixture(scope="module")
def codecs():
    """One of every kind, fitted."""
    import codec_zoo

    return codec_zoo.fitted_codecs()


@pytest.fixture(scope="session")
def tokenizer():
    """That of the bundled models."""
    from transformers import PreTrainedTokenizerFast

    from vqkv.reference.rows import TOKENIZER_DIR

    return PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)
