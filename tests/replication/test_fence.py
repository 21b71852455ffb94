"""What the log brings of a lease that is over: nobody applies it, whoever wrote it and however late it comes.

A replica that slept through its ttl, or that has not read yet that a pod was dropped, still has entries on its way. They
stand in the log behind what ended their lease, so every replica leaves out the same ones. Epochs that differ by one are
the rule where a pod comes back (nobody has asked Redis for a lease since), and happen where a lease is handed over.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app.events import BlockStored, Envelope, EventBatch
from app.pods import PodSpec, SourceState
from app.replication.applier import NOT_HELD, Fenced
from app.replication.entries import partition_of
from app.replication.log_writer import FeedWriter
from tests.replication.replicas import PARTITIONS, Fleet, Lone, Member
from tests.replication.test_same_picture import SIZE, answers, picture, tokens, uint64s
from tests.replication.test_silence import DEADLINE_S, appended, batch, fleet_of, post, same_everywhere, state

POD = "z"
SPEC = PodSpec(POD, "m", zmq_endpoint="tcp://127.0.0.1:1", replay_endpoint="tcp://127.0.0.1:2")
PATH = (0, 1, 2, 0)
EPOCH = 1_700_000_000_000


def followed(seq: int) -> EventBatch:
    """The next block of the path, and not the one that another engine would have there."""
    event = BlockStored(
        block_hashes=uint64s(seq + 1),
        parent_block_hash=seq or None,
        token_ids=tokens(PATH[seq : seq + 1]),
        block_size=SIZE,
    )
    return EventBatch(events=(event,), positions=(0,))


def holding(member: Member, epoch: int) -> FeedWriter:
    """What the ingest of this replica writes with, while it believes in this lease."""
    return member.writer.feed(lambda _pod: epoch)


def say(feed: FeedWriter, seq: int) -> None:
    feed.apply(POD, 0, followed(seq), seq=seq, digest=seq * 7)


async def take(fleet: Fleet, member: Member, epoch: int) -> FeedWriter:
    (outcome,) = await fleet.results([member.writer.take_lease(POD, epoch)])
    assert outcome is None, outcome
    return holding(member, epoch)


async def register(fleet: Fleet, spec: PodSpec = SPEC) -> None:
    (outcome,) = await fleet.results([fleet.members[0].writer.register(spec)])
    assert not isinstance(outcome, Exception), outcome


def alone(fleet: Fleet, *seqs: int, spec: PodSpec = SPEC) -> Lone:
    """A process without a log that was told these batches and no more."""
    lone = Lone(fleet.settings, fleet.clock)
    lone.service.register(spec)
    lone.service.set_source_state(POD, 0, SourceState.DOWN, cause=NOT_HELD)
    for seq in seqs:
        lone.service.apply(POD, 0, followed(seq), seq=seq, digest=seq * 7)
    return lone


def exact(fleet: Fleet, lone: Lone) -> None:
    for member in fleet.members:
        assert picture(member) == picture(lone)
        assert answers(member, [PATH]) == answers(lone, [PATH])


def fenced(fleet: Fleet) -> list[int]:
    return [member.applier.counts["fenced_entries"] for member in fleet.members]


SPOKEN: list[Callable[[FeedWriter], None]] = [
    lambda feed: say(feed, 1),
    lambda feed: feed.reset_source(POD, 0, restarted=True),
    lambda feed: feed.set_source_state(POD, 0, SourceState.DEGRADED, gaps=1, cause="a gap"),
]


@pytest.mark.parametrize("speak", SPOKEN, ids=["a batch", "a restart", "a state"])
def test_who_lost_the_lease_to_the_very_next_epoch_is_not_heard(speak: Callable[[FeedWriter], None]) -> None:
    async def play() -> None:
        async with Fleet(3, ttl_s=0) as fleet:
            sleeper, next_, _ = fleet.members
            await register(fleet)
            before = await take(fleet, sleeper, EPOCH)
            say(before, 0)
            await fleet.settle()
            after = await take(fleet, next_, EPOCH + 1)
            speak(before)
            await fleet.settle()
            assert fenced(fleet) == [1, 1, 1]
            exact(fleet, alone(fleet, 0))
            say(after, 1)
            await fleet.settle()
            exact(fleet, alone(fleet, 0, 1))
            assert fenced(fleet) == [1, 1, 1], "the lease that is in force is heard"

    asyncio.run(play())


def test_an_older_lease_is_refused_to_its_taker_and_changes_nothing() -> None:
    async def play() -> None:
        async with Fleet(2, ttl_s=0) as fleet:
            late, holder = fleet.members
            await register(fleet)
            after = await take(fleet, holder, EPOCH + 1)
            (outcome,) = await fleet.results([late.writer.take_lease(POD, EPOCH)])
            assert isinstance(outcome, Fenced), outcome
            say(holding(late, EPOCH), 0)
            say(after, 0)
            await fleet.settle()
            exact(fleet, alone(fleet, 0))
            assert fenced(fleet) == [2, 2]
            await take(fleet, holder, EPOCH + 1)  # an answer was lost: it is asked for again

    asyncio.run(play())


async def dropped(fleet: Fleet) -> None:
    (outcome,) = await fleet.results([fleet.members[1].writer.drop_pod(POD)])
    assert outcome is None, outcome
    await register(fleet)


async def pointed_elsewhere(fleet: Fleet) -> None:
    await register(fleet, MOVED)


MOVED = dataclasses.replace(SPEC, zmq_endpoint="tcp://127.0.0.1:3")


@pytest.mark.parametrize(
    ("begin_anew", "spec"), [(dropped, SPEC), (pointed_elsewhere, MOVED)], ids=["dropped", "another endpoint"]
)
def test_a_pod_that_begins_anew_owes_nothing_to_its_lease_before(
    begin_anew: Callable[[Fleet], Awaitable[None]], spec: PodSpec
) -> None:
    """The holder has not read yet that the pod is another: what it sends would stand in the empty picture, and the
    stream would be resumed behind it."""

    async def play() -> None:
        async with Fleet(2, ttl_s=0) as fleet:
            holder, _ = fleet.members
            await register(fleet)
            before = await take(fleet, holder, EPOCH)
            say(before, 0)
            await fleet.settle()
            await begin_anew(fleet)
            for speak in SPOKEN:
                speak(before)
            await fleet.settle()
            exact(fleet, alone(fleet, spec=spec))
            assert all(member.service.position(POD, 0) is None for member in fleet.members)
            assert fenced(fleet) == [3, 3]
            (outcome,) = await fleet.results([holder.writer.take_lease(POD, EPOCH)])
            assert isinstance(outcome, Fenced), "it may have more on its way"
            after = await take(fleet, holder, EPOCH + 1)
            say(after, 0)
            await fleet.settle()
            exact(fleet, alone(fleet, 0, spec=spec))

    asyncio.run(play())


def test_names_that_come_and_go_leave_nothing_behind_and_their_leases_stay_over() -> None:
    async def play() -> None:
        async with Fleet(2, ttl_s=0) as fleet:
            writer = fleet.members[0].writer
            names = [f"pod-{number}" for number in range(40)]
            for number, name in enumerate(names):
                calls: list[Awaitable[Any]] = [
                    writer.register(dataclasses.replace(SPEC, name=name)),
                    writer.take_lease(name, EPOCH + number),
                ]
                calls += [writer.post(Envelope(pod=f"{name}-http", model="m", seq=0), batch(0))]
                calls += [writer.drop_pod(name), writer.drop_pod(f"{name}-http")]
                # Its holder has not read that it is gone.
                calls += [writer.take_lease(name, EPOCH + number + 1)]
                results = await fleet.results(calls)
                assert not any(isinstance(result, Exception) for result in results), results
            for member in fleet.members:
                state = member.applier.state
                assert not state.epochs
                assert not state.heard
                assert len(state.floors) <= PARTITIONS
            for number, name in enumerate(names):
                calls = [
                    writer.register(dataclasses.replace(SPEC, name=name)),
                    writer.take_lease(name, EPOCH + number),
                ]
                _, outcome = await fleet.results(calls)
                assert isinstance(outcome, Fenced), (name, outcome)
            calls = [writer.take_lease(name, EPOCH + len(names)) for name in names]
            assert await fleet.results(calls) == [None] * len(names), (
                "whoever asks Redis now has one that counts"
            )

    asyncio.run(play())


def test_no_lease_counts_that_is_older_than_one_of_a_pod_that_is_gone() -> None:
    async def play() -> None:
        async with Fleet(2, ttl_s=0) as fleet:
            writer = fleet.members[0].writer
            here = partition_of(POD, PARTITIONS)
            other = next(name for name in map(str, range(99)) if partition_of(name, PARTITIONS) == here)

            async def outcomes(*calls: Awaitable[Any]) -> list[Any]:
                return await fleet.results(calls)

            both = [writer.register(dataclasses.replace(SPEC, name=name)) for name in (POD, other)]
            await outcomes(*both, writer.take_lease(POD, EPOCH + 5), writer.take_lease(other, EPOCH))
            assert await outcomes(writer.drop_pod(POD), writer.drop_pod(other)) == [None, None]
            await register(fleet)
            (outcome,) = await outcomes(writer.take_lease(POD, EPOCH + 5))
            assert isinstance(outcome, Fenced), "also behind one that had an older lease"
            assert await outcomes(writer.drop_pod(POD), writer.take_lease(POD, EPOCH + 9)) == [None, None]
            await register(fleet)
            (outcome,) = await outcomes(writer.take_lease(POD, EPOCH + 8))
            assert isinstance(outcome, Fenced), "also behind one that was taken while the pod was not there"
            assert await outcomes(writer.take_lease(POD, EPOCH + 9)) == [None]

    asyncio.run(play())


def test_a_question_about_a_pod_that_is_gone_does_not_silence_the_one_of_its_name() -> None:
    async def play() -> None:
        async with fleet_of(2) as fleet:
            prompt, late = fleet.members
            lone = Lone(fleet.settings, fleet.clock)
            await post(fleet, prompt, 0)
            fleet.clock.seconds += DEADLINE_S
            dropping = await appended(fleet, prompt.writer.drop_pod("a"))
            registering = await appended(fleet, prompt.writer.register(PodSpec("a", "m")))
            late.service.tick()  # it has read neither
            await fleet.settle()
            await asyncio.gather(dropping, registering)
            lone.service.register(PodSpec("a", "m"))
            assert [state(member) for member in fleet.members] == [SourceState.LIVE] * 2, "it was not silent"
            await post(fleet, prompt, 0)
            lone.service.post(Envelope(pod="a", model="m", seq=0), batch(0))
            assert [state(member) for member in fleet.members] == [SourceState.LIVE] * 2, (
                "nothing was forgotten"
            )
            same_everywhere(fleet, lone)

    asyncio.run(play())
