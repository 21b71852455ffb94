"""Bounds on HTTP connections that uvicorn does not have: how long a head, a body and an answer may take, how long a
head may be, and how many connections there may be.

A client that sends a byte a minute, or reads none, holds a connection, its buffers and at times a bounded place (a
dump, the live feed) for as long as it likes. So once a second every connection is looked at: what it has been doing
since when. A timer a request would cost every request; this costs them nothing, and an idle connection 1.5 us a second,
in TURNS slices, or 10,000 of them would hold up all requests for 15 ms. The bounds are therefore kept to the second.

uvicorn's parser also keeps a head, and what follows the last chunk of a body, however long they are; here bytes that
bring no body further are counted as they come. Where uvicorn meets its bound on connections, it turns away whoever
asks next: idle connections would shut out those that are at work. Here it is the connections that came past
`connections_max` whose requests are refused. And where a request offers an upgrade (the HTTP client of Java does,
unless told otherwise), uvicorn's parser takes its body for another protocol, and then for the next request. Either
refusal is only marked here: app/api/turned_away.py makes an answer of it.

Refused: 408 and 431, where no answer has begun; else the connection just ends. Idle connections between two requests
are uvicorn's (`keep_alive_s`); so is the time of a TLS handshake (60 s), which ends before any of this begins.
"""

from __future__ import annotations

import asyncio
import enum
import http
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.config import Settings
from app.serving.body_room import BodyRoom
from app.serving.one_write import OneWriteProtocol

logger = logging.getLogger(__name__)

TURNS = 10  # in which each connection is looked at once

REFUSAL = "kvindexer.refusal"  # in the scope of a request


class Refusal(enum.Enum):
    """Why a connection does not take a request."""

    CROWD = enum.auto()
    UPGRADE = enum.auto()


class Doing(enum.Enum):
    """What a connection waits for its client to do."""

    HEAD = "head"
    BODY = "body"
    SEND = "send"
    REST = "rest"  # begin another request, where no timer of uvicorn's watches over it


class ConnectionLimits:
    """The bounds of all connections of one server, and how often they were met."""

    def __init__(self, settings: Settings) -> None:
        self.connections_max = settings.connections_max
        self._turns: list[set[BoundedProtocol]] = [set() for _ in range(TURNS)]
        self._turn = 0
        self.head_bytes_max = settings.head_bytes_max
        self.body_room = BodyRoom(settings.bodies_bytes_max)
        self.body_bytes_max = settings.body_bytes_max
        self.timeouts_s = {
            Doing.HEAD: settings.head_timeout_s,
            Doing.BODY: settings.body_timeout_s,
            Doing.SEND: settings.send_timeout_s,
            Doing.REST: settings.keep_alive_s,
        }
        counted = [doing for doing in Doing if doing is not Doing.REST]
        self._counts = {
            "refused": 0,
            "heads_too_long": 0,
            **{f"{doing.value}_timeouts": 0 for doing in counted},
        }

    @property
    def is_crowded(self) -> bool:
        return self._open() > self.connections_max

    def add(self, connection: BoundedProtocol) -> set[BoundedProtocol]:
        """The set that it is to be taken out of when it ends."""
        turn = min(self._turns, key=len)
        turn.add(connection)
        return turn

    def gauges(self) -> Mapping[str, int]:
        return {"open": self._open()}

    def counters(self) -> Mapping[str, int]:
        return self._counts

    def count(self, name: str) -> None:
        self._counts[name] += 1

    def refuse(self) -> str:
        """A request of a connection past `connections_max`; why, for the one who is told."""
        self.count("refused")
        detail = f"there are more connections than connections_max = {self.connections_max}"
        logger.warning("a request is refused: %s", detail)
        return detail

    def sweep(self, now_s: float) -> None:
        """Ends those that have been doing one thing for too long, of the connections whose turn it is."""
        self._turn = (self._turn + 1) % TURNS
        for connection in list(self._turns[self._turn]):
            connection.look(now_s)

    def _open(self) -> int:
        return sum(map(len, self._turns))


