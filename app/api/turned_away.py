"""Requests that their connection has refused already (app/serving/connections.py), and that are told so like any other.

Of a connection past `connections_max` probes and metrics are answered all the same: a process whose connections somebody
has taken up is alive, and whoever looks for the cause has to see it. A body behind an offer to upgrade is refused,
because the server's parser takes its bytes for another protocol, and then for the next request.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api import problems
from app.api.starting import ALWAYS
from app.serving.connections import REFUSAL, ConnectionLimits, Refusal


class TurnedAway:
    def __init__(self, app: ASGIApp, limits: ConnectionLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = scope.get(REFUSAL)
        if refusal is None or (refusal is Refusal.CROWD and scope["path"] in ALWAYS):
            await self._app(scope, receive, send)
        elif refusal is Refusal.CROWD:
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
        else:
            detail = "a body behind an Upgrade is not read: this is HTTP/1.1, send it without"
            answer = problems.problem(
                400, "upgrade-with-body", detail, faults=[("", detail)], headers={"Connection": "close"}
            )
            await answer(scope, receive, send)
