"""Entries that follow the one before them are in no table: whatever comes and goes, each is found, and found once.

Here capacity evicts, contexts go, and chains grow a block at a time beside each other, so that runs of entries break off
anywhere. What the index names says what its matches must find.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest

from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits
from app.index.prefix_index import IndexLimits, PrefixIndex
from tests.index.exporting import export_frames

BLOCK_SIZE = 2
MODELS = ("a", "b", "c")
SEEDS = (0, 0, 1)  # of the engines, for their hashes
Path = tuple[int, ...]


def token_bytes(path: Path) -> bytes:
    return b"".join(struct.pack("<2I", block, block) for block in path)


def engine_hash(seed: int, path: Path) -> int:
    return random.Random(f"{seed}/{path}").getrandbits(64)


class Runs:
    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.now = 0
        limits = IndexLimits(
            ttl_ticks=self.r.choice([0, 40]),
            contexts_max=self.r.choice([2, 3]),
            prefixes_per_context_max=self.r.choice([50, 400, 100_000]),
            prefixes_max=self.r.choice([70, 500, 100_000]),
        )
        self.index = PrefixIndex(limits, FuzzyIndex(FuzzyLimits()))
        self.sources = [self.index.add_source() for _ in SEEDS]
        trunk = tuple(range(1, 61))
        self.prompts = [
            trunk[: self.r.randrange(60)] + tuple(100 * i + k for k in range(60)) for i in range(1, 6)
        ]
        self.grown = dict.fromkeys(self.prompts, 0)

    def context(self) -> int:
        return self.index.context(
            self.r.choice(MODELS[: self.r.choice([1, 1, 3])]), None, BLOCK_SIZE, self.now
        )

    def store(self, pod: int, path: Path, begin: int, end: int) -> None:
        hashes = [engine_hash(SEEDS[pod], path[: i + 1]) for i in range(begin, end)]
        self.index.store(
            self.sources[pod],
            self.context(),
            tier=self.r.choice([0, 0, 0, 1]),
            group=0,
            engine_hashes=struct.pack(f"<{end - begin}Q", *hashes),
            parent=engine_hash(SEEDS[pod], path[:begin]) if begin else None,
            token_ids=token_bytes(path[begin:end]),
            extra_keys=None,
            now=self.now,
        )

    def step(self) -> None:
        pod, path = self.r.randrange(len(SEEDS)), self.r.choice(self.prompts)
        kind = self.r.randrange(22)
        if kind < 6:
            begin = self.r.choice(
                [0, 0, self.r.randrange(len(path))]
            )  # not always behind a block that is there
            self.store(pod, path, begin, self.r.randint(begin + 1, len(path)))
        elif kind < 12:  # decoding: some more blocks of one prompt, then of another
            begin = self.grown[path] % len(path)
            end = min(len(path), begin + self.r.choice([1, 1, 2, 5]))
            self.store(pod, path, begin, end)
            self.grown[path] = end
        elif kind < 17:
            self.remove(pod, path)
        elif kind == 17:
            self.now += self.r.choice([1, 5, 39])
        elif kind == 18:
            self.index.sweep(self.now, self.r.choice([1, 20, 500]))
        elif kind == 19:
            self.index.clear(self.sources[pod], tier=self.r.choice([None, 0]))
        elif kind == 20:  # something is asked by its hash alone, or nothing is for long
            self.index.list_all(self.r.choice([1, 50, 5000]), self.now)
        else:
            self.now += self.r.choice([0, 0, 0, 6000])

    def remove(self, pod: int, path: Path) -> None:
        begin = self.r.randrange(len(path))
        end = min(len(path), begin + self.r.choice([1, 1, 3, 100]))
        hashes = [engine_hash(SEEDS[pod], path[: i + 1]) for i in range(begin, end)]
        if self.r.random() < 0.5:
            hashes.reverse()
        self.index.remove(
            self.sources[pod],
            tier=0,
            group=0,
            engine_hashes=struct.pack(f"<{len(hashes)}Q", *hashes),
            now=self.now,
        )

    def held(self) -> dict[int, dict[int, set[int]]]:
        """context -> source -> prefixes, as the names say."""
        held: dict[int, dict[int, set[int]]] = {}
        cursor: int | None = 0
        while cursor is not None:
            runs, cursor = self.index.names(cursor, 1000, self.now)
            for run in runs:
                prefixes = struct.unpack(f"<{len(run.prefix_hashes) // 8}Q", run.prefix_hashes)
                held.setdefault(run.context, {}).setdefault(run.source, set()).update(prefixes)
        return held

    def check_matches(self) -> None:
        held = self.held()
        for info in self.index.contexts():
            of_context = held.get(info.id, {})
            for path in self.prompts:
                prefixes = self.prefixes(info.model, path)
                expected = {}
                for source, names in of_context.items():
                    depth = next(
                        (i for i, prefix in enumerate(prefixes) if prefix not in names), len(prefixes)
                    )
                    if depth:
                        expected[source] = depth
                rows = self.index.match_tokens(info.id, token_bytes(path), None, self.now)
                assert {row.source: row.tiers[-1] for row in rows} == expected

    def check_each(self) -> None:
        """By its hash alone each is found too, and nothing is there twice."""
        held = self.held()
        for info in self.index.contexts():
            of_context = held.get(info.id, {})
            for path in self.prompts:
                for prefix in self.prefixes(info.model, path):
                    expected = {source for source, names in of_context.items() if prefix in names}
                    found = {source for source, *_ in self.index.holders(info.id, prefix, self.now)}
                    assert found == expected
        sweep_all(self.index, self.now)
        named = sum(len(set().union(*of_context.values())) for of_context in held.values())
        assert self.index.stats().prefixes == named

    def prefixes(self, model: str, path: Path) -> tuple[int, ...]:
        packed = self.index.prefix_hashes(model, None, BLOCK_SIZE, token_bytes(path), None)
        return struct.unpack(f"<{len(path)}Q", packed)


@pytest.mark.parametrize("seed", range(40))
def test_each_is_found_once(seed: int) -> None:
    runs = Runs(seed)
    for i in range(300):
        runs.step()
        if i % 10 == 0:
            runs.check_matches()
    runs.check_matches()
    while not runs.index.list_all(7, runs.now):  # while more comes and goes
        runs.step()
    runs.check_matches()
    runs.check_each()


def long_chain(blocks: int) -> tuple[PrefixIndex, int, Path]:
    path = tuple(range(blocks))
    index = PrefixIndex(IndexLimits(ttl_ticks=0))
    context = index.context("m", None, BLOCK_SIZE, 0)
    index.store(
        index.add_source(),
        context,
        tier=0,
        group=0,
        engine_hashes=random.Random(1).randbytes(8 * blocks),
        parent=None,
        token_ids=token_bytes(path),
        extra_keys=None,
        now=0,
    )
    return index, context, path


def sweep_all(index: PrefixIndex, now: int) -> None:
    for _ in range(2):  # the pass under way, and a whole one
        while not index.sweep(now, 2048).idle:
            pass


BLOCKS = 100_000


def test_to_be_listed_takes_memory_only_while_it_is_asked_for() -> None:
    index, context, path = long_chain(BLOCKS)
    before = index.stats().bytes
    slices = 1
    while not index.list_all(1000, 0):
        slices += 1
    assert slices >= BLOCKS // 1000
    assert index.stats().bytes - before > 7 * BLOCKS
    assert index.list_all(1, 0)
    sweep_all(index, 5_999)
    assert index.stats().bytes - before > 7 * BLOCKS
    sweep_all(index, 6_000)
    assert index.stats().bytes - before < BLOCKS
    [row] = index.match_tokens(context, token_bytes(path), None, 6_000)
    assert row.tiers[0] == BLOCKS


def test_a_snapshot_keeps_what_follows_what() -> None:
    index, context, path = long_chain(BLOCKS)
    writing = index.start_export()
    frames = export_frames(writing, writing.claims, 3_000, lambda: None)
    writing.close()
    fresh = PrefixIndex(IndexLimits(ttl_ticks=0))
    importing = fresh.start_import(saved_at=0, elapsed=0, now=0)
    [slot] = index.slots()
    importing.slot(slot, context=fresh.context("m", None, BLOCK_SIZE, 0), source=fresh.add_source())
    for frame in frames:
        assert importing.frame(frame)
    while not importing.settle(100):
        pass
    assert fresh.stats().bytes - index.stats().bytes > 7 * BLOCKS  # all are listed while it is read
    sweep_all(fresh, 6_000)
    assert fresh.stats().bytes - index.stats().bytes < BLOCKS
    [row] = fresh.match_tokens(context, token_bytes(path), None, 6_000)
    assert row.tiers[0] == BLOCKS


class Prompts:
    """One pod and its prompts in contexts of blocks of one token; engine hashes come one after the other."""

    def __init__(self, limits: IndexLimits) -> None:
        self.index = PrefixIndex(limits)
        self.pod = self.index.add_source()
        self.named = 0

    def store(
        self,
        context: int,
        token_ids: Sequence[int],
        hashes: Sequence[int] = (),
        *,
        parent: int | None = None,
        now: int = 0,
        pod: int | None = None,
    ) -> Sequence[int]:
        if not hashes:
            hashes = range(self.named + 1, self.named + 1 + len(token_ids))
            self.named += len(token_ids)
        self.index.store(
            self.pod if pod is None else pod,
            context,
            tier=0,
            group=0,
            engine_hashes=struct.pack(f"<{len(hashes)}Q", *hashes),
            parent=parent,
            token_ids=struct.pack(f"<{len(token_ids)}I", *token_ids),
            extra_keys=None,
            now=now,
        )
        return hashes

    def remove(self, hashes: Sequence[int]) -> None:
        packed = struct.pack(f"<{len(hashes)}Q", *hashes)
        self.index.remove(self.pod, tier=0, group=0, engine_hashes=packed, now=0)

    def depth(self, context: int, token_ids: Sequence[int], now: int = 0) -> int:
        packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
        return max((row.tiers[0] for row in self.index.match_tokens(context, packed, None, now)), default=0)


def test_what_followed_a_run_that_was_removed_is_found_when_the_run_comes_back_elsewhere() -> None:
    prompts = Prompts(IndexLimits())
    context = prompts.index.context("m", None, 1, 0)
    hashes = prompts.store(context, range(10))
    prompts.remove(hashes[3:7])
    prompts.store(context, range(100, 104))  # takes the room of those that went
    prompts.store(context, range(3, 7), parent=hashes[2])
    assert prompts.depth(context, range(10)) == 10
    assert prompts.index.contexts()[0].prefixes == 14


@pytest.mark.parametrize("slices", range(1, 8))
def test_nothing_follows_what_takes_the_room_of_a_dropped_context(slices: int) -> None:
    """The sweep stands between two entries of a run, the second of which still lies behind what came in place of the
    first."""
    prompts = Prompts(IndexLimits(contexts_max=3))
    dropped, filler, context = (prompts.index.context(model, None, 1, 0) for model in ("a", "b", "c"))
    prompts.store(dropped, range(1500))
    prompts.store(filler, range(545))
    prompts.store(context, range(2))  # and all the room of a chunk is taken
    prompts.index.context("d", None, 1, 0)
    assert dropped not in {info.id for info in prompts.index.contexts()}
    for _ in range(slices):
        prompts.index.sweep(0, 10)
    for hashes in [prompts.store(context, [1000 + i]) for i in range(70)]:
        prompts.remove(hashes)
    packed = prompts.index.prefix_hashes("c", None, 1, struct.pack("<2I", 0, 1), None)
    for prefix in struct.unpack("<2Q", packed):
        assert prompts.index.holders(context, prefix, 0) == [(prompts.pod, 0, 0)]


def test_what_ends_its_parent_by_taking_its_name_is_found_when_that_comes_back() -> None:
    """The newest block of a name wins, and the number beside the one that its parent had is free."""
    prompts = Prompts(IndexLimits())
    context = prompts.index.context("m", None, 1, 0)
    prompts.store(context, range(100, 162))
    name = prompts.store(context, [1])
    prompts.remove(prompts.store(context, [50]))
    prompts.store(context, [2], name, parent=name[0])
    assert prompts.depth(context, [1, 2]) == 0
    prompts.store(context, [1])
    assert prompts.depth(context, [1, 2]) == 2


def test_what_comes_behind_a_parent_that_an_orphan_ended_is_found_when_that_comes_back() -> None:
    prompts = Prompts(IndexLimits())
    index, context = prompts.index, prompts.index.context("m", None, 1, 0)
    prompts.store(context, range(500, 510))
    prompts.store(context, [7], [12], parent=12)  # takes the name of what it waits for
    prompts.store(context, [1, 2, 3], [11, 12, 13])
    assert prompts.depth(context, [1, 2, 3]) == 1
    prompts.store(context, [2], [14], parent=11)
    assert prompts.depth(context, [1, 2, 3]) == 3
    assert prompts.depth(context, [1, 2, 7]) == 3
    before = index.stats().bytes
    prompts.store(context, range(1_000, 9_000))
    taken = index.stats().bytes - before
    assert taken < 8_000 * 40, "what comes later still follows"


def test_a_name_does_not_mean_what_took_the_room_of_its_block() -> None:
    prompts = Prompts(IndexLimits(ttl_ticks=10))
    index, context = prompts.index, prompts.index.context("m", None, 1, 0)
    other = index.add_source()
    prompts.store(context, [1], [11])
    prompts.store(context, [1], [12], pod=other)  # beside the one that the entry carries
    assert index.sweep(10, 2_048).expired == 1  # and stops before the other names
    prompts.store(context, [2], [13], now=10, pod=other)
    packed = struct.pack("<Q", 12)
    assert index.remove(other, tier=0, group=0, engine_hashes=packed, now=10).unknown_blocks == 1
    assert prompts.depth(context, [2], now=10) == 1


CAPACITY = 16_000


@pytest.mark.parametrize(
    "limits",
    [
        IndexLimits(ttl_ticks=0, prefixes_per_context_max=CAPACITY),
        IndexLimits(ttl_ticks=0, prefixes_max=CAPACITY),
    ],
    ids=["in one context", "in all"],
)
def test_old_runs_go_before_single_blocks_that_are_younger(limits: IndexLimits) -> None:
    """Whatever shares an entry of the table with many others is as likely to be looked at as what has one of its own."""
    length = 250
    prompts = Prompts(limits)
    context = prompts.index.context("m", None, 1, 0)
    runs = [[i] * length for i in range(CAPACITY // 2 // length)]
    for now, run in enumerate(runs):
        prompts.store(context, run, now=now)
    for i in range(CAPACITY):
        prompts.store(context, [1_000_000 + i], now=len(runs) + i)
    left = sum(prompts.depth(context, run) for run in runs)
    assert left < CAPACITY // 50


def test_prefixes_by_their_hashes_find_what_followed() -> None:
    """Told by hash alone, under names of their own and in any order, as a dump may."""
    prompts = Prompts(IndexLimits())
    index, context = prompts.index, prompts.index.context("m", None, 1, 0)
    other = index.add_source()
    prompts.store(context, range(10))
    packed = index.prefix_hashes("m", None, 1, struct.pack("<10I", *range(10)), None)
    told = [3, 9, 4, 0, 1, 2, 8, 5, 7, 6]
    index.store_prefixes(
        other,
        context,
        tier=0,
        group=0,
        engine_hashes=struct.pack("<10Q", *(100 + i for i in told)),
        prefix_hashes=b"".join(packed[8 * i : 8 * i + 8] for i in told),
        copies=None,
        now=0,
    )
    assert index.stats().prefixes == 10
    rows = index.match_tokens(context, struct.pack("<10I", *range(10)), None, 0)
    assert {row.source: row.tiers[0] for row in rows} == {prompts.pod: 10, other: 10}
