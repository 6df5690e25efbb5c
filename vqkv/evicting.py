"""A cache that evicts: each of its layers keeps tokens of its own, which attention decides upon (``vqkv.evict``)."""

import dataclasses
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from vqkv.attention import watching_attention
from vqkv.cache import CompressedCache, CompressedLayer, new_group
from vqkv.errors import DataError
from vqkv.group import Group
from vqkv.meter import Report, tensor_bytes
from vqkv.positions import KeptPositions, Positions, pick_rows
from vqkv.role import HeldRole


@dataclass(eq=False)
class EvictingGroup(Group):
    """A group each of whose layers keeps tokens of its own. There is one in an ``EvictingCache``: padding is told from
    tokens by the little attention that it gets."""

    kept: list[KeptPositions] = field(default_factory=list)

    def at(self, layer: int) -> KeptPositions:
        """See ``Group``."""
        return self.kept[layer]

    def end(self) -> None:
        """Keep the tables: tokens are packed after attention, and only then is the pass done with them."""

    def twin(self, rows: list[int], roles: list, positions: Positions) -> "EvictingGroup":
        """See ``Group``; nothing is evicted in it."""
        twin = super().twin(rows, roles, positions)
        twin.kept = [KeptPositions(positions) for _ in roles]
        return twin

    def select(self, index: Tensor, rows: list[int]) -> "EvictingGroup":
        """See ``Group``."""
        twin = super().select(index, rows)
        for ours, theirs in zip(self.kept, twin.kept, strict=True):
            theirs.bits, theirs.upto = None if ours.bits is None else ours.bits[index.to(ours.bits.device)], ours.upto
        return twin


def new_evicting_group(compressor, settings, rotary, size: int) -> EvictingGroup:
    """See ``cache.new_group``."""
    plain = new_group(compressor, settings, rotary, size)
    roles = [tuple(HeldRole(role.coder, role.rotated) for role in pair) for pair in plain.roles]
    kept = [KeptPositions(plain.positions) for _ in roles]
    return EvictingGroup(plain.rows, roles, plain.positions, settings, plain.last_readers, kept)


@dataclass(eq=False)
class EvictingLayer(CompressedLayer):
    """One layer of an ``EvictingCache``. ``policy`` is its ``H2O``; ``scores`` the attention received by each stored
    token, while needed."""

    is_croppable = False

    policy: object
    seen: int = field(default=0, init=False)
    stored: int = field(default=0, init=False)
    scores: Tensor | None = field(default=None, init=False)

    @property
    def group(self) -> EvictingGroup:
        """The one there is."""
        return self.batch.groups[0]

    @property
    def positions(self) -> KeptPositions:
        """Those of this layer's stored tokens."""
        return self.group.at(self.index)

    def update(self, key_states, value_states, *args, **kwargs):
        """As ``CompressedLayer.update``, but new tokens are packed after attention where it decides what is kept."""
        waiting = self.evicts_next
        out = super().update(key_states, value_states, *args, **kwargs)
        self.seen += key_states.shape[-2]
        self.stored += key_states.shape[-2]
        if not waiting:
            self._store()
        return out

    @property
    def intact(self) -> bool:
        """See ``CompressedLayer``."""
        if not self.batch.groups:
            return True
        stored = {sum(role.parts) for role in self.roles} == {self.stored}
        return stored and self.seen == self.group.positions.seq_len and all(role.fresh is None for role in self.roles)

    @property
    def evicts_next(self) -> bool:
        """Whether the next forward pass ends in an eviction and so must be watched."""
        return self.policy.streaming or self.seen == 0

    def attended(self, scores: Tensor) -> None:
        """Store the new tokens and evict, given what each key (batch, num_kv_heads, kv_len) got in this pass."""
        if self.policy.streaming:
            self._evict_packed(scores)
        else:
            chosen = self._choose(scores, self.settings.sink_tokens, self.settings.recent_window)
            for role in self.roles:
                role.fresh = pick_rows(role.fresh, chosen)
            self._store()

    def _evict_packed(self, scores: Tensor) -> None:
        if self.scores is not None:
            scores[..., : self.scores.shape[-1]] += self.scores
        self._store()
        sinks, _, window = self.roles[0].parts
        chosen = self._choose(scores, sinks, window)
        for role in self.roles:
            role.evict(chosen)
        self.scores = scores.gather(-1, chosen)

    def _choose(self, scores: Tensor, sinks: int, window: int) -> Tensor:
        chosen = self.policy.choose(scores, self.policy.retain, self.policy.recent, self.seen, sinks, window)
        if chosen.shape[-1] < self.stored:
            self.positions.keep(chosen)
            self.stored = chosen.shape[-1]
        return chosen

    def _store(self) -> None:
        for role in self.roles:
            role.store(self.positions, self.settings, self.group.fresh)
        if self.index == self.settings.last_layer:
            self.group.positions.done()

    def get_seq_length(self) -> int:
        """Tokens seen, the evicted ones included: new tokens get the positions after them."""
        return self.seen

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        """Kept tokens count as the newest of those seen, so that a causal mask hides none of them."""
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.stored + length, self.seen - self.stored

    def reset(self) -> None:
        """Forget every token."""
        super().reset()
        self.seen, self.stored, self.scores = 0, 0, None


