"""The bounded way from the receiver thread to the one writer on the event loop.

The thread puts whole batches, still undecoded, and what its trackers found out, in stream order; one
scheduled call on the loop drains them in slices of `drain_slice_s` (a batch at the least), and between two of
them the loop has a round of its own, so that queries wait for a slice or two and never for a backlog.
Decoding happens in the drain: it needs the interpreter either way, and the thread keeps up with the sockets.

Full means full: the thread stops reading, ZMQ's own queues fill, the publisher drops, and the gap is
replayed. The bounds may be passed by what one socket's turn brings (`SocketLimits`) and by what one input of a
tracker sets free, which is what its source held back during a replay.

No lock: each counter has one writing thread, and deque.append and popleft are atomic.

What a loss means for the source, and what makes up for it, is the service's to decide: it is told every report.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from app.errors import IndexerError, UnreadableBatch
from app.events import EventBatch, RejectedEvent
from app.ingest.actions import Action, Deliver, Report, Reset
from app.ingest.wire_fields import Reject
from app.pods import SourceState

logger = logging.getLogger(__name__)

# Whoever is told of such an event by HTTP can mend it. A stream goes on, and what it may have taken away would stay.
_MAY_HIDE_A_REMOVAL = frozenset({Reject.UNREADABLE, Reject.MISSING_FIELD, Reject.BAD_FIELD, Reject.BAD_HASH})


class Decode(Protocol):
    """The codec's `decode_batch`; raises UnreadableBatch."""

    def __call__(self, payload: bytes, *, block_size: int | None = None) -> EventBatch: ...


class Writer(Protocol):
    """The part of the service that a feed calls."""

    def apply(
        self, pod: str, dp_rank: int, batch: EventBatch, *, seq: int | None, digest: int | None = None
    ) -> Any: ...
    def position(self, pod: str, dp_rank: int) -> tuple[int, int] | None: ...
    def reset_source(self, pod: str, dp_rank: int, *, restarted: bool) -> None: ...
    def set_source_state(
        self, pod: str, dp_rank: int, state: SourceState, *, gaps: int = 0, replays: int = 0, cause: str = ""
    ) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the queue and of one slice of draining it."""

    queue_batches_max: int = 8_192
    queue_bytes_max: int = 128 * 1024 * 1024
    drain_slice_s: float = 0.00025


@dataclasses.dataclass(slots=True)
class Stream:
    """One followed source. Written by the loop's thread; `resume_at` is taken by the receiver's."""

    pod: str
    dp_rank: int
    endpoint: str
    replay_endpoint: str | None
    block_size: int | None = None  # as the pod was registered with
    resume_at: tuple[int, int] | None = None  # (number, digest) of the last batch of an earlier process
    followed: bool = True  # once false, what is still queued for it is dropped
    cause: str = ""  # of its last report

    def __str__(self) -> str:
        return f"source {self.pod} rank {self.dp_rank}"

    def log_fields(self) -> dict[str, str | int]:
        return {"pod": self.pod, "dp_rank": self.dp_rank}


@dataclasses.dataclass(slots=True)
class FeedCounters:
    """Written by the loop's thread only."""

    batches_applied: int = 0
    batches_unreadable: int = 0
    batches_refused: int = 0  # the writer raised
    batches_unfollowed: int = 0  # their pod was removed while they waited
    drain_slices: int = 0


