"""Figures of the residual VQ paper (Kumar, "Residual vector quantization for KV cache compression in large language
model"), found again: a function for each kind of claim."""

import math

import pandas as pd

from vqkv import presets
from vqkv.study.experiments.audit import shapes
from vqkv.study.experiments.audit.rows import furthest, stated
from vqkv.study.tables import published

MODEL = "Llama-3-8B"
TASKS = ["arc_25", "hellaswag_10", "mmlu_5", "truthfulqa_0", "winogrande_5", "gsm8k_5"]


def codes_and_scales() -> dict:
    """Ratio to fp16 of codes and scales alone."""
    bits = shapes.stored(MODEL, presets.vqllm()).bits_per_value
    return {"recomputed": 16 / bits, "bits": bits}


def with_codebooks(context: str) -> dict:
    """Ratio to fp16 with the codebooks, which one sequence has for itself."""
    needed, tokens = shapes.stored(MODEL, presets.vqllm()), shapes.CONTEXTS[context]
    whole = needed.cache_bytes(tokens) + needed.side_information
    return {
        "recomputed": shapes.exact(MODEL).cache_bytes(tokens) / whole,
        "mebibytes": needed.side_information / 2**20,
    }


def steps() -> dict:
    """Steps of a run over its tokens."""
    return {"recomputed": stated("rvq_tokens") / stated("rvq_batch")}


def settled(table: pd.DataFrame) -> dict:
    """Held-out loss after the last stage, of k-means and decay 0.99, mean over seeds: the part of the improvement that
    is reached after the part of the steps that the paper names."""
    recipe = table[(table["init"] == "kmeans") & (table["decay"] == 0.99) & (table["stage"] == table["stage"].max())]
    loss = recipe.groupby("step")["loss"].mean()
    early = loss[loss.index <= stated("rvq_settled") / stated("rvq_steps") * loss.index.max()].iloc[-1]
    first, last = loss.iloc[0], loss.iloc[-1]
    return {"recomputed": (first - early) / (first - last), "afterwards": 1 - last / early}


def tasks_won(better: str, worse: str) -> dict:
    """Tasks on which one row of its Table 1 is above another."""
    rows = published("rvq_table1_key_value")[TASKS].astype(float)
    return {"recomputed": int((rows.iloc[int(better)] > rows.iloc[int(worse)]).sum())}


def larger_codebooks_won() -> dict:
    """Settings of its Table 2 in which 2,048 codes are above 1,024."""
    sizes = published("rvq_table2_codebook_size").dropna(subset="codebook_size")
    scores = sizes.set_index(["codebook_size", "num_quantizers"])[TASKS]
    return {"recomputed": int((scores.loc[2048] > scores.loc[1024]).to_numpy().sum())}


def drops(task: str, name: str) -> dict:
    """The end of a range of drops that is further off those of its Table 3."""
    scores = published("rvq_table3_models").set_index(["model", "quantised"])[TASKS].unstack()
    drops = scores[task, "no"] - scores[task, "yes"]
    least, most = stated(f"rvq_{name}_least"), stated(f"rvq_{name}_most")
    pair = furthest([(least, min(drops.min(), least)), (most, max(drops.max(), most))])
    return pair | {"least": drops.min(), "most": drops.max()}


def loss_ratio(table: pd.DataFrame, worse: str, better: str) -> dict:
    """Of the mean KL over seeds, on the model where it is smallest."""
    kl = table.groupby(["model", "quantised"])["kl_mean"].mean().unstack()
    return {"recomputed": (kl[worse] / kl[better]).min()}


def larger_is_better(table: pd.DataFrame) -> dict:
    """The share of depths at which the larger of the two largest codebook sizes, found greedily, has the lower KL."""
    kl = table[table["beam"] == 1].pivot_table(index="num_quantizers", columns="codebook_size", values="kl_mean")
    if len(kl.columns) < 2:
        return {"recomputed": math.nan}
    small, large = kl.columns[-2:]
    return {"recomputed": (kl[large] < kl[small]).mean(), "large": large, "small": small, "depths": len(kl)}
