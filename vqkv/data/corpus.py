"""Corpus name -> token ids: of bundled text (the README lists it), of local files and of what ``datasets`` can load."""

import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from vqkv.data import bundled
from vqkv.data.bundled import CORPORA, SPLITS, dealt
from vqkv.errors import DataError, UnknownNameError
from vqkv.runtime.files import raw_bytes

PIECE = 8_000  # characters of a local text that count as one document
PARTS = 50  # that a single file is cut into at least, so that each split gets some
HELD = {"validation": 70, "test": 80}  # percent of a single file before each split: the rest is for training
TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")
BATCH = 64  # texts tokenised at a time
BUFFER = 256  # documents of several files, of which the next one is drawn
REMEDY = (
    "Check the spelling and the network; a gated data set needs `hf auth login`. A process that is offline "
    "(HF_HUB_OFFLINE) can use a local copy, NAME@FOLDER: parquet or jsonl files, named by split (train-..., test-...)"
)
PAIR = re.compile(r"train=(?P<train>[^,]+),test=(?P<test>[^,]+)")


@dataclass(frozen=True)
class HubCorpus:
    """A data set (``path``, ``config``; or a ``folder`` in the same layout), and the ``packing`` of its column ``text``
    (``PACKINGS``). ``files``: JSON lines to be read, where its own loader is a script."""

    name: str
    path: str
    config: str | None = None
    packing: str = "packed"
    files: str | None = None
    folder: str | None = None


HUB_CORPORA = {
    "wikitext": HubCorpus("wikitext", "Salesforce/wikitext", "wikitext-2-raw-v1", packing="joined"),
    "pg19": HubCorpus("pg19", "emozilla/pg19"),
    "slimpajama": HubCorpus("slimpajama", "DKYoon/SlimPajama-6B"),
    "redpajama": HubCorpus("redpajama", "togethercomputer/RedPajama-Data-1T-Sample", files="*.jsonl"),
}


def load_corpus(
    name: str, tokenizer, split: str = "train", seq_len: int = 512, num_seqs: int = 64, seed: int = 0
) -> torch.Tensor:
    """Load token ids: ``num_seqs`` windows of ``seq_len`` tokens.

    ``name``: one of ``CORPORA`` (``python``), a local text file or folder, a name in ``HUB_CORPORA`` (``slimpajama``),
    such a name with a local folder in that data set's layout (``slimpajama@/data/slim``), or any other data set on the
    hub with a ``text`` column; or two of these that share no documents, to learn from and to report on:
    ``train=redpajama,test=wikitext``. ``split``: ``train``, ``validation`` or ``test``. How documents become windows:

    - ``windows`` (bundled text): a document gives one window at a random offset, so that a few windows already span
      many documents; short documents are packed together. Each window starts with BOS.
    - ``packed`` (local text; SlimPajama, RedPajama, PG-19 and what else is on the hub): shuffled documents, each
      followed by EOS, cut into consecutive windows that start with BOS (residual VQ paper, section 4).
    - ``joined`` (WikiText): the rows of the split in their own order, joined by blank lines and cut into consecutive
      windows; no EOS, and BOS only where the tokenizer begins the text with it (AQUA-KV's perplexity).

    Returns an int64 tensor (num_seqs, seq_len). Raises ``UnknownNameError`` for an unknown corpus or split, and
    ``DataError`` if the corpus cannot be read or holds fewer windows than asked for.
    """
    if type(seq_len) is not int or type(num_seqs) is not int or seq_len < 2 or num_seqs < 1:
        raise DataError(f"seq_len {seq_len} and num_seqs {num_seqs}: need at least 2 tokens and 1 sequence")
    texts, packing = _source(name, split, seed)
    made = PACKINGS[packing](texts, tokenizer, seq_len, random.Random(f"{of_split(name, split)}/{split}/{seed}"))
    tokens = torch.tensor([*islice(made, num_seqs)], dtype=torch.long)
    if len(tokens) < num_seqs:
        raise DataError(
            f"corpus {name!r} ({split}) holds only {len(tokens)} windows of {seq_len} tokens, not {num_seqs}: "
            "ask for fewer or shorter sequences, or name a larger corpus"
        )
    return tokens


