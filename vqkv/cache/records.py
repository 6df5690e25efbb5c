"""Records of an append-only file: three little-endian words (length, tokens, CRC32) and ``length`` bytes.

A length beyond the end of the file is a record cut short, so nothing is allocated for it.
"""

import struct
import zlib
from typing import NamedTuple

WORDS = struct.Struct("<3Q")


class Record(NamedTuple):
    """Where a record lies. ``tokens``: of its own; ``seq_len``: of the snapshot it completes."""

    offset: int
    length: int
    tokens: int
    crc: int
    seq_len: int = 0

    @property
    def end(self) -> int:
        """The byte after it."""
        return self.offset + WORDS.size + self.length


def checksum(seed: int, tokens: int, contents: bytes) -> int:
    """CRC32 of a record; ``seed``: of what comes before it and of its number."""
    return zlib.crc32(contents, zlib.crc32(WORDS.pack(seed, tokens, len(contents))))


def framed(seed: int, tokens: int, contents: bytes) -> bytes:
    """A record as it is written."""
    return WORDS.pack(len(contents), tokens, checksum(seed, tokens, contents)) + contents


def read_record(file, size: int, offset: int, seed: int) -> tuple[Record, bytes] | None:
    """The record at ``offset`` and its contents; None unless it is whole and unaltered."""
    file.seek(offset)
    words = file.read(WORDS.size)
    if len(words) < WORDS.size:
        return None
    length, tokens, crc = WORDS.unpack(words)
    if length > size - offset - WORDS.size:
        return None
    contents = file.read(length)
    return (Record(offset, length, tokens, crc), contents) if checksum(seed, tokens, contents) == crc else None
