"""Other people's caches, run as they are: their code stores and reads, ours feeds, scores and weighs."""

import os
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import torch
from transformers.cache_utils import HQQQuantizedLayer, QuantizedCache, QuantizedLayer, QuantoQuantizedLayer

from vqkv.cache.meter import Report, tensor_bytes
from vqkv.cache.settings import CacheSettings
from vqkv.errors import DataError, UnknownNameError
from vqkv.runtime.checks import check_whole

LAYERS: dict[str, type[QuantizedLayer]] = {"quanto": QuantoQuantizedLayer, "hqq": HQQQuantizedLayer}
MOST = 1 << 31  # values of a group, or tokens
PACKAGES = {"quanto": ("optimum.quanto", "optimum-quanto"), "hqq": ("hqq.core.quantize", "hqq")}


@dataclass(frozen=True)
class TransformersQuantized:
    """transformers' own ``QuantizedCache``, unmodified, where a fitted compressor would stand: ``evaluate(model, peer,
    tokens)``. It is what ``generate(cache_implementation="quantized")`` makes; the arguments are its own.

    Affine codes in groups of ``q_group_size`` values, keys after RoPE. ``backend`` "quanto" (2, 4 bits) takes scale and
    shift from a group's ends; a group at axis 0 is consecutive values of one sequence. "hqq" (1, 2, 3, 4, 8 bits) then
    moves the zero point by a half-quadratic solver; its group at axis 0 is values that lie numel / q_group_size apart,
    across tokens, heads and the *sequences of the batch*, and consecutive ones at axis 1.

    Measured as it is: the first update hands its tokens back exact, so one pass scores as fp16 at any bits; it packs
    all of them, and whenever ``residual_length`` more have come quantises the whole history again, which costs hqq
    about one more quantization's error every time and quanto nothing; every step decodes the whole history. Scales,
    zero points and tokens not yet packed keep the model's dtype, so compare bytes on a model loaded with
    ``dtype="bfloat16"``. hqq's 3 bits take 3.5: ten codes to an int32, 64 codes to seven of them.

    Raises ``UnknownNameError`` for another backend, ``DataError`` for settings that it does not take, ``ImportError``
    where its package is missing.
    """

    backend: str = "quanto"
    nbits: int = 4
    q_group_size: int = 64
    residual_length: int = 128
    axis_key: int = 0
    axis_value: int = 0

    side_bytes: ClassVar[int] = 0

    def __post_init__(self):
        if self.backend not in LAYERS:
            raise UnknownNameError("backend", self.backend, LAYERS)
        check_whole("q_group_size", self.q_group_size, 1, MOST)
        check_whole("residual_length", self.residual_length, 1, MOST)
        _load(self.backend)
        trial = torch.arange(8.0 * self.q_group_size).view(1, 1, -1, 8)
        try:
            self.reconstruct(0, trial, trial)
        except (ValueError, RuntimeError) as error:  # hqq packs 3 bits at axis 1 and then cannot read them
            raise DataError(f"{self.name} cannot store and read with these settings: {error}") from error

    @property
    def name(self) -> str:
        """``transformers-quanto`` or ``transformers-hqq``."""
        return f"transformers-{self.backend}"

    @property
    def settings(self) -> CacheSettings:
        """The nearest in this library's words: no sinks, tokens packed ``residual_length`` at a time, after RoPE."""
        return CacheSettings(flush_block=self.residual_length, pre_rope=False)

    def new_cache(self, model, in_place: bool = False) -> "MeteredQuantizedCache":
        """An empty cache for ``model``. Raises ``DataError`` for ``in_place``, which this cache cannot do."""
        if in_place:
            raise DataError(
                f"{self.name} hands the first tokens back exact, so it has no in-place protocol: use 'chunked' or "
                "'snapshot'"
            )
        return MeteredQuantizedCache(self.backend, model.config, **self._arguments())

    def new_pass(self) -> None:
        """None, as no layer reads another here; ``Compressor.new_pass``."""

    def reconstruct(self, layer: int, keys: torch.Tensor, values: torch.Tensor, known=None) -> tuple:
        """Values that one layer reads back of keys and values (batch, num_kv_heads, seq_len, head_dim) stored once,
        all together: without the error of storing a growing history again and again."""
        store = self._layer()
        store.update(keys, values)
        return store.update(keys[..., :0, :], values[..., :0, :])

    def _layer(self) -> QuantizedLayer:
        return LAYERS[self.backend](**self._arguments())

    def _arguments(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "backend"}


class MeteredQuantizedCache(QuantizedCache):
    """transformers' cache with the byte meter's report; nothing of how it stores and reads is touched."""

    def report(self) -> Report:
        """Bytes by kind, measured from the storage of the tensors held now; the unpacked tokens are the window."""
        layers = [layer for layer in self.layers if layer.is_initialized]
        packed = [x for layer in layers for x in (layer._quantized_keys, layer._quantized_values)]
        window = [x for layer in layers for x in (layer.keys, layer.values)]
        kinds = Counter(window=tensor_bytes(window), beam_order=tensor_bytes([x._pending_beam_idx for x in layers]))
        for stored in packed:
            kinds.update({name: tensor_bytes(part) for name, part in _parts(stored).items()})
        packed_values = sum(_shape(stored).numel() for stored in packed)
        values = packed_values + sum(x.numel() for x in window)
        shape = self.get_seq_length(), _shape(packed[0])[0] if packed else 0
        return Report(dict(kinds), tensor_bytes(packed), packed_values, values, *shape, 0, values)


def _parts(stored) -> dict[str, torch.Tensor]:
    """The tensors that a backend keeps of one layer's keys or values."""
    if isinstance(stored, tuple):  # hqq: codes and a dict about them
        return {"codes": stored[0], "scale": stored[1]["scale"], "zero": stored[1]["zero"]}
    return {"codes": stored._data, "scale": stored._scale, "shift": stored._shift}


def _shape(stored) -> torch.Size:
    """(batch, num_kv_heads, seq_len, head_dim) of what was quantised."""
    return stored[1]["shape"] if isinstance(stored, tuple) else stored.shape


def _load(backend: str) -> None:
    """Import a backend and build quanto's C++ extension. Raises ``ImportError`` that says what to install."""
    module, package = PACKAGES[backend]
    try:
        import_module(module)
    except ImportError as error:
        raise ImportError(f"backend {backend!r} needs {package}: pip install 'vqkv[peers]'") from error
    if backend == "quanto":
        try:
            with _scripts_on_path():
                torch.ops.quanto.unpack(torch.zeros(1, 1, dtype=torch.uint8), 4)
        except (RuntimeError, OSError) as error:
            raise ImportError(
                "optimum-quanto compiles a C++ extension at its first use, which failed: install a C++ compiler (on "
                "Debian: apt install g++) and pip install ninja"
            ) from error


@contextmanager
def _scripts_on_path():
    """pip puts ninja beside python, where it is not found unless the environment is activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([*filter(None, [before]), str(Path(sys.executable).parent)])
    try:
        yield
    finally:
        os.environ["PATH"] = before
