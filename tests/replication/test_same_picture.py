"""Replicas fed through the log end as one process does that is fed the same batches: in all that anybody can ask.

Random histories over a small universe, so that prompts meet and names come back: stores, children before their
parents, removals, clears, placeholders, dumps, duplicates, gaps, restarts, adapters, salts, offload tiers, batches that
are bad in part or whole, pods that are dropped and registered anew, removals without a source, followed streams.
Which replica accepts a batch changes at random. Several batches may be on their way through one replica at a time:
then its overlay (native/flight_book.hpp) must foresee what the index will say.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app import hashing
from app.errors import IndexerError
from app.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Envelope,
    Event,
    EventBatch,
    PrefixesStored,
    RejectedEvent,
    Tier,
)
from app.fuzzy.answer import FuzzyAnswer
from app.pods import PodSpec, Source, SourceState
from app.replication.applier import NOT_HELD
from app.service import FuzzyQuery, IndexerService, MatchQuery
from tests.replication.replicas import Fleet, Lone

SIZE = 4
SALT = b"\x91\xa4salt"
POSTING = ("a", "b", "c")
FOLLOWED = "z"  # its batches come as those of a followed stream

Path = tuple[int, ...]


def uint64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def tokens(path: Path, size: int = SIZE) -> bytes:
    return b"".join(struct.pack(f"<{size}I", *[10 + kind % 3] * size) for kind in path)


@dataclasses.dataclass
class Step:
    """One change, as a call of the lone service and of one replica; both raise the same or answer the same."""

    alone: Callable[[IndexerService], Any]
    logged: Callable[[Any], Awaitable[Any]]


class History:
    """Makes steps that come back to what earlier steps did."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.folds = self.random.choice([0, 0, 7, 40])  # names are so few that they mean several things
        self.seqs: dict[tuple[str, int], int] = {}
        self.now_s = 100.0
        self.told: list[tuple[str, int, Path, str | None, Tier, int]] = []

    def name(self, pod: str, path: Path, lora: str | None) -> int:
        number = hashing.digest(repr((pod if self.folds else "", path, lora)).encode())
        return number % self.folds + 1 if self.folds else number

    def path(self) -> Path:
        return tuple(self.random.choice([0, 0, 1, 2, 3]) for _ in range(self.random.randint(1, 6)))

    def store(self, pod: str, dp_rank: int) -> Event:
        r = self.random
        lora = r.choice([None, None, None, "tuned"])
        tier = r.choice([Tier.GPU, Tier.GPU, Tier.GPU, Tier.CPU, Tier.DISK])
        group = r.choice([0, 0, 0, 1, 20])
        path = self.path()
        if self.told and r.random() < 0.6:  # goes on where something else ended
            path = (*r.choice(self.told[-6:])[2], *path)[:9]
        start = 0 if r.random() < 0.3 else r.randrange(len(path))
        size = 2 * SIZE if r.random() < 0.03 else SIZE
        self.told.append((pod, dp_rank, path, lora, tier, group))
        names = [self.name(pod, path[: i + 1], lora) for i in range(start, len(path))]
        if r.random() < 0.08:
            seed = hashing.context_seed("m", lora, SIZE)
            prefixes = [hashing.digest(repr(path[: i + 1]).encode(), seed) for i in range(start, len(path))]
            return PrefixesStored(
                block_hashes=uint64s(*names),
                prefix_hashes=uint64s(*prefixes),
                block_size=SIZE,
                lora=lora,
                tier=tier,
                group=group,
            )
        if r.random() < 0.08:
            return BlockStored(
                block_hashes=uint64s(*names), parent_block_hash=None, token_ids=b"", block_size=0, tier=tier
            )
        salted = 3 in path or r.random() < 0.05
        return BlockStored(
            block_hashes=uint64s(*names),
            parent_block_hash=self.name(pod, path[:start], lora) if start else None,
            token_ids=tokens(path[start:], size),
            block_size=size,
            lora=lora,
            tier=tier,
            group=group,
            extra_keys=tuple(SALT if kind == 3 else b"" for kind in path[start:]) if salted else None,
        )

    def event(self, pod: str, dp_rank: int) -> Event:
        r = self.random
        chance = r.random()
        if chance < 0.02:
            return AllBlocksCleared()
        if chance < 0.3 and self.told:
            _, _, path, lora, tier, group = r.choice(self.told[-10:])
            begin = r.randrange(len(path))
            ends = r.sample(range(begin, len(path)), r.randint(1, len(path) - begin))
            names = [self.name(pod, path[: i + 1], lora) for i in ends]
            return BlockRemoved(block_hashes=uint64s(*names), tier=tier, group=group)
        return self.store(pod, dp_rank)

    def batch(self, pod: str, dp_rank: int) -> EventBatch:
        r = self.random
        events = tuple(self.event(pod, dp_rank) for _ in range(r.choice([0, 1, 1, 2, 3, 5])))
        bad: tuple[RejectedEvent, ...] = ()
        if r.random() < 0.1:
            bad = (RejectedEvent(index=len(events), reason="type", detail="no such event"),)
        return EventBatch(
            events=events,
            positions=tuple(range(len(events))),
            rejected=bad,
            ignored=int(r.random() < 0.1),
            ts=self.stamp(),
        )

    def stamp(self) -> float | None:
        """Mostly a little later than before; at times none, and at times that of a clock which was set back."""
        r = self.random
        self.now_s = max(0.0, self.now_s + r.choice([0, 1, 1, 1, 1, -5]))
        return r.choice([None, self.now_s, self.now_s, self.now_s])

    def step(self) -> Step:
        r = self.random
        chance = r.random()
        if chance < 0.75:
            return self.post()
        if chance < 0.93:
            return self.follow()
        pod = r.choice(POSTING)
        if chance < 0.94:
            return Step(lambda s: s.drop_pod(pod), lambda m: m.writer.drop_pod(pod))
        if chance < 0.96:
            spec = PodSpec(pod, r.choice(["m", "m", "other"]), lora=r.choice([None, None, "tuned"]))
            return Step(lambda s: s.register(spec).spec, lambda m: registered(m, spec))
        if chance < 0.98:
            dp_rank = r.choice([None, None, 0, 1])
            tier = r.choice([None, Tier.GPU, Tier.CPU])
            lora = r.choice([None, None, "", "tuned"])
            said: dict[str, Any] = {"model": None, "lora": lora, "dp_rank": dp_rank, "tier": tier}
            return Step(lambda s: s.remove_blocks(pod, **said), lambda m: m.writer.remove_blocks(pod, **said))
        names = uint64s(*(self.name(pod, self.path(), None) for _ in range(4)))
        removal = BlockRemoved(block_hashes=names)
        return Step(
            lambda s: s.remove_everywhere("m", None, removal),
            lambda m: m.writer.remove_everywhere("m", None, (removal,)),
        )

    def post(self) -> Step:
        r = self.random
        pod, dp_rank = r.choice(POSTING), r.choice([0, 0, 1])
        batch = self.batch(pod, dp_rank)
        seq = self.seqs.get((pod, dp_rank), -1) + r.choice([1, 1, 1, 1, 1, 1, 0, 3])
        said: dict[str, Any] = {
            "pod": pod,
            "model": r.choice(["m", "m", "m", None]),
            "dp_rank": dp_rank,
            "seq": max(seq, 0),
            "lora": r.choice([None, None, None, "tuned"]),
            "digest": None,
            "incomplete": r.random() < 0.03,
        }
        if r.random() < 0.03:
            said["seq"] = 0
        if r.random() < 0.2:
            said["seq"] = None
        elif r.random() < 0.05:
            said["seq"] = max(seq - 2, 0)
        else:
            self.seqs[pod, dp_rank] = said["seq"]
        if said["seq"] == 0:
            said["digest"] = r.randrange(3)
        envelope = Envelope(**said)
        return Step(lambda s: s.post(envelope, batch), lambda m: m.writer.post(envelope, batch))

    def follow(self) -> Step:
        r = self.random
        dp_rank = r.choice([0, 1])
        chance = r.random()
        if chance < 0.06:
            restarted = r.random() < 0.5
            self.seqs.pop((FOLLOWED, dp_rank), None)
            return fed(lambda w: w.reset_source(FOLLOWED, dp_rank, restarted=restarted))
        if chance < 0.15:
            state = r.choice(list(SourceState))
            return fed(lambda w: w.set_source_state(FOLLOWED, dp_rank, state, gaps=1, cause="told"))
        seq = self.seqs[FOLLOWED, dp_rank] = self.seqs.get((FOLLOWED, dp_rank), -1) + 1
        batch = self.batch(FOLLOWED, dp_rank)
        return fed(lambda w: w.apply(FOLLOWED, dp_rank, batch, seq=seq, digest=seq * 7))


