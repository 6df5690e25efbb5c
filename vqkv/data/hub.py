"""Data sets that the ``datasets`` library streams: their layouts, and their documents in an order that a seed fixes."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vqkv.data.bundled import CORPORA, dealt
from vqkv.errors import DataError, UnknownNameError

BUFFER = 256  # documents of several files, of which the next one is drawn
REMEDY = (
    "Check the spelling and the network; a gated data set needs `hf auth login`. A process that is offline "
    "(HF_HUB_OFFLINE) can use a local copy, NAME@FOLDER: parquet or jsonl files, named by split (train-..., test-...)"
)


@dataclass(frozen=True)
class HubCorpus:
    """A data set (``path``, ``config``; or a ``folder`` in the same layout), and the ``packing`` of its column ``text``
    (``corpus.PACKINGS``). ``files``: JSON lines to be read, where its own loader is a script."""

    name: str
    path: str
    config: str | None = None
    packing: str = "packed"
    files: str | None = None
    folder: str | None = None


HUB_CORPORA = {
    corpus.name: corpus
    for corpus in (
        HubCorpus("wikitext", "Salesforce/wikitext", "wikitext-2-raw-v1", packing="joined"),
        HubCorpus("pg19", "emozilla/pg19"),
        HubCorpus("slimpajama", "DKYoon/SlimPajama-6B"),
        HubCorpus("redpajama", "togethercomputer/RedPajama-Data-1T-Sample", files="*.jsonl"),
    )
}


def find(name: str) -> HubCorpus:
    """Find a known data set, NAME@FOLDER, or another one on the hub. Raises ``UnknownNameError`` for another layout."""
    layout, at, folder = name.partition("@")
    if not at:
        return HUB_CORPORA.get(name) or HubCorpus(name, name)
    if layout not in HUB_CORPORA:
        raise UnknownNameError("data set layout", layout, HUB_CORPORA, f"Write {name!r} as LAYOUT@FOLDER.")
    return dataclasses.replace(HUB_CORPORA[layout], folder=str(Path(folder).expanduser().resolve()))


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
