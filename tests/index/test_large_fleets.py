"""Fleets whose slots do not fit in one word of a holder set: who holds what, and how deep, as the oracle says.

Each step is taken by many pods that follow each other, so that sets begin and end in any word, and what a match meets is
now one set from its first block to its last, now another at each. Engines of one seed have the same names for a block,
and those of another have others: so who owns a name are some of those who hold its block.
"""

from __future__ import annotations

import functools
import itertools
import random
import struct
from typing import Any

import pytest

from app.index.interface import Index
from app.index.prefix_index import IndexLimits, PrefixIndex
from tests.reference import ReferenceIndex

BLOCK_SIZE = 2
PODS = 140
PROMPTS = [(1, 2, 3, 4, 5, 6), (1, 2, 3, 7, 8), (9, 10)]

Path = tuple[int, ...]


def tokens(path: Path) -> bytes:
    return b"".join(struct.pack(f"<{BLOCK_SIZE}I", *[block] * BLOCK_SIZE) for block in path)


@functools.cache
def engine_hashes(pod: int, path: Path, first: int = 0) -> bytes:
    seed = pod // 50
    return b"".join(random.Random(f"{seed} {path[: n + 1]}").randbytes(8) for n in range(first, len(path)))


class LargeFleet:
    def __init__(self, r: random.Random) -> None:
        self.r = r
        self.native = PrefixIndex(IndexLimits())
        self.both: tuple[Index, Index] = (ReferenceIndex(IndexLimits()), self.native)
        self.contexts = [index.context("m", None, BLOCK_SIZE, 0) for index in self.both]
        self.sources = [[index.add_source() for _ in range(PODS)] for index in self.both]

    def some_pods(self) -> range:
        begin = self.r.choice([0, 0, 60, 70, self.r.randrange(PODS)])
        return range(begin, min(PODS, begin + self.r.choice([1, 2, 10, 64, 70, PODS])))

    def some_path(self) -> Path:
        path = self.r.choice(PROMPTS)
        return path[: self.r.choice([len(path), len(path), self.r.randint(1, len(path))])]

    def some_place(self) -> dict[str, Any]:
        return {"tier": self.r.choice([0, 0, 0, 1, 2]), "group": self.r.choice([0, 0, 0, 1]), "now": 0}

    def store(self) -> None:
        path, place = self.some_path(), self.some_place()
        for pod in self.some_pods():
            for index, context, sources in zip(self.both, self.contexts, self.sources, strict=True):
                index.store(
                    sources[pod],
                    context,
                    engine_hashes=engine_hashes(pod, path),
                    parent=None,
                    token_ids=tokens(path),
                    extra_keys=None,
                    **place,
                )

    def remove(self) -> None:
        path, place = self.some_path(), self.some_place()
        first = self.r.randrange(len(path))
        for pod in self.some_pods():
            for index, sources in zip(self.both, self.sources, strict=True):
                index.remove(sources[pod], engine_hashes=engine_hashes(pod, path, first), **place)

    def remove_all(self) -> None:
        """By the names that are left of it, as often as each was stored."""
        for pod in range(PODS):
            for path, tier, group in itertools.product(PROMPTS, range(3), range(2)):
                names, source = engine_hashes(pod, path), self.sources[1][pod]
                while self.native.remove(
                    source, tier=tier, group=group, engine_hashes=names, now=0
                ).removed_blocks:
                    pass

    def expect(self) -> None:
        path, pod = self.some_path(), self.r.randrange(PODS)
        for index, context, sources in zip(self.both, self.contexts, self.sources, strict=True):
            hashes = index.prefix_hashes("m", None, BLOCK_SIZE, tokens(path), None)
            index.add_speculative(context, sources[pod], hashes, 20, 0)

    def clear(self) -> None:
        tier = self.r.choice([None, 0, 1])
        for pod in self.some_pods():
            for index, sources in zip(self.both, self.sources, strict=True):
                index.clear(sources[pod], tier=tier)

    def leave(self) -> None:
        for pod in self.some_pods():
            for index, sources in zip(self.both, self.sources, strict=True):
                index.drop_source(sources[pod])
                sources[pod] = index.add_source()

    def sweep(self) -> None:
        self.native.sweep(0, self.r.choice([1, 10, 1_000]))

    def match(self, path: Path) -> list[dict[int, tuple[tuple[int, int, int, int], int]]]:
        found = []
        for index, context, sources in zip(self.both, self.contexts, self.sources, strict=True):
            rows = index.match_tokens(context, tokens(path), None, 0)
            found.append({sources.index(row.source): (row.tiers, row.speculative) for row in rows})
            assert len(found[-1]) == len(rows), "a row for each pod"
        return found


@pytest.mark.parametrize("seed", range(12))
def test_matches_as_the_oracle(seed: int) -> None:
    r = random.Random(seed)
    fleet = LargeFleet(r)
    steps = [fleet.store, fleet.remove, fleet.clear, fleet.leave, fleet.sweep]
    weights = [6, 2, 1, 1, 2]
    if r.random() < 0.3:
        steps.append(fleet.expect)
        weights.append(1)
    for _ in range(20):
        r.choices(steps, weights)[0]()
        for path in (*PROMPTS, PROMPTS[0][:2], (*PROMPTS[2], 11)):
            oracle, native = fleet.match(path)
            assert native == oracle
    fleet.remove_all()
    assert not any(any(fleet.native.blocks_by_tier(source)) for source in fleet.sources[1])
    for _ in range(2):  # the pass under way, and a whole one
        while not fleet.native.sweep(0, 1_000).idle:
            pass
    stats = fleet.native.stats()
    assert (stats.prefixes, stats.engine_keys, stats.holder_sets) == (0, 0, 0)
