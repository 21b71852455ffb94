"""What is not taken into the log leaves nothing under way: no room, no answer in time, no lease."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app.config import Settings
from app.errors import LogAway, Overloaded
from app.events import Envelope
from app.pods import PodSpec, SourceState
from tests.replication.replicas import Clock, ListLog, Member
from tests.replication.test_silence import batch

POD = "a"


def member(**bounds: Any) -> Member:
    """Its log takes nothing: the tasks that append were not started."""
    return Member("this", ListLog(), Settings(), Clock(), **bounds)


def nothing_is_under_way(of: Member) -> None:
    assert (of.outbox.bytes, of.outbox.entries) == (0, 0)
    assert of.coder.sources == 0
    assert not of.coder.is_changing(POD)
    assert not of.coder.is_under_way(POD, 0)


def test_what_finds_no_room_is_not_under_way() -> None:
    """Else the source passed for one that changes for ever, and its batches would go unchecked into the log."""

    async def play() -> None:
        this = member(outbox_bytes_max=2)
        this.service.register(PodSpec(POD, "m"))
        writer = this.writer
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: writer.post(Envelope(pod=POD, model="m", seq=0), batch(0)),
            lambda: writer.register(PodSpec(POD, "m", lora="tuned")),
            lambda: writer.drop_pod(POD),
            lambda: writer.remove_blocks(POD, model=None, lora=None, dp_rank=None, tier=None),
        ]
        for call in calls:
            with pytest.raises(Overloaded):
                await call()
            nothing_is_under_way(this)
        assert this.outbox.counts["outbox_refused"] == len(calls)

    asyncio.run(play())


def test_what_was_not_sent_in_time_never_is() -> None:
    async def play() -> None:
        this = member(answer_timeout_s=0.01)
        with pytest.raises(LogAway, match="nothing was changed"):
            await this.writer.post(Envelope(pod=POD, model="m", seq=0), batch(0))
        nothing_is_under_way(this)

    asyncio.run(play())


def test_what_a_stream_brings_without_a_lease_is_left_out_and_counted() -> None:
    async def play() -> None:
        this = member()
        this.service.register(PodSpec(POD, "m", zmq_endpoint="tcp://127.0.0.1:1"))
        leases: dict[str, int] = {}
        feed = this.writer.feed(leases.get)
        feed.apply(POD, 0, batch(0), seq=0, digest=1)
        feed.reset_source(POD, 0, restarted=True)
        feed.set_source_state(POD, 0, SourceState.DEGRADED, cause="a gap")
        assert feed.unleased == 3
        nothing_is_under_way(this)
        leases[POD] = 1
        feed.apply(POD, 0, batch(0), seq=0, digest=1)
        assert feed.unleased == 3
        assert this.outbox.entries == 1
        assert this.coder.is_under_way(POD, 0)

    asyncio.run(play())
