"""Notebook 02: how codebooks are learned, and calibration on text of another domain, and on little text."""

import math
from typing import Any

import pandas as pd
import torch

from vqkv import presets
from vqkv.errors import DataError
from vqkv.models.capture import capture
from vqkv.models.layers import max_positions
from vqkv.study.experiments.common import by_window
from vqkv.study.experiments.comparisons import paired_ratio
from vqkv.study.experiments.frontier import fitted_system
from vqkv.study.shared import per_process
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment, product


@experiment(lambda subject, seeds, variants: product(subject=subject.each(seed=seeds), variant=variants))
def codebook_learning(
    subject: Subject, variant: dict, role: str, layer: int, quantizer: dict, vectors_per_step: int, steps: int,
    every: int,
) -> list[dict]:  # fmt: skip
    """Measure held-out loss and unused codes against moving-average steps: a row per variant, seed, step and stage.

    ``variants``: arguments of ``presets.vqllm``. A stage's loss is what it and those before leave.
    """
    where = {"role": role, "layer": layer, "group_size": quantizer["group_size"]}
    train = _layer_vectors(subject, "train", subject.seed, vectors_per_step * (steps + 1), **where)
    test = _layer_vectors(subject, "test", 0, vectors_per_step, **where)
    preset = presets.vqllm(**quantizer, seed=subject.seed, **variant)
    codec: Any = (preset.key_codec if role == "key" else preset.value_codec)(train.shape[-1])
    label = {"init": "kmeans", "decay": 0.99, "revive": False} | variant | {"seed": subject.seed}
    rows = []
    for step, batch in enumerate(train.chunk(steps + 1, dim=2)):  # the first makes the initial codebooks
        codec.partial_fit(batch)
        if step % every == 0 or step == steps:
            vectors = codec.vectors(test)
            loss, unused = codec.quantizer.loss(vectors), (codec.quantizer.usage(vectors) == 0).float().mean(dim=1)
            each = enumerate(zip(loss.tolist(), unused.tolist(), strict=True), 1)
            rows += [label | {"step": step, "stage": stage, "loss": x, "unused": y} for stage, (x, y) in each]
    return rows


def _layer_vectors(
    subject: Subject, split: str, seed: int, count: int, role: str, layer: int, group_size: int
) -> torch.Tensor:
    """Return keys or values (1, 1, vectors, head_dim) of one layer that hold ``count`` group vectors."""
    shapes = subject.about["shapes"]
    layer = min(layer, len(shapes) - 1)
    heads, *dims = shapes[layer]
    per_token = heads * dims[role == "value"] // group_size
    seq_len = min(512, max_positions(subject.model), count // per_token)
    tokens = subject.text(split, [-(-count // (per_token * seq_len)), seq_len], seed)
    x = _captured_layer(subject=subject, split=split, size=list(tokens.shape), seed=seed, role=role, layer=layer)
    return x.flatten(0, 2)[: count * group_size // x.shape[-1]][None, None]


@per_process(maxsize=2)
def _captured_layer(subject: Subject, split: str, size: list[int], seed: int, role: str, layer: int) -> torch.Tensor:
    which = 0 if role == "key" else 1  # of each batch only this layer and role are kept
    batches = subject.text(split, size, seed).split(8)
    return torch.cat([capture(subject.model, batch)[which][layer].float() for batch in batches])


MEASURED = ("bits_per_value", "side_bytes", "kl_mean", "kl_low", "kl_high", "kl_floor", "top1", "kl_each")


def _cases(
    subject: Subject, other_corpus: str, sizes: list[int], systems: list[str], designs: list[str], bits: float
) -> list[dict]:
    num_seqs, seq_len = subject.train_size
    both = [subject.corpus, other_corpus]
    fits = [(corpus, num_seqs, both) for corpus in both]
    fits += [(subject.corpus, size, both[:1]) for size in sizes if size != num_seqs]
    return [
        {"subject": subject.changed(corpus=corpus, train_size=[size, seq_len]), "texts": texts}
        | {"system": label, "bits": nominal}
        for corpus, size, texts in fits  # outermost: keys and values are captured once for all systems
        for label, nominal in [*((label, 0) for label in systems), *((label, bits) for label in designs)]
    ]


@experiment(_cases)
def calibration_text(
    subject: Subject, system: str, bits: float, texts: list[str], chunk_size: int, vqllm: dict, learning: dict
) -> list[dict]:
    """Calibrate ``systems`` and ``designs`` on other or less text, read windows of ``test``, ``chunked``: a row a text.

    The subject's ``train_size`` of its corpus and of ``other_corpus``, read on both; ``sizes`` of its corpus, on that.
    ``kl_each``: of each window. ``refused``: the error where a system takes no calibration on so little text.
    """
    refused, compressor, rows = "", None, []
    try:
        compressor = fitted_system(subject, system, bits, vqllm, learning)
    except DataError as error:
        refused = str(error)
    for corpus in texts:
        row = dict.fromkeys(MEASURED, math.nan) | {"kl_each": ""}
        if compressor:
            tokens = subject.text("test", subject.test_size, subject.seed, corpus)
            row = by_window(subject, compressor, tokens, chunk_size=chunk_size, reconstruction=False)
        label = {"model": subject.name, "system": system, "nominal_bits": bits, "train_corpus": subject.corpus}
        label |= {"test_corpus": corpus, "train_seqs": subject.train_size[0]}
        rows.append(label | {name: row[name] for name in MEASURED} | {"refused": refused})
    return rows


def against_own(table: pd.DataFrame, train_seqs: int) -> pd.DataFrame:
    """Every other calibration next to that on ``train_seqs`` sequences of the corpus that is read (``_own``), system by
    system. ``ratio``: its KL over the latter's, with the 95% interval over windows, ``low`` to ``high``; NaN where it
    was refused. ``more_bits``: what it takes more of stored bits."""
    keys, numbers = ["model", "system", "nominal_bits", "test_corpus"], ["kl_mean", "bits_per_value", "kl_each"]
    own = (table["train_corpus"] == table["test_corpus"]) & (table["train_seqs"] == train_seqs)
    both = table[~own].merge(table.loc[own, keys + numbers], on=keys, suffixes=("", "_own"))
    finite = both[both["kl_mean"].notna() & both["kl_mean_own"].notna()]
    pairs = zip(finite["kl_each"], finite["kl_each_own"], strict=True)
    ratios = [paired_ratio(str(other).split(), str(ours).split()) for other, ours in pairs]
    both = both.join(pd.DataFrame(ratios, finite.index, ["ratio", "low", "high"]))
    return both.assign(more_bits=both["bits_per_value"] - both["bits_per_value_own"])
