"""A preset fitted to a model: the codecs of every layer, what they predict from each other, and their caches. Within
``with compressed(model, compressor):`` so are all that ``generate``, or code that calls it, makes."""

import hashlib
import json
import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from torch import Tensor
from transformers import Cache, DynamicCache

from vqkv import __version__
from vqkv.cache.compressed import CompressedCache
from vqkv.cache.meter import tensor_bytes, tensors
from vqkv.cache.settings import CacheSettings
from vqkv.codecs.pipeline import Codec
from vqkv.codecs.predictive import (
    ROLES,
    JointCodec,
    LayerRole,
    Prediction,
    PredictiveCodec,
    Reconstructions,
    last_readers,
)
from vqkv.codecs.predictor_kinds import Slice
from vqkv.codecs.stage import Part, codec_from_config
from vqkv.errors import DataError, FormatError
from vqkv.kernels.derived import tables_of
from vqkv.models.layers import plain
from vqkv.models.load import TITLES, difference
from vqkv.runtime.checks import whole_blocks
from vqkv.runtime.files import claim, load_checked, replacing, save_checked, tensors_sha256

FORMAT, VERSION = "vqkv-compressor", 3
FILE = "compressor.safetensors"
CARD = Path(__file__).with_name("card.md.j2")  # jinja2 comes with torch
FOLDER = Path(__file__).parents[1] / "reference"
BUNDLED = {f"vqkv/smollm2-135m-{preset}": FOLDER / f"smollm2-135m-{preset}" for preset in ("live", "best")}
REMEDY = "save a compressor with compressor.save_pretrained(...)"
FILED = {"block_tokens": "flush_block"}  # what a setting is called in files


