"""Corpus name -> token ids.

Bundled corpora are text that every installation has: ``python-stdlib`` (the standard library's own source) and
``python-packages`` (the source of the pinned packages). Any local text file or folder, and any data set that the
``datasets`` library can load, works too.
"""

import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from vqkv.errors import DataError, UnknownNameError

PACKAGES = (
    "accelerate", "aiohttp", "anyio", "dask", "datasets", "distributed", "fontTools", "fsspec", "huggingface_hub",
    "hypothesis", "IPython", "jedi", "jinja2", "joblib", "jupyter_server", "lm_eval", "matplotlib", "mpmath",
    "networkx", "nltk", "numpy", "pandas", "pip", "prompt_toolkit", "pydantic", "pygments", "rich", "scipy",
    "setuptools", "sklearn", "sympy", "torch", "tornado", "transformers", "triton",
)  # fmt: skip
HUB_CORPORA = {  # name -> (data set, configuration, text column, split names that differ from train / test)
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "text", {}),
    "pg19": ("emozilla/pg19", None, "text", {}),
    "slimpajama": ("DKYoon/SlimPajama-6B", None, "text", {}),
    "redpajama": ("togethercomputer/RedPajama-Data-1T-Sample", None, "text", {"test": "train"}),
}
SPLITS = ("train", "test")
HELD_OUT_PERCENT = 6
MAX_BYTES = 400_000  # longer files are generated tables, not prose or code
PIECE = 8_000  # characters of a local text that count as one document
TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".jsonl", ".json")


def load_corpus(
    name: str, tokenizer, split: str = "train", seq_len: int = 512, num_seqs: int = 64, seed: int = 0
) -> torch.Tensor:
    """Token ids of ``num_seqs`` windows of ``seq_len`` tokens, each from shuffled documents, each starting with BOS.

    ``name``: ``python-stdlib``, ``python-packages``, a local text file or folder, a name in ``HUB_CORPORA`` or any
    other data set on the hub with a ``text`` column. A document gives one window at a random offset, so that a few
    windows already span many documents; short documents are packed together.

    Returns an int64 tensor (num_seqs, seq_len). Raises ``UnknownNameError`` for an unknown corpus or split and
    ``DataError`` if the corpus holds fewer windows than asked for.
    """
    if split not in SPLITS:
        raise UnknownNameError("split", split, SPLITS)
    if type(seq_len) is not int or type(num_seqs) is not int or seq_len < 2 or num_seqs < 1:
        raise DataError(f"seq_len {seq_len} and num_seqs {num_seqs}: need at least 2 tokens and 1 sequence")
    rng = random.Random(f"{name}/{split}/{seed}")
    windows = _pack(_pieces(documents(name, split, seed), tokenizer, seq_len, rng), tokenizer, seq_len)
    rows = [row for row, _ in zip(windows, range(num_seqs), strict=False)]
    if len(rows) < num_seqs:
        raise DataError(
            f"corpus {name!r} ({split}) holds only {len(rows)} windows of {seq_len} tokens, not {num_seqs}: "
            "ask for fewer or shorter sequences, or name a larger corpus"
        )
    return torch.tensor(rows, dtype=torch.long)


def documents(name: str, split: str, seed: int = 0) -> Iterator[str]:
    """Yield the texts of one split in an order fixed by ``seed``; a repeated text (by content hash) only once."""
    if name in HUB_CORPORA:
        yield from _hub_documents(name, split, seed)
        return
    files = _files(name)
    if files is None:
        yield from _hub_documents(name, split, seed)
        return
    if name in LOCAL_CORPORA:
        texts = (path.read_text(encoding="utf-8", errors="ignore") for path in _chosen(files, split, seed))
    else:
        texts = _chosen([piece for label, path in files for piece in _local_pieces(label, path)], split, seed)
    seen = set()
    for text in texts:
        digest = hashlib.sha256(text.encode(errors="ignore")).digest()
        if text.strip() and digest not in seen:
            seen.add(digest)
            yield text


def _chosen(named: list[tuple[str, object]], split: str, seed: int) -> list:
    """What belongs to ``split`` by the hash of its name, shuffled."""
    found = [item for label, item in named if held_out(label) == (split == "test")]
    random.Random(f"{seed}").shuffle(found)
    return found


