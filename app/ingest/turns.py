"""What the ingest does on the event loop: a slice at a time, and a round of the loop between two of them.

Reading sockets and draining the queue would each keep the loop for as long as engines publish. So they take turns, and a
query waits for one slice: in the round between, what it sent is read and answered, and the answer goes out before the
next slice. What is done in a turn is no part of the request that asked for it, if one did: a log line of a stream must
not carry that one's number.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable

Work = Callable[[float], bool]
"""Takes the time (perf_counter) at which its slice is over, does a step at the least, and says whether there is more."""


class Turns:
    """All calls on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slice_s: float) -> None:
        self._loop = loop
        self._slice_s = slice_s
        self._asking: deque[Work] = deque()
        self._is_scheduled = False

    def ask(self, work: Work) -> None:
        """It has a turn behind those that asked before; one, however often it asks."""
        if work not in self._asking:
            self._asking.append(work)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn, context=contextvars.Context())

    def _turn(self) -> None:
        work = self._asking.popleft()
        try:
            if work(time.perf_counter() + self._slice_s) and work not in self._asking:
                self._asking.append(work)
        finally:
            self._is_scheduled = bool(self._asking)
            if self._is_scheduled:
                # Not in the next round but in the one after: what that one reads is answered at its end.
                self._loop.call_soon(self._loop.call_soon, self._turn)
