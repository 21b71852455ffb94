"""Answers without a known end: a dump of what is held, and the feed of what happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.api import bodies
from app.api.document import described_stream
from app.api.wiring import wiring_of
from app.schemas.events import EventsRequest
from app.schemas.operations import DumpFields

NDJSON = "application/x-ndjson"
EVENT_STREAM = "text/event-stream"

router = APIRouter(prefix="/v1", tags=["operations"])


class _Stream(StreamingResponse):
    """Calls `on_end` once, however the stream ends: read to its end, left by its reader, broken."""

    def __init__(self, chunks: AsyncIterator[bytes], *, media_type: str, on_end: Callable[[], None]) -> None:
        # A proxy that gathers what it passes on would make a live feed a late one.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(chunks, headers=headers, media_type=media_type)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


@router.get(
    "/dump", **described_stream(NDJSON, "One batch of events a line.", line=EventsRequest, query=DumpFields)
)
async def dump(request: Request) -> Response:
    """What every source holds, as batches of events: each line is a body that `POST /v1/events` takes.

    Lines with `PrefixesStored` events come first; at the end a line without events for every source tells its
    last sequence number, or that it is `incomplete`: it changed while the dump was read, or was not whole before.
    Matches are answered meanwhile: a dump is made in slices of about a millisecond, as fast as it is read.
    """
    wiring = wiring_of(request)
    fields = bodies.validate_query(DumpFields, request, lists=("pods",))
    dumps = wiring.service.dumps
    slices = dumps.begin(None if fields.pods is None else frozenset(fields.pods))
    return _Stream(_in_turn(slices), media_type=NDJSON, on_end=dumps.end)


@router.get("/live", **described_stream(EVENT_STREAM, "Server-sent events: the kind, and an object as data."))
async def live(request: Request) -> Response:
    """What happens, as it happens: `batch`, `state`, `pod_added` and `pod_removed`.

    A reader that is too slow loses events and is told how many by `dropped`; the ids show the hole. Nothing is
    kept for a reader that comes back: `GET /v1/pods` is where to start anew.
    """
    wiring = wiring_of(request)
    bodies.refuse_query(request)
    subscription = wiring.service.live.subscribe()
    chunks = subscription.chunks(wiring.settings.live_heartbeat_s)
    return _Stream(chunks, media_type=EVENT_STREAM, on_end=subscription.end)


async def _in_turn(slices: Iterator[bytes]) -> AsyncIterator[bytes]:
    for chunk in slices:
        if chunk:
            yield chunk
        await asyncio.sleep(0)  # events and matches go first
