"""What takes seconds to import waits until it is used: all of it for ``import vqkv`` and ``vqkv --help``; for a model
and a preset torch's compiler and what draws figures, runs pages, fetches data or compiles loops."""

import subprocess
import sys

import pytest

import vqkv

NEVER = (
    "scipy.stats", "pandas", "matplotlib", "papermill", "nbformat", "nbconvert", "datasets", "lm_eval", "dask",
    "distributed", "faiss", "hqq", "optimum.quanto", "torch._inductor.compile_fx", "numba",
)  # fmt: skip
AT_ALL = ("torch", "transformers", "numpy")
STUDY = ("matplotlib", "datasets", "lm_eval", "dask", "distributed", "nbconvert", "faiss")
LOADED = "model, tokenizer = vqkv.load_model('vqkv/llama-mini')\n"


def imported(script: str, *names: str) -> list[str]:
    """Those of ``names`` that are imported when a new process has run ``script``."""
    script = f"{script}\nimport sys\nprint([name for name in {names} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return eval(found.stdout.splitlines()[-1])


def test_the_package_alone_imports_nothing():
    assert imported("import vqkv, vqkv.cli", *AT_ALL, *NEVER) == []


@pytest.mark.parametrize("also", ["", "from vqkv import presets; presets.best(bits=1.8, context=8192, kv_width=128)"])
def test_a_model_and_a_preset_import_only_what_they_need(also):
    assert imported(f"import vqkv\n{LOADED}{also}", *NEVER) == []


def test_the_studys_driver_imports_nothing_that_only_pages_need():
    assert imported("import vqkv.study.driver", *STUDY) == []


def test_functions_win_on_modules_of_their_name_and_every_name_is_there():
    script = "import vqkv.calibration.calibrate, vqkv.evaluation.evaluate, vqkv.models.capture, vqkv\n"
    script += "from vqkv import *\nassert all(callable(getattr(vqkv, n)) and n in dir(vqkv) for n in vqkv.__all__)\n"
    script += "assert calibrate is vqkv.calibrate and vqkv.presets.make and vqkv.capture.__name__ == 'capture'"
    assert imported(script, "torch") == ["torch"]
    with pytest.raises(AttributeError, match="no attribute 'compress'"):
        vqkv.compress  # noqa: B018


@pytest.mark.parametrize("first", ["import vqkv", "import transformers.modeling_utils\nimport vqkv"])
def test_a_model_can_be_set_to_packed_attention_once_vqkv_is_used(first):
    use = "from transformers import AutoModelForCausalLM as auto\nfrom vqkv.models.load import BUNDLED\n"
    use += "auto.from_pretrained(BUNDLED['vqkv/llama-mini'], attn_implementation='vqkv_packed')"
    before = "" if "transformers" in first else f"\n{LOADED}model.set_attn_implementation('vqkv_packed')"
    assert imported(f"{first}{before}\n{use}", "torch") == ["torch"]


def test_hqq_is_imported_when_its_cache_quantizes():
    pytest.importorskip("hqq")
    script = "import sys, torch, vqkv.models, transformers.cache_utils as c\nassert 'hqq' not in sys.modules\n"
    script += "layer = c.HQQQuantizedLayer(q_group_size=16)\nx = torch.randn(1, 1, 8, 16)\n"
    script += (
        "layer.update(x, x)\nkeys, _ = layer.update(x[:, :, :0], x[:, :, :0])\nassert (keys - x).abs().max() < 0.5"
    )
    assert imported(script, "hqq") == ["hqq"]
