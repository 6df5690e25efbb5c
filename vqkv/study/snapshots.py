"""Keyframe + delta streams of a growing KV cache: one append-only file that a crash cannot spoil.

The VQ quality framework's temporal state compression (section 1): the cache is snapshotted at every step. Every
``interval`` steps, counted from 1, all of it is written, in between only the tokens that the step appended.

File: ``MAGIC``, then a record for the header and one for each step: three little-endian words (length, tokens, CRC32)
and ``length`` bytes. A CRC32 goes on from the one before, so that no step is moved, repeated or left out unseen.
"""

import os
import struct
import zlib
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vqkv.errors import DataError, FormatError
from vqkv.runtime.checks import check_whole
from vqkv.study.snapshot_format import DELTA, KEYFRAME, KINDS, StreamLayout, check_stored, header_of

MAGIC = b"vqkvsnp3"
WORDS = struct.Struct("<3Q")
MOST = 1 << 32  # steps

State = tuple[list[Tensor], list[Tensor]]


class Step(NamedTuple):
    """Contents of one step of a stream. ``tokens``: its own; ``seq_len``: those of the snapshot it completes."""

    kind: str
    tokens: int
    seq_len: int
    contents: memoryview


def _checksum(before: int, tokens: int, contents) -> int:
    """CRC32 of a record; ``before``: that of the one before it."""
    return zlib.crc32(contents, zlib.crc32(WORDS.pack(len(contents), tokens, before)))


