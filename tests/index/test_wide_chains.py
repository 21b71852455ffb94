"""Long chains in several contexts, tiers and groups at once, while contexts go, entries are evicted and an export is
written: the runs of the native core, where what surrounds them changes.

Where entries are evicted, which of them go is free (test_capacity.py holds it to its rule): the oracle forgets what the
native core says is gone, and from there both must agree again.
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest

from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits
from app.index.interface import Index
from app.index.prefix_index import IndexExport, IndexLimits, PrefixIndex
from tests.index.test_state_machine import all_names
from tests.reference import ReferenceIndex

BLOCK_SIZE = 2
CONTEXTS = [("m", None), ("m", "tuned"), ("n", None)]
SEEDS = (0, 0, 1)  # of the engines, for their hashes
TTL = 60
CAPACITY = 150
Path = tuple[int, ...]


def uint64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def token_bytes(path: Path) -> bytes:
    return b"".join(struct.pack(f"<{BLOCK_SIZE}I", *[block] * BLOCK_SIZE) for block in path)


def prompts(r: random.Random) -> list[Path]:
    trunk = tuple(range(1, 1 + r.randint(20, 60)))
    branches = []
    for i in range(3):
        cut = r.randrange(1, len(trunk))
        branches.append(trunk[:cut] + tuple(1000 * (i + 1) + k for k in range(r.randint(5, 40))))
    return [trunk, *branches, tuple(range(9000, 9015))]


@dataclasses.dataclass
class WideChains:
    r: random.Random
    now: int = 0
    writing: IndexExport | None = None
    frames: list[bytes] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        r = self.r
        self.is_bounded = r.random() < 0.35
        ttl = 0 if self.is_bounded else r.choice([0, 0, TTL])
        bounds: dict[str, Any] = {"ttl_ticks": ttl, "contexts_max": r.choice([2, 3])}
        self.oracle = ReferenceIndex(IndexLimits(**bounds), has_owners=True)
        self.contents = FuzzyIndex(FuzzyLimits())
        in_one, in_all = r.choice([(CAPACITY, 100_000), (100_000, CAPACITY)])
        limits = (
            IndexLimits(**bounds, prefixes_per_context_max=in_one, prefixes_max=in_all)
            if self.is_bounded
            else IndexLimits(**bounds)
        )
        self.native = PrefixIndex(limits, self.contents)
        self.limits = limits
        self.both: tuple[Index, Index] = (self.oracle, self.native)
        # An entry that goes and comes back in one event loses its copies: the oracle would keep them.
        self.counts_copies = not self.is_bounded and r.random() < 0.6
        self.agrees_across_contexts = r.random() < 0.4  # one hash for a block, whatever the context
        self.is_folded = ttl == 0 and not self.is_bounded and r.random() < 0.25
        self.sources = [[index.add_source() for index in self.both] for _ in SEEDS]
        self.owners = [[0, 0], [0, 0], [index.add_owner() for index in self.both]]
        if self.is_bounded:
            self.owners.pop()
        self.prompts = prompts(r)

    def name(self, pod: int, context: int, path: Path) -> int:
        where = 0 if self.agrees_across_contexts else context
        name = random.Random(f"{SEEDS[pod]}/{where}/{path}").getrandbits(64)
        return name % 300 if self.is_folded else name

    def names(self, pod: int, context: int, path: Path, begin: int = 0) -> list[int]:
        return [self.name(pod, context, path[: i + 1]) for i in range(begin, len(path))]

    def hashes(self, context: int, path: Path) -> bytes:
        return self.oracle.prefix_hashes(*CONTEXTS[context], BLOCK_SIZE, token_bytes(path), None)

    def some_path(self) -> Path:
        path = self.r.choice(self.prompts)
        return path[: self.r.choice([len(path), self.r.randint(1, len(path))])]

    def some_place(self) -> dict[str, Any]:
        return {"tier": self.r.choice([0, 0, 0, 2]), "group": self.r.choice([0, 0, 0, 1]), "now": self.now}

    def on_both(self, step: Callable[[Index, int, int, int], object], pod: int, context: int) -> None:
        """`step(index, which, source, context)`."""
        results = [
            step(index, i, self.sources[pod][i], index.context(*CONTEXTS[context], BLOCK_SIZE, self.now))
            for i, index in enumerate(self.both)
        ]
        assert results[0] == results[1]

    # -- steps

    def store(self) -> None:
        pod, context, path = self.r.randrange(len(SEEDS)), self.r.choice([0, 0, 0, 1, 2]), self.some_path()
        begin = self.r.choice([0, 0, self.r.randrange(len(path))])
        owner, place = self.r.choice(self.owners), self.some_place()
        self.on_both(
            lambda index, i, source, known: index.store(
                source,
                known,
                engine_hashes=uint64s(*self.names(pod, context, path, begin)),
                parent=self.name(pod, context, path[:begin]) if begin else None,
                token_ids=token_bytes(path[begin:]),
                extra_keys=None,
                count_copies=self.counts_copies,
                owner=owner[i],
                **place,
            ),
            pod,
            context,
        )

    def store_prefixes(self) -> None:
        pod, context, path = self.r.randrange(len(SEEDS)), self.r.choice([0, 0, 0, 1, 2]), self.some_path()
        place, copies = self.some_place(), self.r.choice([None, None, 1, 2]) if self.counts_copies else None
        self.on_both(
            lambda index, _i, source, known: index.store_prefixes(
                source,
                known,
                engine_hashes=uint64s(*self.names(pod, context, path)),
                prefix_hashes=self.hashes(context, path),
                copies=uint64s(*[copies] * len(path)) if copies else None,
                count_copies=self.counts_copies,
                **place,
            ),
            pod,
            context,
        )

    def place(self) -> None:
        pod, context, path = self.r.randrange(len(SEEDS)), self.r.choice([0, 0, 1]), self.some_path()
        names, place = uint64s(*self.names(pod, context, path)), self.some_place()
        self.on_both(
            lambda index, _i, source, _known: index.place(
                source, engine_hashes=names, count_copies=self.counts_copies, **place
            ),
            pod,
            context,
        )

    def remove(self) -> None:
        """Blocks of one context or, as where an engine serves several models, of two in turn."""
        pod, context = self.r.randrange(len(SEEDS)), self.r.choice([0, 0, 0, 1, 2])
        part: list[int] = []
        for where in (context, self.r.choice([context, self.r.randrange(len(CONTEXTS))])):
            names = self.names(pod, where, self.some_path())
            begin = self.r.randrange(len(names))
            more = names[begin : begin + self.r.choice([1, 3, 30, 200])]
            if self.r.random() < 0.7:
                more.reverse()  # engines lose the tail first
            at = self.r.choice([0, len(part), self.r.randint(0, len(part))])
            part[at:at] = more
        if self.r.random() < 0.15:
            self.r.shuffle(part)
        place = self.some_place()
        results = [
            index.remove(self.sources[pod][i], engine_hashes=uint64s(*part), **place)
            for i, index in enumerate(self.both)
        ]
        assert results[0] == results[1]

    def expect(self) -> None:
        pod, context, hashes = self.r.randrange(len(SEEDS)), self.r.choice([0, 0, 1]), b""
        hashes = self.hashes(context, self.some_path())
        self.on_both(
            lambda index, _i, source, known: index.add_speculative(known, source, hashes, 20, self.now),
            pod,
            context,
        )

    def clear(self) -> None:
        pod, tier = self.r.randrange(len(SEEDS)), self.r.choice([None, 0, 2])
        for i, index in enumerate(self.both):
            index.clear(self.sources[pod][i], tier=tier)

    def lose_a_source(self) -> None:
        pod = self.r.randrange(len(SEEDS))
        for i, index in enumerate(self.both):
            index.drop_source(self.sources[pod][i])
            self.sources[pod][i] = index.add_source()

    def wait(self) -> None:
        self.now += self.r.choice([0, 1, 5, TTL // 2])
        self.native.sweep(self.now, self.r.choice([1, 30, 1000]))

    def export(self) -> None:
        """The next frames of the export under way; the whole of it is held against the index now and then."""
        if self.writing is None:
            self.writing, self.frames = self.native.start_export(), []
            self.export_is_listed = False
        for _ in range(self.r.randint(1, 3)):
            if self.export_is_listed:
                self.frames.append(self.writing.changes(self.r.choice([3, 50]))[0])
            else:
                frame, self.export_is_listed = self.writing.names(self.r.choice([5, 40, 200]))
                self.frames.append(frame)
        if self.export_is_listed and self.r.random() < 0.5:
            self.end_export(self.writing)
            self.writing = None

    def end_export(self, writing: IndexExport) -> None:
        left = 1
        while left:
            frame, left = writing.changes(1_000)
            self.frames.append(frame)
        slots = self.native.slots()
        writing.close()
        fresh = PrefixIndex(self.limits)
        sources = {self.sources[pod][1]: fresh.add_source() for pod in range(len(SEEDS))}
        contexts = {
            info.id: fresh.context(info.model, info.lora, info.block_size, self.now)
            for info in self.native.contexts()
        }
        importing = fresh.start_import(saved_at=self.now, elapsed=0, now=self.now)
        for slot in slots:
            importing.slot(slot, context=contexts[slot.context], source=sources[slot.source])
        for frame in self.frames:
            assert importing.frame(frame)
        if self.limits.ttl_ticks != 0:
            return  # entries that were matched since they were written are older there
        assert sorted(all_names(fresh, self.now, 10_000)) == sorted(
            (sources[source], contexts[context], *rest)
            for source, context, *rest in all_names(self.native, self.now, 10_000)
        )
        ours = {ids[1]: sources[ids[1]] for ids in self.sources}
        for here, there in ours.items():
            assert self.native.blocks_by_tier(here) == fresh.blocks_by_tier(there)

    def step(self) -> None:
        steps: list[tuple[int, Callable[[], None]]] = [
            (12, self.store),
            (3, self.store_prefixes),
            (2, self.place),
            (10, self.remove),
            (2, self.expect),
            (1, self.clear),
            (2, self.wait),
            (3, self.export),
        ]
        if self.r.random() < 0.02:
            return self.lose_a_source()
        self.r.choices([step for _, step in steps], weights=[weight for weight, _ in steps])[0]()
        return None

    # -- the picture

    def context_ids(self, which: int) -> dict[int, int]:
        """Context of `which` index -> its place in CONTEXTS, of those that are there."""
        return {
            info.id: at
            for at, known in enumerate(CONTEXTS)
            for info in self.both[which].find_contexts(*known)
        }

    def listed(self, which: int) -> list[tuple[int, ...]]:
        pods = {ids[which]: pod for pod, ids in enumerate(self.sources)}
        contexts = self.context_ids(which)
        return sorted(
            (pods[source], contexts[context], *rest)
            for source, context, *rest in all_names(self.both[which], self.now, 10_000)
        )

    def forget_what_was_evicted(self) -> None:
        native, oracle = self.listed(1), self.listed(0)
        gone = set(oracle) - set(native)
        assert not set(native) - set(oracle)
        contexts = {at: known for known, at in self.context_ids(0).items()}
        for pod, context, tier, group, engine_hash, _, _ in gone:
            self.oracle._unname((self.sources[pod][0], tier, group, contexts[context]), engine_hash)
        for info in self.native.contexts():
            assert info.prefixes <= CAPACITY
        if gone:
            stats = self.native.stats()
            assert stats.evicted + stats.evicted_in_all > 0

    def compare(self) -> None:
        if self.is_bounded:
            self.forget_what_was_evicted()
        assert self.listed(1) == self.listed(0)
        pods = [{ids[i]: pod for pod, ids in enumerate(self.sources)} for i in range(2)]
        known = [{at: number for number, at in self.context_ids(i).items()} for i in range(2)]
        assert known[0].keys() == known[1].keys()
        for context in known[0]:
            for path in self.prompts:
                rows = [
                    sorted(
                        (pods[i][row.source], *row.tiers, row.speculative)
                        for row in index.match_tokens(known[i][context], token_bytes(path), None, self.now)
                    )
                    for i, index in enumerate(self.both)
                ]
                assert rows[0] == rows[1]
            prefixes = uint64s(*sorted(self.oracle.prefixes(known[0][context])))
            held, there = (
                sorted(
                    (h.prefix, pods[i][h.source], 0 if h.owner == 0 else 1)
                    for h in index.holdings(known[i][context], prefixes, self.now)
                )
                for i, index in enumerate(self.both)
            )
            assert held == there
            contents = self.contents.prefix_hashes(known[1][context])
            assert len(contents) == len(set(contents))
            must, may = self.oracle.plain_prefixes(known[0][context])
            held_there = {p for p in contents if self.native.holders(known[1][context], p, self.now)}
            assert must <= held_there <= may
        if self.limits.ttl_ticks == 0:  # what has expired is counted until it is swept
            for ids in self.sources:
                assert self.native.blocks_by_tier(ids[1]) == self.oracle.blocks_by_tier(ids[0])
            digests = [
                sorted(
                    (pods[i][s.source], s.tier, s.group, s.blocks, s.digest)
                    for s in index.slots()
                    if s.blocks
                )
                for i, index in enumerate(self.both)
            ]
            assert digests[0] == digests[1]

    def end(self) -> None:
        if self.writing is not None:
            self.writing.close()
        for i, index in enumerate(self.both):
            for ids in self.sources:
                index.drop_source(ids[i])
        for _ in range(2):
            while not self.native.sweep(self.now, 1_000).idle:
                pass
        stats = self.native.stats()
        left = (stats.prefixes, stats.engine_keys, stats.copies, stats.holder_sets, stats.claims)
        assert left == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("seed", range(24))
def test_wide_chains(seed: int) -> None:
    machine = WideChains(random.Random(seed))
    for _ in range(40):
        machine.step()
        machine.compare()
    machine.end()


def store_numbered(index: PrefixIndex, source: int, model: str, names: range, seed: int = 0) -> None:
    """A chain of blocks of one token, each the number that, with the seed, is its engine hash too."""
    index.store(
        source,
        index.context(model, None, 1, 0),
        tier=0,
        group=0,
        engine_hashes=uint64s(*[seed + name for name in names]),
        parent=None,
        token_ids=struct.pack(f"<{len(names)}I", *names),
        extra_keys=None,
        now=0,
    )


def test_a_block_of_a_dropped_context_between_neighbours() -> None:
    """Its name is found, and belongs to nobody; what comes next is not looked for in the context that is gone."""
    index = PrefixIndex(IndexLimits(ttl_ticks=0, contexts_max=2))
    source = index.add_source()
    store_numbered(index, source, "m", range(1, 11))
    store_numbered(index, source, "dropped", range(101, 111))
    store_numbered(index, source, "m", range(1, 11))
    index.context("n", None, 1, 0)
    removed = index.remove(source, tier=0, group=0, engine_hashes=uint64s(10, 9, 8, 110, 7, 6, 109), now=0)
    assert (removed.removed_blocks, removed.unknown_blocks) == (5, 2)


@pytest.mark.parametrize("seed", [0, 10_000])
@pytest.mark.parametrize("step", [1, -1])
def test_names_that_another_context_has_too_go_in_both(step: int, seed: int) -> None:
    """However far along a chain they begin: neighbours do not hide the others. So it is where another engine named
    all blocks before by hashes of its own, and whatever went from the tables in between."""
    index = PrefixIndex(IndexLimits(ttl_ticks=0))
    source, earlier = index.add_source(), index.add_source()
    passing = range(1_000, 1_600)
    for model, names in (("m", passing), ("n", range(8, 14)), ("m", range(1, 21))):
        if seed:
            store_numbered(index, earlier, model, names)
        store_numbered(index, source, model, names, seed)
    for leaving in (passing, range(1, 21)[::step]):
        hashes = uint64s(*[seed + name for name in leaving])
        removed = index.remove(source, tier=0, group=0, engine_hashes=hashes, now=0)
        assert (removed.removed_blocks, removed.unknown_blocks) == (600 if leaving is passing else 26, 0)
    assert index.blocks_by_tier(source) == (0, 0, 0, 0)
    assert index.blocks_by_tier(earlier)[0] == (626 if seed else 0)


@pytest.mark.parametrize("seed", [0, 10_000])
@pytest.mark.parametrize("step", [1, -1])
def test_what_goes_while_an_export_is_written_is_gone_behind_it(step: int, seed: int) -> None:
    """In runs too, wherever the names lie."""
    index = PrefixIndex(IndexLimits(ttl_ticks=0))
    source, earlier = index.add_source(), index.add_source()
    names = range(1, 21)
    if seed:
        store_numbered(index, earlier, "m", names)
    store_numbered(index, source, "m", names, seed)
    writing = index.start_export()
    frames = [writing.names(1_000)[0]]
    index.remove(source, tier=0, group=0, engine_hashes=uint64s(*[seed + n for n in names][::step]), now=0)
    frames.append(writing.changes(1_000)[0])
    fresh = PrefixIndex(IndexLimits(ttl_ticks=0))
    assert [fresh.add_source(), fresh.add_source()] == [source, earlier]
    importing = fresh.start_import(saved_at=0, elapsed=0, now=0)
    for slot in index.slots():
        importing.slot(slot, context=fresh.context("m", None, 1, 0), source=slot.source)
    assert all(importing.frame(frame) for frame in frames)
    assert fresh.blocks_by_tier(source)[0] == 0
    assert fresh.blocks_by_tier(earlier)[0] == (20 if seed else 0)
    assert fresh.stats().engine_keys == (20 if seed else 0)
