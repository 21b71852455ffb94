"""Before the picture is there, only probes and metrics are answered; everything else is a 503 that says why.

It stands outside of both ways for a request, and once the start is over costs one look at a flag.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api import problems
from app.start import Start

ALWAYS = frozenset({"/healthz", "/readyz", "/metrics"})


class Starting:
    def __init__(self, app: ASGIApp, start: Start) -> None:
        self._app = app
        self._start = start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._start.is_over or scope["type"] != "http" or scope["path"] in ALWAYS:
            await self._app(scope, receive, send)
            return
        detail = "the process is starting: its snapshot is being read"
        answer = problems.problem(
            503,
            "starting",
            detail,
            faults=[("", detail)],
            headers={"Retry-After": "1", "Connection": "close"},
        )
        await answer(scope, receive, send)
