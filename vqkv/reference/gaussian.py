"""Write codebooks that are optimal for a standard Gaussian: ``python -m vqkv.reference.gaussian``.

Grids by Lloyd's algorithm on a fine lattice of points that carry the Gaussian's mass: no sampling error, the same every
time. What has more dimensions is learned from samples.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from vqkv.codecs.grid import SignedGrid
from vqkv.codecs.groups import CODES, SAMPLES, SIZES
from vqkv.codecs.learning.kmeans import KMeans
from vqkv.kernels import rvq_decode, rvq_encode

GRIDS = Path(__file__).resolve().parent.parent / "codecs/gaussian_grids.json"
DIM = 2
REACH, SPACING = 5.6, 0.04  # the mass outside, 4e-8, is not missed
TOLERANCE = 1e-7  # relative fall of the error at which Lloyd's iteration stops
RESTARTS = {16: 24, 64: 8, 256: 3}  # by points of the grid


def lattice() -> tuple[Tensor, Tensor]:
    """Return points (n, 2) of the plane, fp32, and the Gaussian mass of each, float64, which sum to 1."""
    axis = torch.arange(-REACH, REACH + SPACING / 2, SPACING, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    mass = (-points.square().sum(-1) / 2).exp()
    return points.float(), mass / mass.sum()


def lloyd(size: int, seed: int, points: Tensor, mass: Tensor) -> tuple[Tensor, float]:
    """Find a locally optimal grid (size, 2) from a random start, and its mean squared error per dimension."""
    # the best grids' points lie as densely as the square root of the mass: a Gaussian of twice the variance
    grid = torch.randn(size, DIM, generator=torch.Generator().manual_seed(seed)) * 2**0.5
    before = float("inf")
    while True:
        codes = rvq_encode(points, grid.unsqueeze(0))[:, 0]
        error = ((points - grid[codes]).double().square().sum(-1) * mass).sum().item() / DIM
        if before - error < TOLERANCE * error:
            return grid, error
        before = error
        weights = torch.zeros(size, dtype=torch.float64).index_add_(0, codes, mass)
        sums = torch.zeros(size, DIM, dtype=torch.float64).index_add_(0, codes, points.double() * mass[:, None])
        grid = torch.where(weights[:, None] > 0, sums / weights[:, None].clamp_min(1e-300), grid.double()).float()


def best_grid(size: int) -> dict:
    """Find the best grid of several starts, sorted by radius for a stable file, with its error."""
    grid, error = min((lloyd(size, seed, *lattice()) for seed in range(RESTARTS[size])), key=lambda fitted: fitted[1])
    order = sorted(grid.tolist(), key=lambda p: (round((p[0] ** 2 + p[1] ** 2) ** 0.5, 3), p))
    return {"mse": error, "points": [[round(value, 6) for value in point] for point in order]}


def levels(bits: int) -> Tensor:
    """Find the 2^bits levels of least error: means of the Gaussian between the midpoints, in turns until they stay."""
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    shares = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
    levels, before = normal.icdf(shares), torch.full_like(shares, torch.inf)
    while (levels - before).abs().max() > 1e-9:
        inner = (levels[1:] + levels[:-1]) / 2
        density = torch.nn.functional.pad(normal.log_prob(inner).exp(), (1, 1))
        mass = torch.cat([inner.new_zeros(1), normal.cdf(inner), inner.new_ones(1)]).diff()
        before, levels = levels, -density.diff() / mass
    return levels


def magnitudes() -> Tensor:
    """Learn the magnitudes of 8 values (256, 8), of ``SignedGrid``, fp16."""
    drawn = torch.randn(SAMPLES, SignedGrid.block_values, generator=torch.Generator().manual_seed(0)).abs()
    return KMeans(256, iterations=20).fit(drawn).half()


def byte_error(size: int) -> float:
    """Measure the mean squared error of groups of ``size`` values, each one of 256 vectors (``ByteGroups``)."""
    learned, fresh = torch.randn(2, SAMPLES, size, generator=torch.Generator().manual_seed(size))
    codebook = KMeans(CODES, iterations=20).fit(learned).unsqueeze(0)
    return (rvq_decode(rvq_encode(fresh, codebook), codebook) - fresh).square().mean().item()


if __name__ == "__main__":
    grids = {f"{size}x{DIM}": best_grid(size) for size in RESTARTS}
    errors = {size: byte_error(size) for size in SIZES}
    tables = {"grids": grids, "byte_errors": errors, "magnitudes": magnitudes().tolist()}
    tables["levels"] = {bits: levels(bits).tolist() for bits in range(1, 9)}
    GRIDS.write_text(json.dumps(tables).replace("], [", "],\n[") + "\n")
