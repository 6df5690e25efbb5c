# ruff: noqa: F401
"""vqkv: ways to store a KV cache, on one harness, under one byte meter."""

import sys
import warnings
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from vqkv.errors import DataError, FormatError, UnknownNameError

if TYPE_CHECKING:
    from vqkv.cache.compressed import CompressedCache
    from vqkv.cache.compressor import Compressor, compressed
    from vqkv.calibration.calibrate import calibrate
    from vqkv.data.corpus import load_corpus
    from vqkv.evaluation.evaluate import evaluate
    from vqkv.evaluation.recommend import capacity, recommend
    from vqkv.models.capture import capture
    from vqkv.models.load import load_model

# transformers imports tqdm.auto, which would open every page with a warning that widgets are not installed.
warnings.filterwarnings("ignore", message="IProgress not found")

__version__ = version("vqkv")
_MODULES = {  # imported when the name is first asked for: torch and transformers take seconds
    "CompressedCache": "cache.compressed", "Compressor": "cache.compressor", "calibrate": "calibration.calibrate",
    "capacity": "evaluation.recommend", "capture": "models.capture", "compressed": "cache.compressor",
    "evaluate": "evaluation.evaluate", "load_corpus": "data.corpus", "load_model": "models.load",
    "recommend": "evaluation.recommend",
}  # fmt: skip
__all__ = ["DataError", "FormatError", "UnknownNameError", *_MODULES]


def __getattr__(name: str):
    if name == "presets":
        return import_module("vqkv.presets")
    if name not in _MODULES:
        raise AttributeError(f"module 'vqkv' has no attribute {name!r}")
    import_module("vqkv.cache.packed_attention")  # models can then be set to it
    globals()[name] = attribute = getattr(import_module(f"vqkv.{_MODULES[name]}"), name)
    return attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "presets"})


if "transformers.modeling_utils" in sys.modules:
    import_module("vqkv.cache.packed_attention")
