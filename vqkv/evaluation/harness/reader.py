"""Texts -> logits, read through a cache under a protocol. Knows nothing of lm_eval.

Padding is told to the cache by an attention mask, so that a text's bytes and logits do not depend on its neighbours in
the batch; a peer's cache, which knows no padding, gets one text at a time.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache

from vqkv.cache.compressor import Compressor
from vqkv.cache.meter import Report, tensor_bytes, total
from vqkv.errors import DataError, UnknownNameError
from vqkv.models.plain import evaluating

PROTOCOLS = ("in_place", "chunked")


@dataclass
class Tally:
    """Reports of every cache that a task filled, and what of the task they bear on: ``scored`` tokens whose probability
    was asked for or that were generated; ``scored_packed``, those of them that could read a packed token: where that
    share is small, a task says little about a codec; ``truncated`` texts that lost their beginning."""

    reports: list[Report] = field(default_factory=list)
    scored: int = 0
    scored_packed: int = 0
    truncated: int = 0

    def as_dict(self) -> dict:
        """The columns of a table; of an uncompressed cache ``bits_per_value`` is that of all values."""
        whole = total(self.reports)
        measured = {name: getattr(whole, name) for name in ("bits_per_value", "ratio", "side_bytes")}
        share = self.scored_packed / self.scored if self.scored else math.nan
        return measured | {"packed_share": share, "truncated": self.truncated}


@dataclass
class Reader:
    """``compressor``: a fitted ``Compressor``, a peer of ``vqkv.study.peers``, or None for the uncompressed cache.
    ``protocol``: ``in_place`` (one pass) or ``chunked`` (``chunk_size`` tokens at a time, each reading packed history).
    Raises ``UnknownNameError`` for another protocol, ``DataError`` for a chunk size that is none or a peer that cannot
    do the protocol, ``FormatError`` for a compressor of another model."""

    model: torch.nn.Module
    compressor: object = None
    protocol: str = "chunked"
    chunk_size: int = 32
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self):
        if self.protocol not in PROTOCOLS:
            raise UnknownNameError("protocol", self.protocol, PROTOCOLS)
        if type(self.chunk_size) is not int or self.chunk_size < 1:
            raise DataError(f"chunk_size {self.chunk_size!r} must be a whole number from 1 on")
        self.model = evaluating(self.model)
        self.new_cache()

    def new_cache(self):
        """An empty cache for the model."""
        if self.compressor is None:
            return DynamicCache(config=self.model.config)
        return self.compressor.new_cache(self.model, in_place=self.protocol == "in_place")

    @property
    def knows_padding(self) -> bool:
        """True if texts of several lengths can share a batch."""
        return self.compressor is None or isinstance(self.compressor, Compressor)

    @torch.no_grad()
    def read(self, texts: list[tuple[int, ...]], firsts: list[int]) -> tuple[list[Tensor], float]:
        """Logits (tokens, vocabulary) of each text from its position ``firsts`` on, and the position from which on
        packed tokens were there to be read."""
        cache, device, packed_from = self.new_cache(), self.model.device, math.inf
        length = max(map(len, texts))
        tokens = torch.tensor([[*text, *[0] * (length - len(text))] for text in texts], device=device)
        sizes, slots = torch.tensor([[len(text)] for text in texts], device=device), torch.arange(length, device=device)
        mask, positions = (slots < sizes).long(), torch.minimum(slots, sizes - 1)
        found: list[list[Tensor]] = [[] for _ in texts]
        step = self.chunk_size if self.protocol == "chunked" else length
        for start in range(0, length, step):
            stop = min(length, start + step)
            if self.holds_packed(cache):
                packed_from = min(packed_from, start)
            padded = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
            about = {} if mask[:, :stop].all() else padded
            logits = self.model(tokens[:, start:stop], past_key_values=cache, use_cache=True, **about).logits
            for own, row, text, first in zip(found, logits, texts, firsts, strict=True):
                own.append(row[max(0, first - start) : max(0, len(text) - start)].clone())
        if self.protocol == "in_place" and self.holds_packed(cache):
            packed_from = 0
        self.tally.reports.append(report(cache))
        return [torch.cat(own) for own in found], packed_from

    def holds_packed(self, cache) -> bool:
        """True if a codec has packed any of a cache's tokens."""
        return self.compressor is not None and report(cache).packed_values > 0


def report(cache) -> Report:
    """The byte meter's report of a cache; transformers' uncompressed one holds each value as it is."""
    if hasattr(cache, "report"):
        return cache.report()
    held = [x for layer in cache.layers if layer.is_initialized for x in (layer.keys, layer.values)]
    size, count = tensor_bytes(held), sum(x.numel() for x in held)
    return Report({"exact": size}, size, count, count, cache.get_seq_length(), len(held[0]), side_bytes=0)
