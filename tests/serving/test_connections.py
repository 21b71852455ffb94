"""Clients that are slow on purpose, that never end a head, or that never read: real sockets against a real server."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from tests.serving.test_serving import DEADLINE_S, connected, metric, serving

HEAD = b"POST /v1/match HTTP/1.1\r\nHost: indexer\r\nContent-Type: application/json\r\n"
BODY = b'{"model":"m","token_ids":[1,2,3]}'
TIMEOUT_S = 1
# A bound is kept to the second, and the machine is busy: a client that is let be for so long is not cut off at all.
PATIENCE_S = 3 * TIMEOUT_S + 1


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    bounds = {
        "KVINDEXER_HEAD_TIMEOUT_S": str(TIMEOUT_S),
        "KVINDEXER_BODY_TIMEOUT_S": str(TIMEOUT_S),
        "KVINDEXER_SEND_TIMEOUT_S": str(TIMEOUT_S),
        "KVINDEXER_HEAD_BYTES_MAX": "8192",
        "KVINDEXER_BODY_BYTES_MAX": "65536",
        "KVINDEXER_LIVE_HEARTBEAT_S": "60",
    }
    with serving("serve", "--port", "0", **bounds) as (_, port):
        yield port


@contextlib.contextmanager
def wire_to(port: int) -> Iterator[socket.socket]:
    with contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)) as wire:
        yield wire


def read_all(wire: socket.socket) -> bytes:
    """Until the other side ends it; a test that waits in vain fails by the socket's own deadline."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := wire.recv(65_536):
            received += chunk
    return received


def read_head_and_body(wire: socket.socket) -> tuple[int, bytes]:
    received = b""
    while b"\r\n\r\n" not in received:
        received += wire.recv(65_536)
    head, _, body = received.partition(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head)
    assert found, head
    while len(body) < int(found[1]):
        body += wire.recv(65_536)
    return int(head.split()[1]), body


def count(port: int, name: str) -> int:
    return metric(port, f"kvindexer_connections_{name}_total")


def trickle(wire: socket.socket, piece: bytes) -> None:
    """A byte now and then, until the other side has had enough."""
    with contextlib.suppress(OSError):
        for _ in range(600):
            wire.sendall(piece)
            time.sleep(0.05)


def trickled(port: int, start: bytes, piece: bytes) -> bytes:
    """What comes back to a client that never stops sending."""
    with wire_to(port) as wire:
        wire.sendall(start)
        sender = threading.Thread(target=trickle, args=(wire, piece))
        sender.start()
        received = read_all(wire)
        sender.join()
    return received


def test_head_that_never_ends_in_time(port: int) -> None:
    before = count(port, "head_timeouts")
    received = trickled(port, b"GET /healthz HTTP/1.1\r\nHost: indexer\r\nX-A: ", b"a")
    assert received.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    problem = json.loads(received.partition(b"\r\n\r\n")[2])
    assert (problem["status"], problem["bound"]) == (408, "head_timeout_s")
    assert count(port, "head_timeouts") == before + 1


def test_connection_that_says_nothing_is_ended(port: int) -> None:
    before = count(port, "head_timeouts")
    with wire_to(port) as wire:
        assert read_all(wire) == b""
    assert count(port, "head_timeouts") == before + 1


