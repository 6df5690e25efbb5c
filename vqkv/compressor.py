"""A preset fitted to a model: the codecs of every layer, saved and loaded as safetensors with a validated header."""

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize

from vqkv.cache import CompressedCache
from vqkv.codec.base import Codec, codec_from_config, whole_blocks
from vqkv.errors import FormatError
from vqkv.models import difference
from vqkv.presets import check_settings

FORMAT, VERSION = "vqkv-compressor", 1
MODEL_KEYS = ("name", "model_type", "num_layers", "num_kv_heads", "head_dim", "weights")


@dataclass(frozen=True)
class CacheSettings:
    """What a cache of this compressor keeps exact; see ``presets.Preset``."""

    sink_tokens: int = 0
    recent_window: int = 0
    flush_block: int = 1
    pre_rope: bool = True

    def __post_init__(self):
        check_settings(self.sink_tokens, self.recent_window, self.flush_block, self.pre_rope)


class Compressor:
    """``codecs``: one fitted (key codec, value codec) per layer; ``model``: which model they were fitted to."""

    def __init__(self, name: str, codecs: list[tuple[Codec, Codec]], settings: CacheSettings, model: dict, notes=None):
        self.name, self.codecs, self.settings, self.model = name, codecs, settings, model
        self.notes = notes or {}

    @property
    def side_bytes(self) -> int:
        """Bytes of codebooks and everything else that is stored once, not per token."""
        return sum(codec.side_bytes for pair in self.codecs for codec in pair)

    def new_cache(self, model, in_place: bool = False) -> CompressedCache:
        """An empty cache for ``model``; raises ``FormatError`` if this compressor was fitted to another model."""
        return CompressedCache(self, model, in_place=in_place)

    def reconstruct(self, layer: int, keys, values) -> tuple:
        """What a layer's codecs give back for keys and values (batch, num_kv_heads, seq_len, head_dim), in fp32; tokens
        after a codec's last whole block are left out. Raises ``DataError`` if there is none."""
        pairs = zip(self.codecs[layer], (keys, values), strict=True)
        return tuple(codec.decode(codec.encode(whole_blocks(x, codec.tokens_per_row))) for codec, x in pairs)

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
        tensors = {
            f"{layer}.{role}.{name}": tensor.contiguous().clone()
            for layer, pair in enumerate(self.codecs)
            for role, codec in zip(("key", "value"), pair, strict=True)
            for name, tensor in codec.state().items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        data = serialize(tensors)
        digest = hashlib.sha256(data).hexdigest()
        config = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "model": self.model,
            "settings": asdict(self.settings),
            "codecs": [[codec.config() for codec in pair] for pair in self.codecs],
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

    @classmethod
    def from_pretrained(cls, folder) -> "Compressor":
        """Load what ``save_pretrained`` wrote. Raises ``FormatError`` for anything missing, truncated or altered."""
        folder = Path(folder)
        config = _read_config(folder)
        try:
            path = folder / Path(config["codecs_file"]).name
            if not path.is_file() or _sha256(path) != config["codecs_sha256"]:
                raise FormatError(f"{path} is missing, truncated or altered: its sha256 is not the one in config.json")
            tensors = load_file(path)
            codecs = [
                tuple(
                    codec_from_config(codec, _state(tensors, f"{layer}.{role}."))
                    for role, codec in zip(("key", "value"), pair, strict=True)
                )
                for layer, pair in enumerate(config["codecs"])
            ]
            settings = CacheSettings(**config["settings"])
            about = {key: config["model"][key] for key in MODEL_KEYS}
            if not codecs or len(codecs) != about["num_layers"]:
                raise FormatError(f"{len(codecs)} layers of codecs for a model of {about['num_layers']}")
            return cls(config["name"], codecs, settings, about, config["notes"])
        except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise FormatError(f"{folder} holds no valid compressor: {error}") from error

    def __repr__(self) -> str:
        layers = len(self.codecs)
        return f"Compressor({self.name} for {self.model['name']}, {layers} layers, {self.side_bytes:,} side bytes)"


def _read_config(folder: Path) -> dict:
    path = folder / "config.json"
    if not path.is_file():
        raise FormatError(
            f"{folder} holds no compressor: no config.json. Save one with compressor.save_pretrained(...)"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        unaltered = isinstance(config, dict) and config.get("config_sha256") == _config_sha256(config)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not valid JSON ({error}): truncated or altered") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise FormatError(f"{path} is not the header of a {FORMAT}")
    if config.get("version") != VERSION:
        raise FormatError(f"{path} has version {config.get('version')!r}; this vqkv reads {VERSION}")
    if not unaltered:
        raise FormatError(f"{path} was altered: its contents do not match its config_sha256")
    missing = {"name", "model", "settings", "codecs", "notes", "codecs_file", "codecs_sha256"} - config.keys()
    if missing:
        raise FormatError(f"{path} lacks {', '.join(sorted(missing))}")
    return config


def _replace(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def _state(tensors: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _config_sha256(config: dict) -> str:
    rest = {key: value for key, value in config.items() if key != "config_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
