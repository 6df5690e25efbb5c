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
from vqkv.errors import DataError

ROLES = ("key", "value")
Place = tuple[str, int]  # ("key" or "value", layer)


def side_by_side(x: Tensor) -> Tensor:
    """(batch, num_kv_heads, seq_len, head_dim) -> (batch, seq_len, num_kv_heads * head_dim): all heads of a token."""
    return x.transpose(1, 2).flatten(2)


def inputs(known: Mapping[Place, Tensor], sources: Iterable[Place], like: Tensor) -> Tensor:
    """A predictor's input: the sources' heads side by side, (batch, seq_len, in_features) in float32."""
    none = like.new_empty(like.shape[0], like.shape[2], 0, dtype=torch.float32)
    return torch.cat([none, *(side_by_side(known[place]).to(like.device).float() for place in sources)], dim=-1)


@dataclass(frozen=True)
class Prediction:
    """A fitted predictor and the places whose reconstructions it reads; none of them for a constant."""

    predictor: Predictor
    sources: tuple[Place, ...]

    def __call__(self, known: Mapping[Place, Any], like: Tensor) -> Tensor:
        """Values of ``like``'s shape, float32, from sources in ``known``. Raises ``DataError`` if one is missing."""
        if missing := [place for place in self.sources if place not in known]:
            raise DataError(
                f"the prediction reads {missing}, of which nothing is known: go through the layers in order"
            )
        if isinstance(self.predictor, Slice) and callable(read := known[self.sources[0]]):
            first = self.predictor.start // like.shape[3]
            return read(first, first + like.shape[1]).to(like.device)
        rows = inputs(known, self.sources, like)
        return self.predictor(rows).unflatten(-1, (like.shape[1], like.shape[3])).transpose(1, 2)


def last_readers(predictions: Mapping[Place, Prediction]) -> dict[Place, Place]:
    """For each place that some prediction reads, the last place to read it (layers in order, keys before values)."""
    order = sorted(predictions, key=lambda place: (place[1], ROLES.index(place[0])))
    return {source: place for place in order for source in predictions[place].sources}


class Known(dict):
    """Reconstructions by place while one pass goes through the layers: kept only until their last reader has run."""

    def __init__(self, last_reader: dict[Place, Place] | None = None):
        super().__init__()
        self.last_reader = last_reader or {}

    def learn(self, place: Place, reconstruct: Callable[[], Any]) -> None:
        """Keep ``reconstruct()`` for later readers, if there are any; forget what ``place`` was the last to read."""
        for done in [source for source in self if self.last_reader.get(source) == place]:
            del self[done]
        if place in self.last_reader:
            self[place] = reconstruct()


@dataclass(eq=False)
class PredictiveCodec:
    """Keys or values of one layer, as stored (batch, num_kv_heads, seq_len, head_dim), -> payload -> back."""

    codec: Codec
    place: Place
    prediction: Prediction | None = None

    @property
    def tokens_per_row(self) -> int:
        return self.codec.tokens_per_row

    def encode(self, x: Tensor, known: Known) -> Payload:
        """Algorithm 2: only the residual of the prediction is stored. Raises what ``Codec.encode`` does."""
        if self.prediction is None:
            payload = self.codec.encode(x)
            known.learn(self.place, lambda: self.codec.decode(payload))
        else:
            predicted = self.prediction(known, x)
            payload = self.codec.encode(x.float() - predicted)
            known.learn(self.place, lambda: self.codec.decode(payload) + predicted)
        return payload

    def through(self, x: Tensor, known: Known) -> Tensor:
        """Read back ``x`` as if it had been stored, float32."""
        if self.prediction is None:
            restored = self.codec.quantize_dequantize(x)
        else:
            predicted = self.prediction(known, x)
            restored = self.codec.quantize_dequantize(x.float() - predicted) + predicted
        known.learn(self.place, lambda: restored)
        return restored

    def decode(self, payload: Payload, known: Known) -> Tensor:
        """Algorithm 3: what is stored and, on top, what the reconstructions in ``known`` predict; float32."""
        x = self.codec.decode(payload)
        restored = x if self.prediction is None else x + self.prediction(known, x)
        known.learn(self.place, lambda: restored)
        return restored


@dataclass(eq=False)
class JointCodec(PredictiveCodec):
    """Of the first layer of those that are stored together: the first ``heads`` of what is decoded are its own, and
    others learn of it how to read theirs (``Codec.reader``)."""

    heads: int = 0

    def decode(self, payload: Payload, known: Known) -> Tensor:
        read = self.codec.reader(payload)
        known.learn(self.place, lambda: read)
        return read(0, self.heads)
