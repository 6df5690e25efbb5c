"""Keys and values that a model reads back through codecs while it is trained, as if they had been stored exactly."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vqkv.codecs.pipeline import Codec
from vqkv.codecs.predictive import Place
from vqkv.models.layers import Door
from vqkv.models.rotation import Rotation


class StraightThrough:
    """A forward pass with ``cache(model)`` reads its keys and values through ``codecs`` in the state these are in, but
    for the first ``sink_tokens``, keys rotated back by ``turns``. Gradients pass as if nothing had happened (van den
    Oord et al. 2017). ``seen`` collects, while ``recording``, the exact keys and values (batch, num_kv_heads, seq_len,
    head_dim) by place."""

    def __init__(self, codecs: dict[Place, Codec], turns: list[Rotation | None], sink_tokens: int = 0):
        self.codecs, self.turns, self.sink_tokens = codecs, turns, sink_tokens
        self.seen: dict[Place, list[Tensor]] = {place: [] for place in codecs}
        self.recording = False

    def cache(self, model) -> Door:
        """A cache for one forward pass, in which ``model`` reads through the codecs."""
        return Door(model, self._read)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Inside, forward passes are recorded; not so where a backward pass computes a layer's activations again."""
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def learn(self) -> None:
        """One learning step of every codec that learns, on all that was recorded since the last one."""
        learning = {place: codec for place, codec in self.codecs.items() if codec.learns and not codec.ready}
        for place, codec in learning.items():
            codec.partial_fit(torch.cat(self.seen[place]))
        for seen in self.seen.values():
            seen.clear()

    def _read(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._through(("key", layer), keys, self.turns[layer]), self._through(("value", layer), values, None)

    def _through(self, place: Place, x: Tensor, turn: Rotation | None) -> Tensor:
        if place not in self.codecs:
            return x
        with torch.no_grad():
            exact = x.detach() if turn is None else turn.turned(x.detach().float(), back=True).to(x)
            if self.recording:
                self.seen[place].append(exact)
            read = self.codecs[place].quantize_dequantize(exact)
            read[:, :, : self.sink_tokens] = exact[:, :, : self.sink_tokens]
            read = read if turn is None else turn.turned(read.float())
        return (x.float() + (read - x.float()).detach()).to(x.dtype)
