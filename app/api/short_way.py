"""The short way of hot requests: `POST /v1/match` and `POST /v1/events`, past the framework.

Of what a query costs on the long way, most is the framework: a route that does nothing takes twice as long
as an ASGI callable that does nothing. So this one stands in front of the routes and answers what it fully
understands; everything else (a field it does not know, a fault of any kind, another Accept) goes on
untouched, body included, and the routes answer it. They stay the whole truth: what is answered here is
answered the same there, which the tests hold by asking both.

It stands inside of whatever must hold for every request (app/main.py), so nothing can be gone around by it.

Refused, that is handed on: bodies that come in more than PIECES_MAX pieces or past `body_bytes_max`.
Cost beside that of the server, for 4,096 tokens: docs/performance-notes.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import bodies, short_events, short_match
from app.api.problems import fault_of_ours, problem_of
from app.api.wiring import Wiring
from app.errors import IndexerError, NoRoom

PIECES_MAX = 64

_NOTATIONS = {
    b"application/json": bodies.JSON,
    # As clients write it, each in its own way.
    b"application/json; charset=utf-8": bodies.JSON,
    b"application/json; charset=UTF-8": bodies.JSON,
    b"application/json;charset=utf-8": bodies.JSON,
    b"application/json;charset=UTF-8": bodies.JSON,
    b"application/msgpack": bodies.MSGPACK,
    b"application/x-msgpack": bodies.MSGPACK,
    b"application/octet-stream": bodies.OCTETS,
}
_WATCHED = frozenset({b"content-type", b"accept", b"content-encoding", b"content-length"})

Answer = Callable[
    [Wiring, str, bytes, bytes | memoryview], bytes | Awaitable[bytes] | None
]  # notation, query string, body


class Route(NamedTuple):
    """Names the request for the metrics, as a route of the framework would."""

    path_format: str


class Way(NamedTuple):
    """What is answered here of one path."""

    answer: Answer
    route: Route
    patience_s: float  # that an answer may wait for others to go out with


WAYS = {
    "/v1/match": Way(short_match.answer, Route("/v1/match"), 0.0005),
    # Nobody routes by these, and an event takes three times as long as a match.
    "/v1/events": Way(short_events.answer, Route("/v1/events"), 0.002),
}


class ShortWay:
    def __init__(self, app: ASGIApp, *, wiring: Wiring) -> None:
        self._app = app
        self._wiring = wiring
        self.body_bytes_max = wiring.settings.body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        way = WAYS.get(scope["path"]) if scope["type"] == "http" else None
        notation = None
        if way is not None and scope["method"] == "POST":
            notation = read_notation(scope["headers"], self.body_bytes_max)
        if way is None or notation is None:
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        try:
            body = await self._read_body(receive, messages)
        except NoRoom as error:
            await _refused(way.route, error)(scope, receive, send)
            return
        content = None if body is None else self.answer(way, notation, scope["query_string"], body)
        if isinstance(content, bytes):
            scope["route"] = way.route
            await _send(send, content)
        else:
            await (content or self._app)(scope, _again(messages, receive), send)

    def answer(
        self, way: Way, notation: str, query_string: bytes, body: bytes | memoryview
    ) -> bytes | ASGIApp:
        """The content of the answer, or whoever must go on with the request: what was done is done."""
        try:
            content = way.answer(self._wiring, notation, query_string, body)
        except IndexerError as error:
            return _refused(way.route, error)
        except Exception as fault:  # noqa: BLE001 - raised again by whoever goes on
            # A batch may be applied in part: no second try on the long way, which would say the same.
            return _failed(way.route, fault)
        if content is None:
            return self._app
        return content if isinstance(content, bytes) else _awaited(way.route, content)

    async def _read_body(self, receive: Receive, messages: list[Message]) -> bytes | None:
        """The whole body, None when it is not for us; `messages` is what was received."""
        body: bytes = b""
        while len(messages) < PIECES_MAX:
            message = await receive()
            messages.append(message)
            if message["type"] != "http.request":
                return None
            piece: bytes = message.get("body", b"")
            body = body + piece if body else piece
            if len(body) > self.body_bytes_max:
                return None
            if not message.get("more_body", False):
                return body
        return None


def _refused(route: Route, error: IndexerError) -> ASGIApp:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = route
        await problem_of(error)(scope, receive, send)

    return refuse


def _failed(route: Route, fault: Exception) -> ASGIApp:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = route
        await fault_of_ours()(scope, receive, send)
        raise fault

    return fail


def _awaited(route: Route, content: Awaitable[bytes]) -> ASGIApp:
    """For an answer that takes time, as where a batch goes through the log of replicas."""

    async def finish(scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = route
        try:
            finished = await content
        except IndexerError as error:
            await _refused(route, error)(scope, receive, send)
        except Exception:
            await fault_of_ours()(scope, receive, send)
            raise
        else:
            await _send(send, finished)

    return finish


def read_notation(headers: Sequence[tuple[bytes, bytes]], bytes_max: int) -> str | None:
    """The notation of the body; None for headers that the short way does not understand."""
    notation = accept = None
    for name, value in headers:
        if name not in _WATCHED:
            continue
        if name == b"content-length":
            if len(value) > 18 or not value.isdigit() or int(value) > bytes_max:
                return None
        elif name == b"content-type" and notation is None:
            notation = _NOTATIONS.get(value)
            if notation is None:
                return None
        elif name == b"accept" and accept is None:
            accept = value
            if bodies.wants_msgpack(value.decode("latin-1")):
                return None
        else:
            return None
    return notation


async def _send(send: Send, content: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(content)), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _again(messages: list[Message], receive: Receive) -> Receive:
    """`receive` from the beginning."""
    pending = iter(messages)

    async def again() -> Message:
        for message in pending:
            return message
        return await receive()

    return again
