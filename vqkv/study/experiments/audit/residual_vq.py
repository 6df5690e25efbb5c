"""Figures of the residual VQ paper (Kumar, "Residual vector quantization for KV cache compression in large language
model"), found again: a function for each kind of claim."""

import pandas as pd
import torch

from vqkv import presets
from vqkv.kernels import rvq_encode
from vqkv.study.experiments.audit import shapes
from vqkv.study.experiments.audit.rows import stated
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


def algorithm() -> dict:
    """The share of random vectors whose codes are those of Algorithm 1 as it is printed, in float64."""
    generator = torch.Generator().manual_seed(0)
    z, codebooks = torch.randn(1, 1, 500, 32, generator=generator), torch.randn(8, 64, 32, generator=generator)
    codes, left = rvq_encode(z, codebooks).flatten(0, 2), z.flatten(0, 2).double()
    same = torch.ones(len(left), dtype=torch.bool)
    for stage, codebook in enumerate(codebooks.double()):
        nearest = torch.cdist(left, codebook).argmin(1)
        same &= codes[:, stage] == nearest
        left = left - codebook[nearest]
    return {"recomputed": same.double().mean().item()}


def settled(table: pd.DataFrame) -> dict:
    """Held-out loss after the last stage, of k-means and decay 0.99, mean over seeds: the part of the improvement that
    is reached after the part of the steps that the paper names."""
    recipe = table[(table["init"] == "kmeans") & (table["decay"] == 0.99) & (table["stage"] == table["stage"].max())]
    loss = recipe.groupby("step")["loss"].mean()
    early = loss[loss.index <= stated("rvq_settled") / stated("rvq_steps") * loss.index.max()].iloc[-1]
    first, last = loss.iloc[0], loss.iloc[-1]
    return {"recomputed": (first - early) / (first - last), "afterwards": 1 - last / early}


def tasks_won(better: str, worse: str) -> dict:
    """Points by which one row of its Table 1 is above another, by task."""
    rows = published("rvq_table1_key_value")[TASKS].astype(float)
    return {"cases": rows.iloc[int(better)] - rows.iloc[int(worse)]}


def larger_codebooks_won() -> dict:
    """Points by which 2,048 codes are above 1,024 in its Table 2, by setting and task."""
    sizes = published("rvq_table2_codebook_size").dropna(subset="codebook_size")
    scores = sizes.set_index(["codebook_size", "num_quantizers"])[TASKS]
    return {"cases": (scores.loc[2048] - scores.loc[1024]).to_numpy().ravel()}


def drops(task: str, name: str) -> dict:
    """Points lost by the models of its Table 3, each beside the nearest drop of the range that the text says."""
    scores = published("rvq_table3_models").set_index(["model", "quantised"])[TASKS].unstack()
    drops = scores[task, "no"] - scores[task, "yes"]
    said = drops.clip(stated(f"rvq_{name}_least"), stated(f"rvq_{name}_most"))
    return {"cases": list(zip(said, drops, strict=True)), "least": drops.min(), "most": drops.max()}


def pronounced() -> dict:
    """Points by which MMLU and GSM8K drop more than any other task in its Table 2, at each size of fewer than 8
    codebooks."""
    scores = published("rvq_table2_codebook_size").set_index("num_quantizers")[TASKS]
    fewer = scores.loc[[depth for depth in scores.index.unique() if depth < 8]]
    drops = scores[scores.index.isna()].iloc[0] - fewer
    hard = ["mmlu_5", "gsm8k_5"]
    return {"cases": drops[hard].min(axis=1) - drops.drop(columns=hard).max(axis=1)}


def gemma_drops() -> dict:
    """Points by which Gemma drops more on TruthfulQA than each other model of its Table 3."""
    scores = published("rvq_table3_models").set_index(["model", "quantised"])["truthfulqa_0"].unstack()
    drops = scores["no"] - scores["yes"]
    return {"cases": drops["Gemma-7b"] - drops.drop("Gemma-7b")}


def larger_is_better(table: pd.DataFrame) -> dict:
    """KL with the largest codebooks over that with the second largest, at every depth."""
    kl = table.pivot_table(index="num_quantizers", columns="codebook_size", values="kl_mean")
    if len(kl.columns) < 2:
        return {"cases": []}
    small, large = kl.columns[-2:]
    return {"cases": kl[large] / kl[small], "large": large, "small": small, "depths": len(kl)}


def codes_gain(table: pd.DataFrame) -> dict:
    """Points of facts that the largest codebooks lose less than the second largest at the largest depth."""
    lost = table[table["num_quantizers"] == table["num_quantizers"].max()]
    lost = lost.pivot(index="model", columns="codebook_size", values="facts_lost")
    return {"cases": lost.iloc[:, -2] - lost.iloc[:, -1]}


def depth_matters(table: pd.DataFrame) -> dict:
    """Points of facts that the largest depth gains over the smallest, beyond what the largest codebooks gain over the
    second largest there."""
    lost = table.pivot(index="model", columns=["num_quantizers", "codebook_size"], values="facts_lost")
    depths, sizes = (sorted(set(table[name])) for name in ("num_quantizers", "codebook_size"))
    least, most, (small, large) = depths[0], depths[-1], sizes[-2:]
    return {"cases": (lost[least, large] - lost[most, large]) - (lost[least, small] - lost[least, large])}


def finetuned(table: pd.DataFrame, rate: str) -> dict:
    """Perplexity after fine-tuning at a learning rate over that before, by seed and depth."""
    ppl = table.pivot(index=["seed", "num_quantizers"], columns=["label", "learning_rate"], values="ppl")
    return {"cases": ppl["key + value, fine-tuned", float(rate)] / ppl["key + value", 0.0]}


def prefill(table: pd.DataFrame, system: str) -> dict:
    """Over the uncompressed cache's, by batch and context."""
    times = table.pivot(index=["batch", "context"], columns="system", values="prefill_ms")
    return {"cases": (times[system] / times["DynamicCache"]).dropna()}


def by_size(table: pd.DataFrame, above: str, below: str, sizes: str) -> dict:
    """The ratio of two systems' mean KL by model and size of what was injected."""
    over, under = (
        table.query(sizes).query(query).groupby(["model", "size"])["kl_mean"].mean() for query in (above, below)
    )
    return {"cases": over / under}
