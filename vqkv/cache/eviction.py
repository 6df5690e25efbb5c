"""Heavy-hitter eviction: drop the tokens that attention passes over, and pack the kept ones with any codec.

Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for efficient generative inference of large language models".
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from vqkv.cache.attention_mass import attention_scores, compare_scores, heavy_hitters, random_tokens
from vqkv.cache.evicting_cache import EvictingCache
from vqkv.errors import DataError

__all__ = ["H2O", "EvictingCache", "attention_scores", "compare_scores", "heavy_hitters", "random_tokens"]


@dataclass(frozen=True)
class H2O:
    """A fitted compressor whose caches evict: ``evaluate`` and ``generate`` take it as they take the compressor.

    ``retain`` and ``recent`` are shares of the tokens seen; see ``heavy_hitters``, which ``choose`` may replace. The
    compressor's own sinks and recent window are never evicted. By default a cache evicts once, after its first forward
    pass (the prompt, or its first chunk) and before anything is packed, which suits every codec; later tokens are all
    kept. A codec that merges heads or blocks of tokens then merges tokens of different positions. ``streaming`` evicts
    after every forward pass, by dropping rows of what is packed without packing it anew: this takes a codec that packs
    token by token and head by head. Kept tokens keep their positions. Raises ``DataError`` for impossible shares.
    """

    compressor: object
    retain: float = 0.75
    recent: float = 0.1
    streaming: bool = False
    choose: Callable[..., Tensor] = heavy_hitters

    def __post_init__(self):
        numbers = all(isinstance(share, int | float) for share in (self.retain, self.recent))
        if not (numbers and 0 <= self.recent <= self.retain <= 1 and self.retain > 0):
            raise DataError(
                f"retain {self.retain!r} and recent {self.recent!r} must be shares with 0 <= recent <= retain <= 1"
            )
        if self.compressor.predictions:
            raise DataError(
                f"{self.compressor.name!r} predicts a layer's tokens from those of other layers, each of which would "
                "evict tokens of its own: use a compressor without predictors"
            )

    @property
    def name(self) -> str:
        """The compressor's name and the share retained."""
        return f"{self.compressor.name}+h2o{self.retain:g}"

    @property
    def settings(self):
        """The compressor's cache settings."""
        return self.compressor.settings

    @property
    def codecs(self):
        """The compressor's (key codec, value codec) per layer."""
        return self.compressor.codecs

    @property
    def side_bytes(self) -> int:
        """The compressor's side information; eviction has none."""
        return self.compressor.side_bytes

    def reconstruct(self, layer: int, keys: Tensor, values: Tensor, known=None) -> tuple[Tensor, Tensor]:
        """Reconstruct as the compressor does: the codecs' error alone, as if all tokens were kept."""
        return self.compressor.reconstruct(layer, keys, values, known)

    def new_pass(self):
        """Begin a pass through the layers, as ``Compressor.new_pass`` does."""
        return self.compressor.new_pass()

    def new_cache(self, model, in_place: bool = False) -> EvictingCache:
        """An empty cache. Raises ``DataError`` for ``in_place`` and for streaming with a codec of token blocks."""
        if in_place:
            raise DataError("one pass in place reads nothing that was evicted: use the snapshot or chunked protocol")
        blocks = max(codec.tokens_per_row for pair in self.codecs for codec in pair)
        if self.streaming and blocks > 1:
            raise DataError(
                f"{self.compressor.name!r} packs blocks of {blocks} tokens, from which none can be dropped alone: "
                "use H2O(..., streaming=False) or a codec that packs token by token"
            )
        return EvictingCache(self, model)
