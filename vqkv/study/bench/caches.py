"""Caches that generation is measured with: transformers' caches as they are, and every published system as a preset."""

import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from vqkv import presets
from vqkv.cache.compressed import CompressedCache
from vqkv.cache.compressor import Compressor
from vqkv.calibration.calibrate import calibrate
from vqkv.errors import UnknownNameError
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

EVERYTHING = 2**40  # bytes of decoded tokens that a cache may keep


class Uncompressed:
    """transformers' ``DynamicCache`` where a fitted compressor would stand; stored as a safetensors file of 16 bits."""

    def new_cache(self, model) -> DynamicCache:
        """Return the cache that ``generate`` uses when it is given none."""
        return DynamicCache(config=model.config)

    def save(self, cache: DynamicCache, path: Path) -> None:
        """Write keys and values of every layer."""
        parts = {f"{i}.{name}": getattr(x, name) for i, x in enumerate(cache.layers) for name in ("keys", "values")}
        save_file({name: (x.half() if x.dtype == torch.float32 else x).contiguous() for name, x in parts.items()}, path)

    def load(self, path: Path, model) -> DynamicCache:
        """Return what was saved, in the model's dtype."""
        parts, cache = load_file(path), self.new_cache(model)
        for i in range(len(parts) // 2):
            cache.update(*(parts[f"{i}.{name}"].to(model.device, model.dtype) for name in ("keys", "values")), i)
        return cache


@dataclass(frozen=True)
class KeepingDecoded:
    """A compressor whose caches keep all that they have decoded: the bytes come back, and the time goes."""

    compressor: Compressor

    def new_cache(self, model) -> CompressedCache:
        """Return an empty cache."""
        return self.compressor.new_cache(model, decoded_cache_bytes=EVERYTHING)

    def save(self, cache: CompressedCache, path: Path) -> None:
        """``CompressedCache.save``."""
        cache.save(path)

    def load(self, path: Path, model) -> CompressedCache:
        """``CompressedCache.load``."""
        return CompressedCache.load(path, self.compressor, model, EVERYTHING)


REFERENCE, PEER = "DynamicCache", "transformers quanto 4"
SHORT, MID, LONG = "best-short 1.8", "best-mid 1.8", "best-long 1.8"
KEPT = {f"{label}, decoded kept": label for label in ("quanto 4", SHORT, LONG)}
THEIRS: dict[str, Callable] = {
    REFERENCE: Uncompressed,
    PEER: partial(TransformersQuantized, "quanto", 4),
    "transformers quanto 2": partial(TransformersQuantized, "quanto", 2),
    "transformers hqq 4": partial(TransformersQuantized, "hqq", 4),
}


def ours(kmeans_iterations: int = 10, seed: int = 0) -> dict[str, presets.Preset]:
    """Return the presets by label, as published. ``kmeans_iterations``: residual VQ's; ``seed``: of what learns."""
    learning = {"kmeans_iterations": kmeans_iterations, "seed": seed}
    return {
        "quanto 4": presets.quanto(4),
        "quanto 2": presets.quanto(2),
        "hqq 4": presets.hqq(4),
        "kivi 2": presets.kivi(2),
        "kvquant 4": presets.kvquant(4, seed=seed),
        "higgs 4": presets.higgs(4),
        "higgs 2": presets.higgs(2),
        **{f"vqllm 8x{size}": presets.vqllm(8, size, **learning) for size in (256, 2048)},
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


def chosen(systems: list[str]) -> list[str]:
    """List labels of ``systems`` (all if there are none) in their order. Raises ``UnknownNameError`` for another."""
    labels = [*THEIRS, *ours(), *KEPT]
    check_known("system", systems, labels)
    asked = (MID, "live", "cachegen", "kvtc")  # by pages 08 and 13 alone
    usual = [label for label in labels if not label.startswith(asked)]
    return [label for label in labels if label in (systems or usual)]


def contenders(
    fit: Callable[[presets.Preset], Compressor], systems: list[str], seed: int = 0, kmeans_iterations: int = 10
) -> dict:
    """List ``systems`` by label (all if there are none), each with ``new_cache(model)``: presets as ``fit`` fits them,
    and transformers' caches, or a warning for a missing package. Raises ``UnknownNameError`` for another label."""
    wanted, by_label = ours(kmeans_iterations, seed), {}
    fitted = cache(lambda label: fit(wanted[label]))
    for label in tqdm(chosen(systems), desc="calibrate", leave=False, disable=None):
        if label in THEIRS:
            try:
                by_label[label] = THEIRS[label]()
            except ImportError as error:
                warnings.warn(f"{label} is left out: {error}", stacklevel=2)
        else:
            by_label[label] = KeepingDecoded(fitted(KEPT[label])) if label in KEPT else fitted(label)
    return by_label


def prepared(model, systems: list[str], seed: int = 0) -> dict:
    """Return ``contenders`` for a random model, fitted with little text: 16 tokens for each channel of all KV heads."""
    width = model.config.num_key_value_heads * model.config.head_dim
    tokens = random_tokens(model, 8, max(256, 2 * width), seed + 1)
    fit = partial(calibrate, model, tokens, batch_size=len(tokens), progress=False)
    return contenders(fit, systems, seed, kmeans_iterations=1)


def random_llama(geometry: str, dtype: str = "float32", device: str = "cpu", seed: int = 0):
    """Make a Llama of random weights; costs do not depend on them. Raises ``UnknownNameError`` for others."""
    check_known("geometry", [geometry], GEOMETRIES)
    config = LlamaConfig(**GEOMETRIES[geometry], max_position_embeddings=131072, tie_word_embeddings=True)
    with torch.random.fork_rng([device] if device != "cpu" else []), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.vqkv_name = f"random Llama, {geometry}, seed {seed}"
    return model.eval()


def random_tokens(model, batch_size: int, seq_len: int, seed: int = 0) -> torch.Tensor:
    """Draw token ids (batch_size, seq_len) on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch_size, seq_len), generator=generator).to(model.device)


def check_known(kind: str, names: Iterable[str], valid: Collection[str]) -> None:
    """Raise ``UnknownNameError`` for a name that is not among the ``valid`` ones."""
    for name in names:
        if name not in valid:
            raise UnknownNameError(kind, name, valid)
