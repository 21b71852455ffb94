"""A full context, or contexts that are full together: never past the bound, and what goes is what was seen longest ago.

Which of several equally old entries goes is free, so the two implementations are not compared with each other here:
each is held to the rule, with the test keeping the book of what was last seen when.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits
from app.index.interface import Index
from app.index.prefix_index import IndexLimits, PrefixIndex
from tests.index.exporting import export_frames
from tests.reference import ReferenceIndex

CAPACITY = 12
PROMPTS, LENGTH = 6, 5  # prompt p has the tokens p, p, ... in blocks of one token

steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "match", "remove"]),
        st.integers(0, PROMPTS - 1),
        st.integers(1, LENGTH),
        st.sampled_from([0, 1, 1]),
    ),
    max_size=60,
)


IN_ONE = IndexLimits(ttl_ticks=0, prefixes_per_context_max=CAPACITY)
IN_ALL = IndexLimits(ttl_ticks=0, prefixes_max=CAPACITY)
# And over how many contexts prompts are spread.
bounds = pytest.mark.parametrize(
    ("limits", "contexts"), [(IN_ONE, 1), (IN_ALL, 1), (IN_ALL, 3)], ids=["in-one", "in-all", "in-all-of-3"]
)

one_context = pytest.mark.parametrize("limits", [IN_ONE, IN_ALL], ids=["in-one", "in-all"])


class Book:
    """The index, and when each entry was last seen by what was done to it."""

    def __init__(self, index: Index, contexts: int) -> None:
        self.index = index
        self.contexts = [index.context(f"m{i}", None, 1, 0) for i in range(contexts)]
        self.home: dict[int, int] = {}  # the context of each prefix that ever was
        self.source = index.add_source()
        self.now = 0
        self.last_seen: dict[int, int] = {}

    def tokens(self, prompt: int, length: int) -> bytes:
        return struct.pack(f"<{length}I", *[prompt] * length)

    def context(self, prompt: int) -> int:
        return self.contexts[prompt % len(self.contexts)]

    def prefixes(self, prompt: int, length: int) -> tuple[int, ...]:
        model = f"m{prompt % len(self.contexts)}"
        packed = self.index.prefix_hashes(model, None, 1, self.tokens(prompt, length), None)
        prefixes = struct.unpack(f"<{length}Q", packed)
        self.home.update(dict.fromkeys(prefixes, self.context(prompt)))
        return prefixes

    def held(self) -> set[int]:
        return {p for p in self.last_seen if self.index.holders(self.home[p], p, self.now)}

    def store(self, prompt: int, length: int) -> None:
        before = self.held()
        self.last_seen = {p: seen for p, seen in self.last_seen.items() if p in before}
        stored = self.prefixes(prompt, length)
        self.index.store(
            self.source,
            self.context(prompt),
            tier=0,
            group=0,
            engine_hashes=struct.pack(f"<{length}Q", *(prompt * LENGTH + i for i in range(length))),
            parent=None,
            token_ids=self.tokens(prompt, length),
            extra_keys=None,
            now=self.now,
        )
        self.last_seen.update(dict.fromkeys(stored, self.now))
        after = self.held()
        gone = self.last_seen.keys() - after
        if gone and after:
            assert max(self.last_seen[p] for p in gone) <= min(self.last_seen[p] for p in after)
        assert len(gone) <= max(0, len(before | set(stored)) - CAPACITY)  # no more than had to

    def match(self, prompt: int, length: int) -> None:
        rows = self.index.match_tokens(self.context(prompt), self.tokens(prompt, length), None, self.now)
        prefixes, held = self.prefixes(prompt, length), self.held()
        depth = next((i for i, p in enumerate(prefixes) if p not in held), length)
        assert [row.tiers[0] for row in rows] == ([depth] if depth else [])
        self.last_seen.update(dict.fromkeys(prefixes[:depth], self.now))

    def remove(self, prompt: int, length: int) -> None:
        prefix = self.prefixes(prompt, length)[-1]
        name = struct.pack("<Q", prompt * LENGTH + length - 1)
        was_held = prefix in self.held()
        result = self.index.remove(self.source, tier=0, group=0, engine_hashes=name, now=self.now)
        assert (result.removed_blocks, result.unknown_blocks) == (int(was_held), int(not was_held))


@bounds
@given(steps=steps)
@settings(max_examples=150, deadline=None)
def test_what_was_evicted_is_not_found_by_content(
    limits: IndexLimits, contexts: int, steps: list[tuple[str, int, int, int]]
) -> None:
    contents = FuzzyIndex(FuzzyLimits())
    book = Book(PrefixIndex(limits, contents), contexts)
    for what, prompt, length, wait in steps:
        book.now += wait
        if what == "store":
            book.store(prompt, length)
        elif what == "remove":
            book.remove(prompt, length)
        found = [p for context in book.contexts for p in contents.prefix_hashes(context)]
        assert sorted(found) == sorted(book.held())


@pytest.mark.parametrize("make", [ReferenceIndex, PrefixIndex], ids=["oracle", "native"])
@bounds
@given(steps=steps)
@settings(max_examples=150, deadline=None)
def test_full_context_gives_up_what_was_seen_longest_ago(
    make: Callable[[IndexLimits], Index],
    limits: IndexLimits,
    contexts: int,
    steps: list[tuple[str, int, int, int]],
) -> None:
    book = Book(make(limits), contexts)
    for what, prompt, length, wait in steps:
        book.now += wait
        if what == "store":
            book.store(prompt, length)
        elif what == "match":
            book.match(prompt, length)
        else:
            book.remove(prompt, length)
        assert sum(context.prefixes for context in book.index.contexts()) <= CAPACITY
        stats = book.index.stats()
        assert not (stats.evicted_in_all if limits == IN_ONE else stats.evicted)


@pytest.mark.parametrize("bound", [CAPACITY, 1_500], ids=["each looked at", "some looked at"])
def test_a_full_context_takes_nothing_from_others(bound: int) -> None:
    """Though what they hold was seen longer ago, and lies between what it holds itself."""
    index = PrefixIndex(IndexLimits(ttl_ticks=0, prefixes_per_context_max=bound))
    source = index.add_source()
    quiet, full = (index.context(model, None, 1, 0) for model in ("quiet", "full"))
    for block in range(bound // 2):
        store_block(index, source, quiet, block, 0)
        store_block(index, source, full, block, 1)
    for block in range(bound // 2, 4 * bound):
        store_block(index, source, full, block, 2 + block)
    assert index.stats().evicted >= 3 * bound
    held = {context.model: context.prefixes for context in index.contexts()}
    assert held["quiet"] == bound // 2
    assert 0 < held["full"] <= bound


def test_what_a_dropped_context_left_makes_room() -> None:
    """Its entries count until they are swept, and go with what was seen longest ago; only the others are evictions."""
    index = PrefixIndex(IndexLimits(ttl_ticks=0, contexts_max=2, prefixes_max=2_000))
    source = index.add_source()

    def store(model: str, blocks: range, now: int) -> None:
        index.store(
            source,
            index.context(model, None, 1, now),
            tier=0,
            group=0,
            engine_hashes=struct.pack(f"<{len(blocks)}Q", *(i + now * 10_000 for i in blocks)),
            parent=None,
            token_ids=struct.pack(f"<{len(blocks)}I", *blocks),
            extra_keys=None,
            now=now,
        )

    def held() -> dict[str, int]:
        return {context.model: context.prefixes for context in index.contexts()}

    store("kept", range(500), 0)
    store("dropped", range(1_500), 1)
    index.context("kept", None, 1, 2)
    store("new", range(1_500), 3)
    assert held()["new"] == 1_500
    assert (index.stats().contexts_evicted, index.stats().evicted_in_all) == (1, 500 - held()["kept"])
    while not index.sweep(4, 100).idle:
        pass
    room = 2_000 - sum(held().values())
    assert room > 0
    before = index.stats().evicted_in_all
    store("new", range(5_000, 5_000 + room), 5)
    assert (sum(held().values()), index.stats().evicted_in_all) == (2_000, before)
    store("new", range(9_000, 9_001), 6)
    assert sum(held().values()) <= 2_000
    assert index.stats().evicted_in_all > before


def restored(limits: IndexLimits, blocks: int, *, copies: int) -> tuple[PrefixIndex, int, int]:
    """What these limits leave of a snapshot of blocks, the first of them seen longest ago; source and context."""
    index = PrefixIndex(IndexLimits(ttl_ticks=0))
    source, context = index.add_source(), index.context("m", None, 1, 0)
    for block in range(blocks):
        for _ in range(copies):
            store_block(index, source, context, block, block)
    writing = index.start_export()
    frames = export_frames(writing, writing.claims, blocks + 1, lambda: None)
    slots = index.slots()
    writing.close()
    fresh = PrefixIndex(limits)
    at, there = fresh.add_source(), fresh.context("m", None, 1, 0)
    importing = fresh.start_import(saved_at=blocks, elapsed=0, now=blocks)
    importing.expect(other_names=0, entries={there: blocks})
    for slot in slots:
        importing.slot(slot, context=there, source=at)
    for frame in frames:
        assert importing.frame(frame)
    while not importing.settle(100):
        pass
    return fresh, at, there


def store_block(index: PrefixIndex, source: int, context: int, block: int, now: int) -> None:
    index.store(
        source,
        context,
        tier=0,
        group=0,
        engine_hashes=struct.pack("<Q", block + 1),
        parent=None,
        token_ids=struct.pack("<I", block),
        extra_keys=None,
        now=now,
        count_copies=True,
    )


@one_context
def test_what_was_evicted_from_a_snapshot_leaves_no_copies(limits: IndexLimits) -> None:
    """A frame tells of copies behind all of its blocks, some of which had no room any more."""
    blocks = 3 * CAPACITY
    index, source, context = restored(limits, blocks, copies=2)
    held = index.contexts()[0].prefixes
    assert 0 < held <= CAPACITY
    assert index.stats().copies == held
    store_block(index, source, context, 0, blocks)
    result = index.remove(source, tier=0, group=0, engine_hashes=struct.pack("<Q", 1), now=blocks)
    assert result.removed_blocks == 1
    assert not index.match_tokens(context, struct.pack("<I", 0), None, blocks)


@pytest.mark.parametrize("both", [(20_000, 10**8), (10**8, 20_000)], ids=["in-one", "in-all"])
def test_a_snapshot_takes_no_room_for_what_will_be_evicted(both: tuple[int, int]) -> None:
    blocks, (in_one, in_all) = min(both), both

    def taken(expected: int) -> int:
        limits = IndexLimits(ttl_ticks=0, prefixes_per_context_max=in_one, prefixes_max=in_all)
        index = PrefixIndex(limits)
        source, context = index.add_source(), index.context("m", None, 1, 0)
        index.start_import(saved_at=0, elapsed=0, now=0).expect(other_names=0, entries={context: expected})
        index.list_all(1, 0)
        index.store(
            source,
            context,
            tier=0,
            group=0,
            engine_hashes=random.Random(1).randbytes(8 * blocks),
            parent=None,
            token_ids=bytes(4 * blocks),
            extra_keys=None,
            now=0,
        )
        assert index.contexts()[0].prefixes == blocks
        return index.stats().bytes

    assert taken(100 * blocks) == taken(blocks)


@pytest.mark.parametrize("chain", [1, 7])
def test_what_a_dropped_context_left_is_not_taken_for_a_full_contexts_own(chain: int) -> None:
    """In a full index the blocks of dropped contexts make room, run by run, and what stands behind a run that went is
    then older than all that the context which took its place may lose."""
    limits = IndexLimits(ttl_ticks=0, contexts_max=4, prefixes_per_context_max=500, prefixes_max=2_000)
    index = PrefixIndex(limits)
    source = index.add_source()
    r = random.Random(1)

    def store(context: int, blocks: int, now: int) -> None:
        names, tokens = r.randbytes(8 * blocks), r.randbytes(4 * blocks)
        index.store(
            source,
            context,
            tier=0,
            group=0,
            engine_hashes=names,
            parent=None,
            token_ids=tokens,
            extra_keys=None,
            now=now,
        )

    for context in [index.context(f"dropped{i}", None, 1, 0) for i in range(4)]:
        store(context, 500, 0)
    full, *_ = [index.context(f"kept{i}", None, 1, 1) for i in range(4)]
    for now in range(1, 1_000 // chain):
        store(full, chain, now)
    stats = index.stats()
    assert stats.prefixes <= 500
    assert stats.evicted == 1_000 // chain * chain - chain - stats.prefixes
