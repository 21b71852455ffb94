"""Streams of requests as the wire may bring them: with the short cut and without, a server answers alike.

Two applications in one loop are sent the same bytes over real sockets, in the same pieces. Behind each piece the loop
turns until nothing is on its way any more; then both have said the same and closed alike. At the end they have counted
the same requests. Their clocks stand still, and nobody waits for time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import random
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvicorn
import uvloop

from app.api.wiring import wired
from app.config import load_settings
from app.main import create_app
from app.observability import correlation
from app.serving.connections import BoundedProtocol
from app.serving.short_connections import Outbox, ShortConnection
from tests.serving.test_serving import DEADLINE_S

STREAMS = int(os.environ.get("SHORT_STREAMS", "250"))
SEED = int(os.environ.get("SHORT_STREAMS_SEED", "0"))
ROUNDS = 12  # of the loop: a piece is read, its task runs, what it says is sent
LOOKS_MAX = 100
JSON = "application/json"
OCTETS = "application/octet-stream"
BODY_BYTES_MAX = 4_096
SETTINGS = {"body_bytes_max": BODY_BYTES_MAX, "head_bytes_max": 4_096}
# What differs from one server to the next: ids that were made, and in redirects the port.
OWN = re.compile(rb"[0-9a-f]{16}-[0-9a-f]{16}|127\.0\.0\.1:\d+")
KEYS = {"reader": "reading-key-0123456789", "writer": "writing-key-0123456789"}


class Side:
    """One server, and one connection to it."""

    def __init__(self, *, short: bool, **overrides: Any) -> None:
        self.app = create_app(load_settings(**{**SETTINGS, **overrides}), clock=lambda: 1_000.0)
        limits = wired(self.app).connections
        assert self.app.short_cut is not None
        self.outbox = Outbox()
        protocol = (
            functools.partial(ShortConnection, self.app.short_cut, self.outbox, limits)
            if short
            else functools.partial(BoundedProtocol, limits)
        )
        config = uvicorn.Config(
            self.app, http=protocol,  # type: ignore[arg-type]
            ws="none", log_config=None, log_level="error", access_log=False,
            server_header=False,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.wire = socket.socket()
        self._raw = bytearray()
        self.ended = True

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.listener.getsockname()
        return host, port

    async def start(self) -> None:
        self.server.config.load()
        self.server.lifespan = self.server.config.lifespan_class(self.server.config)
        await self.server.startup([self.listener])
        self.server.server_state.default_headers = [(b"date", b"today")]

    async def stop(self) -> None:
        self.wire.close()
        await self.server.shutdown([self.listener])

    def connect(self, *, buffer_bytes: int | None = None) -> None:
        """`buffer_bytes`: of what came and was not read; None as the system likes."""
        self.wire.close()
        self.wire = socket.socket()
        if buffer_bytes is not None:
            self.wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.wire.connect(self.address)
        self.wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.wire.setblocking(False)
        self._raw, self.ended = bytearray(), False

    def abort(self) -> None:
        """The client is gone, and with it what it has not read."""
        self.wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.wire.close()

    def send(self, piece: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            assert self.wire.send(piece) == len(piece), "pieces are smaller than the socket's buffer"

    def look(self) -> tuple[bytes, bool]:
        """All that was said on this connection, and whether it was closed then."""
        try:
            while not self.ended:
                piece = self.wire.recv(1 << 20)
                self._raw += piece
                self.ended = not piece
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.ended = True
        return self.said, self.ended

    @property
    def connections(self) -> set[Any]:
        return self.server.server_state.connections

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        return self.server.server_state.tasks

    @property
    def said(self) -> bytes:
        return OWN.sub(b"own", self._raw)

    def counted(self) -> dict[str, float]:
        """How many requests of each kind, and what the index has."""
        lines = wired(self.app).metrics.exposition().decode().splitlines()
        shown = re.compile(r"kvindexer_(http_request_seconds_count|access|blocks|batches|events|match)")
        pairs = (line.rsplit(" ", 1) for line in lines if shown.match(line) and "bucket" not in line)
        return {name: float(value) for name, value in pairs if float(value)}


@contextlib.asynccontextmanager
async def sides(**overrides: Any) -> AsyncIterator[tuple[Side, Side]]:
    """With the short cut, and without; at the end nothing is left of any connection, and no callback has failed."""
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
    both = (Side(short=True, **overrides), Side(short=False, **overrides))
    for side in both:
        await side.start()
    try:
        yield both
        for side in both:
            side.wire.close()
        await turn_until(lambda: not any(side.connections or side.tasks for side in both))
    finally:
        for side in both:
            await side.stop()
    assert not failures


async def turn_until(is_so: Callable[[], bool]) -> None:
    for _ in range(LOOKS_MAX):
        for _ in range(ROUNDS):
            await asyncio.sleep(0)
        if is_so():
            return
    assert is_so()


async def settle(both: tuple[Side, Side]) -> None:
    """Until both have said the same. What is said alike now and not later is seen behind the next piece."""
    ours, theirs = both
    with contextlib.suppress(AssertionError):
        await turn_until(lambda: ours.look() == theirs.look())
    assert ours.look() == theirs.look()


async def ask_both(both: tuple[Side, Side], pieces: list[bytes]) -> tuple[bytes, bool]:
    """What both have said to these pieces on a connection of its own, and whether they have closed it."""
    for side in both:
        side.connect()
    for piece in pieces:
        for side in both:
            side.send(piece)
        await settle(both)
        if both[0].ended:
            break
    await settle(both)
    return both[0].said, both[0].ended


async def open_before(both: tuple[Side, Side], opened: contextlib.ExitStack) -> None:
    """A connection to each that does nothing, and is there before the next."""
    for side in both:
        side.wire.close()
    await turn_until(lambda: not any(side.connections for side in both))
    for side in both:
        opened.enter_context(contextlib.closing(socket.create_connection(side.address)))
    await turn_until(lambda: all(side.connections for side in both))


def run(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test)


@pytest.fixture(autouse=True)
def _ids_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made ids are in answers, whose lengths are compared."""
    monkeypatch.setattr(correlation, "_made", itertools.count(1 << 60))


