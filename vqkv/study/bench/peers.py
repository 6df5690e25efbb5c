"""Other people's libraries, as they are, on the same codebooks and values. A function returns what is timed, a call,
and how its result is read for the comparison with ours. Without the library it raises ``ImportError``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vqkv.codecs.entropy_coded_scalar import EntropyCodedScalar
from vqkv.kernels import naive as reference

PACKAGES = ("torch", "vector-quantize-pytorch", "faiss-cpu", "optimum-quanto", "hqq", "constriction", "triton", "vqkv")
Peer = tuple[Callable, Callable | None]


def vector_quantize(codebooks: Tensor, x: Tensor | None = None, codes: Tensor | None = None) -> Peer:
    """Use ``ResidualVQ`` of vector-quantize-pytorch in evaluation mode: rows of x to codes, or codes to sums."""
    from vector_quantize_pytorch import ResidualVQ

    num_quantizers, codebook_size, dim = codebooks.shape
    peer = ResidualVQ(dim=dim, num_quantizers=num_quantizers, codebook_size=codebook_size).eval().to(codebooks.device)
    for layer, codebook in zip(peer.layers, codebooks, strict=True):
        layer._codebook.embed.data.copy_(codebook[None])
    if codes is not None:
        return lambda: peer.get_output_from_indices(codes[None])[0], None
    return lambda: peer(x.unsqueeze(0) if x is not None else None)[1][0], None


def faiss(codebooks: Tensor, beam: int = 1, product: bool = False):
    """Make faiss' quantizer that holds codebooks (codebooks, codebook_size, dim), of the residual or of pieces."""
    import faiss

    if codebooks.is_cuda:
        raise ImportError("faiss-cpu has no such quantizer for a GPU")
    faiss.omp_set_num_threads(torch.get_num_threads())
    count, codebook_size, dim = codebooks.shape
    bits, flat = (codebook_size - 1).bit_length(), codebooks.numpy().ravel()
    if product:
        peer: Any = faiss.ProductQuantizer(count * dim, count, bits)
        faiss.copy_array_to_vector(flat, peer.centroids)
        return peer
    peer = faiss.ResidualQuantizer(dim, count, bits)
    peer.max_beam_size, peer.is_trained = beam, True
    faiss.copy_array_to_vector(flat, peer.codebooks)
    peer.compute_codebook_tables()
    return peer


def faiss_encode(codebooks: Tensor, x: Tensor, **kind) -> Peer:
    """Encode rows of x to packed codes."""
    bits, rows = (codebooks.shape[1] - 1).bit_length(), x.cpu().numpy()
    read = lambda packed: reference.unpack_codes(torch.from_numpy(packed), bits, len(codebooks))  # noqa: E731
    return partial(faiss(codebooks, **kind).compute_codes, rows), read


def faiss_decode(codebooks: Tensor, codes: Tensor, **kind) -> Peer:
    """Decode packed codes to rows."""
    packed = reference.pack_codes(codes, (codebooks.shape[1] - 1).bit_length()).cpu().numpy()
    return partial(faiss(codebooks, **kind).decode, packed), torch.from_numpy


def quanto(direction: str, x: Tensor, bits: int, group_size: int) -> Peer:
    """Use optimum-quanto: qint4 and qint2 by group, as transformers' cache; qint8 by token and symmetric."""
    from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qint2, qint4, qint8, quantize_weight

    def encode():
        if bits == 8:
            rows = x.flatten(0, -2)
            return quantize_weight(rows, qint8, 0, AbsmaxOptimizer()(rows, qint8, 0))
        kind = {2: qint2, 4: qint4}[bits]
        scale, shift = MaxOptimizer()(x, kind, 0, group_size)
        return quantize_weight(x, kind, 0, scale, shift, group_size)

    if direction == "encode":
        return encode, lambda stored: stored.dequantize().view(x.shape)
    return encode().dequantize, lambda values: values.view(x.shape)


def hqq(direction: str, x: Tensor, bits: int, group_size: int) -> Peer:
    """Use hqq: groups of neighbouring channels, offsets found by its solver; read in fp32, as all is here."""
    from hqq.core.quantize import Quantizer

    how = {"group_size": group_size, "axis": 1, "device": x.device.type, "compute_dtype": torch.float32}
    encode = partial(Quantizer.quantize, x, bits, **how)

    def decode(codes: Tensor, about: dict) -> Tensor:
        return Quantizer.dequantize(codes, about | {"compute_dtype": torch.float32}).view(x.shape)

    return (encode, lambda stored: decode(*stored)) if direction == "encode" else (partial(decode, *encode()), None)


def constriction(direction: str, values: Tensor, codec: EntropyCodedScalar) -> Peer:
    """Use constriction's stack coder on values (streams, channels, tokens) with the frequencies of ``codec``."""
    from constriction import stream

    reaches = codec.reaches.tolist()
    tables = np.split(codec.frequencies.cpu().numpy().astype(np.float64), np.cumsum([2 * r + 2 for r in reaches])[:-1])
    models = [stream.model.Categorical(table[:-1] / table[:-1].sum(), perfect=False) for table in tables]
    table_of = torch.unique(codec.spreads.cpu(), return_inverse=True)[1].flatten()

    def symbols(values: Tensor) -> list[np.ndarray]:
        parts = [values[table_of == i].clamp(-reach, reach) + reach for i, reach in enumerate(reaches)]
        return [part.flatten().numpy().astype(np.int32) for part in parts]

    def encoded(parts: list[np.ndarray]) -> np.ndarray:
        coder = stream.stack.AnsCoder()
        for part, model in zip(reversed(parts), reversed(models), strict=True):
            coder.encode_reverse(part, model)
        return coder.get_compressed()

    def decoded(words: np.ndarray) -> list[np.ndarray]:
        coder = stream.stack.AnsCoder(words)
        return [coder.decode(model, len(part)) for model, part in zip(models, streams[0], strict=True)]

    streams = [symbols(each) for each in values.cpu()]
    if direction == "encode":
        return lambda: [encoded(parts) for parts in streams], None
    written = [encoded(parts) for parts in streams]
    return lambda: [decoded(words) for words in written], None
