"""Corpus name -> token ids.

Bundled corpora are text that every installation has: ``python`` (the source of the standard library and of the pinned
packages; ``python-stdlib`` and ``python-packages`` are its halves) and ``prose`` (their documentation and docstrings).
Local text works too, and so does any data set that the ``datasets`` library can load.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from tqdm import tqdm

from vqkv.data import bundled
from vqkv.data.bundled import CORPORA
from vqkv.data.hub import HUB_CORPORA, HubCorpus, find, texts_of
from vqkv.data.local import local_documents, text_files
from vqkv.data.splits import SPLITS
from vqkv.data.windows import PACKINGS, tokenizer_hash
from vqkv.errors import DataError, UnknownNameError
from vqkv.runtime.files import cache_folder, raw_bytes, replacing

PAIR = re.compile(r"train=(?P<train>[^,]+),test=(?P<test>[^,]+)")
VERSION = 3  # of the layout of tokens on the disk, and of the rule by which documents are dealt to splits


def load_corpus(
    name: str, tokenizer, split: str = "train", seq_len: int = 512, num_seqs: int = 64, seed: int = 0
) -> torch.Tensor:
    """Load token ids: ``num_seqs`` windows of ``seq_len`` tokens.

    ``name``: one of ``CORPORA`` (``python``), a local text file or folder, a name in ``HUB_CORPORA`` (``slimpajama``),
    such a name with a local folder in that data set's layout (``slimpajama@/data/slim``), or any other data set on the
    hub with a ``text`` column; or two of these, one to learn from and one to choose and report on:
    ``train=redpajama,test=wikitext``. ``split``: ``train``, ``validation`` or ``test``. How documents become windows:

    - ``windows`` (bundled text): a document gives one window at a random offset, so that a few windows already span
      many documents; short documents are packed together. Each window starts with BOS.
    - ``packed`` (local text; SlimPajama, RedPajama, PG-19 and what else is on the hub): shuffled documents, each
      followed by EOS, cut into consecutive windows that start with BOS (residual VQ paper, section 4).
    - ``joined`` (WikiText): the rows of the split in their own order, joined by blank lines and cut into consecutive
      windows; no EOS, and BOS only where the tokenizer begins the text with it (AQUA-KV's perplexity).

    Tokens of ``datasets`` are kept in ``~/.cache/vqkv`` (``VQKV_CACHE``). Returns an int64 tensor (num_seqs, seq_len).
    Raises ``UnknownNameError`` for an unknown corpus or split, and ``DataError`` if the corpus cannot be read or holds
    fewer windows than asked for.
    """
    if type(seq_len) is not int or type(num_seqs) is not int or seq_len < 2 or num_seqs < 1:
        raise DataError(f"seq_len {seq_len} and num_seqs {num_seqs}: need at least 2 tokens and 1 sequence")
    _check_apart(name)
    name = of_split(name, split)
    texts, corpus = documents(name, split, seed), _find(name)
    if isinstance(corpus, HubCorpus):
        rng = random.Random(f"{corpus.name}/{split}/{seed}")
        rows = islice(PACKINGS[corpus.packing](texts, tokenizer, seq_len, rng), num_seqs)
        about = {"split": split, "seq_len": seq_len, "num_seqs": num_seqs, "tokenizer": tokenizer_hash(tokenizer)}
        about |= {"seed": 0 if corpus.packing == "joined" else seed}  # in order nothing is drawn
        tokens = _kept(corpus.describe() | about, rows, seq_len, num_seqs)
    else:
        cut = PACKINGS["windows" if corpus is None else "packed"]
        windows = cut(texts, tokenizer, seq_len, random.Random(f"{name}/{split}/{seed}"))
        tokens = torch.tensor([*islice(windows, num_seqs)], dtype=torch.long)
    if len(tokens) < num_seqs:
        raise DataError(
            f"corpus {name!r} ({split}) holds only {len(tokens)} windows of {seq_len} tokens, not {num_seqs}: "
            "ask for fewer or shorter sequences, or name a larger corpus"
        )
    return tokens


def documents(name: str, split: str, seed: int = 0) -> Iterator[str]:
    """Yield the texts of one split in an order fixed by ``seed``; of local text, a repeated one only once."""
    if split not in SPLITS:
        raise UnknownNameError("split", split, SPLITS)
    name = of_split(name, split)
    corpus = _find(name)
    if isinstance(corpus, HubCorpus):
        return texts_of(corpus, split, seed)
    return bundled.documents(name, split, seed) if corpus is None else local_documents(corpus, split, seed)


def of_split(name: str, split: str) -> str:
    """Return the corpus of one split: ``train=A,test=B`` names that of ``train`` and that of the other two."""
    match = PAIR.fullmatch(str(name))
    return match["train" if split == "train" else "test"] if match else name


def fingerprint(tokens: torch.Tensor) -> str:
    """Name these token ids in sixteen hex digits, for provenance."""
    return hashlib.sha256(raw_bytes(tokens.to(torch.int64))).hexdigest()[:16]


def _find(name: str) -> HubCorpus | list[tuple[str, Path]] | None:
    """A data set, the files of local text, or None for a bundled corpus."""
    if not str(name).strip():
        raise UnknownNameError("corpus", name, [*CORPORA, *HUB_CORPORA])
    if name in CORPORA:
        return None
    files = None if name in HUB_CORPORA else text_files(name)
    return find(name) if files is None else files


def _check_apart(name: str) -> None:
    """Raise ``DataError`` if one text is to be learned from and another, which has the same documents among its own, to
    be reported on. (Data sets are streamed, and cannot be compared beforehand; nor are shifted copies seen.)"""
    match = PAIR.fullmatch(str(name))
    if match is None or match["train"] == match["test"]:
        return
    if any(isinstance(_find(name), HubCorpus) for name in match.groups()):
        return
    learned, held = (set(documents(match[key], split)) for key, split in (("train", "train"), ("test", "test")))
    if shared := learned & (held | set(documents(match["test"], "validation"))):
        raise DataError(
            f"{len(shared)} documents of {match['test']!r} are also in {match['train']!r}, the first begins "
            f"{min(shared)[:40]!r}: take them out of one, or name one corpus for all splits, which are then disjoint"
        )


def _kept(description: dict, rows: Iterable[list[int]], seq_len: int, num_seqs: int) -> torch.Tensor:
    """Token ids (at most num_seqs, seq_len), int64, mapped from the file of this ``description`` (plain JSON) in
    ``~/.cache/vqkv/corpora``; made first, from ``rows``, where there is none. Of several processes one makes it, and
    the others wait."""
    text = json.dumps(description | {"version": VERSION}, sort_keys=True)
    file = cache_folder("corpora") / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.bin"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            if not file.exists():
                with replacing(file) as out:
                    for row in tqdm(rows, "tokenise", num_seqs, unit="window", disable=None):
                        out.write(np.array(row, dtype=np.int64).tobytes())
    except OSError as error:
        raise DataError(
            f"cannot keep tokens in {file.parent}: {error}. Make room there, or name another folder (VQKV_CACHE=...)"
        ) from error
    size = file.stat().st_size // 8  # bytes of a token id
    flat = torch.from_file(str(file), False, size, dtype=torch.int64) if size else torch.empty(0, dtype=torch.int64)
    return flat.view(-1, seq_len)