@pytest.mark.parametrize(
    ("framing", "piece"),
    [
        (b"Content-Length: 1000\r\n\r\n{", b" "),
        (b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", b"1\r\n \r\n"),
        (b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"a: b\r\n"),
    ],
)
def test_body_that_never_ends_in_time(port: int, framing: bytes, piece: bytes) -> None:
    before = count(port, "body_timeouts")
    received = trickled(port, HEAD + framing, piece)
    assert received.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    problem = json.loads(received.partition(b"\r\n\r\n")[2])
    assert problem["bound"] == "body_timeout_s"
    assert count(port, "body_timeouts") == before + 1


def test_body_that_nobody_reads_in_time(port: int) -> None:
    """The answer was there long before its end: the method is wrong."""
    before = count(port, "body_timeouts")
    start = b"PATCH /v1/pods HTTP/1.1\r\nHost: indexer\r\nContent-Length: 60000\r\n\r\n"
    received = trickled(port, start, b"x")
    assert received.startswith(b"HTTP/1.1 405 ")
    assert received.count(b"HTTP/1.1 ") == 1
    assert count(port, "body_timeouts") == before + 1


def test_answers_that_nobody_reads(port: int) -> None:
    """More than what fits between the two, asked for and left there."""
    before = count(port, "send_timeouts")
    with contextlib.closing(socket.socket()) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        wire.connect(("127.0.0.1", port))
        wire.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: indexer\r\n\r\n" * 200)
        deadline = time.monotonic() + DEADLINE_S
        while count(port, "send_timeouts") == before:
            assert time.monotonic() < deadline, "the connection was never ended"
            time.sleep(0.1)


def test_those_who_only_wait_are_let_be(port: int) -> None:
    """Between two requests, on a live feed without a word, and reading slowly."""
    with wire_to(port) as idle, wire_to(port) as live, wire_to(port) as slow:
        request = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        idle.sendall(request)
        assert read_head_and_body(idle)[0] == 200
        live.sendall(b"GET /v1/live HTTP/1.1\r\nHost: indexer\r\n\r\n")
        told = live.recv(65_536)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        slow.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: indexer\r\n\r\n" * 40)
        until = time.monotonic() + PATIENCE_S
        read = 0
        while time.monotonic() < until:
            read += len(slow.recv(16_384))
            time.sleep(0.02)
        assert read > 16_384
        idle.sendall(request)
        assert read_head_and_body(idle)[0] == 200
        with connected(port) as connection:
            connection.request(
                "POST", "/v1/events", json.dumps({"pod": "pod-a", "model": "m", "events": []}),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            assert connection.getresponse().status == 200
        while b"event: pod_added" not in told:
            piece = live.recv(65_536)
            assert piece, "the feed was ended"
            told += piece
        assert b"text/event-stream" in told


@pytest.mark.parametrize(
    "flood",
    [b"X-A: " + b"a" * 65_536, b"".join(b"X-%d: abc\r\n" % i for i in range(6_000)), b"\r\n" * 40_000],
    ids=["one long", "many", "blank lines"],
)
def test_head_past_its_bound(port: int, flood: bytes) -> None:
    before = count(port, "heads_too_long")
    with wire_to(port) as wire:
        with contextlib.suppress(OSError):
            wire.sendall(b"" if flood.startswith(b"\r") else b"GET /healthz HTTP/1.1\r\nHost: indexer\r\n")
            for _ in range(200):
                wire.sendall(flood)
        received = read_all(wire)
    assert received == b"" or received.startswith(b"HTTP/1.1 431 ")
    assert count(port, "heads_too_long") == before + 1


def test_trailers_past_the_bound(port: int) -> None:
    """What follows the last chunk is kept like a head, so it is bounded like one."""
    before = count(port, "heads_too_long")
    with wire_to(port) as wire:
        with contextlib.suppress(OSError):
            wire.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
            for _ in range(500):
                wire.sendall(b"X-A: " + b"a" * 4_000 + b"\r\n")
        received = read_all(wire)
    assert received == b"" or received.startswith(b"HTTP/1.1 431 ")
    assert count(port, "heads_too_long") == before + 1


def test_head_within_its_bound(port: int) -> None:
    with wire_to(port) as wire:
        wire.sendall(b"GET /healthz HTTP/1.1\r\nHost: indexer\r\nX-A: " + b"a" * 8_000 + b"\r\n\r\n")
        assert read_head_and_body(wire)[0] == 200


def test_body_that_nobody_reads_is_bounded(port: int) -> None:
    """A wrong method with a large body: what is refused is thrown away as it comes, and not for ever."""
    with wire_to(port) as wire:
        wire.sendall(
            b"PATCH /v1/pods HTTP/1.1\r\nHost: indexer\r\nContent-Length: 60000\r\n\r\n" + b"x" * 60_000
        )
        assert read_head_and_body(wire)[0] == 405
        wire.sendall(b"GET /healthz HTTP/1.1\r\nHost: indexer\r\n\r\n")
        assert read_head_and_body(wire)[0] == 200
    with wire_to(port) as wire, contextlib.suppress(OSError):
        wire.sendall(b"PATCH /v1/pods HTTP/1.1\r\nHost: indexer\r\nContent-Length: 60000000\r\n\r\n")
        for sent in range(1_000):
            assert sent < 900, "60 MB were taken from a client that had its answer"
            wire.sendall(b"x" * 60_000)


def test_large_bodies_of_many_pieces_are_no_head(port: int) -> None:
    """The bound of a head does not touch what a body is made of: tiny chunks are mostly framing."""
    body = BODY + b" " * 9_000
    chunks = b"".join(b"1\r\n%b\r\n" % body[i : i + 1] for i in range(len(body))) + b"0\r\n\r\n"
    with wire_to(port) as wire:
        wire.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(chunks), 1_000):
            wire.sendall(chunks[start : start + 1_000])
        assert read_head_and_body(wire)[0] == 200
    tokens = struct.pack("<15000I", *range(15_000))
    with connected(port) as connection:
        connection.request("POST", "/v1/match?model=m", tokens, {"Content-Type": "application/octet-stream"})
        assert connection.getresponse().status == 200


def test_connections_past_the_bound_are_told_so_and_the_others_go_on() -> None:
    """Those who only hold a connection shut out nobody who was there before, no probe, and not the figures."""
    ask = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    with serving("serve", "--port", "0", KVINDEXER_CONNECTIONS_MAX="4") as (_, port):
        with contextlib.ExitStack() as opened:
            early, *_ = [opened.enter_context(wire_to(port)) for _ in range(4)]
            for turn in range(1, 4):
                early.sendall(ask)
                assert read_head_and_body(early)[0] == 200
                with wire_to(port) as late:
                    late.sendall(b"GET /healthz HTTP/1.1\r\nHost: indexer\r\n\r\n")
                    assert read_head_and_body(late)[0] == 200
                    late.sendall(ask)
                    head, _, body = read_all(late).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503 ")
                assert b"\r\nretry-after: 1\r\n" in head
                assert b"\r\nx-request-id: " in head
                problem = json.loads(body)
                assert problem["type"] == "urn:kvindexer:problem:too-many-connections"
                assert problem["bound"] == "connections_max"
                assert count(port, "refused") == turn
            wait_for_open(port, 4 + 1)  # whoever asks for the figure
        wait_for_open(port, 1)
        with wire_to(port) as wire:
            wire.sendall(ask)
            assert read_head_and_body(wire)[0] == 200


def wait_for_open(port: int, connections: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while (seen := metric(port, "kvindexer_connections_open")) != connections:
        assert time.monotonic() < deadline, seen


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
INNER = b"DELETE /v1/pods/pod-a HTTP/1.1\r\nHost: indexer\r\n\r\n"


@pytest.mark.parametrize(
    "framing", [b"Content-Length: %d\r\n\r\n" % len(INNER), b"Transfer-Encoding: chunked\r\n\r\n"]
)
@pytest.mark.parametrize("in_one", [True, False])
def test_a_body_behind_an_offer_to_upgrade_is_no_request(port: int, framing: bytes, in_one: bool) -> None:
    """The parser leaves the message there; were its body read on, a client of a proxy could hide a request in it."""
    with wire_to(port) as wire:
        head = HEAD + OFFER + framing
        for piece in [head + INNER] if in_one else [head, INNER]:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                wire.sendall(piece)
        received = read_all(wire)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"urn:kvindexer:problem:upgrade-with-body" in received


def test_an_offer_to_upgrade_without_a_body_is_passed_over(port: int) -> None:
    with wire_to(port) as wire:
        for headers in (OFFER, b"Content-Length: 0\r\n" + OFFER, b""):
            wire.sendall(b"GET /healthz HTTP/1.1\r\nHost: indexer\r\n" + headers + b"\r\n")
            assert read_head_and_body(wire)[0] == 200
