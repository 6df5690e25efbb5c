"""Data sets that the ``datasets`` library streams: their layouts, and how they are opened."""

import dataclasses
import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vqkv.data.local import LOCAL_CORPORA, held_out
from vqkv.errors import DataError, UnknownNameError


@dataclass(frozen=True)
class HubCorpus:
    """Where a data set lies (``path``, ``config``; or ``folder``, with files in the same layout), the ``column`` with
    the text, its ``packing``, and how much of it its source used: ``num_docs`` or ``num_seqs``.

    ``files``: JSON lines to be read one by one, where a data set's own loader is a script, which ``datasets`` no longer
    runs. ``open_shards``: files read from in turn, so that a block has documents of all of them.
    """

    name: str
    path: str
    config: str | None = None
    column: str = "text"
    packing: str = "packed"
    num_docs: int | None = None
    num_seqs: int | None = None
    files: str | None = None
    open_shards: int = 4
    folder: str | None = None

    def size(self, num_seqs: int | None, num_docs: int | None) -> tuple[int | None, int | None]:
        """Sequences and documents that the source used, where nothing is asked for."""
        if num_seqs is None and num_docs is None:
            return self.num_seqs, self.num_docs
        return num_seqs, num_docs

    @property
    def where(self) -> str:
        """The folder, or the name on the hub."""
        return repr(self.folder or self.path)

    @property
    def line_by_line(self) -> bool:
        """True if ``files`` are read, and not what the data set's own layout says."""
        return self.files is not None and (self.folder is None or bool(self.own_files()))

    def own_files(self) -> list[Path]:
        """Of a folder, those that ``files`` describes."""
        return [path for path in _visible_files(Path(self.folder)) if path.match(self.files)]

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
        HubCorpus(
            "redpajama", "togethercomputer/RedPajama-Data-1T-Sample", num_seqs=256, files="*.jsonl", open_shards=16
        ),
    )
}


def find(name: str) -> HubCorpus:
    """The corpus NAME@FOLDER, or the data set of this name on the hub. Raises ``UnknownNameError`` for another NAME and
    ``DataError`` if there is no such folder."""
    layout, at, folder = name.partition("@")
    if not at:
        return HubCorpus(name, name)
    if layout not in HUB_CORPORA:
        raise UnknownNameError("data set layout", layout, HUB_CORPORA, f"Write {name!r} as LAYOUT@FOLDER.")
    path = Path(folder).expanduser().resolve()
    if not path.is_dir():
        raise DataError(f"corpus {name!r}: there is no folder {path}")
    if not _visible_files(path):
        raise DataError(f"corpus {name!r}: folder {path} is empty; it needs parquet or jsonl files")
    return dataclasses.replace(HUB_CORPORA[layout], folder=str(path))


def open_split(corpus: HubCorpus, split: str, shuffled: bool):
    """The streamed split, and which of its texts belong to it: a data set without a test split holds out, where order
    does not matter, the documents whose text has such a hash. Raises ``DataError`` or, for a data set that is no known
    corpus, ``UnknownNameError``, with the remedy."""
    found = _loaded(corpus)
    blank = (lambda text: bool(text.strip())) if shuffled else (lambda text: True)
    if "test" in found and split in found:
        return _checked(found[split], corpus), blank
    if "train" not in found:
        raise DataError(f"data set {corpus.where} has no split {split!r}; it has {', '.join(found)}")
    if shuffled:
        return _checked(found["train"], corpus), lambda text: blank(text) and held_out(text) == (split == "test")
    if split == "train":
        return _checked(found["train"], corpus), blank
    raise DataError(f"data set {corpus.where} has no test split, and rows in order hold none out: use packing='packed'")


def _checked(dataset, corpus: HubCorpus):
    columns = dataset.column_names
    if columns is not None and not corpus.line_by_line and corpus.column not in columns:
        raise DataError(f"data set {corpus.where} has no column {corpus.column!r}; it has {', '.join(columns)}")
    return dataset


def _loaded(corpus: HubCorpus):
    """The splits by name. Raises ``DataError``, or ``UnknownNameError`` for a data set that is no known corpus."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"corpus {corpus.name!r} needs the library datasets: pip install 'vqkv[study]'") from error
    try:
        with _quiet(datasets):
            return _load(datasets, corpus)
    except Exception as error:  # the library raises a dozen types for "not there" and "no network"
        what, remedy = f"{type(error).__name__}: {str(error)[:300]}", _remedy(datasets, corpus, error)
        reason = f"`datasets` cannot load it ({what}). {remedy}"
        if corpus.folder is None and corpus.name not in HUB_CORPORA:
            known = [*LOCAL_CORPORA, *HUB_CORPORA]
            reason = f"It is also no local file or folder, and {reason}"
            raise UnknownNameError("corpus", corpus.name, known, reason) from error
        raise DataError(f"corpus {corpus.name!r} ({corpus.folder or corpus.path}): {reason}") from error


def _load(datasets, corpus: HubCorpus):
    if corpus.line_by_line:
        own = f"hf://datasets/{corpus.path}/{corpus.files}" if corpus.folder is None else map(str, corpus.own_files())
        files = own if isinstance(own, str) else list(own)
        return datasets.load_dataset("text", data_files={"train": files}, streaming=True)
    if corpus.folder is None:
        return datasets.load_dataset(corpus.path, corpus.config, streaming=True)
    configs = datasets.get_dataset_config_names(corpus.folder)  # a copy of the hub's folder names them
    config = corpus.config if corpus.config in configs else None
    return datasets.load_dataset(corpus.folder, config, streaming=True)


def _remedy(datasets, corpus: HubCorpus, error: Exception) -> str:
    """Remedy for an error of the library."""
    if corpus.folder is not None:
        return "A folder needs parquet or jsonl files, named by split (train-..., test-...)"
    text = f"{type(error).__name__} {error}"
    if datasets.config.HF_HUB_OFFLINE or "Offline" in text:
        return (
            "This process is offline: unset HF_HUB_OFFLINE and HF_DATASETS_OFFLINE, or use a local copy, NAME@FOLDER."
        )
    if "gated" in text.lower() or "401" in text or "403" in text:
        return "Ask for access on its page, and log in with `hf auth login` (or set HF_TOKEN)."
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        return "Check the spelling; a private data set needs `hf auth login`."
    if isinstance(error, ConnectionError | TimeoutError):
        return "Check the network, or use a local copy, NAME@FOLDER."
    return "Load it with `datasets` alone to see more, or use a local copy, NAME@FOLDER."


@contextmanager
def _quiet(datasets):
    """No progress bars where there is no terminal: they would end up in a notebook's output."""
    quiet = not sys.stderr.isatty() and datasets.are_progress_bars_disabled() is False
    if quiet:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if quiet:
            datasets.enable_progress_bars()


def parsed(line: str, corpus: HubCorpus) -> dict:
    """A row of ``files``; an empty line is one without text. Raises ``DataError`` for what is no JSON object."""
    try:
        return dict(json.loads(line)) if line.strip() else {corpus.column: ""}
    except (ValueError, TypeError) as error:
        raise DataError(f"data set {corpus.where}: a line is no JSON object ({error}): {line[:60]!r}") from error


def _visible_files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))
