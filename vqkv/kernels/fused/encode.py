"""Greedy residual VQ on CPU threads: matrix products by torch, everything else in machine code."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vqkv.kernels import reference
from vqkv.kernels.fused.jit import spread
from vqkv.kernels.fused.rvq import LANES, begin, step
from vqkv.kernels.fused.search import search

EXACT = (torch.float32, torch.float16, torch.bfloat16)  # what fp32 holds without rounding
SCORES = 1 << 18  # at a time, 1 MB: with the codebook they stay in the L2 cache
SHARE = 4  # times that for each of several threads, as starting them takes time
PASSES = 4  # over the scores, as additions
SHORT, FEW = 8, 1 << 11  # vectors and codebooks (values) for which the products are not worth a pass over memory


@dataclass
class Machine:
    """A codebook's tables as numpy arrays; the same memory as in ``cpu.Tables`` where possible."""

    products: list[Tensor]  # per stage (dim, width): -2 codebook^T
    weights: np.ndarray  # (K, dim + 1, width): these above the squared norms, infinite beyond the last code
    codebooks: np.ndarray  # (K, C, dim) fp32
    largest: np.ndarray  # (K,) float64
    offsets: np.ndarray  # int32, as in ``cpu.Tables``


@dataclass
class Work:
    """What is encoded, and all that the kernels need to go on with it."""

    x: Tensor  # (rows, dim), in any type
    codebooks: Tensor
    machine: Machine
    values: Tensor  # x in fp32
    codes: Tensor  # (rows, K) int64; -1 where undecided
    exact: bool


def machine(weights: Tensor, flat: Tensor, largest: list[float], offsets: Tensor) -> Machine:
    """From the fields of ``cpu.Tables``."""
    missing = -weights.shape[-1] % LANES
    if missing:
        weights = F.pad(weights, (0, missing))
        weights[:, -1, -missing:] = torch.inf
    return Machine(
        products=[stage[:-1] for stage in weights],
        weights=weights.numpy(),
        codebooks=flat.view(len(weights), -1, flat.shape[-1]).numpy(),
        largest=np.array(largest, dtype=np.float64),
        offsets=offsets.numpy(),
    )


def encode(x: Tensor, codebooks: Tensor, tables: Machine) -> Tensor:
    """Codes (rows, K), int64, of x (rows, dim): those of ``reference.rvq_encode``."""
    codes = torch.full((len(x), len(codebooks)), -1, dtype=torch.int64)
    exact = x.dtype in EXACT and codebooks.dtype in EXACT
    work = Work(x, codebooks, tables, x.to(torch.float32).contiguous(), codes, exact)
    _, size, dim = tables.codebooks.shape
    if dim <= SHORT and size * dim <= FEW:
        _search(work)
        return codes
    width, threads = tables.weights.shape[-1], torch.get_num_threads()
    chunk = max(LANES, SCORES // width) * (1 if threads == 1 else SHARE * threads)
    scores = torch.empty(min(chunk, len(x)), width, dtype=torch.float32)
    for start in range(0, len(x), chunk):
        part = slice(start, start + chunk)
        _stages(Work(x[part], codebooks, tables, work.values[part], codes[part], exact), scores)
    return codes


def exact_residual(x: Tensor, codebooks: Tensor, codes: Tensor) -> Tensor:
    """The residual after the stages in ``codes`` (rows, k), in float64, as the reference computes it."""
    residual = x.double()
    for k in range(codes.shape[-1]):
        residual = residual - codebooks[k, codes[:, k]].double()
    return residual


def _search(work: Work) -> None:
    """Without matrix products; again after each stage that only the reference can decide."""
    tables, values, codes = work.machine, work.values.numpy(), work.codes.numpy()
    rows = np.arange(len(values))
    while len(rows):
        rows = _left(
            lambda part, left: search(
                part, values, tables.weights, tables.codebooks, tables.largest, work.exact, codes, left
            ),
            rows,
            tables.codebooks.size,
        )
        stages = (codes[rows] >= 0).sum(axis=1)
        for stage in np.unique(stages):
            _decide(work, rows[stages == stage], int(stage))


def _stages(work: Work, scores: Tensor) -> None:
    """As many rows as ``scores`` has, stage by stage."""
    tables, residual, scores = work.machine, work.values.clone(), scores[: len(work.x)]
    bounds, everything = np.empty((len(work.x), 2)), np.arange(len(work.x))
    x, codes, left_over, found = (tensor.numpy() for tensor in (work.values, work.codes, residual, scores))
    begin(x, bounds)
    fixed = (x, found, tables.weights, tables.codebooks, tables.largest, work.exact, codes, left_over, bounds)
    for k, product in enumerate(tables.products):
        torch.mm(residual, product, out=scores)
        rows = _left(lambda part, left, k=k: step(part, k, *fixed, left), everything, PASSES * scores.shape[-1])
        if len(rows):
            _decide(work, rows, k)
            step(rows, k, *fixed, np.empty_like(rows))


def _decide(work: Work, rows: np.ndarray, stage: int) -> None:
    """Codes of a stage by the reference."""
    if not len(rows):
        return
    rows = torch.from_numpy(rows)
    residual = exact_residual(work.x[rows], work.codebooks, work.codes[rows, :stage])
    work.codes[rows, stage] = reference.nearest(residual, work.codebooks[stage].double())


def _left(run, rows: np.ndarray, cost: int) -> np.ndarray:
    """The rows that ``run(part of rows, left)`` leaves undecided in all parts."""
    left = np.empty_like(rows)
    found = spread(lambda i, j: left[i : i + run(rows[i:j], left[i:j])], len(rows), cost)
    return found[0] if len(found) == 1 else np.concatenate(found)
