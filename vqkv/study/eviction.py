"""Heavy-hitter eviction: drop the tokens that attention passes over, and pack the kept ones with any codec.

Sources: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for efficient generative inference of large language models"; Li
et al. 2024, "SnapKV: LLM knows what you are looking for before generation".
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from vqkv.cache.compressed import CompressedCache
from vqkv.cache.compressor import Compressor
from vqkv.cache.groups import Group, Pair
from vqkv.cache.layer import CompressedLayer
from vqkv.cache.meter import Report, tensor_bytes
from vqkv.cache.store import TokenStore
from vqkv.errors import DataError
from vqkv.kernels import pack_codes, unpack_codes
from vqkv.models.layers import copied, kv_layers, plain


@torch.no_grad()
def attention_scores(model, tokens: Tensor, last: int = 0) -> list[Tensor]:
    """Sum, by layer, the attention that each of ``tokens`` (num_seqs, seq_len) gets in one causal pass.

    Returns fp32 (num_seqs, num_kv_heads, seq_len): sums over the ``last`` queries (0: all) and a KV head's query heads.
    """
    eager = copied(plain(model)).eval()  # whose way to attend is its own
    eager.set_attn_implementation("eager")
    rows = []
    for row in tokens.to(eager.device).split(1):  # the probabilities of all layers are in memory at once
        probabilities = eager(row, use_cache=False, output_attentions=True).attentions
        sums = [x[:, :, -last:].sum(dim=2, dtype=torch.float32) for x in probabilities]
        heads = [layer.num_kv_heads for layer in kv_layers(model)]
        rows.append([x.unflatten(1, (count, -1)).sum(dim=2) for x, count in zip(sums, heads, strict=True)])
    return [torch.cat(layer) for layer in zip(*rows, strict=True)]


def heavy_hitters(
    scores: Tensor, retain: float = 0.75, recent: float = 0.1, sink_tokens: int = 0, recent_window: int = 0
) -> Tensor:
    """Choose the tokens to keep: int64 (batch, num_kv_heads, kept), ascending, each head its own.

    ``scores`` (batch, num_kv_heads, seq_len) is the attention that each token has received. ``retain`` and ``recent``
    are shares of the tokens, rounded to the nearest one: so many are kept in all, and so many of them are the newest,
    whatever their score; the others are those with the highest scores, the newer one on a tie. The first
    ``sink_tokens`` and the last ``recent_window`` are kept even beyond these shares.
    """
    seq_len = scores.shape[-1]
    newest = min(seq_len, max(recent_window, round(recent * seq_len)))
    kept = min(seq_len, max(round(retain * seq_len), sink_tokens + newest, 1))
    ranked = scores.clone()
    ranked[..., :sink_tokens] = ranked[..., seq_len - newest :] = torch.inf
    order = ranked.flip(-1).argsort(dim=-1, descending=True, stable=True)  # flipped: the newer token wins a tie
    return (seq_len - 1 - order[..., :kept]).sort(dim=-1).values


class H2O(Compressor):
    """A fitted compressor whose caches evict, for evaluation.

    ``retain`` and ``recent`` are shares of the tokens; see ``heavy_hitters``, which ``choose`` may replace. The
    compressor's own sinks and recent window are never evicted. A cache evicts once, in its first forward pass (the
    prompt, or its first chunk, unpadded) and before anything is packed, which suits every codec; later tokens are all
    kept. A codec that merges heads or blocks of tokens then merges tokens of different positions. Kept tokens keep
    their positions. With ``observed`` only the prompt's last so many queries tell what matters, and stay; ``pool``: a
    token counts as much as the best of so many around it (SnapKV).
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
        if compressor.predictions:
            raise DataError(
                f"{compressor.name!r} predicts a layer's tokens from those of other layers, each of which would evict "
                "other tokens: use a compressor without predictors"
            )
        name = f"{compressor.name}+{'snapkv' if observed else 'h2o'}{retain:g}"
        super().__init__(name, compressor.codecs, compressor.settings, compressor.model, compressor.notes)
        self.retain, self.recent, self.choose, self.observed, self.pool = retain, recent, choose, observed, pool

    def new_cache(self, model, in_place: bool = False, decoded_cache_bytes: int = 0) -> "EvictingCache":
        """Make an empty cache. Raises ``DataError`` for ``in_place``, and for layers with recurrent states."""
        if in_place:
            raise DataError("one pass in place reads nothing that was evicted: use the snapshot or chunked protocol")
        return EvictingCache(self, plain(model), decoded_cache_bytes)

    def chosen(self, scores: Tensor) -> Tensor:
        """Choose the tokens of a prompt to keep by their attention scores (batch, num_kv_heads, seq_len)."""
        scores = max_pool1d(scores, self.pool, 1, self.pool // 2)
        exempt = self.settings.sink_tokens, max(self.settings.recent_window, self.observed)
        return self.choose(scores, self.retain, self.recent, *exempt)


def snapkv(compressor: Compressor, retain: float = 0.25, observed: int = 32, pool: int = 7) -> H2O:
    """SnapKV: of a prompt, the share that its last ``observed`` queries attend to most, and these tokens themselves."""
    return H2O(compressor, retain, 0.0, observed=observed, pool=pool)


@dataclass(eq=False)
class EvictedKeys(TokenStore):
    """Keys stored before RoPE of the tokens that eviction left. ``kept`` (uint8, batch x num_kv_heads x bytes) has a
    bit for each of the first ``prompt_len`` tokens, set if the token is kept; later ones all are."""

    kept: Tensor = field(kw_only=True)
    prompt_len: int = field(kw_only=True)

    def tokens(self, seq_len: int) -> Tensor:
        """List the numbers of the kept ones among ``seq_len`` tokens: (batch, num_kv_heads, kept)."""
        mask = pad(unpack_codes(self.kept, 1, self.prompt_len), (0, seq_len - self.prompt_len), value=1)
        return mask.nonzero()[:, -1].view(*mask.shape[:2], -1)

    def _rotated(self, how: Callable[..., Tensor], states: Tensor, start: int) -> Tensor:
        assert self.rotation is not None
        index = self.tokens(self.sequences.seq_len)[..., start : start + states.shape[2], None]
        tables = self.sequences.table(self.rotation, states.device)
        cos, sin = (x[:, None].expand(*states.shape[:2], -1, -1).take_along_dim(index, 2) for x in tables)
        heads = states.flatten(0, 1)[:, None]  # each as a separate sequence
        return self.rotation.with_kernel(how, heads, cos.flatten(0, 1), sin.flatten(0, 1)).view_as(states)


@dataclass(eq=False)
class EvictingLayer(CompressedLayer):
    """One layer of an ``EvictingCache``. ``chosen``: tokens to keep (batch, num_kv_heads, kept), until stored."""

    chosen: Tensor | None = field(default=None, init=False)

    @property
    def stored(self) -> int:
        """The number of tokens that are kept."""
        return sum(self.stores[0].parts) if self.batch.groups else 0

    def _pass(self, group: Group, pair: Pair) -> Pair:
        if self.chosen is None:
            return super()._pass(group, pair)
        index, self.chosen = self.chosen, None
        (keys, values), prompt_len = group.stores[self.index], pair[0].shape[2]
        if keys.rotation is not None and index.shape[-1] < prompt_len:
            kept = pack_codes(token_mask(index, prompt_len), 1)
            shared = keys.coder, keys.settings, keys.sequences, keys.rotation
            keys = EvictedKeys(*shared, kept=kept, prompt_len=prompt_len)
            group.stores[self.index] = keys, values
        for store, x in zip((keys, values), pair, strict=True):
            store.write(x.detach().take_along_dim(index[..., None], 2))
        return pair

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Count kept tokens as the newest of those seen, so that a causal mask hides none of them."""
        return self.stored + query_length, self.batch.slots - self.stored


class EvictingCache(CompressedCache):
    """A ``CompressedCache`` that evicts, for sequences of equal length. It can neither be cropped nor saved."""

    def __init__(self, policy: H2O, model, decoded_cache_bytes: int = 0):
        super().__init__(policy, model, decoded_cache_bytes=decoded_cache_bytes)
        if self.with_states:
            raise DataError(f"{type(model).__name__} has states beside keys and values, which forget nothing: no H2O")
        self.policy = policy
        self.layers = [EvictingLayer(layer.index, self.batch) for layer in self.compressed]

    def begin_pass(self, module: int, given: dict) -> None:
        """Ask, before the prompt is stored, which of its tokens matter."""
        super().begin_pass(module, given)
        self.inputs.packed_slots = 0  # kernels rotate all heads by the same positions
        tokens, mask = given["input_ids"], self.inputs.mask
        if mask is not None and not mask.all():
            raise DataError("eviction takes sequences of equal length, without padding: give each one by itself")
        window = min((reach + 1 for reach in self.reaches if reach), default=math.inf)
        if self.batch.slots + tokens.shape[1] > window:
            raise DataError(f"the model's sliding window of {window} tokens does its own eviction: use fewer tokens")
        if not self.batch.slots:
            scores = attention_scores(self.model(), tokens, self.policy.observed)
            for layer, x in zip(self.layers, scores, strict=True):
                layer.chosen = self.policy.chosen(x)

    def report(self) -> Report:
        """Count bytes that are kept. ``values``, and so ``ratio`` and ``bits_per_value_total``, count all tokens seen;
        ``packed_values`` and ``bits_per_value`` those kept and packed. ``positions`` has one bit for each token of the
        prompt and KV head where keys are stored before RoPE."""
        report, stored = super().report(), self.layers[0].stored
        keys = [layer.stores[0] for layer in self.layers] if self.batch.groups else []
        bits = tensor_bytes([store.kept for store in keys if isinstance(store, EvictedKeys)])
        kinds = report.kinds | {"positions": report.kinds["positions"] + bits}
        values = report.values * report.seq_len // stored if stored else 0
        return dataclasses.replace(report, kinds=kinds, values=values, dynamic_values=values)


def token_mask(index: Tensor, length: int) -> Tensor:
    """Turn indices (..., kept) into a mask (..., length)."""
    return index.new_zeros((*index.shape[:-1], length), dtype=torch.bool).scatter_(-1, index, True)
