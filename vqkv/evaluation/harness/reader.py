"""Texts -> logits, read through a cache under a protocol. Knows nothing of lm_eval.

Padding is told to the cache by an attention mask, so that a text's bytes and logits do not depend on its neighbours in
the batch; a peer's cache, which knows no padding, gets one text at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache

from vqkv.cache.compressor import Compressor
from vqkv.errors import DataError, UnknownNameError
from vqkv.evaluation.harness.tally import Tally, report

PROTOCOLS = ("in_place", "chunked")


@dataclass
class AskedText:
    """``tokens`` to read, and what was asked: (number of the request, its continuation). A continuation ends one token
    after ``tokens``, whose last one predicts its last one."""

    tokens: list[int]
    asked: list[tuple[int, list[int]]]

    @property
    def start(self) -> int:
        """The first position whose prediction is asked for."""
        return len(self.tokens) - max(len(continuation) for _, continuation in self.asked)


@dataclass
class Family:
    """Texts that begin with the same ``shared`` tokens, which are read once."""

    texts: list[AskedText]
    shared: int = 0


@dataclass
class Piece:
    """Logits (tokens, vocabulary) of one text's positions from ``start`` on."""

    text: AskedText
    start: int
    logits: Tensor
    packed: bool  # whether packed tokens were there to be read


@dataclass
class Reader:
    """``compressor``: a fitted ``Compressor``, a peer of ``vqkv.evaluation.peers``, or None for the uncompressed cache.
    ``protocol``: ``in_place`` (one pass) or ``chunked`` (``chunk_size`` tokens at a time, each reading packed history).

    Raises ``UnknownNameError`` for another protocol, ``DataError`` for a chunk size that is none or a peer that cannot
    do the protocol, ``FormatError`` for a compressor of another model.
    """

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

    @property
    def step(self) -> int:
        """Texts may be cut at multiples of this many tokens without a change to what is packed or read."""
        if self.protocol == "chunked":
            return self.chunk_size
        return 1 if self.compressor is None else self.compressor.tokens_per_row

    def family(self, texts: list[AskedText]) -> Family:
        """A family: texts, and the number of tokens that all share before anything is asked."""
        if len(texts) < 2 or not self.knows_padding:
            return Family(texts)
        shortest = min(text.start for text in texts)
        first, last = (choose(text.tokens[:shortest] for text in texts) for choose in (min, max))  # in lexical order
        common = next((i for i, pair in enumerate(zip(first, last, strict=True)) if len(set(pair)) > 1), shortest)
        return Family(texts, common // self.step * self.step)

    @torch.inference_mode()
    def read(self, families: list[Family]) -> Iterator[Piece]:
        """Logits of the texts, piece by piece, from the first token that is not shared."""
        cache, device = self.new_cache(), self.model.device
        known = _padded([family.texts[0].tokens[: family.shared] for family in families], device)
        for start, stop in self._pieces(known.mask.shape[1]):
            self._pass(self.model.base_model, cache, known, start, stop)
        owners = torch.tensor([i for i, family in enumerate(families) for _ in family.texts], device=device)
        if known.mask.shape[1] and len(owners) > len(families):
            cache.batch_select_indices(owners)
        texts = [(text, family.shared) for family in families for text in family.texts]
        rest = _padded([text.tokens[shared:] for text, shared in texts], device, known.mask[owners])
        packed = False
        for start, stop in self._pieces(rest.tokens.shape[1]):
            packed = packed or self.holds_packed(cache)
            logits = self._pass(self.model, cache, rest, start, stop).logits
            packed = packed or (self.protocol == "in_place" and self.holds_packed(cache))
            for (text, shared), row in zip(texts, logits, strict=True):
                count = min(len(text.tokens) - shared, stop) - start
                if count > 0:
                    yield Piece(text, shared + start, row[:count], packed)
        self.tally.add(cache)

    def _pass(self, module, cache, padded: "_Padded", start: int, stop: int):
        mask = torch.cat([padded.before, padded.mask[:, :stop]], dim=1)
        about = {} if mask.all() else {"attention_mask": mask.long(), "position_ids": padded.positions[:, start:stop]}
        return module(padded.tokens[:, start:stop], past_key_values=cache, use_cache=True, **about)

    def _pieces(self, length: int) -> list[tuple[int, int]]:
        size = self.chunk_size if self.protocol == "chunked" else max(1, length)
        return [(start, min(length, start + size)) for start in range(0, length, size)]

    def holds_packed(self, cache) -> bool:
        """True if a codec has packed any of a cache's tokens."""
        return self.compressor is not None and report(cache).packed_values > 0


@dataclass
class _Padded:
    """``tokens`` (rows, slots), padded on the right; ``mask`` says which are, ``before`` (rows, earlier slots) likewise
    of what is already in the cache; ``positions`` in each row's own text."""

    tokens: Tensor
    mask: Tensor
    before: Tensor
    positions: Tensor


def _padded(rows: list[list[int]], device, before: Tensor | None = None) -> _Padded:
    length = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows], dtype=torch.long, device=device)
    sizes = torch.tensor([len(row) for row in rows], device=device)[:, None]
    slots = torch.arange(length, device=device)
    before = torch.zeros(len(rows), 0, dtype=torch.bool, device=device) if before is None else before
    positions = before.sum(1, keepdim=True) + torch.minimum(slots, sizes - 1).clamp(min=0)
    return _Padded(tokens, slots < sizes, before, positions)
