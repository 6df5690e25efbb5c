"""The byte meter: what tensors really hold, never what a formula says they should."""

import dataclasses
from collections import Counter

import torch

from vqkv.codecs.stage import Part


@dataclasses.dataclass(frozen=True)
class Report:
    """Bytes of one cache by kind. ``values`` counts the cached elements of K and V of all tokens, ``packed_values``
    those whose tokens are packed; ``kinds`` maps a kind of storage (codes, scale, sinks, window, ...) to bytes.
    ``dynamic_values``: those that transformers' ``DynamicCache`` would hold, without what no sliding window sees.
    ``derived_bytes``: of tables made from the side information, in memory once for all caches, and in no number of
    bits."""

    kinds: dict[str, int]
    packed_bytes: int
    packed_values: int
    values: int
    seq_len: int
    batch_size: int
    side_bytes: int
    dynamic_values: int
    derived_bytes: int = dataclasses.field(default=0, compare=False)

    @property
    def cache_bytes(self) -> int:
        """All that grows or shrinks with the cache: packed tokens, sinks and recent window; no side information."""
        return sum(self.kinds.values())

    @property
    def resident_bytes(self) -> int:
        """All that must be in memory to read the cache: with side information and the tables made from it."""
        return self.cache_bytes + self.side_bytes + self.derived_bytes

    @property
    def bits_per_value(self) -> float:
        """Marginal: stored bits for each value of the packed tokens; NaN while none is packed."""
        return 8 * self.packed_bytes / self.packed_values if self.packed_values else float("nan")

    @property
    def bits_per_value_total(self) -> float:
        """Bits for each value of all tokens here: sinks, recent window and side information included."""
        return 8 * (self.cache_bytes + self.side_bytes) / self.values if self.values else float("nan")

    @property
    def ratio(self) -> float:
        """Bytes of transformers' cache of the same tokens in fp16 over ``cache_bytes`` (side information apart)."""
        return self.dynamic_values * 2 / self.cache_bytes if self.cache_bytes else float("nan")

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.kinds.items()) if count)
        packed = "nothing is packed yet"
        if self.packed_values:
            packed = f"{self.bits_per_value:.4g} bits per packed value, {self.ratio:.4g}x against fp16"
        return (
            f"{self.batch_size} x {self.seq_len} tokens in {self.cache_bytes:,} bytes ({kinds or 'empty'}); "
            f"side information {self.side_bytes:,} bytes, tables made from it {self.derived_bytes:,}; "
            f"{self.resident_bytes:,} bytes in memory; {packed}"
        )


def total(reports: list[Report]) -> Report:
    """Sum several caches of one compressor as if they were one."""
    kinds = sum((Counter(report.kinds) for report in reports), Counter())
    names = ("packed_bytes", "packed_values", "values", "dynamic_values")
    sums = {name: sum(getattr(r, name) for r in reports) for name in (*names, "batch_size")}
    shared = ("seq_len", "side_bytes", "derived_bytes")
    most = {name: max((getattr(r, name) for r in reports), default=0) for name in shared}
    return Report(dict(kinds), **sums, **most)


def tensor_bytes(*objects) -> int:
    """Count bytes of the storages behind every tensor reachable from ``objects`` (``tensors``), each storage once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(*objects)}.values())


def tensors(*objects) -> list[torch.Tensor]:
    """List all tensors reachable from ``objects``. A wrapper (a subclass with ``__tensor_flatten__``, such as quanto's)
    has a storage in name only: the tensors that it wraps stand for it."""
    collected, seen, stack = [], set(), list(objects)
    while stack:
        item = stack.pop()
        is_model = isinstance(item, torch.nn.Module) and not isinstance(item, Part)
        if id(item) in seen or is_model or isinstance(item, (type, str, bytes, int, float)):
            continue
        seen.add(id(item))
        if hasattr(type(item), "__tensor_flatten__"):
            stack += [getattr(item, name) for name in item.__tensor_flatten__()[0]]
        elif isinstance(item, torch.Tensor):
            collected.append(item)
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set)):
            stack += item
        else:
            stack += list(getattr(item, "__dict__", {}).values())
            stack += [getattr(item, name) for name in getattr(type(item), "__slots__", ()) if hasattr(item, name)]
    return collected
