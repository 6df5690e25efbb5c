"""What page 11 makes of its rows: who is better at equal bits, what to use, what is lost first, which proxy sees it."""

import itertools
import math
import re

import numpy as np
import pandas as pd

from vqkv.study.experiments.frontier import CONTEXTS, DRAWS, LEAST, with_plain_steps

CHANCE = 0.95  # of the intervals


def what_to_use(table: pd.DataFrame, budgets: list[float]) -> pd.DataFrame:
    """Of one model's rows, for each budget of bits, all told, and length of a single context: the system whose mean KL
    over seeds is lowest of those that stay within the budget with every seed and have a KL in every row, and that KL.
    Rows: budget; columns: context."""
    groups = table.groupby(["system", "nominal_bits"], sort=False)
    mean = groups["kl_mean"].agg(lambda kl: kl.mean(skipna=False))
    floor = table["kl_floor"].max()
    found = {}
    for name in CONTEXTS:
        bits = groups[f"bits_{name}_x1"].max()
        found[name] = [_within(bits, mean, budget, floor) for budget in budgets]
    return pd.DataFrame(found, index=pd.Index(budgets, name="bits at most"))


def _within(bits: pd.Series, kl: pd.Series, budget: float, floor: float) -> str:
    fits = kl[bits <= budget].dropna()
    if fits.empty:
        return "none"
    system, nominal = fits.idxmin()
    least = f"{fits.min():.2g}" if fits.min() > floor else "at the fp16 floor"
    return f"{system}, {nominal:g} bits: {least}" if nominal else f"{system}: {least}"


def family(system: str) -> str:
    """A system's name without its numbers: what rates of one system share."""
    return re.sub(r" ?[0-9][0-9.x+]*", "", system)


def least_bits(table: pd.DataFrame, tasks: list[str], points: list[float], bits: str) -> pd.DataFrame:
    """For each model, task, family of systems and number of accuracy points: the least ``bits`` (a column, mean over
    seeds) of which no more points are lost, on average over seeds, nor by any of the family's rows with more bits; NaN
    where even the most lose more. ``fewest``: whether that is the least that was tried."""
    table = table.assign(family=table["system"].map(family))
    rows = []
    for (model, name), mine in table.groupby(["model", "family"], sort=False):
        mean = mine.groupby(["system", "nominal_bits"]).mean(numeric_only=True).sort_values(bits)
        for task, most in itertools.product(tasks, points):
            kept = 100 * (mean[f"{task}_exact"] - mean[task]) <= most
            kept = kept[::-1].cummin()[::-1]
            least = mean.loc[kept, bits].min() if kept.any() else math.nan
            about = {"model": model, "task": task, "family": name, "points": most}
            rows.append(about | {"bits": least, "fewest": bool(kept.all()), "tried": len(mean)})
    return pd.DataFrame(rows)


def at_equal_bits(table: pd.DataFrame, systems: list[str], designs: list[str], bits: str) -> pd.DataFrame:
    """Each of ``systems`` against the best of ``designs`` at its own ``bits`` (a column): a row per model and system.

    A design's KL between two of its rates is interpolated, log KL against bits; above its most it is the KL of the
    most. ``ratio`` of mean KLs over all windows of all seeds, ours over theirs, with the ends of its 95% interval over
    ``DRAWS`` bootstrap draws of windows, the same for both (Efron & Tibshirani 1993); ``better``: whose KL is less if
    the interval leaves out 1, else "neither". NaN and "no rate" where no design has so few bits.
    """
    rows = []
    for (model, system, nominal), theirs in table[table["system"].isin(systems)].groupby(
        ["model", "system", "nominal_bits"], sort=False
    ):
        at = theirs[bits].mean()
        found = {name: _interpolated(table[(table["model"] == model) & (table["system"] == name)], bits, at)
                 for name in designs}  # fmt: skip
        found = {name: kl for name, kl in found.items() if kl is not None}
        label = {"model": model, "system": system, "nominal_bits": nominal, "bits": at}
        if not found:
            rows.append(label | {"kl": theirs["kl_mean"].mean(), "better": "no rate"})
            continue
        best = min(found, key=lambda name: found[name].mean())
        rows.append(label | {"design": best} | _compared(_windows(theirs), found[best]))
    return pd.DataFrame(rows)


def _windows(rows: pd.DataFrame) -> np.ndarray:
    """KL of each window of one system at one rate, seed after seed."""
    return np.array([float(x) for each in rows.sort_values("seed")["kl_each"] for x in each.split()])


def _interpolated(rows: pd.DataFrame, bits: str, at: float) -> np.ndarray | None:
    """KL of each window of one design at so many bits; None if it has no rate of so few."""
    rates = sorted((mine[bits].mean(), _windows(mine)) for _, mine in rows.groupby("nominal_bits"))
    if not rates or at < rates[0][0]:
        return None
    known, kl = [bits for bits, _ in rates], np.log(np.array([kl for _, kl in rates]).clip(LEAST))
    return np.exp([np.interp(at, known, each) for each in kl.T])


