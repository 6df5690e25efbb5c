"""What takes seconds to import waits until it is used: all of it for ``import vqkv`` and ``vqkv --help``; for a model
and a preset torch's compiler and what draws figures, runs pages, fetches data, compiles loops or starts workers."""

import subprocess
import sys

import pytest

import vqkv

NEVER = (
    "scipy.stats", "pandas", "matplotlib", "papermill", "nbformat", "nbconvert", "datasets", "lm_eval", "dask",
    "distributed", "faiss", "hqq", "optimum.quanto", "torch._inductor.compile_fx", "numba",
)  # fmt: skip
STUDY = ("matplotlib", "datasets", "lm_eval", "dask", "distributed", "nbconvert", "faiss")
LOADED = """import vqkv
from vqkv import presets
model, tokenizer = vqkv.load_model('vqkv/llama-mini')
presets.best(bits=1.8, context=8192, kv_width=128)
model.set_attn_implementation('vqkv_packed')
"""
EVERY_NAME = """import vqkv.calibration.calibrate, vqkv.evaluation.evaluate, vqkv.models.capture, vqkv
from vqkv import *
assert all(callable(getattr(vqkv, name)) and name in dir(vqkv) for name in vqkv.__all__)
assert calibrate is vqkv.calibrate and vqkv.presets.make and vqkv.capture.__name__ == 'capture'
"""  # functions win on modules of their name
HQQ = """import sys, torch, vqkv.models, transformers.cache_utils
assert 'hqq' not in sys.modules
layer, x = transformers.cache_utils.HQQQuantizedLayer(q_group_size=16), torch.randn(1, 1, 8, 16)
layer.update(x, x)
keys, _ = layer.update(x[:, :, :0], x[:, :, :0])
assert (keys - x).abs().max() < 0.5
"""


@pytest.mark.parametrize(
    ("script", "names", "expected"),
    [
        ("import vqkv, vqkv.cli", ("torch", "transformers", "numpy", *NEVER), []),
        (LOADED, NEVER, []),
        ("import vqkv.study.driver", STUDY, []),
        (EVERY_NAME, ("torch",), ["torch"]),
        ("import transformers.modeling_utils, vqkv", ("vqkv.cache.packed_attention",), ["vqkv.cache.packed_attention"]),
        (HQQ, ("hqq",), ["hqq"]),
    ],
    ids=["the package", "a model and a preset", "the study's driver", "every name", "packed attention", "hqq's cache"],
)
def test_a_new_process_imports_only_what_it_needs(script, names, expected):
    if "hqq" in expected:
        pytest.importorskip("hqq")
    script += f"\nimport sys\nprint([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert eval(done.stdout.splitlines()[-1]) == expected


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'compress'"):
        vqkv.compress  # noqa: B018
