"""The part of a start that may take seconds, such as reading a snapshot of many blocks. It runs beside the server, so
/healthz already answers, and nobody takes the process for dead and restarts it.

Until it is over only the probes and the metrics are answered, since half a picture is worse than none
(app/api/starting.py). If it fails by a fault of ours, the process ends (`on_failure`). A process that is ended before it
is over leaves the snapshots as they are.
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
        """Afterwards `is_over` says whether the start had come to its end."""
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
