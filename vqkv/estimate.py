"""What a page of the study will take, counted from its parameters before anything is loaded.

Memory is that of the model's shape and the page's largest batch; time is floating-point operations over a rate that is
measured on this machine, times the share of it that such work has reached here. Only what grows with models and tokens
is counted: an estimate within a factor of two or three. Pages without a formula are not estimated.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vqkv import presets
from vqkv.capacity import GB
from vqkv.evaluate import scored_at_once
from vqkv.model_size import ModelSize
from vqkv.trained_weights import attention_weights

# The share of a large matrix product's rate that each kind of work reached on a CPU (committed tables, 2 cores).
EFFICIENCY = {"model": 0.5, "search": 0.5}
CALL_SECONDS = 0.0015  # of a layer in a chunk that reads packed history, beyond its arithmetic
H100_TFLOPS = {"bfloat16": 989, "float16": 989, "float32": 67}  # NVIDIA's data sheet, SXM, dense
GPU_EFFICIENCY = 0.3
BATCH = 8  # sequences that ``calibrate`` takes at a time
# Pages whose memory or disk has parts of its own: they score caches, spill captured keys and values, fine-tune.
SCORED = (
    "03_grouping_ablation",
    "05_threshold_sweep",
    "06_residual_depth",
    "07_predictor_ablation",
    "08_generation_cost",
    "10_tasks",
    "11_frontier",
)
SPILLING = ("07_predictor_ablation", "11_frontier")
TUNING = ("10_tasks",)
TUNED_MODELS = 2  # kept meanwhile: one trained with codes, one without
TUNING_BYTES = 4 + 4 + 8  # of an attention weight: in fp32 itself, its gradient and both moments of AdamW
ITERATIONS = 10  # of k-means where a page does not say


@dataclass(frozen=True)
class Work:
    """Operations of the model, of the search for codes (always fp32), and how often a layer read packed history."""

    model_flop: float = 0
    search_flop: float = 0
    calls: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.model_flop + other.model_flop, self.search_flop + other.search_flop, self.calls + other.calls)

    def __mul__(self, times: float) -> "Work":
        return Work(self.model_flop * times, self.search_flop * times, round(self.calls * times))


@dataclass(frozen=True)
class Rates:
    """Floating-point operations a second of large matrix products in the model's dtype and in fp32."""

    model: float
    search: float
    where: str
    call_seconds: float = CALL_SECONDS

    def seconds(self, work: Work) -> float:
        """What ``work`` takes."""
        return work.model_flop / self.model + work.search_flop / self.search + work.calls * self.call_seconds


def measured_rates(dtype: torch.dtype, device: str, seconds: float = 0.5) -> Rates:
    """Of ``device`` where this machine has it, measured for about a second; else of one H100, by its data sheet."""
    if device != "cpu" and not torch.cuda.is_available():
        name = str(dtype).removeprefix("torch.")
        fast, plain = (H100_TFLOPS[key] * 1e12 * GPU_EFFICIENCY for key in (name, "float32"))
        return Rates(fast, plain, f"assumed: one H100 at {GPU_EFFICIENCY:.0%} of its published peak, as none is here")
    where = "cpu" if device == "cpu" else "cuda"
    fast, plain = (_rate(kind, where, seconds) for kind in (dtype, torch.float32))
    shown = f"{fast / 1e12:.3g} TFLOP/s in {str(dtype).removeprefix('torch.')}, measured on this machine's {where}"
    return Rates(fast * EFFICIENCY["model"], plain * EFFICIENCY["search"], shown)


def _rate(dtype: torch.dtype, device: str, seconds: float) -> float:
    size = 1024 if device == "cpu" else 8192
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(2):
        a @ b
    synchronize()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        a @ b
        synchronize()
        count += 1
    return count * 2 * size**3 / (time.perf_counter() - start)


# What pages do, counted --------------------------------------------------------------------------------------------


def _search(vectors: float, codes: int, stages: int, dims: int) -> Work:
    """The nearest of ``codes`` for every vector, stage by stage."""
    return Work(search_flop=vectors * stages * codes * dims * 2)


