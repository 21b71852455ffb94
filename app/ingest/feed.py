"""The bounded way from the receiver to the one writer.

The receiver puts whole batches, still undecoded, and what its trackers found out, in stream order; turns of the loop
(turns.py) drain them, a batch at the least, so that queries wait for a slice and never for a backlog.

Full means full: the receiver stops reading, ZMQ's own queues fill, the publisher drops, and the gap is
replayed. The bounds may be passed by what one message brings, which is what its source held back during a replay.

What a loss means for the source, and what makes up for it, is the service's to decide: it is told every report.
"""

from __future__ import annotations

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
from app.ingest.turns import Turns
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
    queue_batches_max: int = 8_192
    queue_bytes_max: int = 128 * 1024 * 1024


@dataclasses.dataclass(slots=True)
class Stream:
    """One followed source."""

    pod: str
    dp_rank: int
    endpoint: str
    replay_endpoint: str | None
    block_size: int | None = None  # as the pod was registered with
    resume_at: tuple[int, int] | None = None  # (number, digest) of the last batch of an earlier process
    followed: bool = True  # once false, what is still queued for it is dropped
    cause: str = ""  # of the last report that its receiver put, drained or not

    def __str__(self) -> str:
        return f"source {self.pod} rank {self.dp_rank}"

    def log_fields(self) -> dict[str, str | int]:
        return {"pod": self.pod, "dp_rank": self.dp_rank}


@dataclasses.dataclass(slots=True)
class FeedCounters:
    batches_applied: int = 0
    batches_unreadable: int = 0
    batches_refused: int = 0  # the writer raised
    batches_unfollowed: int = 0  # their pod was removed while they waited
    drain_slices: int = 0


class Feed:
    """`put`, `is_full` and `flush` are the receiver's."""

    def __init__(
        self,
        writer: Writer,
        decode: Decode,
        limits: QueueLimits,
        turns: Turns,
        resume_reading: Callable[[], None],
        *,
        is_blocked: Callable[[], bool] = lambda: False,
    ) -> None:
        """While the writer `is_blocked`, batches stay in the queue; whoever unblocks it calls `flush`."""
        self._is_blocked = is_blocked
        self._writer = writer
        self._decode = decode
        self._limits = limits
        self._turns = turns
        self._resume_reading = resume_reading
        self._queue: deque[tuple[Stream, Action]] = deque()
        self._reading_paused = False
        self.queued_bytes = 0
        self.pauses = 0  # times that a full queue stopped the reading
        self.counters = FeedCounters()

    @property
    def queued_batches(self) -> int:
        return len(self._queue)

    def _fills(self, part: float) -> bool:
        limits = self._limits
        return (
            len(self._queue) >= limits.queue_batches_max * part
            or self.queued_bytes >= limits.queue_bytes_max * part
        )

    def put(self, stream: Stream, action: Action) -> None:
        self._queue.append((stream, action))
        if isinstance(action, Deliver):
            self.queued_bytes += len(action.payload)

    def is_full(self) -> bool:
        """When it is, `resume_reading` will be called as soon as half of it is free."""
        if not self._fills(1.0):
            return False
        self.pauses += not self._reading_paused
        self._reading_paused = True
        return True

    def flush(self) -> None:
        """Have what was put drained."""
        if self._queue:
            self._turns.ask(self._drain)

    def close(self) -> None:
        """What is queued is not applied."""
        self._queue.clear()
        self.queued_bytes = 0

    def _drain(self, stop_at_s: float) -> bool:
        self.counters.drain_slices += 1
        try:
            while self._queue and not self._is_blocked():
                self._take()
                if time.perf_counter() >= stop_at_s:
                    break
        finally:
            # Whatever failed: the others that are queued have waited long enough.
            if self._queue and not self._is_blocked():
                self.flush()
            if self._reading_paused and not self._fills(0.5):
                self._reading_paused = False
                self._resume_reading()
        return False  # it has asked

    def _take(self) -> None:
        stream, action = self._queue.popleft()
        if isinstance(action, Deliver):
            self.queued_bytes -= len(action.payload)
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
        self._writer.set_source_state(
            stream.pod,
            stream.dp_rank,
            report.state,
            gaps=report.gaps,
            replays=report.replays,
            cause=report.cause,
        )
