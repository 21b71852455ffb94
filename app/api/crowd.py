"""A connection past `connections_max` is told so, and closed; those that were there before it go on.

Probes and metrics are answered all the same: a process whose connections somebody has taken up is alive, and whoever
looks for the cause has to see it.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api import problems
from app.api.starting import ALWAYS
from app.connections import SURPLUS, ConnectionLimits


class Crowd:
    def __init__(self, app: ASGIApp, limits: ConnectionLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if SURPLUS not in scope or scope["path"] in ALWAYS:
            await self._app(scope, receive, send)
            return
        detail = self._limits.refuse()
        answer = problems.problem(
            503,
            "too-many-connections",
            detail,
            faults=[("", detail)],
            bound="connections_max",
            headers={"Retry-After": "1", "Connection": "close"},
        )
        await answer(scope, receive, send)
