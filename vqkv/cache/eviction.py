"""Heavy-hitter eviction: drop the tokens that attention passes over, and pack the kept ones with any codec.

Sources: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for efficient generative inference of large language models"; Li
et al. 2024, "SnapKV: LLM knows what you are looking for before generation".
"""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.functional import max_pool1d
from transformers.cache_utils import LinearAttentionLayer

from vqkv.cache.attention_mass import attention_scores, heavy_hitters, watching_attention
from vqkv.cache.batch import Group, Pair
from vqkv.cache.compressed import CompressedCache, watch
from vqkv.cache.layer import CompressedLayer
from vqkv.cache.meter import Report, tensor_bytes
from vqkv.cache.positions import pick_rows
from vqkv.cache.settings import MOST
from vqkv.errors import DataError
from vqkv.runtime.checks import check_whole

__all__ = ["H2O", "EvictingCache", "attention_scores", "heavy_hitters", "snapkv"]


@dataclass(frozen=True)
class H2O:
    """A fitted compressor whose caches evict: ``evaluate`` and ``generate`` take it as they take the compressor.

    ``retain`` and ``recent`` are shares of the tokens seen; see ``heavy_hitters``, which ``choose`` may replace. The
    compressor's own sinks and recent window are never evicted. A cache evicts once, after its first forward pass (the
    prompt, or its first chunk) and before anything is packed, which suits every codec; later tokens are all kept. A
    codec that merges heads or blocks of tokens then merges tokens of different positions. Kept tokens keep their
    positions. With ``observed`` only the prompt's last so many queries tell what matters, and stay; ``pool``: a token
    counts as much as the best of so many around it (SnapKV). Raises ``DataError`` for impossible shares.
    """

    compressor: object
    retain: float = 0.75
    recent: float = 0.1
    choose: Callable[..., Tensor] = heavy_hitters
    observed: int = 0
    pool: int = 1

    def __post_init__(self):
        numbers = all(isinstance(share, int | float) for share in (self.retain, self.recent))
        if not (numbers and 0 <= self.recent <= self.retain <= 1 and self.retain > 0):
            raise DataError(f"retain {self.retain!r} and recent {self.recent!r}: shares, 0 <= recent <= retain <= 1")
        check_whole("observed", self.observed, 0, MOST)
        if type(self.pool) is not int or self.pool < 1 or self.pool % 2 == 0:
            raise DataError(f"pool {self.pool!r} must be an odd number of tokens, such as 7")
        if self.compressor.predictions:
            raise DataError(
                f"{self.compressor.name!r} predicts a layer's tokens from those of other layers, each of which would "
                "evict tokens of its own: use a compressor without predictors"
            )

    @property
    def name(self) -> str:
        """The compressor's name and the share retained."""
        return f"{self.compressor.name}+{'snapkv' if self.observed else 'h2o'}{self.retain:g}"

    @property
    def settings(self):
        """The compressor's cache settings."""
        return self.compressor.settings

    def reconstruct(self, layer: int, keys: Tensor, values: Tensor, known=None) -> tuple[Tensor, Tensor]:
        """Reconstruct as the compressor does: the codecs' error alone, as if all tokens were kept."""
        return self.compressor.reconstruct(layer, keys, values, known)

    def new_pass(self):
        """Begin a pass through the layers, as ``Compressor.new_pass`` does."""
        return self.compressor.new_pass()

    def new_cache(self, model, in_place: bool = False) -> "EvictingCache":
        """An empty cache. Raises ``DataError`` for ``in_place``, encoders and layers that have other states too."""
        if in_place:
            raise DataError("one pass in place reads nothing that was evicted: use the snapshot or chunked protocol")
        cache = EvictingCache(self, model)
        if any(isinstance(layer, LinearAttentionLayer) for layer in cache.compressed):
            raise DataError(f"{type(model).__name__} has states beside keys and values, which forget nothing: no H2O")
        return cache


def snapkv(compressor, retain: float = 0.25, observed: int = 32, pool: int = 7) -> H2O:
    """SnapKV: of a prompt, the share that its last ``observed`` queries attend to most, and these tokens themselves."""
    return H2O(compressor, retain, 0.0, observed=observed, pool=pool)


