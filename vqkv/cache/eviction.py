"""Heavy-hitter eviction: drop the tokens that attention passes over, and pack the kept ones with any codec.

Sources: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for efficient generative inference of large language models"; Li
et al. 2024, "SnapKV: LLM knows what you are looking for before generation".
"""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d
from transformers.cache_utils import LinearAttentionLayer

from vqkv.cache.compressed import CompressedCache
from vqkv.cache.compressor import Compressor
from vqkv.cache.groups import Group, Pair
from vqkv.cache.layer import CompressedLayer
from vqkv.cache.meter import Report, tensor_bytes
from vqkv.cache.passes import watch
from vqkv.cache.settings import LARGEST
from vqkv.cache.store import Positions, TokenStore
from vqkv.codecs.predictive import Known
from vqkv.errors import DataError
from vqkv.kernels import KernelView, pack_codes, unpack_codes
from vqkv.models.layers import KVLayer, kv_layers
from vqkv.models.plain import evaluating
from vqkv.runtime.checks import check_whole


@contextmanager
def watching_attention(model, see: Callable[[int, Tensor], None], last: int = 0):
    """Within the context, ``model`` attends eagerly and tells ``see(layer_idx, scores)`` of every attention block as it
    ends; on leaving, it attends as before. ``scores`` (batch, num_kv_heads, kv_len), fp32, is the attention that each
    key got, summed over this pass's ``last`` queries (0: all) and over the query heads of its KV head: the model's own
    probabilities."""
    parts = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    configs = {"": model.config} | {name: part for name, part in parts.items() if part is not None}
    before = {name: config._attn_implementation for name, config in configs.items()}
    handles = []
    try:
        for layer in kv_layers(model):
            handles.append(layer.attention.register_forward_hook(partial(_sum_attention, layer, see, last)))
        model.set_attn_implementation("eager")
        yield
    finally:
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()


def _sum_attention(layer: KVLayer, see, last: int, module, args, output) -> None:
    weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    if not isinstance(weights, Tensor) or weights.ndim != 4:
        raise DataError(f"{type(module).__name__} returns no attention probabilities, so nothing can be read off them")
    sums = weights.detach()[:, :, -last:].sum(dim=2, dtype=torch.float32)
    see(layer.layer_idx, sums.unflatten(1, (layer.num_kv_heads, -1)).sum(dim=2))


@torch.no_grad()
def attention_scores(model, tokens: Tensor, batch_size: int = 8) -> list[Tensor]:
    """Per layer, the attention that each of ``tokens`` (num_seqs, seq_len) received in one causal pass: fp32
    (num_seqs, num_kv_heads, seq_len)."""
    model = evaluating(model)
    scores: dict[int, list[Tensor]] = {layer.layer_idx: [] for layer in kv_layers(model)}
    with watching_attention(model, lambda layer, x: scores[layer].append(x)):
        for batch in tokens.to(model.device).split(batch_size):
            model(batch, use_cache=False)
    return [torch.cat(scores[layer]) for layer in sorted(scores)]


def heavy_hitters(
    scores: Tensor,
    retain: float = 0.75,
    recent: float = 0.1,
    seen: int | None = None,
    sink_tokens: int = 0,
    recent_window: int = 0,
) -> Tensor:
    """Choose the tokens to keep: int64 (batch, num_kv_heads, kept), ascending, each head its own.

    ``scores`` (batch, num_kv_heads, stored) is the attention that each stored token has received. ``retain`` and
    ``recent`` are shares of the ``seen`` tokens (by default the stored ones), rounded to the nearest token: so many are
    kept in all, and so many of them are the newest, whatever their score; the others are those with the highest scores,
    the newer one on a tie. The first ``sink_tokens`` and the last ``recent_window`` are kept even beyond these shares.
    """
    stored = scores.shape[-1]
    seen = stored if seen is None else seen
    newest = min(stored, max(recent_window, round(recent * seen)))
    kept = min(stored, max(round(retain * seen), sink_tokens + newest, 1))
    ranked = scores.clone()
    ranked[..., :sink_tokens] = ranked[..., stored - newest :] = torch.inf
    order = ranked.flip(-1).argsort(dim=-1, descending=True, stable=True)  # flipped: the newer token wins a tie
    return (stored - 1 - order[..., :kept]).sort(dim=-1).values


