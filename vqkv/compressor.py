"""A preset fitted to a model: the codecs of every layer, saved and loaded as safetensors with a validated header."""

import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as serialize
from torch import Tensor

from vqkv.cache import CompressedCache
from vqkv.codec.base import Codec, codec_from_config
from vqkv.codec.checks import check_head_dim, check_num_kv_heads, whole_blocks
from vqkv.codec.exact import Nothing
from vqkv.codec.part import ALTERED
from vqkv.coder import ROLES, Coder, Known, Place, Prediction, check_order, last_readers
from vqkv.errors import FormatError
from vqkv.files import replacing, tensors_sha256
from vqkv.models import difference
from vqkv.predict import predictor_from_config
from vqkv.settings import CacheSettings

FORMAT, VERSION = "vqkv-compressor", 2
READABLE = (1, 2)  # version 1 had no predictors
HEADER = {"name": str, "model": dict, "settings": dict, "codecs": list, "notes": dict, "codecs_file": str,
          "codecs_sha256": str}  # fmt: skip
ABOUT_MODEL = {"name": str, "model_type": str, "num_layers": int, "num_kv_heads": int, "head_dim": int, "weights": list}
LARGEST = torch.finfo(torch.float32).max  # of a sampled weight


class Compressor:
    """``codecs``: one fitted (key codec, value codec) per layer; ``model``: which model they were fitted to;
    ``predictions``: what is predicted from other layers, by place. Raises ``DataError`` for predictions that read what
    is decoded after them."""

    def __init__(
        self,
        name: str,
        codecs: list[tuple[Codec, Codec]],
        settings: CacheSettings,
        model: dict,
        notes: dict | None = None,
        predictions: dict[Place, Prediction] | None = None,
    ):
        self.name, self.codecs, self.settings, self.model = name, codecs, settings, model
        self.notes, self.predictions = notes or {}, predictions or {}
        check_order(self.predictions)
        self.last_readers = last_readers(self.predictions)
        for role, layer in self.predictions:
            codecs[layer][ROLES.index(role)].stores_residuals = True
        self.coders = [
            tuple(
                Coder(codec, (role, layer), self.predictions.get((role, layer)))
                for role, codec in zip(ROLES, pair, strict=True)
            )
            for layer, pair in enumerate(codecs)
        ]

    @property
    def side_bytes(self) -> int:
        """Bytes of codebooks, predictors and everything else that is stored once, not per token."""
        return sum(codec.side_bytes for pair in self.codecs for codec in pair) + self.predictor_bytes

    @property
    def predictor_bytes(self) -> int:
        """The predictors' share of ``side_bytes``."""
        return sum(prediction.predictor.side_bytes for prediction in self.predictions.values())

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of all that encoding and decoding depend on: codecs, predictions, cache settings and everything
        learned, not the names. Another device or a save and a load do not change it."""
        text = json.dumps(self._described(), sort_keys=True)
        return _sha256((text + tensors_sha256(sorted(self._learned().items()))).encode())

    def to(self, device) -> "Compressor":
        """Move everything learned to ``device``, in place."""
        for codec in (codec for pair in self.codecs for codec in pair):
            codec.to(device)
        for prediction in self.predictions.values():
            prediction.predictor.to(device)
        return self

    def place(self, devices: list[torch.device]) -> "Compressor":
        """Move what each layer has learned to that layer's device, in place."""
        for layer, device in enumerate(devices):
            for coder in self.coders[layer]:
                coder.codec.to(device)
                if coder.prediction is not None:
                    coder.prediction.predictor.to(device)
        return self

    def new_cache(self, model, in_place: bool = False, decoded_cache_bytes: int = 0) -> CompressedCache:
        """An empty cache for ``model``, see ``CompressedCache``; raises ``FormatError`` if this compressor was fitted
        to another model."""
        return CompressedCache(self, model, in_place, decoded_cache_bytes)

    def reconstruct(self, layer: int, keys, values, known: Known | None = None) -> tuple:
        """What is read back of a layer's keys and values (batch, num_kv_heads, seq_len, head_dim), in fp32; tokens
        after the last whole block that every codec can pack are left out. ``known``: ``new_pass()``, handed from the
        first layer to the last, where predictors read other layers. Raises ``DataError`` without a whole block."""
        known = self.new_pass() if known is None else known
        block = self.tokens_per_row if self.predictions else 1
        pairs = zip(self.coders[layer], (keys, values), strict=True)
        return tuple(coder.through(whole_blocks(x, max(block, coder.tokens_per_row)), known) for coder, x in pairs)

    def new_pass(self) -> Known:
        """Nothing known yet; see ``reconstruct``."""
        return Known(self.last_readers)

    @property
    def tokens_per_row(self) -> int:
        """Tokens that every codec can pack and unpack without others."""
        return math.lcm(*(codec.tokens_per_row for pair in self.codecs for codec in pair))

    def check(self, model) -> None:
        """Raise ``FormatError`` naming the first difference if ``model`` is not the one this was fitted to."""
        found = difference(self.model, model)
        if found:
            raise FormatError(
                f"compressor {self.name!r} was fitted to {self.model['name']!r} with {found}: "
                "calibrate a compressor for this model"
            )

    def save_pretrained(self, folder) -> None:
        """Write ``config.json`` and ``codecs-<hash>.safetensors`` into ``folder``. The header is moved into place last;
        until then an older compressor there stays whole. Raises ``FormatError`` if ``folder`` is a file."""
        folder = Path(folder).resolve()
        if folder.exists() and not folder.is_dir():
            raise FormatError(f"{folder} is a file: name a folder for the compressor")
        folder.mkdir(parents=True, exist_ok=True)
        data = serialize({name: tensor.contiguous().clone() for name, tensor in self._learned().items()})
        digest = _sha256(data)
        config = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "model": self.model,
            **self._described(),
            "notes": self.notes,
            "codecs_file": f"codecs-{digest[:16]}.safetensors",
            "codecs_sha256": digest,
        }
        config["config_sha256"] = _config_sha256(config)
        _replace(folder / config["codecs_file"], data)
        _replace(folder / "config.json", json.dumps(config, indent=1).encode())  # from here on the new one counts
        for old in folder.glob("codecs-*.safetensors"):
            if old.name != config["codecs_file"]:
                old.unlink()

    def _described(self) -> dict:
        """All but what was learned, as JSON."""
        return {
            "settings": asdict(self.settings),
            "codecs": [[codec.config() for codec in pair] for pair in self.codecs],
            "predictions": [
                {"place": place, "sources": prediction.sources, "predictor": prediction.predictor.config()}
                for place, prediction in sorted(self.predictions.items(), key=lambda item: item[0][::-1])
            ],
        }

    def _learned(self) -> dict[str, Tensor]:
        """Everything learned, by the name it is saved under."""
        codecs = {
            f"{layer}.{role}.{name}": tensor
            for layer, pair in enumerate(self.codecs)
            for role, codec in zip(ROLES, pair, strict=True)
            for name, tensor in codec.state().items()
        }
        return codecs | {
            f"{layer}.{role}.predictor.{name}": tensor
            for (role, layer), prediction in self.predictions.items()
            for name, tensor in prediction.predictor.state().items()
        }

    @classmethod
    def from_pretrained(cls, folder) -> "Compressor":
        """Load what ``save_pretrained`` wrote. Raises ``FormatError`` for anything missing, truncated or altered."""
        folder = Path(folder)
        config = _read_config(folder)
        try:
            about, tensors = _about(config), _tensors(folder, config)
            predictions = _predictions(config.get("predictions", []), tensors, about)  # claims its tensors first
            codecs = _codecs(config["codecs"], tensors, predictions, about)
            if tensors:
                raise FormatError(f"tensors {sorted(tensors)[:3]} belong to no codec and no predictor")
            settings = CacheSettings(**config["settings"])
            return cls(config["name"], codecs, settings, about, config["notes"], predictions)
        except (SafetensorError, OSError, *ALTERED) as error:
            raise FormatError(f"{folder} holds no valid compressor: {error}. Save or calibrate it anew") from error

    def __repr__(self) -> str:
        layers = len(self.codecs)
        return f"Compressor({self.name} for {self.model['name']}, {layers} layers, {self.side_bytes:,} side bytes)"


