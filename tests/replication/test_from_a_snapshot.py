"""A replica that begins from a snapshot and reads the log behind it ends as those that never stopped: matches, owners
and whom blocks are for, though batches were applied while the snapshot was written."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from app.errors import UnknownOwner
from app.events import AllBlocksCleared, BlockRemoved, BlockStored, Envelope, Event, EventBatch, Tier
from app.pods import PodSpec, SourceState
from app.service import FuzzyQuery, MatchQuery
from app.snapshots import keeper as keeping
from app.snapshots.file import FileStore
from app.snapshots.keeper import SnapshotKeeper
from tests.replication.replicas import Fleet, Lone, Member

SIZE = 4
LOG = "log-1"
PODS = ("a", "b", "c", "d")
OWNERS = ("x", "x:system", "y")

Path_ = tuple[int, ...]


def tokens(path: Path_) -> bytes:
    return b"".join(struct.pack(f"<{SIZE}I", *[kind] * SIZE) for kind in path)


def names(path: Path_) -> bytes:
    numbers = [hash_of(path[: end + 1]) for end in range(len(path))]
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def hash_of(path: Path_) -> int:
    return 1 + sum((kind + 1) << 3 * at for at, kind in enumerate(path))


class History:
    """Whole prompts, so that nothing waits for a parent: what waits is not in a snapshot."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seqs = dict.fromkeys(PODS, -1)

    def path(self) -> Path_:
        return tuple(self.random.randrange(3) for _ in range(self.random.randint(1, 5)))

    def event(self) -> Event:
        chance, path = self.random.random(), self.path()
        if chance < 0.03:
            return AllBlocksCleared()
        if chance < 0.3:
            return BlockRemoved(block_hashes=names(path)[8 * self.random.randrange(len(path)) :])
        metadata = json.dumps({"step": self.random.randrange(9)}).encode()
        return BlockStored(
            block_hashes=names(path),
            parent_block_hash=None,
            token_ids=tokens(path),
            block_size=SIZE,
            metadata=metadata if self.random.random() < 0.3 else None,
        )

    async def post(self, fleet: Fleet) -> None:
        r = self.random
        pod, events = r.choice(PODS), tuple(self.event() for _ in range(r.randint(1, 4)))
        self.seqs[pod] += 1
        batch = EventBatch(events=events, positions=tuple(range(len(events))))
        writer = r.choice(fleet.members).writer
        owner = r.choice([None, *OWNERS, *OWNERS])
        await writer.post(Envelope(pod=pod, model="m", seq=self.seqs[pod], owner=owner), batch)

    async def clear_owner(self, fleet: Fleet) -> None:
        with contextlib.suppress(UnknownOwner):
            await self.random.choice(fleet.members).writer.clear_owner(self.random.choice(OWNERS))


def picture(member: Lone) -> dict[str, Any]:
    service = member.service
    prompts = [(a, b, c, d) for a in range(3) for b in range(3) for c in range(3) for d in range(3)]
    matches, reuse = [], []
    for prompt in prompts:
        rows = service.match(MatchQuery(model="m", token_ids=tokens(prompt))).matches
        matches.append(
            sorted((row.pod, row.matched_blocks, [(h.block, h.metadata) for h in row.hints]) for row in rows)
        )
        for exclude in ((), ("x",), ("y",)):
            asked = FuzzyQuery(model="m", token_ids=tokens(prompt), exclude=exclude, limit_per_block=100)
            answer = service.fuzzy.match(asked).answer
            reuse.append(
                [
                    (block.token_offset, sorted((m.pod, m.owners, m.hamming_distance) for m in block.matches))
                    for block in answer.blocks
                ]
            )
    while not member.index.sweep(service._now(), 1_000).idle:
        pass
    while not member.index.sweep(service._now(), 1_000).idle:
        pass
    return {
        "digest": service.stats()["digest"],
        "matches": matches,
        "reuse": reuse,
        "owners": service.owners.all(),
        "pods": {name: pod.sources[0].last_seq for name, pod in service.pods.items()},
    }


def keeper_of(member: Member, path: Path) -> SnapshotKeeper:
    return SnapshotKeeper(
        member.service,
        member.index,
        FileStore(path),
        configured=frozenset(),
        interval_s=3_600,
        wall=member.service._clock,
        place=member.applier.place,
    )