class H2O(Compressor):
    """A fitted compressor whose caches evict.

    ``retain`` and ``recent`` are shares of the tokens seen; see ``heavy_hitters``, which ``choose`` may replace. The
    compressor's own sinks and recent window are never evicted. A cache evicts once, after its first forward pass (the
    prompt, or its first chunk) and before anything is packed, which suits every codec; later tokens are all kept. A
    codec that merges heads or blocks of tokens then merges tokens of different positions. Kept tokens keep their
    positions. With ``observed`` only the prompt's last so many queries tell what matters, and stay; ``pool``: a token
    counts as much as the best of so many around it (SnapKV). Raises ``DataError`` for impossible shares.
    """

    def __init__(
        self,
        compressor: Compressor,
        retain: float = 0.75,
        recent: float = 0.1,
        choose: Callable[..., Tensor] = heavy_hitters,
        observed: int = 0,
        pool: int = 1,
    ):
        numbers = all(isinstance(share, int | float) for share in (retain, recent))
        if not (numbers and 0 <= recent <= retain <= 1 and retain > 0):
            raise DataError(f"retain {retain!r} and recent {recent!r}: shares, 0 <= recent <= retain <= 1")
        check_whole("observed", observed, 0, LARGEST)
        if type(pool) is not int or pool < 1 or pool % 2 == 0:
            raise DataError(f"pool {pool!r} must be an odd number of tokens, such as 7")
        if compressor.predictions:
            raise DataError(
                f"{compressor.name!r} predicts a layer's tokens from those of other layers, each of which would evict "
                "tokens of its own: use a compressor without predictors"
            )
        name = f"{compressor.name}+{'snapkv' if observed else 'h2o'}{retain:g}"
        super().__init__(name, compressor.codecs, compressor.settings, compressor.model, compressor.notes)
        self.retain, self.recent, self.choose, self.observed, self.pool = retain, recent, choose, observed, pool

    def new_cache(self, model, in_place: bool = False, decoded_cache_bytes: int = 0) -> "EvictingCache":
        """An empty cache. Raises ``DataError`` for ``in_place``, encoders and layers that have other states too."""
        if in_place:
            raise DataError("one pass in place reads nothing that was evicted: use the snapshot or chunked protocol")
        cache = EvictingCache(self, model, decoded_cache_bytes=decoded_cache_bytes)
        if any(isinstance(layer, LinearAttentionLayer) for layer in cache.compressed):
            raise DataError(f"{type(model).__name__} has states beside keys and values, which forget nothing: no H2O")
        return cache


def snapkv(compressor: Compressor, retain: float = 0.25, observed: int = 32, pool: int = 7) -> H2O:
    """SnapKV: of a prompt, the share that its last ``observed`` queries attend to most, and these tokens themselves."""
    return H2O(compressor, retain, 0.0, observed=observed, pool=pool)


@dataclass(eq=False)
class EvictedKeys(TokenStore):
    """Keys stored before RoPE of the tokens that eviction left. ``kept`` (uint8, batch x num_kv_heads x bytes) has a
    bit for each of the first ``upto`` tokens, set if the token is kept; later ones all are."""

    kept: Tensor = field(kw_only=True)
    upto: int = field(kw_only=True)

    def tokens(self, seq_len: int) -> Tensor:
        """The numbers of the kept ones among ``seq_len`` tokens: (batch, num_kv_heads, kept)."""
        mask = unpack_codes(self.kept, 1, self.upto)
        mask = torch.nn.functional.pad(mask, (0, seq_len - self.upto), value=1)
        return mask.nonzero()[:, -1].view(*mask.shape[:2], -1)

    def _rotated(self, how: Callable[..., Tensor], states: Tensor, start: int) -> Tensor:
        if self.rotation is None:
            return states
        index = self.tokens(self.positions.seq_len)[..., start : start + states.shape[2], None]
        tables = self.positions.table(self.rotation, states.device)
        cos, sin = (x[:, None].expand(*states.shape[:2], -1, -1).take_along_dim(index, 2) for x in tables)
        heads = states.flatten(0, 1)[:, None]  # each as a sequence of its own
        return self.rotation.turn(how, heads, cos.flatten(0, 1), sin.flatten(0, 1)).view_as(states)

    def kernel_view(self, known: Known | None) -> KernelView | None:
        """None: kernels rotate all heads by the same positions."""
        return None

    def select(self, index: Tensor, positions: Positions) -> Self:
        """Copy the sequences ``index``."""
        return dataclasses.replace(super().select(index, positions), kept=self.kept[index.to(self.kept.device)])


