"""What is recorded of every request: its ids, its duration by route template, and, where that is configured, a line of
the access log and a span.

It wraps both the framework and the short way: one wrapped `send`, no task, no copy of a body. The request's id goes
out with every answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.metrics.metrics import Metrics
from app.observability.correlation import CURRENT, Correlation, correlate
from app.observability.tracing import Spans

logger = logging.getLogger("app.access")

# A path that no route knows must not become a label: anybody could make as many as they like.
UNMATCHED = "unmatched"
PATH_CHARS_MAX = 256  # of a line of the access log


class RequestObservation:
    """`access_log_every`: one request of so many is logged, 0 is none. `spans`: None is none."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        access_log_every: int = 0,
        spans: Spans | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log_every = access_log_every
        self._unlogged = 0
        self._spans = spans
        self.clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._observe(self._app, scope, receive, send, correlate(scope["headers"]), self.clock())

    def going_on(self, app: ASGIApp, correlation: Correlation, started_s: float) -> ASGIApp:
        """`app` for the rest of a request that began elsewhere, at `started_s` of this clock."""

        async def go_on(scope: Scope, receive: Receive, send: Send) -> None:
            await self._observe(app, scope, receive, send, correlation, started_s)

        return go_on

    def note(self, method: str, path: str, client: object, route: str, status: int, started_s: float) -> None:
        """A request that was answered elsewhere."""
        took_s = self.clock() - started_s
        self._metrics.observe_request(method, route, status, took_s)
        if self._access_log_every:
            self._log({"method": method, "path": path, "client": client}, route, status, took_s)

    async def _observe(
        self,
        app: ASGIApp,
        scope: Scope,
        receive: Receive,
        send: Send,
        correlation: Correlation,
        started: float,
    ) -> None:
        status = 500
        span = None if self._spans is None else self._spans.start(correlation, scope["method"], scope["path"])
        if span is not None:
            correlation = span.correlation
        # Not reset: the task is the request's, and a fault is logged by the server when we are through.
        CURRENT.set(correlation)
        request_id = (b"x-request-id", correlation.request_id.encode("ascii"))

        async def send_seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), request_id]
            await send(message)

        try:
            await app(scope, receive, send_seen)
        finally:
            took_s = self.clock() - started
            route = getattr(scope.get("route"), "path_format", UNMATCHED)
            self._metrics.observe_request(scope["method"], route, status, took_s)
            if span is not None:
                span.end(scope["method"], route, status)
            if self._access_log_every:
                self._log(scope, route, status, took_s)

    def _log(self, scope: Mapping[str, Any], route: str, status: int, took_s: float) -> None:
        """Without the query string: it may have a cache salt."""
        self._unlogged += 1
        if self._unlogged < self._access_log_every:
            return
        self._unlogged = 0
        path = scope["path"][:PATH_CHARS_MAX]
        took_ms = round(took_s * 1_000, 3)
        client = scope["client"][0] if scope.get("client") else None
        logger.info(
            "%s %s %d %.3f ms, from %s",
            scope["method"],
            path,
            status,
            took_ms,
            client,
            extra={
                "method": scope["method"],
                "path": path,
                "route": route,
                "status": status,
                "duration_ms": took_ms,
                "client": client,
                "requests": self._access_log_every,
            },
        )
