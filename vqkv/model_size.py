"""What a model costs, known from its config before any weights are loaded."""

from dataclasses import dataclass, field

from torch import nn

from vqkv.configs import architecture
from vqkv.footprint import Footprint, footprint, model_shape


@dataclass(frozen=True)
class ModelSize:
    """What costs depend on: ``parameters`` that are multiplied with each token, bytes of the weights, and the shape of
    layers and cache. ``model`` lies on the ``meta`` device."""

    name: str
    model: nn.Module = field(repr=False)
    parameters: int
    layers: int
    attention: int  # query heads * head_dim
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    positions: int

    @property
    def item_bytes(self) -> int:
        """Bytes of a number in the model's dtype."""
        return self.model.dtype.itemsize

    @property
    def values(self) -> int:
        """Elements of K and V in a token."""
        return 2 * self.layers * self.num_kv_heads * self.head_dim

    def pass_flop(self, num_seqs: int, seq_len: int) -> float:
        """Of the model reading so many sequences."""
        attention = 4 * self.layers * self.attention * seq_len
        return num_seqs * seq_len * (2 * self.parameters + attention)

    def footprint(self, preset) -> Footprint:
        """What is stored, measured on a model without weights: see ``vqkv.footprint``."""
        return footprint(self.model, preset, working=False)


def model_size(name: str, config, dtype: str | None) -> ModelSize:
    """Of what a transformers ``config`` describes. Raises ``DataError`` for one that is of no decoder."""
    if getattr(config, "sliding_window", None):
        config.sliding_window = None  # vqkv keeps every token
    model = architecture(config, dtype or None)
    text, shape = config.get_text_config(decoder=True), model_shape(model)
    return ModelSize(
        name,
        model,
        _multiplied(model),
        shape.num_layers,
        text.num_attention_heads * shape.head_dim,
        shape.num_kv_heads,
        shape.head_dim,
        text.vocab_size,
        text.max_position_embeddings,
    )


def _multiplied(model: nn.Module) -> int:
    """Weights of ``Linear`` and GPT-2's ``Conv1D``: all matrices but those of embeddings."""
    modules = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    weights = [module.weight for module in modules if isinstance(getattr(module, "weight", None), nn.Parameter)]
    return sum(weight.numel() for weight in weights if weight.ndim == 2)
