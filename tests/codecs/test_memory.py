"""What reading a cache needs in addition to what is stored: tables, and what is held for a moment."""

import torch
from torch.autograd.profiler import profile

from vqkv import presets
from vqkv.cache.meter import tensor_bytes
from vqkv.codecs.predictive import JointCodec, Prediction, Reconstructions, last_readers
from vqkv.codecs.predictor_kinds import Slice

LAYERS, HEADS, DIM, TOKENS = 10, 4, 16, 1024


def states(heads: int, tokens: int = TOKENS) -> torch.Tensor:
    """Random channels of unequal spreads, as principal components have."""
    x = torch.randn(1, heads, tokens, DIM, generator=torch.Generator().manual_seed(0))
    return x * torch.logspace(0.5, -2.5, heads * DIM).view(1, heads, 1, DIM)


def peak(run):
    """What ``run`` returns, and the most bytes that torch held at a time for tensors made in it."""
    with profile(profile_memory=True) as profiler:
        out = run()
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return out, max(torch.tensor(changes).cumsum(0).tolist())


def test_tables_of_an_entropy_coder_are_kept_small():
    """Slots of all layers' tables, 32 KiB each, would outweigh the cache that they decode: below 8 KiB a table."""
    codec = presets.crossed("uniform", merged=False).key_codec(DIM).fit(states(HEADS))
    codec.decode(codec.encode(states(HEADS)))
    assert tensor_bytes(codec.quantizer.code()) < 8192 * len(codec.quantizer.code().tables)


def test_layers_stored_together_are_read_one_after_the_other():
    """Never are all layers reconstructed at a time: at 4 bits, where all components are kept, these alone are."""
    x = states(LAYERS * HEADS)
    codec = presets.kvtc(4.0).key_codec(DIM).fit(x)
    payload, decoded = codec.encode(x), codec.decode(codec.encode(x))
    own = [Prediction(Slice(layer * HEADS * DIM, HEADS * DIM), (("key", 0),)) for layer in range(1, LAYERS)]
    readers = last_readers({("key", 1 + i): prediction for i, prediction in enumerate(own)})

    def read():
        reconstructions = Reconstructions(readers)
        first = JointCodec(codec, ("key", 0), heads=HEADS).decode(payload, reconstructions)
        yield first
        for prediction in own:
            yield prediction(reconstructions, first)

    error, most = peak(
        lambda: max((got - want).abs().max().item() for got, want in zip(read(), decoded.split(HEADS, 1), strict=True))
    )
    assert error < 1e-5
    assert most < 1.75 * decoded.nbytes
