"""One layer of a ``CompressedCache``, as transformers talks to it."""

from dataclasses import dataclass, field

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from vqkv.cache.batch import Batch, Group, Pair
from vqkv.cache.packed_attention import packed_states
from vqkv.cache.store import TokenStore
from vqkv.kernels.precision import full_precision


@dataclass(eq=False)
class CompressedLayer(CacheLayerMixin):
    """One layer of a ``CompressedCache``. What it stores is in ``batch``, which all layers share."""

    is_compileable = False

    index: int
    batch: Batch
    record_past: bool = field(default=False, init=False)

    def __post_init__(self):
        self.is_initialized = False

    @property
    def keys(self) -> Tensor | None:
        """As attention reads them, decoded again (batch, num_kv_heads, seq_len, head_dim); None if there are none."""
        return self.batch.stored(self.index)[0] if self.batch.slots else None

    @property
    def values(self) -> Tensor | None:
        """As ``keys``."""
        return self.batch.stored(self.index)[1] if self.batch.slots else None

    @property
    def stores(self) -> tuple[TokenStore, TokenStore]:
        """This layer's keys and values, of the first group of sequences."""
        return self.batch.groups[0].stores[self.index]

    @property
    def is_sliding(self) -> bool:
        """True if its queries see the last tokens only."""
        return self.batch.reaches[self.index] is not None

    @property
    def first(self) -> int:
        """The number of the first token that is still here."""
        return self.stores[0].first if self.batch.groups else 0

    @property
    def is_croppable(self) -> bool:
        """False once tokens were dropped that a cropped cache would need."""
        return not self.first

    def activate_past_recording(self) -> None:
        """From now on the tokens of the last forward pass can be cropped, past a sliding window, too."""
        self.record_past = True

    def lazy_initialization(self, key_states, value_states) -> None:
        """Nothing to allocate: payloads grow by concatenation."""
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Store new keys (after RoPE) and values (batch, num_kv_heads, new_tokens, head_dim); return what attention
        reads: decoded history and, unless ``in_place``, the new tokens as they came. Slots of padding read as zeros.
        Where attention can read quantized tokens, the same ``PackedStates`` for both."""
        self.is_initialized = True
        if self.index == 0:
            self.batch.begin(key_states)
        self.batch.place = self.index
        parts = self.batch.split(key_states, value_states)
        with full_precision(key_states.device):
            out = packed_states(self.batch, self.index, key_states, parts) if self.batch.direct else None
            out = (out, out) if out else self.batch.join([self._pass(*part) for part in parts])
        self._end()
        return out

    def _pass(self, group: Group, pair: Pair) -> Pair:
        return tuple(store.update(x, group.step) for store, x in zip(group.stores[self.index], pair, strict=True))

    def _end(self) -> None:
        if self.index == len(self.batch.coders) - 1:
            self.batch.end(self.batch.new_slots if self.record_past else 0)

    def get_seq_length(self) -> int:
        """Slots of this layer: tokens, padding included; those of a running pass once they were handed over."""
        waits = self.batch.running and self.index > self.batch.place
        return self.batch.slots - (self.batch.new_slots if waits else 0)

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        """(length of keys the next ``query_length`` queries read, offset)."""
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() - self.first + length, self.first

    def get_max_length(self) -> int:
        """-1: grows without a limit."""
        return -1

    def reset(self) -> None:
        """Forget every token, of all layers."""
        self.batch.reset()
        self.is_initialized = False


class MixedLayer(LinearAttentionLayer, CompressedLayer):
    """A layer with states besides its keys and values (Falcon-H1), which stay as transformers keeps them."""

    is_compileable = False

    def __init__(self, index: int, batch: Batch, number_of_states: int):
        LinearAttentionLayer.__init__(self, number_of_states)
        CompressedLayer.__init__(self, index, batch)

    def reset(self) -> None:
        """Forget every token, of all layers, and this one's states."""
        LinearAttentionLayer.reset(self)
        CompressedLayer.reset(self)
