"""Keyframe + delta streams of a growing KV cache (VQ quality framework, section 1): what page 05 weighs.

Every ``interval`` steps, counted from 1, all of the cache is written, in between only the tokens that a step appended.
As a file a stream is a header, what its codecs are and have learned, then the tensors of each step's payloads.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from safetensors.torch import save
from torch import Tensor

from vqkv import presets
from vqkv.codecs.exact import Fp16
from vqkv.codecs.payload import Payload
from vqkv.codecs.pipeline import Codec

MAGIC_BYTES = 8  # at the start of a file
RECORD_BYTES = 24  # before the header and before each step: length, tokens and checksum
KINDS = KEYFRAME, DELTA = ("keyframes", "deltas")


@dataclass(eq=False)
class Verbatim(Fp16):
    """Values as they are in ``dtype``."""

    dtype: str = "float32"

    def _encode(self, x: Tensor) -> Payload:
        return Payload({"values": x.to(getattr(torch, self.dtype))})


class Stream:
    """A cache (batch, num_kv_heads, seq_len, head_dim), keys and values over layers, as it grows: a token a step.

    ``keyframes``, ``deltas``: ``"exact"``, ``"fp32"``, ``"int4"``, a fitted codec, or pairs over layers, as
    ``Compressor.codecs``; the defaults are the source's. ``interval``: steps per keyframe.
    """

    def __init__(self, live: list[list[Tensor]], keyframes="fp32", deltas="int4", interval: int = 64):
        tensors = [x.detach().cpu() for pair in zip(*live, strict=True) for x in pair]
        self.interval, self.dtype, self.token = interval, tensors[0].dtype, [x[:, :, :1] for x in tensors]
        self.codecs = {kind: _codecs(stored, tensors) for kind, stored in zip(KINDS, (keyframes, deltas), strict=True)}
        self.steps: list[list[Payload]] = []
        for number in range(1, tensors[0].shape[2] + 1):
            first = 0 if self.kind(number) == KEYFRAME else number - 1
            new = [x[:, :, first:number] for x in tensors]
            shares = self._shares(self.kind(number))
            self.steps.append([codec.encode(torch.cat([new[i] for i in indices])) for codec, indices in shares])

    def __len__(self) -> int:
        return len(self.steps)

    def kind(self, number: int) -> str:
        """Of step ``number``, counted from 1."""
        return DELTA if number % self.interval else KEYFRAME

    def state(self, step: int) -> tuple[list[Tensor], list[Tensor]]:
        """Read back (keys, values) after ``step`` (from 0): lists of (batch, num_kv_heads, seq_len, head_dim)."""
        last = step + 1
        numbers = range(max(1, last - last % self.interval), last + 1)
        parts = [self._decoded(number) for number in numbers]
        joined = [torch.cat(pieces, dim=2) for pieces in zip(*parts, strict=True)]
        return joined[0::2], joined[1::2]

    def report(self) -> dict:
        """Count bytes by kind, and ratios, header apart, to every snapshot in fp32, the source's baseline, and the last
        one alone in fp16, the cache that a server really holds."""
        written, steps = dict.fromkeys(KINDS, 0), len(self)
        for number, payloads in enumerate(self.steps, 1):
            written[self.kind(number)] += sum(payload.nbytes for payload in payloads)
        values = sum(x.numel() for x in self.token)  # of one token
        codecs = list(dict.fromkeys(codec for own in self.codecs.values() for codec in own))
        numbers = {kind: [codecs.index(codec) for codec in own] for kind, own in self.codecs.items()}
        text = json.dumps({"interval": self.interval, "codecs": [codec.config() for codec in codecs]} | numbers)
        learned = {f"{i}.{name}": x for i, codec in enumerate(codecs) for name, x in codec.state_dict().items()}
        tensors = {name: x.detach().to("cpu", copy=True).contiguous() for name, x in learned.items()}
        header = save(tensors | {"header": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)})
        stored = MAGIC_BYTES + RECORD_BYTES * (1 + steps) + sum(written.values())
        baselines = {"every_fp32": steps * (steps + 1) // 2 * values * 4, "live_fp16": steps * values * 2}
        return {
            "keyframe_bytes": written[KEYFRAME],
            "delta_bytes": written[DELTA],
            "header_bytes": len(header),
            "side_bytes": sum(codec.side_bytes for codec in codecs),
            "file_bytes": stored + len(header),
            **{f"{name}_bytes": count for name, count in baselines.items()},
            **{f"ratio_{name}": count / stored for name, count in baselines.items()},
        }

    def _shares(self, kind: str) -> Iterator[tuple[Codec, list[int]]]:
        """Return a codec and its tensors, which are stored as one batch: a step of one token is many small ones."""
        own = self.codecs[kind]
        for codec in dict.fromkeys(own):
            yield codec, [i for i, other in enumerate(own) if other is codec]

    def _decoded(self, number: int) -> list[Tensor]:
        decoded: dict[int, Tensor] = {}
        batch = len(self.token[0])
        for (codec, indices), payload in zip(self._shares(self.kind(number)), self.steps[number - 1], strict=True):
            decoded |= zip(indices, codec.decode(payload, self.dtype).split(batch), strict=True)
        return [decoded[i] for i in range(len(self.token))]


def _codecs(stored, tensors: list[Tensor]) -> list[Codec]:
    """Return the codec of each tensor of a step."""
    head_dim = tensors[0].shape[-1]
    if stored == "int4":
        stored = presets.quanto(4).key_codec(head_dim).fit(tensors[0][:1, :, :1])  # it has nothing to learn
    elif isinstance(stored, str):
        exact = str(tensors[0].dtype).removeprefix("torch.")
        stored = Verbatim(head_dim, {"fp32": "float32", "exact": exact}[stored])
    return [stored] * len(tensors) if isinstance(stored, Codec) else [codec for pair in stored for codec in pair]
