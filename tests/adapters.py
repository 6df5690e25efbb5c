"""Adapters on a model's linear layers, with the names, switches and in-place merges of peft's."""

import torch
from torch import nn


class Lora(nn.Module):
    """``base_layer`` and what the active adapters add."""

    def __init__(self, base_layer: nn.Linear, names=("a", "b")):
        super().__init__()
        self.base_layer, self.scaling = base_layer, dict.fromkeys(names, 2.0)
        drawn = torch.Generator().manual_seed(0)
        added = {name: 0.05 * torch.randn(base_layer.weight.shape, generator=drawn) for name in names}
        self.lora = nn.ParameterDict(added)
        self._active_adapter, self._disable_adapters, self.merged_adapters = [names[0]], False, []

    def forward(self, x):
        y = self.base_layer(x)
        for name in [] if self._disable_adapters or self.merged_adapters else self._active_adapter:
            y = y + self.scaling[name] * x @ self.lora[name].T
        return y

    def merge(self):
        for name in self._active_adapter:
            self.base_layer.weight.data += self.scaling[name] * self.lora[name]
            self.merged_adapters.append(name)


def adapt(model, part: str, name: str):
    """The same model with adapters on ``name`` of each layer's ``part``; returns them, too."""
    parts = [getattr(layer, part) for layer in model.model.layers]
    for each in parts:
        setattr(each, name, Lora(getattr(each, name)).eval())
    return model, [getattr(each, name) for each in parts]


def switch(adapters, **values):
    """Set attributes of all of them."""
    for adapter in adapters:
        vars(adapter).update(values)
