"""Bytes of the caches of many texts, added up."""

from dataclasses import dataclass

from vqkv.cache.meter import Report, tensor_bytes


@dataclass
class Tally:
    """Sums over every cache that a task filled, and what of the task they bear on.

    ``scored`` counts the tokens whose probability was asked for (loglikelihood) or that were generated;
    ``scored_packed`` those of them that could read at least one packed token: where that share is small, a task says
    little about a codec. ``truncated`` counts the texts that did not fit into the model's positions and lost their
    beginning.
    """

    packed_bytes: int = 0
    packed_values: int = 0
    cache_bytes: int = 0
    values: int = 0
    side_bytes: int = 0
    scored: int = 0
    scored_packed: int = 0
    truncated: int = 0

    def add(self, cache) -> None:
        """Take in a cache that has read its texts."""
        found = report(cache)
        self.packed_bytes += found.packed_bytes
        self.packed_values += found.packed_values
        self.cache_bytes += found.cache_bytes
        self.values += found.values
        self.side_bytes = found.side_bytes

    @property
    def bits_per_value(self) -> float:
        """Stored bits for each value of the packed tokens; of an uncompressed cache, of all. NaN where none is."""
        return 8 * self.packed_bytes / self.packed_values if self.packed_values else float("nan")

    @property
    def ratio(self) -> float:
        """Bytes of fp16 caches of the same tokens over those that were there: 0.5 for an uncompressed fp32 cache."""
        return 2 * self.values / self.cache_bytes if self.cache_bytes else float("nan")

    @property
    def packed_share(self) -> float:
        """``scored_packed`` over ``scored``."""
        return self.scored_packed / self.scored if self.scored else float("nan")

    def as_dict(self) -> dict:
        """The columns of a table."""
        names = ("bits_per_value", "ratio", "side_bytes", "packed_share", "truncated")
        return {name: getattr(self, name) for name in names}


def report(cache) -> Report:
    """The byte meter's report of a cache; transformers' uncompressed one holds each value as it is."""
    if hasattr(cache, "report"):
        return cache.report()
    held = [x for layer in cache.layers if layer.is_initialized for x in (layer.keys, layer.values)]
    size, count = tensor_bytes(held), sum(x.numel() for x in held)
    batch_size = len(held[0]) if held else 0
    return Report({"exact": size}, size, count, count, cache.get_seq_length(), batch_size, side_bytes=0)