def post(target: str, kind: str, body: bytes, *more: str, version: str = "1.1") -> bytes:
    lines = [f"POST {target} HTTP/{version}", "Host: h", f"Content-Type: {kind}", *more]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode("latin-1") + body


def chunked(target: str, kind: str, body: bytes, *, trailer: bytes = b"") -> bytes:
    head = f"POST {target} HTTP/1.1\r\nHost: h\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    half = len(body) // 2
    parts = (b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:]) if part)
    return head + b"".join(parts) + b"0\r\n" + trailer + b"\r\n"


TOKENS = list(range(64))
MATCH = json.dumps({"model": "m", "token_ids": TOKENS}).encode()
PACKED = struct.pack("<64I", *TOKENS)


def events(number: int | None, *, pod: str = "a", first: int = 1) -> bytes:
    stored = {"type": "BlockStored", "block_hashes": [first, first + 1], "parent_block_hash": None,
              "token_ids": TOKENS[:32], "block_size": 16}  # fmt: skip
    said = {"pod": pod, "model": "m", "events": [stored]} | ({} if number is None else {"seq": number})
    return json.dumps(said).encode()


PLAIN = [
    post("/v1/match", JSON, MATCH),
    post("/v1/match", JSON, MATCH, "X-Request-ID: mine", "Accept: application/json", "User-Agent: x\ty"),
    post("/v1/match?model=m", OCTETS, PACKED),
    post("/v1/match?model=m&block_size=16&pods=a", OCTETS, PACKED, "Connection: keep-alive"),
    post("/v1/events", JSON, events(None)),
    post("/v1/events", JSON, events(0)),
    post("/v1/events", JSON, events(3, first=9)),
    post("/v1/events", JSON, events(None, pod="b", first=5)),
    post("/v1/match", JSON, json.dumps({"model": "m", "token_ids": list(range(700))}).encode()),
]
# Which go the long way, in part or whole, and leave the connection open.
OTHERS = [
    b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n",
    b"HEAD /healthz HTTP/1.1\r\nHost: h\r\n\r\n",
    b"OPTIONS /v1/match HTTP/1.1\r\nHost: h\r\n\r\n",
    b"GET /v1/pods HTTP/1.1\r\nHost: h\r\n\r\n",
    b"GET /v1/match HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc",
    post("/v1/match", JSON, b'{"model":"m","token_ids":[1],"include_hashes":true}'),
    post("/v1/match", JSON, b"{"),
    post("/v1/match", JSON, b""),
    post("/v1/match", "text/plain", MATCH),
    post("/v1/match", JSON, b"x" * (BODY_BYTES_MAX + 1)),
    post("/v1/match", JSON, b" " * BODY_BYTES_MAX),
    post("/v1/matches", JSON, MATCH),
    post("/v1/events", JSON, b'{"pod":"b","model":"m","events":[{"type":"Moon"}]}'),
    post("/v1/match/", JSON, MATCH),
    post("//v1/match", JSON, MATCH),
    post("/v1/%6datch", JSON, MATCH),
    post("/v1/match?", JSON, MATCH),
    post("/v1/match?model=m?x=1", OCTETS, PACKED),
    post('/v1/match?model=m&pods="<>|^`{}', OCTETS, PACKED),
    post("http://h/v1/match", JSON, MATCH),
    post("http://other:1/v1/match?model=m", OCTETS, PACKED),
    post("/v1/match", JSON, MATCH, "Host: other"),
    post("/v1/match", JSON, MATCH, "Expect: 100-continue"),
    post("/v1/match", JSON, MATCH, "Expect: 42"),
    post("/v1/match", JSON, MATCH, "X-Empty:"),
    post("/v1/match", JSON, MATCH, "X-Wide: \t blanks \t "),
    post("/v1/match", JSON, MATCH, "X-Latin: \xe4"),
    post("/v1/match", JSON, MATCH, "Content-Type: application/json"),
    post("/v1/match", JSON, MATCH, "Accept: application/msgpack"),
    post("/v1/match", JSON, MATCH, "Content-Encoding: gzip"),
    post("/v1/match", JSON, MATCH, "X-Forwarded-For: 192.0.2.1"),
    post("/v1/match", JSON, MATCH, "X-Long: " + "x" * 3_000),
    post("/v1/match", JSON, MATCH, *["X-Many: y"] * 80),
    post("/v1/match", JSON, MATCH).replace(b"Content-Length: ", b"content-LENGTH:   000"),
    b"\r\n\r\n" + post("/v1/match", JSON, MATCH),
    b"\n" + post("/v1/match", JSON, MATCH),
    chunked("/v1/match", JSON, MATCH),
    chunked("/v1/match?model=m", OCTETS, PACKED, trailer=b"X-Trailer: x\r\n"),
    chunked("/v1/events", JSON, events(None)),
]
# Which end the connection, are refused by the parser, or leave it to wait.
BAD = [
    post("/v1/match", JSON, MATCH, "Connection: close"),
    post("/v1/match", JSON, MATCH, "Connection: keep-alive, close"),
    post("/v1/match", JSON, MATCH, "Connection: upgrade", "Upgrade: websocket"),
    post("/v1/match", JSON, MATCH, "Connection: upgrade", "Upgrade: h2c"),
    post("/v1/match", JSON, MATCH, version="1.0"),
    post("/v1/match", JSON, MATCH, "Connection: keep-alive", version="1.0"),
    post("/v1/match", JSON, MATCH, version="2.0"),
    post("/v1/match", JSON, MATCH, version="1.2"),
    post("/v1/match", JSON, MATCH, "Transfer-Encoding: chunked"),
    post("/v1/match", JSON, MATCH, "Transfer-Encoding: identity"),
    post("/v1/match", JSON, MATCH, "transfer-encoding : chunked"),
    post("/v1/match", JSON, MATCH, f"Content-Length: {len(MATCH)}"),
    post("/v1/match", JSON, MATCH, "Content-Length: 1"),
    post("/v1/match", JSON, MATCH, "X-Folded: one\r\n two"),
    post("/v1/match", JSON, MATCH, "X-Bare: one\n"),
    post("/v1/match", JSON, MATCH, "X-Nul: \x00"),
    post("/v1/match", JSON, MATCH, "X-Return: a\rb"),
    post("/v1/match", JSON, MATCH, "X Blank: a"),
    post("/v1/match", JSON, MATCH, ": none"),
    post("/v1/match", JSON, MATCH, "none"),
    post("/v1/match#part", JSON, MATCH),
    post("/v1/match?model=\xe4", JSON, MATCH),
    post("v1/match", JSON, MATCH),
    post("*", JSON, MATCH),
    post("", JSON, MATCH),
    post("/v1/match", JSON, MATCH).replace(b"\r\n", b"\n"),
    post("/v1/match", JSON, MATCH).replace(b"POST ", b"post "),
    post("/v1/match", JSON, MATCH).replace(b"POST ", b"POST  "),
    post("/v1/match", JSON, MATCH).replace(b"POST ", b"PRI "),
    post("/v1/match", JSON, MATCH).replace(b" HTTP/1.1", b""),
    post("/v1/match", JSON, MATCH).replace(b" HTTP/1.1", b" HTTP/1.1 "),
    b"CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\n" + PACKED,
    *(
        post("/v1/match", JSON, MATCH).replace(b"Content-Length: %d" % len(MATCH), b"Content-Length: " + length)
        for length in (b"", b"+5", b"-5", b"5, 5", b"5 5", b"0x5", b"5\x0b", b"9" * 15, b"9" * 19, b"9" * 40, b"\xb2",
                       b"1" + b"0" * 300)
    ),
]  # fmt: skip


