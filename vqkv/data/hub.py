"""Data sets that the ``datasets`` library streams: their layouts, and their documents in an order that a seed fixes."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vqkv.data.bundled import CORPORA
from vqkv.data.splits import dealt
from vqkv.errors import DataError, UnknownNameError

BUFFER = 256  # documents of several files, of which the next one is drawn
REMEDY = (
    "Check the spelling and the network; a private or gated data set needs access and `hf auth login`. A process that "
    "is offline (HF_HUB_OFFLINE, HF_DATASETS_OFFLINE) can use a local copy, NAME@FOLDER: parquet or jsonl files, named "
    "by split (train-..., test-...)"
)


@dataclass(frozen=True)
class HubCorpus:
    """Where a data set lies (``path``, ``config``; or ``folder``, in the same layout), the ``packing`` of its column
    ``text`` (``windows.PACKINGS``). ``files``: JSON lines to be read, where its own loader is a script."""

    name: str
    path: str
    config: str | None = None
    packing: str = "packed"
    files: str | None = None
    folder: str | None = None

    def describe(self) -> dict:
        """Name the text in plain JSON: of a folder also its files, their sizes and times."""
        known = dataclasses.asdict(self)
        if self.folder is None:
            return known
        files = [(str(path.relative_to(self.folder)), path.stat()) for path in _visible_files(Path(self.folder))]
        return known | {"contents": [[name, about.st_size, about.st_mtime_ns] for name, about in files]}

    def lines(self) -> str | list[str] | None:
        """List the files of JSON lines to be read; None where the data set's own layout says what is."""
        if self.files is None or self.folder is None:
            return self.files and f"hf://datasets/{self.path}/{self.files}"
        return [str(path) for path in _visible_files(Path(self.folder)) if path.match(self.files)] or None


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
    """Find a known data set, NAME@FOLDER, or another one on the hub. Raises ``UnknownNameError`` for another layout and
    ``DataError`` without such a folder."""
    layout, at, folder = name.partition("@")
    if not at:
        return HUB_CORPORA.get(name) or HubCorpus(name, name)
    if layout not in HUB_CORPORA:
        raise UnknownNameError("data set layout", layout, HUB_CORPORA, f"Write {name!r} as LAYOUT@FOLDER.")
    path = Path(folder).expanduser().resolve()
    if not path.is_dir() or not _visible_files(path):
        raise DataError(f"corpus {name!r}: there is no folder {path} with parquet or jsonl files")
    return dataclasses.replace(HUB_CORPORA[layout], folder=str(path))


def texts_of(corpus: HubCorpus, split: str, seed: int) -> Iterator[str]:
    """Yield the documents of one split, shuffled by ``seed``; all rows, also empty ones, in order, where they are
    joined. Splits that a data set lacks are, where order does not matter, the documents of its train split whose text
    has such a hash. Raises ``DataError`` or, for a data set that is no known corpus, ``UnknownNameError``, with the
    remedy."""
    in_order = corpus.packing == "joined"
    splits, where = _load(corpus), repr(corpus.folder or corpus.path)
    own = split in splits and (split != "train" or in_order)
    if not own and ("train" not in splits or in_order):
        raise DataError(f"data set {where} has no {split} split, only {', '.join(splits)}")
    rows, lines = splits[split if own else "train"], corpus.lines()
    try:
        for row in rows if in_order else rows.shuffle(seed, buffer_size=BUFFER):
            text = _text(json.loads(row["text"] or '{"text": ""}') if lines else row)
            held = dealt(text)  # out of the train split, for splits that the data set lacks
            if in_order or (text.strip() and (own or split == ("train" if held in splits else held))):
                yield text
    except DataError:
        raise
    except Exception as error:  # the library raises a dozen types
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise DataError(f"data set {where} broke off ({reason}): run it again, or use a local copy") from error


def _text(row: dict) -> str:
    if "text" not in row or not isinstance(row["text"], str | None):
        columns = ", ".join(f"{name} ({type(value).__name__})" for name, value in sorted(row.items()))
        raise DataError(f"the data set has no column 'text' of strings; it has {columns}")
    return row["text"] or ""


def _load(corpus: HubCorpus):
    """The splits by name. Raises ``DataError``, or ``UnknownNameError`` for a data set that is no known corpus."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"corpus {corpus.name!r} needs the library datasets: pip install 'vqkv[study]'") from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # they would end up in a notebook's output
    try:
        if lines := corpus.lines():
            return datasets.load_dataset("text", data_files={"train": lines}, streaming=True)
        config = corpus.config
        if corpus.folder is not None and config not in datasets.get_dataset_config_names(corpus.folder):
            config = None  # a copy of the hub's folder names its configurations, parquet files alone do not
        return datasets.load_dataset(corpus.folder or corpus.path, config, streaming=True)
    except Exception as error:  # the library raises a dozen types for "not there" and "no network"
        reason = f"`datasets` cannot load it ({type(error).__name__}: {str(error)[:300]}). {REMEDY}"
        if corpus.folder is None and corpus.name not in HUB_CORPORA:
            reason = f"It is also no local file or folder, and {reason}"
            raise UnknownNameError("corpus", corpus.name, [*CORPORA, *HUB_CORPORA], reason) from error
        raise DataError(f"corpus {corpus.name!r} ({corpus.folder or corpus.path}): {reason}") from error


def _visible_files(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))
