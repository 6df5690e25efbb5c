"""Notebook 02: how codebooks are learned."""

from typing import Any

import torch

from vqkv import presets
from vqkv.models.capture import capture
from vqkv.models.layers import max_positions
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