def damaged(choose: random.Random, message: bytes) -> bytes:
    """Some bytes of it, mostly of its head, are others now, twice there, or gone."""
    data = bytearray(message)
    for _ in range(choose.choice((1, 1, 2, 4))):
        start = choose.randrange(min(len(data), choose.choice((40, 200, 5_000))) + 1)
        end = start + choose.choice((0, 1, 1, 2, 20))
        new = choose.choice(
            (b"", bytes(data[start:end]) * 2, b"\r", b"\n", b"\r\n", b" ", b":", b"\0", b"\xff", b"9", b"?",
             choose.randbytes(1))
        )  # fmt: skip
        data[start:end] = new
    return bytes(data)


def cut(choose: random.Random, stream: bytes) -> list[bytes]:
    """In pieces: few or many, of any sizes."""
    count = choose.choice((1, 1, 2, 3, 8))
    places = sorted(choose.randrange(len(stream) + 1) for _ in range(count - 1))
    pieces = [stream[start:end] for start, end in itertools.pairwise((0, *places, len(stream)))]
    return [piece for piece in pieces if piece]


def stream(choose: random.Random) -> list[bytes]:
    messages = [choose.choice(choose.choice((PLAIN, PLAIN, OTHERS))) for _ in range(choose.randrange(1, 7))]
    if choose.random() < 0.5:
        end = choose.choice(BAD) if choose.random() < 0.5 else damaged(choose, choose.choice(PLAIN + OTHERS))
        messages.insert(choose.randrange(len(messages) + 1), end)
    if choose.random() < 0.5:  # each begins a piece
        return [piece for message in messages for piece in cut(choose, message)]
    return cut(choose, b"".join(messages))


