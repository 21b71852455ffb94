"""What a check of API keys, and the bounds on connections, cost a request that is let through: CPU time in process.

    python -m benchmarks.access

The check stands around an application that does nothing, and is asked with the headers of a router's request, its key
known among KEYS. The bounds are uvicorn's protocol with and without them, a request of one piece each. Rounds with
and without alternate; the difference of their medians is the cost.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import sys
import time
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from app.api import pages
from app.api.access import Access
from app.auth.api_keys import parse_keys
from app.auth.key_ring import Bucket, KeyRing
from app.config import load_settings
from app.serving.connections import BoundedProtocol, ConnectionLimits
from benchmarks.measure import print_line, print_machine

KEYS = 100
CALLS = 20_000
ROUNDS = 9
HEADERS = [
    (b"host", b"indexer:8080"),
    (b"accept", b"application/json"),
    (b"accept-encoding", b"gzip, deflate"),
    (b"connection", b"keep-alive"),
    (b"user-agent", b"router/1.0"),
    (b"authorization", b"Bearer key-of-a-router-number-0042"),
    (b"content-type", b"application/json"),
    (b"content-length", b"2"),
]


class Nothing:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, _scope: Scope, _receive: Receive, _send: Send) -> None:
        self.calls += 1


def main() -> int:
    print_machine()
    print(f"settings: {KEYS} keys, {CALLS} calls a round, {ROUNDS} rounds")
    for name, rate_per_s in (("a key", 0.0), ("a key and a rate", 1e9)):
        nothing = Nothing()
        layer = _access(nothing, rate_per_s)
        bare, checked = [], []
        for _ in range(ROUNDS):
            bare.append(_cpu_us(nothing))
            checked.append(_cpu_us(layer))
        assert nothing.calls == 2 * ROUNDS * CALLS, "a request was not let through"
        cost_us = statistics.median(checked) - statistics.median(bare)
        print_line(
            f"{name}, CPU a request", f"{cost_us:6.2f} us   (the loop alone {statistics.median(bare):.2f} us)"
        )
    _measure_bounds()
    return 0


def _measure_bounds() -> None:
    limits = ConnectionLimits(load_settings())
    bare, bounded = [], []
    for _ in range(ROUNDS):
        bare.append(_protocol_cpu_us(HttpToolsProtocol))
        bounded.append(_protocol_cpu_us(functools.partial(BoundedProtocol, limits)))
    cost_us = statistics.median(bounded) - statistics.median(bare)
    print_line(
        "bounds on connections, CPU a request",
        f"{cost_us:6.2f} us   (uvicorn {statistics.median(bare):.2f} us)",
    )
    assert not any(limits.counters().values()), "a bound was met"


class _Wire(asyncio.Transport):
    """Counts answers."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.answers += bytes(data[:12]) == b"HTTP/1.1 200"

    def is_closing(self) -> bool:
        return False


def _protocol_cpu_us(make: Callable[..., HttpToolsProtocol]) -> float:
    config = uvicorn.Config(_answer, log_config=None, access_log=False, lifespan="off")
    config.load()
    request = b"POST /v1/match HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % pair for pair in HEADERS) + b"\r\n{}"

    async def ask() -> int:
        wire = _Wire()
        protocol = make(config=config, server_state=ServerState(), app_state={})
        protocol.connection_made(wire)
        for _ in range(CALLS):
            protocol.data_received(request)
            await asyncio.sleep(0)
        protocol._unset_keepalive_if_required()
        return wire.answers

    begin = time.process_time()
    answers = asyncio.run(ask())
    cpu_us = (time.process_time() - begin) / CALLS * 1e6
    assert answers == CALLS, "a request was not answered"
    return cpu_us


async def _answer(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


def _access(app: ASGIApp, rate_per_s: float) -> Access:
    keys = parse_keys((f"key {i}", f"key-of-a-router-number-{i:04}:read") for i in range(KEYS))

    def bucket() -> Bucket:
        return Bucket(rate_per_s, 1e9)

    ring = KeyRing(keys, None, new_bucket=bucket, on_revoked=lambda: None)
    return Access(app, keys=ring, clock=time.monotonic, page=lambda headers: pages.page(401, headers))


def _cpu_us(app: ASGIApp) -> float:

    async def receive() -> Message:
        raise AssertionError("no body is read here")

    async def send(message: Message) -> None:
        raise AssertionError(f"refused: {message}")

    async def ask() -> None:
        for _ in range(CALLS):
            scope = {"type": "http", "method": "POST", "path": "/v1/match", "headers": HEADERS}
            await app(scope, receive, send)

    begin = time.process_time()
    asyncio.run(ask())
    return (time.process_time() - begin) / CALLS * 1e6


if __name__ == "__main__":
    sys.exit(main())
