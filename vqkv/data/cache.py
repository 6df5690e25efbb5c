"""Token ids that were streamed once stay on the disk.

``~/.cache/vqkv/corpora/<hash>.bin`` (``VQKV_CACHE`` moves ``~/.cache/vqkv``) holds int64 token ids, and is there as a
whole or not at all.
"""

import hashlib
import json
from collections.abc import Iterable
from itertools import islice

import numpy as np
import torch
from filelock import FileLock
from tqdm import tqdm

from vqkv.errors import DataError
from vqkv.runtime.files import cache_folder, replacing

VERSION = 3  # of the tokens' layout and of the rule by which documents are dealt to splits
ITEM = 8  # bytes of a token id


def cached(description: dict, rows: Iterable[list[int]], seq_len: int, num_seqs: int | None) -> torch.Tensor:
    """Token ids (at most num_seqs, seq_len), int64, mapped from the file of this ``description`` (plain JSON); made
    first, from ``rows``, where there is none. Of several processes one makes it, and the others wait. Raises
    ``DataError`` if the folder cannot be written.
    """
    text = json.dumps(description | {"version": VERSION}, sort_keys=True)
    folder = cache_folder("corpora")
    file = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.bin"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            if not file.exists():
                with replacing(file) as out:
                    for row in tqdm(islice(rows, num_seqs), "tokenise", num_seqs, unit="window", disable=None):
                        out.write(np.array(row, dtype=np.int64).tobytes())
    except OSError as error:
        raise DataError(
            f"cannot keep tokens in {folder}: {error}. Make room there, or name another folder (VQKV_CACHE=...)"
        ) from error
    size = file.stat().st_size // ITEM
    flat = torch.from_file(str(file), False, size, dtype=torch.int64) if size else torch.empty(0, dtype=torch.int64)
    return flat.view(-1, seq_len)