def held_out(module: str) -> bool:
    """Whether a module belongs to the test split: by a hash of its dotted name, so no file of it is ever trained on."""
    return int(hashlib.sha256(module.encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


def fingerprint(tokens: torch.Tensor) -> str:
    """Sixteen hex digits that name these token ids, for provenance."""
    return hashlib.sha256(tokens.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()[:16]


def _files(name: str) -> list[tuple[str, Path]] | None:
    if name in LOCAL_CORPORA:
        return LOCAL_CORPORA[name]()
    path = Path(name).expanduser()
    if not str(name).strip():
        raise UnknownNameError("corpus", name, [*LOCAL_CORPORA, *HUB_CORPORA])
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
        if not found:
            raise DataError(f"folder {name!r} holds no text file ({', '.join(TEXT_SUFFIXES)})")
        return [(str(p.relative_to(path)), p) for p in found]
    return None


@cache
def _stdlib_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
    return _modules(root, (p for p in root.rglob("*.py") if not skip.intersection(p.relative_to(root).parts)), depth=1)


@cache
def _package_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["purelib"])
    paths = (p for package in PACKAGES for p in (root / package).rglob("*.py"))
    return _modules(root, paths, depth=2)


LOCAL_CORPORA = {"python-stdlib": _stdlib_files, "python-packages": _package_files}


def _modules(root: Path, paths, depth: int) -> list[tuple[str, Path]]:
    """(dotted module name down to ``depth``, path) of each source file that is not a generated table."""
    found = []
    for path in sorted(paths):
        if 64 <= path.stat().st_size <= MAX_BYTES:
            found.append((".".join(path.relative_to(root).with_suffix("").parts[:depth]), path))
    return found


def _local_pieces(label: str, path: Path) -> list[tuple[str, str]]:
    """(name, text) of each row of a .jsonl file, or of each stretch of about ``PIECE`` characters of any other: a
    single long text also has many windows, and a test split."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except ValueError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    if path.suffix != ".jsonl":
        lines, pieces = text.splitlines(keepends=True), [""]
        for line in lines:
            pieces[-1] += line
            if len(pieces[-1]) >= PIECE:
                pieces.append("")
        return [(f"{label}#{i}", piece) for i, piece in enumerate(pieces)]
    rows = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    return [(f"{label}#{number}", _row_text(path, number, line)) for number, line in rows]


def _row_text(path: Path, number: int, line: str) -> str:
    try:
        return json.loads(line)["text"] + ""
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}, line {number}: each line must be a JSON object with a 'text' field that is a string ({error!r})"
        ) from error


def _hub_documents(name: str, split: str, seed: int) -> Iterator[str]:
    import datasets

    path, config, column, splits = HUB_CORPORA.get(name, (name, None, "text", {}))
    try:
        stream = datasets.load_dataset(path, config, split=splits.get(split, split), streaming=True)
    except Exception as error:  # the library raises a dozen types for "not there" and "no network"
        raise UnknownNameError(
            "corpus",
            name,
            [*LOCAL_CORPORA, *HUB_CORPORA],
            f"It is also no local file or folder, and `datasets` cannot load it ({type(error).__name__}: {error})",
        ) from error
    for row in stream.shuffle(seed=seed, buffer_size=1000):
        if column not in row:
            raise DataError(f"data set {path!r} has no column {column!r}; it has {sorted(row)}")
        if row[column].strip():
            yield row[column]


def _pieces(texts, tokenizer, seq_len: int, rng: random.Random) -> Iterator[list[int]]:
    """One piece of at most ``seq_len`` tokens per document, at a random offset."""
    for text in texts:
        # Tokenising a whole book to use one window of it would cost minutes: 16 characters a token is never exceeded
        # on average, so a slice that long is enough.
        start = rng.randrange(max(1, len(text) - 16 * seq_len))
        start = text.rfind("\n", 0, start) + 1
        ids = tokenizer(text[start : start + 16 * seq_len], add_special_tokens=False, verbose=False)["input_ids"]
        yield ids[:seq_len]


def _pack(pieces, tokenizer, seq_len: int) -> Iterator[list[int]]:
    """Concatenate pieces, separated by EOS, and cut windows of ``seq_len`` that start with BOS where there is one."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    head = [] if bos is None else [bos]
    body = seq_len - len(head)
    buffer: list[int] = []
    for piece in pieces:
        buffer += piece
        while len(buffer) >= body:
            yield head + buffer[:body]
            buffer = []  # the rest of a cut piece would give its document a second window
        if buffer and eos is not None:
            buffer.append(eos)
