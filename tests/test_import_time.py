"""What takes seconds to import waits until it is used: all of it for ``import vqkv`` and ``vqkv --help``; for a model
and a preset torch's compiler and what draws figures, runs pages, fetches data or compiles loops."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

import vqkv

NEVER = (
    "scipy.stats", "pandas", "matplotlib", "papermill", "nbformat", "nbconvert", "datasets", "lm_eval", "dask",
    "distributed", "faiss", "hqq", "optimum.quanto", "torch._inductor.compile_fx", "numba",
)  # fmt: skip
STUDY = ("matplotlib", "datasets", "lm_eval", "dask", "distributed", "nbconvert", "faiss")
STEPS = f"""
import sys
def none_of(*names):
    assert not [name for name in names if name in sys.modules], [name for name in names if name in sys.modules]

import vqkv, vqkv.cli
none_of("torch", "transformers", "numpy", *{NEVER})

from vqkv import presets
model, tokenizer = vqkv.load_model("vqkv/llama-mini")
presets.best(bits=1.8, context=8192, kv_width=128)
model.set_attn_implementation("vqkv_packed")
none_of(*{NEVER})

import vqkv.study.driver
none_of(*{STUDY})

import vqkv.calibration.calibrate, vqkv.evaluation.evaluate, vqkv.models.capture
from vqkv import *
assert all(callable(getattr(vqkv, name)) and name in dir(vqkv) for name in vqkv.__all__)
assert calibrate is vqkv.calibrate and vqkv.capture.__name__ == "capture"  # functions win on modules of their name
none_of("hqq", "torch._inductor.compile_fx")
"""
HQQ = """
import torch, transformers.cache_utils
layer, x = transformers.cache_utils.HQQQuantizedLayer(q_group_size=16), torch.randn(1, 1, 8, 16)
layer.update(x, x)
keys, _ = layer.update(x[:, :, :0], x[:, :, :0])
assert (keys - x).abs().max() < 0.5 and "hqq" in sys.modules
"""
LATER = "import sys, transformers.modeling_utils, vqkv\nassert 'vqkv.cache.packed_attention' in sys.modules"


@pytest.mark.parametrize("script", [STEPS + HQQ * bool(find_spec("hqq")), LATER], ids=["step by step", "transformers"])
def test_a_new_process_imports_only_what_it_needs(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'compress'"):
        vqkv.compress  # noqa: B018