class BoundedProtocol(OneWriteProtocol):
    """`limits` come first, the rest is uvicorn's."""

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._turn: set[BoundedProtocol] = set()
        self._is_surplus = False
        self._loose_bytes = (
            0  # since the last byte of a body: of a head, of trailers, of a body that nobody reads
        )
        self._pauses = 0
        self._doing: Doing | None = None
        self._request: object = None  # held, so that no other can be taken for it
        self._progress = (0, 0)
        self._since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._turn = self._limits.add(self)
        self._is_surplus = self._limits.is_crowded
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._turn.discard(self)
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        if self._is_surplus:
            self._is_surplus = self._limits.is_crowded
            if self._is_surplus:
                scope[REFUSAL] = Refusal.CROWD
        if self.parser.should_upgrade() and _has_body(self.headers):
            scope[REFUSAL] = Refusal.UPGRADE
            self.flow.pause_reading()  # for good: the answer closes the connection

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing for the log: it was only an offer."""

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        held = -1 if cycle is None or cycle.response_complete else len(cycle.body)
        HttpToolsProtocol.data_received(self, data)
        if self.cycle is not cycle or (held >= 0 and len(cycle.body) > held):
            self._loose_bytes = 0  # a head was complete, or a body has grown
            return
        self._loose_bytes += len(data)
        if self._loose_bytes > self._limits.head_bytes_max:
            self._check_loose_bytes()

    def pause_writing(self) -> None:
        self._pauses += 1
        super().pause_writing()

    def look(self, now_s: float) -> None:
        """Ends the connection when it has been waiting for its client for too long."""
        doing, request, progress = self._state()
        if doing is not self._doing or request is not self._request or progress != self._progress:
            self._doing, self._request, self._progress, self._since_s = doing, request, progress, now_s
        elif doing is not None and now_s - self._since_s > (bound_s := self._limits.timeouts_s[doing]):
            if doing is Doing.REST:
                self.transport.close()
                return
            self._limits.count(f"{doing.value}_timeouts")
            if doing is Doing.SEND:
                self.transport.abort()  # nobody reads, so a close would wait for ever
            else:
                name = f"{doing.value}_timeout_s"
                detail = f"the {doing.value} of the request took longer than {name} = {bound_s:g} s"
                self._end(408, detail, name)

    def _state(self) -> tuple[Doing | None, object, tuple[int, int]]:
        """What is waited for, of which request, and how far it is where that can be said."""
        if self.transport.is_closing() or self.flow.write_paused:
            return Doing.SEND, None, (self._pauses, self.transport.get_write_buffer_size())
        return self._waits_for()

    def _waits_for(self) -> tuple[Doing | None, object, tuple[int, int]]:
        """The same of a connection that can be written to."""
        if self._is_in_head():
            return Doing.HEAD, self.scope, (0, 0)
        cycle = self.cycle
        if self.pipeline or self.flow.read_paused:
            return None, None, (0, 0)  # it is we who are slow
        # Behind an answer this is a body that nobody reads, unless uvicorn's own timer waits for the next request.
        is_body = self.timeout_keep_alive_task is None if cycle.response_complete else cycle.more_body
        return Doing.BODY if is_body else None, cycle, (0, 0)

    def _is_in_head(self) -> bool:
        """uvicorn begins a scope with a head's first byte and names its method behind the last."""
        return not self._is_busy() and (self.scope is None or "method" not in self.scope)

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _check_loose_bytes(self) -> None:
        is_unread_body = not self._is_in_head() and not self._is_busy()
        bound = self._limits.body_bytes_max if is_unread_body else self._limits.head_bytes_max
        if self._loose_bytes > bound and not self.transport.is_closing():
            self._limits.count("heads_too_long")
            self._end(
                431,
                f"the head of the request is longer than head_bytes_max = {bound} bytes",
                "head_bytes_max",
            )

    def _end(self, status: int, detail: str, bound: str) -> None:
        """Says why, where a request has begun and no answer to it, and closes."""
        if self._is_busy():
            if not self.cycle.response_started:
                self.transport.write(_problem(status, detail, bound))
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        elif self.scope is not None and self._is_in_head():
            self.transport.write(_problem(status, detail, bound))
        self.transport.close()


def _has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0") != b"")
        for name, value in headers
    )


def _problem(status: int, detail: str, bound: str) -> bytes:
    title = http.HTTPStatus(status).phrase
    slug = title.lower().replace(" ", "-")
    content = msgspec.json.encode(
        {
            "type": f"urn:kvindexer:problem:{slug}",
            "title": title,
            "status": status,
            "detail": detail,
            "errors": [{"field": "", "detail": detail}],
            "bound": bound,
        }
    )
    head = f"HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\ncontent-length: {len(content)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + content
