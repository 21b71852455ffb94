"""Hints travel with their blocks through the log, hashed or with tokens, and live as long at every replica."""

from __future__ import annotations

import asyncio
import json
import struct

import pytest

from app.events import BlockRemoved, BlockStored, Envelope, EventBatch
from app.service import MatchQuery
from tests.replication.replicas import Fleet, Member

TOKENS = struct.pack("<8I", *range(8))
PLAN = {"agent_id": "planner", "offset_hint": [0.5]}


def stored(block: int, start: int, *, parent: int | None = None) -> EventBatch:
    event = BlockStored(
        block_hashes=struct.pack("<Q", block),
        parent_block_hash=parent,
        token_ids=TOKENS[16 * start : 16 * start + 16],
        block_size=4,
        metadata=json.dumps(PLAN).encode(),
    )
    return EventBatch(events=(event,), positions=(0,))


def hints(member: Member) -> list[tuple[int, int]]:
    rows = member.service.match(MatchQuery(model="m", token_ids=TOKENS)).matches
    assert all(json.loads(hint.metadata) == PLAN for row in rows for hint in row.hints)
    return [(hint.block, hint.tokens) for row in rows for hint in row.hints]


@pytest.mark.parametrize("child_first", [False, True], ids=["hashed", "with tokens"])
def test_every_replica_has_them_and_loses_them_with_the_block(child_first: bool) -> None:
    async def run() -> None:
        async with Fleet(2) as fleet:
            writer = fleet.members[0].writer

            async def post(batch: EventBatch) -> None:
                await writer.post(Envelope(pod="a", model="m"), batch)

            batches = [stored(1, 0), stored(2, 1, parent=1)]
            for batch in reversed(batches) if child_first else batches:
                await fleet.results([post(batch)])
            assert (fleet.members[0].coder.raw_blocks > 0) == child_first
            assert [hints(member) for member in fleet.members] == [[(2, 8), (1, 4)]] * 2

            removed = BlockRemoved(block_hashes=struct.pack("<Q", 2))
            await fleet.results([post(EventBatch(events=(removed,), positions=(0,)))])
            assert [hints(member) for member in fleet.members] == [[(1, 4)]] * 2

    asyncio.run(run())
