"""Long chains that several engines hold in part: what the index does in runs, block for block like the oracle.

The histories of test_state_machine.py go into every corner with chains of a few blocks. Here chains are longer than what
is fetched ahead, engines agree on hashes or not, and lose blocks from the tail, from the front or anywhere.
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable

import pytest

from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits
from app.index.interface import Index
from app.index.prefix_index import IndexLimits, PrefixIndex
from tests.index.test_state_machine import all_names, held_digests
from tests.reference import ReferenceIndex

BLOCK_SIZE = 4
SEEDS = (0, 0, 0, 1, 2)  # of the engines, for their hashes
TTL = 50
Path = tuple[int, ...]


def prompts(r: random.Random) -> list[Path]:
    """A trunk, branches of it and a stranger, named by the first token of each block."""
    trunk = tuple(range(1, 1 + r.randint(30, 80)))
    cuts = [r.randrange(1, len(trunk)) for _ in range(2)]
    branches = [
        trunk[:cut] + tuple(1000 * (i + 1) + k for k in range(r.randint(5, 60))) for i, cut in enumerate(cuts)
    ]
    return [trunk, *branches, tuple(range(9000, 9020))]


def token_bytes(path: Path) -> bytes:
    return b"".join(struct.pack(f"<{BLOCK_SIZE}I", *[block] * BLOCK_SIZE) for block in path)


@dataclasses.dataclass
class LongChains:
    r: random.Random
    now: int = 0

    def __post_init__(self) -> None:
        limits = IndexLimits(ttl_ticks=self.r.choice([0, TTL]), prefixes_per_context_max=10**6)
        self.oracle = ReferenceIndex(limits, has_owners=True)
        self.contents = FuzzyIndex(FuzzyLimits())
        self.native = PrefixIndex(limits, self.contents)
        self.both: tuple[Index, Index] = (self.oracle, self.native)
        self.has_ttl = limits.ttl_ticks != 0
        self.counts_copies = self.r.random() < 0.7
        self.is_folded = limits.ttl_ticks == 0 and self.r.random() < 0.3  # few hashes: engines collide
        self.is_salted = limits.ttl_ticks == 0 and not self.is_folded and self.r.random() < 0.5
        self.contexts = [index.context("m", None, BLOCK_SIZE, 0) for index in self.both]
        self.sources = [[index.add_source() for index in self.both] for _ in SEEDS]
        self.owners = [[index.add_owner() for index in self.both], [0, 0], [0, 0]]
        self.prompts = prompts(self.r)

    def name(self, seed: int, path: Path) -> int:
        name = random.Random(f"{seed}/{path}").getrandbits(64)
        return name % 500 if self.is_folded else name

    def names(self, seed: int, path: Path, begin: int = 0) -> list[int]:
        return [self.name(seed, path[: i + 1]) for i in range(begin, len(path))]

    def some_seed(self, pod: int) -> int:
        """Now and then a block has two names on one engine, as where a salt is not published."""
        return self.r.choice(SEEDS) if self.is_salted and self.r.random() < 0.3 else SEEDS[pod]

    # -- steps

    def some_path(self) -> Path:
        path = self.r.choice(self.prompts)
        return path[: self.r.choice([len(path), self.r.randint(1, len(path))])]

    def store(self) -> None:
        pod, path = self.r.randrange(len(SEEDS)), self.some_path()
        seed = self.some_seed(pod)
        begin = self.r.choice([0, 0, self.r.randrange(len(path))])
        owner = self.r.choice(self.owners)
        results = [
            index.store(
                self.sources[pod][i],
                self.contexts[i],
                tier=0,
                group=0,
                engine_hashes=struct.pack(f"<{len(path) - begin}Q", *self.names(seed, path, begin)),
                parent=self.name(seed, path[:begin]) if begin else None,
                token_ids=token_bytes(path[begin:]),
                extra_keys=None,
                now=self.now,
                count_copies=self.counts_copies,
                owner=owner[i],
            )
            for i, index in enumerate(self.both)
        ]
        assert results[0] == results[1]

    def remove(self) -> None:
        pod, path = self.r.randrange(len(SEEDS)), self.some_path()
        names = self.names(self.some_seed(pod), path)
        begin = self.r.randrange(len(names))
        part = names[begin : begin + self.r.choice([1, 3, 30, 200])]
        how = self.r.randrange(5)
        if how < 3:
            part.reverse()  # engines lose the tail first
        elif how == 3:
            self.r.shuffle(part)
        results = [
            index.remove(
                self.sources[pod][i],
                tier=0,
                group=0,
                engine_hashes=struct.pack(f"<{len(part)}Q", *part),
                now=self.now,
            )
            for i, index in enumerate(self.both)
        ]
        assert results[0] == results[1]

    def expect(self) -> None:
        pod, path = self.r.randrange(len(SEEDS)), self.some_path()
        hashes = self.oracle.prefix_hashes("m", None, BLOCK_SIZE, token_bytes(path), None)
        for i, index in enumerate(self.both):
            index.add_speculative(self.contexts[i], self.sources[pod][i], hashes, 20, self.now)

    def clear(self) -> None:
        pod = self.r.randrange(len(SEEDS))
        for i, index in enumerate(self.both):
            index.clear(self.sources[pod][i])

    def wait(self) -> None:
        self.now += self.r.choice([1, 5, TTL // 2, TTL - 1, TTL])
        self.native.sweep(self.now, self.r.choice([1, 30, 1000]))

    def step(self) -> None:
        steps: list[tuple[int, Callable[[], None]]] = [
            (10, self.store),
            (8, self.remove),
            (2, self.expect),
            (1, self.clear),
            (2, self.wait),
        ]
        self.r.choices([step for _, step in steps], weights=[weight for weight, _ in steps])[0]()

    # -- the picture

    def compare(self) -> None:
        ours = {native: oracle for oracle, native in self.sources}
        for path in self.prompts:
            oracle, native = (
                {
                    (row.source, row.tiers, row.speculative)
                    for row in index.match_tokens(context, token_bytes(path), None, self.now)
                }
                for index, context in zip(self.both, self.contexts, strict=True)
            )
            assert {(ours[source], *depths) for source, *depths in native} == {tuple(row) for row in oracle}
        oracle_names, native_names = (sorted(all_names(index, self.now, 10_000)) for index in self.both)
        assert (
            sorted((ours[source], self.contexts[0], *rest) for source, _, *rest in native_names)
            == oracle_names
        )
        if self.has_ttl:  # what has expired is counted until it is swept
            return
        for oracle_source, native_source in self.sources:
            assert self.native.blocks_by_tier(native_source) == self.oracle.blocks_by_tier(oracle_source)


@pytest.mark.parametrize("seed", range(40))
def test_long_chains(seed: int) -> None:
    machine = LongChains(random.Random(seed))
    for _ in range(100):
        machine.step()
        machine.compare()
    for i, index in enumerate(machine.both):
        for source in machine.sources:
            index.drop_source(source[i])
    for _ in range(2):
        while not machine.native.sweep(machine.now, 1_000).idle:
            pass
    stats = machine.native.stats()
    assert (stats.prefixes, stats.engine_keys, stats.copies, stats.holder_sets, stats.claims) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert held_digests(machine.native) == []
