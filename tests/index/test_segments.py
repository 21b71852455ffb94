"""Tables of many segments: each block is found after every split and every shrinking, until the last one is gone.

The prefixes are chosen, and some of them badly: they share their leading bits, so that segments split unevenly and grow
past the size at which others split.
"""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest

from app.index.prefix_index import IndexLimits, PrefixIndex
from tests.serving.test_serving import DEADLINE_S

Draw = Callable[[], int]


def uint64s(values: Iterable[int]) -> bytes:
    packed = list(values)
    return struct.pack(f"<{len(packed)}Q", *packed)


class Blocks:
    """One slot's blocks: engine hash -> prefix, here and in the index."""

    def __init__(self, r: random.Random) -> None:
        self.r = r
        self.index = PrefixIndex(IndexLimits(ttl_ticks=0))
        self.source = self.index.add_source()
        self.context = self.index.context("m", None, 1, 0)
        self.held: dict[int, int] = {}

    def sharing(self, bits: int) -> Draw:
        """Prefixes with the same leading bits."""
        top = 0x43210ABCDEF12345 >> (64 - bits) << (64 - bits)
        return lambda: top | self.r.getrandbits(64 - bits)

    def store(self, count: int, prefix: Draw) -> None:
        more = {len(self.held) + i: prefix() for i in range(count)}
        self.index.store_prefixes(
            self.source,
            self.context,
            tier=0,
            group=0,
            engine_hashes=uint64s(more),
            prefix_hashes=uint64s(more.values()),
            copies=None,
            now=0,
        )
        self.held |= more

    def remove(self, names: list[int]) -> None:
        removed = self.index.remove(self.source, tier=0, group=0, engine_hashes=uint64s(names), now=0)
        assert (removed.removed_blocks, removed.unknown_blocks) == (len(names), 0)
        for name in names:
            del self.held[name]

    def check(self) -> None:
        """By its prefix, and by its name."""
        held = self.index.holdings(self.context, uint64s(self.held.values()), 0)
        assert [h.prefix for h in held] == list(range(len(self.held)))
        named = dict(self.held)
        cursor: int | None = 0
        while cursor is not None:
            runs, cursor = self.index.names(cursor, 100_000, 0)
            for run in runs:
                columns = (struct.iter_unpack("<Q", c) for c in (run.engine_hashes, run.prefix_hashes))
                for (name,), (prefix,) in zip(*columns, strict=True):
                    assert named.pop(name) == prefix
        assert named == {}
        assert self.index.contexts()[0].prefixes == len(self.held)


@pytest.mark.parametrize("seed", range(3))
def test_every_block_is_found_until_it_is_removed(seed: int) -> None:
    r = random.Random(seed)
    blocks = Blocks(r)
    for _ in range(8):
        blocks.store(r.randrange(1_000, 7_000), blocks.sharing(r.choice([0, 0, 0, 3, 7])))
        blocks.check()
    names = list(blocks.held)
    r.shuffle(names)
    while names:
        part = [names.pop() for _ in range(min(len(names), 6_000))]
        blocks.remove(part)
        blocks.check()
    stats = blocks.index.stats()
    assert (stats.prefixes, stats.engine_keys, stats.holder_sets) == (0, 0, 0)


def test_a_half_that_needs_fewer_buckets_than_the_whole_had() -> None:
    """A cluster makes a segment large at a depth where the next splits leave little beside it; that little then grows
    and splits itself, by what its tags tell."""
    blocks = Blocks(random.Random(1))
    blocks.store(60_000, blocks.sharing(0))
    blocks.store(80_000, blocks.sharing(11))
    blocks.store(60_000, blocks.sharing(0))
    blocks.store(10_000, blocks.sharing(11))
    blocks.store(30_000, blocks.sharing(8))
    blocks.check()


def test_announced_hashes_of_any_choice_lie_apart() -> None:
    """In a process that can be ended: numbers one behind the other were one cluster, and took minutes."""
    script = """
import array
from app.index.prefix_index import IndexLimits, PrefixIndex
index = PrefixIndex(IndexLimits())
context, source = index.context("m", None, 16, 0), index.add_source()
announced = array.array("Q", range(2**63, 2**63 + 250_000))
for _ in range(3):
    assert index.add_speculative(context, source, announced.tobytes(), 100, 0) == len(announced)
rows = index.match_hashes(context, announced[:1_000].tobytes(), 0)
assert [(row.source, row.speculative) for row in rows] == [(source, 1_000)]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=DEADLINE_S)
