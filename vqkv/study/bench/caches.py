"""Caches that generation is measured with: transformers' caches as they are, and every published system as a preset."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.cache.meter import Report, tensor_bytes
from vqkv.calibration.calibrate import calibrate
from vqkv.errors import UnknownNameError
from vqkv.study.bench.roofline import DTYPES
from vqkv.study.peers import TransformersQuantized

GEOMETRIES = {
    "small": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 4096},
    "tiny": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024},
    "smollm2-135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                     "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152},
    "llama-3-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                   "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
}  # fmt: skip


@dataclass(frozen=True)
class Uncompressed:
    """transformers' ``DynamicCache``, in the model's dtype, where a fitted compressor would stand."""

    name: ClassVar[str] = "DynamicCache"
    side_bytes: ClassVar[int] = 0

    def new_cache(self, model) -> "MeteredDynamicCache":
        """The cache that ``generate`` uses when it is given none."""
        return MeteredDynamicCache(config=model.config)


class MeteredDynamicCache(DynamicCache):
    """transformers' cache with the byte meter's report: all of it is window."""

    def report(self) -> Report:
        """Bytes, measured from the storage of the tensors held now."""
        held = [x for layer in self.layers if layer.is_initialized for x in (layer.keys, layer.values)]
        values = sum(x.numel() for x in held)
        batch_size = len(held[0]) if held else 0
        return Report({"window": tensor_bytes(held)}, 0, 0, values, self.get_seq_length(), batch_size, 0, values)


@dataclass(frozen=True)
class KeepingDecoded:
    """A compressor whose caches keep all that they have decoded from one step to the next: the bytes come back, and the
    time goes."""

    compressor: Compressor

    @property
    def side_bytes(self) -> int:
        """The compressor's."""
        return self.compressor.side_bytes

    def new_cache(self, model):
        """An empty cache."""
        return self.compressor.new_cache(model, decoded_cache_bytes=2**40)


REFERENCE, PEER = "DynamicCache", "transformers quanto 4"
SHORT, MID, LONG = "best-short 1.8", "best-mid 1.8", "best-long 1.8"
KEPT = {f"{label}, decoded kept": label for label in ("quanto 4", SHORT, LONG)}
THEIRS: dict[str, Callable] = {
    REFERENCE: Uncompressed,
    PEER: partial(TransformersQuantized, "quanto", 4),
    "transformers quanto 2": partial(TransformersQuantized, "quanto", 2),
    "transformers hqq 4": partial(TransformersQuantized, "hqq", 4),
}


def ours(codebook_sizes: list[int], kmeans_iterations: int = 10, seed: int = 0) -> dict[str, presets.Preset]:
    """The presets by label, as they are published: with the sinks, window and flush block that each of them has.
    ``codebook_sizes`` (a row each) and ``kmeans_iterations`` are residual VQ's; ``seed`` starts whatever learns."""
    learning = {"kmeans_iterations": kmeans_iterations, "seed": seed}
    residual = {f"vqllm 8x{size}": presets.vqllm(8, size, **learning) for size in codebook_sizes}
    return {
        "quanto 4": presets.quanto(4),
        "quanto 2": presets.quanto(2),
        "hqq 4": presets.hqq(4),
        "kivi 2": presets.kivi(2),
        "kvquant 4": presets.kvquant(4, seed=seed),
        "higgs 4": presets.higgs(4),
        "higgs 2": presets.higgs(2),
        **residual,
        "rvq2": presets.rvq2(seed=seed),
        "vqq_product 0.3": presets.vqq_product(0.3, seed=seed),
        "aqua higgs 2": presets.aqua(presets.higgs(2)),
        SHORT: presets.best(1.8, context=1),
        MID: presets.best(1.8, context=8192),
        LONG: presets.best(1.8, context=2**30),
        "lossless": presets.lossless(),
        **{f"live {bits}": presets.live(bits, seed=seed) for bits in (2.25, 3.25)},
        "cachegen 2": presets.cachegen(2),
        "kvtc 1": presets.kvtc(1),
    }


