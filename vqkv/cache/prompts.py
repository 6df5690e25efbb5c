"""A folder of caches of prompts that come back: found by their longest common prefix, written turn by turn."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from vqkv.cache import saving
from vqkv.cache.compressed import CompressedCache
from vqkv.errors import DamageError, DataError
from vqkv.models.layers import plain
from vqkv.runtime.files import load_checked, save_checked, tensors_sha256

FORMAT, VERSION, SUFFIX = "vqkv-prompt", 2, ".prompt"


class PromptCache:
    """Saved caches of prompts in ``folder``, of one sequence each, by model (all weights and adapters as they are at
    each ``find`` and ``save``, dtype, RoPE), compressor and token ids.

    A prompt that goes on where a stored one ended (a chat's next turn) is stored as what is new, with the name of the
    file before. A file that cannot be read, goes on from one that is gone, or is of another version is a miss; one that
    is torn or altered is removed, too. Several processes may use one folder. Caches that come back keep
    ``decoded_cache_bytes`` of what they decode.
    """

    def __init__(self, folder, compressor, model, decoded_cache_bytes: int = 0):
        self.compressor, self.model, self.decoded_cache_bytes = compressor, plain(model), decoded_cache_bytes
        self._root, self._compressor = Path(folder), compressor.fingerprint

    @property
    def folder(self) -> Path:
        """That of the model as it is now."""
        about = [VERSION, saving.VERSION, self._compressor, saving.model_of(self.model)]
        return self._root / hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]

    def save(self, tokens: Tensor, cache: CompressedCache) -> None:
        """Keep ``cache``, which holds ``tokens``, (seq_len,) or (1, seq_len) integers. Raises ``DataError`` for a cache
        of other tokens, several sequences or another model, ``OSError`` for a full disk: what was stored stays."""
        tokens = tokens.reshape(-1).cpu().long()
        if cache.batch.size != 1 or cache.get_seq_length() != len(tokens):
            raise DataError(
                f"the cache holds {cache.batch.size} x {cache.get_seq_length()} tokens, not 1 x {len(tokens)}: pass "
                "the tokens that it was given, prompt and answer, of one sequence"
            )
        if cache.compressor is not self.compressor or cache.model() is not self.model:
            raise DataError("the cache was made with another compressor or model: use a PromptCache of these")
        header, folder = saving.header_of(cache), self.folder
        folder.mkdir(parents=True, exist_ok=True)
        before, start = self._before(folder, tokens.numpy(), cache)
        header |= {"format": FORMAT, "version": VERSION, "start": start, "before": before and before.name}
        header["stored"] = _digest(cache)
        tensors = {"prompt": tokens.to(torch.int32)} | dict(saving.tensors_of(cache.batch, start))
        path = folder / f"{hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:32]}{SUFFIX}"
        if before != path:
            save_checked(path, header, tensors)

    def find(self, tokens: Tensor) -> tuple[CompressedCache | None, int]:
        """Return the cache of the longest stored beginning of ``tokens``, and its number of tokens, at least one less
        than these, so that there is something to read; (None, 0) if none is stored."""
        wanted = tokens.reshape(-1)[:-1].cpu().numpy()
        counts = [(_common(prompt, wanted), path) for path, (prompt, _) in _listed(self.folder).items()]
        for count, path in sorted((each for each in counts if each[0]), reverse=True):
            with suppress(Exception):  # short of memory or files, removed meanwhile, ...: it may be read another time
                cache = self._load(path)
                cache.crop(count - cache.get_seq_length())
                return cache, count
        return None, 0

    def _before(self, folder: Path, tokens: np.ndarray, cache: CompressedCache) -> tuple[Path | None, int]:
        """Find the longest stored prompt with the cache's first packed tokens, and how many these are."""
        listed = _listed(folder)
        prefixes = [path for path, (prompt, _) in listed.items() if len(prompt) == _common(prompt, tokens)]
        for path in sorted(prefixes, key=lambda path: len(listed[path][0]), reverse=True):
            header, earliest = listed[path][1], path
            while earliest in listed and (name := listed[earliest][1]["before"]):
                earliest = path.with_name(name)
            count, holes = (header["groups"][0][name] for name in ("quantized", "holes"))
            cropped = holes or cache.batch.stores[0].holes
            if earliest in listed and count and not cropped and header["stored"] == _digest(cache, count):
                return path, count
        return None, 0

    def _load(self, path: Path) -> CompressedCache:
        """Load a file's cache, and of those that it goes on from what it has of them."""
        chain = [_read(path)]
        header, tensors = chain[0]
        while before := chain[-1][0]["before"]:
            chain.append(_read(path.with_name(before)))
        cache = CompressedCache(self.compressor, self.model, header["in_place"], self.decoded_cache_bytes)
        saving.fill(cache, header, tensors, [tensors for _, tensors in reversed(chain[1:])])
        if _digest(cache) != header["stored"]:
            raise DataError(f"{path} goes on from other tokens than those of {header['before']}")
        return cache


def _listed(folder: Path) -> dict[Path, tuple[np.ndarray, dict]]:
    """Return token ids and header of what is stored."""
    listed = {}
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(Exception), safe_open(path, "pt") as file:  # being removed, or damaged: a miss
            listed[path] = file.get_tensor("prompt").numpy().copy(), json.loads(file.metadata()["about"])
    return listed


def _read(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """Load a file; remove it if its bytes are not those that were written."""
    try:
        return load_checked(path, FORMAT, VERSION, "save it again")
    except DamageError:
        path.unlink(missing_ok=True)
        raise


def _common(prompt: np.ndarray, tokens: np.ndarray) -> int:
    """Count the first tokens that are the same."""
    shorter = min(len(prompt), len(tokens))
    return int(np.append(prompt[:shorter] != tokens[:shorter], True).argmax())


def _digest(cache: CompressedCache, count: int | None = None) -> str:
    """Hash the first ``count`` (all) packed tokens of every layer."""
    payloads = [store.payload for store in cache.batch.stores if store.payload is not None]
    parts = [payload if count in (None, payload.seq_len) else payload.tokens(0, count) for payload in payloads]
    return tensors_sha256((name, x) for part in parts for name, x in part.tensors.items())
