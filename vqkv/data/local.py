"""Text in local files: pieces of a folder are dealt to the three splits by a hash, those of one file by position."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

from vqkv.data.splits import TEST_PERCENT, VALIDATION_PERCENT, dealt
from vqkv.errors import DataError

PIECE = 8_000  # characters of a local text that count as one document
PARTS = 50  # that a file is cut into at least, so that each split gets some
TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".jsonl", ".json")


def local_documents(files: list[tuple[str, Path]], split: str, seed: int) -> Iterator[str]:
    """Yield the texts of one split in an order fixed by ``seed``, a repeated one only once. Of a single file the
    beginning is for training, the end for the other splits: neighbouring pieces speak of the same things."""
    pieces = [piece for label, path in files for piece in _local_pieces(label, path, PARTS if len(files) == 1 else 1)]
    texts: dict[bytes, tuple[str, str]] = {}
    for label, text in pieces:
        if text.strip():
            texts.setdefault(hashlib.sha256(text.encode(errors="ignore")).digest(), (label, text))
    held = _by_position([*texts.values()]) if len(files) == 1 else {label: dealt(label) for label, _ in texts.values()}
    found = [text for label, text in texts.values() if held[label] == split]
    random.Random(f"{seed}").shuffle(found)
    yield from found


def text_files(name: str) -> list[tuple[str, Path]] | None:
    """(label, path) of the files of local text; None if no file or folder has that name."""
    path = Path(name).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
        if not found:
            raise DataError(f"folder {name!r} holds no text file ({', '.join(TEXT_SUFFIXES)})")
        return [(str(p.relative_to(path)), p) for p in found]
    return None


def _local_pieces(label: str, path: Path, parts: int) -> list[tuple[str, str]]:
    """(name, text) of each row of a .jsonl file that has several, or of stretches of the text: ``parts`` at least."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except ValueError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    if path.suffix != ".jsonl":
        return _cut(label, text, parts)
    rows = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(rows) == 1:
        return _cut(label, _row_text(path, *rows[0]), parts)
    return [(f"{label}#{number}", _row_text(path, number, line)) for number, line in rows]


def _cut(label: str, text: str, parts: int) -> list[tuple[str, str]]:
    """(name, text) of stretches of about ``PIECE`` characters that end with a line where lines are not longer."""
    size = min(PIECE, max(1, len(text) // parts)) if parts > 1 else PIECE
    lines = (line[i : i + size] for line in text.splitlines(keepends=True) for i in range(0, len(line), size))
    pieces = [""]
    for line in lines:
        pieces[-1] += line
        if len(pieces[-1]) >= size:
            pieces.append("")
    return [(f"{label}#{i}", piece) for i, piece in enumerate(pieces)]


def _by_position(pieces: list[tuple[str, str]]) -> dict[str, str]:
    """The split of each piece of one file: first ``train``, then ``validation``, last ``test``."""
    total, before, found = sum(len(text) for _, text in pieces), 0, {}
    for label, text in pieces:
        percent = 100 * before / total
        held = percent >= 100 - TEST_PERCENT - VALIDATION_PERCENT
        found[label] = "test" if percent >= 100 - TEST_PERCENT else "validation" if held else "train"
        before += len(text)
    return found


def _row_text(path: Path, number: int, line: str) -> str:
    try:
        return json.loads(line)["text"] + ""
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}, line {number}: each line must be a JSON object with a 'text' field that is a string ({error!r})"
        ) from error
