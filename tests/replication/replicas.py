"""Replicas in one process over a log that is a list: everything real but Redis, and time that only moves when told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from app.config import Settings
from app.index.prefix_index import PrefixIndex
from app.replication.applier import Applier
from app.replication.coder import Coder
from app.replication.log_writer import LogWriter
from app.replication.outbox import Outbox
from app.service import IndexerService, index_limits
from app.service.fuzzy_queries import fuzzy_index

PARTITIONS = 3


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


class Lone:
    """A service without a log."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        contents = fuzzy_index(settings)
        self.index = PrefixIndex(index_limits(settings), contents)
        self.service = IndexerService(settings, self.index, clock=clock, contents=contents)
        self.shingle = 0 if contents is None else contents.shingle


class ListLog:
    """Partitions as lists of groups; what is appended has its place in them at once."""

    def __init__(self) -> None:
        self.groups: list[list[bytes]] = [[] for _ in range(PARTITIONS)]

    async def append(self, partition: int, group: bytes) -> None:
        self.groups[partition].append(group)


class Member(Lone):
    """One replica; what it applies of the log, and when, is the test's to say."""

    def __init__(
        self,
        name: str,
        log: ListLog,
        settings: Settings,
        clock: Clock,
        *,
        outbox_bytes_max: int = 1 << 30,
        answer_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(settings, clock)
        self._log = log
        self.coder = Coder(self.service, shingle=self.shingle)
        self.outbox = Outbox(
            name, PARTITIONS, bytes_max=outbox_bytes_max, append=log.append, landed=self.coder.land
        )
        self.applier = Applier(self.service, name, PARTITIONS, settle=self.outbox.settle)
        self.writer = LogWriter(
            self.service,
            self.coder,
            self.outbox,
            self.applier,
            partitions=PARTITIONS,
            answer_timeout_s=answer_timeout_s,
        )
        self.feed = self.writer.feed(lambda _pod: 1)
        self.service.ask_before_silence(self.writer.ask_for_silence)
        self.read = [0] * PARTITIONS
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self.outbox.run(p)) for p in range(PARTITIONS)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def apply(self, groups_max: int | None = None) -> bool:
        """Up to so many groups of each partition; True when there were any."""
        found = False
        for partition, groups in enumerate(self._log.groups):
            begin = self.read[partition]
            for group in groups[begin : None if groups_max is None else begin + groups_max]:
                self.read[partition] += 1
                self.applier.apply(partition, f"1-{self.read[partition]}", group)
                found = True
        return found


class Fleet:
    def __init__(self, count: int, **settings: Any) -> None:
        self.clock = Clock()
        self.settings = Settings(**settings)
        self.log = ListLog()
        self.members = [Member(f"r{i}", self.log, self.settings, self.clock) for i in range(count)]

    async def __aenter__(self) -> Fleet:
        for member in self.members:
            member.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.members:
            await member.stop()

    async def settle(self) -> None:
        """Until everything that was accepted has been applied everywhere."""
        quiet = 0
        while quiet < 3:
            await asyncio.sleep(0)
            busy = [member.apply() for member in self.members]
            busy += [member.outbox.entries > 0 for member in self.members]
            quiet = 0 if any(busy) else quiet + 1

    async def results(self, calls: Sequence[Awaitable[Any]]) -> list[Any]:
        """What comes of calls that are made one after the other, none waiting for the answer of the one before."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        await self.settle()
        return await asyncio.gather(*tasks, return_exceptions=True)
