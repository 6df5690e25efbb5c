"""A preset fitted to a model: the codecs of every layer, saved and loaded as safetensors with a validated header."""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vqkv.cache import CompressedCache
from vqkv.codec.base import Codec, codec_from_config
from vqkv.errors import FormatError
from vqkv.models import describe

FORMAT, VERSION = "vqkv-compressor", 1


@dataclass(frozen=True)
class CacheSettings:
    """What a cache of this compressor keeps exact; see ``presets.Preset``."""

    sink_tokens: int = 0
    recent_window: int = 0
    flush_block: int = 1
    pre_rope: bool = True


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

    def check(self, model) -> None:
        """Raise ``FormatError`` that names the first difference if ``model`` is not the one this was fitted to."""
        for key, ours in self.model.items():
            theirs = describe(model).get(key)
            if key != "name" and theirs != ours:
                raise FormatError(
                    f"compressor {self.name!r} was fitted to {self.model['name']!r} ({key} {ours!r}), but this model "
                    f"has {key} {theirs!r}: calibrate a compressor for this model"
                )

    def save_pretrained(self, folder) -> None:
        """Write ``config.json`` and ``codecs.safetensors`` into ``folder``; an older one stays until the end."""
        folder = Path(folder)
        temporary = folder.with_name(folder.name + ".part")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        tensors = {
            f"{layer}.{role}.{name}": tensor.contiguous()
            for layer, pair in enumerate(self.codecs)
            for role, codec in zip(("key", "value"), pair, strict=True)
            for name, tensor in codec.state().items()
        }
        save_file(tensors, temporary / "codecs.safetensors")
        config = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "model": self.model,
            "settings": asdict(self.settings),
            "codecs": [[codec.config() for codec in pair] for pair in self.codecs],
            "notes": self.notes,
            "codecs_sha256": _sha256(temporary / "codecs.safetensors"),
        }
        config["config_sha256"] = _config_sha256(config)
        (temporary / "config.json").write_text(json.dumps(config, indent=1))
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("codecs.safetensors", "config.json"):
            os.replace(temporary / name, folder / name)
        temporary.rmdir()

    @classmethod
    def from_pretrained(cls, folder) -> "Compressor":
        """Load what ``save_pretrained`` wrote. Raises ``FormatError`` for anything missing, truncated or altered."""
        folder = Path(folder)
        config = _read_config(folder)
        path = folder / "codecs.safetensors"
        if not path.is_file() or _sha256(path) != config["codecs_sha256"]:
            raise FormatError(f"{path} is missing, truncated or altered: its sha256 is not the one in config.json")
        try:
            tensors = load_file(path)
            codecs = [
                tuple(
                    codec_from_config(codec, _state(tensors, f"{layer}.{role}."))
                    for role, codec in zip(("key", "value"), pair, strict=True)
                )
                for layer, pair in enumerate(config["codecs"])
            ]
            settings = CacheSettings(**config["settings"])
            if len(codecs) != config["model"]["num_layers"]:
                raise FormatError(f"{len(codecs)} layers of codecs for a model of {config['model']['num_layers']}")
            return cls(config["name"], codecs, settings, config["model"], config["notes"])
        except (SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
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
    except ValueError as error:
        raise FormatError(f"{path} is not valid JSON ({error}): truncated or altered") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise FormatError(f"{path} is not the header of a {FORMAT}")
    if config.get("version") != VERSION:
        raise FormatError(f"{path} has version {config.get('version')!r}; this vqkv reads {VERSION}")
    if config.get("config_sha256") != _config_sha256(config):
        raise FormatError(f"{path} was altered: its contents do not match its config_sha256")
    return config


def _state(tensors: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _config_sha256(config: dict) -> str:
    rest = {key: value for key, value in config.items() if key != "config_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
