"""Connections whose plain requests are answered where they are read, with no task and no queue between.

Bytes that are one whole plain POST (native/request_head.hpp) and nothing else are shown to the application's short
cut before uvicorn sees them. It answers, and the answer is one write; or it names who goes on with the request, or
wants nothing of it: then uvicorn parses the same bytes as if nothing had been. A body that comes in several pieces is
waited for here, up to HELD_BYTES_MAX and while there is room (app/serving/body_room.py). While uvicorn has a request of
the connection in hand, and behind anything unusual (a pipeline, an upgrade, a client that does not read), all bytes are
uvicorn's.

The bounds of app/serving/connections.py hold: a body that is waited for, and the rest between two requests, are states of
their own for the sweep, which also stands for uvicorn's timer of idle connections here; a timer a request would cost
as much as finding its answer in the index.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from app.serving.connections import BoundedProtocol, ConnectionLimits, Doing

ANSWERS_MAX = 16
HELD_BYTES_MAX = 1_048_576  # of a request that comes in pieces

Request = TypeVar("Request")


class ShortCut(Protocol[Request]):
    """app/api/short_cut.py"""

    body_bytes_max: int

    def patience_s(self, request: Request) -> float:
        """How long its answer may wait for others to go out with."""

    def read(self, data: bytes) -> tuple[Request, int, int] | None: ...

    def take(
        self, request: Request, body: memoryview, *, opening: bytes, client: tuple[str, int] | None
    ) -> tuple[bytes, bytes] | ASGIApp | None: ...


class Outbox:
    """Answers of all connections of a server that go out together.

    Each write wakes up whoever waits for it, which costs the writer more than the write. So what one round of the loop
    has answered is sent behind the round: the first write wakes a client, and the others find it awake. An answer
    waits for ANSWERS_MAX others at the most, and beyond its patience for one.
    """

    def __init__(self) -> None:
        self._answers: list[tuple[asyncio.Transport, tuple[bytes, bytes]]] = []
        self._due_s = 0.0  # looked at when another one comes

    def put(self, transport: asyncio.Transport, answer: tuple[bytes, bytes], patience_s: float) -> None:
        now_s = time.perf_counter()
        due_s = now_s + patience_s
        answers = self._answers
        if not answers:
            asyncio.get_running_loop().call_soon(self.flush)
            self._due_s = due_s
        elif due_s < self._due_s:
            self._due_s = due_s
        answers.append((transport, answer))
        if len(answers) >= ANSWERS_MAX or now_s > self._due_s:
            self.flush()

    def say_last(self, transport: asyncio.Transport) -> None:
        """The last answer of this connection that waits says that none follows."""
        for place in reversed(range(len(self._answers))):
            of, (head, content) = self._answers[place]
            if of is transport:
                self._answers[place] = (
                    of,
                    (head.removesuffix(b"\r\n") + b"connection: close\r\n\r\n", content),
                )
                break

    def flush(self) -> None:
        answers, self._answers = self._answers, []
        for transport, answer in answers:
            if not transport.is_closing():
                transport.writelines(answer)


class ShortConnection(BoundedProtocol):
    """`short_cut`, `outbox` and `limits` come first, the rest is uvicorn's."""

    def __init__(
        self, short_cut: ShortCut[Any], outbox: Outbox, limits: ConnectionLimits, **options: Any
    ) -> None:
        super().__init__(limits, **options)
        assert not self.root_path, "the short cut knows paths from the root"
        self._short_cut = short_cut
        self._outbox = outbox
        self._body_max = short_cut.body_bytes_max
        self._held_max = min(short_cut.body_bytes_max, HELD_BYTES_MAX)
        self._held: bytearray | None = None  # of a request whose body is not whole yet
        self._held_request: Any = None
        self._body_from = self._whole_bytes = 0  # in it
        self._answers = 0
        self._rests = False  # nothing came since an answer of ours
        self._upgraded = False
        self._headers_of_all: object = None
        self._opening = b""

    def data_received(self, data: bytes) -> None:
        if self._held is not None:
            if not self._limits.body_room.take(len(data), held=len(self._held)):
                self._hand_over()
                self._leave_to_uvicorn(data)
                return
            self._held += data
            if len(self._held) < self._whole_bytes:
                return
            data, request = self._let_go(), self._held_request
            if len(data) > self._whole_bytes or not self._answers_at_once(request, data):
                self._leave_to_uvicorn(data)
            return
        if self._is_free():
            request = self._find(data)
            if request is not None:
                if len(data) < self._whole_bytes:
                    if self._holds(request, data):
                        return
                elif self._answers_at_once(request, data):
                    return
        self._leave_to_uvicorn(data)

    def _is_free(self) -> bool:
        """No byte of a request is in uvicorn's parser, and an answer would go out at once."""
        if not self._rests:
            cycle, scope = self.cycle, self.scope
            if cycle is not None and (not cycle.response_complete or cycle.more_body or self.pipeline):
                return False
            if (scope is not None and "method" not in scope) or self._upgraded:
                return False
        return not (self._is_surplus or self.flow.write_paused or self.transport.is_closing())

    def _find(self, data: bytes) -> Any:
        """The request that these bytes begin and nothing follows, where it is one for the short cut."""
        read = self._short_cut.read(data)
        if read is None:
            return None
        request, self._body_from, body_bytes = read
        self._whole_bytes = self._body_from + body_bytes
        behind = len(data) - self._whole_bytes
        if behind > 0 or body_bytes > (self._body_max if behind == 0 else self._held_max):
            return None
        return request

    def _holds(self, request: Any, data: bytes) -> bool:
        """Whether there is room for what came of a request."""
        if not self._limits.body_room.take(len(data), held=0):
            return False
        self._unset_keepalive_if_required()
        self._flush()
        self._held_request, self._held = request, bytearray(data)
        return True

    def _let_go(self) -> bytes:
        """What is held, for whoever goes on with it."""
        assert self._held is not None
        data, self._held = bytes(self._held), None
        self._limits.body_room.give_back(len(data))
        return data

    def _answers_at_once(self, request: Any, data: bytes) -> bool:
        state = self.server_state
        if state.default_headers is not self._headers_of_all:
            self._headers_of_all = state.default_headers
            lines = [b"%b: %b\r\n" % header for header in state.default_headers]
            self._opening = b"".join([b"HTTP/1.1 200 OK\r\n", *lines])
        answer = self._short_cut.take(
            request, memoryview(data)[self._body_from :], opening=self._opening, client=self.client
        )
        if isinstance(answer, tuple):
            self._unset_keepalive_if_required()
            self._outbox.put(self.transport, answer, self._short_cut.patience_s(request))
            self._rests = True
            self._answers += 1
            self._loose_bytes = 0
            state.total_requests += 1
            return True
        if answer is None:
            return False
        usual, self.app = self.app, self._counted(answer, len(data))
        try:
            self._leave_to_uvicorn(data)  # which makes a task of it
        finally:
            self.app = usual
        return True

    def _counted(self, app: ASGIApp, held: int) -> ASGIApp:
        """What was read here stays until the answer, and takes room as long."""
        room = self._limits.body_room

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            room.hold(held)
            try:
                await app(scope, receive, send)
            finally:
                room.give_back(held)

        return counted

    def _leave_to_uvicorn(self, data: bytes) -> None:
        self._flush()
        super().data_received(data)

    def _flush(self) -> None:
        """The answer before goes out before whatever comes now."""
        if self._rests:
            self._outbox.flush()
            self._rests = False

    def eof_received(self) -> None:
        self._outbox.flush()  # who has sent all may still read, and behind this the transport closes
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._hand_over()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        self._outbox.say_last(self.transport)
        self._outbox.flush()
        self._hand_over()
        super().shutdown()

    def _hand_over(self) -> None:
        """The request that is waited for is uvicorn's from now on, which knows how to end one in its middle."""
        if self._held is not None:
            self._leave_to_uvicorn(self._let_go())

    def _unsupported_upgrade_warning(self) -> None:
        self._upgraded = True
        super()._unsupported_upgrade_warning()

    def _waits_for(self) -> tuple[Doing | None, object, tuple[int, int]]:
        if self._held is not None:
            return Doing.BODY, self._held, (0, 0)
        if self._rests:
            return Doing.REST, None, (self._answers, 0)
        return super()._waits_for()

    def _end(self, status: int, detail: str, bound: str) -> None:
        self._outbox.flush()
        self._hand_over()
        super()._end(status, detail, bound)
