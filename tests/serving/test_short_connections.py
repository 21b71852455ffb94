"""Requests that are answered where they are read, over real sockets: they cannot be told from any others.

A header that says whom a request was forwarded for makes it the server's own, so the same request is asked both ways.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from tests.serving.test_connections import read_all, read_head_and_body, wire_to
from tests.serving.test_serving import DEADLINE_S, connected, serving

JSON = "application/json"
MATCH = json.dumps({"model": "m", "token_ids": list(range(16))}).encode()
EVENTS = json.dumps(
    {
        "pod": "pod-a",
        "model": "m",
        "events": [
            {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": list(range(16)),
             "block_size": 16}
        ],
    }
).encode()  # fmt: skip
KEY = "reading-key-0123456789"


def post(path: str, kind: str, body: bytes, *more: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: h",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def read(wire: socket.socket) -> tuple[bytes, bytes]:
    """The next answer: status line and headers without what differs from one answer to the next, and the body."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = wire.recv(1)
        assert piece, received
        received += piece
    head = received.removesuffix(b"\r\n\r\n").split(b"\r\n")
    length = next(int(line.split(b": ")[1]) for line in head if line.startswith(b"content-length: "))
    body = b""
    while len(body) < length:
        body += wire.recv(length - len(body))
    return b"\r\n".join(line for line in head if not line.startswith(b"date: ")), body


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    bounds = {"KVINDEXER_KEEP_ALIVE_S": "1", "KVINDEXER_BODY_BYTES_MAX": "65536"}
    with serving("serve", "--port", "0", **bounds) as (_, port):
        yield port


REQUESTS = {
    "match": ("/v1/match", JSON, MATCH),
    "events": ("/v1/events", JSON, EVENTS),
    "octets": ("/v1/match?model=m", "application/octet-stream", struct.pack("<16I", *range(16))),
    "not for it": ("/v1/match", JSON, b'{"model":"m","token_ids":[1],"include_hashes":true}'),
    "refused": ("/v1/events", JSON, b'{"pod":"b","model":"m","events":[{"type":"Moon"}]}'),
    "no JSON": ("/v1/match", JSON, b"{"),
    "no such path": ("/v1/matches", JSON, MATCH),
    "not accepted": ("/v1/match", "text/plain", MATCH),
    "empty": ("/v1/match", JSON, b""),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_of_the_server(port: int, name: str) -> None:
    request = REQUESTS[name]
    with wire_to(port) as wire:
        wire.sendall(post("/v1/events", JSON, EVENTS))
        read(wire)
        wire.sendall(post(*request, "X-Request-ID: me", "Forwarded: for=x"))
        theirs = read(wire)
        wire.sendall(post(*request, "X-Request-ID: me"))
        ours = read(wire)
        assert b"x-request-id: me" in ours[0]
        if b"last_event_age_s" in ours[1]:
            assert theirs[0].startswith(b"HTTP/1.1 200 OK")
        else:
            assert ours == theirs


def test_pieces_of_any_size_and_answers_in_order(port: int) -> None:
    told = post("/v1/events", JSON, EVENTS, "X-Request-ID: 1")
    asked = post("/v1/match", JSON, MATCH, "X-Request-ID: 2")
    other = b"GET /healthz HTTP/1.1\r\nHost: h\r\nX-Request-ID: 3\r\n\r\n"
    several = told + asked + other + asked + told + other
    for size in (1, 7, 150, len(asked), len(asked) + 1, len(several)):
        with wire_to(port) as wire:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start in range(0, len(several), size):
                wire.sendall(several[start : start + size])
            ids = [read(wire)[0].rpartition(b"x-request-id: ")[2] for _ in range(6)]
        assert ids == [b"1", b"2", b"3", b"2", b"1", b"3"], size


def test_requests_that_do_not_wait_for_answers_get_them_in_order(port: int) -> None:
    with wire_to(port) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(40):
            wire.sendall(post("/v1/match", JSON, MATCH, f"X-Request-ID: {number}"))
            wire.sendall(b"GET /healthz HTTP/1.1\r\nHost: h\r\nX-Request-ID: %d\r\n\r\n" % (100 + number))
        ids = [int(read(wire)[0].rpartition(b"x-request-id: ")[2]) for _ in range(80)]
    assert ids == [number + 100 * odd for number in range(40) for odd in (0, 1)]


def test_many_connections_get_their_own_answers(port: int) -> None:
    with contextlib.ExitStack() as opened:
        wires = [opened.enter_context(wire_to(port)) for _ in range(40)]
        for turn in range(3):
            for number, wire in enumerate(wires):
                wire.sendall(post("/v1/match", JSON, MATCH, f"X-Request-ID: {turn}/{number}"))
            for number, wire in enumerate(wires):
                assert read(wire)[0].endswith(b"x-request-id: %d/%d" % (turn, number))


def test_connections_that_rest_too_long_are_closed(port: int) -> None:
    """keep_alive_s is 1: what goes on asking is let be, what stops is closed without a word."""
    with wire_to(port) as wire:
        for _ in range(8):
            wire.sendall(post("/v1/match", JSON, MATCH))
            assert read(wire)[0].startswith(b"HTTP/1.1 200 OK")
            time.sleep(0.3)  # a pace, not a guess: twice the bound in all
        began = time.monotonic()
        assert read_all(wire) == b""
        assert time.monotonic() - began < DEADLINE_S / 2


def test_a_body_past_its_bound_is_not_waited_for(port: int) -> None:
    with wire_to(port) as wire:
        wire.sendall(post("/v1/match", JSON, b" " * 65_537)[:200])
        assert read_head_and_body(wire)[0] == 413


def test_requests_are_counted_once(port: int) -> None:
    """Those that are answered at once, and those that somebody else goes on with."""

    def counts() -> dict[str, float]:
        with connected(port) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        name = 'kvindexer_http_request_seconds_count{method="POST",route="/v1/'
        return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith(name)}

    before = counts()
    with wire_to(port) as wire:
        for request in REQUESTS.values():
            wire.sendall(post(*request))
            read(wire)
    after = counts()
    gained = {
        name[51:]: count - before.get(name, 0.0)
        for name, count in after.items()
        if count != before.get(name, 0.0)
    }
    assert sum(gained.values()) == len(REQUESTS) - 1, gained  # the path that nobody knows is counted as such


