"""The live feed: what happens, told to whoever listens, and nothing kept for those who do not.

Every happening is encoded once, as a server-sent event, and appended to the queue of each subscriber. A queue
holds `queue_events_max` of them: one that is full loses what comes next, counts it, and says so in the stream
as soon as there is room, so a slow reader costs a bounded amount of memory and knows what it missed. With no
subscriber a happening costs one comparison: callers ask `is_heard` before they put its fields together.

Bounds: `subscribers_max` subscriptions, past them Overloaded; counters `refused` and `dropped`. All calls are
made from the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from app.errors import Overloaded

_GREETING = b": kvindexer live feed\n\n"
_HEARTBEAT = b": still here\n\n"


class LiveFeed:
    """`clock` gives Unix seconds: the `ts` of each event."""

    def __init__(
        self, *, subscribers_max: int, queue_events_max: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.refused = 0
        self.dropped = 0
        self._subscribers_max = subscribers_max
        self._queue_events_max = queue_events_max
        self._clock = clock
        self._told = 0
        self._closed = False
        self._subscriptions: set[Subscription] = set()

    @property
    def is_heard(self) -> bool:
        return bool(self._subscriptions)

    @property
    def subscribers(self) -> int:
        return len(self._subscriptions)

    def tell(self, kind: str, **fields: Any) -> None:
        """Queues an event of this kind for every subscriber."""
        self._told += 1
        chunk = _encode(kind, {"ts": self._clock(), **fields}, self._told)
        for subscription in self._subscriptions:
            if not subscription.put(chunk):
                self.dropped += 1

    def subscribe(self) -> Subscription:
        """Raises Overloaded; `end` it when nobody reads it any more."""
        if self._closed or len(self._subscriptions) >= self._subscribers_max:
            self.refused += 1
            why = (
                "ends" if self._closed else f"has live_subscribers_max = {self._subscribers_max} subscribers"
            )
            raise Overloaded(f"the live feed {why}")
        subscription = Subscription(self._queue_events_max, self._subscriptions.discard)
        self._subscriptions.add(subscription)
        return subscription

    def disconnect(self) -> None:
        """Every stream ends behind what is queued; whoever may, comes back."""
        for subscription in list(self._subscriptions):
            subscription.end()

    def close(self) -> None:
        """Every stream ends behind what is queued, and there are no new ones."""
        self._closed = True
        self.disconnect()


class Subscription:
    """One reader of the feed, and what waits for it."""

    def __init__(self, queue_events_max: int, leave: Callable[[Subscription], None]) -> None:
        self._queue: deque[bytes] = deque()
        self._queue_events_max = queue_events_max
        self._leave = leave
        self._dropped = 0  # since the reader was last told
        self._stirred = asyncio.Event()
        self._ended = False

    def put(self, chunk: bytes) -> bool:
        """False when there was no room."""
        if len(self._queue) >= self._queue_events_max:
            self._dropped += 1
            return False
        self._queue.append(chunk)
        self._stirred.set()
        return True

    def end(self) -> None:
        self._ended = True
        self._stirred.set()
        self._leave(self)

    async def chunks(self, heartbeat_s: float) -> AsyncIterator[bytes]:
        """Server-sent events as they come, and a comment after every `heartbeat_s` seconds of silence."""
        yield _GREETING
        while True:
            if not self._queue and not self._ended:
                self._stirred.clear()
                try:
                    async with asyncio.timeout(heartbeat_s):
                        await self._stirred.wait()
                except TimeoutError:
                    yield _HEARTBEAT
                    continue
            chunk = b"".join(self._queue)
            self._queue.clear()
            if self._dropped:
                chunk += _encode("dropped", {"dropped": self._dropped})
                self._dropped = 0
            if chunk:
                yield chunk
            elif self._ended:
                return


def _encode(kind: str, data: dict[str, Any], number: int | None = None) -> bytes:
    head = f"event: {kind}\n" if number is None else f"id: {number}\nevent: {kind}\n"
    return head.encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"
