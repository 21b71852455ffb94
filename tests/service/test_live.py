"""The live feed: what a subscriber reads, what it loses when it is slow, and how a stream ends."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from app.errors import Overloaded
from app.service.live import LiveFeed
from tests.serving.test_serving import DEADLINE_S, connected, serving

Told = tuple[str, dict[str, Any]]


def feed(*, subscribers_max: int = 4, queue_events_max: int = 3) -> LiveFeed:
    return LiveFeed(subscribers_max=subscribers_max, queue_events_max=queue_events_max, clock=lambda: 12.5)


def parsed(chunk: bytes) -> list[Told]:
    """Kind and data of each event; comments are left out."""
    found = []
    for text in chunk.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in text.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


async def read(chunks: AsyncIterator[bytes]) -> bytes:
    async with asyncio.timeout(DEADLINE_S):
        return await anext(chunks)


def test_every_subscriber_reads_what_is_told_after_it_came() -> None:
    async def run() -> None:
        live = feed()
        live.tell("batch", pod="nobody listens")
        first = live.subscribe()
        live.tell("batch", pod="a")
        second = live.subscribe()
        live.tell("state", pod="b")
        ours, theirs = first.chunks(60), second.chunks(60)
        assert (await read(ours)).startswith(b":")
        assert parsed(await read(ours)) == [
            ("batch", {"ts": 12.5, "pod": "a"}),
            ("state", {"ts": 12.5, "pod": "b"}),
        ]
        await read(theirs)
        chunk = await read(theirs)
        assert parsed(chunk) == [("state", {"ts": 12.5, "pod": "b"})]
        assert chunk.startswith(b"id: 3\n")

    asyncio.run(run())


def test_a_slow_reader_is_told_what_it_lost() -> None:
    async def run() -> None:
        live = feed(queue_events_max=3)
        subscription = live.subscribe()
        chunks = subscription.chunks(60)
        await read(chunks)
        for number in range(5):
            live.tell("batch", seq=number)
        told = parsed(await read(chunks))
        assert [data.get("seq") for _, data in told] == [0, 1, 2, None]
        assert told[-1] == ("dropped", {"dropped": 2})
        assert live.dropped == 2
        live.tell("batch", seq=5)
        assert [kind for kind, _ in parsed(await read(chunks))] == ["batch"]

    asyncio.run(run())


def test_silence_is_broken_by_comments() -> None:
    async def run() -> None:
        chunks = feed().subscribe().chunks(0.01)
        await read(chunks)
        for _ in range(2):
            assert parsed(await read(chunks)) == []

    asyncio.run(run())


def test_close_ends_every_stream_behind_what_is_queued() -> None:
    async def run() -> None:
        live = feed()
        waiting, queued = live.subscribe().chunks(60), live.subscribe().chunks(60)
        await read(waiting)
        await read(queued)
        live.tell("batch", seq=1)
        await read(waiting)
        asleep = asyncio.ensure_future(anext(waiting))
        await asyncio.sleep(0)
        live.close()
        with pytest.raises(StopAsyncIteration):
            await asleep
        assert [kind for kind, _ in parsed(await read(queued))] == ["batch"]
        with pytest.raises(StopAsyncIteration):
            await anext(queued)
        assert not live.is_heard
        with pytest.raises(Overloaded, match="ends"):
            live.subscribe()

    asyncio.run(run())


def test_only_so_many_subscribers() -> None:
    live = feed(subscribers_max=1)
    first = live.subscribe()
    with pytest.raises(Overloaded, match="live_subscribers_max = 1"):
        live.subscribe()
    first.end()
    assert not live.is_heard
    live.subscribe()
    assert live.refused == 1


# -- over HTTP


def send(port: int, method: str, path: str, body: Any = None) -> int:
    with connected(port) as connection:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, body=text, headers={"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status


@contextlib.contextmanager
def listening(port: int) -> Iterator[http.client.HTTPResponse]:
    with connected(port) as connection:
        connection.request("GET", "/v1/live")
        response = connection.getresponse()
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.readline().startswith(b":")
        response.readline()
        yield response


def next_event(response: http.client.HTTPResponse) -> Told:
    text = b""
    while not text.strip():
        text = b""
        while (line := response.readline()) not in (b"\n", b""):
            text += line if not line.startswith(b":") else b""
    return parsed(text + b"\n")[0]


def test_what_happens_is_told_and_shutdown_ends_the_stream() -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2, 3, 4], "block_size": 4}
    with serving("serve", "--port", "0") as (process, port), listening(port) as response:
        for seq in (5, 9):
            batch = {"pod": "pod-a", "model": "m", "seq": seq, "events": [event]}
            assert send(port, "POST", "/v1/events", batch) == 200
        assert send(port, "DELETE", "/v1/pods/pod-a") == 204
        told = [next_event(response) for _ in range(5)]
        assert [kind for kind, _ in told] == ["pod_added", "batch", "state", "batch", "pod_removed"]
        assert told[0][1].items() >= {"pod": "pod-a", "model": "m", "lora": None, "dp_size": 1}.items()
        first = {"pod": "pod-a", "dp_rank": 0, "seq": 5, "accepted": 1, "stored_blocks": 1, "rejected": 0}
        assert told[1][1].items() >= first.items()
        assert told[2][1].items() >= {"state": "degraded", "state_before": "live"}.items()
        process.send_signal(signal.SIGTERM)
        assert response.read() == b""  # the last chunk came: an orderly end, and no broken connection
        _, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, "Traceback" in err) == (0, False)


def test_a_reader_that_leaves_gives_its_place_back() -> None:
    with serving("serve", "--port", "0", KVINDEXER_LIVE_SUBSCRIBERS_MAX="1") as (_, port):
        with listening(port):
            assert send(port, "GET", "/v1/live") == 503
        deadline = time.monotonic() + DEADLINE_S
        while send_and_leave(port) == 503:  # until its leaving has been noticed
            assert time.monotonic() < deadline, "the place of a reader that left was never given back"


def send_and_leave(port: int) -> int:
    with connected(port) as connection:
        connection.request("GET", "/v1/live")
        return connection.getresponse().status
