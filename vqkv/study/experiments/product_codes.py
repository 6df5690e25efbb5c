"""Page 03: product codes and two residual stages (VQ quality framework, section 6)."""

import pandas as pd
import torch

from vqkv.codecs.learning.kmeans import KMeans
from vqkv.models.capture import capture
from vqkv.study.experiments.common import frame, subject
from vqkv.study.sweep import per_process, sweep

BLOCK = 8  # values
WHITE, ROLES = "white Gaussian", ("keys", "values")


def product_against_residual(
    models: list[str], corpus: str, codebook_sizes: list[int], vectors: int, held_out: int, iterations: int,
    seeds: list[int], seq_len: int, dtype: str, device: str,
):  # fmt: skip
    """Blocks of 8 values as two codes each, of 4 values or one after the other: held-out relative MSE at equal bits.

    One row per data, number of codes, method and seed, which draws the vectors and starts k-means. Data are white
    Gaussian vectors, and keys (after RoPE) and values of each model's middle layer over their head's maximum.
    """
    settings = {
        "who": {"corpus": corpus, "seq_len": seq_len, "dtype": dtype, "device": device},
        "counts": [vectors, held_out],
        "codebook_sizes": codebook_sizes,
        "iterations": iterations,
    }
    data = [["", WHITE]] + [[name, role] for name in models for role in ROLES]
    cases = [{"model": model, "role": role, "seed": seed} for model, role in data for seed in seeds]
    return frame(*sweep(_rows, cases, settings, "product codes"))


def _rows(model: str, role: str, seed: int, who: dict, counts: list[int], codebook_sizes: list[int], iterations: int):
    draw, sources = torch.Generator().manual_seed(seed), {}
    if role == WHITE:
        parts = [torch.randn(count, BLOCK, generator=draw) for count in counts]
    else:
        blocks, sources = _blocks(model=model, role=role, counts=counts, **who)
        parts = [x[torch.randperm(len(x), generator=draw)[:count]] for x, count in zip(blocks, counts, strict=True)]
    label, rows = {"data": f"{model} {role}".strip(), "seed": seed}, []
    for size in codebook_sizes:
        for method, error in (("product", _product), ("residual", _residual)):
            mse = error(*parts, KMeans(size, iterations, seed)) / parts[1].square().sum().item()
            rows.append(label | {"codebook_size": size, "method": method, "mse": mse})
    return rows, sources


@per_process(maxsize=1)
def _blocks(model: str, role: str, counts: list[int], seq_len: int, **who):
    """Blocks of the calibration text and of the held-out text, enough of each."""
    sizes = {split: [-(-count // seq_len), seq_len] for split, count in zip(("train", "test"), counts)}
    found = subject(name=model, seed=0, **sizes, **who)
    parts = []
    for tokens in (found.train, found.test):
        layers = capture(found.model, tokens, pre_rope=False)[ROLES.index(role)]
        x = layers[len(layers) // 2].float()
        parts.append((x / x.abs().amax(dim=(2, 3), keepdim=True)).reshape(-1, BLOCK))
    return parts, found.sources


def _left(train: torch.Tensor, test: torch.Tensor, kmeans: KMeans) -> list[torch.Tensor]:
    """What the nearest codes, learned on the first, leave of both."""
    codebook = kmeans.fit(train)
    return [x - codebook[kmeans.assign(x)] for x in (train, test)]


def _residual(train, test, kmeans: KMeans) -> float:
    return _left(*_left(train, test, kmeans), kmeans)[1].square().sum().item()


def _product(train, test, kmeans: KMeans) -> float:
    halves = zip(*(x.split(BLOCK // 2, dim=1) for x in (train, test)), strict=True)
    return sum(_left(*(x.contiguous() for x in pair), kmeans)[1].square().sum().item() for pair in halves)


def gaps(table: pd.DataFrame) -> pd.DataFrame:
    """Product codes' error over that of residual stages, by data and number of codes: mean, least and most of the
    seeds."""
    wide = table.pivot_table(index=["data", "codebook_size", "seed"], columns="method", values="mse", sort=False)
    gap = (wide["product"] / wide["residual"]).rename("gap")
    return gap.groupby(level=["data", "codebook_size"], sort=False).agg(["mean", "min", "max"]).reset_index()