def chosen(systems: list[str], codebook_sizes: list[int]) -> list[str]:
    """The labels of ``systems`` (all if there are none) in their order. Raises ``UnknownNameError`` for another one."""
    known = [*THEIRS, *ours(codebook_sizes), *KEPT]
    for label in systems:
        if label not in known:
            raise UnknownNameError("system", label, known)
    asked = (MID, "live", "cachegen", "kvtc")  # by pages 08 and 13 alone
    usual = [label for label in known if not label.startswith(asked)]
    return [label for label in known if label in (systems or usual)]


def contenders(
    model,
    tokens: torch.Tensor,
    systems: list[str],
    codebook_sizes: list[int],
    kmeans_iterations: int = 10,
    seed: int = 0,
    fit: Callable[[presets.Preset], Compressor] | None = None,
    seconds: dict | None = None,
) -> dict:
    """The ``systems`` by label (all if there are none), each with ``new_cache(model)``: transformers' caches, those
    aside whose packages are missing, and presets fitted to the model on ``tokens`` (num_seqs, seq_len), all at once,
    or by ``fit``; ``seconds`` is told how long that took. Raises ``UnknownNameError`` for another label."""
    fit = fit or partial(calibrate, model, tokens, batch_size=len(tokens), progress=False)
    wanted, labels = ours(codebook_sizes, kmeans_iterations, seed), set(chosen(systems, codebook_sizes))
    needed = labels | {KEPT[label] for label in labels if label in KEPT}
    found = _theirs(labels)
    mine = [(label, preset) for label, preset in wanted.items() if label in needed]
    for label, preset in tqdm(mine, desc="calibrate", leave=False, disable=None):
        start = time.perf_counter()
        found[label] = fit(preset)
        if seconds is not None:
            seconds[label] = time.perf_counter() - start
    found |= {label: KeepingDecoded(found[KEPT[label]]) for label in KEPT if label in labels}
    return {label: system for label, system in found.items() if label in labels}


def _theirs(chosen: set[str]) -> dict:
    found = {}
    for label in (label for label in THEIRS if label in chosen):
        try:
            found[label] = THEIRS[label]()
        except ImportError as error:
            print(f"skipped {label}: {error}")
    return found


def prepared(model, systems: list[str], codebook_sizes: list[int], seed: int = 0, seconds: dict | None = None) -> dict:
    """``contenders`` for a random model, fitted with little text: 16 tokens for each channel of all KV heads."""
    width = model.config.num_key_value_heads * model.config.head_dim
    tokens = random_tokens(model, 8, max(64, 2 * width, max(codebook_sizes) // 16), seed + 1)
    return contenders(model, tokens, systems, codebook_sizes, kmeans_iterations=1, seed=seed, seconds=seconds)


def random_llama(geometry: str, dtype: str = "float32", device: str = "cpu", seed: int = 0):
    """A Llama of random weights in evaluation mode; what a cache costs does not depend on what the model has learned.
    Raises ``UnknownNameError`` for a geometry that is not in ``GEOMETRIES`` or a dtype that is not in ``DTYPES``."""
    for kind, name, known in (("geometry", geometry, GEOMETRIES), ("dtype", dtype, DTYPES)):
        if name not in known:
            raise UnknownNameError(kind, name, known)
    config = LlamaConfig(**GEOMETRIES[geometry], max_position_embeddings=131072, tie_word_embeddings=True)
    with torch.random.fork_rng([device] if device != "cpu" else []), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    model.vqkv_name = f"random Llama, {geometry}, seed {seed}"
    return model.eval()


def random_tokens(model, batch_size: int, seq_len: int, seed: int = 0) -> torch.Tensor:
    """Token ids (batch_size, seq_len) on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch_size, seq_len), generator=generator).to(model.device)


def stored_bytes(cache, system) -> int:
    """Bytes of every tensor that a cache holds and its system (codebooks, predictors) does not."""
    return tensor_bytes(cache, system) - tensor_bytes(system)
