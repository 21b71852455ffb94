"""The reader of a partition, over a real Redis: what it had read is not applied behind an interruption."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from app.config import Settings
from app.pods import PodSpec, SourceState
from app.replication import follower
from app.replication.applier import Applier, beginning
from app.replication.entries import OwnerCleared, encode_entry, encode_group
from app.replication.follower import Follower
from app.replication.redis_log import RedisLog
from tests.discovery.waiting import until
from tests.replication.proxy import proxied
from tests.replication.redis_server import RedisServer
from tests.replication.replicas import Clock, Lone

GROUPS = 8


class Gate:
    """Places that a reader may begin from once, and then no more."""

    def __init__(self) -> None:
        self.asked = 0

    async def ensure(self, _partition: int) -> None:
        self.asked += 1
        if self.asked > 1:
            await asyncio.Event().wait()

    async def is_whole(self, _partition: int) -> bool:
        return True


class Ended:
    """Outbox.has_ended."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, partition: int, began_s: float) -> None:
        self.calls += 1


def test_what_was_read_before_an_interruption_is_not_applied_behind_it(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of what one read brought another picture took the place of ours: the rest is not of its log."""
    monkeypatch.setattr(follower, "SLICE_S", 0.0)

    async def play() -> None:
        log = RedisLog(redis_server.url, cluster=False, namespace="test", timeout_s=5.0)
        log.number = "1"
        entry = encode_entry(OwnerCleared(owner="nobody"))
        for number in range(1, GROUPS + 1):
            await log.append(0, encode_group("this", number, [entry], follows=0))
        settled: list[int] = []

        def settle(partition: int, number: int, outcomes: Sequence[object]) -> None:
            settled.append(number)
            reader.interrupt("another log is in force", replaced=True)

        applier = Applier(Lone(Settings(), Clock()).service, "this", 1, settle=settle)
        applier.state = beginning("1", 1)
        gate, ended = Gate(), Ended()
        reader = Follower(log, applier, gate, partitions=1, keep_s=60.0, ended=ended)
        task = asyncio.create_task(reader.run(0))
        try:
            await until(lambda: gate.asked == 2, "it looks for its place")
            assert settled == [1]
            assert applier.counts["applied_groups"] == 1
            assert reader.partitions[0].trouble == "another log is in force"
            assert not reader.is_caught_up
            assert ended.calls == 0
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await log.close()

    asyncio.run(play())


def test_rows_say_so_with_the_first_answer_that_does_not_come(redis_server: RedisServer) -> None:
    """Not first when it has been tried again: partitions make sure of their places one after the other, and each waits
    as long for a Redis that is silent."""

    async def play() -> None:
        with proxied(redis_server.port) as proxy:
            url = f"redis://127.0.0.1:{proxy.port}/0"
            log = RedisLog(url, cluster=False, namespace="test", timeout_s=0.1)
            log.number = "1"
            lone = Lone(Settings(), Clock())
            lone.service.register(PodSpec("a", "m"))
            lone.service.set_source_state("a", 0, SourceState.LIVE)
            applier = Applier(lone.service, "this", 1, settle=lambda *_: None)
            applier.state = beginning("1", 1)
            gate = Gate()
            reader = Follower(log, applier, gate, partitions=1, keep_s=60.0, ended=Ended())
            task = asyncio.create_task(reader.run(0))
            try:
                await until(lambda: reader.partitions[0].caught_up, "it reads")
                assert lone.service.pod("a").sources[0].state is SourceState.LIVE
                proxy.set("drop")
                await until(lambda: gate.asked == 2, "it looks for its place")
                assert reader.away_s > 0
                assert lone.service.pod("a").sources[0].state is SourceState.DEGRADED
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await log.close()

    asyncio.run(play())


def test_a_redis_that_may_evict_what_is_read_is_told_when_reading_begins(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server.client() as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")

    async def play() -> None:
        log = RedisLog(redis_server.url, cluster=False, namespace="test", timeout_s=5.0)
        log.number = "1"
        applier = Applier(Lone(Settings(), Clock()).service, "this", 2, settle=lambda *_: None)
        applier.state = beginning("1", 2)
        gates = [Gate(), Gate()]
        reader = Follower(log, applier, gates[0], partitions=2, keep_s=60.0, ended=Ended())
        other = Follower(log, applier, gates[1], partitions=2, keep_s=60.0, ended=Ended())
        tasks = [asyncio.create_task(reader.run(0)), asyncio.create_task(other.run(1))]
        try:
            await until(lambda: reader.partitions[0].caught_up and other.partitions[1].caught_up, "both read")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await log.close()

    asyncio.run(play())
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1, told
    assert "allkeys-lru" in told[0]