async def play(seed: int, path: Path) -> None:
    history = History(seed)
    # Of more blocks with equal tokens than are looked at, replicas may look at different ones.
    async with Fleet(2, ttl_s=0, fuzzy_candidates_max=4_096) as fleet:
        for member in fleet.members:
            member.applier.state.log = LOG

        async def change(*, clears: bool) -> None:
            clear = clears and history.random.random() < 0.1
            call = history.clear_owner(fleet) if clear else history.post(fleet)
            for result in await fleet.results([call]):
                assert result is None or not isinstance(result, Exception), result

        for _ in range(history.random.choice([0, 5, 40])):
            await change(clears=True)
        saving = asyncio.create_task(keeper_of(fleet.members[0], path).save())
        changes = 0
        while not saving.done():
            # A clear and a batch of another partition have no order behind the snapshot (entries.OwnerCleared).
            await change(clears=False)
            changes += 1
            if changes > 200:
                break
        assert await saving
        assert changes > 0
        for _ in range(30):
            await change(clears=False)

        late = Member("late", fleet.log, fleet.settings, fleet.clock)
        late.service.owners.number("gone since")
        saved = await keeper_of(late, path).load(
            LOG, empty=late.service.owners.clear_all, adopted=lambda: None
        )
        assert saved is not None
        late.applier.recall(saved)
        late.read = [int(position.split("-")[1]) for position in late.applier.state.positions]
        assert any(late.read)
        while late.apply(1):
            pass
        expected = picture(fleet.members[0])
        assert any(owners for row in expected["reuse"] for _, held in row for _, owners, _ in held)
        for member in (late, fleet.members[1]):
            found = picture(member)
            for key in expected:
                assert found[key] == expected[key], key


@pytest.mark.parametrize("seed", range(12))
def test_it_ends_as_those_that_never_stopped(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "NAMES_PER_SLICE", 16)  # so that much happens between two slices
    asyncio.run(play(seed, tmp_path / "snapshot"))


def test_a_stream_that_has_no_batch_yet_is_what_it_was(tmp_path: Path) -> None:
    """What it lost stands in the log before the snapshot, and nobody says it again."""
    path, prompt = tmp_path / "snapshot", (1, 2)

    def stored(tier: Tier) -> EventBatch:
        event = BlockStored(
            block_hashes=names(prompt),
            parent_block_hash=None,
            token_ids=tokens(prompt),
            block_size=SIZE,
            tier=tier,
        )
        return EventBatch(events=(event,), positions=(0,))

    def told(member: Member) -> tuple[SourceState, str, dict[str, int]]:
        source = member.service.pod("z").sources[0]
        (row,) = member.service.match(MatchQuery(model="m", token_ids=tokens(prompt))).matches
        return source.state, source.cause, dict(row.tiers)

    async def play() -> None:
        async with Fleet(2, ttl_s=0) as fleet:
            first, second = fleet.members
            for member in fleet.members:
                member.applier.state.log = LOG
            spec = PodSpec("z", "m", zmq_endpoint="tcp://127.0.0.1:1", replay_endpoint="tcp://127.0.0.1:2")
            beside = first.writer.post(Envelope(pod="z"), stored(Tier.CPU))
            assert not any(
                isinstance(r, Exception) for r in await fleet.results([first.writer.register(spec)])
            )
            assert not any(isinstance(r, Exception) for r in await fleet.results([beside]))
            first.feed.set_source_state("z", 0, SourceState.DEGRADED, cause="batches 0..4 are missing")
            await fleet.settle()
            assert await keeper_of(first, path).save()
            late = Member("late", fleet.log, fleet.settings, fleet.clock)
            saved = await keeper_of(late, path).load(LOG, empty=lambda: None, adopted=lambda: None)
            assert saved is not None
            late.applier.recall(saved)
            late.read = list(first.read)
            first.feed.apply("z", 0, stored(Tier.GPU), seq=5, digest=5)
            first.feed.set_source_state("z", 0, SourceState.LIVE)
            await fleet.settle()
            late.apply()
            tiers = {"gpu": 2, "cpu": 2, "disk": 2, "external": 2}
            assert told(first) == (SourceState.DEGRADED, "batches 0..4 are missing", tiers)
            assert told(second) == told(first)
            assert told(late) == (SourceState.DEGRADED, "restored so: batches 0..4 are missing", tiers)

    asyncio.run(play())
