"""Claims in the frames of an index: who holds what for whom is answered after as before, whatever changes while the
frames are written: stores for others, removals, owners that are cleared, slots that die, contexts that are dropped."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits
from app.index.prefix_index import IndexLimits, PrefixIndex
from tests.index.exporting import export_frames

BLOCK_SIZE = 8
MODELS = ("m", "n", "o")
SOURCES = 2
PREFIXES = [(number * 0x9E3779B97F4A7C15 + 1) % 2**64 for number in range(60)]
Answers = list[tuple[str, int, int, str]]
ENDLESS = IndexLimits(ttl_ticks=0)


def uint64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


class Bench:
    """An index under random changes, with owners by name."""

    def __init__(self, seed: int, limits: IndexLimits = ENDLESS, *, prefixes: int = len(PREFIXES)) -> None:
        self.random = random.Random(seed)
        self.limits = limits
        self.prefixes = prefixes
        self.index = PrefixIndex(limits, FuzzyIndex(FuzzyLimits()))
        self.sources = [self.index.add_source() for _ in range(SOURCES)]
        self.owners = {name: self.index.add_owner() for name in ("a", "b", "c")}
        self.now = 0

    def store(self, owner: str | None, model: str, source: int, tier: int, at: list[int]) -> None:
        self.index.store_prefixes(
            self.sources[source],
            self.index.context(model, None, BLOCK_SIZE, self.now),
            tier=tier,
            group=0,
            # Two sources may call one prefix differently, and one name may come to mean another prefix.
            engine_hashes=uint64s(*(1 + (number + 7 * source) % 50 for number in at)),
            prefix_hashes=uint64s(*(PREFIXES[number] for number in at)),
            copies=None,
            now=self.now,
            owner=0 if owner is None else self.owners[owner],
        )

    def change(self, steps: int = 4) -> None:
        r = self.random
        for _ in range(steps):
            model, source, tier = r.choice(MODELS), r.randrange(SOURCES), r.choice([0, 0, 2])
            at = [r.randrange(self.prefixes) for _ in range(r.randint(1, 5))]
            chance = r.random()
            if chance < 0.62:
                self.store(r.choice([None, "a", "a", "b", "c"]), model, source, tier, at)
            elif chance < 0.88:
                names = uint64s(*(1 + (number + 7 * source) % 50 for number in at))
                self.index.remove(self.sources[source], tier=tier, group=0, engine_hashes=names, now=self.now)
            elif chance < 0.91:
                self.index.clear(self.sources[source], tier=r.choice([None, tier]))
            elif chance < 0.94:
                name = r.choice(sorted(self.owners))
                self.index.clear_owner(self.owners[name])
                self.owners[name] = self.index.add_owner()
            else:
                self.index.sweep(self.now, r.choice([3, 50, 1_000]))

    def answers(self) -> Answers:
        """(model, place of the prefix, place of the source, owner), each as often as slots say it."""
        names = {number: name for name, number in self.owners.items()}
        found = []
        for info in self.index.contexts():
            for holding in self.index.holdings(info.id, uint64s(*PREFIXES), self.now):
                source = self.sources.index(holding.source)
                found.append((info.model, holding.prefix, source, names.get(holding.owner, "")))
        return sorted(found)

    def sweep_all(self) -> None:
        for _ in range(2):
            while not self.index.sweep(self.now, 1_000).idle:
                pass


def export(index: PrefixIndex, slice_: int, meanwhile: Callable[[], None]) -> list[bytes]:
    writing = index.start_export()
    return export_frames(writing, writing.claims, slice_, meanwhile)


def restored(
    bench: Bench,
    frames: list[bytes],
    slice_: int,
    *,
    limits: IndexLimits | None = None,
    owners: tuple[str, ...] = ("c", "a", "b"),
    elapsed: int = 0,
) -> Bench:
    fresh = Bench(0, limits or bench.limits, prefixes=bench.prefixes)
    fresh.random.setstate(bench.random.getstate())
    fresh.now = bench.now
    fresh.index.add_owner()  # so that numbers differ
    fresh.sources = [fresh.index.add_source() for _ in range(SOURCES)]
    fresh.owners = {name: fresh.index.add_owner() for name in owners}
    contexts = {
        info.id: fresh.index.context(info.model, None, BLOCK_SIZE, 0) for info in bench.index.contexts()
    }
    importing = fresh.index.start_import(saved_at=bench.now, elapsed=elapsed, now=bench.now)
    for slot in bench.index.slots():
        source = fresh.sources[bench.sources.index(slot.source)]
        importing.slot(slot, context=contexts[slot.context], source=source)
    for name in owners:
        importing.owner(bench.owners[name], owner=fresh.owners[name])
    for frame in frames:
        assert importing.frame(frame)
    while not importing.settle(slice_):
        pass
    return fresh


@given(
    seed=st.integers(0, 2**32),
    before=st.integers(0, 25),
    slice_=st.sampled_from([1, 2, 7, 1_000]),
    contexts_max=st.sampled_from([1_000, 1_000, 2]),
    changing=st.booleans(),
    prefixes=st.sampled_from([5, 60]),
)
@settings(deadline=None, max_examples=200)
def test_answers_before_are_answers_after(
    seed: int, before: int, slice_: int, contexts_max: int, changing: bool, prefixes: int
) -> None:
    bench = Bench(seed, IndexLimits(ttl_ticks=0, contexts_max=contexts_max), prefixes=prefixes)
    bench.change(before)
    budget = iter(range(60))  # or changes would come faster than slices of one write them

    def change() -> None:
        if changing and next(budget, None) is not None:
            bench.change(1)

    frames = export(bench.index, slice_, change)
    fresh = restored(bench, frames, slice_)
    bench.index.start_export().close()
    assert fresh.answers() == bench.answers()
    for _ in range(
        10 if contexts_max > len(MODELS) else 0
    ):  # and goes on so; when a context was used is forgotten
        bench.change(3)
        fresh.change(3)
        assert fresh.answers() == bench.answers()
    bench.sweep_all()
    fresh.sweep_all()
    assert [fresh.index.owner_claims()[fresh.owners[name]] for name in "abc"] == [
        bench.index.owner_claims()[bench.owners[name]] for name in "abc"
    ]
    assert fresh.index.stats().claims == bench.index.stats().claims


def test_a_claim_that_was_written_and_ended_is_not_there() -> None:
    """Its block went and came back for nobody; another one went and came back for somebody else."""
    bench = Bench(1)
    bench.store("a", "m", 0, 0, [1, 2, 3])
    writing = bench.index.start_export()
    frames = []
    for write in (writing.names, writing.claims):
        frame, done = write(1_000)
        assert done
        frames.append(frame)
    bench.index.remove(bench.sources[0], tier=0, group=0, engine_hashes=uint64s(2, 3), now=0)
    bench.store(None, "m", 0, 0, [1])
    bench.store("b", "m", 0, 0, [2])
    frames += [writing.changes(1_000)[0], writing.claims(1_000)[0]]
    writing.close()
    fresh = restored(bench, frames, 1_000)
    expected = [("m", 1, 0, ""), ("m", 2, 0, "b"), ("m", 3, 0, "a")]
    assert fresh.answers() == bench.answers() == expected


@pytest.mark.parametrize("seed", range(8))
def test_while_entries_expire_and_are_evicted(seed: int) -> None:
    bench = Bench(seed, IndexLimits(ttl_ticks=30, prefixes_per_context_max=25))
    bench.now = 1_000  # room for the ages of what is restored
    bench.change(60)

    def change() -> None:
        bench.now += bench.random.choice([0, 0, 0, 1, 5])
        bench.change(2)

    frames = export(bench.index, 20, change)
    fresh = restored(bench, frames, 3)
    assert restored(bench, frames, 3, elapsed=30).answers() == []
    assert bench.index.stats().evicted
    assert any(owner for *_, owner in bench.answers())
    assert fresh.answers() == bench.answers()
    for now in range(bench.now, bench.now + 31, 3):
        bench.now = fresh.now = now
        assert fresh.answers() == bench.answers()
    assert bench.answers() == []
    for one in (bench, fresh):  # what comes back after its time has no owner
        one.store(None, "m", 0, 0, list(range(20)))
        assert one.answers() == [("m", number, 0, "") for number in range(20)]


def test_owners_and_slots_that_are_not_told_of_are_left_out() -> None:
    bench = Bench(1)
    bench.store("a", "m", 0, 0, [1, 2])
    bench.store("b", "m", 1, 0, [2])
    frames = export(bench.index, 1, lambda: None)
    fresh = restored(bench, frames, 1, owners=("b",))
    assert fresh.answers() == [("m", 1, 0, ""), ("m", 2, 0, ""), ("m", 2, 1, "b")]
    assert fresh.index.stats().claims == 1


def test_no_more_claims_than_there_may_be() -> None:
    bench = Bench(1)
    for source in (0, 1):
        bench.store("a", "m", source, 0, list(range(50)))
    frames = export(bench.index, 10, lambda: None)
    fresh = restored(bench, frames, 10, limits=IndexLimits(ttl_ticks=0, claims_max=30))
    stats = fresh.index.stats()
    assert (stats.claims, stats.claims_refused) == (30, 70)
    assert len(fresh.answers()) == 100
    assert sum(owner == "a" for *_, owner in fresh.answers()) == 30


def test_many_claims_come_back_in_any_slices() -> None:
    """More than a segment of their table: 40,000 in key order, of two contexts and two owners."""
    bench = Bench(1)
    prefixes = [(number * 0x9E3779B97F4A7C15 + 1) % 2**64 for number in range(10_000)]
    for model in ("m", "n"):
        for owner in ("a", "b"):
            bench.index.store_prefixes(
                bench.sources[0],
                bench.index.context(model, None, BLOCK_SIZE, 0),
                tier=0,
                group=0,
                engine_hashes=uint64s(*range(1, 10_001)),
                prefix_hashes=uint64s(*prefixes),
                copies=None,
                now=0,
                owner=bench.owners[owner],
            )
    for slice_ in (777, 100_000):
        fresh = restored(bench, export(bench.index, slice_, lambda: None), slice_)
        assert fresh.index.stats().claims == 40_000
        for info in fresh.index.contexts():
            assert len(fresh.index.holdings(info.id, uint64s(*prefixes), 0)) == 20_000
        assert fresh.index.stats().bytes < 1.3 * bench.index.stats().bytes
        again = restored(fresh, export(fresh.index, slice_, lambda: None), slice_)
        assert again.index.stats().claims == 40_000, "and once more"
        again.index.clear_owner(again.owners["a"])
        again.sweep_all()
        assert again.index.stats().claims == 20_000


def test_where_nobody_could_ask_nobody_claims() -> None:
    bench = Bench(1)
    bench.store("a", "m", 0, 0, [1, 2])
    frames = export(bench.index, 10, lambda: None)
    plain = PrefixIndex(ENDLESS)
    source, context, owner = plain.add_source(), plain.context("m", None, BLOCK_SIZE, 0), plain.add_owner()
    importing = plain.start_import(saved_at=0, elapsed=0, now=0)
    for slot in bench.index.slots():
        importing.slot(slot, context=context, source=source)
    importing.owner(bench.owners["a"], owner=owner)
    for frame in frames:
        assert importing.frame(frame)
    assert importing.settle(1)
    assert (plain.stats().claims, plain.stats().prefixes) == (0, 2)


def test_bytes_that_are_no_claims() -> None:
    index = PrefixIndex(IndexLimits(), FuzzyIndex(FuzzyLimits()))
    importing = index.start_import(saved_at=0, elapsed=0, now=0)
    whole = struct.pack("<II", 0xFFFFFFFE, 1) + bytes(12) + struct.pack("<I", 1) + bytes(20)
    assert importing.frame(whole)
    for length in range(len(whole)):
        assert not importing.frame(whole[:length])
    assert not importing.frame(whole + b"\0")
    for claims in (struct.pack("<II", 0xFFFFFFFE, 2**32 - 1), struct.pack("<III", 0xFFFFFFFE, 0, 2**32 - 1)):
        assert not importing.frame(claims + bytes(40))
