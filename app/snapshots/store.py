"""Where snapshots lie: a file of this machine (file.py) or the Redis that replicas share (redis_store.py).

A store has at most two, the newest and the one before it, and never half of one: what is written becomes the newest
in one step, or leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from app.service.saved_state import SavedState


class SnapshotSink(Protocol):
    """One that is being written. Cancelled, a call leaves nothing behind that runs on. Raises StoreFailed."""

    async def add(self, frame: bytes) -> None: ...
    async def finish(self, state: SavedState) -> int:
        """It is the newest now; returns its bytes."""

    async def discard(self) -> None:
        """In place of `finish`; behind it, it does nothing. Raises nothing."""


class SnapshotSource(Protocol):
    """One that has been read through and is as it was written."""

    name: str
    state: SavedState
    size: int

    def frames(self) -> AsyncIterator[bytes]:
        """Those of the index. Raises SnapshotRefused when it changed since."""


class SnapshotStore(Protocol):
    name: str

    async def begin(self) -> SnapshotSink | None:
        """None: another replica is writing one. Raises StoreFailed."""

    async def names(self) -> list[str]:
        """What there is, the newest first. Raises StoreFailed."""

    async def open(self, name: str) -> SnapshotSource:
        """Raises SnapshotRefused, also when it cannot be read."""
