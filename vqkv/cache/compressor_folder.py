"""A compressor in a folder: one checked safetensors file of what it has learned, and of its settings as JSON."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from vqkv.cache.settings import CacheSettings
from vqkv.codecs.part import codec_from_config
from vqkv.codecs.predictive import ROLES, Prediction
from vqkv.errors import FormatError
from vqkv.runtime.files import claim, load_checked, save_checked

FORMAT, VERSION = "vqkv-compressor", 3
FILE = "compressor.safetensors"


def write(folder, about: dict, learned: dict[str, Tensor]) -> None:
    """Write a compressor: ``about`` is what its constructor takes, as JSON, ``learned`` what its codecs and predictors
    have learned. Raises ``FormatError`` if ``folder`` is a file."""
    folder = Path(folder)
    if folder.is_file():
        raise FormatError(f"{folder} is a file: name a folder for the compressor")
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: tensor.clone() for name, tensor in learned.items()}  # codecs may share what they learned
    save_checked(folder / FILE, {"format": FORMAT, "version": VERSION, **about}, own)


def read(folder, make: Callable):
    """``make(name, codecs, settings, model, notes, predictions)`` of what ``write`` wrote. Raises ``FormatError`` for
    anything missing, cut, damaged or altered."""
    about, tensors = load_checked(
        Path(folder) / FILE, FORMAT, VERSION, "save a compressor with compressor.save_pretrained(...)"
    )
    predictions = {}
    for entry in about["predictions"]:
        role, layer = place = tuple(entry["place"])
        predictor = codec_from_config(entry["predictor"], claim(tensors, f"{layer}.{role}.predictor."))
        predictions[place] = Prediction(predictor, tuple(map(tuple, entry["sources"])))
    codecs = [
        tuple(codec_from_config(config, claim(tensors, f"{layer}.{role}.")) for role, config in zip(ROLES, pair))
        for layer, pair in enumerate(about["codecs"])
    ]
    settings = CacheSettings(**about["settings"])
    return make(about["name"], codecs, settings, about["model"], about["notes"], predictions)
