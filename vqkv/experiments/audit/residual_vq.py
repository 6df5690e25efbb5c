"""What the residual VQ paper says (Kumar, "Residual vector quantization for KV cache compression in large language
model")."""

import math

import pandas as pd

from vqkv import presets
from vqkv.experiments.audit import shapes
from vqkv.experiments.audit.rows import (
    PARTLY,
    Tables,
    above,
    close,
    furthest,
    measured,
    model_names,
    row,
    untested,
)
from vqkv.tables import published

MODEL = "Llama-3-8B"
TASKS = ["arc_25", "hellaswag_10", "mmlu_5", "truthfulqa_0", "winogrande_5", "gsm8k_5"]


def rows(stated: pd.Series, tables: Tables) -> list[dict]:
    """``stated``: figures in the sources' text by key. ``tables``: this study's by name."""
    scores = sum(published(name)[TASKS].notna().to_numpy().sum() for name in PUBLISHED)
    return [
        *_sizes(stated["rvq_ratio"]),
        *_learning(stated, tables),
        *_its_own_tables(stated),
        *_on_small_models(tables),
        untested(
            "accuracies of its Tables 1 to 3",
            float("nan"),
            "percent",
            "They need models of 7B and six data sets from a hub: python -m vqkv.study --profile llama3-8b --only 10.",
            figures=int(scores),
        ),
    ]


PUBLISHED = ("rvq_table1_key_value", "rvq_table2_codebook_size", "rvq_table3_models")


def _sizes(ratio: float) -> list[dict]:
    """Codes and scales alone, then with the codebooks, which one sequence has for itself."""
    needed, fp16 = shapes.stored(MODEL, presets.vqllm()), shapes.exact(MODEL)
    bits, side = needed.bits_per_value, needed.side_information
    found = [
        row(
            "smaller than fp16, 8 codebooks of 2,048",
            ratio,
            16 / bits,
            "x",
            f"Codes and scales take {bits:.4g} bits a value; the paper rounds down.",
        )
    ]
    for name, tokens in shapes.CONTEXTS.items():
        with_side = fp16.cache_bytes(tokens) / (needed.cache_bytes(tokens) + side)
        reason = (
            f"True of codes and scales; the codebooks add {side / 2**20:.0f} MiB, once for all sequences of a model."
        )
        found.append(
            row(f"... codebooks counted, one sequence of {name}", ratio, with_side, "x", reason, otherwise=PARTLY)
        )
    return found


def _learning(stated: pd.Series, tables: Tables) -> list[dict]:
    return [
        row(
            "steps over its 10M tokens",
            stated["rvq_steps"],
            stated["rvq_tokens"] / stated["rvq_batch"],
            "steps",
            "Tokens over tokens a batch; both are rounded in the paper.",
            rule=close(0.05),
        ),
        measured(
            tables,
            "02_learning",
            "improvement reached after 50 of 150 steps",
            1,
            "share",
            lambda table: _settled(table, stated["rvq_settled"] / stated["rvq_steps"]),
            rule=close(0.1),
        ),
    ]


def _settled(table: pd.DataFrame, part: float) -> tuple[float, str]:
    """Held-out loss after the last stage, of k-means and decay 0.99, mean over seeds."""
    recipe = table[(table["init"] == "kmeans") & (table["decay"] == 0.99) & (table["stage"] == table["stage"].max())]
    loss = recipe.groupby("step")["loss"].mean()
    early = loss[loss.index <= part * loss.index.max()].iloc[-1]
    first, last = loss.iloc[0], loss.iloc[-1]
    reason = f"In one layer's keys the loss falls by another {1 - last / early:.0%} afterwards (curves: page 02)."
    return (first - early) / (first - last), reason


