"""Token ids that were streamed once stay on the disk, and a stream that was cut off goes on from its last piece.

``~/.cache/vqkv/corpora/<hash>/`` (``VQKV_CACHE`` moves ``~/.cache/vqkv``) holds ``tokens.bin``, int64 token ids, and
``state.json``: what the corpus is, how many windows are there, their sha256, and the position to go on from. Each piece
is on the disk before the state that counts it, so that a process may be killed at any moment.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from vqkv.errors import DataError
from vqkv.files import replacing

VERSION = 1
ITEM = 8  # bytes of a token id
CHUNK = 1 << 20  # bytes read at a time to be checked
Pieces = Callable[[dict | None], Iterator[tuple[list[list[int]], dict]]]


def cache_folder() -> Path:
    """``VQKV_CACHE`` in the environment, else ``~/.cache/vqkv``."""
    return Path(os.environ.get("VQKV_CACHE") or "~/.cache/vqkv").expanduser()


def corpus_folder(description: dict) -> Path:
    """Where the corpus of this description (plain JSON) lies, or will."""
    text = json.dumps(description | {"version": VERSION}, sort_keys=True)
    return cache_folder() / "corpora" / hashlib.sha256(text.encode()).hexdigest()[:32]


def cached(description: dict, pieces: Pieces, seq_len: int, num_seqs: int | None, label: str = "") -> torch.Tensor:
    """Token ids (at most num_seqs, seq_len), int64, mapped from the cache's file; made, or made whole, first.

    ``pieces(position)`` yields rows of ``seq_len`` ids and the position after them, from a position on. A file that is
    not what its state says is made anew, with a line on stderr. Several processes may ask for the same corpus at once:
    one makes it, the others wait. Raises ``DataError`` if the folder cannot be written.
    """
    folder = corpus_folder(description)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock", label):
            return _TokenFile(folder, description, seq_len, label).read(pieces, num_seqs)
    except OSError as error:
        raise DataError(
            f"cannot keep tokens in {folder}: {error}. Make room there, or name another folder (VQKV_CACHE=...)"
        ) from error


def _locked(path: Path, label: str) -> FileLock:
    """Holds a lock that ends with the process, however that ends."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print(f"vqkv: another process is tokenising {label}; waiting for it", file=sys.stderr)
        return lock.acquire()


class _TokenFile:
    """``tokens.bin`` and ``state.json`` of one folder, whose lock is held."""

    def __init__(self, folder: Path, description: dict, seq_len: int, label: str):
        self.tokens, self.states = folder / "tokens.bin", folder / "state.json"
        self.description, self.seq_len, self.label = description, seq_len, label
        self.hasher = hashlib.sha256()

    def read(self, pieces: Pieces, num_seqs: int | None) -> torch.Tensor:
        state = self._checked_state()
        if not state["finished"]:
            state = self._make(pieces, num_seqs, state)
        count = state["windows"]
        size = count * self.seq_len
        flat = torch.from_file(str(self.tokens), False, size, dtype=torch.int64) if size else torch.empty(0).long()
        return flat.view(count, self.seq_len)

    def _make(self, pieces: Pieces, num_seqs: int | None, state: dict) -> dict:
        bar = tqdm(desc=f"tokenise {self.label}", unit="window", total=num_seqs, initial=state["windows"], disable=None)
        with bar, open(self.tokens, "r+b") as file:
            file.seek(0, os.SEEK_END)
            for rows, position in pieces(state["position"]):
                rows = rows[: None if num_seqs is None else num_seqs - state["windows"]]
                self._append(file, rows)
                bar.update(len(rows))
                windows = state["windows"] + len(rows)
                state = state | {"windows": windows, "position": position, "sha256": self.hasher.hexdigest()}
                if windows == num_seqs:
                    break
                self._write_state(state)
        state |= {"finished": True, "position": None}
        self._write_state(state)
        return state

    def _append(self, file, rows: list[list[int]]) -> None:
        data = np.array(rows, dtype=np.int64).tobytes()
        self.hasher.update(data)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

    def _checked_state(self) -> dict:
        """The state on the disk, with what it does not count cut off ``tokens.bin``; a new one if there is none, or
        it does not fit."""
        state, known = self._read_state(), self.states.is_file()
        if state is not None and self._fits(state):
            return state
        if known:
            print(f"vqkv: cached tokens of {self.label} are damaged and made anew ({self.tokens})", file=sys.stderr)
        self.states.unlink(missing_ok=True)
        self.tokens.unlink(missing_ok=True)  # whoever has mapped the old file keeps it
        self.tokens.touch()
        self.hasher = hashlib.sha256()
        empty = self.hasher.hexdigest()
        return {"finished": False, "windows": 0, "sha256": empty, "position": None, "description": self.description}

    def _read_state(self) -> dict | None:
        try:
            record = json.loads(self.states.read_text(encoding="utf-8"))
            body = record["body"]
            whole = record["sha256"] == _sha256(body) and body["description"] == self.description
            return body if whole else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _fits(self, state: dict) -> bool:
        """Whether ``tokens.bin`` begins with what was counted; leaves the hasher after it."""
        size = state["windows"] * self.seq_len * ITEM
        found = self.tokens.stat().st_size if self.tokens.is_file() else -1
        if found < size or (state["finished"] and found != size):
            return False
        with open(self.tokens, "rb") as file:
            for start in range(0, size, CHUNK):
                self.hasher.update(file.read(min(CHUNK, size - start)))
        if self.hasher.hexdigest() != state["sha256"]:
            return False
        if found > size:
            os.truncate(self.tokens, size)
        return True

    def _write_state(self, body: dict) -> None:
        with replacing(self.states) as file:
            file.write(json.dumps({"body": body, "sha256": _sha256(body)}).encode())


def _sha256(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
