"""Names out of one index and into another: the second cannot be told from the first by matches or removals.

And a slice at a time, while the index changes under the reader: what stays is told once, whatever comes and goes.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import InvalidInput
from app.index.interface import Index
from app.index.prefix_index import IndexLimits, NameRun, PrefixIndex
from tests.reference import ReferenceIndex

BLOCK_SIZE = 2
SOURCES = 3
LIMITS = IndexLimits(ttl_ticks=0)
CONTEXTS = [("m", None), ("m", "tuned"), ("n", None)]

Path = tuple[int, ...]
Place = tuple[int, int, int, int]  # source, context, tier, group

places = st.tuples(
    st.integers(0, SOURCES - 1), st.integers(0, 2), st.sampled_from([0, 0, 1, 3]), st.integers(0, 1)
)
paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
steps = st.lists(
    st.tuples(st.sampled_from(["store", "store", "store", "remove", "clear"]), places, paths), max_size=40
)


def uint64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def engine_hashes(path: Path) -> bytes:
    """Few and small, and the same for all sources: 1 for (0,), 11 for (0, 0) ..."""
    return uint64s(*(int("".join(str(kind + 1) for kind in path[: i + 1])) for i in range(len(path))))


def tokens(path: Path) -> bytes:
    return b"".join(struct.pack("<2I", kind, kind) for kind in path)


class Holder:
    """An index with its sources and contexts by number."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.sources = [index.add_source() for _ in range(SOURCES)]
        self.contexts = [index.context(model, lora, BLOCK_SIZE, 0) for model, lora in CONTEXTS]

    def apply(self, step: tuple[str, Place, Path]) -> Any:
        kind, (spot, context, tier, group), path = step
        source = self.sources[spot]
        if kind == "clear":
            return self.index.clear(source, tier=tier, context=self.contexts[context])
        if kind == "remove":
            return self.index.remove(source, tier=tier, group=group, engine_hashes=engine_hashes(path), now=0)
        return self.index.store(
            source,
            self.contexts[context],
            tier=tier,
            group=group,
            engine_hashes=engine_hashes(path),
            parent=None,
            token_ids=tokens(path),
            extra_keys=None,
            now=0,
        )

    def picture(self) -> Any:
        prompts = [(a, b, c, d) for a in (0, 1) for b in (0, 1) for c in (0, 1) for d in (0, 1)]
        spots = {source: spot for spot, source in enumerate(self.sources)}
        return [
            sorted(
                (spots[row.source], row.tiers)
                for row in self.index.match_tokens(context, tokens(prompt), None, 0)
            )
            for context in self.contexts
            for prompt in prompts
        ], [self.index.blocks_by_tier(source) for source in self.sources]

    def restore(self, other: Holder, names_max: int) -> None:
        cursor: int | None = 0
        while cursor is not None:
            runs, cursor = other.index.names(cursor, names_max, 0)
            for run in runs:
                self.index.store_prefixes(
                    self.sources[other.sources.index(run.source)],
                    self.contexts[other.contexts.index(run.context)],
                    tier=run.tier,
                    group=run.group,
                    engine_hashes=run.engine_hashes,
                    prefix_hashes=run.prefix_hashes,
                    copies=run.copies,
                    now=0,
                )


def make(kind: str) -> Holder:
    return Holder(PrefixIndex(LIMITS) if kind == "native" else ReferenceIndex(LIMITS))


@pytest.mark.parametrize("kind", ["native", "reference"])
@given(before=steps, after=steps, names_max=st.sampled_from([1, 4, 10_000]), twice=st.booleans())
@settings(deadline=None, max_examples=100)
def test_round_trip(kind: str, before: list[Any], after: list[Any], names_max: int, twice: bool) -> None:
    first, second = make(kind), make(kind)
    for step in before:
        first.apply(step)
    for _ in range(1 + twice):
        second.restore(first, names_max)
    assert second.picture() == first.picture()
    for step in after:
        assert second.apply(step) == first.apply(step)
    assert second.picture() == first.picture()


def flat(runs: list[NameRun]) -> list[tuple[int, int]]:
    return [
        (run.source, engine_hash)
        for run in runs
        for (engine_hash,) in struct.iter_unpack("<Q", run.engine_hashes)
    ]


