"""Oracle and native core side by side over random histories: nothing that a caller can ask tells them apart.

The universe is small on purpose. Prompts are paths over three kinds of block, so that prefixes meet. Engine
hashes come from a seed of the source and are folded into a few values (or not), so that one hash means
different content on different sources, and after a clear on the same one. Time moves by the ttl,
one tick less or more, one tick, or none.

After every step both must name the same holders of every prefix ever seen: `holders` changes nothing, so it
may be asked all the time. Matches refresh what they find, so they are steps of their own. What may lag until
it is swept (counts) is compared after whole sweeps; in between, sweeps stop anywhere.

One difference is known (native/prefix_index.hpp) and kept out of the way: where a slot calls one prefix by two
names and the prefix expires, a name that no sweep has met comes back with the prefix. So second names are given
only where nothing expires.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import hypothesis.strategies as st
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.index.prefix_index import Depths, IndexLimits, PrefixIndex
from tests.reference import ReferenceIndex

CONTEXTS = [("m", None, 2), ("m", "tuned", 2), ("m", None, 4), ("n", None, 2)]
SOURCES = 3
TTL = 10
UNBOUNDED = 1_000_000
SALT = b"\x91\xa4salt"

Path = tuple[int, ...]

# Weighted, so that steps of one history meet: most are about one source, one context and a few prompts.
spots = st.sampled_from([0, 0, 0, 1, 2])
contexts = st.sampled_from([0, 0, 0, 1, 2, 3])
tiers = st.sampled_from([0, 0, 0, 1, 3])
groups = st.sampled_from([0, 0, 0, 1])
paths = st.one_of(
    st.sampled_from([(0,), (0, 1), (0, 1, 0), (0, 0), (0, 1, 1, 0), (2, 0)]),
    st.lists(st.sampled_from([0, 0, 1, 2]), min_size=1, max_size=6).map(tuple),
)


def block_tokens(kind: int, block_size: int) -> bytes:
    return struct.pack(f"<{block_size}I", *[kind % 2] * block_size)


def block_keys(path: Path) -> tuple[bytes, ...] | None:
    return tuple(SALT if kind == 2 else b"" for kind in path) if 2 in path else None


@dataclasses.dataclass
class Twin:
    """One thing that both know, under a number of each."""

    oracle: int
    native: int
    seed: int = 0


class SideBySide(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.seen: dict[tuple[str, str | None, int], set[int]] = {}
        self.prompts: set[Path] = set()

    @initialize(
        ttl=st.sampled_from([0, TTL, TTL, TTL]),
        contexts_max=st.sampled_from([2, UNBOUNDED, UNBOUNDED]),
        orphan_blocks_max=st.sampled_from([0, 3, UNBOUNDED, UNBOUNDED]),
        speculative_blocks_max=st.sampled_from([2, UNBOUNDED]),
        names=st.sampled_from([6, 24, 2**64]),
        count_copies=st.sampled_from([True, True, True, False]),
        seeds=st.lists(st.integers(0, 1), min_size=SOURCES, max_size=SOURCES),
    )
    def begin(
        self,
        ttl: int,
        contexts_max: int,
        orphan_blocks_max: int,
        speculative_blocks_max: int,
        names: int,
        count_copies: bool,
        seeds: list[int],
    ) -> None:
        self.limits = IndexLimits(
            ttl_ticks=ttl,
            contexts_max=contexts_max,
            prefixes_per_context_max=UNBOUNDED,
            orphan_blocks_max=orphan_blocks_max,
            speculative_blocks_max=speculative_blocks_max,
        )
        self.oracle = ReferenceIndex(self.limits)
        self.native = PrefixIndex(self.limits)
        self.names = names
        self.count_copies = count_copies
        self.sources = [Twin(self.oracle.add_source(), self.native.add_source(), seed) for seed in seeds]

    # -- events

    @rule(spot=spots, context=contexts, tier=tiers, group=groups, path=paths, start=st.integers(0, 5))
    def store(self, spot: int, context: int, tier: int, group: int, path: Path, start: int) -> None:
        start = min(start, len(path) - 1)
        parent = self.name(spot, path[:start]) if start else None
        self.store_blocks(spot, context, tier, group, path, start, parent)

    @rule(spot=spots, context=contexts, tier=tiers, path=paths)
    def store_from_the_root(self, spot: int, context: int, tier: int, path: Path) -> None:
        self.store_blocks(spot, context, tier, 0, path, 0, None)

    @precondition(lambda self: self.limits.ttl_ticks == 0)
    @rule(spot=spots, path=paths)
    def store_under_another_name(self, spot: int, path: Path) -> None:
        """One prefix by two names in one slot, as an engine does that hashes the same tokens anew."""
        source = self.sources[spot]
        source.seed ^= 1
        self.store_blocks(spot, 0, 0, 0, path, 0, None)
        source.seed ^= 1

    @rule(spot=spots, context=contexts, path=paths)
    def store_child_before_parent(self, spot: int, context: int, path: Path) -> None:
        for start in reversed(range(len(path))):
            parent = self.name(spot, path[:start]) if start else None
            self.store_blocks(spot, context, 0, 0, path[: start + 1], start, parent)

    @precondition(lambda self: self.limits.ttl_ticks == 0)
    @rule(spot=spots, context=contexts, path=paths, parent=paths)
    def store_under_any_parent(self, spot: int, context: int, path: Path, parent: Path) -> None:
        self.store_blocks(spot, context, 0, 0, path, 0, self.name(spot, parent))

    def store_blocks(
        self, spot: int, context: int, tier: int, group: int, path: Path, start: int, parent: int | None
    ) -> None:
        twin = self.context_of(context)
        block_size = CONTEXTS[context][2]
        more: dict[str, Any] = {
            "tier": tier,
            "group": group,
            "engine_hashes": self.pack_names(spot, [path[: i + 1] for i in range(start, len(path))]),
            "parent": parent,
            "token_ids": b"".join(block_tokens(kind, block_size) for kind in path[start:]),
            "extra_keys": block_keys(path[start:]),
            "now": self.now,
            "count_copies": self.count_copies,
        }
        source = self.sources[spot]
        assert self.native.store(source.native, twin.native, **more) == self.oracle.store(
            source.oracle, twin.oracle, **more
        )
        self.prompts.add(path)

    @rule(spot=spots, tier=tiers, group=groups, path=paths)
    def place(self, spot: int, tier: int, group: int, path: Path) -> None:
        more: dict[str, Any] = {
            "tier": tier,
            "group": group,
            "engine_hashes": self.pack_names(spot, [path[: i + 1] for i in range(len(path))]),
            "now": self.now,
            "count_copies": self.count_copies,
        }
        source = self.sources[spot]
        assert self.native.place(source.native, **more) == self.oracle.place(source.oracle, **more)

    @rule(spot=spots, tier=tiers, group=groups, path=paths, last=st.integers(1, 3))
    def remove(self, spot: int, tier: int, group: int, path: Path, last: int) -> None:
        nodes = [path[: i + 1] for i in reversed(range(len(path)))][:last]
        more: dict[str, Any] = {
            "tier": tier,
            "group": group,
            "engine_hashes": self.pack_names(spot, nodes),
            "now": self.now,
        }
        source = self.sources[spot]
        assert self.native.remove(source.native, **more) == self.oracle.remove(source.oracle, **more)

    @rule(
        spot=spots, tier=st.sampled_from([None, 0, 0, 1]), only=st.none() | contexts, seed=st.integers(0, 2)
    )
    def clear(self, spot: int, tier: int | None, only: int | None, seed: int) -> None:
        twin = None if only is None else self.known_context(only)
        if only is not None and twin is None:
            return
        source = self.sources[spot]
        self.oracle.clear(source.oracle, tier=tier, context=twin.oracle if twin else None)
        self.native.clear(source.native, tier=tier, context=twin.native if twin else None)
        if only is None and tier is None:
            source.seed = seed  # the engine may have come back with other hashes

    @rule(spot=spots)
    def drop_and_add_a_source(self, spot: int) -> None:
        source = self.sources[spot]
        self.oracle.drop_source(source.oracle)
        self.native.drop_source(source.native)
        self.sources[spot] = Twin(self.oracle.add_source(), self.native.add_source(), source.seed)

    # -- queries

    @rule(context=contexts, path=paths, cut=st.integers(0, 2))
    def match_tokens(self, context: int, path: Path, cut: int) -> None:
        twin = self.known_context(context)
        if twin is not None:
            self.match_path(twin, context, path, cut)

    @rule(context=contexts)
    def match_every_prompt(self, context: int) -> None:
        twin = self.known_context(context)
        if twin is not None:
            for path in sorted(self.prompts):
                self.match_path(twin, context, path, 0)

    def match_path(self, twin: Twin, context: int, path: Path, cut: int) -> None:
        tokens = b"".join(block_tokens(kind, CONTEXTS[context][2]) for kind in path)
        tokens = tokens[: len(tokens) - 4 * cut]
        keys = block_keys(path)
        self.compare_rows(
            self.oracle.match_tokens(twin.oracle, tokens, keys, self.now),
            self.native.match_tokens(twin.native, tokens, keys, self.now),
        )

    @rule(context=contexts, path=paths, jumble=st.booleans())
    def match_hashes(self, context: int, path: Path, jumble: bool) -> None:
        twin = self.known_context(context)
        if twin is not None:
            hashes = self.prefix_hashes(context, path)
            if jumble:
                hashes = hashes[8:] + hashes[:8]
            self.compare_rows(
                self.oracle.match_hashes(twin.oracle, hashes, self.now),
                self.native.match_hashes(twin.native, hashes, self.now),
            )

    @rule(spot=spots, context=contexts, path=paths, ttl=st.sampled_from([1, TTL - 1, TTL, TTL + 1]))
    def add_speculative(self, spot: int, context: int, path: Path, ttl: int) -> None:
        if self.limits.speculative_blocks_max < UNBOUNDED:
            self.sweep_everything()  # what is over may count until then
        twin = self.context_of(context)
        source = self.sources[spot]
        hashes = self.prefix_hashes(context, path)
        assert self.native.add_speculative(
            twin.native, source.native, hashes, ttl, self.now
        ) == self.oracle.add_speculative(twin.oracle, source.oracle, hashes, ttl, self.now)

    # -- time

    @rule(ticks=st.sampled_from([0, 1, TTL - 1, TTL, TTL + 1]))
    def wait(self, ticks: int) -> None:
        self.now += ticks

    @rule(visits=st.sampled_from([1, 2, 7, 40]))
    def sweep_a_slice(self, visits: int) -> None:
        self.native.sweep(self.now, visits)

    @rule()
    def count_after_sweeping(self) -> None:
        self.sweep_everything()
        self.oracle.sweep(self.now, 1)
        for source in self.sources:
            assert self.native.blocks_by_tier(source.native) == self.oracle.blocks_by_tier(source.oracle)
            assert self.native.orphan_blocks(source.native) == self.oracle.orphan_blocks(source.oracle)
        native, oracle = self.native.stats(), self.oracle.stats()
        for name in ("contexts", "prefixes", "copies", "orphan_blocks", "speculative_blocks"):
            assert getattr(native, name) == getattr(oracle, name), name
        for name in ("contexts_evicted", "orphans_dropped", "speculative_refused"):
            assert getattr(native, name) == getattr(oracle, name), name

    @rule()
    def drop_everything(self) -> None:
        """And nothing is left of anything."""
        for spot in range(SOURCES):
            self.drop_and_add_a_source(spot)
        self.sweep_everything()
        stats = self.native.stats()
        left = (stats.prefixes, stats.engine_keys, stats.copies, stats.holder_sets)
        assert left == (0, 0, 0, 0)
        assert (stats.orphan_blocks, stats.speculative_blocks) == (0, 0)

    # -- what must always hold

    @invariant()
    @precondition(lambda self: hasattr(self, "oracle"))
    def same_picture(self) -> None:
        spots_of = {source.native: spot for spot, source in enumerate(self.sources)}
        spots_of_oracle = {source.oracle: spot for spot, source in enumerate(self.sources)}
        for context, key in enumerate(CONTEXTS):
            twin = self.known_context(context)
            if twin is None:
                continue
            self.seen.setdefault(key, set()).update(self.oracle.prefixes(twin.oracle))
            for prefix in self.seen[key]:
                here = [(spots_of[s], t, g) for s, t, g in self.native.holders(twin.native, prefix, self.now)]
                there = self.oracle.holders(twin.oracle, prefix, self.now)
                assert sorted(here) == sorted((spots_of_oracle[s], t, g) for s, t, g in there)
        assert [(spots_of[s], n) for s, n in self.drops(self.native)] == [
            (spots_of_oracle[s], n) for s, n in self.drops(self.oracle)
        ]

    def drops(self, index: PrefixIndex | ReferenceIndex) -> list[tuple[int, int]]:
        known = {source.native if index is self.native else source.oracle for source in self.sources}
        totals: dict[int, int] = {}
        for source, blocks in index.orphan_drops():
            if source in known:
                totals[source] = totals.get(source, 0) + blocks
        return sorted(totals.items())

    # -- how

    def name(self, spot: int, path: Path) -> int:
        """What the engine of this source calls the last block of `path`."""
        return xxhash.xxh64_intdigest(bytes(path), seed=self.sources[spot].seed) % self.names

    def pack_names(self, spot: int, nodes: list[Path]) -> bytes:
        return struct.pack(f"<{len(nodes)}Q", *(self.name(spot, node) for node in nodes))

    def prefix_hashes(self, context: int, path: Path) -> bytes:
        model, lora, block_size = CONTEXTS[context]
        tokens = b"".join(block_tokens(kind, block_size) for kind in path)
        hashes = self.native.prefix_hashes(model, lora, block_size, tokens, block_keys(path))
        assert hashes == self.oracle.prefix_hashes(model, lora, block_size, tokens, block_keys(path))
        return hashes

    def context_of(self, context: int) -> Twin:
        model, lora, block_size = CONTEXTS[context]
        return Twin(
            self.oracle.context(model, lora, block_size, self.now),
            self.native.context(model, lora, block_size, self.now),
        )

    def known_context(self, context: int) -> Twin | None:
        model, lora, block_size = CONTEXTS[context]
        found = [
            [info.id for info in index.find_contexts(model, lora) if info.block_size == block_size]
            for index in (self.oracle, self.native)
        ]
        assert len(found[0]) == len(found[1]) <= 1
        return Twin(found[0][0], found[1][0]) if found[0] else None

    def compare_rows(self, oracle: list[Depths], native: list[Depths]) -> None:
        spots_of = {source.native: spot for spot, source in enumerate(self.sources)}
        spots_of_oracle = {source.oracle: spot for spot, source in enumerate(self.sources)}
        assert sorted((spots_of[row.source], row.tiers, row.speculative) for row in native) == sorted(
            (spots_of_oracle[row.source], row.tiers, row.speculative) for row in oracle
        )

    def sweep_everything(self) -> None:
        """The pass that is under way, then a whole one."""
        for _ in range(2):
            for _ in range(10_000):
                if self.native.sweep(self.now, 1_000).idle:
                    break
            else:
                raise AssertionError("a sweep does not come to an end")


TestSideBySide = SideBySide.TestCase
TestSideBySide.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
