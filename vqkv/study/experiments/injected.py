"""Page 07: phenomena of larger models, put into a model without a change of its outputs."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import torch

from vqkv import presets
from vqkv.codecs.exact import Fp16
from vqkv.evaluation.exact import ExactPass
from vqkv.models.capture import capture
from vqkv.models.layers import kv_layers
from vqkv.models.metrics import token_kl
from vqkv.models.rope import rotations
from vqkv.study.experiments.common import bare, by_window
from vqkv.study.injection import inject, normed
from vqkv.study.metrics import code_perplexity, relative_mse
from vqkv.study.peers import TransformersQuantized
from vqkv.study.shared import per_process
from vqkv.study.subject import Subject
from vqkv.study.sweep import experiment

PAIRS = 4  # neighbouring RoPE pairs of a head that are outliers
GROUPINGS = {"contiguous": 16, "strided": 16, "contiguous, groups of 32": 32, "strided, groups of 32": 32}
KEYFRAME = 64  # tokens that the framework divides by one maximum
MEASURED = ("bits_per_value", "side_bytes", "kl_mean", "kl_low", "kl_high", "kl_each", "kl_floor", "top1", "ppl",
            "ppl_exact")  # fmt: skip
BY_HEAD = ("quiet_error", "quiet_codes", "quiet_effective", "quiet_worst")


@dataclass(frozen=True)
class InjectedSubject(Subject):
    """A subject whose model has a phenomenon in this size."""

    phenomenon: str = ""
    size: float = 0.0

    def _load(self):
        _, tokenizer, _ = super()._load()
        model, exact = _injected(subject=self)
        return model, tokenizer, exact


@per_process(maxsize=1)
def _injected(subject: InjectedSubject):
    unchanged = subject.changed(kind=Subject)
    model = PHENOMENA[subject.phenomenon][0](unchanged, subject.size) if subject.size else unchanged.model
    return model, ExactPass(model)


def outlier_channels(subject: Subject, size: float):
    """Return keys times ``size`` in ``PAIRS`` neighbouring RoPE pairs of each head, drawn by the subject's seed."""
    layers, generator = kv_layers(subject.model), torch.Generator().manual_seed(subject.seed)
    factors = torch.ones(len(layers), *layers[0].shape[:2])
    for rotation, heads in zip(filter(None, rotations(subject.model)), factors, strict=True):
        for head in heads:
            start = int(torch.randint(len(rotation.first) - PAIRS + 1, (1,), generator=generator))
            for half in (rotation.first, rotation.second):
                head[half[start : start + PAIRS]] = size
    return inject(subject.model, keys=factors)


def loud_heads(subject: Subject, size: float):
    """Return keys and values of one head of each layer times ``size``."""
    factors = torch.where(_loud(subject.model), size, 1.0)[:, :, None]
    return inject(subject.model, keys=factors, values=factors)


def key_bias(subject: Subject, size: float):
    """Return keys with ``size`` added to one channel of each head, of the RoPE pair that rotates most slowly."""
    layers = kv_layers(subject.model)
    bias = torch.zeros(len(layers), *layers[0].shape[:2])
    for rotation, layer in zip(filter(None, rotations(subject.model)), bias, strict=True):
        layer[:, int(rotation.first[rotation.angle.abs().argmin()])] = size
    return inject(subject.model, key_bias=bias)


def largest_magnitude(subject: Subject, size: float):
    """Return keys and values of each layer scaled so that the largest of the held-out text is ``size``."""
    roles = capture(subject.model, subject.test, pre_rope=False)
    return inject(subject.model, *(torch.stack([size / x.abs().max() for x in role])[:, None, None] for role in roles))


def _loud(model) -> torch.Tensor:
    """Return (num_layers, num_kv_heads): one head of each layer, in turn."""
    layers = kv_layers(model)
    return torch.arange(layers[0].num_kv_heads) == torch.arange(len(layers))[:, None] % layers[0].num_kv_heads