def _compared(theirs: np.ndarray, ours: np.ndarray) -> dict:
    draws = np.random.default_rng(0).integers(len(ours), size=(DRAWS, len(ours)))
    ratios = ours[draws].mean(1) / theirs[draws].mean(1)
    low, high = np.nanquantile(ratios, [(1 - CHANCE) / 2, (1 + CHANCE) / 2])
    better = "ours" if high < 1 else "theirs" if low > 1 else "neither"
    found = {"kl": theirs.mean(), "our_kl": ours.mean(), "ratio": ours.mean() / theirs.mean()}
    return found | {"low": low, "high": high, "better": better}


def at_equal_kl(table: pd.DataFrame, systems: list[str], designs: list[str], bits: str) -> pd.DataFrame:
    """As ``at_equal_bits`` the other way round: the least ``bits`` that one of ``designs`` takes for each system's mean
    KL, log KL interpolated, over its own (``share``), and the design. A design whose KL is lower at its fewest bits
    takes these."""
    rows = []
    mean = table.groupby(["model", "system", "nominal_bits"], sort=False)[[bits, "kl_mean"]].mean().reset_index()
    for theirs in mean[mean["system"].isin(systems)].itertuples():
        kl, their_bits = theirs.kl_mean, getattr(theirs, bits)
        found = {}
        for name in designs:
            mine = mean[(mean["model"] == theirs.model) & (mean["system"] == name)].sort_values("kl_mean")
            if len(mine) and kl >= mine["kl_mean"].iloc[0]:
                found[name] = np.interp(math.log(kl), np.log(mine["kl_mean"]), mine[bits])
        label = {"model": theirs.model, "system": theirs.system, "nominal_bits": theirs.nominal_bits, "kl": kl}
        label |= {"bits": their_bits, "our_bits": math.nan, "share": math.nan, "design": "none so low"}
        if found:
            best = min(found, key=found.get)
            label |= {"our_bits": found[best], "share": found[best] / their_bits, "design": best}
        rows.append(label)
    return pd.DataFrame(rows)


def beside(table: pd.DataFrame, designs: list[str], contexts: list[str]) -> pd.DataFrame:
    """``at_equal_bits`` of every system that is not ours, and the ``share`` of ``at_equal_kl``, for each of
    ``contexts``, columns of bits; the index has system, column and model."""
    ours = with_plain_steps(designs)
    others = [name for name in dict.fromkeys(table["system"]) if name not in ours]
    found = []
    for bits in contexts:
        rows = at_equal_bits(table, others, designs, bits)
        shares = at_equal_kl(table, others, designs, bits)[["model", "system", "share"]]
        found.append(rows.merge(shares, on=["model", "system"]).assign(context=bits))
    return pd.concat(found).set_index(["system", "context", "model"])


def proxy_correlations(
    table: pd.DataFrame, proxies: list[str], tasks: list[str], bands: dict[str, list[float]]
) -> pd.DataFrame:
    """Spearman's rank correlation of each proxy with what each task's score loses against its ``_exact``, over systems
    (means over seeds) whose stored bits lie within each of ``bands``, name -> [least, most]: a row per band, model,
    task and proxy, with the ends of a 95% interval over ``DRAWS`` bootstrap draws of systems. The sign is turned so
    that 1 means: what the proxy calls better is better. NaN where no system changes the score."""
    table = table.assign(unexplained=1 - table["evr"])
    mean = table.groupby(["model", "system", "nominal_bits"], sort=False).mean(numeric_only=True).reset_index()
    found = []
    for (band, (least, most)), (model, mine), task in itertools.product(
        bands.items(), mean.groupby("model", sort=False), tasks
    ):
        mine = mine[mine["bits_per_value"].between(least, most)]
        lost = (mine[f"{task}_exact"] - mine[task]).round(9)
        for proxy in proxies:
            sign = -1 if proxy == "top1" else 1
            about = {"bits": band, "model": model, "task": task, "proxy": proxy, "systems": len(mine)}
            found.append(about | _correlated(sign * mine[proxy], lost))
    return pd.DataFrame(found)


def _correlated(proxy: pd.Series, lost: pd.Series) -> dict[str, float]:
    known = proxy.notna() & lost.notna()
    pairs, rng = np.stack([proxy[known], lost[known]]), np.random.default_rng(0)
    drawn = [_spearman(*pairs[:, rng.integers(pairs.shape[1], size=pairs.shape[1])]) for _ in range(DRAWS // 2)]
    low, high = np.nanquantile(drawn, [(1 - CHANCE) / 2, (1 + CHANCE) / 2]) if known.any() else (math.nan, math.nan)
    return {"correlation": _spearman(*pairs), "low": low, "high": high}


def _spearman(x: np.ndarray, y: np.ndarray) -> float:
    ranks = [pd.Series(each).rank() for each in (x, y)]
    return ranks[0].corr(ranks[1]) if all(each.nunique() > 1 for each in ranks) else math.nan
