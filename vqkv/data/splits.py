"""Three disjoint splits of the bundled text: ``train`` (models, calibration), ``validation`` (every choice), ``test``.

A document belongs to the split whose list, made by ``python -m vqkv.data.splitting``, holds the hash of its content: so
a release of Python or of a package, whose files change, moves no document from one split to another.
"""

import hashlib
from functools import cache
from pathlib import Path

SPLITS = ("train", "validation", "test")
VALIDATION_PERCENT, TEST_PERCENT = 6, 8
FOLDER = Path(__file__).parent / "splits"


def content_hash(text: str) -> str:
    """Twelve hex digits that name a document by its content, whatever its line ends."""
    return hashlib.sha256(text.replace("\r\n", "\n").encode(errors="ignore")).hexdigest()[:12]


@cache
def listed(split: str) -> frozenset[str]:
    """Content hashes of the documents of a split."""
    return frozenset((FOLDER / f"{split}.txt").read_text().split())


def dealt(name: str) -> str:
    """The split of a document of this name (a module of the bundled text, a piece of a user's), by a hash of it."""
    bucket = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 100
    if bucket < VALIDATION_PERCENT:
        return "validation"
    return "test" if bucket < VALIDATION_PERCENT + TEST_PERCENT else "train"
