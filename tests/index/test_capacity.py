"""A full context: never past its bound, and what goes is what was seen longest ago.

Which of several equally old entries goes is free, so the two implementations are not compared with each other here:
each is held to the rule, with the test keeping the book of what was last seen when.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits
from app.index.interface import Index
from app.index.prefix_index import IndexLimits, PrefixIndex
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


class Book:
    """The index, and when each entry was last seen by what was done to it."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.context = index.context("m", None, 1, 0)
        self.source = index.add_source()
        self.now = 0
        self.last_seen: dict[int, int] = {}

    def tokens(self, prompt: int, length: int) -> bytes:
        return struct.pack(f"<{length}I", *[prompt] * length)

    def prefixes(self, prompt: int, length: int) -> tuple[int, ...]:
        packed = self.index.prefix_hashes("m", None, 1, self.tokens(prompt, length), None)
        return struct.unpack(f"<{length}Q", packed)

    def held(self) -> set[int]:
        return {p for p in self.last_seen if self.index.holders(self.context, p, self.now)}

    def store(self, prompt: int, length: int) -> None:
        before = self.held()
        self.last_seen = {p: seen for p, seen in self.last_seen.items() if p in before}
        stored = self.prefixes(prompt, length)
        self.index.store(
            self.source,
            self.context,
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
        rows = self.index.match_tokens(self.context, self.tokens(prompt, length), None, self.now)
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


@given(steps=steps)
@settings(max_examples=150, deadline=None)
def test_what_was_evicted_is_not_found_by_content(steps: list[tuple[str, int, int, int]]) -> None:
    contents = FuzzyIndex(FuzzyLimits())
    book = Book(PrefixIndex(IndexLimits(ttl_ticks=0, prefixes_per_context_max=CAPACITY), contents))
    for what, prompt, length, wait in steps:
        book.now += wait
        if what == "store":
            book.store(prompt, length)
        elif what == "remove":
            book.remove(prompt, length)
        assert sorted(contents.prefix_hashes(book.context)) == sorted(book.held())


@pytest.mark.parametrize("make", [ReferenceIndex, PrefixIndex], ids=["oracle", "native"])
@given(steps=steps)
@settings(max_examples=150, deadline=None)
def test_full_context_gives_up_what_was_seen_longest_ago(
    make: Callable[[IndexLimits], Index], steps: list[tuple[str, int, int, int]]
) -> None:
    book = Book(make(IndexLimits(ttl_ticks=0, prefixes_per_context_max=CAPACITY)))
    for what, prompt, length, wait in steps:
        book.now += wait
        if what == "store":
            book.store(prompt, length)
        elif what == "match":
            book.match(prompt, length)
        else:
            book.remove(prompt, length)
        assert book.index.contexts()[0].prefixes <= CAPACITY
