"""vqkv: ways to store a KV cache, on one harness, under one byte meter."""

# ruff: noqa: E402

import warnings
from importlib.metadata import PackageNotFoundError, version

# transformers imports tqdm.auto, which would open every page with a warning that widgets are not installed.
warnings.filterwarnings("ignore", message="IProgress not found")

# Some functions bear their module's name; importing them here, eagerly, makes the function win on the package.
from vqkv.cache.compressed import CompressedCache
from vqkv.cache.compressor import Compressor
from vqkv.calibration.calibrate import calibrate
from vqkv.data.corpus import load_corpus
from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.evaluation.capacity import capacity
from vqkv.evaluation.evaluate import evaluate
from vqkv.evaluation.recommend import recommend
from vqkv.models.capture import capture
from vqkv.models.load import load_model

try:
    __version__ = version("vqkv")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [
    "CompressedCache",
    "Compressor",
    "DataError",
    "FormatError",
    "UnknownNameError",
    "calibrate",
    "capacity",
    "capture",
    "evaluate",
    "load_corpus",
    "load_model",
    "recommend",
]
