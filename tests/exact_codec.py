"""A compressor that loses nothing, so that what a cache does beside packing can be compared to the last digits."""

from vqkv.cache.compressor import Compressor
from vqkv.cache.settings import CacheSettings
from vqkv.codecs import Codec, Payload
from vqkv.models.load import describe


class Fp32(Codec):
    """Stores what it is given."""

    ready = True

    def _encode(self, x):
        return Payload({"values": x})

    def _decode(self, payload):
        return payload.fields["values"]


def exact(model, **settings):
    """Packs every token at once, without loss; ``settings``: those of the cache that differ."""
    layers = model.config.num_hidden_layers
    return Compressor("exact", [(Fp32(), Fp32())] * layers, CacheSettings(**settings), describe(model))
