"""The file of a snapshot: frames in a chain of checksums, the last of which says what the others mean.

    magic (8 bytes), version (uint32)
    frames: kind (uint8), bytes as stored (uint32), bytes as they were (uint32), content (zstd), checksum (uint64)

Kinds: INDEX, frames of the index in their order (native/prefix_index_snapshot.cpp); STATE, the last, a
SavedState as MessagePack. A checksum is XXH64 of its frame with the checksum before as the seed, and the first
seed is that of magic and version: so a changed byte, a frame too many, too few or in another place, and anything
behind the end are all found. It says that the file is as it was written, and not who wrote it.

A file is read through and checked before anything of it is used. It is written under another name, forced to the
disk, and takes its name in one step; the one before stays as `<name>.previous`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import zstandard

from app.errors import SnapshotRefused
from app.hashing import digest
from app.saved_state import SavedState

MAGIC = b"KVIXSNAP"
VERSION = 2
FRAME_BYTES_MAX = 1 << 30

INDEX, STATE = 1, 2

_START = struct.Struct("<8sI")
_HEAD = struct.Struct("<BII")
_CHECKSUM = struct.Struct("<Q")
_ZSTD_LEVEL = 1  # hashes do not shrink, and the rest does at any level


def previous_of(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


class SnapshotWriter:
    """Blocking calls, for a thread. `discard` in place of `finish` leaves all as it was; behind it, it does nothing."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, as all calls do."""
        self._path = path
        self._unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        self._file = self._unfinished.open("wb")
        self._compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        start = _START.pack(MAGIC, VERSION)
        self._checksum = digest(start)
        self._file.write(start)

    def add(self, frame: bytes, kind: int = INDEX) -> None:
        stored = self._compressor.compress(frame)
        head = _HEAD.pack(kind, len(stored), len(frame))
        self._checksum = digest(head + stored, self._checksum)
        self._file.write(head)
        self._file.write(stored)
        self._file.write(_CHECKSUM.pack(self._checksum))

    def finish(self, state: SavedState) -> int:
        """The file takes its place; returns its bytes."""
        self.add(msgspec.msgpack.encode(state), STATE)
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        if self._path.exists():
            os.replace(self._path, previous_of(self._path))
        os.replace(self._unfinished, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return size

    def discard(self) -> None:
        self._file.close()
        self._unfinished.unlink(missing_ok=True)


class SnapshotReader:
    """A file that has been read through and is as it was written. Blocking calls, for a thread."""

    def __init__(self, path: Path) -> None:
        """Raises SnapshotRefused, also when the file cannot be read."""
        self._path = path
        try:
            with path.open("rb") as file:
                self.state = _checked_state(file)
                self.size = file.tell()
        except OSError as error:
            raise SnapshotRefused(f"{path} cannot be read: {error.strerror or error}") from error
        except SnapshotRefused as error:
            raise SnapshotRefused(f"{path} {error}") from error

    def frames(self) -> Iterator[bytes]:
        """Those of the index. Raises SnapshotRefused when the file has changed since."""
        try:
            with self._path.open("rb") as file:
                for kind, content in _frames(file):
                    if kind == INDEX:
                        yield content
        except (OSError, SnapshotRefused) as error:
            raise SnapshotRefused(f"{self._path} changed while it was read: {error}") from error


def _checked_state(file: BinaryIO) -> SavedState:
    last = b""
    last_kind = INDEX
    for kind, content in _frames(file, opened=(STATE,)):
        if last_kind == STATE:
            raise SnapshotRefused("is damaged: something follows its end")
        last_kind, last = kind, content
    if last_kind != STATE:
        raise SnapshotRefused("is damaged: its end is missing")
    try:
        return msgspec.msgpack.decode(last, type=SavedState)
    except msgspec.DecodeError as error:
        raise SnapshotRefused(f"does not say what it holds: {error}") from error


def _frames(file: BinaryIO, opened: tuple[int, ...] = (INDEX, STATE)) -> Iterator[tuple[int, bytes]]:
    """(kind, content) of every frame, checked; the content only of the kinds in `opened`."""
    start = file.read(_START.size)
    if start[: len(MAGIC)] != MAGIC:
        raise SnapshotRefused("is not a snapshot of an indexer")
    if len(start) < _START.size or _START.unpack(start)[1] != VERSION:
        version = int.from_bytes(start[len(MAGIC) :], "little")
        raise SnapshotRefused(f"has version {version}, and this program reads version {VERSION}")
    checksum = digest(start)
    decompressor = zstandard.ZstdDecompressor()
    while head := file.read(_HEAD.size):
        at = file.tell() - len(head)
        if len(head) < _HEAD.size:
            raise SnapshotRefused(f"is damaged: it ends within the frame at byte {at}")
        kind, stored_bytes, bytes_ = _HEAD.unpack(head)
        if kind not in (INDEX, STATE) or max(stored_bytes, bytes_) > FRAME_BYTES_MAX:
            raise SnapshotRefused(f"is damaged: there is no frame at byte {at}")
        stored = file.read(stored_bytes)
        said = file.read(_CHECKSUM.size)
        checksum = digest(head + stored, checksum)
        if said != _CHECKSUM.pack(checksum):
            raise SnapshotRefused(f"is damaged: the checksum of the frame at byte {at} is wrong")
        if kind not in opened:
            yield kind, b""
            continue
        try:
            content = decompressor.decompress(stored, max_output_size=bytes_)
        except zstandard.ZstdError as error:
            raise SnapshotRefused(f"is damaged: the frame at byte {at} cannot be opened: {error}") from error
        yield kind, content
