"""Text in local files: pieces of a folder are dealt to the three splits by a hash, those of one file by position."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from vqkv.data.bundled import dealt
from vqkv.errors import DataError

PIECE = 8_000  # characters of a local text that count as one document
PARTS = 50  # that a single file is cut into at least, so that each split gets some
HELD = {"validation": 70, "test": 80}  # percent of a single file before each split: the rest is for training
TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".jsonl", ".json")


def text_files(name: str) -> list[tuple[str, Path]] | None:
    """List (label, path) of the files of local text; None if no file or folder has that name."""
    path = Path(name).expanduser()
    if path.is_file():
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
        for number, text in _pieces(path, PARTS if alone else 1):
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


def _pieces(path: Path, parts: int) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each row of a .jsonl file, or of ``parts`` stretches of a text at least, about ``PIECE``
    characters each, to the end of a line where lines are not longer."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except ValueError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    if path.suffix == ".jsonl":
        rows = enumerate(text.split("\n"), 1)
        yield from ((number, _row(path, number, row)) for number, row in rows if row.strip())
        return
    size = min(PIECE, max(1, len(text) // parts)) if parts > 1 else PIECE
    number, piece = 0, ""
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), size):
            piece += line[start : start + size]
            if len(piece) >= size:
                yield number, piece
                number, piece = number + 1, ""
    yield number, piece


def _row(path: Path, number: int, row: str) -> str:
    try:
        return json.loads(row)["text"] + ""
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}, line {number} is no JSON object with a string 'text' ({error!r})") from error
