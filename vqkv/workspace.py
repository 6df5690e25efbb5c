"""What a cache needs in a forward pass beyond what it stores: measured in passes of a stand-in for the model."""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import NamedTuple
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from vqkv.codec.base import Codec
from vqkv.codec.part import part_from_config
from vqkv.coder import ROLES, Place, Prediction
from vqkv.compressor import Compressor
from vqkv.errors import DataError
from vqkv.meter import tensors
from vqkv.models import describe
from vqkv.predict import Predictor
from vqkv.settings import CacheSettings

ENOUGH = 1 << 24  # random values that a codec is given to learn from, at most
VALUES = 1 << 18  # that a layer's keys have in the first measured pass; twice as many in the second
TOKENS = 2048  # ... but not more tokens than these


class Stored(NamedTuple):
    """How one role of one layer is stored: settings, as JSON, of its codec and predictor, and what that reads."""

    place: Place
    codec: str
    predictor: str | None
    sources: tuple[Place, ...]


class Shape(NamedTuple):
    """What the size of a model's cache depends on."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def values(self) -> int:
        """Elements of K and V of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


class Line(NamedTuple):
    """Bytes by the tokens in a cache: ``fixed`` and ``each``."""

    fixed: int | Fraction
    each: int | Fraction


@dataclass(frozen=True)
class Workspace:
    """What a pass needs beside the cache that it finds: at each of its moments a ``Line``, so with more tokens another
    moment may need most."""

    lines: tuple[Line, ...]

    @classmethod
    def through(cls, lengths: tuple[int, int], moments: tuple[list[int], list[int]]) -> "Workspace":
        """From the bytes at the moments of two passes that end with ``lengths`` tokens. Where the passes differ in
        what they do, a line through the most of each has to do."""
        if len({len(found) for found in moments}) > 1:
            moments = tuple([max(found)] for found in moments)
        lines = set()
        for first, second in zip(*moments, strict=True):
            each = max(Fraction(0), Fraction(second - first, lengths[1] - lengths[0]))
            lines.add(Line(first - each * lengths[0], each))
        return cls(tuple(sorted(line for line in lines if not any(_above(other, line) for other in lines))))

    def at(self, tokens: int) -> int:
        """Bytes with ``tokens`` in the cache, of all sequences together."""
        return max(0, *(math.ceil(line.fixed + tokens * line.each) for line in self.lines)) if tokens else 0


def _above(other: Line, line: Line) -> bool:
    return other != line and other.fixed >= line.fixed and other.each >= line.each


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that are alive: those of ``held``, and those that operators return inside of this context,
    which may be entered again and again. ``moments``: how many there were whenever one was made."""

    def __init__(self, held: list[Tensor]):
        super().__init__()
        self.now, self.moments = 0, []
        self._sizes: dict[int, int] = {}
        for tensor in held:
            self._see(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in self._sizes:
            self._sizes[address] = storage.nbytes()
            self.now += storage.nbytes()
            self.moments.append(self.now)
            finalize(storage, self._forget, address)

    def _forget(self, address: int) -> None:
        self.now -= self._sizes.pop(address, 0)


def workspace(model, new_cache: Callable, tokens: Tensor, lengths: tuple[int, int]) -> Workspace:
    """Of a pass that brings one token, from two that end with ``lengths`` tokens in the cache. ``tokens``
    (1, seq_len): what to cache."""
    cache, found, seen = new_cache(model), [], 0
    with torch.inference_mode():
        for length in lengths:
            # one token alone before the one that is measured: the first to read a history may leave tables for others
            for part in (tokens[:, seen : length - 2], tokens[:, length - 2 : length - 1]):
                model.base_model(part, past_key_values=cache, use_cache=True)
            found.append(_moments(model, cache, tokens[:, length - 1 : length]))
            seen = length
    return Workspace.through(lengths, tuple(found))


def _moments(model, cache, token: Tensor) -> list[int]:
    """Bytes beyond those before the pass, whenever the cache makes something."""
    live, update = LiveBytes(tensors(cache)), cache.update
    rest, live.moments = live.now, []

    def watched(*args, **kwargs):
        with live:
            return update(*args, **kwargs)

    cache.update = watched
    try:
        model.base_model(token, past_key_values=cache, use_cache=True)
    finally:
        del cache.update
    return [now - rest for now in live.moments]


def expected_workspace(
    stored: tuple[Stored, ...], settings: CacheSettings, rows: int, shape: Shape, dtype: torch.dtype
) -> Workspace:
    """``workspace`` of a stand-in with as many KV heads of the same size, with codecs and predictors that learned
    nothing, and only the first layers: those after them are alike. ``rows``: tokens that only go together."""
    reach = max((one.place[1] - layer for one in stored for _, layer in one.sources), default=-1)
    shape = shape._replace(num_layers=min(shape.num_layers, reach + 2))
    first_layers = tuple(one for one in stored if one.place[1] < shape.num_layers)
    packed = math.ceil(_enough(shape) / rows) * rows
    # packed in blocks of that size: the passes that are measured pack nothing, which takes little, but never less
    return _stand_in_workspace(first_layers, replace(settings, flush_block=packed), shape, dtype)


@cache
def dynamic_workspace(shape: Shape, dtype: torch.dtype) -> Workspace:
    """The same of transformers' ``DynamicCache``."""
    shape = shape._replace(num_layers=1)
    lengths = (_enough(shape), 2 * _enough(shape))
    return workspace(_stand_in(shape, dtype), lambda _: DynamicCache(), _zeros(lengths), lengths)


