"""Those who ask wrongly: malformed bytes by HTTP and ZMQ, slow readers and writers, floods, and wrong keys.

What they send is drawn from a seed and is mostly something valid with bytes changed. They have a model and pods of
their own, so that what is true of the others stays known; bounds they share with everybody.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import select
import socket
import threading
import time
from typing import Any

import msgspec
import zmq

from benchmarks.soak.callers import Caller, Keys, judge_status
from benchmarks.soak.findings import Findings
from benchmarks.soak.pods import MODEL
from benchmarks.soak.server import Server

STRANGE_MODEL = "strange"
SOCKET_TIMEOUT_S = 10.0
SLOW_CONNECTIONS_MAX = 32
SLOW_LIFE_S = 12.0
FLOOD_CONNECTIONS = 120  # more than the indexer may have


def harmed(data: bytes, draw: random.Random) -> bytes:
    """Bytes changed, doubled, cut out or added; one time in eight nothing but noise."""
    if draw.random() < 0.125:
        return draw.randbytes(draw.choice((0, 1, 7, 300, 5_000)))
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        start = draw.randrange(len(changed) + 1)
        end = min(len(changed), start + draw.choice((0, 1, 1, 2, 9, 40)))
        new = draw.choice(
            (draw.randbytes(draw.randrange(9)), bytes(changed[start:end]) * 2, b"\xff" * 9, b"9" * 40)
        )
        changed[start:end] = new
    return bytes(changed)


class MalformedHttp:
    """One harmed request a step, each on a connection of its own."""

    def __init__(self, server: Server, keys: Keys, findings: Findings, seed: int) -> None:
        self._server = server
        self._keys = keys
        self._findings = findings
        self._draw = random.Random(seed)

    def step(self) -> None:
        if not self._server.is_up.wait(0.1):
            return
        request = self._request()
        starts = self._server.starts
        try:
            with socket.create_connection(("127.0.0.1", self._server.port), SOCKET_TIMEOUT_S) as connection:
                connection.sendall(request)
                with contextlib.closing(http.client.HTTPResponse(connection, method="POST")) as answer:
                    answer.begin()
                    judge_status(self._findings, answer.status, answer.read(), repr(request[:1_500]))
        except TimeoutError:
            if self._server.starts == starts and self._server.is_up.is_set():
                self._findings.violation("malformed HTTP", f"no answer and no end: {request[:1_500]!r}")
        except (OSError, http.client.RemoteDisconnected, http.client.IncompleteRead):
            self._findings.count("malformed HTTP cut off")
        except http.client.HTTPException as error:
            self._findings.violation("malformed HTTP", f"answered {error!r} to {request[:1_500]!r}")
        self._findings.count("malformed HTTP requests")

    def _request(self) -> bytes:
        draw = self._draw
        target, kind, body, key = draw.choice(self._bodies())
        if draw.random() < 0.7:
            body = harmed(body, draw)
        query = target.encode()
        if draw.random() < 0.3:
            query = harmed(query, draw).replace(b" ", b"%20").replace(b"\n", b"%0a").replace(b"\r", b"%0d")
        head = b"POST %b HTTP/1.1\r\nhost: h\r\nauthorization: Bearer %b\r\n" % (query, key.encode())
        head += b"content-type: %b\r\nx-request-id: %b\r\n" % (
            kind.encode(),
            draw.choice((b"a", b"\xff", b"a" * 300)),
        )
        head += b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        if draw.random() < 0.2:
            head = harmed(head, draw)
        return head + body

    def _bodies(self) -> list[tuple[str, str, bytes, str]]:
        event = {
            "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4], "block_size": 2, "medium": "GPU", "extra_keys": [None, ["salt"]],
            "metadata": {"a": [1]},
        }  # fmt: skip
        events: dict[str, Any] = {"pod": "strange-http", "model": STRANGE_MODEL, "events": [event]}
        payload = msgspec.msgpack.encode([1.5, [event, ["BlockRemoved", [1, 2], "GPU"]], 0])
        match = {"model": MODEL, "token_ids": list(range(64)), "pods": ["pod-0"], "top_k": 3}
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        read, write = self._keys.read, self._keys.write
        strange = f"/v1/events?pod=strange-http&model={STRANGE_MODEL}"
        return [
            ("/v1/match", "application/json", msgspec.json.encode(match), read),
            ("/v1/match", "application/msgpack", msgspec.msgpack.encode(match), read),
            (f"/v1/match?model={MODEL}", "application/octet-stream", bytes(400), read),
            ("/v1/match/batch", "application/json", msgspec.json.encode({"queries": [match, match]}), read),
            ("/v1/route", "application/json", msgspec.json.encode(match), read),
            ("/v1/hashes", "application/json", msgspec.json.encode(match), read),
            ("/v1/fuzzy-match", "application/json", msgspec.json.encode(match), read),
            ("/v1/match", "application/json", msgspec.json.encode(chat), read),
            ("/v1/events", "application/json", msgspec.json.encode(events), write),
            (strange, "application/msgpack", payload, write),
        ]


class MalformedZmq:
    """Two endpoints that are no engine: one speaks ZMQ and says nonsense, the other does not even speak it."""

    def __init__(self, findings: Findings, seed: int) -> None:
        self._findings = findings
        self._draw = random.Random(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for opened in (self._publisher, self._router):
            opened.linger = 0
            opened.bind("tcp://127.0.0.1:*")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0)
        self._seq = 0

    def registrations(self) -> dict[str, dict[str, object]]:
        speaks: dict[str, object] = {
            "model": STRANGE_MODEL,
            "zmq_endpoint": self._publisher.getsockopt_string(zmq.LAST_ENDPOINT),
            "replay_endpoint": self._router.getsockopt_string(zmq.LAST_ENDPOINT),
        }
        mute = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        return {
            "strange-frames": speaks,
            "strange-bytes": {"model": STRANGE_MODEL, "zmq_endpoint": mute},
        }

    def step(self) -> None:
        draw = self._draw
        self._seq += draw.choice((0, 1, 1, 1, 2, 5))
        self._publisher.send_multipart(self._frames())
        self._findings.count("malformed ZMQ messages")
        with contextlib.suppress(zmq.Again):
            peer, *_ = self._router.recv_multipart(zmq.NOBLOCK)
            for _ in range(draw.randrange(4)):
                self._router.send_multipart([peer, *draw.choice(([b""], [])), *self._frames()])
                self._findings.count("malformed ZMQ replies")
        with contextlib.suppress(OSError), self._listener.accept()[0] as connection:
            connection.sendall(harmed(b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48), draw))
            self._findings.count("connections that speak no ZMQ")

    def _frames(self) -> list[bytes]:
        draw = self._draw
        payload = msgspec.msgpack.encode(
            [1.5, [{"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2}], 0]
        )
        frames = [b"", self._seq.to_bytes(8, "big"), harmed(payload, draw)]
        match draw.randrange(6):
            case 0:
                frames[1] = draw.choice((b"", b"\xff" * 8, bytes(7), bytes(9), (2**63).to_bytes(8, "big")))
            case 1:
                frames[0] = draw.randbytes(draw.choice((1, 300, 70_000)))
            case 2:
                frames = [draw.randbytes(draw.randrange(20)) for _ in range(draw.randrange(1, 9))]
        return frames

    def close(self) -> None:
        self._publisher.close()
        self._router.close()
        self._context.term()
        self._listener.close()


class SlowClients:
    """Connections that send a byte a second, stop in the middle, say nothing, or read no answer."""

    KINDS = ("head", "body", "silent", "half body", "unread", "unread feed", "unread dump")

    def __init__(self, server: Server, keys: Keys, findings: Findings, seed: int) -> None:
        self._server = server
        self._keys = keys
        self._findings = findings
        self._draw = random.Random(seed)
        self._open: list[tuple[str, float, socket.socket]] = []

    def step(self) -> None:
        """About once a second."""
        if self._server.is_up.is_set() and len(self._open) < SLOW_CONNECTIONS_MAX:
            for _ in range(4):
                with contextlib.suppress(OSError):
                    self._begin(self._draw.choice(self.KINDS))
        now_s = time.monotonic()
        for slow in list(self._open):
            kind, began_s, connection = slow
            try:
                if kind in ("head", "body"):
                    connection.send(b"a")
                if kind.startswith("unread"):
                    if _is_over(connection):
                        raise ConnectionResetError
                elif connection.recv(4_096, socket.MSG_DONTWAIT) == b"":
                    raise ConnectionResetError
            except BlockingIOError:
                pass
            except OSError:
                self._findings.count(f"slow clients ended by the indexer ({kind})")
                self._drop(slow)
                continue
            if now_s - began_s > SLOW_LIFE_S:
                self._findings.count(f"slow clients gone by themselves ({kind})")
                self._drop(slow)

    def _begin(self, kind: str) -> None:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.settimeout(2.0)
        try:
            connection.connect(("127.0.0.1", self._server.port))
            connection.sendall(self._opening(kind))
        except OSError:
            connection.close()
            raise
        self._open.append((kind, time.monotonic(), connection))

    def _opening(self, kind: str) -> bytes:
        key = f"host: h\r\nauthorization: Bearer {self._keys.read}\r\n"
        match kind:
            case "head":
                return b"POST /v1/match HTTP/1.1\r\nx-slow: "
            case "body" | "half body":
                return f"POST /v1/match HTTP/1.1\r\n{key}content-length: 1000\r\n\r\n{{".encode()
            case "silent":
                return b""
            case "unread":
                body = msgspec.json.encode(
                    {
                        "queries": [{"model": MODEL, "token_ids": list(range(640)), "include_hashes": True}]
                        * 64
                    }
                )
                return (
                    f"POST /v1/match/batch HTTP/1.1\r\n{key}content-type: application/json\r\n"
                    f"content-length: {len(body)}\r\n\r\n"
                ).encode() + body
            case "unread feed":
                return f"GET /v1/live HTTP/1.1\r\n{key}\r\n".encode()
        return f"GET /v1/dump HTTP/1.1\r\n{key}\r\n".encode()

    def _drop(self, slow: tuple[str, float, socket.socket]) -> None:
        slow[2].close()
        self._open.remove(slow)

    def close(self) -> None:
        for slow in list(self._open):
            self._drop(slow)


def _is_over(connection: socket.socket) -> bool:
    """The other side has cut it; seen without reading."""
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


def flood(server: Server, findings: Findings) -> None:
    """More connections at once than the indexer may have; what it does with them is its affair, as long as they end."""
    opened: list[socket.socket] = []
    try:
        for _ in range(FLOOD_CONNECTIONS):
            with contextlib.suppress(OSError):
                opened.append(socket.create_connection(("127.0.0.1", server.port), 2.0))
        threading.Event().wait(0.3)
    finally:
        for connection in opened:
            connection.close()
    findings.count("connections in floods", len(opened))


def wrong_keys(server: Server, keys: Keys, findings: Findings) -> None:
    """Nobody without a key, nobody with a wrong one, and no reader writes."""
    body = msgspec.json.encode({"pod": "pod-0", "events": [{"type": "AllBlocksCleared"}]})
    for key, allowed in (("", 401), ("wrong-key-0123456789", 401), (keys.read, 403)):
        caller = Caller(server, key, findings)
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, _ = caller.post("/v1/events", body, "application/json")
            if status not in (allowed, 503):
                findings.violation("keys", f"a key that may not write was answered {status}, not {allowed}")
            findings.count("wrong keys refused")
        caller.close()
