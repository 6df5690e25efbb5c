"""Cases of attention to a cache: over packed keys and values, over what they decode to, and over fp16."""

from collections.abc import Iterator
from functools import partial
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv import kernels
from vqkv.kernels import naive as reference
from vqkv.kernels.view import KernelView, Rope
from vqkv.study.bench import roofline
from vqkv.study.bench.case import BenchCase, Contender, Sizes, gaussian
from vqkv.study.bench.formats import FORMATS, keys_and_values

OPERATION = "decode_attention"
SDPA = "torch SDPA"
DECODED = "decode, then SDPA"
ATTENDED = [name for name in FORMATS if name != "grid 16"]


def attention(sizes: Sizes) -> Iterator[BenchCase]:
    """One new token of each sequence against its cache, all formats of a batch and context in turn."""
    for batch, context in sizes.runs:
        shape = (batch, sizes.kv_heads, context, sizes.head_dim)
        query = gaussian(batch, sizes.heads, 1, sizes.head_dim, seed=sizes.seed, device=sizes.device).half()
        where = f"batch={batch} context={context} heads={sizes.heads}/{sizes.kv_heads} head_dim={sizes.head_dim}"
        cases = [*_exact(query, shape, where), *(_packed(name, query, shape, where) for name in ATTENDED)]
        yield together(cases)


def together(cases: list[BenchCase]) -> BenchCase:
    """A case whose entries are those of all, so that they take turns."""
    entries: list[Contender] = [entry for case in cases for entry in case.entries]
    return BenchCase(OPERATION, "", cases[0].shape, cases[0].work, entries=entries)


def _exact(query: Tensor, shape: tuple, where: str) -> Iterator[BenchCase]:
    keys, values = (gaussian(*shape, seed=seed, device=str(query.device)) for seed in (1, 2))
    expected = sdpa(query.float(), keys, values)
    for name, dtype in (("fp16", torch.float16), ("fp32", torch.float32)):
        q, k, v = (x.to(dtype) for x in (query, keys, values))
        case = BenchCase(OPERATION, name, where, roofline.attention(q, k, v), str(dtype)[6:])
        case.add(SDPA, partial(sdpa, q, k, v), expected)
        yield case


def _packed(name: str, query: Tensor, shape: tuple, where: str) -> BenchCase:
    keys, values, rope = keys_and_values(name, shape, str(query.device))
    case = BenchCase(
        OPERATION, name, where, roofline.attention(query, keys, values, rope is not None and rope.block == 1), "float16"
    )
    scaling = query.shape[-1] ** -0.5
    expected, _ = reference.decode_attention(query, keys, values, scaling, rope)
    run = partial(kernels.decode_attention, query, keys, values, scaling, rope)
    name = f"vqkv ({kernels.which(OPERATION, query, query, keys, values, rope)})"
    case.add(name, run, expected, itemgetter(0))
    case.add(DECODED, partial(decoded, query, keys, values, rope), expected)
    return case


def sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """torch's attention of query (batch, heads, 1, head_dim) to all keys. Query heads that share a KV head go in as its
    queries, which on a CPU is faster than ``enable_gqa``."""
    batch, heads, _, head_dim = query.shape
    grouped = query.view(batch, keys.shape[1], -1, head_dim)
    return F.scaled_dot_product_attention(grouped, keys, values).reshape(batch, heads, 1, head_dim)


def decoded(query: Tensor, keys: KernelView, values: KernelView, rope: Rope | None) -> Tensor:
    """Read a cache without such a kernel: decode to the model's dtype, then attend."""
    k, v = kernels.decode(keys), kernels.decode(values)
    k = k if rope is None else rope.turned(k)
    return sdpa(query, k.to(query.dtype), v.to(query.dtype))


OPERATIONS = {OPERATION: attention}
