"""Text in local files: pieces that a hash of their name deals to the three splits."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

from vqkv.data.splits import dealt
from vqkv.errors import DataError

PIECE = 8_000  # characters of a local text that count as one document
TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".jsonl", ".json")


def local_documents(files: list[tuple[str, Path]], split: str, seed: int) -> Iterator[str]:
    """Yield the texts of one split in an order fixed by ``seed``, a repeated one only once."""
    pieces = [piece for label, path in files for piece in _local_pieces(label, path)]
    texts: dict[bytes, tuple[str, str]] = {}
    for label, text in pieces:
        if text.strip():
            texts.setdefault(hashlib.sha256(text.encode(errors="ignore")).digest(), (label, text))
    found = [text for label, text in texts.values() if dealt(label) == split]
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


def _local_pieces(label: str, path: Path) -> list[tuple[str, str]]:
    """(name, text) of each row of a .jsonl file, or of each stretch of about ``PIECE`` characters of any other."""
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
