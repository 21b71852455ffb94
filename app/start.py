"""The part of a start that may take seconds, beside the server: a snapshot of many blocks is read while /healthz says
that the process lives, so nobody takes it for dead and starts it again.

Until it is over nothing is answered but the probes and the metrics: half a picture is worse than none
(app/api/starting.py).
A fault of ours ends the process: `on_failure`. An end before that leaves the snapshots as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine

logger = logging.getLogger(__name__)


class Start:
    def __init__(self) -> None:
        self.is_over = False
        self.failed = False
        self.on_failure: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None

    async def run(self, begin: Coroutine[None, None, None], *, aside: bool) -> None:
        """Returns at once when it goes on `aside`; raises what `begin` raises when it does not."""
        if aside:
            self._task = asyncio.create_task(self._watched(begin), name="start")
        else:
            await begin
            self.is_over = True

    async def stop(self) -> None:
        """Whoever ends the process looks at `is_over` behind this."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watched(self, begin: Coroutine[None, None, None]) -> None:
        try:
            await begin
        except Exception:  # the outermost frame of this task: said, and the end of the process
            self.failed = True
            logger.exception("the start failed")
            self.on_failure()
        else:
            self.is_over = True
