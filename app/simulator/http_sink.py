"""Publishes batches by POST /v1/events instead of ZMQ: one after the other, each tried again until it is
taken.

The payload is the same bytes that would go over ZMQ. There is no replay: what does not fit the queue is
lost and counted, and the gap in the sequence numbers tells the indexer. A refused batch (4xx) is given up
and counted.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

QUEUE_BATCHES_MAX = 10_000
RETRY_DELAY_S = 0.5


class HttpSink:
    """Of one rank. Made and used on the event loop."""

    def __init__(self, url: str, pod: str, model: str, dp_rank: int, *, api_key: str | None = None) -> None:
        headers = {"Content-Type": "application/msgpack"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=10.0)
        self._parameters: dict[str, Any] = {"pod": pod, "model": model, "dp_rank": dp_rank}
        self._queue: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue(QUEUE_BATCHES_MAX)
        self._task = asyncio.create_task(self._post_forever())
        self.lost = 0
        self.refused = 0

    def publish(self, seq: int, payload: bytes, *, copies: int = 1) -> None:
        if not copies:
            self.lost += 1
        for _ in range(copies):
            try:
                self._queue.put_nowait((seq, payload))
            except asyncio.QueueFull:
                self.lost += 1

    def restart(self) -> None:
        """Nothing to forget: there is no replay buffer."""

    def stop(self) -> None:
        self._task.cancel()

    async def closed(self) -> None:
        """Return when the connection is closed after a stop."""
        await asyncio.gather(self._task, return_exceptions=True)
        await self._http.aclose()

    async def drained(self) -> None:
        await self._queue.join()

    async def _post_forever(self) -> None:
        while True:
            seq, payload = await self._queue.get()
            try:
                await self._post(seq, payload)
            finally:
                self._queue.task_done()

    async def _post(self, seq: int, payload: bytes) -> None:
        while True:
            try:
                parameters = {**self._parameters, "seq": seq}
                response = await self._http.post("/v1/events", content=payload, params=parameters)
            except httpx.TransportError:
                await asyncio.sleep(RETRY_DELAY_S)
                continue
            if response.status_code in (429, 503):
                await asyncio.sleep(RETRY_DELAY_S)
                continue
            self.refused += response.is_error
            return
