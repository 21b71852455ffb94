"""Groups of the log as the applier takes them: once each, in the order of their replica; what is kept is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from app.config import Settings
from app.events import BlockStored, Envelope, EventBatch
from app.replication.applier import REPLICAS_MAX, Applier
from app.replication.entries import OwnerCleared, encode_entry, encode_group
from tests.replication.replicas import Clock, Fleet, Lone
from tests.replication.test_same_picture import SIZE, tokens, uint64s

NOTHING = encode_entry(OwnerCleared(owner="nobody"))  # which is refused: that is an outcome as any other


def lone_applier() -> Applier:
    lone = Lone(Settings(), Clock())
    return Applier(lone.service, "this", 1, settle=nobody_waits)


def nobody_waits(partition: int, number: int, outcomes: Sequence[object]) -> None:
    """Settle, for groups of other replicas."""


def read(applier: Applier, replica: str, number: int, *, follows: int = 0) -> None:
    applier.apply(0, f"1-{number}", encode_group(replica, number, [NOTHING], follows=follows))


def counts(applier: Applier) -> tuple[int, int, int]:
    found = applier.counts
    return found["applied_groups"], found["repeated_groups"], found["early_groups"]


def test_a_group_counts_once_and_in_its_turn() -> None:
    applier = lone_applier()
    read(applier, "a", 1)
    read(applier, "b", 1)
    read(applier, "a", 1)
    assert counts(applier) == (2, 1, 0)
    read(applier, "a", 3, follows=2)
    assert counts(applier) == (2, 1, 1), "the second is lost, and comes again"
    read(applier, "a", 2, follows=1)
    read(applier, "a", 3, follows=2)
    read(applier, "a", 2, follows=1)
    assert counts(applier) == (4, 2, 1)
    assert applier.counts["refused_entries"] == 4, "each of the groups that counted, once"


def test_the_replicas_that_spoke_last_are_remembered() -> None:
    applier = lone_applier()
    for number in range(REPLICAS_MAX):
        read(applier, f"replica-{number}", 1)
    read(applier, "replica-0", 2)  # and so it is not the one that is longest silent
    read(applier, "new", 1)
    (numbers,) = applier.state.numbers
    assert len(numbers) == REPLICAS_MAX
    assert "replica-1" not in numbers
    before = counts(applier)
    read(applier, "replica-0", 2)
    read(applier, "new", 1)
    assert counts(applier) == (before[0], before[1] + 2, 0)


def stored(name: int) -> EventBatch:
    event = BlockStored(
        block_hashes=uint64s(name), parent_block_hash=None, token_ids=tokens((name,)), block_size=SIZE
    )
    return EventBatch(events=(event,), positions=(0,))


def test_a_batch_counts_also_where_its_owner_has_no_room_by_then() -> None:
    """Where there is room depends on what has been swept, which is not the same everywhere; blocks must be."""

    async def play() -> None:
        async with Fleet(2, ttl_s=0, fuzzy=True, owners_max=1) as fleet:
            writer = fleet.members[0].writer
            posts = [
                writer.post(
                    Envelope(pod=f"pod-{name}", model="m", seq=0, owner=f"agent-{name}"), stored(name)
                )
                for name in (1, 2)
            ]
            for result in await fleet.results(posts):
                assert not isinstance(result, Exception), result
                assert result.stored_blocks == 1
            for member in fleet.members:
                (owner,) = member.service.owners.all()
                assert owner.blocks == 1, "one of the two, and it has its block"
                assert [member.service.blocks_by_tier(f"pod-{name}", 0)["gpu"] for name in (1, 2)] == [1, 1]

    asyncio.run(play())