@dataclass(eq=False)
class EvictingLayer(CompressedLayer):
    """One layer of an ``EvictingCache``, which keeps tokens of its own. ``new``: what is stored once attention has told
    which tokens matter."""

    is_croppable = False

    policy: object = None
    new: Pair | None = field(default=None, init=False)

    @property
    def stored(self) -> int:
        """Tokens that are kept."""
        return sum(self.stores[0].parts) if self.batch.groups else 0

    @property
    def evicts_next(self) -> bool:
        """True if the next forward pass ends in an eviction and so must be watched."""
        return self.stored == 0

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
        settings, policy, new, self.new = self.batch.settings, self.policy, self.new, None
        kept = settings.sink_tokens, max(settings.recent_window, policy.observed)
        scores = max_pool1d(scores, policy.pool, 1, policy.pool // 2)
        chosen = policy.choose(scores, policy.retain, policy.recent, self.batch.slots, *kept)
        if chosen.shape[-1] < scores.shape[-1]:
            self.stores[0].number(chosen)
        for store, x in zip(self.stores, new, strict=True):
            store.write(pick_rows(x.detach(), chosen), self.batch.groups[0].step)
        self._end()

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        """Kept tokens count as the newest of those seen, so that a causal mask hides none of them."""
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.stored + length, self.batch.slots - self.stored

    def reset(self) -> None:
        """Forget every token."""
        super().reset()
        self.new = None


class EvictingCache(CompressedCache):
    """A ``CompressedCache`` that evicts; made by ``H2O.new_cache``. A pass that ends in an eviction runs with the
    model's eager attention, which hooks on ``model`` switch on for this cache alone. Sequences are of equal length."""

    layer_class = EvictingLayer

    def __init__(self, policy, model):
        super().__init__(policy.compressor, model)
        self._watching = None
        for layer in self.compressed:
            layer.policy = policy

    def _watch(self, model) -> None:
        """Have ``watch`` and ``stop`` called, too, as a forward pass begins and ends."""
        super()._watch(model)
        watch("watch", model._forward_pre_hooks, model.register_forward_pre_hook)
        watch("stop", model._forward_hooks, model.register_forward_hook, always_call=True)

    def watch(self, module, args, kwargs) -> None:
        """A forward pass begins: switch on eager attention, watched, if it ends in an eviction of this cache."""
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2 and not mask.all():
            raise DataError("a share of a padded sequence is no share of its tokens: pass sequences unpadded")
        if self.compressed[0].evicts_next:
            self._watching, see = ExitStack(), lambda layer, scores: self.layers[layer].attended(scores)
            self._watching.enter_context(watching_attention(self.model(), see, self.compressed[0].policy.observed))

    def stop(self, *_) -> None:
        """The forward pass has ended, or failed."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.close()

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """Hand a layer its new tokens. Raises ``DataError`` where attention cannot be watched, or reaches less far back
        than the tokens seen (a sliding window goes by positions, which kept tokens no longer line up with)."""
        if self.layers[layer_idx].evicts_next and self._watching is None:
            raise DataError("attention is not watched: call the model that the cache was made for, not a part of it")
        window = getattr(self.model().config.get_text_config(), "sliding_window", None)
        if window and self.layers[layer_idx].index == 0 and self.batch.slots + key_states.shape[-2] > window:
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

    def report(self) -> Report:
        """Bytes of what is kept. ``values``, and so ``ratio`` and ``bits_per_value_total``, count all tokens seen;
        ``packed_values`` and ``bits_per_value`` those kept and packed. ``positions`` has one bit for each token seen
        and KV head where keys are stored before RoPE."""
        report, stored = super().report(), self.compressed[0].stored
        numbers = tensor_bytes([layer.stores[0].kept for layer in self.compressed] if self.batch.groups else [])
        kinds = report.kinds | {"positions": report.kinds["positions"] + numbers}
        values = report.values * report.seq_len // stored if stored else 0
        return dataclasses.replace(report, kinds=kinds, values=values, dynamic_values=values)
