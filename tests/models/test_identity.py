"""Models whose attention weights are no parameters, and the price of asking which model it is."""

import copy

import pytest
import torch
from torch import nn

from vqkv import calibrate, presets
from vqkv.models import identity as identities
from vqkv.models.identity import identity, stamp
from vqkv.models.load import describe, difference, fingerprint, layer_devices

TOKENS = torch.randint(1, 400, (6, 160), generator=torch.Generator().manual_seed(0))


class Buffers(nn.Module):
    """A linear layer as GPTQ's and AWQ's: integers and scales, all of them buffers."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scales", scales)
        self.register_buffer("qweight", (linear.weight.detach() / scales).round().to(torch.int32))

    def forward(self, x):
        return x @ (self.qweight * self.scales).T


def buffers(model):
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        for name, linear in list(layer.self_attn.named_children()):
            setattr(layer.self_attn, name, Buffers(linear))
    return model


def int8(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize("quantized", [buffers, int8])
def test_weights_that_are_no_parameters(llama, quantized):
    model, other = quantized(llama), copy.deepcopy(llama)
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight.mul_(torch.linspace(0.5, 2, 48))
    other = quantized(other)
    compressor = calibrate(model, TOKENS, presets.kivi(), progress=False)
    compressor.new_cache(model)
    assert layer_devices(model) == [torch.device("cpu")] * 3
    assert identity(model) == identity(quantized(llama)) != identity(other)
    assert fingerprint(model) == fingerprint(quantized(llama)) != fingerprint(other)
    assert difference(describe(model), other) == "other attention weights"


def test_weights_are_read_once_and_all_of_them(llama, monkeypatch):
    model, read = copy.deepcopy(llama), []
    own = identities.tensors_sha256
    monkeypatch.setattr(identities, "tensors_sha256", lambda named: read.append(1) or own(named))
    first = identity(model), stamp(model)
    assert len(read) == len({*model.parameters(), *model.buffers()})
    assert (identity(model), stamp(model)) == first and len(read) == len({*model.parameters(), *model.buffers()})
    del read[:]
    for weight in [*model.parameters(), *model.buffers()]:
        with torch.no_grad():
            weight.view(-1)[-1] += 0.5  # which no sample looks at
        assert (identity(model), stamp(model)) != first
        first = identity(model), stamp(model)
    assert len(read) == len({*model.parameters(), *model.buffers()})


def test_a_device_map_makes_no_other_model(llama, tmp_path):
    from test_device_map import PLACES

    from vqkv import load_model

    spread, _ = load_model(llama.config._name_or_path, device=PLACES, offload_folder=str(tmp_path))
    assert identity(spread) == identity(llama)
    spread(TOKENS[:1])
    assert identity(spread) == identity(llama)
