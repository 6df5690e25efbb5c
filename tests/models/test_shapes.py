"""What is stored of layers of unequal shape, of one KV head, of hybrids and of layers that share their keys."""

from dataclasses import replace
from operator import mul

import pytest
import torch
from architectures import TOKENS, build
from transformers import DynamicCache

from vqkv import calibrate, presets
from vqkv.cache.meter import tensor_bytes
from vqkv.models.layers import kv_layers

# layers that store, KV heads and head_dim of each, as the configurations say
SHAPES = {
    "falcon": [(1, 16)] * 4,  # multi-query
    "gpt_bigcode": [(1, 16)] * 4,
    "gemma4_text": [(2, 16), (2, 32)] * 2,
    "jamba": [(2, 16)] * 2,  # of four layers
    "qwen3_next": [(2, 16)],
}
SEEN = {name: [40] * len(shapes) for name, shapes in SHAPES.items()} | {"gemma4_text": [15, 40] * 2}  # by later queries


@pytest.mark.parametrize("name", SHAPES)
def test_bits_are_those_of_what_each_layer_stores(name):
    """4-bit codes, and a 16-bit scale and zero point for each group of 16 channels: 6 bits a value."""
    model = build(name)
    assert [(layer.num_kv_heads, layer.head_dim) for layer in kv_layers(model)] == SHAPES[name]
    preset = replace(presets.quanto(4, 16), flush_block=8)
    cache = calibrate(model, TOKENS, preset, progress=False).new_cache(model)
    dynamic = DynamicCache(config=model.config)
    with torch.inference_mode():
        for each in (cache, dynamic):
            model(TOKENS[:2], past_key_values=each, use_cache=True)
    widths, report = [heads * dim for heads, dim in SHAPES[name]], cache.report()
    seen = sum(tokens * width for tokens, width in zip(SEEN[name], widths, strict=True))
    theirs = [x for layer in dynamic.layers for x in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    assert report.dynamic_values == 2 * 2 * seen == sum(x.numel() for x in theirs if x is not None)
    packed = [sum(store.parts[1] for store in layer.stores) for layer in cache.compressed]
    assert report.packed_values == 2 * sum(map(mul, packed, widths))
    assert report.packed_bytes == report.packed_values * 6 / 8 and report.bits_per_value == 6
    assert report.cache_bytes == tensor_bytes(cache.batch) - tensor_bytes(cache.compressor)