def fed(call: Callable[[Any], object]) -> Step:
    async def logged(member: Any) -> None:
        call(member.feed)

    def alone(service: IndexerService) -> None:
        call(service)

    return Step(alone, logged)


async def registered(member: Any, spec: PodSpec) -> PodSpec:
    pod = await member.writer.register(spec)
    assert isinstance(pod.spec, PodSpec)
    return spec


def picture(member: Lone) -> dict[str, Any]:
    """All that can be asked of a service, but for what concerns its own start and memory."""
    service = member.service
    sources = {}
    places = {}
    for pod in service.pods.values():
        for dp_rank, source in pod.sources.items():
            places[source.index_id] = (pod.spec.name, dp_rank)
            sources[pod.spec.name, dp_rank] = {
                field.name: getattr(source, field.name)
                for field in dataclasses.fields(Source)
                # A batch that is refused whole is counted by the replica that refused it, and never logged.
                if field.name not in ("index_id", "last_event_at_s", "rejected")
            }
    contexts = {c.id: (c.model, c.lora, c.block_size) for c in member.index.contexts()}
    names: dict[Any, Any] = {}
    cursor: int | None = 0
    while cursor is not None:
        runs, cursor = member.index.names(cursor, 1_000, 0)
        for run in runs:
            key = (places[run.source], contexts[run.context], run.tier, run.group)
            columns = (run.engine_hashes, run.prefix_hashes, run.copies)
            rows = zip(*(struct.unpack(f"<{len(c) // 8}Q", c) for c in columns), strict=True)
            names.setdefault(key, set()).update(rows)
    stats = service.stats()
    waiting = {place: member.index.orphan_blocks(index_id) for index_id, place in places.items()}
    return {
        "digest": stats["digest"],
        "totals": stats["totals"],
        "events": stats["events"],
        "pods": {name: pod.spec for name, pod in service.pods.items()},
        "sources": sources,
        "names": names,
        "waiting": waiting,
    }


