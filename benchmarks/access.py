"""What a check of API keys costs a request that is let through: CPU time in process, with and without it.

    python -m benchmarks.access

The layer stands around an application that does nothing, and is asked with the headers of a router's request, its key
known among KEYS. Rounds with and without it alternate; the difference of their medians is the cost.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import pages
from app.api.access import Access
from app.api_keys import parse_keys
from app.key_ring import Bucket, KeyRing
from benchmarks.measure import print_line, print_machine

KEYS = 100
CALLS = 50_000
ROUNDS = 9


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
    return 0


def _access(app: ASGIApp, rate_per_s: float) -> Access:
    keys = parse_keys((f"key {i}", f"key-of-a-router-number-{i:04}:read") for i in range(KEYS))

    def bucket() -> Bucket:
        return Bucket(rate_per_s, 1e9)

    ring = KeyRing(keys, None, bucket=bucket, on_revoked=lambda: None)
    return Access(
        app,
        keys=ring,
        bucket=bucket(),
        clock=time.monotonic,
        page=lambda headers: pages.page(401, headers),
    )


def _cpu_us(app: ASGIApp) -> float:
    headers = [
        (b"host", b"indexer:8080"),
        (b"accept", b"application/json"),
        (b"accept-encoding", b"gzip, deflate"),
        (b"connection", b"keep-alive"),
        (b"user-agent", b"router/1.0"),
        (b"authorization", b"Bearer key-of-a-router-number-0042"),
        (b"content-type", b"application/json"),
        (b"content-length", b"25000"),
    ]

    async def receive() -> Message:
        raise AssertionError("no body is read here")

    async def send(message: Message) -> None:
        raise AssertionError(f"refused: {message}")

    async def ask() -> None:
        for _ in range(CALLS):
            scope = {"type": "http", "method": "POST", "path": "/v1/match", "headers": headers}
            await app(scope, receive, send)

    begin = time.process_time()
    asyncio.run(ask())
    return (time.process_time() - begin) / CALLS * 1e6


if __name__ == "__main__":
    sys.exit(main())
