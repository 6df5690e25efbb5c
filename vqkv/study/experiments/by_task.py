"""Notebook 06: the number and size of residual VQ's codebooks, task by task."""

from vqkv import presets
from vqkv.data.recall import RecallBatch
from vqkv.study.experiments.common import Subject, calibrated, frame, passages, subject
from vqkv.study.experiments.depth import shallower
from vqkv.study.experiments.retrieval import recall_episodes, scored
from vqkv.study.sweep import sweep


def depth_by_task(
    models: list[str], corpus: str, codebook_sizes: list[int], depths: list[int], group_size: int,
    kmeans_iterations: int, train_seqs: int, seq_len: int, num_seqs: int, pairs: int, far_pairs: int, gap: int,
    chunk_size: int, seed: int, dtype: str, device: str,
):  # fmt: skip
    """Table 2's question on three tasks, every token read packed (``in_place``): to recall ``pairs`` pairs, or
    ``far_pairs`` behind ``gap`` tokens of text, and to go on with a passage of ``chunk_size`` tokens that comes again.

    One row per model, codebook size, depth and task, of ``num_seqs`` sequences; ``lost``: points, with ``low`` and
    ``high`` as in ``retrieval``. Codebooks are learned once per size, as in ``residual_depth``.
    """
    text = {"corpus": corpus, "train": [train_seqs, seq_len], "test": [num_seqs, seq_len], "seed": seed}
    settings = {
        "who": text | {"dtype": dtype, "device": device},
        "quantizer": {"group_size": group_size, "kmeans_iterations": kmeans_iterations},
        "depths": depths,
        "asked": {"pairs": pairs, "far_pairs": far_pairs, "gap": gap, "chunk_size": chunk_size},
    }
    cases = [{"model": name, "codebook_size": size} for name in models for size in codebook_sizes]
    return frame(*sweep(_rows, cases, settings, "depth by task"))


def _rows(model: str, codebook_size: int, who: dict, quantizer: dict, depths: list[int], asked: dict):
    who = who | {"name": model}
    found, preset = subject(**who), presets.vqllm(max(depths), codebook_size, **quantizer, seed=who["seed"])
    deepest, rows = calibrated(preset, who, who["train"][0]), []
    for task, batch in _tasks(found, who, **asked).items():
        for depth in depths:
            compressor = shallower(deepest, depth)
            about = {"model": model, "codebook_size": codebook_size, "num_quantizers": depth, "task": task}
            rows.append(about | scored(found, compressor, batch))
    return rows, found.sources


def _tasks(found: Subject, who: dict, pairs: int, far_pairs: int, gap: int, chunk_size: int) -> dict[str, RecallBatch]:
    count = len(found.test)
    return {
        f"recall of {pairs} pairs": recall_episodes(found, pairs, 0, count, 0, who),
        f"recall of {far_pairs}, {gap} tokens back": recall_episodes(found, far_pairs, gap, count, 0, who),
        "copying": passages(found.test, chunk_size),
    }