def test_slices_while_the_table_grows_and_shrinks() -> None:
    """200,000 names: segments split and shrink between the slices."""
    random_ = random.Random(1)
    index = PrefixIndex(LIMITS)
    source = index.add_source()
    context = index.context("m", None, BLOCK_SIZE, 0)

    def store(names: range) -> None:
        index.store_prefixes(
            source,
            context,
            tier=0,
            group=0,
            engine_hashes=uint64s(*names),
            prefix_hashes=uint64s(*(random_.getrandbits(64) for _ in names)),
            copies=None,
            now=0,
        )

    def remove(names: range) -> None:
        index.remove(source, tier=0, group=0, engine_hashes=uint64s(*names), now=0)

    staying, leaving, coming = range(1, 60_000), range(60_000, 120_000), range(120_000, 200_000)
    store(staying)
    store(leaving)
    seen: Counter[tuple[int, int]] = Counter()
    cursor: int | None = 0
    slices = 0
    while cursor is not None:
        runs, cursor = index.names(cursor, 1_000, 0)
        assert sum(len(run.copies) // 8 for run in runs) <= 1_000
        seen.update(flat(runs))
        store(range(coming.start + slices * 1_000, min(coming.start + (slices + 1) * 1_000, coming.stop)))
        remove(range(leaving.start + slices * 1_000, min(leaving.start + (slices + 1) * 1_000, leaving.stop)))
        slices += 1
    assert slices > 50
    assert set(seen.values()) == {1}
    assert {(source, name) for name in staying} <= set(seen)
    assert {name for _, name in seen} <= set(range(1, 200_000))


def test_one_hash_of_many_sources_comes_whole() -> None:
    """However small the slices are: every source's meaning of it comes once."""
    index = PrefixIndex(LIMITS)
    sources = [index.add_source() for _ in range(20)]
    context = index.context("m", None, BLOCK_SIZE, 0)
    for number, source in enumerate(sources):
        index.store_prefixes(
            source,
            context,
            tier=0,
            group=0,
            engine_hashes=uint64s(7, 8),
            prefix_hashes=uint64s(1_000 + number, 2_000 + number),
            copies=uint64s(1, 1 + number),
            now=0,
        )
    runs: list[NameRun] = []
    cursor: int | None = 0
    while cursor is not None:
        slice_, cursor = index.names(cursor, 5, 0)
        assert sum(len(run.copies) // 8 for run in slice_) <= 5
        runs += slice_
    assert (len(flat(runs)), len(set(flat(runs)))) == (40, 40)
    copies = {
        run.source: count
        for run in runs
        for (_, engine_hash), (count,) in zip(flat([run]), struct.iter_unpack("<Q", run.copies), strict=True)
        if engine_hash == 8
    }
    assert copies == {source: 1 + number for number, source in enumerate(sources)}


def test_dead_and_expired_names_are_left_out() -> None:
    index = PrefixIndex(IndexLimits(ttl_ticks=10))
    kept, cleared = index.add_source(), index.add_source()
    context = index.context("m", None, BLOCK_SIZE, 0)

    def store(source: int, name: int, now: int) -> None:
        index.store_prefixes(
            source,
            context,
            tier=0,
            group=0,
            engine_hashes=uint64s(name),
            prefix_hashes=uint64s(name),
            copies=None,
            now=now,
        )

    store(kept, 1, 0)
    store(cleared, 2, 5)
    store(kept, 3, 5)
    index.clear(cleared)
    assert sorted(flat(index.names(0, 100, 9)[0])) == [(kept, 1), (kept, 3)]
    assert flat(index.names(0, 100, 10)[0]) == [(kept, 3)]


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_what_does_not_go_together_is_refused(kind: str) -> None:
    holder = make(kind)
    fields: dict[str, Any] = {"tier": 0, "group": 0, "now": 0}
    for hashes, prefixes, copies in [
        (uint64s(1), uint64s(1, 2), None),
        (uint64s(1), uint64s(1), uint64s(1, 1)),
        (uint64s(1, 2), uint64s(1, 2), uint64s(1, 0)),
    ]:
        with pytest.raises(InvalidInput):
            holder.index.store_prefixes(
                holder.sources[0],
                holder.contexts[0],
                engine_hashes=hashes,
                prefix_hashes=prefixes,
                copies=copies,
                **fields,
            )
    assert holder.index.names(0, 10, 0) == ([], None)
