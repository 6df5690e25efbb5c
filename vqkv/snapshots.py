"""Keyframe + delta streams of a growing KV cache: one append-only file that a crash cannot spoil.

The VQ quality framework's temporal state compression (section 1): the cache is snapshotted at every step. Every
``interval`` steps all of it is written, in between only the tokens that the step appended. Steps are counted from 1;
keyframes are the steps ``interval``, 2 ``interval``, ...; the steps before the first are deltas on an empty cache. So
512 steps of one token, 131,328 token-states, become 8 keyframes of 2,304 token-states and 504 deltas.

File: ``MAGIC``, the header record, a record per step. A record is a little-endian word (kind 2 bits, tokens 24, length
38), ``length`` bytes, and 16 bytes of BLAKE2b over the checksum before it, the word and the bytes: so none can be
altered, moved, repeated or left out unseen. A step's bytes are tensors and nothing else, layer by layer, keys before
values: every size follows from the header, the number of tokens and what was read before.
"""

import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from vqkv.errors import DataError, FormatError
from vqkv.records import CHECKSUM, FRAMING, Record, contents_of, frame, next_record, read_word, scan
from vqkv.snapshot_layout import BROKEN, DELTA, HEADER, KEYFRAME, SIZES, Layout, check_stored, header_of

MAGIC = b"vqkvsnap"

State = tuple[list[Tensor], list[Tensor]]


