"""GPTQ: weights rounded one input at a time, what each rounding breaks mended by the inputs still to come."""

import torch
from torch import Tensor

from vqkv.errors import DataError


def gptq(
    weights: Tensor, hessian: Tensor, bits: int = 4, group_size: int = 128, damping: float = 0.01
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of ``weights`` (in_features, out_features) for inputs with X'X = ``hessian``.

    Algorithm 1 of GPTQ (Frantar et al. 2022): ``damping`` times the mean of the diagonal is added to the Hessian,
    inputs are taken in order, and every group of ``group_size`` inputs of an output has a min-max grid (zero + scale *
    code) of its own. Codes are uint8 (in_features, out_features), scales and zeros fp16 (groups, out_features). Raises
    ``DataError`` for weights beyond fp16.
    """
    weights, factor = weights.double().clone(), _inverse_factor(hessian.double(), damping)
    codes, scales, zeros = torch.empty_like(weights, dtype=torch.uint8), [], []
    for start in range(0, len(weights), group_size):
        group, rest = slice(start, start + group_size), slice(start + group_size, None)
        scale, zero = min_max_grid(weights[group], bits)
        codes[group], errors = _quantize_group(weights[group], factor[group, group], scale, zero, bits)
        weights[rest] -= factor[group, rest].T @ errors
        scales.append(scale)
        zeros.append(zero)
    none = weights.new_empty(0, weights.shape[1], dtype=torch.float16)
    return codes, torch.stack(scales) if scales else none, torch.stack(zeros) if zeros else none.clone()


def min_max_grid(weights: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """fp16 scale and zero (out_features,) of 2^bits levels. Raises ``DataError`` for weights beyond fp16."""
    low, high = torch.aminmax(weights, dim=0)
    zero = low.half()
    scale = ((high - zero.double()) / (2**bits - 1)).clamp_min(0).half()
    if not (torch.isfinite(scale).all() and torch.isfinite(zero).all()):
        largest = float(weights.abs().max())
        raise DataError(f"a weight of {largest:g} overflows fp16: scale the inputs, or give a larger strength")
    return scale, zero


def nearest_codes(weights: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Round ``weights`` (..., out_features) to codes, as floats, of a grid (out_features,); 0 where the scale is 0."""
    steps = (weights - zero) / torch.where(scale > 0, scale, 1).to(weights.dtype)
    return steps.round().clamp(0, 2**bits - 1)


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    """Codes (in_features, out_features), scales and zeros (groups, out_features) -> float32 weights."""
    group = torch.arange(len(codes), device=codes.device) // group_size
    return zeros.float()[group] + scales.float()[group] * codes.float()


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Upper triangular U with U'U = (H + damping)^-1: row i says how inputs after i make up for an error in i."""
    diagonal = hessian.diagonal()
    added = damping * diagonal.mean() if diagonal.any() else 1.0  # inputs that were always zero: no error matters
    identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian + added * identity)), upper=True)


def _quantize_group(weights: Tensor, factor: Tensor, scale: Tensor, zero: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes of a group's weights, changed in place, and errors over the factor's diagonal for later groups."""
    codes, errors = torch.empty_like(weights), torch.empty_like(weights)
    scale, zero = scale.double(), zero.double()
    for i, row in enumerate(weights):
        codes[i] = nearest_codes(row, scale, zero, bits)
        errors[i] = (row - (zero + scale * codes[i])) / factor[i, i]
        weights[i + 1 :] -= torch.outer(factor[i, i + 1 :], errors[i])
    return codes.to(torch.uint8), errors