class Compressor:
    """``codecs``: one fitted (key codec, value codec) per layer; ``model``: which model they were fitted to;
    ``predictions``: what is predicted from other layers, by role and layer, always from what is decoded before."""

    def __init__(
        self,
        name: str,
        codecs: list[tuple[Codec, Codec]],
        settings: CacheSettings,
        model: dict,
        notes: dict | None = None,
        predictions: dict[LayerRole, Prediction] | None = None,
    ):
        self.name, self.codecs, self.settings, self.model = name, codecs, settings, model
        self.notes, self.predictions = notes or {}, predictions or {}
        self.last_readers = last_readers(self.predictions)
        self.coders = [
            tuple(self._coder(codec, role, layer) for role, codec in zip(ROLES, pair, strict=True))
            for layer, pair in enumerate(codecs)
        ]

    def _coder(self, codec: Codec, role: str, layer: int) -> PredictiveCodec:
        if self.joint and layer == 0:
            return JointCodec(codec, (role, layer), heads=self.model["shapes"][0][0])
        return PredictiveCodec(codec, (role, layer), self.predictions.get((role, layer)))

    @property
    def joint(self) -> bool:
        """Whether all layers are stored together, at the end of each forward pass."""
        return any(isinstance(prediction.predictor, Slice) for prediction in self.predictions.values())

    @property
    def side_bytes(self) -> int:
        """Bytes of codebooks, predictors and everything else that is stored once, not per token."""
        return sum(codec.side_bytes for pair in self.codecs for codec in pair) + self.predictor_bytes

    @property
    def predictor_bytes(self) -> int:
        """The predictors' share of ``side_bytes``."""
        return sum(prediction.predictor.side_bytes for prediction in self.predictions.values())

    @property
    def derived_bytes(self) -> int:
        """Bytes of the tables that it made from side information to compute with: in memory now, in no file."""
        parts = [part for _, part in self._parts()]
        tables = [tables_of(tensor) for tensor in tensors(parts)]
        return tensor_bytes(parts, tables) - tensor_bytes([part.state_dict() for part in parts])

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of all that encoding and decoding depend on: codecs, predictions, cache settings and everything
        learned, not the names. Another device or a save and a load do not change it."""
        text = json.dumps(self._described(), sort_keys=True)
        return hashlib.sha256((text + tensors_sha256(sorted(self._learned().items()))).encode()).hexdigest()

    @property
    def block_tokens(self) -> int:
        """Tokens that every codec can pack and unpack without others."""
        return math.lcm(*(codec.block_tokens for pair in self.codecs for codec in pair))

    def to_layers(self, devices: list[torch.device]) -> None:
        """Move what each layer has learned to that layer's device, in place."""
        for (_, layer, _), part in self._parts():
            part.to(devices[layer])

    def check(self, model) -> None:
        """Raise ``FormatError`` naming the first difference if ``model`` is not the one this was fitted to."""
        if other := difference(self.model, model):
            raise FormatError(
                f"compressor {self.name!r} was fitted to {self.model['name']!r} with {other}: "
                "calibrate a compressor for this model"
            )

    def new_cache(self, model, in_place: bool = False, decoded_cache_bytes: int = 0) -> CompressedCache:
        """Make an empty ``CompressedCache`` for ``model``. Raises ``FormatError`` if this compressor was fitted to
        another model."""
        return CompressedCache(self, plain(model), in_place, decoded_cache_bytes)

    def new_pass(self) -> Reconstructions:
        """Know nothing yet; see ``reconstruct``."""
        return Reconstructions(self.last_readers)

    def reconstruct(self, layer: int, keys, values, known: Reconstructions | None = None) -> tuple:
        """Read back a layer's keys and values (batch, num_kv_heads, seq_len, head_dim), in fp32, without tokens after
        the last complete block. ``known``: ``new_pass()``, handed from the first layer to the last, where predictors
        read other layers. Raises ``DataError`` without a complete block, and where layers are stored together."""
        if self.joint:
            raise DataError(f"{self.name} stores all layers together, which are not read one by one")
        known = self.new_pass() if known is None else known
        block = self.block_tokens if self.predictions else 1
        pairs = zip(self.coders[layer], (keys, values), strict=True)
        return tuple(coder.through(whole_blocks(x, max(block, coder.block_tokens)), known) for coder, x in pairs)

    def save_pretrained(self, folder) -> None:
        """Write ``compressor.safetensors`` and a model card, ``README.md``, into ``folder``; older ones stay until the
        new ones are complete. ``notes["measured"]``, a row of ``evaluate``, goes into the card."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        about = {"format": FORMAT, "version": VERSION, "name": self.name, "model": self.model, "notes": self.notes}
        learned = {name: x.clone().contiguous() for name, x in self._learned().items()}  # codecs may share some
        save_checked(folder / FILE, about | self._described(), learned)
        with replacing(folder / "README.md") as file:
            file.write(str(self._card()).encode())

    @classmethod
    def from_pretrained(cls, folder) -> "Compressor":
        """Load what ``save_pretrained`` wrote: a folder, a name in ``BUNDLED``, or one on the hub ("owner/name").

        Raises ``FormatError`` for anything missing, cut or altered, or a hub that cannot be reached."""
        folder = BUNDLED.get(str(folder), folder)
        path = Path(folder) / FILE
        if not Path(folder).exists():
            try:
                path = Path(hf_hub_download(str(folder), FILE))
            except (OSError, ValueError) as error:  # as the hub's errors are
                reason = str(error).strip().split("\n")[0][:200]
                raise FormatError(f"{folder} is no folder, and not on the hub ({reason}): {REMEDY}") from error
        about, tensors = load_checked(path, FORMAT, VERSION, REMEDY)
        predictions = {}
        for entry in about["predictions"]:
            role, layer = entry["place"]
            predictor = codec_from_config(entry["predictor"], claim(tensors, f"{layer}.{role}.predictor."))
            predictions[role, layer] = Prediction(predictor, tuple(map(tuple, entry["sources"])))
        codecs = [
            tuple(codec_from_config(config, claim(tensors, f"{layer}.{role}.")) for role, config in zip(ROLES, pair))
            for layer, pair in enumerate(about["codecs"])
        ]
        named = {filed: name for name, filed in FILED.items()}
        settings = CacheSettings(**{named.get(name, name): value for name, value in about["settings"].items()})
        return cls(about["name"], codecs, settings, about["model"], about["notes"], predictions)

    def _card(self) -> ModelCard:
        """Write a model card, with the losses in ``notes["measured"]``, if they are there."""
        title, notes = self.model["name"], self.notes
        base = next((name for name, own_title in TITLES.items() if own_title == title), title)
        data = ModelCardData(library_name="vqkv", base_model=base if "/" in base else None, tags=["kv-cache"])
        return ModelCard.from_template(
            data,
            template_path=str(CARD),
            name=self.name,
            base=base,
            layers=len(self.codecs),
            side_bytes=self.side_bytes,
            notes=notes,
            arguments=", ".join(f"{key}={value!r}" for key, value in notes.get("arguments", {}).items()),
            packages=f"vqkv {__version__}, torch {version('torch')}, transformers {version('transformers')}",
            row=notes.get("measured"),
        )

    def _described(self) -> dict:
        """Describe all but what was learned, as JSON."""
        return {
            "settings": {FILED.get(name, name): value for name, value in asdict(self.settings).items()},
            "codecs": [[codec.config() for codec in pair] for pair in self.codecs],
            "predictions": [
                {"place": layer_role, "sources": prediction.sources, "predictor": prediction.predictor.config()}
                for layer_role, prediction in sorted(self.predictions.items(), key=lambda item: item[0][::-1])
            ],
        }

    def _learned(self) -> dict[str, Tensor]:
        """Return everything learned, by the name it is saved under."""
        return {
            f"{layer}.{role}.{kind}{name}": tensor
            for (role, layer, kind), part in self._parts()
            for name, tensor in part.state_dict().items()
        }

    def _parts(self) -> Iterator[tuple[tuple[str, int, str], Part]]:
        """List codecs and predictors, each after its role, layer and prefix in saved names."""
        for layer, pair in enumerate(self.codecs):
            yield from (((role, layer, ""), codec) for role, codec in zip(ROLES, pair, strict=True))
        for (role, layer), prediction in self.predictions.items():
            yield (role, layer, "predictor."), prediction.predictor

    def __repr__(self) -> str:
        layers = len(self.codecs)
        return f"Compressor({self.name} for {self.model['name']}, {layers} layers, {self.side_bytes:,} side bytes)"


@dataclass(eq=False)
class Compressed:
    """What ``compressed`` is at work with. ``cache``: the last one that was made, whose ``report()`` has its bytes."""

    compressor: Compressor
    thread: int
    cache: CompressedCache | None = None


_active: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> list[Compressed], the innermost last
_changing = threading.Lock()


@contextmanager
def compressed(model, compressor: Compressor) -> Iterator[Compressed]:
    """Compress the caches that ``model`` makes for itself: of ``generate``, pipelines, chat programs, lm-eval.

    A forward pass with no cache, or with an empty ``DynamicCache``, gets one of ``compressor``; caches that the caller
    passes stay. Blocks nest. A thread that has entered no block takes the one that was entered last, so that
    ``generate`` may run in a thread that a block started (``TextIteratorStreamer``).

    Args: ``model``, a transformers decoder, also wrapped or with adapters; ``compressor``, fitted to it by
    ``calibrate``. Raises ``FormatError`` if the compressor was fitted to another model.
    """
    model = plain(model)
    compressor.check(model)
    use = Compressed(compressor, threading.get_ident())
    with _changing:
        if _swap not in model._forward_pre_hooks.values():  # for good: one that goes races with other threads' passes
            model.register_forward_pre_hook(_swap, prepend=True, with_kwargs=True)
        _active[model] = [*_active.get(model, ()), use]
    try:
        yield use
    finally:
        with _changing:
            _active[model] = [other for other in _active[model] if other is not use]


@torch.compiler.disable
def _swap(model, args, kwargs):
    """Replace the empty cache of a forward pass, within a block of ``compressed``."""
    if not (uses := _active.get(model)):
        return None
    own = [use for use in uses if use.thread == threading.get_ident()]
    given, caches = kwargs.get("past_key_values"), kwargs.get("use_cache", getattr(model.config, "use_cache", True))
    empty = given is None or (type(given) is DynamicCache and not given.get_seq_length())
    if not (caches and empty) or any(isinstance(each, Cache) for each in args):
        return None
    use = (own or uses)[-1]
    use.cache = use.compressor.new_cache(model)
    return args, kwargs | {"past_key_values": use.cache}
