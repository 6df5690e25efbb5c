"""GPTQ: weights rounded one input at a time, what each rounding breaks mended by the inputs still to come."""

import torch
from torch import Tensor

from vqkv.errors import DataError

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it


def gptq(weights: Tensor, hessian: Tensor, bits: int = 4, group_size: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Round ``weights`` (in_features, out_features) to codes, scales and zeros, for inputs with X'X = ``hessian``.

    Algorithm 1 of GPTQ (Frantar et al. 2022): inputs are taken in order, and every group of ``group_size`` inputs of an
    output has its own min-max grid (zero + scale * code). Codes are uint8 (in_features, out_features), scales and zeros
    fp16 (groups, out_features). Raises ``DataError`` for weights beyond fp16.
    """
    weights, codes = weights.double().clone(), torch.empty_like(weights, dtype=torch.uint8)
    hessian, diagonal = hessian.double(), hessian.double().diagonal()
    damping = DAMPING * diagonal.mean() if diagonal.any() else 1.0  # inputs that were always zero: no error matters
    damped = hessian + damping * torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    # upper triangular: row i says how inputs after i make up for an error in i
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    scales, zeros = weights.new_empty(2, -(-len(weights) // group_size), weights.shape[1], dtype=torch.float16)
    for number, start in enumerate(range(0, len(weights), group_size)):
        group, rest = slice(start, start + group_size), slice(start + group_size, None)
        low, high = torch.aminmax(weights[group], dim=0)
        zeros[number] = low
        scales[number] = ((high - zeros[number].double()) / (2**bits - 1)).clamp_min(0)
        steps, offset, within = scales[number].double(), zeros[number].double(), factor[group, group]
        errors = torch.empty_like(weights[group])
        for i, row in enumerate(weights[group]):
            code = ((row - offset) / torch.where(steps > 0, steps, 1)).round().clamp(0, 2**bits - 1)
            errors[i] = (row - (offset + steps * code)) / within[i, i]
            weights[group][i + 1 :] -= torch.outer(within[i, i + 1 :], errors[i])
            codes[start + i] = code
        weights[rest] -= factor[group, rest].T @ errors
    if not (scales.isfinite().all() and zeros.isfinite().all()):
        raise DataError("a weight overflows fp16: scale the inputs, or give a larger strength")
    return codes, scales.contiguous(), zeros.contiguous()


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    """Read codes (in_features, out_features) back by scales and zeros (groups, out_features), float32."""
    group = torch.arange(len(codes), device=codes.device) // group_size
    return zeros.float()[group] + scales.float()[group] * codes.float()