@pytest.mark.parametrize("bounds", [{}, {"connections_max": 1}], ids=["", "few connections"])
def test_streams(bounds: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    """With few connections, one behind another is told so. Now and then a client is gone before it has read all."""

    async def check() -> None:
        choose = random.Random(SEED)
        async with sides(**bounds) as both:
            for number in range(STREAMS):
                pieces = stream(choose)
                with contextlib.ExitStack() as others:
                    if bounds and choose.random() < 0.3:
                        await open_before(both, others)
                    try:
                        await ask_both(both, pieces)
                    except AssertionError as difference:
                        ours, theirs = (side.look() for side in both)
                        raise AssertionError(
                            f"{number}: {pieces}, ours {ours}, theirs {theirs}"
                        ) from difference
                if choose.random() < 0.2:
                    for side in both:
                        side.abort()
                    await turn_until(lambda: not any(side.connections for side in both))
            counted, theirs_counted = (side.counted() for side in both)
            assert counted == theirs_counted
            count = 'kvindexer_http_request_seconds_count{method="POST",route="%s",status="%s"}'
            assert counted[count % ("/v1/match", 200)]
            assert (count % ("unmatched", 503) in counted) == bool(bounds)

    run(check())
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_odd_requests() -> None:
    """Each behind an answer and before a request, whole, and cut at places of its head and behind it."""

    async def check() -> None:
        asked = PLAIN[1]
        async with sides() as both:
            for message in (*PLAIN, *OTHERS, *BAD):
                place = message.find(b"\r\n\r\n")
                for pieces in (
                    [asked, message, asked],
                    [asked + message, asked],
                    [message + asked],
                    [asked, message + asked[:20], asked[20:] + asked, asked],
                    *(
                        [asked, message[:at], message[at:] + asked]
                        for at in (1, 5, 17, place, place + 3, place + 9)
                    ),
                ):
                    said, _ = await ask_both(both, [piece for piece in pieces if piece])
                    assert said.startswith(b"HTTP/1.1 "), message

    run(check())


def test_an_end_behind_an_answer() -> None:
    """Told to end before it is sent, an answer says that it is the last; sent already, the connection just ends."""

    async def check() -> None:
        async with sides() as both:
            for is_sent in (False, True):
                for side in both:
                    side.connect()
                await turn_until(lambda: all(side.connections for side in both))
                for side in both:
                    (connection,) = side.connections
                    if is_sent:
                        side.send(PLAIN[1])
                        await turn_until(lambda: bool(side.look()[0]))  # noqa: B023 - called here
                    else:
                        connection.data_received(PLAIN[1])  # and the end in the same round
                    connection.shutdown()
                await settle(both)
                assert both[0].ended
                assert both[0].said.startswith(b"HTTP/1.1 200 OK\r\n")
                assert (b"\r\nconnection: close\r\n" in both[0].said) is not is_sent
                await turn_until(lambda: not any(side.connections for side in both))

    run(check())


def test_keys_and_rates() -> None:
    """As long as the clock stands still, `writer` may ask ten times."""
    keys = ",".join(f"{key}:{'write' if name == 'writer' else 'read'}" for name, key in KEYS.items())
    said = [
        (),
        ("Authorization: Bearer nobody-has-this-key",),
        ("Authorization: Basic eDp5",),
        *((f"{name}: {kind} {key}",) for key in KEYS.values() for name in ("Authorization", "AUTHORIZATION")
          for kind in ("Bearer", "bearer ")),
        (f"Authorization: Bearer {KEYS['writer']}", f"Authorization: Bearer {KEYS['writer']}"),
    ]  # fmt: skip

    async def check() -> None:
        async with sides(api_keys=keys, rate_requests_per_s=1, rate_burst_requests=10) as both:
            statuses = set()
            for _ in range(3):
                for headers in said:
                    for path, body in (
                        ("/v1/match", MATCH),
                        ("/v1/events", events(None)),
                        ("/v1/match", b"{"),
                    ):
                        message = post(path, JSON, body, *headers)
                        for pieces in ([message], [message[:-1], message[-1:]]):
                            answer, _ = await ask_both(both, pieces)
                            statuses.add(answer.split()[1])
            assert statuses == {b"200", b"400", b"401", b"403", b"429"}
            ours, theirs = (side.counted() for side in both)
            assert ours == theirs

    run(check())


def test_whoever_was_let_in_stays_in() -> None:
    """A body is on its way, then there are too many connections: the last one is told so, the first one goes on."""
    for message in (PLAIN[0], OTHERS[5], OTHERS[12], post("/v1/match", JSON, b"{")):

        async def check(message: bytes = message) -> None:
            async with sides(connections_max=1) as both:
                for side in both:
                    side.connect()
                    side.send(message[:-1])
                await settle(both)
                for side in both:
                    with contextlib.closing(socket.create_connection(side.address)) as late:
                        late.setblocking(False)
                        late.send(PLAIN[1])
                        async with asyncio.timeout(DEADLINE_S):
                            said = await asyncio.get_running_loop().sock_recv(late, 65_536)
                            assert await asyncio.get_running_loop().sock_recv(late, 65_536) == b""
                        assert said.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
                    side.send(message[-1:] + PLAIN[1])
                await settle(both)
                said, ended = both[0].look()
                assert said.count(b"HTTP/1.1 ") == 2
                assert b"HTTP/1.1 503" not in said
                assert not ended

        run(check())


def test_who_has_sent_all_may_still_read() -> None:
    async def check() -> None:
        async with sides() as (side, _):
            side.connect()
            side.send(PLAIN[1])
            side.wire.shutdown(socket.SHUT_WR)
            await turn_until(lambda: side.look()[1])
            assert side.said.startswith(b"HTTP/1.1 200 OK")

    run(check())


def test_who_reads_nothing_is_not_answered_for_ever() -> None:
    """What is kept for one client is bounded, and it gets every answer when it reads."""

    async def check() -> None:
        message = post("/v1/match", JSON, MATCH, "X-Request-ID: " + "i" * 128)
        async with sides() as (side, _):
            side.connect()
            side.send(message)
            await turn_until(lambda: side.look() != (b"", False))
            length = len(side.said)
            side.connect(buffer_bytes=65_536)
            await turn_until(lambda: len(side.connections) == 1)
            (connection,) = side.connections
            connection.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096
            )
            sent = most = refused = 0
            while refused < 200 and most < 1_000_000:  # times in a row
                try:
                    sent += side.wire.send(message[sent % len(message) :])
                    refused = 0
                except BlockingIOError:
                    refused += 1
                await asyncio.sleep(0)
                most = max(most, connection.transport.get_write_buffer_size())
            whole = sent // len(message)
            assert 0 < most < 200_000, whole

            answers = bytearray()
            async with asyncio.timeout(DEADLINE_S):
                while len(answers) < whole * length:
                    answers += await asyncio.get_running_loop().sock_recv(side.wire, 1 << 20)
            assert answers.count(b"HTTP/1.1 200 OK") == whole

    run(check())


def test_a_fault_of_ours_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The connection ends behind it, and the next one is served."""

    async def check() -> None:
        async with sides() as both:
            with monkeypatch.context() as broken:
                for side in both:
                    broken.setattr(wired(side.app).service, "match_json", None)
                    broken.setattr(wired(side.app).service, "post", None)
                for message in (PLAIN[0], PLAIN[2], PLAIN[4]):
                    for pieces in ([message], [message[:-3], message[-3:]], [OTHERS[0] + message]):
                        said, ended = await ask_both(both, pieces)
                        assert b"HTTP/1.1 500 " in said
                        assert ended
            said, ended = await ask_both(both, [PLAIN[0]])
            assert said.startswith(b"HTTP/1.1 200 OK")
            assert not ended
            ours, theirs = (side.counted() for side in both)
            assert ours == theirs

    run(check())
    assert "object is not callable" in caplog.text
