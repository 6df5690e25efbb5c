"""Side-by-side timings of residual VQ against its peers: ``python -m vqkv.bench rvq [--out results/bench_rvq.csv]``.

One thread, the same codebooks in every implementation, repetitions interleaved (A B C A B C ...) so that a busy
machine slows all of them alike; milliseconds of wall time. Every peer's codes are compared with ours.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vqkv.bench.record import versions, write
from vqkv.kernels import cpu, reference
from vqkv.machine import processor

COLUMNS = (
    "operation", "implementation", "shape", "dtype", "device", "threads", "repetitions", "median_ms", "min_ms",
    "max_ms", "ratio_to_ours", "equal_to_ours", "versions",
)  # fmt: skip
PACKAGES = ("torch", "vector-quantize-pytorch", "faiss-cpu")
OURS = "vqkv"


@dataclass
class Entry:
    """One implementation of one operation. ``equal`` is the share of its results that equal ours."""

    operation: str
    implementation: str
    call: Callable[[], object]
    equal: float | None = None
    dtype: str = "float32"
    once: bool = False  # too slow to repeat


def problem(rows: int, dim: int, num_quantizers: int, codebook_size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gaussian vectors (rows, dim), and codebooks (num_quantizers, codebook_size, dim) drawn from the residuals."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=generator)
    residual = torch.randn(4 * codebook_size, dim, generator=generator)
    codebooks = []
    for _ in range(num_quantizers):
        sample = residual[torch.randperm(len(residual), generator=generator)[:codebook_size]]
        codebook = sample * 0.7  # shrunk towards the mean, as k-means would
        residual = residual - codebook[cpu.rvq_encode(residual, codebook[None]).squeeze(-1)]
        codebooks.append(codebook)
    return x, torch.stack(codebooks)


def ours(x: Tensor, codebooks: Tensor) -> list[Entry]:
    """The kernels of this package, brute force in float64, and the matrix products without the search."""
    codes = cpu.rvq_encode(x, codebooks)
    exact = reference.rvq_encode(x, codebooks)
    values = reference.rvq_decode(codes, codebooks)
    return [
        Entry("encode", OURS, lambda: cpu.rvq_encode(x, codebooks), 1.0),
        Entry(
            "encode", "brute force", lambda: reference.rvq_encode(x, codebooks), _share(exact, codes), "float64", True
        ),
        Entry("encode", "matrix products alone", lambda: _products(x, codebooks)),
        Entry("decode", OURS, lambda: cpu.rvq_decode(codes, codebooks), 1.0),
        Entry(
            "decode",
            "index and sum",
            lambda: reference.rvq_decode(codes, codebooks),
            _close(values, cpu.rvq_decode(codes, codebooks)),
            "float64",
        ),
    ]


def vector_quantize_pytorch(x: Tensor, codebooks: Tensor) -> list[Entry]:
    """``ResidualVQ`` in eval, holding our codebooks."""
    from vector_quantize_pytorch import ResidualVQ

    num_quantizers, codebook_size, dim = codebooks.shape
    peer = ResidualVQ(dim=dim, num_quantizers=num_quantizers, codebook_size=codebook_size).eval()
    for layer, codebook in zip(peer.layers, codebooks, strict=True):
        layer._codebook.embed.data.copy_(codebook[None])
    codes = cpu.rvq_encode(x, codebooks)
    encode = torch.no_grad()(lambda: peer(x[None])[1][0])
    decode = torch.no_grad()(lambda: peer.get_output_from_indices(codes[None])[0])
    expected = cpu.rvq_decode(codes, codebooks)
    return [
        Entry("encode", "vector-quantize-pytorch", encode, _share(encode(), codes)),
        Entry("decode", "vector-quantize-pytorch", decode, _close(decode(), expected)),
    ]


def faiss(x: Tensor, codebooks: Tensor) -> list[Entry]:
    """``ResidualQuantizer`` with beam 1, holding our codebooks; its codes are packed, as it stores them."""
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    num_quantizers, codebook_size, dim = codebooks.shape
    bits = (codebook_size - 1).bit_length()
    peer = faiss.ResidualQuantizer(dim, num_quantizers, bits)
    peer.max_beam_size = 1
    faiss.copy_array_to_vector(codebooks.numpy().ravel(), peer.codebooks)
    peer.is_trained = True
    peer.compute_codebook_tables()
    rows, codes = x.numpy(), cpu.rvq_encode(x, codebooks)
    packed = peer.compute_codes(rows)
    values = torch.from_numpy(peer.decode(packed))
    return [
        Entry("encode", "faiss beam 1", lambda: peer.compute_codes(rows), _share(_unpack(packed, bits, codes), codes)),
        Entry("decode", "faiss beam 1", lambda: peer.decode(packed), _close(values, cpu.rvq_decode(codes, codebooks))),
    ]


def measure(entries: list[Entry], repetitions: int) -> list[list[float]]:
    """Milliseconds of every call, all entries in turn; the slow ones in the first round only."""
    times = [[] for _ in entries]
    for turn in range(repetitions + 1):  # turn 0 warms up
        for entry, taken in zip(entries, times, strict=True):
            if entry.once and turn != 1:
                continue
            start = time.perf_counter()
            entry.call()
            if turn:
                taken.append((time.perf_counter() - start) * 1e3)
    return times


def table(entries: list[Entry], times: list[list[float]], shape: str) -> list[dict]:
    """One tidy row per entry; ``ratio_to_ours`` compares medians of the same operation."""
    medians = {(e.operation, e.implementation): statistics.median(t) for e, t in zip(entries, times, strict=True)}
    rows = []
    for entry, taken in zip(entries, times, strict=True):
        median = statistics.median(taken)
        values = (
            entry.operation, entry.implementation, shape, entry.dtype, processor(), torch.get_num_threads(), len(taken),
            f"{median:.3f}", f"{min(taken):.3f}", f"{max(taken):.3f}", f"{median / medians[entry.operation, OURS]:.2f}",
            "" if entry.equal is None else f"{entry.equal:.6f}", versions(*PACKAGES),
        )  # fmt: skip
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and, with ``--out``, write."""
    parser = argparse.ArgumentParser(prog="python -m vqkv.bench rvq", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--num-quantizers", type=int, default=8)
    parser.add_argument("--codebook-size", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    x, codebooks = problem(options.rows, options.dim, options.num_quantizers, options.codebook_size)
    entries = ours(x, codebooks)
    for peer in (vector_quantize_pytorch, faiss):
        try:
            entries += peer(x, codebooks)
        except ImportError as error:
            print(f"skipped {peer.__name__}: {error}")
    shape = f"N={options.rows} d={options.dim} K={options.num_quantizers} C={options.codebook_size}"
    rows = table(entries, measure(entries, options.repetitions), shape)
    for row in sorted(rows, key=lambda row: row["operation"], reverse=True):
        print(
            "  ".join(f"{row[c]:>{w}}" for c, w in (("operation", 6), ("implementation", 24), ("median_ms", 10))),
            end="",
        )
        print(f"  {row['ratio_to_ours']:>7}x  equal {row['equal_to_ours'] or '-'}")
    if options.out:
        write(rows, options.out)


def _products(x: Tensor, codebooks: Tensor) -> None:
    buffer = torch.empty(min(cpu.CHUNK, len(x)), codebooks.shape[1])
    weights = cpu.prepare(codebooks).weights[:, :-1, : codebooks.shape[1]]
    for part in x.split(cpu.CHUNK):
        for weight in weights:
            torch.mm(part, weight, out=buffer[: len(part)])


def _unpack(packed, bits: int, like: Tensor) -> Tensor:
    from vqkv.codec.packing import unpack

    return unpack(torch.from_numpy(packed), bits, like.shape[-1])


def _share(codes: Tensor, expected: Tensor) -> float:
    return float((codes == expected).all(dim=-1).double().mean())


def _close(values: Tensor, expected: Tensor) -> float:
    return float(torch.isclose(values.float(), expected.float(), atol=1e-5).all(dim=-1).double().mean())