def test_keys_and_rates_hold() -> None:
    """Whoever is let through takes one from the rate, however the request goes on."""
    guard = {"KVINDEXER_API_KEYS": f"{KEY}:read", "KVINDEXER_RATE_REQUESTS_PER_S": "0.01",
             "KVINDEXER_RATE_BURST_REQUESTS": "4"}  # fmt: skip
    bearer = f"Authorization: Bearer {KEY}"
    with serving("serve", "--port", "0", **guard) as (_, port), wire_to(port) as wire:

        def status(request: tuple[str, str, bytes], *more: str) -> bytes:
            wire.sendall(post(*request, *more))
            return read(wire)[0].split(b" ")[1]

        assert status(REQUESTS["match"]) == b"401"
        assert status(REQUESTS["match"], "Authorization: Bearer other") == b"401"
        assert status(REQUESTS["match"], bearer, bearer) == b"401"
        assert status(REQUESTS["events"], bearer) == b"403"
        assert status(REQUESTS["match"], bearer) == b"200"
        assert status(REQUESTS["not for it"], bearer) == b"200"
        assert status(REQUESTS["no JSON"], bearer) == b"400"
        assert status(REQUESTS["octets"], bearer) == b"200"
        assert status(REQUESTS["match"], bearer) == b"429"
        assert status(REQUESTS["not for it"], bearer) == b"429"


def test_an_end_lets_a_body_that_is_waited_for_come() -> None:
    request = post("/v1/match", JSON, MATCH, "X-Request-ID: last")
    with (
        serving("serve", "--port", "0", KVINDEXER_SHUTDOWN_GRACE_S="10") as (process, port),
        wire_to(port) as wire,
    ):
        wire.sendall(request[:-5])
        with connected(port) as connection:
            connection.request("GET", "/healthz")  # read behind it
            assert connection.getresponse().read()
        process.terminate()
        assert process.stderr is not None
        for line in process.stderr:
            if "Waiting for" in line or "Shutting down" in line:
                break
        wire.sendall(request[-5:])
        answer = read_all(wire)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"x-request-id: last" in answer
        assert process.wait(DEADLINE_S) == 0


def test_access_log_has_them() -> None:
    with (
        serving("serve", "--port", "0", KVINDEXER_ACCESS_LOG_EVERY="1") as (process, port),
        wire_to(port) as wire,
    ):
        wire.sendall(post("/v1/match?x=1", JSON, MATCH) + b"")
        read(wire)
        wire.sendall(post("/v1/match", JSON, MATCH))
        read(wire)
        process.terminate()
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert errors.count("POST /v1/match 200") == 1
    assert errors.count("POST /v1/match 4") == 1
    assert "from 127.0.0.1" in errors
