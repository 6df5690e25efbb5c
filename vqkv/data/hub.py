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
    ``text``, and how much its source used. ``files``: JSON lines to be read, where its own loader is a script."""

    name: str
    path: str
    config: str | None = None
    packing: str = "packed"
    num_docs: int | None = None
    num_seqs: int | None = None
    files: str | None = None
    folder: str | None = None

    @property
    def where(self) -> str:
        """The folder, or the name on the hub."""
        return repr(self.folder or self.path)

    def describe(self) -> dict:
        """Plain JSON that names the text: of a folder also its files, their sizes and times."""
        known = dataclasses.asdict(self)
        if self.folder is None:
            return known
        files = [(str(path.relative_to(self.folder)), path.stat()) for path in _visible_files(Path(self.folder))]
        return known | {"contents": [[name, about.st_size, about.st_mtime_ns] for name, about in files]}


HUB_CORPORA = {
    corpus.name: corpus
    for corpus in (
        HubCorpus("wikitext", "Salesforce/wikitext", "wikitext-2-raw-v1", packing="joined"),
        HubCorpus("pg19", "emozilla/pg19"),
        HubCorpus("slimpajama", "DKYoon/SlimPajama-6B", num_docs=10_000),
        HubCorpus("redpajama", "togethercomputer/RedPajama-Data-1T-Sample", num_seqs=256, files="*.jsonl"),
    )
}


def find(name: str) -> HubCorpus:
    """NAME@FOLDER, or a data set on the hub. Raises ``UnknownNameError`` or ``DataError`` without layout or folder."""
    layout, at, folder = name.partition("@")
    if not at:
        return HubCorpus(name, name)
    if layout not in HUB_CORPORA:
        raise UnknownNameError("data set layout", layout, HUB_CORPORA, f"Write {name!r} as LAYOUT@FOLDER.")
    path = Path(folder).expanduser().resolve()
    if not path.is_dir() or not _visible_files(path):
        raise DataError(f"corpus {name!r}: there is no folder {path} with parquet or jsonl files")
    return dataclasses.replace(HUB_CORPORA[layout], folder=str(path))


def texts(corpus: HubCorpus, split: str, seed: int, in_order: bool = False) -> Iterator[str]:
    """Documents of one split, shuffled by ``seed``, or ``in_order`` all rows, also empty ones. Splits that a data set
    lacks are, where order does not matter, the documents of its train split whose text has such a hash. Raises
    ``DataError`` or, for a data set that is no known corpus, ``UnknownNameError``, with the remedy."""
    found = _loaded(corpus)
    whole = split in found and (split != "train" or in_order)
    if not whole and ("train" not in found or in_order):
        raise DataError(
            f"data set {corpus.where} has no {split} split, only {', '.join(found)}; rows that are not in order "
            "(packing='packed') are held out of train"
        )
    dataset = found[split if whole else "train"]
    for text in _rows(corpus, dataset if in_order else dataset.shuffle(seed, buffer_size=BUFFER)):
        own = dealt(text)  # of the train split: for a split that the data set lacks, or for train
        if in_order or (text.strip() and (whole or ("train" if own in found else own) == split)):
            yield text


def _rows(corpus: HubCorpus, dataset) -> Iterator[str]:
    try:
        for row in dataset:
            yield _text(corpus, json.loads(row["text"] or '{"text": ""}') if _line_by_line(corpus) else row)
    except DataError:
        raise
    except Exception as error:  # the library raises a dozen types
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise DataError(f"data set {corpus.where} broke off ({what}): run it again, or use a local copy") from error


def _text(corpus: HubCorpus, row: dict) -> str:
    if "text" not in row or not isinstance(row["text"], str | None):
        found = ", ".join(f"{name} ({type(value).__name__})" for name, value in sorted(row.items()))
        raise DataError(f"data set {corpus.where} has no column 'text' of strings; it has {found}")
    return row["text"] or ""


def _loaded(corpus: HubCorpus):
    """The splits by name. Raises ``DataError``, or ``UnknownNameError`` for a data set that is no known corpus."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"corpus {corpus.name!r} needs the library datasets: pip install 'vqkv[study]'") from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # they would end up in a notebook's output
    try:
        return _load(datasets, corpus)
    except Exception as error:  # the library raises a dozen types for "not there" and "no network"
        reason = f"`datasets` cannot load it ({type(error).__name__}: {str(error)[:300]}). {REMEDY}"
        if corpus.folder is None and corpus.name not in HUB_CORPORA:
            known = [*CORPORA, *HUB_CORPORA]
            reason = f"It is also no local file or folder, and {reason}"
            raise UnknownNameError("corpus", corpus.name, known, reason) from error
        raise DataError(f"corpus {corpus.name!r} ({corpus.folder or corpus.path}): {reason}") from error


def _load(datasets, corpus: HubCorpus):
    if corpus.files is not None and _line_by_line(corpus):
        remote = f"hf://datasets/{corpus.path}/{corpus.files}"
        own = remote if corpus.folder is None else _own_files(corpus.folder, corpus.files)
        return datasets.load_dataset("text", data_files={"train": own}, streaming=True)
    if corpus.folder is None:
        return datasets.load_dataset(corpus.path, corpus.config, streaming=True)
    configs = datasets.get_dataset_config_names(corpus.folder)  # a copy of the hub's folder names them
    config = corpus.config if corpus.config in configs else None
    return datasets.load_dataset(corpus.folder, config, streaming=True)


def _line_by_line(corpus: HubCorpus) -> bool:
    """Tell whether ``files`` are read, and not what the data set's own layout says."""
    return corpus.files is not None and (corpus.folder is None or bool(_own_files(corpus.folder, corpus.files)))


def _own_files(folder: str, files: str) -> list[str]:
    return [str(path) for path in _visible_files(Path(folder)) if path.match(files)]


def _visible_files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))
