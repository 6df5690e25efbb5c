"""Corpus name -> token ids.

Bundled corpora are text that every installation has: ``python`` (the source of the standard library and of the pinned
packages; ``python-stdlib`` and ``python-packages`` are its halves) and ``prose`` (their documentation and docstrings).
Local text works too, and so does any data set that the ``datasets`` library can load.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from vqkv.data import bundled
from vqkv.data.bundled import CORPORA
from vqkv.data.cache import cached
from vqkv.data.hub import HUB_CORPORA, HubCorpus, find, texts
from vqkv.data.local import local_documents, text_files
from vqkv.data.splits import SPLITS
from vqkv.data.windows import PACKINGS, tokenizer_hash
from vqkv.errors import DataError, UnknownNameError
from vqkv.runtime.files import raw_bytes

__all__ = [
    "CORPORA", "HUB_CORPORA", "PACKINGS", "SPLITS", "HubCorpus", "documents", "fingerprint",
    "load_corpus", "of_split",
]  # fmt: skip

PAIR = re.compile(r"train=(?P<train>[^,]+),test=(?P<test>[^,]+)")


def load_corpus(
    name: str,
    tokenizer,
    split: str = "train",
    seq_len: int = 512,
    num_seqs: int | None = 64,
    seed: int = 0,
    packing: str | None = None,
    num_docs: int | None = None,
) -> torch.Tensor:
    """Token ids of ``num_seqs`` windows of ``seq_len`` tokens.

    ``name``: one of ``CORPORA`` (``python``), a local text file or folder, a name in ``HUB_CORPORA`` (``slimpajama``),
    such a name with a local folder in that data set's layout (``slimpajama@/data/slim``), or any other data set on the
    hub with a ``text`` column; or two of these, one to learn from and one to choose and report on:
    ``train=redpajama,test=wikitext``. ``split``: ``train``, ``validation`` or ``test``. ``num_docs``: documents to use
    at most. ``num_seqs`` None: as many windows as there are, or as the source of a data set in ``HUB_CORPORA`` used.
    ``packing``, by default that of the corpus:

    - ``windows`` (bundled and local text): a document gives one window at a random offset, so that a few windows
      already span many documents; short documents are packed together. Each window starts with BOS.
    - ``packed`` (SlimPajama, RedPajama, PG-19 and what else is on the hub): whole shuffled documents, each followed by
      EOS, cut into consecutive windows that start with BOS (residual VQ paper, section 4).
    - ``joined`` (WikiText): the rows of the split in their own order, joined by blank lines and cut into consecutive
      windows; no EOS, and BOS only where the tokenizer begins the whole text with it (AQUA-KV's perplexity).

    Tokens of ``datasets`` are kept in ``~/.cache/vqkv`` (``VQKV_CACHE``). Returns an int64 tensor (num_seqs, seq_len).
    Raises ``UnknownNameError`` for an unknown corpus, split or packing, and ``DataError`` if the corpus cannot be read
    or holds fewer windows than asked for.
    """
    _check(split, seq_len, num_seqs, num_docs, packing)
    _check_apart(name)
    name = of_split(name, split)
    corpus = _find(name)
    if isinstance(corpus, HubCorpus):
        if num_seqs is None and num_docs is None:
            num_seqs, num_docs = corpus.num_seqs, corpus.num_docs
        tokens = _streamed(corpus, tokenizer, split, seq_len, num_seqs, seed, packing or corpus.packing, num_docs)
    else:
        if packing == "joined":
            raise DataError("packing 'joined' is for data sets of rows in order, such as wikitext@FOLDER: use 'packed'")
        found = islice(documents(name, split, seed), num_docs)
        cut = PACKINGS[packing or "windows"]
        rows = cut(found, tokenizer, seq_len, random.Random(f"{name}/{split}/{seed}"))
        tokens = torch.tensor([*islice(rows, num_seqs)], dtype=torch.long)
    if not len(tokens) or len(tokens) < (num_seqs or 0):
        raise DataError(
            f"corpus {name!r} ({split}) holds only {len(tokens)} windows of {seq_len} tokens, not {num_seqs}: "
            "ask for fewer or shorter sequences, or name a larger corpus"
        )
    return tokens


def documents(name: str, split: str, seed: int = 0) -> Iterator[str]:
    """Texts of one split in an order fixed by ``seed``; of local text, a repeated one only once."""
    if split not in SPLITS:
        raise UnknownNameError("split", split, SPLITS)
    name = of_split(name, split)
    corpus = _find(name)
    if isinstance(corpus, HubCorpus):
        return texts(corpus, split, seed, corpus.packing == "joined")
    return bundled.documents(name, split, seed) if corpus is None else local_documents(corpus, split, seed)


def of_split(name: str, split: str) -> str:
    """The corpus of one split: ``train=A,test=B`` names that of ``train`` and that of the other two."""
    match = PAIR.fullmatch(str(name))
    return match["train" if split == "train" else "test"] if match else name


def fingerprint(tokens: torch.Tensor) -> str:
    """Sixteen hex digits that name these token ids, for provenance."""
    return hashlib.sha256(raw_bytes(tokens.to(torch.int64))).hexdigest()[:16]


def _find(name: str) -> HubCorpus | list[tuple[str, Path]] | None:
    """A data set, the files of local text, or None for a bundled corpus."""
    if not str(name).strip():
        raise UnknownNameError("corpus", name, [*CORPORA, *HUB_CORPORA])
    if name in CORPORA:
        return None
    if name in HUB_CORPORA:
        return HUB_CORPORA[name]
    files = text_files(name)
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


def _check(split: str, seq_len: int, num_seqs, num_docs, packing) -> None:
    if split not in SPLITS:
        raise UnknownNameError("split", split, SPLITS)
    counts = [count for count in (num_seqs, num_docs) if count is not None]
    if any(type(count) is not int for count in (seq_len, *counts)) or seq_len < 2 or min(counts, default=1) < 1:
        raise DataError(f"seq_len {seq_len} and num_seqs {num_seqs}: need at least 2 tokens and 1 sequence")
    if packing not in (None, *PACKINGS):
        raise UnknownNameError("packing", packing, PACKINGS)


def _streamed(corpus, tokenizer, split, seq_len, num_seqs, seed, packing, num_docs) -> torch.Tensor:
    in_order = packing == "joined"
    about = {"split": split, "seq_len": seq_len, "num_seqs": num_seqs, "packing": packing, "num_docs": num_docs}
    about |= {"seed": 0 if in_order else seed, "tokenizer": tokenizer_hash(tokenizer)}  # in order nothing is drawn
    found = islice(texts(corpus, split, seed, in_order), num_docs)
    rows = PACKINGS[packing](found, tokenizer, seq_len, random.Random(f"{corpus.name}/{split}/{seed}"))
    return cached(corpus.describe() | about, rows, seq_len, num_seqs)
