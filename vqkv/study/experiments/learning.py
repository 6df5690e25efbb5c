"""Notebook 02: how codebooks are learned."""

import torch

from vqkv import presets
from vqkv.models.capture import capture
from vqkv.models.load import describe
from vqkv.study.experiments.common import draw, frame, loaded
from vqkv.study.metrics import code_perplexity
from vqkv.study.sweep import per_process, sweep


def codebook_learning(
    model: str, corpus: str, role: str, layer: int, codebook_size: int, num_quantizers: int, group_size: int,
    vectors_per_step: int, steps: int, every: int, variants: list[dict], seeds: list[int], dtype: str, device: str,
):  # fmt: skip
    """Notebook 02: held-out loss (relative MSE), code perplexity and unused codes against moving-average steps.

    ``variants`` are arguments of ``presets.vqllm`` (init, decay, revive); each is learned with each of ``seeds``, which
    also draw the text. One row per variant, seed, step and stage; a stage's loss is what it and those before leave.
    """
    settings = {
        "who": {"name": model, "dtype": dtype, "device": device},
        "what": {"corpus": corpus, "role": role, "layer": layer, "group_size": group_size},
        "quantizer": {"num_quantizers": num_quantizers, "codebook_size": codebook_size, "group_size": group_size},
        "per_step": vectors_per_step,
        "steps": steps,
        "every": every,
    }
    cases = [{"seed": seed, "variant": variant} for seed in seeds for variant in variants]
    return frame(*sweep(_rows, cases, settings, "learning"))


def _rows(seed: int, variant: dict, who: dict, what: dict, quantizer: dict, per_step: int, steps: int, every: int):
    _, _, sources, _ = loaded(**who)
    test, tested = _layer_vectors(split="test", count=per_step, seed=0, who=who, **what)
    train, trained = _layer_vectors(split="train", count=per_step * (steps + 1), seed=seed, who=who, **what)
    preset = presets.vqllm(**quantizer, seed=seed, **variant)
    codec = (preset.key_codec if what["role"] == "key" else preset.value_codec)(train.shape[-1])
    label = {"init": "kmeans", "decay": 0.99, "revive": False} | variant | {"seed": seed}
    rows = [label | row for row in _learning_curve(codec, train.chunk(steps + 1, dim=2), test, every)]
    return rows, sources | tested | trained


def _learning_curve(codec, train: list[torch.Tensor], test: torch.Tensor, every: int) -> list[dict]:
    """Step 0 is the initial codebooks; each further batch (1, 1, vectors, head_dim) is one step."""
    rows, steps = [], len(train) - 1
    for step, batch in enumerate(train):
        codec.partial_fit(batch)
        if step % every == 0 or step == steps:
            vectors = codec.vectors(test)
            loss, usage = codec.quantizer.loss(vectors), codec.quantizer.usage(vectors)
            effective, unused = code_perplexity(usage), (usage == 0).float().mean(dim=1)
            for stage in range(len(loss)):
                row = {"step": step, "stage": stage + 1, "loss": loss[stage].item()}
                rows.append(row | {"perplexity": effective[stage].item(), "unused": unused[stage].item()})
    return rows


@per_process(maxsize=2)
def _layer_vectors(who: dict, corpus: str, split: str, role: str, layer: int, group_size: int, count: int, seed: int):
    """Keys or values of one layer, cut into batches that hold ``count`` group vectors in all (test: one batch), and the
    source of their text."""
    (model, tokenizer, *_), sources = loaded(**who), {}
    heads, *dims = describe(model)["shapes"][layer]
    head_dim = dims[role == "value"]
    per_token = heads * head_dim // group_size
    seq_len = min(512, count // per_token)
    num_seqs = -(-count // (per_token * seq_len))
    tokens = draw(corpus, tokenizer, split, seq_len, num_seqs, seed, sources)
    which = 0 if role == "key" else 1  # of each batch only this layer and role are kept
    x = torch.cat([capture(model, batch)[which][layer].float() for batch in tokens.split(8)])
    return x.flatten(0, 2)[: count * group_size // head_dim][None, None], sources  # (1, 1, vectors, head_dim)