def _read_config(folder: Path) -> dict:
    path = folder / "config.json"
    if not _is_file(path):
        raise FormatError(
            f"{folder} holds no compressor: no config.json. Save one with compressor.save_pretrained(...)"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        unaltered = isinstance(config, dict) and config.get("config_sha256") == _config_sha256(config)
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
    _check_types(path, config, HEADER if version == 1 else HEADER | {"predictions": list})
    return config


def _check_types(what, found: dict, types: dict[str, type]) -> None:
    """Raise ``FormatError`` unless ``found`` has every key of ``types``, of just that type."""
    for key, kind in types.items():
        if key not in found:
            raise FormatError(f"{what} lacks {key}: the file was altered")
        if type(found[key]) is not kind:
            raise FormatError(f"{what}: {key} is of type {type(found[key]).__name__}, not {kind.__name__}")


def _about(config: dict) -> dict:
    """What ``models.describe`` wrote. Raises ``FormatError`` or ``DataError`` for what it cannot have written."""
    _check_types("the model's description", config["model"], ABOUT_MODEL)
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
    if _sha256(data) != config["codecs_sha256"]:
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


def claim(tensors: dict, prefix: str) -> dict:
    """Take out the tensors whose names start with ``prefix``, by the rest of the name."""
    return {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long, for example
        return False


def _config_sha256(config: dict) -> str:
    rest = {key: value for key, value in config.items() if key != "config_sha256"}
    return _sha256(json.dumps(rest, sort_keys=True).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
