"""Cases of entropy codes: the streams beside another library's, and the way back of ``best`` by its parts."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vqkv import kernels
from vqkv.codecs.entropy_coded_scalar import EntropyCodedScalar
from vqkv.codecs.layout import MergeHeads, TokenBlock
from vqkv.codecs.payload import Payload
from vqkv.codecs.pca import PCA
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.predictive import Known, Prediction, PredictiveCodec, side_by_side
from vqkv.codecs.predictor_kinds import Linear
from vqkv.codecs.scaling import MeanRemoval
from vqkv.study.bench import peers
from vqkv.study.bench.case import BenchCase, Sizes, gaussian, ours
from vqkv.study.bench.roofline import Demand

RATES = {"2.5 bits": (0.7, 2.2), "0.6 bits": (0.12, 0.55)}  # narrowest and widest standard deviation of 8 tables' codes
TABLES, BLOCK, BITS = 8, 32, 1.8
HEADS, HEAD_DIM = 2, 128  # of the cache that is read back by parts
DECAY = 16  # octaves from the widest principal component to the narrowest


def rans(direction: str, sizes: Sizes) -> Iterator[BenchCase]:
    """Small integers of one layer's keys, of ``TABLES`` tables, to streams of 32 tokens each, or back."""
    channels = sizes.kv_heads * sizes.head_dim
    for name, spread in RATES.items():
        widths = torch.linspace(*spread, TABLES)[torch.arange(channels) % TABLES]
        codec = EntropyCodedScalar(2.0)
        codec.build((1, BLOCK, channels))
        x = gaussian(1, 1, max(1, sizes.tokens // BLOCK), BLOCK, channels, seed=sizes.seed) * widths
        codec.step, codec.shifts = torch.ones(()), torch.zeros(1, channels, dtype=torch.uint8)
        codec.partial_fit(x)
        codec.finalize()
        values = codec.encode(x)[0].unflatten(-1, (BLOCK, channels)).squeeze(1)[0].mT.contiguous().to(sizes.device)
        code = codec.make_code().to(sizes.device)
        words, lengths = kernels.rans_encode(values, code)
        work = Demand(0, words.nbytes + values.nbytes, values.numel())
        case = BenchCase(f"rans_{direction}", name, f"streams={len(values)} tokens={BLOCK} channels={channels}", work)
        if direction == "encode":
            call = partial(kernels.rans_encode, values, code)
            case.add(ours("rans_encode", values), call, words[:, None], lambda found: found[0][:, None])
        else:
            call = partial(kernels.rans_decode, words, lengths, code, BLOCK)
            case.add(ours("rans_decode", words), call, values.mT, lambda found: found[0])
        peers.add("constriction", _constriction, case, direction, values.cpu(), codec)
        yield case


def _constriction(case: BenchCase, direction: str, values: Tensor, codec: EntropyCodedScalar) -> None:
    """Its stack coder, a table's codes of a stream at a time, with the same frequencies."""
    from constriction import stream

    reaches = codec.reaches.tolist()
    tables = np.split(codec.frequencies.numpy().astype(np.float64), np.cumsum([2 * r + 2 for r in reaches])[:-1])
    models = [stream.model.Categorical(table[:-1] / table[:-1].sum(), perfect=False) for table in tables]
    number = torch.unique(codec.spreads, return_inverse=True)[1].flatten()
    places = [(number == i).nonzero()[:, 0] for i in range(len(tables))]
    symbols = [
        [
            (each[at].clamp(-reach, reach) + reach).flatten().numpy().astype(np.int32)
            for at, reach in zip(places, reaches)
        ]
        for each in values
    ]

    def encode() -> list:
        streams = []
        for parts in symbols:
            coder = stream.stack.AnsCoder()
            for part, table in zip(reversed(parts), reversed(models), strict=True):
                coder.encode_reverse(part, table)
            streams.append(coder.get_compressed())
        return streams

    def decode(streams: list) -> list:
        coders = [stream.stack.AnsCoder(words) for words in streams]
        sizes = [len(part) for part in symbols[0]]
        return [[coder.decode(table, size) for table, size in zip(models, sizes)] for coder in coders]

    case.add("constriction", encode if direction == "encode" else partial(decode, encode()))


def way_back(sizes: Sizes) -> Iterator[BenchCase]:
    """Keys of 2 heads of 128 channels in designs of ``best(1.8)``, by head and predicted, and what each part of reading
    them takes: the streams, the inverse rotation, and of the predicted design the product that predicts values from the
    layer's keys and the values before."""
    mix = gaussian(HEADS, HEAD_DIM, HEAD_DIM, seed=sizes.seed) * 2 ** torch.linspace(0, -DECAY, HEAD_DIM)[:, None]
    train, x = (gaussian(1, HEADS, n, HEAD_DIM, seed=n) @ mix for n in (4096, max(BLOCK, sizes.tokens)))
    train, x = train.to(sizes.device), x.to(sizes.device)
    for design, merged in (("by head", []), ("predicted", [MergeHeads()])):
        codec = Chain([MeanRemoval(), *merged, PCA(), TokenBlock(BLOCK)], EntropyCodedScalar(BITS)).fit(train)
        payload, shape = codec.encode(x), f"heads={HEADS} tokens={x.shape[2]} head_dim={HEAD_DIM}"
        lengths = payload.counts("stream").permute(2, 0, 1).flatten()
        words, code, values = payload.ragged["stream"], codec.quantizer.code(), x.numel()
        width = HEAD_DIM * (HEADS if merged else 1)
        rows = codec.quantizer.load(payload).flatten(2, 3)
        rotation = next(stage for stage in codec.stages if isinstance(stage, PCA))
        product = Demand(2 * width * values, 8 * values + 4 * width * width, values, exact=True)
        parts = {
            "streams": (Demand(0, payload.nbytes + 4 * values, values),
                        partial(kernels.rans_decode, words, lengths, code, BLOCK)),
            "rotation": (product, lambda stage=rotation, y=rows: stage.decode(y, {})),
        }  # fmt: skip
        flops, moved = product.flops, payload.nbytes + 4 * values + 4 * width * width
        whole = partial(codec.decode, payload)
        if merged:
            known = {("key", 0): x, ("value", 0): x}
            inputs = torch.cat([side_by_side(each).flatten(0, 1) for each in known.values()], dim=-1)
            predictor = Linear(1e-1).fit(partial(_samples, inputs, inputs[:, :width]))
            prediction = Prediction(predictor, tuple(known))
            predicting = Demand(2 * flops, 12 * values + 4 * 2 * width * width, values, exact=True)
            parts["prediction"] = (predicting, partial(prediction, known, x))
            flops, moved = 3 * flops, moved + predicting.bytes
            whole = partial(_predicted, PredictiveCodec(codec, ("value", 1), prediction), payload, known)
        parts["whole"] = Demand(flops, moved, values, exact=True), whole
        for part, (work, call) in parts.items():
            case = BenchCase("best_decode", f"{design}, {part}", shape, work)
            case.add(ours("rans_decode", words) if part in ("streams", "whole") else "torch", call)
            yield case


def _samples(*pair: Tensor) -> Iterator[tuple[Tensor, ...]]:
    yield pair


def _predicted(coder: PredictiveCodec, payload: Payload, known: dict) -> Tensor:
    found = Known()
    found.update(known)
    return coder.decode(payload, found)


OPERATIONS = {
    "rans_encode": partial(rans, "encode"),
    "rans_decode": partial(rans, "decode"),
    "best_decode": way_back,
}
