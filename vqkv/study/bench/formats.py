"""Formats in which a cache stores its keys or values, made of random numbers, in the published systems' sizes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vqkv import kernels
from vqkv.cache.meter import tensor_bytes
from vqkv.codecs.groups import ByteGroups
from vqkv.codecs.payload import Payload
from vqkv.kernels.view import Affine, Coded, Grouped, KernelView, Rope
from vqkv.study.bench.case import gaussian

GROUP = 64  # channels that share an affine range, as in transformers' quantized cache
KEYFRAME = 64  # tokens that share a scale, as in the VQ quality framework


def affine(bits: int, shape: tuple[int, ...], device: str, seed: int = 0) -> Affine:
    """Draw random values (batch, num_kv_heads, seq_len, head_dim), packed by groups of 64 channels."""
    return kernels.affine_encode(gaussian(*shape, seed=seed, device=device), bits, min(GROUP, shape[-1]))


def coded(
    tables: int, num_quantizers: int, codebook_size: int, dim: int, shape: tuple[int, ...], device: str, seed: int = 0,
    tokens_per_scale: int = 1, strided: bool = False,
) -> Coded:  # fmt: skip
    """Draw random codes and codebooks, fp16, and a scale for each token or ``tokens_per_scale`` of them."""
    generator, bits = torch.Generator().manual_seed(seed), (codebook_size - 1).bit_length()
    batch, heads, seq_len, head_dim = shape
    groups = head_dim // dim
    codes = torch.randint(codebook_size, (*shape[:3], groups * num_quantizers), generator=generator)
    codebooks = torch.randn(tables, num_quantizers, codebook_size, dim, generator=generator).half()
    scale = torch.rand(batch, heads, -(-seq_len // tokens_per_scale), 1, generator=generator).half() + 0.5
    packed, books = kernels.pack_codes(codes.to(device), bits), codebooks.to(device)
    return Coded(packed, books, bits, groups, scale.to(device), tokens_per_scale, strided)


def grouped(bits: float, shape: tuple[int, ...], device: str, seed: int = 0) -> Grouped:
    """Make random bytes of ``live``: components that vary less and less, and a rotation to channels."""
    heads, head_dim = shape[1], shape[3]
    quantizer = ByteGroups(bits, seed)
    quantizer.build((heads, head_dim))
    quantizer.partial_fit(gaussian(1, heads, 512, head_dim, seed=seed) * torch.logspace(0.5, -1, head_dim))
    codes = torch.randint(256, (*shape[:3], quantizer.codes_per_row), generator=torch.Generator().manual_seed(seed))
    view: Any = quantizer.to(device).kernel_view(Payload({"codes": codes.byte().to(device)}))
    matrix = torch.linalg.qr(gaussian(heads, head_dim, head_dim, seed=seed + 1))[0][:, : view.shape[3]]
    mean = gaussian(heads, head_dim, seed=seed + 2, device=device).half()
    return replace(view, matrix=matrix.to(device), offset=mean)


FORMATS: dict[str, Callable[..., KernelView]] = {
    "int2": partial(affine, 2),
    "int4": partial(affine, 4),
    "int8": partial(affine, 8),
    "grid 16": partial(coded, 1, 1, 16, 2),
    "grid 256": partial(coded, 1, 1, 256, 2),
    "product 256x4": partial(coded, 2, 1, 256, 4, tokens_per_scale=KEYFRAME),
    "residual 3x256 d=8": partial(coded, 1, 3, 256, 8),
    "residual 8x2048 d=32": partial(coded, 1, 8, 2048, 32),
    "live 2.25": partial(grouped, 2.25),
}
BEFORE_ROPE = {"grid": 1, "residual": 1, "live": 16}  # formats whose keys are stored so -> tokens rotated by one angle
STRIDED = "residual 8x2048 d=32"  # whose keys are grouped so


def keys_and_values(name: str, shape: tuple[int, ...], device: str) -> tuple[KernelView, KernelView, Rope | None]:
    """Return both in this format, and the keys' RoPE (Llama 3's frequencies) where they are stored before it."""
    keys = FORMATS[name](shape, device, seed=1, **({"strided": True} if name == STRIDED else {}))
    values, block = FORMATS[name](shape, device, seed=2), BEFORE_ROPE.get(name.split()[0])
    channels = torch.arange(0, shape[-1], 2, device=device) / shape[-1]
    return keys, values, Rope((500000.0**-channels).float(), block=block) if block else None


def bits_per_value(name: str, head_dim: int = 128) -> float:
    """Return bits stored for each value, scales and ranges included, codebooks not."""
    packed = FORMATS[name]((1, 1, KEYFRAME, head_dim), "cpu")
    codebooks: Any = packed.codebooks if isinstance(packed, Coded) else []
    stored = packed.codes.nbytes if isinstance(packed, Grouped) else tensor_bytes(packed) - tensor_bytes(codebooks)
    return 8 * stored / packed.shape.numel()
