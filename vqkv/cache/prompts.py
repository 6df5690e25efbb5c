"""A folder of caches of prompts that come back: found by their longest common prefix, written turn by turn."""

import hashlib
import itertools
import json
import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from vqkv.cache import saving
from vqkv.cache.compressed import CompressedCache
from vqkv.errors import DataError
from vqkv.runtime.checks import check_whole
from vqkv.runtime.files import load_checked, save_checked, tensors_sha256

FORMAT, VERSION, SUFFIX = "vqkv-prompt", 1, ".prompt"
MOST = 1 << 62
TICK = 0.001  # seconds: a file that others go on from is newer than they, and goes after them


class PromptCache:
    """Saved caches of prompts in ``folder``, of one sequence each, by model (weights, dtype, RoPE), compressor and
    token ids.

    A prompt that goes on where a stored one ended (a chat's next turn) is stored as what is new, beside the name of the
    file before. ``max_bytes``: what this model's and compressor's files may take; the least recently used go first. A
    file that is torn, altered, just removed or of another version is a miss; several processes may use one folder.
    Caches that come back keep ``decoded_cache_bytes`` of what they decode.
    """

    def __init__(self, folder, compressor, model, max_bytes: int = MOST, decoded_cache_bytes: int = 0):
        check_whole("max_bytes", max_bytes, 0, MOST)
        self.compressor, self.model, self.max_bytes = compressor, model, max_bytes
        self.decoded_cache_bytes = decoded_cache_bytes
        made_for = json.dumps([VERSION, saving.VERSION, saving.made_for(compressor, model)], sort_keys=True)
        self.folder = Path(folder) / hashlib.sha256(made_for.encode()).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, tokens: Tensor, cache: CompressedCache) -> None:
        """Keep ``cache``, which holds ``tokens``, (seq_len,) or (1, seq_len) integers. Raises ``DataError`` for a cache
        of other tokens, several sequences or another model, ``OSError`` for a full disk: what was stored stays."""
        tokens = _flat(tokens)
        if cache.batch.size != 1 or cache.get_seq_length() != len(tokens):
            raise DataError(
                f"the cache holds {cache.batch.size} x {cache.get_seq_length()} tokens, not 1 x {len(tokens)}: pass "
                "the tokens that it was given, prompt and answer, of one sequence"
            )
        if cache.compressor is not self.compressor or cache.model() is not self.model:
            raise DataError("the cache was made with another compressor or model: use a PromptCache of these")
        header = saving.header_of(cache)
        before, start = self._before(tokens, cache)
        header |= {"format": FORMAT, "version": VERSION, "start": start, "before": before and before.name}
        header["stored"] = _stored(cache, None)
        tensors = {"prompt": tokens.to(torch.int32)} | dict(saving.tensors_of(cache.batch, start))
        name = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:32]
        if before is None or before.stem != name:
            save_checked(self.folder / f"{name}{SUFFIX}", header, tensors)
        self._used(self.folder / f"{name}{SUFFIX}")
        self._evict()

    def find(self, tokens: Tensor) -> tuple[CompressedCache | None, int]:
        """The cache of the longest stored beginning of ``tokens``, and its number of tokens, at least one less than
        these, so that there is something left to read; (None, 0) if none is stored."""
        tokens = _flat(tokens)
        known = []
        for path, prompt in self._prompts():
            shorter = min(len(prompt), len(tokens) - 1)
            known.append((int((prompt[:shorter] == tokens[:shorter]).long().cumprod(0).sum()), path))
        for count, path in sorted(known, key=lambda each: each[0], reverse=True):
            if count < 1:
                break
            try:
                cache = self._load(path)
                cache.crop(count - cache.get_seq_length())
            except Exception:  # of whatever a damaged or half removed file makes
                path.unlink(missing_ok=True)
                continue
            self._used(path)
            return cache, count
        return None, 0

    def _prompts(self) -> list[tuple[Path, Tensor]]:
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with suppress(Exception), safe_open(path, "pt") as file:  # being removed, or damaged: a miss
                found.append((path, file.get_tensor("prompt").long()))
        return found

    def _before(self, tokens: Tensor, cache: CompressedCache) -> tuple[Path | None, int]:
        """The longest stored prompt with the cache's first packed tokens, and how many these are."""
        fitting = [(len(x), path) for path, x in self._prompts() if len(x) <= len(tokens) and x.equal(tokens[: len(x)])]
        for _, path in sorted(fitting, key=lambda each: each[0], reverse=True):
            with suppress(Exception):
                about = self._about(path)
                (group,) = about["groups"]
                plain = not group["holes"] and not cache.batch.groups[0].all_stores[0].holes
                if plain and group["quantized"] and about["stored"] == _stored(cache, group["quantized"]):
                    return path, group["quantized"]
        return None, 0

    def _about(self, path: Path) -> dict:
        return load_checked(path, FORMAT, VERSION, "save it again")[0]

    def _load(self, path: Path) -> CompressedCache:
        """A file's cache, and of those that it goes on from what it has of them."""
        chain = [load_checked(path, FORMAT, VERSION, "save it again")]
        while before := chain[-1][0]["before"]:
            chain.append(load_checked(self.folder / before, FORMAT, VERSION, "save it again"))
        cache = CompressedCache(self.compressor, self.model, chain[0][0]["in_place"], self.decoded_cache_bytes)
        for (later, _), (earlier, _) in itertools.pairwise(chain):
            if earlier["groups"][0]["quantized"] != later["start"]:
                raise DataError(f"{path} goes on from another file than {later['before']}")
        prompt, *_ = [tensors.pop("prompt") for _, tensors in chain]
        saving.fill(cache, chain[0][0], [tensors for _, tensors in reversed(chain)])
        parts = {store.parts for store in cache.batch.groups[0].all_stores}
        if len(parts) > 1 or sum(*parts) != len(prompt):
            raise DataError(f"{path} holds {parts} tokens, of a prompt of {len(prompt)}")
        if _stored(cache, None) != chain[0][0]["stored"]:
            raise DataError(f"{path} goes on from other tokens than those of {chain[0][0]['before']}")
        return cache

    def _used(self, path: Path) -> None:
        """Note that a file and those that it goes on from were used now."""
        now = time.time()
        for depth in itertools.count():
            try:
                os.utime(path, (now + depth * TICK,) * 2)
                before = self._about(path)["before"]
            except Exception:  # removed or damaged meanwhile
                return
            if not before:
                return
            path = self.folder / before

    def _evict(self) -> None:
        files = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):
                about = path.stat()
                files.append((about.st_mtime, about.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def _flat(tokens: Tensor) -> Tensor:
    if tokens.dtype.is_floating_point or tokens.shape[:-1] not in ((), (1,)) or not tokens.numel():
        raise DataError(
            f"tokens of shape {tuple(tokens.shape)}, {tokens.dtype}: pass integers (seq_len,) of a sequence"
        )
    return tokens.detach().reshape(-1).cpu().long()


def _stored(cache: CompressedCache, count: int | None) -> str:
    """Digest of the first ``count`` (all) packed tokens of every layer."""
    stores = [store for group in cache.batch.groups for store in group.all_stores]
    payloads = [store.payload for store in stores if store.payload is not None]
    parts = [payload if count in (None, payload.seq_len) else payload.tokens(0, count) for payload in payloads]
    return tensors_sha256((name, x) for part in parts for name, x in part.tensors.items())
