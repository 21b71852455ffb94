"""Writes the picture to its store from time to time and at the end, and brings it back at the start.

Writing is a task on the event loop: a slice of about a millisecond there, its way into the store, the next slice.
Matches and events go on between; what changes behind the walk is written again at the end.
The last step, what changed since and the state, is one call on the loop, so the snapshot is of that instant.

A snapshot that fails leaves the ones before as they are, is logged with its cause and counted. Restoring happens
before anything is served or followed. The newest one that is whole is taken; a damaged or foreign one is refused
with its reason in the log, and the one before it is tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from app.errors import SnapshotRefused, StoreFailed
from app.index.prefix_index import IndexExport, PrefixIndex
from app.pods import PodSpec
from app.service import IndexerService
from app.service.hints import FRAME_MARK
from app.service.saved_state import Adoption, SavedState
from app.snapshots.store import SnapshotSink, SnapshotSource, SnapshotStore

logger = logging.getLogger(__name__)

NAMES_PER_SLICE = 8_192
NAME_BYTES_MIN = 8  # of one in a snapshot: its prefix hash, which nothing can compress
HINTS_PER_SLICE = 512
CHANGE_ROUNDS_MAX = 10_000  # then the rest is written at one go: changes come faster than they are written
_MEANINGLESS = "has a right checksum and no meaning"


class SnapshotKeeper:
    """Of one service and its index. `wall` gives Unix time, `place` adds where a log has been applied to."""

    def __init__(
        self,
        service: IndexerService,
        index: PrefixIndex,
        store: SnapshotStore,
        *,
        configured: frozenset[str],
        interval_s: float,
        wall: Callable[[], float] = time.time,
        place: Callable[[SavedState], SavedState] = lambda state: state,
    ) -> None:
        self._service = service
        self._index = index
        self._store = store
        self._place = place
        self._configured = configured
        self._interval_s = interval_s
        self._wall = wall
        self._task: asyncio.Task[None] | None = None
        self._figures = {"saved_at_seconds": 0, "saved_bytes": 0, "restored_blocks": 0}
        self._counts = {"saved": 0, "failed": 0, "refused": 0}

    def gauges(self) -> Mapping[str, int]:
        return self._figures

    def counters(self) -> Mapping[str, int]:
        return self._counts

    # -- the start

    async def restore(self) -> tuple[PodSpec, ...]:
        """Takes the newest one that is whole, if any; returns the pods that are registered because of it.

        Raises StoreFailed where nobody can say what there is.
        """
        for name in await self._store.names():
            source = await self._open(name)
            if source is not None:
                return await self._restore(source)
        return ()

    async def load(
        self, log: str, *, empty: Callable[[], None], adopted: Callable[[], None]
    ) -> SavedState | None:
        """Takes the newest whole one of this log, if any, in place of what is held: `empty` makes room for it, `adopted`
        is called when its pods are registered. Raises StoreFailed, and SnapshotRefused when it changed meanwhile."""
        for name in await self._store.names():
            source = await self._open(name)
            if source is None or source.state.log != log:
                continue
            empty()
            began_s = time.monotonic()
            adoption = self._service.adopt(source.state, configured=self._configured, at_s=self._wall())
            adopted()
            await self._read_frames(source, adoption)
            self._tell(source, adoption, began_s)
            return source.state
        return None

    async def _open(self, name: str) -> SnapshotSource | None:
        try:
            return await self._store.open(name)
        except SnapshotRefused as error:
            self._counts["refused"] += 1
            logger.error("snapshot refused: %s", error)
            return None

    async def _restore(self, source: SnapshotSource) -> tuple[PodSpec, ...]:
        began_s = time.monotonic()
        adoption = self._service.adopt(source.state, configured=self._configured, at_s=self._wall())
        try:
            await self._read_frames(source, adoption)
        except SnapshotRefused as error:  # it was whole a moment ago: what came of it is half a picture
            self._counts["refused"] += 1
            logger.error("snapshot given up: %s", error)
            for pod in self._service.pods.values():
                for dp_rank in pod.sources:
                    self._service.reset_source(pod.spec.name, dp_rank, restarted=False)
        self._tell(source, adoption, began_s)
        return adoption.specs

    def _tell(self, source: SnapshotSource, adoption: Adoption, began_s: float) -> None:
        state = source.state
        blocks = self._figures["restored_blocks"] = sum(slot.blocks for slot in self._index.slots())
        digest = self._service.stats()["digest"]
        logger.info(
            "restored %d blocks of %d pods from %s, %.0f s old, in %.1f s; digest %s, saved as %s; %d pods left out",
            blocks,
            len(state.pods) - adoption.left_out,
            source.name,
            self._wall() - state.at_s,
            time.monotonic() - began_s,
            digest,
            state.digest,
            adoption.left_out,
        )

    async def _read_frames(self, source: SnapshotSource, adoption: Adoption) -> None:
        shingle = self._index.shingle
        takes_contents = shingle is not None and shingle == source.state.shingle
        if shingle is not None and not takes_contents:
            logger.warning(
                "%s has no contents for fuzzy matches as this program makes them: these begin with what is stored now",
                source.name,
            )
        importing = self._index.start_import(
            saved_at=adoption.saved_at,
            elapsed=adoption.elapsed,
            now=adoption.now,
            takes_contents=takes_contents,
        )
        for slot, context, source_id in adoption.places:
            importing.slot(slot, context=context, source=source_id)
        for saved, owner in adoption.owners:
            importing.owner(saved, owner=owner)
        most = source.size // NAME_BYTES_MIN
        importing.expect(
            other_names=min(adoption.other_names, most),
            entries={context: min(entries, most) for context, entries in adoption.entries.items()},
        )
        hints = []  # until their blocks are all there
        try:
            async for frame in source.frames():
                if frame.startswith(FRAME_MARK):
                    hints.append(frame)
                elif not importing.frame(frame):
                    raise SnapshotRefused(f"a frame of {source.name} {_MEANINGLESS}")
        finally:
            done = False
            while not done:
                done = importing.settle(NAMES_PER_SLICE)
                await asyncio.sleep(0)
        sources = {slot.source: source_id for slot, _, source_id in adoption.places}
        contexts = {slot.context: context for slot, context, _ in adoption.places}
        for frame in hints:
            if not self._service.hints.restore(frame, sources, contexts):
                raise SnapshotRefused(f"a frame of {source.name} {_MEANINGLESS}")
            await asyncio.sleep(0)

    # -- while it runs, and the end

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name="snapshots")

    async def stop(self, grace_s: float) -> None:
        """The last snapshot; past the time of grace the one before stays. Nothing may be applied any more."""
        if self._task is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        try:
            async with asyncio.timeout(grace_s):
                await self.save()
        except TimeoutError:
            self._counts["failed"] += 1
            logger.error("the last snapshot took longer than %g s: the one before stays", grace_s)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.save()
            except Exception:  # the outermost loop of this task: it must outlive a fault of ours, and say so
                self._counts["failed"] += 1
                logger.exception("a snapshot failed")

    def saw(self, at_s: float) -> None:
        """There is a snapshot of this moment in the store, whoever wrote it."""
        self._figures["saved_at_seconds"] = max(self._figures["saved_at_seconds"], int(at_s))

    async def save(self, place: Callable[[SavedState], SavedState] | None = None) -> bool:
        """False when it failed, which is logged and counted, or when another replica is at it."""
        began_s = time.monotonic()
        try:
            size = await self._save(place)
        except StoreFailed as error:
            self._counts["failed"] += 1
            logger.error("no snapshot: %s", error)
            return False
        if size is None:
            return False
        self._counts["saved"] += 1
        self._figures["saved_at_seconds"] = int(self._wall())
        self._figures["saved_bytes"] = size
        logger.info("snapshot: %d bytes in %.2f s", size, time.monotonic() - began_s)
        return True

    async def _save(self, place: Callable[[SavedState], SavedState] | None) -> int | None:
        sink = await self._store.begin()
        if sink is None:
            return None
        writing = self._index.start_export()
        self._service.hints.start_export()
        try:
            await self._write_most(writing, sink)
            # No await from here to the state: what is written is of one instant.
            frames, shingle = self._write_rest(writing)
            state = self._service.describe(configured=self._configured, at_s=self._wall())
            state = (place or self._place)(msgspec.structs.replace(state, shingle=shingle))
            for frame in frames:
                await sink.add(frame)
            return await sink.finish(state)
        finally:
            writing.close()
            self._service.hints.end_export()
            await sink.discard()

    async def _write_most(self, writing: IndexExport, sink: SnapshotSink) -> None:
        """Everything once, and what changes meanwhile until little of it is left."""
        walks = [writing.names, writing.claims]
        if self._index.shingle is not None:
            walks.insert(1, writing.contents)
        for walk in walks:
            done = False
            while not done:
                frame, done = walk(NAMES_PER_SLICE)
                await sink.add(frame)
        done = not self._service.hints.is_on
        while not done:
            frame, done = self._service.hints.export(HINTS_PER_SLICE)
            await sink.add(frame)
        for _ in range(CHANGE_ROUNDS_MAX):
            frame, left = writing.changes(NAMES_PER_SLICE)
            await sink.add(frame)
            if self._index.shingle is not None:
                await sink.add(writing.contents(NAMES_PER_SLICE)[0])
            frame, done = writing.claims(NAMES_PER_SLICE)
            await sink.add(frame)
            if left < NAMES_PER_SLICE and done:
                break

    def _write_rest(self, writing: IndexExport) -> tuple[list[bytes], int | None]:
        """The last frames, and the shingle of the contents among all of them; None: there are none."""
        frames: list[bytes] = []
        left = 1
        while left:
            frame, left = writing.changes(NAMES_PER_SLICE)
            frames.append(frame)
        done = False
        while not done:
            frame, done = writing.claims(NAMES_PER_SLICE)
            frames.append(frame)
        done = not self._service.hints.is_on
        while not done:
            frame, done = self._service.hints.export(HINTS_PER_SLICE)
            frames.append(frame)
        shingle = self._index.shingle
        if shingle is not None:
            frames.append(writing.contents(NAMES_PER_SLICE)[0])
            if not writing.has_whole_contents():
                shingle = None
                logger.warning(
                    "blocks change faster than they are written: fuzzy matches are not in this snapshot"
                )
        return frames, shingle
