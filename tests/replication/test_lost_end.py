"""A Redis that loses the end of the log so quickly that no connection is seen to break: nothing of it stays missing.

The readers here notice nothing by themselves: no place is looked for, nothing is sent again because of a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from app.config import Settings
from app.events import BlockStored, Envelope, EventBatch
from app.replication.applier import Applier, beginning
from app.replication.coder import Coder
from app.replication.follower import Follower
from app.replication.log_writer import LogWriter
from app.replication.outbox import Outbox
from app.replication.redis_log import BEGINNING, RedisLog
from tests.discovery.waiting import until
from tests.replication.redis_server import RedisServer
from tests.replication.replicas import Clock, Lone
from tests.replication.test_same_picture import tokens, uint64s

DEADLINE_S = 30.0
PARTITIONS = 2


class Unaware:
    """Places for a reader to whom nothing seems wrong."""

    async def ensure(self, partition: int) -> None:
        pass

    async def is_whole(self, partition: int) -> bool:
        return True


class OverRedis(Lone):
    """One replica; it appends from the start and reads when it is told."""

    def __init__(self, name: str, url: str) -> None:
        super().__init__(Settings(), Clock())
        self.log = RedisLog(url, cluster=False, namespace="test", timeout_s=5.0)
        self.log.number = "1"
        coder = Coder(self.service, shingle=self.shingle)
        self.outbox = Outbox(name, PARTITIONS, bytes_max=1 << 20, append=self.log.append, landed=coder.land)
        self.applier = Applier(self.service, name, PARTITIONS, settle=self.outbox.settle)
        self.applier.state = beginning("1", PARTITIONS)
        self.writer = LogWriter(
            self.service,
            coder,
            self.outbox,
            self.applier,
            partitions=PARTITIONS,
            answer_timeout_s=DEADLINE_S,
        )
        self.follower = Follower(
            self.log,
            self.applier,
            Unaware(),
            partitions=PARTITIONS,
            keep_s=60.0,
            ended=self.outbox.has_ended,
        )
        self._appending = [asyncio.create_task(self.outbox.run(p)) for p in range(PARTITIONS)]
        self._reading: list[asyncio.Task[None]] = []

    def read(self) -> None:
        self._reading = [asyncio.create_task(self.follower.run(p)) for p in range(PARTITIONS)]

    async def pause(self) -> None:
        await _end(self._reading)

    async def close(self) -> None:
        await _end(self._reading + self._appending)
        await self.log.close()

    def post(self, seq: int) -> asyncio.Task[object]:
        """The next block of pod a."""
        return asyncio.create_task(_post(self.writer.post, seq))

    def picture(self) -> tuple[str, object]:
        found = self.service.stats()
        return found["digest"], found["totals"]


async def _post(post: Callable[..., Awaitable[object]], seq: int) -> object:
    return await post(Envelope(pod="a", model="m", seq=seq), batch(seq))


def batch(seq: int) -> EventBatch:
    parent = seq if seq else None  # the name of a block is one more than its number
    event = BlockStored(
        block_hashes=uint64s(seq + 1), parent_block_hash=parent, token_ids=tokens((seq,)), block_size=4
    )
    return EventBatch(events=(event,), positions=(0,))


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=0.2)


@contextlib.asynccontextmanager
async def two(url: str) -> AsyncIterator[tuple[OverRedis, OverRedis]]:
    members = OverRedis("one", url), OverRedis("other", url)
    try:
        yield members
    finally:
        for member in members:
            await member.close()


class Forgetful:
    """A Redis on disk that can be put back to what it was."""

    def __init__(self, place: Path) -> None:
        self._data, self._kept = place / "redis", place / "kept"
        self._data.mkdir()
        self.server = RedisServer(self._data, keep=True)

    def remember(self) -> None:
        shutil.copytree(self._data, self._kept)

    async def go_back(self) -> None:
        """On another thread: so the loop sees that connections end, before they are used again."""
        await asyncio.to_thread(self._go_back)

    def _go_back(self) -> None:
        self.server.kill()
        shutil.rmtree(self._data)
        shutil.copytree(self._kept, self._data)
        self.server.start()


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[Forgetful]:
    made = Forgetful(tmp_path)
    with made.server:
        yield made


@pytest.mark.parametrize("more", [True, False], ids=["more behind it", "nothing behind it"])
def test_what_nobody_had_read_is_sent_again(forgetful: Forgetful, more: bool) -> None:
    asyncio.run(_lose_what_nobody_had_read(forgetful, more))


async def _lose_what_nobody_had_read(forgetful: Forgetful, more: bool) -> None:
    async with two(forgetful.server.url) as (one, other):
        one.read()
        other.read()
        await one.post(0)
        await until(lambda: other.picture() == one.picture(), "both have it")
        await one.pause()
        await other.pause()
        forgetful.remember()
        posts = [one.post(1)]
        await until(lambda: one.outbox.counts["appended_groups"] == 2, "the log has taken it")
        await forgetful.go_back()
        if more:
            # The client makes its connection anew, and says nothing.
            posts.append(one.post(2))
            await until(lambda: one.outbox.counts["appended_groups"] == 3, "the log has what came behind")
        one.read()
        other.read()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*posts)
        await until(lambda: other.picture() == one.picture(), "the other has it too")
        alone = Lone(Settings(), Clock())
        for seq in range(len(posts) + 1):
            alone.service.post(Envelope(pod="a", model="m", seq=seq), batch(seq))
        found = alone.service.stats()
        assert one.picture() == (found["digest"], found["totals"]), "no hole, nothing doubled"
        for member in (one, other):
            assert member.applier.counts["early_groups"] == more
            assert member.applier.counts["repeated_groups"] == 0
        assert one.outbox.counts["lost_groups"] == len(posts)
        assert one.outbox.counts["append_failures"] == 0, "no fault was seen"


def test_what_was_read_and_lost_is_seen(forgetful: Forgetful) -> None:
    asyncio.run(_lose_what_was_read(forgetful))


async def _lose_what_was_read(forgetful: Forgetful) -> None:
    log = RedisLog(forgetful.server.url, cluster=False, namespace="test", timeout_s=5.0)
    log.number = "1"
    try:
        first = await log.append(0, b"first")
        forgetful.remember()
        lost = await log.append(0, b"lost")
        assert await log.read(0, first, wait=False) == ([(lost, b"lost")], True)
        await forgetful.go_back()
        later = await log.append(0, b"later")
        assert await log.read(0, lost, wait=False) == ([(later, b"later")], False)
        assert await log.read(0, first, wait=False) == ([(later, b"later")], True)
        assert (await log.read(0, BEGINNING, wait=False))[0][0] == (first, b"first")
    finally:
        await log.close()
