"""Notebook 17: small models with and without normalised keys and values, trained alike, and what plain codes cost them.

Section 6 of the VQ quality framework expects its 1034x to hold on models that "normalize K,V before caching".
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from vqkv import presets
from vqkv.calibration.calibrate import calibrate
from vqkv.evaluation.evaluate import evaluate
from vqkv.evaluation.exact import ExactPass
from vqkv.models.capture import capture
from vqkv.models.load import fingerprint
from vqkv.reference.data import TOKENIZER_DIR, VOCAB_SIZE
from vqkv.reference.train import DECAY_SHARE, adamw, next_token_loss, update
from vqkv.study.experiments import probes
from vqkv.study.experiments.common import draw, frame, subject
from vqkv.study.injection import inject
from vqkv.study.sweep import per_process, sweep

LAYERS, HEAD_DIM, RECALL_PAIRS = 4, 64, 16
SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 160, "intermediate_size": 448, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD_DIM, "max_position_embeddings": 1024,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
LEARNING_RATE, WARMUP_SHARE = 3e-3, 0.1
LARGEST = 0.45  # magnitude, below the 0.5 that the source asks for
KEPT = (
    "ppl_exact", "ppl", "bits_per_value", "kl_mean", "kl_low", "kl_high", "kl_worst", "kl_floor", "top1", "key_mse",
    "value_mse",
)  # fmt: skip


class HeadNorm(nn.Module):
    """Each head's vector over its root mean square, without a weight, as Gemma 4 does to its values."""

    def __init__(self, head_dim: int = HEAD_DIM):
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., num_kv_heads * head_dim), the same shape."""
        return F.rms_norm(x.unflatten(-1, (-1, self.head_dim)), (self.head_dim,), eps=1e-6).flatten(-2)


def _llama():
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def _qwen3():
    """The same but for norms of queries and keys."""
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE))


def _both():
    """The same but for norms of queries, keys and values."""
    model = _qwen3()
    for layer in model.model.layers:
        layer.self_attn.v_proj = nn.Sequential(layer.self_attn.v_proj, HeadNorm())
    return model


def _gemma4():
    """All layers attend to all tokens, none shares another's cache; it differs from the others in more than norms."""
    own = {"layer_types": ["full_attention"] * LAYERS, "global_head_dim": HEAD_DIM, "num_kv_shared_layers": 0}
    own |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB_SIZE}
    return Gemma4ForCausalLM(Gemma4TextConfig(**SHAPE, **own))


def _as_trained(model, tokens):
    return model


def scaled_down(model, tokens: torch.Tensor):
    """The same Llama in other units: every layer's keys and values times what makes the largest of ``tokens``
    ``LARGEST``. It predicts what it did before, up to rounding."""
    roles = capture(model, tokens, pre_rope=False)
    return inject(model, *(torch.stack([LARGEST / x.abs().max() for x in role])[:, None, None] for role in roles))


@torch.no_grad()
def keys_normed(model, tokens: torch.Tensor):
    """A trained Llama with ``HeadNorm`` put behind its keys; queries are larger by the size that a head's keys had, on
    average over ``tokens``."""
    model, (keys, _) = copy.deepcopy(model), capture(model, tokens)
    for layer, size in zip(model.model.layers, map(_sizes, keys), strict=True):
        own = layer.self_attn
        own.q_proj.weight.unflatten(0, (len(size), -1, own.head_dim)).mul_(size[:, None, None, None])
        own.k_proj = nn.Sequential(own.k_proj, HeadNorm(own.head_dim))
    return model


@torch.no_grad()
def both_normed(model, tokens: torch.Tensor):
    """The same, and ``HeadNorm`` behind its values; output projections make up for their size."""
    model, (_, values) = keys_normed(model, tokens), capture(model, tokens)
    for layer, size in zip(model.model.layers, map(_sizes, values), strict=True):
        own = layer.self_attn
        own.o_proj.weight.unflatten(1, (len(size), -1, own.head_dim)).mul_(size[:, None, None])
        own.v_proj = nn.Sequential(own.v_proj, HeadNorm(own.head_dim))
    return model


def _sizes(x: torch.Tensor) -> torch.Tensor:
    """(batch, num_kv_heads, seq_len, head_dim) -> (num_kv_heads,): mean root mean square of a head's vectors."""
    return x.square().mean(-1).sqrt().mean((0, 2))


CHANGED = {  # what is done to a trained Llama
    "as trained": _as_trained,
    "scaled to max 0.45": scaled_down,
    "keys normed": keys_normed,
    "keys and values normed": both_normed,
}
ARCHITECTURES = {"llama": _llama, "qwen3": _qwen3, "both": _both, "gemma4": _gemma4}
MODELS = {  # architecture that is trained, and what is done to it afterwards
    "Llama": ("llama", _as_trained),
    "Llama, scaled to max 0.45": ("llama", scaled_down),
    "Qwen 3: keys normed": ("qwen3", _as_trained),
    "Qwen 3, values normed too": ("both", _as_trained),
    "Gemma 4: both normed": ("gemma4", _as_trained),
}


def small_models(beginnings: list[str]) -> list[str]:
    """Names of ``MODELS`` that begin so."""
    return [name for name in MODELS if name.startswith(tuple(beginnings))]