class EvictingCache(CompressedCache):
    """A ``CompressedCache`` that evicts; made by ``H2O.new_cache``.

    A pass that ends in an eviction runs with the model's eager attention, which hooks on ``model`` switch on for this
    cache alone. Left padding is right, as padded tokens score lowest and are evicted first; right padding is not.
    """

    def __init__(self, policy, model):
        super().__init__(policy.compressor, model)
        self._watching = None
        self.batch.make_group = partial(new_evicting_group, *self.batch.make_group.args)
        self.layers = [EvictingLayer(layer.index, layer.batch, layer.settings, policy) for layer in self.layers]

    def _watch(self, model) -> None:
        """See every forward pass with this cache begin and end."""
        cache = weakref.ref(self)
        for handle in (
            model.register_forward_pre_hook(_Start(cache), with_kwargs=True),
            model.register_forward_hook(_Stop(cache), always_call=True),
        ):
            weakref.finalize(self, handle.remove)

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible: what made room for the last tokens is gone."""
        raise DataError("a cache that evicts cannot take tokens back: reset() it, or use the compressor without H2O")

    def batch_select_indices(self, indices: Tensor) -> None:
        """See ``CompressedCache``."""
        super().batch_select_indices(indices)
        for layer in self.layers:
            if layer.scores is not None:
                layer.scores = layer.scores[indices.to(layer.scores.device)]

    def start(self) -> None:
        """A forward pass with this cache begins."""
        if self.layers[0].evicts_next:
            self._watching = ExitStack()
            self._watching.enter_context(
                watching_attention(self.model(), lambda layer, scores: self.layers[layer].attended(scores))
            )

    def stop(self) -> None:
        """It has ended, or failed."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.close()

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """See ``CompressedCache.update``. Raises ``DataError`` where attention cannot be watched, or reaches less far
        back than the tokens seen (a sliding window goes by positions, which kept tokens no longer line up with)."""
        layer = self.layers[layer_idx]
        if layer.evicts_next and self._watching is None:
            raise DataError("attention is not watched: call the model that the cache was made for, not a part of it")
        window = getattr(self.model().config.get_text_config(), "sliding_window", None)
        if window and layer.seen + key_states.shape[-2] > window:
            raise DataError(f"the model's sliding window of {window} tokens does its own eviction: use fewer tokens")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def report(self) -> Report:
        """Bytes of what is kept. ``values``, and so ``ratio`` and ``bits_per_value_total``, count all tokens seen;
        ``packed_values`` and ``bits_per_value`` those kept and packed. ``positions`` has one bit for each token seen
        and KV head where keys are stored before RoPE; ``scores`` is what streaming must remember."""
        report = super().report()
        stored = self.layers[0].stored
        kinds = report.kinds | {"scores": tensor_bytes([layer.scores for layer in self.layers])}
        if self.batch.groups:
            kinds["positions"] += tensor_bytes([kept.bits for kept in self.batch.groups[0].kept])
        values = report.values * report.seq_len // stored if stored else 0
        return dataclasses.replace(report, kinds=kinds, values=values)


@dataclass
class _Hook:
    """Tells a cache of a forward pass without keeping a dropped cache alive."""

    cache: Callable | None = None

    def __reduce__(self):
        return type(self), ()  # a saved or copied model watches for no cache

    def found(self) -> EvictingCache | None:
        return self.cache and self.cache()


class _Start(_Hook):
    def __call__(self, module, args, kwargs) -> None:
        cache = self.found()
        if cache is not None and any(value is cache for value in (*args, *kwargs.values())):
            cache.start()


class _Stop(_Hook):
    def __call__(self, module, args, output) -> None:
        cache = self.found()
        if cache is not None:
            cache.stop()
