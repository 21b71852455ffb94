"""The ASGI application: settings in, the routes and what stands in front of them out.

The event loop's thread is the one writer. The ZMQ ingest reads and applies in short turns of the same loop; a timer
gives the service its slices of expiry. The parts behind the routes are put together in app/assembly.py; how they
start and end is in app/lifecycle.py.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from app import __version__
from app.api import (
    compatibility,
    compatible_queries,
    document,
    events,
    fuzzy,
    match,
    operations,
    owners,
    pages,
    pods,
    prefixes,
    problems,
    route,
    streams,
)
from app.api.access import Access
from app.api.body_bound import BodyBound
from app.api.observation import RequestObservation
from app.api.short_cut import ShortCut
from app.api.short_way import ShortWay
from app.api.starting import Starting
from app.api.turned_away import TurnedAway
from app.api.wiring import Wiring, attach
from app.assembly import assembled
from app.config import Settings
from app.lifecycle import Parts, running
from app.start import Start

DESCRIPTION = "Which pod already holds the KV cache of the longest leading part of a prompt?"


RESOURCES = (
    events,
    match,
    fuzzy,
    owners,
    route,
    prefixes,
    pods,
    operations,
    streams,
    compatibility,
    compatible_queries,
)


class Application(FastAPI):
    """FastAPI behind `front`: the framework's own layers cost more than a match, so they are not before it."""

    front: ASGIApp
    short_cut: ShortCut | None  # for a server that can answer hot requests where it reads them
    start: Start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)

    async def framework(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)


def create_app(
    settings: Settings, *, clock: Callable[[], float] = time.monotonic, short_way: bool = True
) -> Application:
    """Raises InvalidSettings for configured pods and keys that cannot be.

    Without `short_way` every request takes the framework's: the answers are the same, as the tests show.
    """
    parts = assembled(settings, clock)
    app = Application(
        title="kvindexer",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lambda _app: running(parts),
    )
    app.start = parts.start
    wiring = _wiring(parts, clock)
    attach(app, wiring)
    for resource in RESOURCES:
        app.include_router(resource.router)
    _set_front(app, parts, wiring, short_way=short_way)
    pages.install(app)
    problems.install(app)
    document.install(app)
    return app


def _wiring(parts: Parts, clock: Callable[[], float]) -> Wiring:
    replica = parts.replica
    return Wiring(
        parts.settings,
        parts.service,
        parts.writer,
        parts.metrics,
        clock,
        lambda: parts.readiness.missing() + (replica.missing() if replica else []),
        parts.router,
        parts.tokenizer,
        parts.connections,
        replica.stats if replica else None,
        parts.discovery.stats,
    )


def _set_front(app: Application, parts: Parts, wiring: Wiring, *, short_way: bool) -> None:
    """From the inside out. What must hold for every request (keys and rates, where there are any; metrics) stands
    outside of the short way, so that no request can go around it."""
    short = ShortWay(app.framework, wiring=wiring) if short_way else None
    bound = BodyBound(short or app.framework, parts.connections.body_room)
    front: ASGIApp = Starting(bound, parts.start)
    access = None
    if parts.keys.is_needed or parts.settings.rate_requests_per_s:
        access = Access(front, keys=parts.keys, clock=wiring.clock, page=functools.partial(pages.page, 401))
        front = access
    observation = RequestObservation(
        TurnedAway(front, parts.connections),
        metrics=parts.metrics,
        access_log_every=parts.settings.access_log_every,
        spans=parts.spans,
    )
    app.front = observation
    # A span is of a task, so where there are spans every request has one.
    app.short_cut = None
    if short is not None and parts.spans is None:
        app.short_cut = ShortCut(
            short, start=parts.start, access=access, observation=observation, clock=wiring.clock
        )
