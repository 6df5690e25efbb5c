"""An append-only file of records, each under a checksum of all before it, so that any cut leaves a valid prefix.

A record is a little-endian word (kind 2 bits, tokens 24, length 38), ``length`` bytes, and 16 bytes of BLAKE2b over the
checksum before it, the word and the bytes: so no record can be altered, moved, repeated or left out unseen. A length
beyond the end of the file is a record cut short, so nothing is allocated for it.
"""

import struct
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from vqkv.errors import DataError, FormatError

WORD, CHECKSUM = struct.Struct("<Q"), 16
FRAMING = WORD.size + CHECKSUM  # bytes of a record beside its contents
TOKEN_BITS, LENGTH_BITS = 24, 38
CHUNK = 1 << 20


class Record(NamedTuple):
    """Where a record lies. ``tokens``: of its own; ``seq_len``: of the snapshot it completes."""

    kind: int
    tokens: int
    length: int
    offset: int
    previous: bytes
    checksum: bytes
    seq_len: int = 0

    @property
    def end(self) -> int:
        """The byte after it."""
        return self.offset + FRAMING + self.length


def frame(kind: int, tokens: int, contents: bytes, previous: bytes) -> bytes:
    if tokens >> TOKEN_BITS or len(contents) >> LENGTH_BITS:
        raise DataError(f"{tokens} tokens, {len(contents)} bytes: more than a record can hold")
    word = WORD.pack(kind << (TOKEN_BITS + LENGTH_BITS) | tokens << LENGTH_BITS | len(contents))
    return b"".join((word, contents, _checksum(previous, word, [contents])))


def _checksum(previous: bytes, word: bytes, contents: Iterable[bytes]) -> bytes:
    digest = blake2b(previous + word, digest_size=CHECKSUM)
    for chunk in contents:
        digest.update(chunk)
    return digest.digest()


def read_word(file, size: int, offset: int) -> tuple[int, int, int] | None:
    """(kind, tokens, length) of the record at ``offset``; None if the file ends before the record does."""
    file.seek(offset)
    word = file.read(WORD.size)
    if len(word) < WORD.size:
        return None
    number = WORD.unpack(word)[0]
    kind, tokens, length = number >> 62, number >> LENGTH_BITS & (1 << TOKEN_BITS) - 1, number & (1 << LENGTH_BITS) - 1
    return (kind, tokens, length) if offset + FRAMING + length <= size else None


def next_record(file, size: int, offset: int, previous: bytes) -> Record | None:
    """The record at ``offset``, or None unless it is whole and unaltered. Holds ``CHUNK`` bytes at most."""
    head = read_word(file, size, offset)
    if head is None:
        return None
    file.seek(offset)
    word = file.read(WORD.size)
    starts = range(0, head[2], CHUNK)
    checksum = _checksum(previous, word, (file.read(min(CHUNK, head[2] - start)) for start in starts))
    return Record(*head, offset, previous, checksum) if file.read(CHECKSUM) == checksum else None


def scan(file, size: int, record: Record) -> Iterator[Record]:
    while (record := next_record(file, size, record.end, record.checksum)) is not None:
        yield record


def contents_of(file, record: Record) -> bytes:
    file.seek(record.offset)
    word, contents = file.read(WORD.size), file.read(record.length)
    if _checksum(record.previous, word, [contents]) != record.checksum:
        raise FormatError(f"the record at byte {record.offset} changed since the stream was opened: open it again")
    return contents