def documents(name: str, split: str, seed: int = 0) -> Iterator[str]:
    """Yield the texts of one split in an order fixed by ``seed``; of local text, a repeated one only once."""
    return _source(name, split, seed)[0]


def of_split(name: str, split: str) -> str:
    """Return the corpus of one split: ``train=A,test=B`` names that of ``train`` and that of the other two."""
    match = PAIR.fullmatch(str(name))
    return match["train" if split == "train" else "test"] if match else name


def fingerprint(tokens: torch.Tensor) -> str:
    """Name these token ids in sixteen hex digits, for provenance."""
    return hashlib.sha256(raw_bytes(tokens.to(torch.int64))).hexdigest()[:16]


def _source(name: str, split: str, seed: int) -> tuple[Iterator[str], str]:
    """Return texts of a bundled corpus, of local files or a data set, and how they become windows."""
    if split not in SPLITS:
        raise UnknownNameError("split", split, SPLITS)
    name = of_split(name, split)
    if not str(name).strip():
        raise UnknownNameError("corpus", name, [*CORPORA, *HUB_CORPORA])
    if name in CORPORA:
        return bundled.documents(name, split, seed), "windows"
    if name not in HUB_CORPORA and (files := text_files(name)):
        return local_documents(files, split, seed), "packed"
    layout, at, folder = name.partition("@")
    if at and layout not in HUB_CORPORA:
        raise UnknownNameError("data set layout", layout, HUB_CORPORA, f"Write {name!r} as LAYOUT@FOLDER.")
    corpus = HUB_CORPORA.get(layout) or HubCorpus(name, name)
    if at:
        corpus = replace(corpus, folder=str(Path(folder).expanduser().resolve()))
    return texts_of(corpus, split, seed), corpus.packing


def text_files(name: str) -> list[tuple[str, Path]] | None:
    """List (label, path) of the files of local text; None if no file or folder has that name."""
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix in (".json", ".jsonl"):
            raise DataError(f"{name!r} holds rows, not text: give redpajama@FOLDER, whose .jsonl files have a 'text'")
        return [(path.name, path)]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
        if not files:
            raise DataError(f"folder {name!r} holds no text file ({', '.join(TEXT_SUFFIXES)})")
        return [(str(p.relative_to(path)), p) for p in files]
    if path.suffix in TEXT_SUFFIXES:
        raise DataError(f"there is no file {name!r}")
    return None


def local_documents(files: list[tuple[str, Path]], split: str, seed: int) -> Iterator[str]:
    """Yield the texts of one split in an order fixed by ``seed``, a repeated one only once. Of a single file the
    beginning is for training, the end for the other splits: neighbouring pieces speak of the same things."""
    alone, labels = len(files) == 1, dict[str, str]()  # of each text
    for label, path in files:
        for number, text in enumerate(_pieces(path, PARTS if alone else 1)):
            if text.strip():
                labels.setdefault(text, f"{label}#{number}")
    chosen, before, total = [], 0, sum(map(len, labels))
    for text, label in labels.items():
        percent = 100 * before / total
        by_position = "test" if percent >= HELD["test"] else "validation" if percent >= HELD["validation"] else "train"
        if split == (by_position if alone else dealt(label)):
            chosen.append(text)
        before += len(text)
    random.Random(f"{seed}").shuffle(chosen)
    yield from chosen


