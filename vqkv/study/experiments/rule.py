"""Page 11's rule: chosen on validation text for so many tokens, seen on test."""

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM

from vqkv.evaluation.footprint import Shape, model_shape
from vqkv.models.load import config_of
from vqkv.presets.crosses import best_for
from vqkv.study.experiments.comparisons import CHANCE, DRAWS, at_equal_bits, family, windows
from vqkv.study.experiments.designs import BEST, KVTC, RANKS
from vqkv.study.experiments.frontier import CONTEXTS

OURS, THEIRS = "best", "kvtc"
PREDICTED = [f"uniform, fisher_pca, predicted in {bits} bits, mixed" for bits in (8, 4)]
SEARCHED = ["uniform, fisher_pca, mixed, by head", "uniform, fisher_pca, predicted, mixed"]
SEARCHED += [*PREDICTED, *(f"{name}, by head" for name in PREDICTED)]
SEARCHED += [f"uniform, fisher_pca, joint, rank {rank}" for rank in RANKS]
GRID = 200  # losses at which two curves are compared
ENDS = ("lowest", "highest")


def searched_systems(bits: list[float], kvtc_bits: list[float]) -> dict[str, list]:
    """Return arguments of ``frontier`` for validation text: ``SEARCHED`` designs and KVTC's variants, by bits."""
    theirs = [f"kvtc {each:g}{variant}" for each in kvtc_bits for variant in KVTC]
    return {"systems": theirs, "designs": SEARCHED, "bits": bits}


def chosen(searched: pd.DataFrame, context: str) -> pd.DataFrame:
    """Keep the rows of each family on the lower convex hull of log KL against bits at ``context``."""
    families = np.where(searched["system"].str.startswith(THEIRS), THEIRS, OURS)
    rows = searched.assign(context=context, bits=searched[f"bits_{context}_x1"], family=families)
    rows = rows.sort_values(["family", "bits"], ignore_index=True)
    kept = [index for _, mine in rows.groupby("family") for index in _hull(mine["bits"], np.log(mine["kl_mean"]))]
    return rows.loc[kept].reset_index(drop=True)


def _hull(x: pd.Series, y: pd.Series) -> list:
    """Return the index of the points of the lower convex hull, x ascending, that go down (Andrew 1979)."""
    hull: list = []
    for index in x.index:
        while len(hull) > 1:
            (a, b), (c, d) = ((x[i] - x[hull[-2]], y[i] - y[hull[-2]]) for i in (hull[-1], index))
            if a * d > b * c:
                break
            hull.pop()
        if not hull or y[index] < y[hull[-1]]:
            hull.append(index)
    return hull


def cache_shape(model: str) -> Shape:
    """Return layers, KV heads and their width of a model by name, as if no layer had a sliding window."""
    config = config_of(model)  # not below: of a GGUF file it comes with the weights
    with torch.device("meta"):
        return model_shape(AutoModelForCausalLM.from_config(config.get_text_config()))


def pays_from(searched: pd.DataFrame, light: str, heavy: str, values: int) -> pd.Series:
    """Return tokens from which on the design ``heavy`` takes no more bits than ``light``, whose side information is
    smaller, at each rate of ``light`` whose KL ``heavy`` reaches too (log KL interpolated). ``values``: of a token."""
    mine, other = (searched[searched["system"] == name].sort_values("kl_mean") for name in (light, heavy))
    mine = mine[mine["kl_mean"].between(other["kl_mean"].min(), other["kl_mean"].max())].set_index("nominal_bits")
    at, log_kl = (rows["kl_mean"].apply(np.log).to_numpy() for rows in (mine, other))
    bits, side = (np.interp(at, log_kl, other[column].to_numpy()) for column in ("bits_per_value", "side_bytes"))
    return 8 * (side - mine["side_bytes"]) / values / (mine["bits_per_value"] - bits)