def _enough(shape: Shape) -> int:
    return max(16, min(TOKENS, VALUES // (shape.num_kv_heads * shape.head_dim)))


@cache
def _stand_in_workspace(stored, settings: CacheSettings, shape: Shape, dtype: torch.dtype) -> Workspace:
    codecs = {one.place: copy.deepcopy(untrained_codec(one.codec, *shape[1:])) for one in stored}
    pairs = [tuple(codecs[role, layer] for role in ROLES) for layer in range(shape.num_layers)]
    predictions = {
        one.place: Prediction(untrained_predictor(one.predictor), one.sources) for one in stored if one.predictor
    }
    model, exact = _stand_in(shape, dtype), settings.sink_tokens + settings.recent_window + 1
    compressor = Compressor("stand-in", pairs, settings, describe(model), None, predictions)
    lengths = tuple(exact + blocks * settings.flush_block for blocks in (1, 2))
    return workspace(model, compressor.new_cache, _zeros(lengths), lengths)


def _stand_in(shape: Shape, dtype: torch.dtype):
    """A Llama with these layers and KV heads, and little else."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=2,
        eos_token_id=1,
        hidden_size=shape.num_kv_heads,  # of which it must be a multiple
        intermediate_size=8,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_kv_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _zeros(lengths: tuple[int, int]) -> Tensor:
    return torch.zeros(1, lengths[1], dtype=torch.long)


@cache
def untrained_codec(config: str, num_kv_heads: int, head_dim: int) -> Codec:
    """The codec that ``config`` (JSON) describes, fitted to as few random values as it takes."""
    settings, tokens = _hasty(json.loads(config)), 1
    while True:
        codec = part_from_config(settings)
        codec.weigh(torch.eye(head_dim).expand(num_kv_heads, -1, -1))
        whole = math.ceil(tokens / codec.tokens_per_row) * codec.tokens_per_row
        x = random_values(1, num_kv_heads, whole, head_dim)
        try:
            return codec if codec.ready else codec.fit(x)
        except DataError:  # fewer vectors than codes; or something else, which more of them do not mend
            if not codec.learns or x.numel() > ENOUGH:
                raise
        tokens *= 2


@cache
def predictor_bytes(config: str) -> int:
    """Side information of the predictor that ``config`` (JSON) describes."""
    return untrained_predictor(config).side_bytes


def untrained_predictor(config: str) -> Predictor:
    """The predictor that ``config`` (JSON) describes, with zeros for what it would learn."""
    predictor = part_from_config(json.loads(config))
    predictor.load_state({name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in predictor.layout().items()})
    return predictor


def random_values(*shape: int) -> Tensor:
    """(batch, num_kv_heads, seq_len, head_dim), always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _hasty(config):
    """The same settings, but codebooks are drawn, not learned: no better, and as large."""
    if isinstance(config, list):
        return [_hasty(item) for item in config]
    if not isinstance(config, dict):
        return config
    return {key: "random" if key == "init" else _hasty(value) for key, value in config.items()}
