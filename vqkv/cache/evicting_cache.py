"""A cache that evicts: each of its layers keeps tokens of its own, which attention decides upon (``eviction``)."""

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import Tensor

from vqkv.cache.attention_mass import watching_attention
from vqkv.cache.batch import Group, Pair
from vqkv.cache.compressed import CompressedCache, CompressedLayer
from vqkv.cache.hooks import watch
from vqkv.cache.meter import Report, tensor_bytes
from vqkv.cache.positions import pick_rows
from vqkv.errors import DataError


@dataclass(eq=False)
class EvictingLayer(CompressedLayer):
    """One layer of an ``EvictingCache``. ``policy`` is its ``H2O``; ``scores`` the attention received by each stored
    token, while needed; ``new`` the keys and values that are stored once attention has told which of them matter.

    There is one group of sequences: padding is told from tokens by the little attention that it gets.
    """

    is_croppable = False

    policy: object = None
    scores: Tensor | None = field(default=None, init=False)
    new: Pair | None = field(default=None, init=False)

    @property
    def stored(self) -> int:
        """Tokens that are kept."""
        return sum(self.stores[0].parts) if self.batch.groups else 0

    @property
    def evicts_next(self) -> bool:
        """True if the next forward pass ends in an eviction and so must be watched."""
        return self.policy.streaming or self.stored == 0

    def _pass(self, group: Group, pair: Pair) -> Pair:
        if not self.evicts_next:
            return super()._pass(group, pair)
        self.new = pair
        return tuple(store.read(x, group.step) for store, x in zip(self.stores, pair, strict=True))

    def _end(self) -> None:
        if self.new is None:
            super()._end()

    def attended(self, scores: Tensor) -> None:
        """Store the new tokens and evict, given what each key (batch, num_kv_heads, kv_len) got in this pass."""
        settings, new, self.new = self.batch.settings, self.new, None
        if self.policy.streaming:
            if self.scores is not None:
                scores[..., : self.scores.shape[-1]] += self.scores
            self._store(new)
            sinks, _, window = self.stores[0].parts
            chosen = self._choose(scores, sinks, window)
            for store in self.stores:
                store.evict(chosen)
            self.scores = scores.gather(-1, chosen)
        else:
            chosen = self._choose(scores, settings.sink_tokens, settings.recent_window)
            self._store(tuple(pick_rows(x.detach(), chosen) for x in new))
        self._end()

    def _choose(self, scores: Tensor, sinks: int, window: int) -> Tensor:
        seen, policy = self.batch.slots, self.policy
        chosen = policy.choose(scores, policy.retain, policy.recent, seen, sinks, window)
        if chosen.shape[-1] < scores.shape[-1]:
            self.stores[0].number(chosen)
        return chosen

    def _store(self, pair: Pair) -> None:
        for store, x in zip(self.stores, pair, strict=True):
            store.write(x, self.batch.groups[0].step)

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        """Kept tokens count as the newest of those seen, so that a causal mask hides none of them."""
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.stored + length, self.batch.slots - self.stored

    def reset(self) -> None:
        """Forget every token."""
        super().reset()
        self.scores = self.new = None


class EvictingCache(CompressedCache):
    """A ``CompressedCache`` that evicts; made by ``H2O.new_cache``.

    A pass that ends in an eviction runs with the model's eager attention, which hooks on ``model`` switch on for this
    cache alone. Left padding is right, as padded tokens score lowest and are evicted first; right padding is not.
    """

    layer_class = EvictingLayer

    def __init__(self, policy, model):
        super().__init__(policy.compressor, model)
        self._watching = None
        for layer in self.layers:
            layer.policy = policy

    def _watch(self, model) -> None:
        """Have ``see`` and ``stop`` called as a forward pass begins and ends."""
        self._watch_positions()
        watch(self, "see", model.register_forward_pre_hook, with_kwargs=True)
        watch(self, "stop", model.register_forward_hook, always_call=True)

    def see(self, module, args, kwargs) -> None:
        """A forward pass begins: switch on eager attention, watched, if it ends in an eviction of this cache."""
        if not any(value is self for value in (*args, *kwargs.values())):
            return
        mask = kwargs.get("attention_mask")
        self.batch.direct = mask is None or (isinstance(mask, Tensor) and bool(mask.all()))
        if self.layers[0].evicts_next:
            self._watching = ExitStack()
            self._watching.enter_context(
                watching_attention(self.model(), lambda layer, scores: self.layers[layer].attended(scores))
            )

    def stop(self, *_) -> None:
        """The forward pass has ended, or failed."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.close()

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """Hand a layer its new tokens, as ``CompressedCache.update`` says. Raises ``DataError`` where attention cannot
        be watched, or reaches less far back than the tokens seen (a sliding window goes by positions, which kept tokens
        no longer line up with)."""
        if self.layers[layer_idx].evicts_next and self._watching is None:
            raise DataError("attention is not watched: call the model that the cache was made for, not a part of it")
        window = getattr(self.model().config.get_text_config(), "sliding_window", None)
        if window and layer_idx == 0 and self.batch.slots + key_states.shape[-2] > window:
            raise DataError(f"the model's sliding window of {window} tokens does its own eviction: use fewer tokens")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def save(self, path) -> None:
        """Not possible: it keeps more than a saved cache has a place for."""
        raise DataError(
            "an EvictingCache keeps more than a saved cache has a place for: save caches made by Compressor.new_cache"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible: what made room for the last tokens is gone."""
        raise DataError("a cache that evicts cannot take tokens back: reset() it, or use the compressor without H2O")

    def batch_select_indices(self, indices: Tensor) -> None:
        """As ``CompressedCache.batch_select_indices``, scores included."""
        super().batch_select_indices(indices)
        for layer in self.layers:
            if layer.scores is not None:
                layer.scores = layer.scores[indices.to(layer.scores.device)]

    def report(self) -> Report:
        """Bytes of what is kept. ``values``, and so ``ratio`` and ``bits_per_value_total``, count all tokens seen;
        ``packed_values`` and ``bits_per_value`` those kept and packed. ``positions`` has one bit for each token seen
        and KV head where keys are stored before RoPE; ``scores`` is what streaming must remember."""
        report, stored = super().report(), self.layers[0].stored
        kinds = report.kinds | {"scores": tensor_bytes([layer.scores for layer in self.layers])}
        kinds["positions"] += tensor_bytes([layer.stores[0].kept for layer in self.layers] if self.batch.groups else [])
        values = report.values * report.seq_len // stored if stored else 0
        return dataclasses.replace(report, kinds=kinds, values=values)