def _keys_only(codebook_size: int, seed: int) -> dict[str, presets.Preset]:
    """Leave values in 16 bits."""
    shared = {"codebook_size": codebook_size, "kmeans_iterations": 4, "seed": seed}
    preset_of = {
        f"vqllm {label}": presets.vqllm(size // 4, group_size=size, key_grouping=label.split(",")[0], **shared)
        for label, size in GROUPINGS.items()
    }
    preset_of |= {"kivi 2": presets.kivi(2), "kvquant 2": presets.kvquant(2), "quanto 4": presets.quanto(4)}
    preset_of |= {"higgs 2": presets.higgs(2), "grid 2, not rotated": presets.crossed("grid", 2, rotation="none")}
    preset_of |= {"Fisher-weighted PCA 2": presets.crossed("uniform", 2, rotation="fisher_pca", merged=False)}
    return {label: dataclasses.replace(preset, value_codec=Fp16) for label, preset in preset_of.items()}


def _framework(codebook_size: int, seed: int) -> dict[str, presets.Preset]:
    shared = {"codebook_size": codebook_size, "seed": seed, "block_tokens": KEYFRAME}
    return {
        "vq unscaled": presets.vq(8, per_head_scale=False, **shared),
        "vq": presets.vq(8, **shared),
        "vqq 0.1": presets.vqq(0.1, **shared),
    }


def _biased(codebook_size: int, seed: int) -> dict[str, presets.Preset | TransformersQuantized]:
    return {
        "quanto 4": presets.quanto(4),
        "transformers int4": TransformersQuantized("quanto", 4),
        "kivi 2": presets.kivi(2),
        "kvquant 4": presets.kvquant(4, seed=seed),
        "higgs 4": presets.higgs(4),
        "higgs 4, mean kept": presets.crossed("grid", 4, rotation="hadamard", mean=False),
        "turboquant 4": presets.turboquant(4),
        "vqllm": presets.vqllm(4, codebook_size, 16, kmeans_iterations=4, seed=seed),
        "live 2.25": presets.live(2.25),
    }


PHENOMENA: dict[str, tuple[Callable, Callable]] = {  # what is done to a model, and what is tried on it
    "outlier channels": (outlier_channels, _keys_only),
    "loud heads": (loud_heads, _framework),
    "key bias": (key_bias, _biased),
    "largest magnitude": (largest_magnitude, _framework),
    "keys normed": (lambda subject, _: normed(subject.model, subject.train, ["key"]), _framework),
    "keys and values normed": (lambda subject, _: normed(subject.model, subject.train, ["key", "value"]), _framework),
}


def _cases(subject: Subject, sizes: dict[str, list[float]], seeds: list[int], codebook_size: int) -> list[dict]:
    return [
        {"subject": each, "phenomenon": phenomenon, "size": size, "system": system}
        for phenomenon in sizes
        for size in sizes[phenomenon]
        for each in subject.each(seed=seeds)
        for system in PHENOMENA[phenomenon][1](codebook_size, each.seed)
        if each.seed == seeds[0] or system.startswith("vq")
    ]


@experiment(_cases)
def injected(subject: Subject, phenomenon: str, size: float, system: str, codebook_size: int, chunk_size: int) -> dict:
    """Put every phenomenon of ``sizes`` into the model and calibrate its systems there: a row each and per seed.

    All but norms leave the model's outputs as they were. ``chunked`` protocol, KL to the changed model's own cache,
    four sinks, no window. A seed draws text, outlier channels and k-means' start. ``injection_kl``: what the injection
    does; ``warned``: whether ``calibrate`` said that a layer is destroyed. Of loud heads also ``by_head``.
    """
    changed = subject.changed(kind=InjectedSubject, phenomenon=phenomenon, size=size)
    damage = token_kl(subject.exact(subject.test)[0], changed.exact(subject.test)[0]).mean().item()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compressor = PHENOMENA[phenomenon][1](codebook_size, subject.seed)[system]
        if isinstance(compressor, presets.Preset):  # other people's caches stay as they are
            preset = dataclasses.replace(bare(compressor), sink_tokens=4)
            compressor = changed.calibrated(preset, changed.train_size[0])
    row = by_window(changed, compressor, chunk_size=chunk_size, reconstruction=False)
    label = {"model": subject.name, "phenomenon": phenomenon, "size": size, "system": system}
    label |= {"seed": subject.seed} | {name: row[name] for name in MEASURED} | {"injection_kl": damage}
    label["warned"] = any("of the variance of" in str(warning.message) for warning in said)
    loud = phenomenon == "loud heads"
    return label | (by_head(changed, compressor) if loud else dict.fromkeys(BY_HEAD, math.nan))


def by_head(subject: Subject, compressor) -> dict[str, float]:
    """Measure the quiet heads' relative squared error, the codes that they use at all and in effect (2 to the entropy;
    NaN where blocks may stay exact), and the largest error of a value over its head's maximum in the keyframe."""
    keys, values = subject.exact.keys_and_values(subject.test, pre_rope=compressor.settings.pre_rope)
    loud, rows = _loud(subject.model), []
    for layer, pair in enumerate(zip(keys, values, strict=True)):
        read = compressor.reconstruct(layer, *pair)
        for x, x_hat, codec in zip(pair, read, compressor.codecs[layer], strict=True):
            x = x[:, :, : x_hat.shape[2]].float()
            quiet = [slice(head, head + 1) for head, is_loud in enumerate(loud[layer].tolist()) if not is_loud]
            rows += [_head(x[:, head], x_hat[:, head], codec) for head in quiet]
    table = pd.DataFrame(rows)
    means = {f"quiet_{name}": table[name].mean() for name in ("error", "codes", "effective")}
    return means | {"quiet_worst": table["worst"].max()}


def _head(x: torch.Tensor, x_hat: torch.Tensor, codec) -> dict[str, float]:
    largest, error = (y.abs().unflatten(2, (-1, KEYFRAME)).amax(dim=(3, 4)) for y in (x, x - x_hat))
    row = {"error": relative_mse(x, x_hat), "worst": (error / largest).max().item()}
    if not hasattr(codec.quantizer, "usage"):
        return row | dict.fromkeys(("codes", "effective"), math.nan)
    counts = codec.quantizer.usage(codec.vectors(x))[0]
    return row | {"codes": int((counts > 0).sum()), "effective": code_perplexity(counts).item()}