def by_rule(table: pd.DataFrame, contexts: list[str], kv_width: int) -> pd.DataFrame:
    """Return ``frontier``'s rows with the ``family`` of each. Of ``presets.best``'s designs only the one that it takes
    at a context has bits there. Of KVTC's variants and rates those on the lower convex hull of these very rows have
    (means over models and seeds): it may be picked on the text on which both are judged."""
    theirs = table["system"].str.startswith(THEIRS)
    ours = table["system"].isin(BEST)
    table = table.assign(family=table["system"].map(family).mask(theirs, THEIRS).mask(ours, OURS))
    for name in contexts:
        column = f"bits_{name}_x1"
        means = table[theirs].groupby("system")[[column, "kl_mean"]].mean().dropna().sort_values(column)
        hull = table["system"].isin(_hull(means[column], np.log(means["kl_mean"])))
        taken = table["system"] == best_for(CONTEXTS[name], kv_width)
        table[column] = table[column].where(~ours & ~theirs | ours & taken | theirs & hull)
    return table


def share_of_bits(seen: pd.DataFrame, context: str, least: float = 0.0, most: float = np.inf) -> dict[str, float]:
    """Divide ``OURS``' bits at a context by those of KVTC at the same KL (log KL interpolated), the ``lowest`` and
    the ``highest`` share where KVTC takes ``least`` to ``most`` bits and both reach the KL; each with the ends of its
    95% interval, the same windows for both drawn again. NaN where there is no such KL. ``seen``: of ``by_rule``."""
    column = f"bits_{context}_x1"
    shown = [seen[(seen["family"] == name) & seen[column].notna()] for name in (OURS, THEIRS)]
    if any(rows.empty for rows in shown):
        return {f"{name}{end}": np.nan for name in ENDS for end in ("", "_low", "_high")}
    rates = [[*rows.groupby(["system", "nominal_bits"])] for rows in shown]
    bits = [np.array([mine[column].mean() for _, mine in each]) for each in rates]
    losses = [np.stack([windows(mine).to_numpy() for _, mine in each]) for each in rates]  # (rates, windows)
    count = losses[0].shape[1]
    drawn = np.random.default_rng(0).integers(count, size=(DRAWS, count))
    ends = np.array([_ends(bits, [kl[:, each] for kl in losses], least, most) for each in [np.arange(count), *drawn]])
    shares: dict[str, float] = {}
    for name, values in zip(ENDS, ends.T, strict=True):
        finite = values[1:][~np.isnan(values[1:])]
        low, high = np.quantile(finite, [(1 - CHANCE) / 2, (1 + CHANCE) / 2]) if len(finite) else (np.nan, np.nan)
        shares |= {name: values[0], f"{name}_low": low, f"{name}_high": high}
    return shares


def _ends(bits: list[np.ndarray], losses: list[np.ndarray], least: float, most: float) -> tuple[float, float]:
    """Return the lowest and the highest share of bits, ours over theirs, at KLs that both reach."""
    logs = [np.log(each.mean(1)) for each in losses]
    first, last = max(kl.min() for kl in logs), min(kl.max() for kl in logs)
    if first >= last:
        return np.nan, np.nan
    at = np.linspace(first, last, GRID)
    ours, theirs = (np.interp(at, kl[order := kl.argsort()], each[order]) for each, kl in zip(bits, logs, strict=True))
    shares = (ours / theirs)[(theirs >= least) & (theirs <= most)]
    return (shares.min(), shares.max()) if len(shares) else (np.nan, np.nan)


def against_best(seen: pd.DataFrame, contexts: list[str]) -> pd.DataFrame:
    """Return ``at_equal_bits`` of all systems at each of ``contexts``, ours by the rule. ``seen``: of ``by_rule``."""
    comparisons = []
    for name in contexts:
        rows = seen.dropna(subset=[f"bits_{name}_x1"])
        rows = rows.assign(system=rows["system"].mask(rows["family"] == OURS, OURS))
        others = [system for system in dict.fromkeys(rows["system"]) if system != OURS]
        comparisons.append(at_equal_bits(rows, others, [OURS], f"bits_{name}_x1").assign(context=name))
    return pd.concat(comparisons).set_index(["context", "system"])
