"""The outbox by itself: its bound, its order, and what becomes of a group that the log lost. The log here is a list that
can be shut; what is read back from it is the test's to say."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.errors import LogAway, Overloaded
from app.replication.coder import Ticket
from app.replication.entries import OwnerCleared, decode_group, encode_entry
from app.replication.outbox import GROUP_BYTES_MAX, Outbox, Sending
from tests.discovery.waiting import until


class Log:
    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.begun = 0  # appends, answered or not
        self.groups: list[tuple[int, int, list[str]]] = []  # number, the one before it, owners

    async def append(self, _partition: int, data: bytes) -> None:
        self.begun += 1
        await self.open.wait()
        group = decode_group(data)
        owners = [entry.owner for entry in group.entries if isinstance(entry, OwnerCleared)]
        self.groups.append((group.number, group.follows, owners))

    @property
    def order(self) -> list[tuple[int, int]]:
        return [(number, follows) for number, follows, _ in self.groups]


class Sender:
    """An outbox of one partition, and all that it told."""

    def __init__(self, log: Log, bytes_max: int) -> None:
        self.landed: list[Ticket] = []
        self.outbox = Outbox("this", 1, bytes_max=bytes_max, append=log.append, landed=self.landed.append)

    def put(self, name: str, *, answered: bool = True) -> Sending:
        answer = asyncio.get_running_loop().create_future() if answered else None
        return self.outbox.put(0, entry(name), Ticket(name), answer)


@contextlib.asynccontextmanager
async def sending(bytes_max: int = 1 << 20) -> AsyncIterator[tuple[Sender, Log]]:
    log = Log()
    sender = Sender(log, bytes_max)
    task = asyncio.create_task(sender.outbox.run(0))
    try:
        yield sender, log
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def entry(name: str) -> bytes:
    return encode_entry(OwnerCleared(owner=name))


async def appended(log: Log, count: int) -> None:
    await until(lambda: len(log.groups) == count, f"{count} groups in {log.groups}")


SIZE = len(entry("x"))


def test_what_waits_for_an_answer_fits_the_bound_or_is_refused_with_nothing_changed() -> None:
    async def play() -> None:
        async with sending(bytes_max=3 * SIZE) as (sender, log):
            log.open.clear()
            for _ in range(3):
                sender.put("x")
            assert (sender.outbox.bytes, sender.outbox.entries) == (3 * SIZE, 3)
            with pytest.raises(Overloaded):
                sender.put("x")
            assert sender.outbox.counts["outbox_refused"] == 1
            assert (sender.outbox.bytes, sender.outbox.entries) == (3 * SIZE, 3)
            sender.put("x", answered=False)  # the fate of a stream cannot be refused
            assert sender.outbox.bytes == 4 * SIZE
            log.open.set()

    asyncio.run(play())


def test_one_byte_too_many_is_too_many() -> None:
    async def play() -> None:
        async with sending(bytes_max=2 * SIZE - 1) as (sender, _):
            sender.put("x")
            with pytest.raises(Overloaded):
                sender.put("x")

    asyncio.run(play())


def test_it_is_full_until_half_of_it_is_free() -> None:
    """And says so once: who waits for room must not be woken for a byte."""

    async def play() -> None:
        async with sending(bytes_max=4 * SIZE) as (sender, log):
            told = []
            sender.outbox.room_listeners.append(lambda: told.append(sender.outbox.bytes))
            log.open.clear()
            waiting = [sender.put("x", answered=False) for _ in range(4)]
            full = [sender.outbox.is_full]
            for one in waiting[:2]:
                assert told == []
                assert sender.outbox.withdraw(one)
                full.append(sender.outbox.is_full)
            assert full == [True, True, False]
            assert told == [2 * SIZE]
            assert sender.outbox.withdraw(waiting[2])
            assert told == [2 * SIZE]

    asyncio.run(play())


def test_what_was_not_sent_can_be_withdrawn_and_leaves_nothing() -> None:
    async def play() -> None:
        async with sending() as (sender, log):
            log.open.clear()
            first = sender.put("a")
            await until(lambda: log.begun == 1, "it is on its way")
            assert not sender.outbox.withdraw(first)
            second = sender.put("b")
            assert sender.outbox.withdraw(second)
            assert not sender.outbox.withdraw(second)
            assert [ticket.pod for ticket in sender.landed] == ["b"]
            assert (sender.outbox.bytes, sender.outbox.entries) == (SIZE, 1)
            log.open.set()
            await appended(log, 1)
            assert log.groups == [(1, 0, ["a"])]
            sender.outbox.settle(0, 1, ["done"])
            assert await await_(first) == "done"
            async with asyncio.timeout(10):
                await sender.outbox.drained()

    asyncio.run(play())


async def await_(one: Sending) -> Any:
    assert one.answer is not None
    async with asyncio.timeout(10):
        return await one.answer


def test_each_group_names_the_one_before_it_while_that_has_not_come_back() -> None:
    async def play() -> None:
        async with sending() as (sender, log):
            for count, name in enumerate("abc", 1):
                sender.put(name, answered=False)
                await appended(log, count)
            assert log.order == [(1, 0), (2, 1), (3, 2)]
            for number in (1, 2, 3):
                sender.outbox.settle(0, number, [None])
            sender.put("d", answered=False)
            await appended(log, 4)
            assert log.order[-1] == (4, 0), "what was before is in the picture of every reader of the log"

    asyncio.run(play())


def test_what_the_log_lost_goes_once_more_and_in_order() -> None:
    async def play() -> None:
        async with sending() as (sender, log):
            for count, name in enumerate("abc", 1):
                sender.put(name, answered=False)
                await appended(log, count)
            sender.outbox.settle(0, 1, [None])
            sender.outbox.has_ended(0, time.monotonic())
            sender.put("d", answered=False)
            await appended(log, 6)
            assert log.groups[3:] == [(2, 0, ["b"]), (3, 2, ["c"]), (4, 3, ["d"])]
            assert sender.outbox.counts["lost_groups"] == 2

    asyncio.run(play())


def test_a_read_that_began_before_an_append_says_nothing_of_it() -> None:
    async def play() -> None:
        async with sending() as (sender, log):
            began_s = time.monotonic()
            sender.put("a", answered=False)
            await appended(log, 1)
            await until(lambda: sender.outbox.counts["appended_groups"], "its answer is here")
            sender.outbox.has_ended(0, began_s)
            assert sender.outbox.counts["lost_groups"] == 0
            log.open.clear()
            sender.put("b", answered=False)
            await until(lambda: log.begun == 2, "it is on its way")
            sender.outbox.has_ended(0, time.monotonic() + 1)  # of the one, and not of what has had no answer
            assert sender.outbox.counts["lost_groups"] == 1

    asyncio.run(play())


def test_what_is_in_the_picture_of_a_snapshot_is_not_sent_again_and_nobody_knows_its_outcome() -> None:
    async def play() -> None:
        async with sending() as (sender, log):
            known = sender.put("a")
            await appended(log, 1)
            lost = sender.put("b")
            await appended(log, 2)
            sender.outbox.send_again(0, known=1)
            with pytest.raises(LogAway, match="was changed"):
                await await_(known)
            await appended(log, 3)
            assert log.groups[2] == (2, 0, ["b"])
            sender.outbox.settle(0, 2, [Overloaded("no")])
            with pytest.raises(Overloaded):
                await await_(lost)
            assert (sender.outbox.bytes, sender.outbox.entries) == (0, 0)

    asyncio.run(play())


def test_what_came_meanwhile_goes_together_up_to_the_bound_of_a_group() -> None:
    async def play() -> None:
        async with sending() as (sender, log):
            log.open.clear()
            sender.put("first", answered=False)
            await until(lambda: log.begun == 1, "it is on its way")
            half = GROUP_BYTES_MAX // 2
            names = ["a" * half, "b" * (half - 100), "c" * half, "d" * (3 * GROUP_BYTES_MAX), "e"]
            for name in names:
                sender.put(name, answered=False)
            log.open.set()
            await appended(log, 5)
            assert [owners for _, _, owners in log.groups] == [
                ["first"],
                names[:2],
                [names[2]],
                [names[3]],
                ["e"],
            ]

    asyncio.run(play())
