"""The bodies of all requests share one room: real senders that stop in the middle, on each way that waits for a body."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from app.serving.body_room import BodyRoom
from tests.serving.test_connections import read_all, read_head_and_body, wire_to
from tests.serving.test_serving import DEADLINE_S, metric, serving

ROOM_BYTES = 100_000
MATCH = json.dumps({"model": "m", "token_ids": list(range(16))}).encode()
BODY = MATCH + b" " * (60_000 - len(MATCH))
PIECE = BODY[:40_000]
JSON = b"Host: h\r\nContent-Type: application/json\r\n"
# Where the body is waited for: at the connection, in front of the routes, in a route.
WAYS = {
    "short cut": b"POST /v1/match HTTP/1.1\r\n" + JSON + b"Content-Length: %d\r\n\r\n",
    "short way": b"POST /v1/match HTTP/1.1\r\nForwarded: for=x\r\n" + JSON + b"Content-Length: %d\r\n\r\n",
    "route": b"POST /v1/match HTTP/1.1\r\nAccept: application/msgpack\r\n"
    + JSON
    + b"Content-Length: %d\r\n\r\n",
}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving("serve", "--port", "0", KVINDEXER_BODIES_BYTES_MAX=str(ROOM_BYTES)) as (_, port):
        yield port


def figure(port: int, name: str) -> int:
    return metric(port, f"kvindexer_bodies_{name}")


def wait_for_bytes(port: int, least: int, most: int) -> None:
    """Until so much of all bodies has come; heads count where they are kept with their bodies."""
    until = time.monotonic() + DEADLINE_S
    while not least <= (seen := figure(port, "bytes")) <= most:
        assert time.monotonic() < until, seen


@pytest.mark.parametrize("late", WAYS)
@pytest.mark.parametrize("early", WAYS)
def test_what_finds_no_room_is_refused_and_what_is_in_stays_in(port: int, early: str, late: str) -> None:
    before = figure(port, "refused_total")
    with wire_to(port) as first, wire_to(port) as second, wire_to(port) as third:
        for number, wire in enumerate((first, second), start=1):
            wire.sendall(WAYS[early] % len(BODY) + PIECE)
            wait_for_bytes(port, number * len(PIECE), number * (len(PIECE) + 500))
        third.sendall(WAYS[late] % len(BODY) + PIECE[:25_000])
        received = read_all(third)
        head, _, problem = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 "), received
        assert b"retry-after: 1" in head.lower()
        assert b"connection: close" in head.lower()
        assert json.loads(problem)["type"] == "urn:kvindexer:problem:no-room"
        assert "bodies_bytes_max = 100000" in json.loads(problem)["detail"]
        assert figure(port, "refused_total") == before + 1
        second.close()
        wait_for_bytes(port, len(PIECE), len(PIECE) + 500)
        first.sendall(BODY[len(PIECE) :])
        assert read_head_and_body(first)[0] == 200
    wait_for_bytes(port, 0, 0)


def test_room_is_full_when_the_last_byte_is_taken() -> None:
    room = BodyRoom(10)
    assert room.take(6, held=0)
    assert room.take(4, held=0)
    assert not room.take(1, held=4)
    room.give_back(6)
    assert room.take(7, held=4), "a body that is alone may be larger than the bound"
    assert not room.take(1, held=0)
    assert room.gauges() == {"bytes": 11}


@pytest.mark.parametrize("way", WAYS)
def test_a_body_that_outgrows_the_room_is_refused_in_its_middle(port: int, way: str) -> None:
    with wire_to(port) as first, wire_to(port) as second:
        for number, wire in enumerate((first, second), start=1):
            wire.sendall(WAYS[way] % 70_000 + PIECE)
            wait_for_bytes(port, number * len(PIECE), number * (len(PIECE) + 500))
        second.sendall(b" " * 25_000)
        assert read_all(second).startswith(b"HTTP/1.1 503 ")
    wait_for_bytes(port, 0, 0)


@pytest.mark.parametrize("way", WAYS)
def test_a_body_that_is_alone_is_let_in(port: int, way: str) -> None:
    body = MATCH + b" " * (3 * ROOM_BYTES)
    with wire_to(port) as wire:
        wire.sendall(WAYS[way] % len(body) + body[:ROOM_BYTES])
        wait_for_bytes(port, 1, ROOM_BYTES + 500)
        wire.sendall(body[ROOM_BYTES:])
        assert read_head_and_body(wire)[0] == 200
    wait_for_bytes(port, 0, 0)


@pytest.mark.parametrize("way", WAYS)
def test_those_who_leave_make_room(port: int, way: str) -> None:
    for _ in range(4):
        with wire_to(port) as wire:
            wire.sendall(WAYS[way] % len(BODY) + PIECE)
            wait_for_bytes(port, len(PIECE), len(PIECE) + 500)
        wait_for_bytes(port, 0, 0)


def test_what_a_stream_is_sent_takes_no_room(port: int) -> None:
    """It is read to learn when the client goes, and kept by nobody."""
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with wire_to(port) as wire:
        wire.sendall(b"GET /v1/live HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert wire.recv(15) == b"HTTP/1.1 200 OK"
        for _ in range(256):  # more than all buffers of the system between here and there
            wire.sendall(chunk)
        assert figure(port, "bytes") == 0
        with wire_to(port) as other:
            other.sendall(WAYS["route"] % len(BODY) + BODY)
            assert read_head_and_body(other)[0] == 200
    wait_for_bytes(port, 0, 0)


def test_an_answer_that_waits_gives_its_room_back(port: int) -> None:
    """What the connection read and passed on, as it does with a text."""
    text = json.dumps({"model": "m", "prompt": "word " * 12_000}).encode()
    with wire_to(port) as wire:
        wire.sendall(WAYS["short cut"] % len(text) + text)
        read_head_and_body(wire)
        wait_for_bytes(port, 0, 0)
