"""The bytes of a snapshot, wherever they lie: frames in a chain of checksums; the last says what the others mean.

    magic (8 bytes), version (uint32)
    frames: kind (uint8), bytes as stored (uint32), bytes as they were (uint32), content (zstd), checksum (uint64)

Kinds: INDEX, frames of the index in their order (native/prefix_index_snapshot.cpp) and of hints (app/service/hints.py);
STATE, the last, a SavedState as MessagePack. A checksum is XXH64 of its frame with the checksum before as the seed,
and the first seed is that of magic and version: so a changed byte, a frame too many, too few or in another place, and
anything behind the end are all found. It says that the bytes are as they were written, and not who wrote them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

import msgspec
import zstandard

from app.errors import UNDECODABLE, SnapshotRefused
from app.hashing import digest
from app.service.saved_state import SavedState

MAGIC = b"KVIXSNAP"
# 4 did not say which blocks follow which, 3 had no claims of owners and no hints, 2 no contents for fuzzy matches.
VERSION = 5
VERSIONS_READ = (2, 3, 4, 5)
FRAME_BYTES_MAX = 1 << 30

INDEX, STATE = 1, 2

_START = struct.Struct("<8sI")
_HEAD = struct.Struct("<BII")
_CHECKSUM = struct.Struct("<Q")
_ZSTD_LEVEL = 1  # hashes do not shrink, and the rest does at any level


class FrameEncoder:
    """`start`, then `index` as often as wanted, then `state`: their results, one behind the other, are a snapshot."""

    def __init__(self) -> None:
        self.start = _START.pack(MAGIC, VERSION)
        self._checksum = digest(self.start)
        self._compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)

    def index(self, content: bytes) -> bytes:
        return self._frame(INDEX, content)

    def state(self, state: SavedState) -> bytes:
        return self._frame(STATE, msgspec.msgpack.encode(state))

    def _frame(self, kind: int, content: bytes) -> bytes:
        stored = self._compressor.compress(content)
        head = _HEAD.pack(kind, len(stored), len(content))
        self._checksum = digest(head + stored, self._checksum)
        return b"".join((head, stored, _CHECKSUM.pack(self._checksum)))


class FrameDecoder:
    """Reads pieces of a snapshot in their order; each begins and ends between two frames, the first with `start`.

    All calls raise SnapshotRefused. Without `contents` it only checks, and `finish` has the state.
    """

    def __init__(self, *, contents: bool) -> None:
        self._contents = contents
        self._checksum: int | None = None
        self._at = 0
        self._state: bytes | None = None
        self._decompressor = zstandard.ZstdDecompressor()

    def frames(self, piece: BinaryIO) -> Iterator[bytes]:
        """The frames of the index in it."""
        if self._checksum is None:
            self._checksum = self._begin(piece)
        while head := piece.read(_HEAD.size):
            kind, content = self._frame(piece, head)
            if self._state is not None:
                raise SnapshotRefused("is damaged: something follows its end")
            if kind == STATE:
                self._state = content
            else:
                yield content

    def check(self, piece: BinaryIO) -> None:
        for _ in self.frames(piece):
            pass

    def finish(self) -> SavedState:
        """Everything was read."""
        if self._state is None:
            raise SnapshotRefused("is damaged: its end is missing")
        try:
            return msgspec.msgpack.decode(self._state, type=SavedState)
        except UNDECODABLE as error:
            raise SnapshotRefused(f"does not say what it holds: {error}") from error

    def _begin(self, piece: BinaryIO) -> int:
        start = piece.read(_START.size)
        if start[: len(MAGIC)] != MAGIC:
            raise SnapshotRefused("is not a snapshot of an indexer")
        if len(start) < _START.size or _START.unpack(start)[1] not in VERSIONS_READ:
            version = int.from_bytes(start[len(MAGIC) :], "little")
            known = f"{VERSIONS_READ[0]} to {VERSIONS_READ[-1]}"
            raise SnapshotRefused(f"has version {version}, and this program reads {known}")
        self._at = len(start)
        return digest(start)

    def _frame(self, piece: BinaryIO, head: bytes) -> tuple[int, bytes]:
        if len(head) < _HEAD.size:
            raise SnapshotRefused(f"is damaged: it ends within the frame at byte {self._at}")
        kind, stored_bytes, bytes_ = _HEAD.unpack(head)
        if kind not in (INDEX, STATE) or max(stored_bytes, bytes_) > FRAME_BYTES_MAX:
            raise SnapshotRefused(f"is damaged: there is no frame at byte {self._at}")
        stored = piece.read(stored_bytes)
        said = piece.read(_CHECKSUM.size)
        self._checksum = digest(head + stored, self._checksum or 0)
        if said != _CHECKSUM.pack(self._checksum):
            raise SnapshotRefused(f"is damaged: the checksum of the frame at byte {self._at} is wrong")
        at, self._at = self._at, self._at + len(head) + len(stored) + len(said)
        if kind == INDEX and not self._contents:
            return kind, b""
        try:
            return kind, self._decompressor.decompress(stored, max_output_size=bytes_)
        except zstandard.ZstdError as error:
            raise SnapshotRefused(f"is damaged: the frame at byte {at} cannot be opened: {error}") from error
