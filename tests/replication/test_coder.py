"""What the coder must not foresee, and what it must foresee again: against a lone process that is fed the same."""

from __future__ import annotations

import asyncio

from app.config import Settings
from app.events import BlockRemoved, BlocksHashed, BlockStored, Envelope, Event, EventBatch, Tier
from app.replication.coder import Ticket
from tests.replication.replicas import Clock, Fleet, ListLog, Lone, Member
from tests.replication.test_same_picture import SIZE, answers, picture, tokens, uint64s

PATH = (0, 1, 2, 0)


def stored(name: int, *, blocks: int = 1, tier: Tier = Tier.GPU, parent: int | None = None) -> EventBatch:
    """One block of the path, from place `name` on."""
    event = BlockStored(
        block_hashes=uint64s(name),
        parent_block_hash=parent,
        token_ids=tokens(PATH[name - 1 : name - 1 + blocks]),
        block_size=blocks * SIZE,
        tier=tier,
    )
    return EventBatch(events=(event,), positions=(0,))


def envelope(seq: int) -> Envelope:
    return Envelope(pod="a", model="m", seq=seq)


def test_blocks_go_without_their_tokens_again_behind_a_removal_everywhere() -> None:
    async def play() -> None:
        async with Fleet(1, ttl_s=0) as fleet:
            (member,) = fleet.members
            await fleet.results([member.writer.post(envelope(0), stored(1))])
            removal = member.writer.remove_everywhere("m", None, (BlockRemoved(block_hashes=uint64s(9)),))
            await fleet.results([removal, member.writer.post(envelope(1), stored(2, parent=1))])
            assert member.coder.raw_blocks == 1, "nobody can tell whether its parent is still there"
            await fleet.results([member.writer.post(envelope(2), stored(3, parent=2))])
            assert (member.coder.raw_blocks, member.coder.hashed_blocks) == (1, 2)

    asyncio.run(play())


def test_blocks_go_without_their_tokens_again_when_the_one_that_had_to_keep_them_has_landed() -> None:
    """Also where something else is under way all the time, as of a busy source it is."""
    member = Member("this", ListLog(), Settings(), Clock())
    member.service.post(envelope(0), stored(1))

    def under_way(batch: EventBatch) -> tuple[type[Event], Ticket]:
        coded, ticket = member.coder.code(Envelope(pod="a"), batch)
        return type(coded.events[0]), ticket

    kind, unknown = under_way(stored(3, parent=77))
    assert kind is BlockStored, "nobody knows its parent"
    kind, root = under_way(stored(4))
    assert kind is BlocksHashed
    member.coder.land(unknown)
    kind, child = under_way(stored(2, parent=1))
    assert kind is BlocksHashed
    for ticket in (root, child):
        member.coder.land(ticket)
    assert member.coder.sources == 0


def test_what_a_larger_chunk_makes_forgotten_is_no_parent() -> None:
    async def play() -> None:
        async with Fleet(2, ttl_s=0) as fleet:
            sender, _ = fleet.members
            lone = Lone(fleet.settings, fleet.clock)
            batches = [
                stored(4),
                stored(1, tier=Tier.CPU),  # as large as a block of the engine
                stored(2, blocks=2, tier=Tier.CPU),  # so that was the end of a prompt, and is forgotten
                stored(2, parent=1),
            ]
            for seq, batch in enumerate(batches):
                lone.service.post(envelope(seq), batch)
            for under_way in ((0,), (1,), (2, 3)):
                await fleet.results([sender.writer.post(envelope(seq), batches[seq]) for seq in under_way])
            for member in fleet.members:
                assert picture(member) == picture(lone)
                assert answers(member, [PATH]) == answers(lone, [PATH])

    asyncio.run(play())
