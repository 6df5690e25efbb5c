"""A model whose attention blocks are trained, and nothing else of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

from vqkv.errors import DataError
from vqkv.models.layers import kv_layers


def attention_weights(model) -> list[nn.Parameter]:
    """All weights of the attention blocks, norms included. Raises ``DataError`` for integer ones."""
    found = dict.fromkeys(weight for layer in kv_layers(model) for weight in layer.attention.parameters())
    if not all(weight.is_floating_point() for weight in found):
        raise DataError("the attention blocks' weights are quantized: load the model in bf16 or fp32 to fine-tune it")
    return [*found]


class TrainedWeights(list):
    """A model's attention weights, in fp32 and alone trained while inside; as they were after it, unless ``keep()``."""

    def __init__(self, model):
        super().__init__(attention_weights(model))
        self.model, self.kept = model, False

    def __enter__(self) -> "TrainedWeights":
        self.before = [weight.data for weight in self]
        self.needing = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.training = [module for module in self.model.modules() if module.training]
        self.model.eval().requires_grad_(False)
        for weight in self:
            weight.data = weight.data.to(torch.float32, copy=True)
            weight.requires_grad_()
        return self

    def keep(self) -> None:
        """Round to the model's dtype."""
        for weight, before in zip(self, self.before, strict=True):
            weight.data = weight.data.to(before.dtype)
        self.kept = True

    def __exit__(self, *error) -> None:
        for weight, before in zip(self, self.before, strict=True):
            weight.grad = None
            if not self.kept:
                weight.data = before
        self.model.requires_grad_(False)
        for weight in self.needing:
            weight.requires_grad_()
        for module in self.training:
            module.training = True


@contextmanager
def recomputing(model) -> Iterator[None]:
    """Inside, decoder layers keep only their inputs. (transformers' own way wants training mode, with dropout.)"""
    parents = {child: module for module in model.modules() for child in module.children()}
    layers = [parents[layer.attention] for layer in kv_layers(model)]
    before = [vars(layer).get("forward") for layer in layers]  # accelerate's, where it moves a layer's inputs
    for layer in layers:
        layer.forward = partial(recomputed, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