def _kmeans(vectors: float, codes: int, stages: int, dims: int, iterations: int = ITERATIONS) -> Work:
    """Learning a residual quantizer's first codebooks, on at most 16 vectors a code."""
    return _search(min(vectors, 16 * codes), codes, stages, dims) * (iterations + 1)


def _encoded(size: ModelSize, tokens: float, p: dict, codes: int, stages: int, roles: int = 2) -> Work:
    return _search(tokens * size.values * roles / 2 / p["group_size"], codes, stages, p["group_size"])


def _chunked(size: ModelSize, num_seqs: int, seq_len: int, chunk_size: int) -> Work:
    """``evaluate``: an exact pass, one in chunks, one for the reconstruction."""
    calls = -(-seq_len // chunk_size) * size.layers * -(-num_seqs // scored_at_once(size.vocab_size, seq_len))
    return Work(3 * size.pass_flop(num_seqs, seq_len), calls=calls)


def _magnitudes(p: dict, size: ModelSize) -> Work:
    tables = Work(size.pass_flop(p["num_seqs"], p["seq_len"])) * 6  # captured five times, attention once
    return tables + Work(size.pass_flop(p["recall_seqs"], min(size.positions, 2 * p["seq_len"])))


def _learning(p: dict, size: ModelSize) -> Work:
    seeds, variants, vectors = len(p["seeds"]), 5, p["vectors_per_step"]
    seq_len = min(512, vectors)
    tokens = vectors * (p["steps"] + 1) * p["group_size"] / (size.num_kv_heads * size.head_dim)
    quantizer = (p["codebook_size"], p["num_quantizers"], p["group_size"])
    encodes = p["steps"] + 2 * (p["steps"] // p["every"] + 2)
    learned = _search(vectors, *quantizer) * (encodes * variants) + _kmeans(vectors, *quantizer) * 3
    return (Work(size.pass_flop(tokens / seq_len, seq_len)) + learned) * seeds


def _grouping(p: dict, size: ModelSize) -> Work:
    """Four calibrations of one role each, five compressors evaluated on text and recall."""
    codes, stages, dims = p["codebook_size"], p["num_quantizers"], p["group_size"]
    tokens, seq_len = p["train_seqs"] * p["seq_len"], p["seq_len"]
    first = min(BATCH, p["train_seqs"]) * seq_len * size.values / 2 / size.layers / dims
    fit = Work(size.pass_flop(p["train_seqs"], seq_len)) + _kmeans(first, codes, stages, dims) * size.layers
    fit += _encoded(size, tokens, p, codes, stages, roles=1)
    scored = _chunked(size, p["num_seqs"], seq_len, p["chunk_size"])
    scored += _chunked(size, p["recall_seqs"], seq_len, p["chunk_size"]) + _encoded(
        size, (2 * p["num_seqs"] + p["recall_seqs"]) * seq_len, p, codes, stages
    )
    return (fit * 4 + scored * 5) * len(p["seeds"])


def _depth(p: dict, size: ModelSize) -> Work:
    """A calibration for each codebook size, then every depth and beam; and every system at equal bits."""
    seq_len, dims, total = p["seq_len"], p["group_size"], Work()
    tokens = p["train_seqs"] * seq_len
    vectors = tokens * size.values / 2 / size.layers / dims
    for codes in p["codebook_sizes"]:
        total += Work(size.pass_flop(p["train_seqs"], seq_len))
        total += _kmeans(vectors, codes, max(p["depths"]), dims, p["kmeans_iterations"]) * (2 * size.layers)
        for beam in p["beams"]:
            read = (p["num_seqs"] + p["recall_seqs"] + 1) * seq_len * beam
            for depth in p["depths"]:
                total += _encoded(size, read, p, codes, depth)
                total += _chunked(size, p["num_seqs"] + p["recall_seqs"], seq_len, p["chunk_size"])
    return total + _gaussian(p) + _systems(p, size)


def _gaussian(p: dict) -> Work:
    total, held_out = Work(), 8192
    for codes in p["codebook_sizes"]:
        total += _kmeans(p["vectors"], codes, max(p["depths"]), p["group_size"])
        total += _search(held_out, codes, sum(p["depths"]), p["group_size"]) * sum(p["beams"])
    return total


def _systems(p: dict, size: ModelSize) -> Work:
    """About thirty systems, of which residual VQ in three depths, with and without a beam, is what costs."""
    seq_len, codes, dims = p["seq_len"], min(p["codebook_sizes"]), 32
    vectors = min(BATCH, p["train_seqs"]) * seq_len * size.values / 2 / size.layers / dims
    total = (
        Work(size.pass_flop(p["train_seqs"], seq_len)) * 8
        + _chunked(size, p["num_seqs"], seq_len, p["chunk_size"]) * 30
    )
    total += _kmeans(vectors, codes, max(p["equal_depths"]), dims) * (2 * size.layers)
    total += _encoded(size, p["train_seqs"] * seq_len, p, codes, max(p["equal_depths"]))
    return total + _encoded(size, 2 * p["num_seqs"] * seq_len * (1 + max(p["beams"])), p, codes, sum(p["equal_depths"]))


PAGES: dict[str, Callable[[dict, ModelSize], Work]] = {
    "01_magnitude_profiling": _magnitudes,
    "02_codebook_learning": _learning,
    "03_grouping_ablation": _grouping,
    "06_residual_depth": _depth,
}


def page_work(page: str, parameters: dict, sizes: list[ModelSize]) -> Work | None:
    """Of all models of a page; None where nothing is counted."""
    if page not in PAGES:
        return None
    if page == "06_residual_depth":  # depth reads one model, the systems all
        more = [_systems(parameters, size) for size in sizes[1:]]
        return sum(more, PAGES[page](parameters, sizes[0]))
    return sum((PAGES[page](parameters, size) for size in sizes), Work())


def page_memory(page: str, parameters: dict, size: ModelSize) -> dict[str, int]:
    """Bytes by kind of the page's largest batch: weights, the keys and values of a batch, its logits (where it scores
    caches: exact and packed, and both in fp32; training makes fewer), codebooks, what the batch's cache stores packed,
    and what fine-tuning holds beside the model."""
    seq_len = _longest(parameters, size)
    batch = min(scored_at_once(size.vocab_size, seq_len), parameters.get("num_seqs", BATCH))
    preset = presets.vqllm(
        _largest(parameters, 8, "num_quantizers", "depths"),
        _largest(parameters, 2048, "codebook_size", "codebook_sizes"),
    )
    stored = size.footprint(preset)
    training = min(BATCH, parameters.get("train_seqs", 0)) * min(parameters.get("seq_len", seq_len), size.positions)
    for_each = 2 * size.item_bytes + 2 * 4 if page in SCORED else 0
    logits = size.vocab_size * batch * seq_len * for_each  # calibration makes none
    return {
        "weights": stored.weights,
        "keys and values": max(training, batch * seq_len) * size.values * size.item_bytes,
        "logits": logits,
        "codebooks": stored.side_information * 3,  # in fp32 with their sums while they are learned
        "packed cache": stored.kinds(seq_len, batch)["packed"],
        "fine-tuning": _tuning_memory(size, stored.weights) if page in TUNING else 0,
    }


def _tuning_memory(size: ModelSize, weights: int) -> int:
    trained = sum(weight.numel() for weight in attention_weights(size.model))
    return TUNED_MODELS * weights + TUNING_BYTES * trained


def page_disk(page: str, parameters: dict, size: ModelSize) -> int:
    """Bytes of captured keys and values that a page with predictors spills, in ``TMPDIR``."""
    if page not in SPILLING:
        return 0
    tokens = parameters["train_seqs"] * parameters["seq_len"]
    return tokens * size.values * size.item_bytes + tokens * size.values * 4 * 3 // size.layers


def _longest(parameters: dict, size: ModelSize) -> int:
    longest = max(parameters.get("longest", 0), parameters.get("seq_len", 0))
    return min(longest or 512, size.positions)


def _largest(parameters: dict, default: int, *names: str) -> int:
    found = [parameters[name] for name in names if name in parameters]
    return max((n for value in found for n in (value if isinstance(value, list) else [value])), default=default)


def gigabytes(count: float) -> str:
    """``12.3 GB``."""
    return f"{count / GB:.3g} GB"
