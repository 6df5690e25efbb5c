"""A compressor in a folder: safetensors and a validated header, of which an altered one is refused."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from vqkv.cache.settings import CacheSettings
from vqkv.codecs.base import Codec, codec_from_config
from vqkv.codecs.exact import Nothing
from vqkv.codecs.part import ALTERED
from vqkv.codecs.predictive import ROLES, Place, Prediction
from vqkv.codecs.predictor_kinds import predictor_from_config
from vqkv.errors import FormatError
from vqkv.runtime.checks import check_head_dim, check_num_kv_heads
from vqkv.runtime.files import claim, replacing

FORMAT, VERSION = "vqkv-compressor", 2
READABLE = (1, 2)  # version 1 had no predictors
HEADER = {"name": str, "model": dict, "settings": dict, "codecs": list, "notes": dict, "codecs_file": str,
          "codecs_sha256": str}  # fmt: skip
ABOUT_MODEL = {"name": str, "model_type": str, "num_layers": int, "num_kv_heads": int, "head_dim": int, "weights": list}
LARGEST = torch.finfo(torch.float32).max  # of a sampled weight


def write(folder, about: dict, learned: dict[str, Tensor]) -> None:
    """Write a compressor: ``about`` is what its constructor takes, as JSON, ``learned`` what its codecs and predictors
    have learned. Raises ``FormatError`` if ``folder`` is a file."""
    folder = Path(folder).resolve()
    if folder.exists() and not folder.is_dir():
        raise FormatError(f"{folder} is a file: name a folder for the compressor")
    folder.mkdir(parents=True, exist_ok=True)
    data = save({name: tensor.contiguous().clone() for name, tensor in learned.items()})
    digest = sha256(data)
    file = f"codecs-{digest[:16]}.safetensors"
    config = {"format": FORMAT, "version": VERSION, **about, "codecs_file": file, "codecs_sha256": digest}
    config["config_sha256"] = config_sha256(config)
    _replace(folder / file, data)
    _replace(folder / "config.json", json.dumps(config, indent=1).encode())  # from here on the new one counts
    for old in folder.glob("codecs-*.safetensors"):
        if old.name != file:
            old.unlink()


def read(folder, make: Callable):
    """``make(name, codecs, settings, model, notes, predictions)`` of what ``write`` wrote. Raises ``FormatError`` for
    anything missing, truncated or altered."""
    folder = Path(folder)
    config = _read_config(folder)
    try:
        about, tensors = _about(config), _tensors(folder, config)
        predictions = _predictions(config.get("predictions", []), tensors, about)  # claims its tensors first
        codecs = _codecs(config["codecs"], tensors, predictions, about)
        if tensors:
            raise FormatError(f"tensors {sorted(tensors)[:3]} belong to no codec and no predictor")
        settings = CacheSettings(**config["settings"])
        return make(config["name"], codecs, settings, about, config["notes"], predictions)
    except (SafetensorError, OSError, *ALTERED) as error:
        raise FormatError(f"{folder} holds no valid compressor: {error}. Save or calibrate it anew") from error


def _read_config(folder: Path) -> dict:
    path = folder / "config.json"
    if not _is_file(path):
        raise FormatError(
            f"{folder} holds no compressor: no config.json. Save one with compressor.save_pretrained(...)"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        unaltered = isinstance(config, dict) and config.get("config_sha256") == config_sha256(config)
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not valid JSON ({error}): truncated or altered") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise FormatError(f"{path} is not the header of a {FORMAT}")
    version = config.get("version")
    if type(version) is not int or version not in READABLE:
        raise FormatError(f"{path} has version {version!r}; this vqkv reads {READABLE}")
    if not unaltered:
        raise FormatError(f"{path} was altered: its contents do not match its config_sha256")
    if version == 1 and "predictions" in config:
        raise FormatError(f"{path} has predictions, which version 1 had not: the file was altered")
    check_types(path, config, HEADER if version == 1 else HEADER | {"predictions": list})
    return config


def check_types(what, found: dict, types: dict[str, type]) -> None:
    """Raise ``FormatError`` unless ``found`` has every key of ``types``, of just that type."""
    for key, kind in types.items():
        if key not in found:
            raise FormatError(f"{what} lacks {key}: the file was altered")
        if type(found[key]) is not kind:
            raise FormatError(f"{what}: {key} is of type {type(found[key]).__name__}, not {kind.__name__}")


def _about(config: dict) -> dict:
    """Check what ``models.describe`` wrote. Raises ``FormatError`` or ``DataError`` for what it cannot have written."""
    check_types("the model's description", config["model"], ABOUT_MODEL)
    about = {key: config["model"][key] for key in ABOUT_MODEL}
    check_head_dim(about["head_dim"])
    check_num_kv_heads(about["num_kv_heads"])
    if not config["codecs"] or len(config["codecs"]) != about["num_layers"]:
        raise FormatError(f"{len(config['codecs'])} layers of codecs for a model of num_layers {about['num_layers']}")
    rows = about["weights"]
    if not rows or not all(isinstance(row, list) and row and all(map(_is_weight, row)) for row in rows):
        raise FormatError("the model's weights are not lists of finite numbers: the file was altered")
    return about


def _is_weight(x) -> bool:
    return type(x) in (int, float) and -LARGEST <= x <= LARGEST


def _tensors(folder: Path, config: dict) -> dict:
    path = folder / Path(config["codecs_file"]).name
    data = path.read_bytes() if _is_file(path) else b""
    if sha256(data) != config["codecs_sha256"]:
        raise FormatError(f"{path} is missing, truncated or altered: its sha256 is not the one in config.json")
    return load(data)  # not load_file, whose tensors are pages of the file and would change with it


def _codecs(described: list, tensors: dict, predictions: dict[Place, Prediction], about: dict) -> list[tuple]:
    """The (key codec, value codec) of every layer, which take theirs out of ``tensors``. Raises ``FormatError`` for one
    that was fitted to another model than the others."""
    codecs = [
        tuple(_codec(config, (role, layer), tensors, predictions) for role, config in zip(ROLES, pair, strict=True))
        for layer, pair in enumerate(described)
    ]
    for codec in (codec for pair in codecs for codec in pair):
        if codec.head_dim != about["head_dim"] or codec.num_kv_heads not in (None, about["num_kv_heads"]):
            raise FormatError(
                f"a codec of {codec.num_kv_heads} KV heads and head_dim {codec.head_dim} for a model of "
                f"{about['num_kv_heads']} and {about['head_dim']}: the file was altered"
            )
    return codecs


def _codec(config: dict, place: Place, tensors: dict, predictions: dict[Place, Prediction]) -> Codec:
    """Raises ``FormatError`` also for one that stores nothing where nothing is predicted."""
    role, layer = place
    codec = codec_from_config(config, claim(tensors, f"{layer}.{role}."))
    if isinstance(codec, Nothing) and place not in predictions:
        raise FormatError(f"{place} is stored as Nothing, but not predicted: the file was altered")
    return codec


def _predictions(described: list[dict], tensors: dict, about: dict) -> dict[Place, Prediction]:
    """The predictions that ``save_pretrained`` wrote, which take theirs out of ``tensors``. Raises ``FormatError`` for
    one that does not fit the model or comes twice."""
    width, found = about["num_kv_heads"] * about["head_dim"], {}
    for entry in described:
        place, *sources = (_place(*pair, about["num_layers"]) for pair in (entry["place"], *entry["sources"]))
        if place in found:
            raise FormatError(f"{place} is predicted twice: the file was altered")
        if len(set(sources)) < len(sources):
            raise FormatError(f"the prediction of {place} reads the same source twice: the file was altered")
        role, layer = place
        predictor = predictor_from_config(entry["predictor"], claim(tensors, f"{layer}.{role}.predictor."))
        if (predictor.in_features, predictor.out_features) != (width * len(sources), width):
            raise FormatError(f"the predictor of {place} is not of the model's width {width}")
        found[place] = Prediction(predictor, tuple(sources))
    return found


def _place(role, layer, num_layers: int) -> Place:
    if role not in ROLES or type(layer) is not int or layer not in range(num_layers):
        raise FormatError(f"a prediction of or from {role!r} {layer!r} in {num_layers} layers: the file was altered")
    return role, layer


def _replace(path: Path, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long, for example
        return False


def config_sha256(config: dict) -> str:
    """Of a header, its own entry apart."""
    rest = {key: value for key, value in config.items() if key != "config_sha256"}
    return sha256(json.dumps(rest, sort_keys=True).encode())


def sha256(data: bytes) -> str:
    """Of a file's contents, as hex."""
    return hashlib.sha256(data).hexdigest()