@dataclass(eq=False)
class EvictingLayer(CompressedLayer):
    """One layer of an ``EvictingCache``, which keeps tokens of its own. ``new``: what is stored once attention has told
    which tokens matter."""

    is_croppable = False

    new: Pair | None = field(default=None, init=False)

    @property
    def stored(self) -> int:
        """Tokens that are kept."""
        return sum(self.stores[0].parts) if self.batch.groups else 0

    def _pass(self, group: Group, pair: Pair) -> Pair:
        if self.stored:
            return super()._pass(group, pair)
        self.new = pair
        return pair

    def _end(self) -> None:
        if self.new is None:
            super()._end()

    def evict(self, policy: H2O, scores: Tensor) -> None:
        """Store those of the new tokens that matter by the attention ``scores`` (batch, num_kv_heads, kv_len)."""
        batch, new, (keys, values) = self.batch, self.new, self.stores
        if new is None:
            return
        exempt = batch.settings.sink_tokens, max(batch.settings.recent_window, policy.observed)
        scores = max_pool1d(scores, policy.pool, 1, policy.pool // 2)
        chosen = policy.choose(scores, policy.retain, policy.recent, batch.slots, *exempt)
        if keys.rotation is not None and chosen.shape[-1] < scores.shape[-1]:
            kept = pack_codes(token_mask(chosen, batch.slots), 1)
            keys = EvictedKeys(keys.coder, batch.settings, keys.positions, keys.rotation, kept=kept, upto=batch.slots)
            batch.groups[0].stores[self.index] = keys, values
        for store, x in zip((keys, values), new, strict=True):
            store.write(x.detach().take_along_dim(chosen[..., None], 2), batch.groups[0].step)
        self.new = None
        self._end()

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        """Count kept tokens as the newest of those seen, so that a causal mask hides none of them."""
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
    compressor: H2O
    _watching: ExitStack | None = None  # while a pass that ends in an eviction runs

    def _watch(self, model) -> None:
        """Have ``watch`` and ``stop`` called, too, as a forward pass begins and ends."""
        super()._watch(model)
        watch("watch", model._forward_pre_hooks, model.register_forward_pre_hook)
        watch("stop", model._forward_hooks, model.register_forward_hook, always_call=True)

    def watch(self, module, args, kwargs) -> None:
        """Switch on eager attention, watched, for a forward pass that ends in an eviction."""
        mask, policy = kwargs.get("attention_mask"), self.compressor
        if isinstance(mask, Tensor) and mask.ndim == 2 and not mask.all():
            raise DataError("a share of a padded sequence is no share of its tokens: pass sequences unpadded")
        if not self.compressed[0].stored:
            self._watching, see = ExitStack(), lambda layer, scores: self.layers[layer].evict(policy, scores)
            self._watching.enter_context(watching_attention(module, see, policy.observed))

    def stop(self, *_) -> None:
        """End what ``watch`` began: the forward pass has ended, or failed."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.close()

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """Hand a layer its new tokens. Raises ``DataError`` where attention cannot be watched, or reaches less far back
        than the tokens seen (a sliding window goes by positions, which kept tokens no longer line up with)."""
        if not self.layers[layer_idx].stored and self._watching is None:
            raise DataError("attention is not watched: call the model that the cache was made for, not a part of it")
        model = self.model()
        window = model and getattr(model.config.get_text_config(), "sliding_window", None)
        if window and self.layers[layer_idx].index == 0 and self.batch.slots + key_states.shape[-2] > window:
            raise DataError(f"the model's sliding window of {window} tokens does its own eviction: use fewer tokens")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def save(self, path) -> None:
        """Raise ``DataError``: it keeps more than a saved cache has a place for."""
        raise DataError(
            "an EvictingCache keeps more than a saved cache has a place for: save caches made by Compressor.new_cache"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ``DataError``: what made room for the last tokens is gone."""
        raise DataError("a cache that evicts cannot take tokens back: reset() it, or use the compressor without H2O")

    def report(self) -> Report:
        """Bytes of what is kept. ``values``, and so ``ratio`` and ``bits_per_value_total``, count all tokens seen;
        ``packed_values`` and ``bits_per_value`` those kept and packed. ``positions`` has one bit for each token seen
        and KV head where keys are stored before RoPE."""
        report, stored = super().report(), self.compressed[0].stored
        keys = [layer.stores[0] for layer in self.compressed] if self.batch.groups else []
        bits = tensor_bytes([store.kept for store in keys if isinstance(store, EvictedKeys)])
        kinds = report.kinds | {"positions": report.kinds["positions"] + bits}
        values = report.values * report.seq_len // stored if stored else 0
        return dataclasses.replace(report, kinds=kinds, values=values, dynamic_values=values)


def token_mask(index: Tensor, length: int) -> Tensor:
    """Indices (..., kept) -> bool (..., length)."""
    return index.new_zeros((*index.shape[:-1], length), dtype=torch.bool).scatter_(-1, index, True)
