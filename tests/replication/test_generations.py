"""The parts of one replica over a real Redis, in this process: when a snapshot is written and the log trimmed is the
test's to say, so that what lies in Redis at that moment can be damaged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import redis

from app.config import Settings
from app.events import Envelope
from app.replication.applier import Applier
from app.replication.coder import Coder
from app.replication.entries import VERSION
from app.replication.follower import Follower
from app.replication.generations import Generations
from app.replication.log_writer import LogWriter
from app.replication.outbox import Outbox
from app.replication.redis_log import RedisLog, Terms, order
from app.service import IndexerService
from app.snapshots.keeper import SnapshotKeeper
from app.snapshots.redis_store import RedisStore
from tests.discovery.waiting import until
from tests.replication.redis_server import RedisServer
from tests.replication.replicas import Clock, Lone
from tests.replication.test_lost_end import _end, batch

DEADLINE_S = 30.0
TAG = "{test}:snapshot"


class Whole(Lone):
    """A replica of one partition that reads and appends, and writes snapshots when it is told."""

    def __init__(self, name: str, url: str, *, keep_s: float = 0.0) -> None:
        super().__init__(Settings(), Clock())
        self.log = RedisLog(url, cluster=False, namespace="test", timeout_s=5.0)
        coder = Coder(self.service, shingle=self.shingle)
        self.outbox = Outbox(name, 1, bytes_max=1 << 20, append=self.log.append, landed=coder.land)
        self.applier = Applier(self.service, name, 1, settle=self.outbox.settle)
        self.store = RedisStore(self.log.commands, tag=TAG)
        keeper = SnapshotKeeper(
            self.service,
            self.index,
            self.store,
            configured=frozenset(),
            interval_s=0.0,
            place=self.applier.place,
        )
        self.generations = Generations(
            self.log,
            Terms(log="", version=VERSION, partitions=1, fuzzy=self.shingle > 0, count_copies=True),
            self.service,
            self.applier,
            self.outbox,
            replica=name,
            keeper=keeper,
            store=self.store,
            keep_s=keep_s,
            interval_s=0.0,
        )
        self.follower = Follower(
            self.log, self.applier, self.generations, partitions=1, keep_s=keep_s, ended=self.outbox.has_ended
        )
        self.generations.interrupt = self.follower.interrupt
        self.writer = LogWriter(
            self.service, coder, self.outbox, self.applier, partitions=1, answer_timeout_s=DEADLINE_S
        )
        self._tasks = [asyncio.create_task(self.follower.run(0)), asyncio.create_task(self.outbox.run(0))]

    async def post(self, seq: int) -> None:
        """The next block of pod a."""
        await self.writer.post(Envelope(pod="a", model="m", seq=seq), batch(seq))

    async def save(self) -> str:
        """The place of the snapshot in the log."""
        await self.generations.save(lambda: self.follower.is_caught_up)
        placed = await self.store.placed("newest")
        assert placed is not None
        return placed.positions[0]

    def picture(self) -> tuple[str, object]:
        return digest(self.service)

    async def close(self) -> None:
        await _end(self._tasks)
        await self.log.close()


def digest(service: IndexerService) -> tuple[str, object]:
    return service.stats()["digest"], {name: pod.sources[0].state for name, pod in service.pods.items()}


@contextlib.asynccontextmanager
async def replica(name: str, url: str) -> AsyncIterator[Whole]:
    made = Whole(name, url)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await made.follower.caught_up_once()
        yield made
    finally:
        await made.close()


def test_the_log_reaches_back_to_the_older_snapshot_for_when_the_newer_one_is_damaged(
    redis_server: RedisServer,
) -> None:
    async def play() -> None:
        async with replica("one", redis_server.url) as one:
            await one.post(0)
            first = await one.save()
            await one.post(1)
            second = await one.save()
            await one.post(2)
            assert first != second
            assert await one.log.trimmed(0) == first, "to there and no further"
            with redis.Redis.from_url(redis_server.url) as client:
                placed = await one.store.placed("newest")
                assert placed is not None
                client.delete(f"{TAG}:{placed.generation}:0")
            async with replica("late", redis_server.url) as late:
                await until(lambda: late.picture() == one.picture(), "it has all of it")
                assert late.generations.counts["snapshots_loaded"] == 1
                assert late.service.blocks_by_tier("a", 0)["gpu"] == 3

    asyncio.run(play())


def test_what_is_young_is_not_trimmed(redis_server: RedisServer) -> None:
    """Replicas that are a moment behind need no snapshot."""

    async def play() -> None:
        one = Whole("one", redis_server.url, keep_s=600.0)
        try:
            for seq in range(3):
                await one.post(seq)
                await one.save()
            first = await one.log.first(0)
            assert first is not None
            assert order(await one.log.trimmed(0)) < order(first)
            assert one.generations.counts["trimmed_groups"] == 0
        finally:
            await one.close()

    asyncio.run(play())


def test_a_log_that_lost_what_was_applied_is_not_read_on(redis_server: RedisServer) -> None:
    """No connection breaks, and no other log is in force: only the place itself tells. What came behind it may be missing
    as well, so the replica that has read furthest begins a new log with what it holds."""

    async def play() -> None:
        async with replica("one", redis_server.url) as one:
            await one.post(0)
            before = one.log.number
            with redis.Redis.from_url(redis_server.url) as client:
                assert client.xdel(f"{{test:0}}:log:{before}", one.applier.state.positions[0]) == 1
            await until(lambda: one.generations.counts["logs_begun"] == 1, "it notices")
            assert one.log.number != before
            await one.post(1)
            assert one.service.blocks_by_tier("a", 0)["gpu"] == 2
            assert one.follower.counts["reconnects"] == 1
            async with replica("late", redis_server.url) as late:
                await until(lambda: late.picture() == one.picture(), "it has all of it")

    asyncio.run(play())
