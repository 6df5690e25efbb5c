"""Numbers, caches and codecs that several test files draw from."""

import dataclasses

import torch

from vqkv.cache.compressor import Compressor
from vqkv.cache.settings import CacheSettings
from vqkv.codecs.payload import Payload
from vqkv.codecs.pipeline import Codec
from vqkv.models.load import describe

TOKENS = torch.randint(1, 4096, (6, 80), generator=torch.Generator().manual_seed(0))
PLAIN = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(model, cache, tokens=TOKENS[:2, :48], pieces=(20, 1, 1, 26)):
    """The logits of a model that reads tokens in pieces."""
    with torch.inference_mode():
        logits = [model(part, past_key_values=cache, use_cache=True).logits for part in tokens.split(list(pieces), 1)]
    return torch.cat(logits, dim=1)


def feed(cache, keys, values, pieces):
    """Let every layer of a cache read and write given keys (as stored) and values, piece by piece; what it returned."""
    read, start = [], 0
    for length in pieces:
        piece = slice(start, start + length)
        read.append([cache.update(k[:, :, piece], v[:, :, piece], i) for i, (k, v) in enumerate(zip(keys, values))])
        start += length
    return read


class Fp32(Codec):
    """Stores what it is given, so that what a cache does besides packing can be compared to the last digits."""

    ready = True

    def _encode(self, x):
        return Payload({"values": x})

    def _decode(self, payload):
        return payload.fields["values"]


def with_settings(compressor, **changes):
    """The compressor with other settings of its cache."""
    settings = dataclasses.replace(compressor.settings, **changes)
    return Compressor(compressor.name, compressor.codecs, settings, compressor.model)


def exact(model, **settings):
    """A compressor that packs every token at once, without loss; ``settings``: those of the cache that differ."""
    layers = model.config.num_hidden_layers
    return Compressor("exact", [(Fp32(), Fp32())] * layers, CacheSettings(**settings), describe(model))
