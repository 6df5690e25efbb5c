"""The choice between implementations of an operation: ``triton`` on a GPU, ``cpu`` elsewhere (compiled
loops for a CPU's tensors, torch for others), and ``naive`` when asked for. ``which`` says so."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from vqkv.errors import DataError, UnknownNameError
from vqkv.kernels.entropy.code import Code
from vqkv.kernels.view import Affine, Grouped, KernelView, Rope

NAMES = ("triton", "cpu", "naive")
TRITON = {
    "rvq_encode": "rvq",
    "affine_encode": "formats",
    "decode": "formats",
    "decode_attention": "attention",
    "pack_codes": "packing",
    "unpack_codes": "packing",
    "rans_encode": "entropy",
    "rans_decode": "entropy",
}  # operations that have a Triton kernel, and its room
OPERATIONS = (*TRITON, "rvq_decode", "rvq_statistics", "grouped_encode", "trellis_encode", "trellis_decode")

_forced: list[str] = []  # what ``using`` asks for, the innermost last


@contextmanager
def using(name: str) -> Iterator[None]:
    """Within the context, every operation that has an implementation ``name`` (``triton``, ``cpu`` or ``naive``) runs
    it. Raises ``UnknownNameError`` for another name, ``DataError`` where ``triton`` cannot run."""
    if name not in NAMES:
        raise UnknownNameError("kernels", name, NAMES)
    runs = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    if name == "triton" and not (has_triton() and runs):
        raise DataError("no Triton kernels: pip install triton, on a machine with a GPU or with TRITON_INTERPRET=1")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


def which(operation: str, x: Tensor, *arguments) -> str:
    """Name the implementation that serves ``operation`` for tensors where ``x`` is, and for these arguments."""
    on_gpu = x.is_cuda and has_triton() and not torch.compiler.is_compiling()
    name = _forced[-1] if _forced else "triton" if on_gpu else "cpu"
    if name != "triton" or operation not in TRITON:
        return "cpu" if name == "triton" else name
    can_serve = getattr(_module(operation, name), f"can_{operation}", None)
    return name if can_serve is None or not arguments or can_serve(*arguments) else "cpu"


@cache
def has_triton() -> bool:
    """Tell whether triton can be imported: it cannot on every system that torch runs on."""
    return importlib.util.find_spec("triton") is not None


def _module(operation: str, name: str) -> ModuleType:
    if name == "triton":
        return importlib.import_module(f"vqkv.kernels.{TRITON[operation]}.triton")
    from vqkv.kernels import cpu, naive  # not before: a model needs no numba. A graph can be traced through it

    return cpu if name == "cpu" else naive


def _find(operation: str, x: Tensor, *arguments):
    """Return the function that serves ``operation``, see ``which``."""
    return getattr(_module(operation, which(operation, x, *arguments)), operation)


def rvq_encode(x: Tensor, codebooks: Tensor, beam: int = 1) -> Tensor:
    """Search codes (..., num_quantizers), int64, for x (..., dim) in codebooks (num_quantizers, codebook_size, dim).
    ``beam``: how many partial sequences of codes are kept from stage to stage."""
    return _find("rvq_encode", x, x, codebooks, beam)(x, codebooks, beam)


def rvq_decode(codes: Tensor, codebooks: Tensor) -> Tensor:
    """Sum the vectors of codes (..., num_quantizers): float32 (..., dim)."""
    return _find("rvq_decode", codes)(codes, codebooks)


def rvq_statistics(x: Tensor, codes: Tensor, codebooks: Tensor) -> tuple[Tensor, Tensor]:
    """Count how often each stage chose each code for x (rows, dim), codes (rows, num_quantizers), and sum the residuals
    for which it did: float64 (num_quantizers, codebook_size) and (num_quantizers, codebook_size, dim)."""
    return _find("rvq_statistics", x)(x, codes, codebooks)


def affine_encode(x: Tensor, bits: int, group_size: int) -> Affine:
    """Round x (batch, num_kv_heads, seq_len, head_dim) to codes of 2, 4 or 8 bits between the ends of each group."""
    return _find("affine_encode", x, x, bits, group_size)(x, bits, group_size)


def grouped_encode(x: Tensor, like: Grouped) -> Tensor:
    """Find each group's nearest vector in fp32, in the tables of ``like``: uint8 codes (batch, num_kv_heads, rows,
    groups) of components x (batch, num_kv_heads, rows, components)."""
    return _find("grouped_encode", x)(x, like)


def decode(packed: KernelView) -> Tensor:
    """Decode to values (batch, num_kv_heads, seq_len, head_dim), float32."""
    return _find("decode", packed.codes, packed)(packed)


def decode_attention(
    query: Tensor, keys: KernelView, values: KernelView, scaling: float, rope: Rope | None = None
) -> tuple[Tensor, Tensor]:
    """Attend from query (batch, num_heads, new_tokens, head_dim) to packed keys and values, unmasked: float32 output of
    the query's shape and its log-sum-exp (batch, num_heads, new_tokens). See ``attention.naive``."""
    return _find("decode_attention", query, query, keys, values, rope)(query, keys, values, scaling, rope)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., count), integers from 0 to 2^bits - 1, into uint8 (..., ceil(count * bits / 8))."""
    return _find("pack_codes", codes)(codes, bits)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo ``pack_codes``: codes (..., count) in some integer type; for 8 bits, ``packed`` itself."""
    return _find("unpack_codes", packed)(packed, bits, count)


def rans_encode(values: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """Code integers (streams, channels, tokens) of 24 bits: all streams' words, int16, and how many each has, int64."""
    return _find("rans_encode", values)(values, code)


def rans_decode(words: Tensor, lengths: Tensor, code: Code, tokens: int) -> tuple[Tensor, Tensor]:
    """Undo it: int32 (streams, tokens, channels), and whether each stream is one that was written, bool."""
    return _find("rans_decode", words)(words, lengths, code, tokens)


def trellis_encode(x: Tensor, costs: Tensor, table_of: Tensor, shifts: Tensor, weight: float) -> Tensor:
    """Find int32 codes for x (rows, channels), in steps, of least squared error plus ``weight`` times their bits, which
    ``costs`` says. See ``trellis.naive``."""
    return _find("trellis_encode", x)(x, costs, table_of, shifts, weight)


def trellis_decode(codes: Tensor, step: Tensor) -> Tensor:
    """Read codes, int32 (rows, channels), back: float32."""
    return _find("trellis_decode", codes)(codes, step)
