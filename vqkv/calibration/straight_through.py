"""Keys and values that a model reads back through codecs while it is trained, as if they had been stored exactly."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vqkv.calibration import together
from vqkv.codecs.base import Codec
from vqkv.codecs.predictive import Place
from vqkv.models.capture import hooked
from vqkv.models.load import KVSource


class StraightThrough:
    """While ``reading(model)``, every forward pass reads its keys and values, as the projections make them before RoPE,
    through ``codecs`` in the state these are in. Gradients pass as if nothing had happened (van den Oord et al. 2017).

    The first ``sink_tokens`` of each sequence stay exact. ``seen`` collects, while ``recording``, the exact keys and
    values (batch, num_kv_heads, seq_len, head_dim) by place.
    """

    def __init__(self, codecs: dict[Place, Codec], sink_tokens: int = 0):
        self.codecs, self.sink_tokens = codecs, sink_tokens
        self.seen: dict[Place, list[Tensor]] = {place: [] for place in codecs}
        self.recording = False

    def reading(self, model):
        """A context in which ``model`` reads through the codecs."""
        return hooked(model, self._read)

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
        batch = [torch.cat(self.seen[place]) for place in learning]
        for seen in self.seen.values():
            seen.clear()
        together.learn([*learning.values()], batch)
        together.agree([*learning.values()], [x.device for x in batch])

    def _read(self, source: KVSource, role: str, part: int, output: Tensor) -> Tensor | None:
        place = role, source.layer_idx
        if place not in self.codecs:
            return None
        with torch.no_grad():
            x = source.heads(output.detach(), part)
            if self.recording:
                self.seen[place].append(x)
            x_hat = self.codecs[place].quantize_dequantize(x)
            x_hat[:, :, : self.sink_tokens] = x[:, :, : self.sink_tokens]
            read = _replaced(source, output.detach(), part, x_hat)
        return (output.float() + (read - output.float()).detach()).to(output.dtype)


def _replaced(source: KVSource, output: Tensor, part: int, x: Tensor) -> Tensor:
    """A projection's ``output`` in float32 with its ``part`` made of x (batch, num_kv_heads, seq_len, head_dim)."""
    parts = [*output.float().flatten(2).chunk(source.num_parts, dim=-1)]
    parts[part] = x.transpose(1, 2).flatten(2)
    return torch.cat(parts, dim=-1).view(output.shape)