def _pieces(path: Path, parts: int) -> Iterator[str]:
    """Yield at least ``parts`` stretches of a text, of about ``PIECE`` characters, to the end of a line if they can."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except ValueError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    size = min(PIECE, max(1, len(text) // parts)) if parts > 1 else PIECE
    piece = ""
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), size):
            piece += line[start : start + size]
            if len(piece) >= size:
                yield piece
                piece = ""
    yield piece


def texts_of(corpus: HubCorpus, split: str, seed: int) -> Iterator[str]:
    """Yield the documents of one split, shuffled by ``seed``; all rows, also empty ones, in order, where they are
    joined. Where order does not matter, a split that a data set lacks is dealt out of its train split, by a hash of
    each text. Raises ``DataError`` or, for a data set that is not known, ``UnknownNameError``, with the remedy."""
    try:
        yield from _texts(corpus, split, seed)
    except DataError:
        raise
    except ImportError as error:
        raise DataError(f"corpus {corpus.name!r} needs the library datasets: pip install 'vqkv[study]'") from error
    except Exception as error:  # the library raises a dozen types for "not there", "no network" and damaged files
        reason = f"`datasets` cannot read it ({type(error).__name__}: {str(error)[:300]}). {REMEDY}"
        if corpus.folder is None and corpus.name not in HUB_CORPORA:
            reason = f"It is also no local file or folder, and {reason}"
            raise UnknownNameError("corpus", corpus.name, [*CORPORA, *HUB_CORPORA], reason) from error
        raise DataError(f"corpus {corpus.name!r} ({corpus.folder or corpus.path}): {reason}") from error


def _texts(corpus: HubCorpus, split: str, seed: int) -> Iterator[str]:
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # they would end up in a notebook's output
    config, in_order = corpus.config, corpus.packing == "joined"
    lines = corpus.files and (corpus.folder is None or any(Path(corpus.folder).rglob(corpus.files)))
    if lines:
        files = f"{corpus.folder or f'hf://datasets/{corpus.path}'}/**/{corpus.files}"
        splits = datasets.load_dataset("text", data_files={"train": files}, streaming=True)
    else:
        if corpus.folder is not None and config not in datasets.get_dataset_config_names(corpus.folder):
            config = None  # a copy of the hub's folder names its configurations, parquet files alone do not
        splits = datasets.load_dataset(corpus.folder or corpus.path, config, streaming=True)
    own = split in splits and (split != "train" or in_order)
    if not own and ("train" not in splits or in_order):
        raise DataError(f"corpus {corpus.name!r} has no {split} split, only {', '.join(splits)}")
    rows = splits[split if own else "train"]
    for row in rows if in_order else rows.shuffle(seed, buffer_size=BUFFER):
        row = json.loads(row["text"] or '{"text": ""}') if lines else row
        if "text" not in row or not isinstance(row["text"], str | None):
            columns = ", ".join(f"{name} ({type(value).__name__})" for name, value in sorted(row.items()))
            raise DataError(f"corpus {corpus.name!r} has no column 'text' of strings; it has {columns}")
        text = row["text"] or ""
        held = dealt(text)  # out of the train split, for splits that the data set lacks
        if in_order or (text.strip() and (own or split == ("train" if held in splits else held))):
            yield text


def windows(texts: Iterator[str], tokenizer, seq_len: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield one window a document, at a random offset; short documents are packed together, separated by EOS."""
    head, eos, buffer = _head(tokenizer), tokenizer.eos_token_id, list[int]()
    body = seq_len - len(head)
    for text in texts:
        # Tokenising a book to use one window of it would cost minutes. A token has 16 characters at most on average.
        start = rng.randrange(max(1, len(text) - 16 * seq_len))
        start = text.rfind("\n", 0, start) + 1
        buffer += _ids(tokenizer, [text[start : start + 16 * seq_len]])[0][:seq_len]
        if len(buffer) >= body:
            yield head + buffer[:body]
            buffer = []  # the rest of a cut piece would give its document a second window
        if buffer and eos is not None:
            buffer.append(eos)


def packed(texts: Iterator[str], tokenizer, seq_len: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield complete documents, each followed by EOS, cut into consecutive windows that start with BOS."""
    head, eos, buffer = _head(tokenizer), tokenizer.eos_token_id, list[int]()
    body = seq_len - len(head)
    while batch := [*islice(texts, BATCH)]:
        for ids in _ids(tokenizer, batch):
            buffer += ids if eos is None else [*ids, eos]
        end = len(buffer) - len(buffer) % body
        yield from (head + buffer[i : i + body] for i in range(0, end, body))
        buffer = buffer[end:]


def joined(texts: Iterator[str], tokenizer, seq_len: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield windows of the one text that rows, joined by blank lines, make."""
    ids = _ids(tokenizer, ["\n\n".join(texts)])[0]
    if tokenizer("a", verbose=False)["input_ids"][:1] == _head(tokenizer):
        ids = _head(tokenizer) + ids
    yield from (ids[i : i + seq_len] for i in range(0, len(ids) - seq_len + 1, seq_len))


PACKINGS = {"windows": windows, "packed": packed, "joined": joined}


def _head(tokenizer) -> list[int]:
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


def _ids(tokenizer, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
