"""Other people's caches, run as they are: their code stores and reads, ours feeds, scores and weighs."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from transformers.cache_utils import HQQQuantizedLayer, QuantizedCache, QuantizedLayer, QuantoQuantizedLayer

from vqkv.cache.meter import Report, tensor_bytes
from vqkv.cache.settings import CacheSettings
from vqkv.errors import DataError

# quanto compiles C++ at its first use by ninja, which pip puts next to python: only an activated shell finds it there.
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
LAYERS: dict[str, type[QuantizedLayer]] = {"quanto": QuantoQuantizedLayer, "hqq": HQQQuantizedLayer}


@dataclass(frozen=True)
class TransformersQuantized:
    """transformers' own ``QuantizedCache``, unmodified, in place of a compressor: ``evaluate(model, peer, tokens)``.

    It is what ``generate(cache_implementation="quantized")`` makes; the arguments are its own. Affine codes in groups
    of ``q_group_size`` values, keys after RoPE. "quanto" (2, 4 bits) takes scale and shift from a group's ends. "hqq"
    (1, 2, 3, 4, 8 bits) solves for the zero point; at axis 0 its groups cross tokens, heads and the batch's sequences.

    The first update packs all tokens and hands them back exact: one pass scores as fp16 at any bits. Whenever
    ``residual_length`` more have come, the complete history is quantized again. Scales and tokens not yet packed keep
    the model's dtype: compare bytes in bfloat16. Raises ``ImportError`` without the backend's package.
    """

    backend: str = "quanto"
    nbits: int = 4
    q_group_size: int = 64
    residual_length: int = 128
    axis_key: int = 0
    axis_value: int = 0

    side_bytes: ClassVar[int] = 0
    settings: ClassVar[CacheSettings] = CacheSettings(pre_rope=False)  # the nearest in this library's words

    def __post_init__(self):
        trial = torch.arange(8.0 * self.q_group_size).view(1, 1, -1, 8)
        try:
            self.reconstruct(0, trial, trial)
        except (ImportError, OSError, RuntimeError) as error:
            raise ImportError(
                f"{self.name} needs pip install 'vqkv[peers]', quanto also a C++ compiler, which failed: {error}"
            ) from error

    @property
    def name(self) -> str:
        """``transformers-quanto`` or ``transformers-hqq``."""
        return f"transformers-{self.backend}"

    def new_cache(self, model, in_place: bool = False) -> "MeteredQuantizedCache":
        """Return an empty cache. Raises ``DataError`` for ``in_place`` and for models with sliding windows."""
        if in_place:
            raise DataError(f"{self.name} hands the first tokens back exact: it has no in-place protocol")
        try:
            return MeteredQuantizedCache(self.backend, model.config, **self._arguments())
        except ValueError as error:
            raise DataError(f"{self.name} does not fit {type(model).__name__}: {error}") from error

    def new_pass(self) -> None:
        """None, as no layer reads another here; ``Compressor.new_pass``."""

    def reconstruct(self, layer: int, keys: torch.Tensor, values: torch.Tensor, known=None) -> tuple:
        """Return what one layer reads back of keys and values (batch, num_kv_heads, seq_len, head_dim) stored once."""
        store = LAYERS[self.backend](**self._arguments())
        store.update(keys, values)
        return store.update(keys[..., :0, :], values[..., :0, :])

    def _arguments(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "backend"}


class MeteredQuantizedCache(QuantizedCache):
    """transformers' cache with the byte meter's report; nothing of how it stores and reads is touched."""

    def report(self) -> Report:
        """Count bytes by kind, from the storage of the tensors held now; the unpacked tokens are the window."""
        layers = [layer for layer in self.layers if layer.is_initialized]
        packed = [x for layer in layers for x in (layer._quantized_keys, layer._quantized_values)]
        window = [x for layer in layers for x in (layer.keys, layer.values)]
        kinds = {"packed": tensor_bytes(packed), "window": tensor_bytes(window)}
        kinds["beam_order"] = tensor_bytes([layer._pending_beam_idx for layer in layers])
        packed_values = sum(_shape(stored).numel() for stored in packed)
        values = packed_values + sum(x.numel() for x in window)
        shape = self.get_seq_length(), _shape(packed[0])[0] if packed else 0
        return Report(kinds, kinds["packed"], packed_values, values, *shape, 0, values)


def _shape(stored) -> torch.Size:
    """Return (batch, num_kv_heads, seq_len, head_dim) of what was quantised."""
    return stored[1]["shape"] if isinstance(stored, tuple) else stored.shape
