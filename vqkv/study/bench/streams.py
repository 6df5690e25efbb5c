"""Cases of ``best``: streams and trellis codes, and the way back of its designs by their parts."""

from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from vqkv import kernels
from vqkv.codecs.entropy_coded_scalar import EntropyCodedScalar
from vqkv.codecs.layout import MergeHeads, TokenBlock
from vqkv.codecs.payload import Payload
from vqkv.codecs.pca import PCA
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.predictive import Prediction, inputs
from vqkv.codecs.predictor_kinds import Linear
from vqkv.codecs.scaling import MeanRemoval
from vqkv.kernels import naive as reference
from vqkv.kernels.entropy.code import Code
from vqkv.kernels.trellis.naive import REACH
from vqkv.study.bench import peers
from vqkv.study.bench.case import Operation, Problem, Sizes, gaussian, ours
from vqkv.study.bench.roofline import Demand

RATES = {"2.5 bits": 2.5, "0.6 bits": 0.6}
BLOCK, BITS = 32, 1.8
STATES, WEIGHT = 8, 0.05  # of the trellis
HEADS, HEAD_DIM = 2, 128  # of the cache that is read back by parts
DECAY = 16  # octaves from the widest principal component to the narrowest


def rans(direction: str, sizes: Sizes) -> Iterator[Problem]:
    """Time codes of one layer's keys, whose channels vary unlike, to streams of 32 tokens each, or back."""
    channels = sizes.num_key_value_heads * sizes.head_dim
    x = (
        gaussian(1, 1, _whole_blocks(sizes), channels, seed=sizes.seed)
        * torch.linspace(0.7, 2.2, 8)[torch.arange(channels) % 8]
    )
    for name, bits in RATES.items():
        codec: Any = Chain([TokenBlock(BLOCK)], EntropyCodedScalar(bits)).fit(x)
        words, lengths, code = _streams(codec, codec.encode(x))
        values = kernels.rans_decode(words, lengths, code, BLOCK)[0].mT.contiguous()
        work = Demand(0, words.nbytes + values.nbytes, values.numel())
        shape = f"streams={len(values)} tokens={BLOCK} channels={channels}"
        kernel, problem = f"rans_{direction}", Problem(f"rans_{direction}", name, shape, work)
        if direction == "encode":
            given: tuple = (values, code)
            first: tuple = (values[:1], code)
        else:
            given, first = (words, lengths, code, BLOCK), (words[: lengths[0]], lengths[:1], code, BLOCK)
        expected = getattr(reference, kernel)(*first)[0]
        problem.add(ours(kernel, words), partial(getattr(kernels, kernel), *given), expected, itemgetter(0))
        problem.add_peer("constriction", partial(peers.constriction, direction, values, codec.quantizer))
        yield problem


def _whole_blocks(sizes: Sizes) -> int:
    return max(1, sizes.tokens // BLOCK) * BLOCK


def _streams(codec: Any, payload: Payload) -> tuple[Tensor, Tensor, Code]:
    """Return what ``rans_decode`` reads of a payload."""
    return payload.ragged["stream"], payload.counts("stream").permute(2, 0, 1).flatten(), codec.quantizer.code()


def trellis(direction: str, sizes: Sizes) -> Iterator[Problem]:
    """Time a layer's keys in steps, all heads side by side, to the cheapest codes of a trellis, or back."""
    channels, device = sizes.num_key_value_heads * sizes.head_dim, sizes.device
    x, step = 2 * gaussian(sizes.tokens, channels, seed=sizes.seed, device=device), torch.ones((), device=device)
    costs = torch.arange(-REACH, REACH + 2, device=device).abs().float().add(1)[None]
    zeros = torch.zeros(channels, dtype=torch.int32, device=device)  # one table for all, no low bits apart
    search = costs, zeros, zeros, WEIGHT
    codes = kernels.trellis_encode(x, *search)
    flops = 4 * STATES if direction == "encode" else 2  # a value's: of two ways to each state the cheaper
    work = Demand(flops * x.numel(), x.nbytes + codes.nbytes, x.numel(), exact=True)
    kernel, shape = f"trellis_{direction}", f"tokens={len(x)} channels={channels}"
    problem = Problem(kernel, f"{STATES} states", shape, work)
    given = (x, *search) if direction == "encode" else (codes, step)
    expected = getattr(reference, kernel)(given[0][:2], *given[1:])
    problem.add(ours(kernel, x), partial(getattr(kernels, kernel), *given), expected)
    yield problem


def way_back(sizes: Sizes) -> Iterator[Problem]:
    """Read keys of 2 heads of 128 channels in designs of ``best(1.8)``, by head and predicted, all and by parts."""
    mix = gaussian(HEADS, HEAD_DIM, HEAD_DIM, seed=sizes.seed) * 2 ** torch.linspace(0, -DECAY, HEAD_DIM)[:, None]
    train, x = (gaussian(1, HEADS, n, HEAD_DIM, seed=n) @ mix for n in (4096, _whole_blocks(sizes)))
    train, x = train.to(sizes.device), x.to(sizes.device)
    yield from _parts("by head", train, x)
    sources = {("key", 0): x, ("value", 0): x}
    rows = inputs(sources, sources, x).flatten(0, 1)
    predictor = Linear(1e-1).fit(lambda: iter([(rows, rows[:, : HEADS * HEAD_DIM])]))
    yield from _parts("predicted", train, x, partial(Prediction(predictor, tuple(sources)), sources, x))


def _parts(design: str, train: Tensor, x: Tensor, prediction: Callable | None = None) -> Iterator[Problem]:
    rotation, merged = PCA(), [MergeHeads()] if prediction else []
    codec: Any = Chain([MeanRemoval(), *merged, rotation, TokenBlock(BLOCK)], EntropyCodedScalar(BITS)).fit(train)
    payload, values = codec.encode(x), x.numel()
    components = codec.quantizer.load(payload).flatten(2, 3)
    width = HEAD_DIM * (HEADS if prediction else 1)
    flops, matrix = 2 * width * values, 4 * width * width
    moved = payload.nbytes + 4 * values + matrix
    parts: list[tuple[str, int, int, Callable]] = [
        ("streams", 0, moved - matrix, partial(kernels.rans_decode, *_streams(codec, payload), BLOCK)),
        ("rotation", flops, 8 * values + matrix, partial(rotation.decode, components, {})),
    ]
    if prediction:
        read = 12 * values + 2 * matrix  # of two tensors, one written
        parts.append(("prediction", 2 * flops, read, prediction))
        parts.append(("whole", 3 * flops, moved + read, lambda: codec.decode(payload) + prediction()))
    else:
        parts.append(("whole", flops, moved, partial(codec.decode, payload)))
    shape = f"heads={HEADS} tokens={x.shape[2]} head_dim={HEAD_DIM}"
    for part, flops, moved, call in parts:
        problem = Problem("best_decode", f"{design}, {part}", shape, Demand(flops, moved, values, exact=True))
        problem.add(ours("rans_decode", x) if part in ("streams", "whole") else "torch", call)
        yield problem


OPERATIONS: dict[str, Operation] = {
    "rans_encode": partial(rans, "encode"),
    "rans_decode": partial(rans, "decode"),
    "trellis_encode": partial(trellis, "encode"),
    "trellis_decode": partial(trellis, "decode"),
    "best_decode": way_back,
}