class SnapshotWriter:
    """Writes a stream of snapshots; also a context manager. It keeps the live cache itself, exactly, in CPU memory. The
    file appears with the first ``append``. One writer at a time.

    ``keyframes`` and ``deltas`` are each ``"exact"`` (bit for bit, in the cache's dtype), ``"fp32"``, ``"fp16"``,
    ``"int4"`` (4-bit affine, the codec of ``presets.quanto(4)``), one fitted codec for everything, or a list over
    layers of (key codec, value codec) such as ``Compressor.codecs``. The defaults are the source's. ``interval``: steps
    per keyframe. A codec that encodes blocks of tokens gets whole blocks; the tokens after the last are stored exactly:
    so a one-token delta under such a codec is exact.
    """

    def __init__(self, path, keyframes="fp32", deltas="int4", interval: int = 64):
        check_whole("interval", interval, 1, MOST)
        self.path = Path(path)
        self.steps = self.seq_len = self._crc = 0
        self._stored, self._interval = {KEYFRAME: check_stored(keyframes), DELTA: check_stored(deltas)}, interval
        self._layout, self._file, self._live, self._closed = None, None, None, False

    def append(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Write one step: the appended tokens, over layers (batch, num_kv_heads, new_tokens, head_dim).

        Raises ``DataError`` for tensors that do not fit the stream, that hold NaN or infinity, or that are beyond
        fp16's range where a codec is to store them: then nothing was written or kept.
        """
        if self._closed:
            raise RuntimeError(f"this writer of {self.path} is closed: begin another file with the whole live cache")
        if not len(keys) or len(keys) != len(values):
            raise DataError(f"{len(keys)} layers of keys, {len(values)} of values: give as many, at least one")
        pairs = zip(keys, values, strict=True)
        new = [x.detach().to("cpu", copy=True).contiguous() for pair in pairs for x in pair]
        if self._file is None:
            self._begin(new)
        else:
            self._layout.check(new)
        live = [[*chunks, x] for chunks, x in zip(self._live or [[]] * len(new), new, strict=True)]
        if (kind := self._layout.kind(self.steps + 1)) == KEYFRAME:
            live = [[torch.cat(chunks, dim=2)] for chunks in live]
        stored = [chunks[-1] for chunks in live]
        self._write(stored[0].shape[2], self._layout.encode(kind, stored))
        self._live, self.steps, self.seq_len = live, self.steps + 1, self.seq_len + new[0].shape[2]

    def close(self) -> None:
        """Wait for the disk and close the file."""
        if self._file is not None and not self._file.closed:
            with self._file:
                os.fsync(self._file.fileno())
        self._closed, self._live = True, None

    def __enter__(self) -> "SnapshotWriter":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def _begin(self, new: list[Tensor]) -> None:
        contents = header_of(new, self._stored, self._interval)
        self._layout = StreamLayout.parse(contents)  # codecs of our own, rebuilt as a reader does
        self._layout.check(new)
        try:
            self._file = open(self.path, "xb")  # noqa: SIM115 - closed by close()
        except FileExistsError as error:
            raise FormatError(f"{self.path} exists: name another file") from error
        self._file.write(MAGIC)
        self._write(0, contents)

    def _write(self, tokens: int, contents: bytes) -> None:
        crc = _checksum(self._crc, tokens, contents)
        self._closed = True  # unless all of it reaches the file
        self._file.write(WORDS.pack(len(contents), tokens, crc) + contents)
        self._file.flush()
        self._crc, self._closed = crc, False


class SnapshotReader:
    """Opens a stream, verifies every checksum and reads any snapshot back: ``len()`` whole steps, of caches as
    ``layout`` describes them. What follows the last whole step, ``tail_bytes`` of ``report``, is left aside. Raises
    ``FormatError`` where not even the header is whole."""

    def __init__(self, path):
        self.path = Path(path)
        if not self.path.is_file():
            raise FormatError(f"{path} is no file: write a stream with SnapshotWriter")
        with open(self.path, "rb") as file:
            data = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ) if os.path.getsize(path) else b"")
        records, end, crc = [], len(MAGIC), 0
        while len(words := data[end : end + WORDS.size]) == WORDS.size and data[: len(MAGIC)] == MAGIC:
            length, tokens, found = WORDS.unpack(words)
            contents = data[end + WORDS.size : end + WORDS.size + length]
            crc = _checksum(crc, tokens, contents)
            if len(contents) < length or crc != found:
                break
            end += WORDS.size + length
            records.append((contents, tokens))
        if not records:
            raise FormatError(f"{path} does not start with a whole snapshot header: cut, altered or no stream")
        self.layout, self.header_bytes = StreamLayout.parse(bytes(records[0][0])), len(records[0][0])
        self.file_bytes, self.tail_bytes = end, len(data) - end
        self._steps, seq_len = [], 0
        for number, (contents, tokens) in enumerate(records[1:], 1):
            kind = self.layout.kind(number)
            seq_len = tokens + (seq_len if kind == DELTA else 0)
            self._steps.append(Step(kind, tokens, seq_len, contents))

    def __len__(self) -> int:
        return len(self._steps)

    def state(self, step: int = -1) -> State:
        """(keys, values), lists over layers of (batch, num_kv_heads, seq_len, head_dim) in the stream's dtype: the
        cache after ``step``, counted from 0 or, if negative, from the end. Raises ``IndexError`` beyond the stream."""
        if not -len(self) <= step < len(self):
            raise IndexError(f"step {step} of a stream of {len(self)} steps")
        number = step % len(self) + 1
        first = max(1, number - number % self.layout.interval)
        parts = [self.layout.decode(part.kind, part.tokens, part.contents) for part in self._steps[first - 1 : number]]
        whole = [torch.cat(pieces, dim=2) for pieces in zip(*parts, strict=True)]
        return whole[0::2], whole[1::2]

    def report(self) -> dict:
        """Bytes on disk by kind, and ratios, header apart: against every snapshot in fp32 (the source's baseline) or
        fp16, and against the last one alone, the cache that a server really holds, in fp16."""
        keyframes, deltas = ([step for step in self._steps if step.kind == kind] for kind in KINDS)
        states, values = sum(step.seq_len for step in self._steps), self.layout.token_values
        seq_len = self._steps[-1].seq_len if self._steps else 0
        baselines = {
            "every_fp32": states * values * 4,
            "every_fp16": states * values * 2,
            "live_fp16": seq_len * values * 2,
        }
        return {
            "steps": len(self),
            "seq_len": seq_len,
            "token_states": states,
            "keyframe_token_states": sum(step.tokens for step in keyframes),
            "delta_tokens": sum(step.tokens for step in deltas),
            "keyframe_bytes": sum(len(step.contents) for step in keyframes),
            "delta_bytes": sum(len(step.contents) for step in deltas),
            "framing_bytes": len(MAGIC) + WORDS.size * (len(self) + 1),
            "header_bytes": self.header_bytes,
            "side_bytes": self.layout.side_bytes,
            "file_bytes": self.file_bytes,
            "tail_bytes": self.tail_bytes,
            **{f"{name}_bytes": count for name, count in baselines.items()},
            **{f"ratio_{name}": count / (self.file_bytes - self.header_bytes) for name, count in baselines.items()},
        }
