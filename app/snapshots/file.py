"""Snapshots in a file. It is written under another name, forced to the disk, and takes its name in one step; the one
before stays as `<name>.previous`. A file is read through and checked before anything of it is used.

The disk and the compression are a thread's work, so that the event loop goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from app.errors import SnapshotRefused, StoreFailed
from app.service.saved_state import SavedState
from app.snapshots.frames import FrameDecoder, FrameEncoder

T = TypeVar("T")


def previous_of(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


class FileStore:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)

    async def begin(self) -> FileSink:
        with _told(self._path):
            return FileSink(self._path, SnapshotWriter(self._path))

    async def names(self) -> list[str]:
        return [str(path) for path in (self._path, previous_of(self._path)) if path.exists()]

    async def open(self, name: str) -> FileSource:
        return FileSource(await asyncio.to_thread(SnapshotReader, Path(name)))


class FileSink:
    def __init__(self, path: Path, writer: SnapshotWriter) -> None:
        self._path = path
        self._writer = writer

    async def add(self, frame: bytes) -> None:
        with _told(self._path):
            await _in_thread(lambda: self._writer.add(frame))

    async def finish(self, state: SavedState) -> int:
        with _told(self._path):
            return await _in_thread(lambda: self._writer.finish(state))

    async def discard(self) -> None:
        self._writer.discard()


class FileSource:
    def __init__(self, reader: SnapshotReader) -> None:
        self._reader = reader
        self.name, self.state, self.size = reader.name, reader.state, reader.size

    async def frames(self) -> AsyncIterator[bytes]:
        frames = self._reader.frames()
        waiting = asyncio.create_task(asyncio.to_thread(_next, frames))
        while (frame := await waiting) is not None:
            waiting = asyncio.create_task(asyncio.to_thread(_next, frames))
            yield frame


class SnapshotWriter:
    """Blocking calls, for a thread. `discard` in place of `finish` leaves all as it was; behind it, it does nothing."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, as all calls do."""
        self._path = path
        self._unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        self._file = self._unfinished.open("wb")
        self._encoder = FrameEncoder()
        self._file.write(self._encoder.start)

    def add(self, frame: bytes) -> None:
        self._file.write(self._encoder.index(frame))

    def finish(self, state: SavedState) -> int:
        """The file takes its place; returns its bytes."""
        self._file.write(self._encoder.state(state))
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
        with contextlib.suppress(OSError):
            self._unfinished.unlink(missing_ok=True)


class SnapshotReader:
    """A file that has been read through and is as it was written. Blocking calls, for a thread."""

    def __init__(self, path: Path) -> None:
        """Raises SnapshotRefused, also when the file cannot be read."""
        self._path = path
        self.name = str(path)
        try:
            with path.open("rb") as file:
                decoder = FrameDecoder(contents=False)
                decoder.check(file)
                self.state = decoder.finish()
                self.size = file.tell()
        except OSError as error:
            raise SnapshotRefused(f"{path} cannot be read: {error.strerror or error}") from error
        except SnapshotRefused as error:
            raise SnapshotRefused(f"{path} {error}") from error

    def frames(self) -> Iterator[bytes]:
        """Those of the index. Raises SnapshotRefused when the file has changed since."""
        try:
            with self._path.open("rb") as file:
                decoder = FrameDecoder(contents=True)
                yield from decoder.frames(file)
                decoder.finish()
        except (OSError, SnapshotRefused) as error:
            raise SnapshotRefused(f"{self._path} changed while it was read: {error}") from error


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreFailed(f"{path}: {error.strerror or error}") from error


async def _in_thread(call: Callable[[], T]) -> T:
    """Cancelled, it waits for the thread all the same: nobody else may touch the file before."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _next(frames: Iterator[bytes]) -> bytes | None:
    return next(frames, None)