def _its_own_tables(stated: pd.Series) -> list[dict]:
    """What the text says of the paper's own numbers."""
    first, second, third = (published(name) for name in PUBLISHED)
    contiguous, strided, both, tuned = (first.iloc[i][TASKS].astype(float) for i in (1, 2, 4, 5))
    sizes = second.dropna(subset="codebook_size").set_index(["codebook_size", "num_quantizers"])[TASKS]
    larger = sizes.loc[2048] > sizes.loc[1024]
    drops = third.set_index(["model", "quantised"])[TASKS].unstack()
    drops = {task: drops[task, "no"] - drops[task, "yes"] for task in ("gsm8k_5", "mmlu_5")}
    text = "Counted in its own table; {}."
    return [
        row("strided groups beat contiguous ones, Table 1", len(TASKS), int((strided > contiguous).sum()),
            "of 6 tasks", text.format("on TruthfulQA contiguous groups are"), otherwise=PARTLY),
        row("fine-tuning improves, Table 1", len(TASKS), int((tuned > both).sum()), "of 6 tasks",
            text.format("WinoGrande and GSM8K lose"), otherwise=PARTLY),
        row("2,048 codes beat 1,024, Table 2", larger.size, int(larger.to_numpy().sum()),
            "of 18 settings", text.format("TruthfulQA at 6 codebooks and ARC at 8 go the other way"),
            otherwise=PARTLY),
        _range("GSM8K", stated["rvq_gsm8k_least"], stated["rvq_gsm8k_most"], drops["gsm8k_5"]),
        _range("MMLU", stated["rvq_mmlu_least"], stated["rvq_mmlu_most"], drops["mmlu_5"]),
    ]  # fmt: skip


def _range(task: str, least: float, most: float, drops: pd.Series) -> dict:
    pair = furthest([(least, min(drops.min(), least)), (most, max(drops.max(), most))])
    reason = (
        f"Table 3's three models drop by {drops.min():.2f} to {drops.max():.2f} points; the end further off is shown."
    )
    return row(f"drop on {task}, {least:g} to {most:g} points, Table 3", *pair, "points", reason, otherwise=PARTLY)


def _on_small_models(tables: Tables) -> list[dict]:
    first = published(PUBLISHED[0])[TASKS]
    lost = (first.iloc[0] - first.iloc[1:4]).sum(axis=1)  # key contiguous, key strided, value
    return [
        measured(
            tables,
            "03_grouping",
            "contiguous key groups lose more than strided ones",
            lost.iloc[0] / lost.iloc[1],
            "loss over loss",
            lambda table: _loss_ratio(table, "key (contiguous)", "key (strided)"),
            rule=above(1.05),
        ),
        measured(
            tables,
            "03_grouping",
            "keys lose more than values",
            lost.iloc[1] / lost.iloc[2],
            "loss over loss",
            lambda table: _loss_ratio(table, "key (strided)", "value"),
            rule=above(1),
        ),
        measured(
            tables,
            "06_depth",
            "larger codebooks lose less, at every depth",
            1,
            "share of depths",
            _larger_is_better,
            rule=close(0),
        ),
    ]


def _loss_ratio(table: pd.DataFrame, worse: str, better: str) -> tuple[float, str]:
    """Of the mean KL over seeds, on the model where it is smallest."""
    kl = table.groupby(["model", "quantised"])["kl_mean"].mean().unstack()
    reason = f"Here KL on {model_names(table)}, the lower of the ratios; published: points lost over six tasks."
    return (kl[worse] / kl[better]).min(), reason


def _larger_is_better(table: pd.DataFrame) -> tuple[float, str]:
    """The two largest codebook sizes, found greedily."""
    kl = table[table["beam"] == 1].pivot_table(index="num_quantizers", columns="codebook_size", values="kl_mean")
    if len(kl.columns) < 2:
        return math.nan, ""
    small, large = kl.columns[-2:]
    share = (kl[large] < kl[small]).mean()
    return share, f"KL with {large:,} codes against {small:,}, {len(kl)} depths, on {model_names(table)}."