def normalised_keys(
    models: list[str], corpus: str, text_seqs: int, batch_size: int, prompt_len: int, new_tokens: int, train_seqs: int,
    num_seqs: int, codebook_size: int, seed: int, device: str,
):  # fmt: skip
    """Every model of ``MODELS`` trained on the same ``text_seqs`` sequences, and read from each codec of its prompt.

    ``snapshot`` protocol, one scale per head and prompt. One row per model and codec; ``key_max`` and ``value_max``:
    the median over heads of their largest magnitude, ``largest`` that of all. ``2 codes`` tells next to nothing of a
    cache: what reading it well is worth to a model.
    """
    sizes = {"text_seqs": text_seqs, "batch_size": batch_size, "seq_len": prompt_len + new_tokens}
    settings = {
        "training": sizes | {"corpus": corpus, "seed": seed, "device": device},
        "measured": {"train_seqs": train_seqs, "num_seqs": num_seqs, "prompt_len": prompt_len},
        "codebook_size": codebook_size,
    }
    return frame(*sweep(_rows, [{"model": name} for name in models], settings, "architectures"))


def _rows(model: str, training: dict, measured: dict, codebook_size: int):
    (architecture, change), sources, tokens = MODELS[model], {}, {}
    drawing = {"seq_len": training["seq_len"], "seed": training["seed"], "sources": sources}
    for split, count in (("train", measured["train_seqs"]), ("test", measured["num_seqs"])):
        tokens[split] = draw(training["corpus"], _tokenizer(), split, num_seqs=count, **drawing)
    found = change(_trained(architecture=architecture, **training), tokens["test"])
    found.vqkv_name = model
    sources[f"model {model}"] = fingerprint(found)
    label = {"model": model, "parameters": sum(p.numel() for p in found.parameters())}
    label |= _magnitudes(found, tokens["test"])
    return [label | row for row in _codec_rows(found, tokens, measured["prompt_len"], codebook_size)], sources


def normed_afterwards(
    name: str, changes: list[str], corpus: str, prompt_len: int, new_tokens: int, train_seqs: int, num_seqs: int,
    recall_seqs: int, codebook_size: int, seed: int, dtype: str, device: str,
):  # fmt: skip
    """The same of a trained Llama with norms put in afterwards, untrained since: a row per change and codec.
    ``recall``: its own, of 16 pairs, with everything exact."""
    texts = {"train": [train_seqs, prompt_len + new_tokens], "test": [num_seqs, prompt_len + new_tokens], "seed": seed}
    settings = {
        "who": texts | {"name": name, "corpus": corpus, "dtype": dtype, "device": device},
        "prompt_len": prompt_len,
        "recall_seqs": recall_seqs,
        "codebook_size": codebook_size,
    }
    return frame(*sweep(_changed_rows, [{"change": change} for change in changes], settings, "norms"))


def _changed_rows(change: str, who: dict, prompt_len: int, recall_seqs: int, codebook_size: int):
    found = subject(**who)
    model = CHANGED[change](found.model, found.test)
    hit = probes.recall(model, found.tokenizer, RECALL_PAIRS, num_seqs=recall_seqs, seed=who["seed"])
    label = {"model": f"{who['name'].split('/')[-1]}, {change}", "recall": hit} | _magnitudes(model, found.test)
    tokens = {"train": found.train, "test": found.test}
    return [label | row for row in _codec_rows(model, tokens, prompt_len, codebook_size)], found.sources


def _tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)


@per_process(maxsize=1)
def _trained(architecture: str, corpus: str, text_seqs: int, batch_size: int, seq_len: int, seed: int, device: str):
    """The model after one pass over the text."""
    text = draw(corpus, _tokenizer(), "train", seq_len, text_seqs, seed, {})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ARCHITECTURES[architecture]().to(device)
    optimizer, batches = adamw(model), text.split(batch_size)
    for step, batch in enumerate(batches):
        done = (step + 1) / len(batches)
        lr = LEARNING_RATE * min(done / WARMUP_SHARE, 1, max(0.01, (1 - done) / DECAY_SHARE))
        update(model, optimizer, next_token_loss(model, batch, batch), lr)
    return model.eval()


def _magnitudes(model, tokens: torch.Tensor) -> dict:
    """Of keys as attention reads them and of values."""
    largest = [
        torch.cat([x.abs().amax(dim=(0, 2, 3)) for x in role]) for role in capture(model, tokens, pre_rope=False)
    ]
    medians = {f"{role}_max": x.median().item() for role, x in zip(("key", "value"), largest, strict=True)}
    return medians | {"largest": torch.cat(largest).max().item()}


def codecs(prompt_len: int, codebook_size: int, seed: int) -> dict[str, presets.Preset]:
    """The source's plain codes, with and without its scales and its fallback, and one that stores nearly nothing."""
    shared = {"keyframe": prompt_len, "codebook_size": codebook_size, "seed": seed}
    return {
        "VQ of 8 values": presets.vq(8, **shared),
        "... without per-head scale": presets.vq(8, per_head_scale=False, **shared),
        "VQ of 8, threshold 0.10": presets.vqq(0.1, **shared),
        "VQ of 2 values": presets.vq(2, **shared),
        "2 codes of 8 values": presets.vq(8, **shared | {"codebook_size": 2}),
    }


def _codec_rows(model, tokens: dict, prompt_len: int, codebook_size: int) -> list[dict]:
    exact, test, rows = ExactPass(model), tokens["test"], []
    settings = {"prompt_len": prompt_len, "step_size": test.shape[1] - prompt_len, "batch_size": 16, "exact": exact}
    for name, preset in codecs(prompt_len, codebook_size, 0).items():
        fitted = calibrate(model, tokens["train"], preset, progress=False)
        row = evaluate(model, fitted, test, "snapshot", **settings)
        rows.append({"codec": name, "ratio": 16 / row["bits_per_value"]} | {key: row[key] for key in KEPT})
    return rows
