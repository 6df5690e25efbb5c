"""Page 03: product codes and two residual stages (VQ quality framework, section 6)."""

import pandas as pd
import torch

from vqkv.codecs.learning.kmeans import KMeans
from vqkv.models.capture import capture
from vqkv.study.shared import per_process
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product

BLOCK = 8  # values
WHITE, ROLES = "white Gaussian", ("keys", "values")


@experiment(lambda subject, seeds: product(data=[WHITE, *ROLES], subject=subject.each(seed=seeds)))
def product_against_residual(
    subject: Subject, data: str, codebook_sizes: list[int], vectors: int, held_out: int, iterations: int, seq_len: int
) -> list[dict]:
    """Store blocks of 8 values as two codes, of 4 values each or in two stages: held-out MSE at equal bits.

    Of white Gaussian vectors, and of a middle layer's keys and values. A row per data, size, method and seed.
    """
    generator, counts = torch.Generator().manual_seed(subject.seed), {"train": vectors, "test": held_out}
    if data == WHITE:
        parts = [torch.randn(count, BLOCK, generator=generator) for count in counts.values()]
    else:
        blocks = _blocks(subject=subject.changed(seed=0), role=data, counts=counts, seq_len=seq_len)
        shuffled = ((x[torch.randperm(len(x), generator=generator)], n) for x, n in zip(blocks, counts.values()))
        parts = [x[:count] for x, count in shuffled]
    rows, named = [], data if data == WHITE else f"{subject.name} {data}"
    for size in codebook_sizes:
        for method, error in (("product", _product), ("residual", _residual)):
            mse = error(parts[0], parts[1], KMeans(size, iterations, subject.seed)) / parts[1].square().sum().item()
            rows.append({"data": named, "seed": subject.seed, "codebook_size": size, "method": method, "mse": mse})
    return rows


@per_process(maxsize=1)
def _blocks(subject: Subject, role: str, counts: dict[str, int], seq_len: int) -> list[torch.Tensor]:
    """Blocks of the calibration text and of the held-out text, at least so many of each."""
    parts = []
    for split, count in counts.items():
        tokens = subject.text(split, [-(-count // seq_len), seq_len], subject.seed)
        layers = capture(subject.model, tokens, pre_rope=False)[ROLES.index(role)]
        x = layers[len(layers) // 2].float()
        parts.append((x / x.abs().amax(dim=(2, 3), keepdim=True)).reshape(-1, BLOCK))
    return parts


def _left(train: torch.Tensor, test: torch.Tensor, kmeans: KMeans) -> tuple[torch.Tensor, torch.Tensor]:
    """What the nearest codes, learned on the first, leave of both."""
    codebook = kmeans.fit(train)
    return train - codebook[kmeans.assign(train)], test - codebook[kmeans.assign(test)]


def _residual(train, test, kmeans: KMeans) -> float:
    train, test = _left(train, test, kmeans)
    return _left(train, test, kmeans)[1].square().sum().item()


def _product(train, test, kmeans: KMeans) -> float:
    halves = zip(*(x.split(BLOCK // 2, dim=1) for x in (train, test)), strict=True)
    return sum(_left(x.contiguous(), y.contiguous(), kmeans)[1].square().sum().item() for x, y in halves)


def gaps(table: pd.DataFrame) -> pd.DataFrame:
    """Return product codes' error over that of residual stages, by data and size: mean, least and most of seeds."""
    wide = table.pivot_table(index=["data", "codebook_size", "seed"], columns="method", values="mse", sort=False)
    gap = (wide["product"] / wide["residual"]).rename("gap")
    return gap.groupby(level=["data", "codebook_size"], sort=False).agg(["mean", "min", "max"]).reset_index()
