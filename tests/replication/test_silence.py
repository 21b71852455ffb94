"""A pod that posts falls silent: every replica asks in the log whether it has, and what it holds goes everywhere at the
same place of the log, or nowhere. A replica that lags behind may ask too early: the batch that it had not read yet
counts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from app.events import BlockStored, Envelope, EventBatch
from app.pods import SourceState
from app.replication.entries import SourceSilent, decode_group
from tests.discovery.waiting import until
from tests.replication.replicas import Fleet, Lone, Member
from tests.replication.test_same_picture import SIZE, answers, picture, tokens, uint64s

DEADLINE_S = 60.0
PATH = (0, 1, 2)


def batch(start: int) -> EventBatch:
    """The next block of the path."""
    event = BlockStored(
        block_hashes=uint64s(start + 1),
        parent_block_hash=start or None,
        token_ids=tokens(PATH[start : start + 1]),
        block_size=SIZE,
    )
    return EventBatch(events=(event,), positions=(0,))


def fleet_of(count: int) -> Fleet:
    return Fleet(count, http_silence_deadline_s=DEADLINE_S, ttl_s=0)


async def post(fleet: Fleet, member: Member, seq: int) -> Any:
    (result,) = await fleet.results([member.writer.post(Envelope(pod="a", model="m", seq=seq), batch(seq))])
    assert not isinstance(result, Exception), result
    return result


async def appended(fleet: Fleet, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """It is in the log, and nobody has read it."""
    before = sum(map(len, fleet.log.groups))
    task = asyncio.create_task(call)
    await until(lambda: sum(map(len, fleet.log.groups)) > before, "it is appended")
    return task


def silences(fleet: Fleet) -> list[SourceSilent]:
    entries = [
        entry for groups in fleet.log.groups for group in groups for entry in decode_group(group).entries
    ]
    return [entry for entry in entries if isinstance(entry, SourceSilent)]


def state(member: Lone) -> SourceState:
    return member.service.pods["a"].sources[0].state


def same_everywhere(fleet: Fleet, lone: Lone) -> None:
    for member in fleet.members:
        assert picture(member) == picture(lone)
        assert answers(member, [PATH]) == answers(lone, [PATH])


def test_all_ask_and_it_is_forgotten_once_and_everywhere() -> None:
    async def play() -> None:
        async with fleet_of(3) as fleet:
            lone = Lone(fleet.settings, fleet.clock)
            await post(fleet, fleet.members[0], 0)
            lone.service.post(Envelope(pod="a", model="m", seq=0), batch(0))
            fleet.clock.seconds += DEADLINE_S - 0.1
            for member in fleet.members:
                member.service.tick()
            await fleet.settle()
            assert silences(fleet) == [], "not before its time"
            fleet.clock.seconds += 0.1
            for member in fleet.members:
                member.service.tick()
                member.service.tick()
            lone.service.tick()
            assert [state(member) for member in fleet.members] == [SourceState.LIVE] * 3, "the log decides"
            await fleet.settle()
            assert len(silences(fleet)) == 3, "each asks once for a batch, however often it looks"
            assert [state(member) for member in fleet.members] == [SourceState.DOWN] * 3
            same_everywhere(fleet, lone)
            assert answers(fleet.members[0], [PATH])[0] == [], "it holds nothing"

            await post(fleet, fleet.members[1], 0)  # its numbers may have begun again
            lone.service.post(Envelope(pod="a", model="m", seq=0), batch(0))
            assert [state(member) for member in fleet.members] == [SourceState.DEGRADED] * 3
            same_everywhere(fleet, lone)

    asyncio.run(play())


def test_a_batch_that_the_asker_had_not_read_yet_counts() -> None:
    async def play() -> None:
        async with fleet_of(2) as fleet:
            prompt, late = fleet.members
            lone = Lone(fleet.settings, fleet.clock)
            await post(fleet, prompt, 0)
            lone.service.post(Envelope(pod="a", model="m", seq=0), batch(0))
            fleet.clock.seconds += DEADLINE_S
            posting = await appended(fleet, prompt.writer.post(Envelope(pod="a", model="m", seq=1), batch(1)))
            lone.service.post(Envelope(pod="a", model="m", seq=1), batch(1))
            late.service.tick()  # it has applied the first only
            await fleet.settle()
            await posting
            assert len(silences(fleet)) == 1, "it did ask"
            assert [state(member) for member in fleet.members] == [SourceState.LIVE] * 2
            same_everywhere(fleet, lone)

            fleet.clock.seconds += DEADLINE_S
            late.service.tick()  # it asks again, for the later batch
            lone.service.tick()
            await fleet.settle()
            assert [state(member) for member in fleet.members] == [SourceState.DOWN] * 2
            same_everywhere(fleet, lone)

    asyncio.run(play())


def test_a_batch_that_came_again_is_no_sign_of_life() -> None:
    """Else all who asked before they had read it would have asked in vain, and nobody asks again."""

    async def play() -> None:
        async with fleet_of(2) as fleet:
            sender = fleet.members[0]
            await post(fleet, sender, 0)
            fleet.clock.seconds += DEADLINE_S
            again = await appended(fleet, sender.writer.post(Envelope(pod="a", model="m", seq=0), batch(0)))
            for member in fleet.members:
                member.service.tick()
            await fleet.settle()
            assert (await again).duplicate
            assert [state(member) for member in fleet.members] == [SourceState.DOWN] * 2

    asyncio.run(play())


def test_a_pod_that_was_dropped_meanwhile_is_not_asked_about_again() -> None:
    async def play() -> None:
        async with fleet_of(2) as fleet:
            await post(fleet, fleet.members[0], 0)
            fleet.clock.seconds += DEADLINE_S
            dropping = await appended(fleet, fleet.members[0].writer.drop_pod("a"))
            fleet.members[1].service.tick()
            await fleet.settle()
            await dropping
            assert len(silences(fleet)) == 1
            for member in fleet.members:
                assert member.service.pods == {}
                assert member.applier.counts["faults"] == 0

    asyncio.run(play())
