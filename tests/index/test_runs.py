"""Entries that follow the one before them are in no table: whatever comes and goes, each is found, and found once.

Here capacity evicts, contexts go, and chains grow a block at a time beside each other, so that runs of entries break off
anywhere. What the index names says what its matches must find.
"""

from __future__ import annotations

import random
import struct

import pytest

from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits
from app.index.prefix_index import IndexLimits, PrefixIndex

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
        kind = self.r.randrange(20)
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
        else:
            self.index.clear(self.sources[pod], tier=self.r.choice([None, 0]))

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
        for _ in range(2):  # the pass under way, and a whole one
            while not self.index.sweep(self.now, 10_000).idle:
                pass
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
    while not runs.index.list_all(7):  # while more comes and goes
        runs.step()
    runs.check_matches()
    runs.check_each()


def test_to_be_listed_takes_memory_only_when_asked_for() -> None:
    blocks = 100_000
    path = tuple(range(blocks))
    index = PrefixIndex(IndexLimits())
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
    before = index.stats().bytes
    slices = 1
    while not index.list_all(1000):
        slices += 1
    assert slices >= blocks // 1000
    assert index.stats().bytes - before > 7 * blocks
    assert index.list_all(1)