class Feed:
    """`put`, `is_full` and `flush` belong to the receiver thread, the rest to the loop's."""

    def __init__(
        self,
        writer: Writer,
        decode: Decode,
        limits: QueueLimits,
        loop: asyncio.AbstractEventLoop,
        resume_reading: Callable[[], None],
        *,
        is_blocked: Callable[[], bool] = lambda: False,
    ) -> None:
        """While the writer `is_blocked`, batches stay in the queue; whoever unblocks it calls `flush`."""
        self._is_blocked = is_blocked
        self._writer = writer
        self._decode = decode
        self._limits = limits
        self._loop = loop
        self._resume_reading = resume_reading
        self._queue: deque[tuple[Stream, Action]] = deque()
        self._put_items = self._put_bytes = 0  # written by the receiver thread
        self._taken_items = self._taken_bytes = 0  # written by the loop's thread
        self._reading_paused = False
        self._drain_scheduled = False
        self._closed = False
        self.pauses = 0  # times that a full queue stopped the reading
        self.counters = FeedCounters()

    @property
    def queued_batches(self) -> int:
        return self._put_items - self._taken_items

    @property
    def queued_bytes(self) -> int:
        return self._put_bytes - self._taken_bytes

    def _fills(self, part: float) -> bool:
        limits = self._limits
        return (
            self.queued_batches >= limits.queue_batches_max * part
            or self.queued_bytes >= limits.queue_bytes_max * part
        )

    # -- the receiver thread's side

    def put(self, stream: Stream, action: Action) -> None:
        self._queue.append((stream, action))
        self._put_items += 1
        if isinstance(action, Deliver):
            self._put_bytes += len(action.payload)

    def is_full(self) -> bool:
        """When it is, `resume_reading` will be called as soon as half of it is free."""
        if self._fills(1.0):
            self._reading_paused = True
            # The loop may have emptied the queue between the look and the mark.
            if self._fills(0.5):
                self.pauses += 1
                return True
            self._reading_paused = False
        return False

    def flush(self) -> None:
        """Have the loop drain what was put."""
        if self._queue and not self._drain_scheduled and not self._loop.is_closed():
            self._drain_scheduled = True
            self._loop.call_soon_threadsafe(self._drain)

    @property
    def is_deserted(self) -> bool:
        """The loop ended without a word: nobody will drain again."""
        return self._loop.is_closed()

    # -- the loop's side

    def close(self) -> None:
        """Nothing is applied any more. The receiver thread has ended before."""
        self._closed = True
        self._queue.clear()
        self._taken_items, self._taken_bytes = self._put_items, self._put_bytes

    def _drain(self) -> None:
        self._drain_scheduled = False
        self.counters.drain_slices += 1
        stop_at_s = time.perf_counter() + self._limits.drain_slice_s
        try:
            while self._queue and not self._closed and not self._is_blocked():
                self._take()
                if time.perf_counter() >= stop_at_s:
                    break
        finally:
            if self._queue and not self._drain_scheduled and not self._closed and not self._is_blocked():
                self._drain_scheduled = True
                # Not in the next round but in the one after: a request takes a round to be read and one to be answered.
                self._loop.call_soon(self._loop.call_soon, self._drain)
            if self._reading_paused and not self._fills(0.5):
                self._reading_paused = False
                self._resume_reading()

    def _take(self) -> None:
        stream, action = self._queue.popleft()
        self._taken_items += 1
        if isinstance(action, Deliver):
            self._taken_bytes += len(action.payload)
        if not stream.followed:
            self.counters.batches_unfollowed += isinstance(action, Deliver)
            return
        try:
            self._act(stream, action)
        except Exception as error:
            # The edge of one stream's work: its fault, foreseen or not, must not stop the others.
            self.counters.batches_refused += 1
            if not isinstance(error, IndexerError):
                logger.exception("%s: not applied", stream, extra=stream.log_fields())
            with contextlib.suppress(IndexerError):  # it may be the pod itself that the writer does not know
                self._report(stream, Report(SourceState.DEGRADED, cause=f"not applied: {error}"))

    def _act(self, stream: Stream, action: Action) -> None:
        if isinstance(action, Deliver):
            self._apply(stream, action)
        elif isinstance(action, Report):
            self._report(stream, action)
        elif isinstance(action, Reset):
            logger.info(
                "%s is forgotten: %s",
                stream,
                action.cause,
                extra={**stream.log_fields(), "cause": action.cause},
            )
            self._writer.reset_source(stream.pod, stream.dp_rank, restarted=action.restarted)

    def _apply(self, stream: Stream, delivery: Deliver) -> None:
        try:
            batch = self._decode(delivery.payload, block_size=stream.block_size)
        except UnreadableBatch as error:
            self.counters.batches_unreadable += 1
            # An empty batch in its place: its number has been seen, its content is lost.
            nothing = EventBatch(events=(), positions=())
            self._writer.apply(stream.pod, stream.dp_rank, nothing, seq=delivery.seq, digest=delivery.digest)
            cause = f"batch {delivery.seq} cannot be read: {error}"
            self._report(stream, Report(SourceState.DEGRADED, cause=cause))
        else:
            self._writer.apply(stream.pod, stream.dp_rank, batch, seq=delivery.seq, digest=delivery.digest)
            self.counters.batches_applied += 1
            if batch.rejected:
                self._doubt(stream, delivery.seq, batch.rejected)

    def _doubt(self, stream: Stream, seq: int, rejected: tuple[RejectedEvent, ...]) -> None:
        for event in rejected:
            if event.reason in _MAY_HIDE_A_REMOVAL:
                cause = f"event {event.index} of batch {seq} cannot be read: {event.detail}"
                self._report(stream, Report(SourceState.DEGRADED, cause=cause))
                return

    def _report(self, stream: Stream, report: Report) -> None:
        stream.cause = report.cause
        self._writer.set_source_state(
            stream.pod,
            stream.dp_rank,
            report.state,
            gaps=report.gaps,
            replays=report.replays,
            cause=report.cause,
        )
