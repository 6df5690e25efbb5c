"""One role of one layer as it is stored: a codec, and what other layers say about its input beforehand.

Source: AQUA-KV (Shutova et al. 2025, "Cache me if you must"), algorithms 2 (encode) and 3 (decode).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vqkv.codecs.payload import Payload
from vqkv.codecs.pipeline import Codec
from vqkv.codecs.predictor_kinds import Predictor, Slice

ROLES = ("key", "value")
LayerRole = tuple[str, int]  # ("key" or "value", layer)


def side_by_side(x: Tensor) -> Tensor:
    """Join all heads of a token: (batch, num_kv_heads, seq_len, head_dim) -> (batch, seq_len, features)."""
    return x.transpose(1, 2).flatten(2)


def inputs(reconstructions: Mapping[LayerRole, Tensor], sources: Iterable[LayerRole], like: Tensor) -> Tensor:
    """Put the sources' heads side by side, a predictor's input: (batch, seq_len, in_features) in float32."""
    none = like.new_empty(like.shape[0], like.shape[2], 0, dtype=torch.float32)
    parts = [side_by_side(reconstructions[source]).to(like.device).float() for source in sources]
    return torch.cat([none, *parts], dim=-1)


@dataclass(frozen=True)
class Prediction:
    """A fitted predictor, and by layer and role the ``sources`` that it reads; none of them for a constant."""

    predictor: Predictor
    sources: tuple[LayerRole, ...]

    def __call__(self, reconstructions: Mapping[LayerRole, Any], like: Tensor) -> Tensor:
        """Predict values of ``like``'s shape, float32, from ``reconstructions`` of the sources."""
        if isinstance(self.predictor, Slice) and callable(read := reconstructions[self.sources[0]]):
            first = self.predictor.start // like.shape[3]
            return read(first, first + like.shape[1]).to(like.device)
        rows = inputs(reconstructions, self.sources, like)
        return self.predictor(rows).unflatten(-1, (like.shape[1], like.shape[3])).transpose(1, 2)


def last_readers(predictions: Mapping[LayerRole, Prediction]) -> dict[LayerRole, LayerRole]:
    """Map each source of a prediction to the last one that reads it (layers in order, keys before values)."""
    order = sorted(predictions, key=lambda reader: (reader[1], ROLES.index(reader[0])))
    return {source: reader for reader in order for source in predictions[reader].sources}


class Reconstructions(dict):
    """Reconstructions by role and layer while one pass goes through the layers, until their last reader has run."""

    def __init__(self, last_reader: dict[LayerRole, LayerRole] | None = None):
        super().__init__()
        self.last_reader = last_reader or {}

    def learn(self, layer_role: LayerRole, reconstruct: Callable[[], Any]) -> None:
        """Keep ``reconstruct()`` for later readers, if there are any; forget what ``layer_role`` was last to read."""
        for done in [source for source in self if self.last_reader.get(source) == layer_role]:
            del self[done]
        if layer_role in self.last_reader:
            self[layer_role] = reconstruct()


@dataclass(eq=False)
class PredictiveCodec:
    """Keys or values of one layer, as stored (batch, num_kv_heads, seq_len, head_dim), -> payload -> back."""

    codec: Codec
    layer_role: LayerRole
    prediction: Prediction | None = None

    @property
    def block_tokens(self) -> int:
        return self.codec.block_tokens

    def encode(self, x: Tensor, reconstructions: Reconstructions) -> Payload:
        """Store only the residual of the prediction (algorithm 2). Raises what ``Codec.encode`` does."""
        predicted = self._predicted(x, reconstructions)
        payload = self.codec.encode(x if predicted is None else x.float() - predicted)
        reconstructions.learn(self.layer_role, lambda: _sum(self.codec.decode(payload), predicted))
        return payload

    def through(self, x: Tensor, reconstructions: Reconstructions) -> Tensor:
        """Read back ``x`` as if it had been stored, float32."""
        predicted = self._predicted(x, reconstructions)
        restored = _sum(self.codec.quantize_dequantize(x if predicted is None else x.float() - predicted), predicted)
        reconstructions.learn(self.layer_role, lambda: restored)
        return restored

    def decode(self, payload: Payload, reconstructions: Reconstructions) -> Tensor:
        """Add what the ``reconstructions`` predict to what is stored (algorithm 3); float32."""
        x = self.codec.decode(payload)
        restored = _sum(x, self._predicted(x, reconstructions))
        reconstructions.learn(self.layer_role, lambda: restored)
        return restored

    def _predicted(self, like: Tensor, reconstructions: Reconstructions) -> Tensor | None:
        return None if self.prediction is None else self.prediction(reconstructions, like)


def _sum(x: Tensor, predicted: Tensor | None) -> Tensor:
    return x if predicted is None else x + predicted


@dataclass(eq=False)
class JointCodec(PredictiveCodec):
    """Of the first layer of those that are stored together: the first ``heads`` of what is decoded are its own, and
    others learn of it how to read theirs (``Codec.reader``)."""

    heads: int = 0

    def decode(self, payload: Payload, reconstructions: Reconstructions) -> Tensor:
        read = self.codec.reader(payload)
        reconstructions.learn(self.layer_role, lambda: read)
        return read(0, self.heads)
