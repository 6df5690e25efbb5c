"""Keyframe + delta streams of a growing KV cache: one append-only file that a crash cannot spoil.

The VQ quality framework's temporal state compression (section 1): the cache is snapshotted at every step. Every
``interval`` steps all of it is written, in between only the tokens that the step appended. Steps are counted from 1;
keyframes are the steps ``interval``, 2 ``interval``, ...; the steps before the first are deltas on an empty cache. So
512 steps of one token, 131,328 token-states, become 8 keyframes of 2,304 token-states and 504 deltas.

File: ``MAGIC``, then a record (``records``) for the header and one for each step. A step's CRC32 is seeded with the
header's and with its number, so that no step is altered, moved, repeated or left out unseen.
"""

import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from vqkv.cache.records import WORDS, Record, checksum, framed, read_record
from vqkv.cache.snapshot_format import DELTA, KEYFRAME, KINDS, SIZES, StreamLayout, check_stored, header_of
from vqkv.errors import DataError, FormatError

MAGIC = b"vqkvsnap"

State = tuple[list[Tensor], list[Tensor]]


class SnapshotWriter:
    """Writes a stream of snapshots; also a context manager. It keeps the live cache itself, exactly, in CPU memory.

    ``keyframes`` and ``deltas`` are each ``"exact"`` (bit for bit, in the cache's dtype), ``"fp32"``, ``"fp16"``,
    ``"int4"`` (4-bit affine, the codec of ``presets.quanto(4)``), one fitted codec for everything, or a list over
    layers of (key codec, value codec) such as ``Compressor.codecs``. The defaults are the source's. ``interval``: steps
    per keyframe.

    A codec that encodes blocks of tokens gets the whole blocks of what is stored (of the cache for a keyframe, of a
    step's own tokens for a delta). The tokens after the last whole block are stored as a delta if a keyframe's, and
    exactly, in the cache's dtype, if a delta's: so a one-token delta under such a codec is exact.

    The file appears with the first ``append``. One writer at a time.
    """

    def __init__(self, path, keyframes="fp32", deltas="int4", interval: int = 64):
        if type(interval) is not int or interval < 1:
            raise DataError(f"interval {interval!r} must be a whole number from 1 on")
        self.path = Path(path)
        self.steps = self.seq_len = self._header_crc = 0
        self._stored, self._interval = {KEYFRAME: check_stored(keyframes), DELTA: check_stored(deltas)}, interval
        self._layout, self._file, self._live, self._closed = None, None, None, False

    @classmethod
    def resume(cls, path, live: State) -> "SnapshotWriter":
        """Go on after the last whole step of an existing stream; a record cut short at its end is removed.

        ``live``: (keys, values) of the exact cache, at least up to that step; tokens beyond it are for the caller to
        append again, from ``seq_len`` on. Of a stream that keeps every bit, ``SnapshotReader(path).state()`` is it.
        Raises ``FormatError`` if what follows the last whole step is damaged rather than cut short, ``DataError`` if
        ``live`` does not fit.
        """
        stream = SnapshotReader(path)
        if stream.damaged:
            raise FormatError(
                f"{path} is damaged after step {len(stream)}: {stream.tail_bytes} bytes would be lost. To go on "
                f"without them, truncate the file to {stream.file_bytes} bytes"
            )
        writer = cls(path, interval=stream.interval)
        writer._layout, writer.steps, writer._header_crc = stream._layout, len(stream), stream._records[0].crc
        if len(stream):
            writer.seq_len = stream.seq_len()
            tensors = [x[:, :, : writer.seq_len] for x in _own_tensors(*live)]
            stream._layout.check(tensors)
            if tensors[0].shape[2] != writer.seq_len:
                raise DataError(f"the live cache has {tensors[0].shape[2]} tokens, the stream {writer.seq_len}")
            writer._live = [[x] for x in tensors]
        writer._file = FileIO(path, "r+")  # unbuffered
        writer._file.truncate(stream.file_bytes)
        writer._file.seek(stream.file_bytes)
        return writer

    def append(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Write one step: the appended tokens, over layers (batch, num_kv_heads, new_tokens, head_dim).

        Raises ``DataError`` for tensors that do not fit the stream, that hold NaN or infinity, or that a codec cannot
        store (found out at the keyframe, where it is the keyframe's codec): then nothing was written or kept.
        """
        if self._closed:
            raise RuntimeError(f"this writer of {self.path} is closed: go on with SnapshotWriter.resume")
        new = _own_tensors(keys, values)
        if self._file is None:
            self._begin(new)
        else:
            self._layout.check(new)
        number = self.steps + 1
        live = [[*chunks, x] for chunks, x in zip(self._live or [[]] * len(new), new, strict=True)]
        if (kind := self._layout.kind(number)) == KEYFRAME:
            live = [[torch.cat(chunks, dim=2)] for chunks in live]
        stored = [chunks[-1] for chunks in live]
        self._write(framed(self._header_crc + number, stored[0].shape[2], self._layout.encode(kind, stored)))
        self._live, self.steps, self.seq_len = live, number, self.seq_len + new[0].shape[2]

    def close(self) -> None:
        """Wait for the disk and close the file."""
        if self._file is not None and not self._file.closed:
            try:
                os.fsync(self._file.fileno())
            finally:
                self._file.close()
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
            self._file = FileIO(self.path, "x")
        except FileExistsError as error:
            raise FormatError(f"{self.path} exists: SnapshotWriter.resume appends to it, or name another") from error
        self._header_crc = checksum(0, 0, contents)
        self._write(MAGIC + framed(0, 0, contents))

    def _write(self, record: bytes) -> None:
        left = memoryview(record)
        try:
            while left:
                left = left[self._file.write(left) :]
        except BaseException:  # part of it may be in the file: only resume can tell
            self._closed = True
            raise


def _own_tensors(keys, values) -> list[Tensor]:
    """Copies in CPU memory, layer by layer, keys before values. Raises ``DataError`` for anything but tensors."""
    lists = (keys, values)
    if not all(isinstance(role, list | tuple) and all(isinstance(x, Tensor) for x in role) for role in lists):
        raise DataError("keys and values must be lists over layers of tensors")
    if not keys or len(keys) != len(values):
        raise DataError(f"{len(keys)} layers of keys, {len(values)} of values: give as many, at least one")
    return [x.detach().to("cpu", copy=True).contiguous() for pair in zip(keys, values, strict=True) for x in pair]


class SnapshotReader:
    """Opens a stream and reads any snapshot back: ``len()`` whole steps, iteration over their states.

    Every checksum is verified on opening. What follows the last whole step is left aside: ``tail_bytes`` of it, and
    ``damaged`` says that it is not just cut short. Raises ``FormatError`` where not even the header is whole.
    Attributes: ``path``, ``interval``, ``num_layers``, ``batch_size``, ``num_kv_heads``, ``head_dim``, ``dtype``,
    ``side_bytes`` (learned tensors of the codecs, in the header).
    """

    def __init__(self, path):
        self.path = Path(path)
        if not self.path.is_file():
            raise FormatError(f"{path} is no file: write a stream with SnapshotWriter")
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = read_record(file, size, len(MAGIC), 0) if file.read(len(MAGIC)) == MAGIC else None
            if first is None:
                raise FormatError(f"{path} does not start with a whole snapshot header: cut, altered or no stream")
            self._layout = StreamLayout.parse(first[1])
            self._records = [first[0], *self._scan(file, size, first[0])]
            self.file_bytes = self._records[-1].end
            self.tail_bytes = size - self.file_bytes
            file.seek(self.file_bytes)
            words = file.read(WORDS.size)
        whole = len(words) == WORDS.size and WORDS.unpack(words)[0] <= self.tail_bytes - WORDS.size
        self.damaged = whole and any(words)  # zeros: a record that never reached the disk
        for name in (*SIZES, "dtype", "side_bytes"):
            setattr(self, name, getattr(self._layout, name))

    def _scan(self, file, size: int, header: Record) -> Iterator[Record]:
        number, offset, seq_len = 1, header.end, 0
        while (found := read_record(file, size, offset, header.crc + number)) is not None:
            record = found[0]
            seq_len = record.tokens + (seq_len if self._layout.kind(number) == DELTA else 0)
            yield record._replace(seq_len=seq_len)
            number, offset = number + 1, record.end

    def __len__(self) -> int:
        return len(self._records) - 1

    def __iter__(self) -> Iterator[State]:
        whole = None
        for number in range(1, len(self) + 1):
            part = self._read(number)
            if self._layout.kind(number) == DELTA and whole is not None:
                part = [torch.cat(pair, dim=2) for pair in zip(whole, part, strict=True)]
            whole = part
            yield whole[0::2], whole[1::2]

    def state(self, step: int = -1) -> State:
        """(keys, values), lists over layers of (batch, num_kv_heads, seq_len, head_dim) in the stream's dtype: the
        cache after ``step``, counted from 0 or, if negative, from the end. Raises ``IndexError`` beyond the stream,
        ``FormatError`` if the file has changed since it was opened."""
        number = self._number(step)
        parts = [self._read(i) for i in range(max(1, number - number % self.interval), number + 1)]
        whole = [torch.cat(pieces, dim=2) for pieces in zip(*parts, strict=True)]
        return whole[0::2], whole[1::2]

    def seq_len(self, step: int = -1) -> int:
        """Tokens in the cache after ``step``."""
        return self._records[self._number(step)].seq_len

    def report(self) -> dict:
        """Bytes on disk by kind, and ratios, header apart: against every snapshot in fp32 (the source's baseline) or
        fp16, and against the last one alone, the cache that a server really holds, in fp16."""
        steps = {kind: [] for kind in KINDS}
        for number, record in enumerate(self._records[1:], 1):
            steps[self._layout.kind(number)].append(record)
        states, seq_len, values = (
            sum(r.seq_len for r in self._records),
            self._records[-1].seq_len,
            self._layout.token_values,
        )
        baselines = {
            "every_fp32": states * values * 4,
            "every_fp16": states * values * 2,
            "live_fp16": seq_len * values * 2,
        }
        header = self._records[0].length
        return {
            "steps": len(self),
            "seq_len": seq_len,
            "token_states": states,
            "keyframe_token_states": sum(record.tokens for record in steps[KEYFRAME]),
            "delta_tokens": sum(record.tokens for record in steps[DELTA]),
            "keyframe_bytes": sum(record.length for record in steps[KEYFRAME]),
            "delta_bytes": sum(record.length for record in steps[DELTA]),
            "framing_bytes": len(MAGIC) + WORDS.size * len(self._records),
            "header_bytes": header,
            "side_bytes": self.side_bytes,
            "file_bytes": self.file_bytes,
            "tail_bytes": self.tail_bytes,
            **{f"{name}_bytes": count for name, count in baselines.items()},
            **{f"ratio_{name}": count / (self.file_bytes - header) for name, count in baselines.items()},
        }

    def _number(self, step: int) -> int:
        if not -len(self) <= step < len(self):
            raise IndexError(f"step {step} of a stream of {len(self)} steps")
        return step % len(self) + 1

    def _read(self, number: int) -> list[Tensor]:
        record = self._records[number]
        with open(self.path, "rb") as file:
            found = read_record(file, record.end, record.offset, self._records[0].crc + number)
        if found is None or found[0].crc != record.crc:
            raise FormatError(f"the record at byte {record.offset} changed since the stream was opened: open it again")
        return self._layout.decode(self._layout.kind(number), record.tokens, found[1])
