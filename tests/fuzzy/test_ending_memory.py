"""Whatever is stored in the fuzzy index, removed or asked, and whichever time that it asks for memory and gets none: made
again it does what it would have done, and nothing that is stored is lost meanwhile."""

from __future__ import annotations

import random
from array import array

import pytest

from app import _native
from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits
from tests import ending_memory

pytestmark = ending_memory.MARK

BLOCK_SIZE = 2
CONTEXT = 7


class Bench:
    def __init__(self, missing: int, *, kinds: int) -> None:
        self.random = random.Random(kinds)
        self.missing = missing
        self.kinds = kinds  # of tokens: fewer of them, more blocks of equal content
        self.index = FuzzyIndex(FuzzyLimits())
        self.index.add_context(CONTEXT, BLOCK_SIZE)
        self.blocks: dict[int, bytes] = {}  # prefix hash -> tokens

    def make(self, blocks: int) -> dict[int, bytes]:
        return {
            self.random.getrandbits(64): array(
                "I", [self.random.randrange(self.kinds), self.random.randrange(self.kinds)]
            ).tobytes()
            for _ in range(blocks)
        }

    def store(self, blocks: dict[int, bytes]) -> None:
        self.index.store(CONTEXT, array("Q", blocks).tobytes(), b"".join(blocks.values()))
        self.blocks |= blocks

    def remove(self, prefixes: list[int]) -> None:
        self.index.remove(CONTEXT, array("Q", prefixes).tobytes())
        for prefix in prefixes:
            self.blocks.pop(prefix, None)

    def change(self, blocks: int) -> None:
        """What went may come back."""
        known = list(self.blocks)
        coming = self.make(blocks)
        ending_memory.insist(lambda: self.store(coming), self.missing)
        going = self.random.sample(known, min(len(known), blocks)) + list(coming)[:2]
        again = {prefix: self.blocks[prefix] for prefix in going[: blocks // 4]}
        ending_memory.insist(lambda: self.remove(going), self.missing)
        ending_memory.insist(lambda: self.store(again), self.missing)
        self.check()

    def check(self) -> None:
        assert set(self.index.prefix_hashes(CONTEXT)) == set(self.blocks)

    def ask(self) -> None:
        tokens = self.random.choice(list(self.blocks.values()))
        while not ending_memory.insist(
            lambda: self.index.core.exact(CONTEXT, tokens, 64, 0, 8)[1], self.missing
        ):
            pass  # the context is roused, a slice at a time

        def query() -> _native.NearQuery:
            return _native.NearQuery(self.index.core, CONTEXT, tokens, bytes(4), 2, 256)

        def run(query: _native.NearQuery) -> None:
            while not query.step(4_096):
                pass
            query.take(64)

        for _ in ending_memory.attempts(query, run, self.missing):
            pass  # whoever asked asks again
        windows = self.index.grid(CONTEXT, tokens, 2, lambda prefixes: prefixes)
        found = {match.prefix_hash for match in windows[0].matches if match.exact}
        same = {other for other, each in self.blocks.items() if each == tokens}
        assert found == same if len(same) <= 200 else found <= same
        self.check()


@pytest.mark.parametrize("missing", [1, ending_memory.FOR_EVER])
@pytest.mark.parametrize(("kinds", "blocks"), [(1 << 32, 600), (12, 600), (1 << 32, 12_000)])
def test_what_is_stored_removed_and_asked_without_memory(kinds: int, blocks: int, missing: int) -> None:
    bench = Bench(missing, kinds=kinds)
    bench.store(bench.make(blocks))
    bench.change(40)
    bench.ask()
    for size in (3, 200, 40):
        bench.change(size)
        bench.ask()
    ending_memory.insist(lambda: bench.remove(list(bench.blocks)), missing)
    bench.check()
    ending_memory.insist(lambda: bench.index.drop_context(CONTEXT), missing)
    ending_memory.insist(lambda: bench.index.add_context(CONTEXT, BLOCK_SIZE), missing)
    for _ in range(1_000):  # what is left of the context goes in slices
        bench.index.store(CONTEXT, b"", b"")
    fresh = Bench(missing, kinds=kinds).index.stats()
    assert bench.index.stats() == fresh


@pytest.mark.parametrize("missing", [1, ending_memory.FOR_EVER])
def test_a_table_that_grows_without_memory_finds_all(missing: int) -> None:
    chance = random.Random(1)
    table = _native.NearTable(6)
    known: list[int] = []

    def insert(simhash: int) -> None:
        table.insert(array("Q", [simhash]).tobytes())

    for number in range(1_000):
        known.append(chance.getrandbits(64))
        ending_memory.insist(lambda: table.insert(array("Q", known[-1:]).tobytes()), missing)
        if number % 12 == 11:
            ending_memory.insist(lambda: table.split(1), missing)
    rows = array("I", table.search(array("Q", known).tobytes(), 0))
    assert set(rows[::3]) == set(range(1_000)), "each is found by its own SimHash"