def answers(member: Lone, paths: list[Path]) -> list[Any]:
    found: list[Any] = []
    for path in paths:
        for lora in (None, "tuned"):
            salts = tuple(SALT if kind == 3 else b"" for kind in path)
            query = MatchQuery(
                model="m", token_ids=tokens(path), lora=lora, block_size=SIZE, extra_keys=salts
            )
            result = member.service.match(query)
            found.append(sorted((row.pod, row.dp_rank, row.matched_blocks) for row in result.matches))
            fuzzy = FuzzyQuery(
                model="m",
                token_ids=tokens(path),
                lora=lora,
                block_size=SIZE,
                mode="sliding",
                limit_per_block=1_000,
            )
            found.append(shown(member.service.fuzzy.match(fuzzy).answer))
    return found


def shown(answer: FuzzyAnswer) -> list[Any]:
    """Without the prefix that stands for several equal ones: that is the first that came, of whatever pod."""
    return [
        (
            block.token_offset,
            block.kind,
            sorted((m.pod, m.dp_rank, m.hamming_distance) for m in block.matches),
        )
        for block in answer.blocks
    ]


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except IndexerError as error:
        return error


def same(one: Any, other: Any) -> bool:
    if isinstance(one, IndexerError) or isinstance(other, IndexerError):
        return type(one) is type(other) and str(one) == str(other)
    return bool(one == other)


async def play(seed: int, *, steps: int, flight_max: int) -> None:
    history = History(seed)
    async with Fleet(3, ttl_s=0, orphan_blocks_max=100_000) as fleet:
        lone = Lone(fleet.settings, fleet.clock)
        begin = PodSpec(FOLLOWED, "m", zmq_endpoint="tcp://127.0.0.1:1", dp_size=2)
        lone.service.register(begin)
        for dp_rank in range(begin.dp_size):  # as the ingest of a lone process begins
            lone.service.set_source_state(FOLLOWED, dp_rank, SourceState.DOWN, cause=NOT_HELD)
        await fleet.results([fleet.members[0].writer.register(begin)])
        done = 0
        while done < steps:
            flight = [history.step() for _ in range(history.random.randint(1, flight_max))]
            done += len(flight)
            alone = [outcome(lambda step=step: step.alone(lone.service)) for step in flight]  # type: ignore[misc]
            member = history.random.choice(fleet.members)
            logged = await fleet.results([step.logged(member) for step in flight])
            for here, there in zip(alone, logged, strict=True):
                assert same(here, there), (here, there)
        expected = picture(lone)
        paths = [history.path() for _ in range(5)] + [path for _, _, path, _, _, _ in history.told[-20:]]
        expected_answers = answers(lone, paths)
        for member in fleet.members:
            found = picture(member)
            for key in expected:
                assert found[key] == expected[key], key
            assert answers(member, paths) == expected_answers
            assert member.coder.sources == 0, "what has landed is not under way any more"


@pytest.mark.parametrize("seed", range(60))
def test_one_batch_at_a_time(seed: int) -> None:
    asyncio.run(play(seed, steps=60, flight_max=1))


@pytest.mark.parametrize("seed", range(100, 200))
def test_many_batches_under_way(seed: int) -> None:
    asyncio.run(play(seed, steps=150, flight_max=12))


def test_most_blocks_go_without_their_tokens() -> None:
    """Children of blocks under way are hashed too: else all of this would be raw."""

    async def chain() -> None:
        async with Fleet(1, ttl_s=0) as fleet:
            member = fleet.members[0]
            batches = []
            for start in range(50):
                event = BlockStored(
                    block_hashes=uint64s(start + 1),
                    parent_block_hash=start or None,
                    token_ids=tokens((start % 3,)),
                    block_size=SIZE,
                )
                batches.append(EventBatch(events=(event,), positions=(0,)))
            posts = [
                member.writer.post(Envelope(pod="a", model="m", seq=seq), batch)
                for seq, batch in enumerate(batches)
            ]
            assert not any(isinstance(result, Exception) for result in await fleet.results(posts[:1]))
            await fleet.results(posts[1:])
            assert member.coder.raw_blocks == 0
            assert member.coder.hashed_blocks == 50
            assert member.service.blocks_by_tier("a", 0)["gpu"] == 50

    asyncio.run(chain())