class SnapshotWriter:
    """Writes a stream of snapshots; also a context manager. It keeps the live cache itself, exactly, in CPU memory.

    ``keyframes`` and ``deltas`` are each ``"exact"`` (bit for bit, in the cache's dtype), ``"fp32"``, ``"fp16"``,
    ``"int4"`` (4-bit affine, the codec of ``presets.quanto(4)``), one fitted codec for everything, or a list over
    layers of (key codec, value codec) such as ``Compressor.codecs``. The defaults are the source's. ``interval``: steps
    per keyframe; ``sync``: wait for the disk at every step.

    A codec that encodes blocks of tokens gets the whole blocks of what is stored (of the cache for a keyframe, of a
    step's own tokens for a delta). The tokens after the last whole block are stored as a delta if a keyframe's, and
    exactly, in the cache's dtype, if a delta's: so a one-token delta under such a codec is exact.

    The file appears with the first ``append``. One writer at a time.
    """

    def __init__(self, path, keyframes="fp32", deltas="int4", interval: int = 64, sync: bool = False):
        if type(interval) is not int or interval < 1:
            raise DataError(f"interval {interval!r} must be a whole number from 1 on")
        self.path, self.sync = Path(path), sync
        self.steps = self.seq_len = 0
        self._stored, self._interval = {KEYFRAME: check_stored(keyframes), DELTA: check_stored(deltas)}, interval
        self._layout, self._file, self._live, self._closed = None, None, None, False

    @classmethod
    def resume(cls, path, live: State | None = None, sync=False, discard_damage=False) -> "SnapshotWriter":
        """Go on after the last whole step of an existing stream; a record cut short at its end is removed.

        ``live``: (keys, values) of the exact cache, at least up to that step; tokens beyond it are for the caller to
        append again, from ``seq_len`` on. Without it the state is read back, which takes a stream that restores it
        exactly. Raises ``FormatError`` if what follows the last whole step is damaged rather than cut short, unless
        ``discard_damage`` allows to remove it; ``DataError`` if ``live`` is missing or does not fit.
        """
        stream = SnapshotReader(path)
        if stream.damaged and not discard_damage:
            raise FormatError(
                f"{path} is damaged after step {len(stream)}, at byte {stream.file_bytes}: {stream.tail_bytes} bytes "
                "would be lost. Copy the file and pass discard_damage=True to go on without them"
            )
        writer = cls(path, interval=stream.interval, sync=sync)
        writer._layout, writer.steps = stream._layout, len(stream)
        if len(stream):
            writer._live = [[x] for x in _live_state(stream, live)]
            writer.seq_len = stream.seq_len()
        writer._checksum = stream._records[-1].checksum
        writer._file = FileIO(path, "r+")  # unbuffered
        writer._file.truncate(stream.file_bytes)
        writer._file.seek(stream.file_bytes)
        return writer

    def append(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """One step: the appended tokens, over layers (batch, num_kv_heads, new_tokens, head_dim).

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
        kind = self._layout.kind(self.steps + 1)
        live = [[*chunks, x] for chunks, x in zip(self._live or [[]] * len(new), new, strict=True)]
        if kind == KEYFRAME:
            live = [[torch.cat(chunks, dim=2)] for chunks in live]
        stored = [chunks[-1] for chunks in live]
        self._write(frame(kind, stored[0].shape[2], self._layout.encode(kind, stored), self._checksum))
        self._live, self.steps, self.seq_len = live, self.steps + 1, self.seq_len + new[0].shape[2]

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
        try:
            self._layout = Layout.parse(contents, len(contents))  # codecs of our own, rebuilt as a reader does
        except FormatError as error:
            raise DataError(f"no reader would open a stream of these codecs: {error}") from error
        self._layout.check(new)
        try:
            self._file = FileIO(self.path, "x")
        except FileExistsError as error:
            raise FormatError(f"{self.path} exists: SnapshotWriter.resume appends to it, or name another") from error
        self._write(MAGIC + frame(HEADER, 0, contents, MAGIC))

    def _write(self, record: bytes) -> None:
        left = memoryview(record)
        try:
            while left:
                left = left[self._file.write(left) :]
            if self.sync:
                os.fsync(self._file.fileno())
        except BaseException:  # part of it may be in the file: only resume can tell
            self._closed = True
            raise
        self._checksum = record[-CHECKSUM:]


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
            magic = file.read(len(MAGIC))
            first = next_record(file, size, len(MAGIC), MAGIC) if magic == MAGIC else None
            if first is None or first.kind != HEADER:
                raise FormatError(f"{path} does not start with a whole snapshot header: cut, altered or no stream")
            self._layout = Layout.parse(contents_of(file, first), size)
            self._records = [first, *self._layout.numbered(scan(file, size, first))]
            self.file_bytes = self._records[-1].end
            self.tail_bytes = size - self.file_bytes
            word = read_word(file, size, self.file_bytes)
        self.damaged = word is not None and any(word)  # zeros: a record that never reached the disk
        for name in (*SIZES, "dtype", "side_bytes"):
            setattr(self, name, getattr(self._layout, name))

    def __len__(self) -> int:
        return len(self._records) - 1

    def __iter__(self) -> Iterator[State]:
        whole = None
        for record in self._records[1:]:
            part = self._read(record)
            if record.kind == DELTA and whole is not None:
                part = [torch.cat(pair, dim=2) for pair in zip(whole, part, strict=True)]
            whole = part
            yield whole[0::2], whole[1::2]

    def state(self, step: int = -1) -> State:
        """(keys, values), lists over layers of (batch, num_kv_heads, seq_len, head_dim) in the stream's dtype: the
        cache after ``step``, counted from 0 or, if negative, from the end. Raises ``IndexError`` beyond the stream,
        ``FormatError`` if the file has changed since it was opened or is no stream of this version of vqkv."""
        number = self._number(step)
        first = max(1, number - number % self.interval)
        parts = [self._read(record) for record in self._records[first : number + 1]]
        whole = [torch.cat(pieces, dim=2) for pieces in zip(*parts, strict=True)]
        return whole[0::2], whole[1::2]

    def seq_len(self, step: int = -1) -> int:
        """Tokens in the cache after ``step``."""
        return self._records[self._number(step)].seq_len

    def exact(self, step: int = -1) -> bool:
        """Whether ``state(step)`` is bit for bit the cache that was written."""
        number = self._number(step)
        kinds = {self._layout.kind(n) for n in {max(1, number - number % self.interval), number}}
        return all(self._layout.exact(kind) for kind in kinds)

    def every_snapshot_bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """What all snapshots in full would take in ``dtype`` (the source's baseline is fp32)."""
        return sum(record.seq_len for record in self._records) * self._layout.token_values * dtype.itemsize

    @property
    def live_bytes(self) -> int:
        """What the last snapshot alone, the cache that a server really holds, takes in fp16."""
        return self._records[-1].seq_len * self._layout.token_values * torch.float16.itemsize

    def report(self) -> dict:
        """Bytes on disk by kind and the ratios they make. ``ratio_*``: against every snapshot in fp32, in fp16, and the
        last one in fp16, header apart; ``total_ratio_*``: with the header (settings and side information) too."""
        of_kind = {kind: [r for r in self._records if r.kind == kind] for kind in (HEADER, KEYFRAME, DELTA)}
        header, keyframes, deltas = (sum(record.length for record in records) for records in of_kind.values())
        framing = len(MAGIC) + FRAMING * len(self._records)
        baselines = {
            "every_fp32": self.every_snapshot_bytes(torch.float32),
            "every_fp16": self.every_snapshot_bytes(torch.float16),
            "live_fp16": self.live_bytes,
        }
        return {
            "steps": len(self),
            "seq_len": self._records[-1].seq_len,
            "token_states": sum(record.seq_len for record in self._records),
            "keyframe_token_states": sum(record.tokens for record in of_kind[KEYFRAME]),
            "delta_tokens": sum(record.tokens for record in of_kind[DELTA]),
            "keyframe_bytes": keyframes,
            "delta_bytes": deltas,
            "framing_bytes": framing,
            "header_bytes": header,
            "side_bytes": self.side_bytes,
            "file_bytes": self.file_bytes,
            "tail_bytes": self.tail_bytes,
            **{f"{name}_bytes": count for name, count in baselines.items()},
            **{f"ratio_{name}": count / (self.file_bytes - header) for name, count in baselines.items()},
            **{f"total_ratio_{name}": count / self.file_bytes for name, count in baselines.items()},
        }

    def _number(self, step: int) -> int:
        if not -len(self) <= step < len(self):
            raise IndexError(f"step {step} of a stream of {len(self)} steps")
        return step % len(self) + 1

    def _read(self, record: Record) -> list[Tensor]:
        with open(self.path, "rb") as file:
            data = contents_of(file, record)
        try:
            return self._layout.decode(record.kind, record.tokens, data)
        except BROKEN as error:
            raise FormatError(f"the record at byte {record.offset} of {self.path} cannot be read: {error}") from error


def _live_state(stream: SnapshotReader, live: State | None) -> list[Tensor]:
    """The exact cache after the stream's last step, as the writer keeps it. Raises ``DataError`` if nobody has it."""
    if live is None:
        if not stream.exact():
            raise DataError(f"{stream.path} does not restore its last step exactly: pass the live cache (keys, values)")
        return _own_tensors(*stream.state())
    tensors = [x[:, :, : stream.seq_len()] for x in _own_tensors(*live)]
    stream._layout.check(tensors)
    if tensors[0].shape[2] != stream.seq_len():
        raise DataError(f"the live cache has {tensors[0].shape[2]} tokens, the stream {stream.seq_len()}")
    return tensors
