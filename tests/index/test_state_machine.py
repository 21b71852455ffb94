"""Oracle and native core side by side over random histories: nothing that a caller can ask tells them apart.

The universe is small on purpose. Prompts are paths over three kinds of block, so that prefixes meet, and most
steps come back to something that was stored before. Engine hashes are small numbers that a seed of the source
permutes, so that one hash means different content on different sources, and on one source after a clear. Time
moves by the ttl, one tick less or more, one tick, or none.

Steps store in turn for nobody and for one of two owners.

A fuzzy index hangs on the native one, and must have its plain blocks after every sweep, and after every step those of
them that somebody holds.

After every step both must name the same holders of every prefix ever seen: `holders` changes nothing, so it
may be asked all the time. Matches refresh what they find, so they are steps of their own. What may lag until
it is swept (counts) is compared after whole sweeps; in between, sweeps stop anywhere.

One difference is known (native/prefix_index.hpp) and kept out of the way: where a slot calls one prefix by two
names and the prefix expires, a name that no sweep has met comes back with the prefix. So names are folded onto
each other, and second names given, only where nothing expires.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import struct
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app._native import hash_blocks
from app.fuzzy.fuzzy_index import FuzzyIndex, FuzzyLimits
from app.index.interface import Index
from app.index.prefix_index import Depths, IndexLimits, PrefixIndex
from tests.reference import ReferenceIndex

CONTEXTS = [("m", None, 2), ("m", "tuned", 2), ("m", None, 4), ("n", None, 2)]
SOURCES = 3
TTL = 10
UNBOUNDED = 1_000_000
SALT = b"\x91\xa4salt"

Path = tuple[int, ...]

spots = st.sampled_from([0, 0, 0, 1, 2])
contexts = st.sampled_from([0, 0, 0, 1, 2, 3])
tiers = st.sampled_from([0, 0, 0, 1, 3])
groups = st.sampled_from([0, 0, 0, 1])
paths = st.lists(st.sampled_from([0, 0, 1, 2]), min_size=1, max_size=5).map(tuple)
picks = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3, 5])  # of what was stored, the newest first
# Time that passes before a step. Not a rule of its own: Hypothesis leaves rules out of whole histories.
waits = st.sampled_from([0] * 8 + [1, 1, TTL - 1, TTL - 1, TTL, TTL, TTL + 1])


def block_tokens(kind: int, block_size: int) -> bytes:
    return struct.pack(f"<{block_size}I", *[kind % 2] * block_size)


def block_keys(path: Path) -> tuple[bytes, ...] | None:
    return tuple(SALT if kind == 2 else b"" for kind in path) if 2 in path else None


@dataclasses.dataclass(frozen=True)
class Stored:
    """Something that was stored, to come back to: blocks `start` to the end of `path`."""

    spot: int
    context: int
    tier: int
    group: int
    path: Path
    start: int


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
        self.steps = 0
        self.tokens_were_hidden = False  # blocks were stored by their prefix hashes alone
        self.stored: list[Stored] = []  # the newest last

    @initialize(
        ttl=st.sampled_from([0, TTL, TTL, TTL]),
        contexts_max=st.sampled_from([2, UNBOUNDED, UNBOUNDED]),
        orphan_blocks_max=st.sampled_from([0, 3, UNBOUNDED, UNBOUNDED]),
        speculative_blocks_max=st.sampled_from([2, UNBOUNDED]),
        folded_names=st.sampled_from([0, 6, 24]),
        count_copies=st.sampled_from([True, True, True, False]),
        seeds=st.lists(st.integers(0, 1), min_size=SOURCES, max_size=SOURCES),
    )
    def begin(
        self,
        ttl: int,
        contexts_max: int,
        orphan_blocks_max: int,
        speculative_blocks_max: int,
        folded_names: int,
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
        self.oracle = ReferenceIndex(self.limits, has_owners=True)
        self.contents = FuzzyIndex(FuzzyLimits())
        self.native = PrefixIndex(self.limits, self.contents)
        self.folded_names = 0 if ttl else folded_names
        self.count_copies = count_copies
        self.sources = [Twin(self.oracle.add_source(), self.native.add_source(), seed) for seed in seeds]
        self.owners = [Twin(0, 0), self.new_owner(), self.new_owner()]

    def new_owner(self) -> Twin:
        return Twin(self.oracle.add_owner(), self.native.add_owner())

    @property
    def owner(self) -> Twin:
        """For whom this step stores."""
        return self.owners[self.steps % len(self.owners)]

    # -- events

    @rule(spot=spots, context=contexts, tier=tiers, group=groups, path=paths, wait=waits)
    def store(self, wait: int, spot: int, context: int, tier: int, group: int, path: Path) -> None:
        self.now += wait
        self.store_blocks(Stored(spot, context, tier, group, path, 0))

    @rule(
        spot=spots,
        context=contexts,
        tier=tiers,
        group=groups,
        path=paths,
        start=st.integers(1, 3),
        wait=waits,
    )
    def store_with_any_parent(
        self, wait: int, spot: int, context: int, tier: int, group: int, path: Path, start: int
    ) -> None:
        self.now += wait
        self.store_blocks(Stored(spot, context, tier, group, path, min(start, len(path) - 1)))

    @rule(spot=spots, context=contexts, path=paths, tail=tiers)
    def store_child_before_parent(self, spot: int, context: int, path: Path, tail: int) -> None:
        for start in reversed(range(len(path))):
            tier = tail if start == len(path) - 1 else 0
            self.store_blocks(Stored(spot, context, tier, 0, path[: start + 1], start))

    @precondition(lambda self: self.stored)
    @rule(pick=picks, wait=waits)
    def store_again(self, wait: int, pick: int) -> None:
        self.now += wait
        self.store_blocks(self.earlier(pick))

    @precondition(lambda self: self.stored)
    @rule(pick=picks, more=paths, tier=st.none() | tiers, wait=waits)
    def store_on_top(self, wait: int, pick: int, more: Path, tier: int | None) -> None:
        self.now += wait
        below = self.earlier(pick)
        path = (below.path + more)[:6]
        if len(path) > len(below.path):
            tier = below.tier if tier is None else tier
            self.store_blocks(dataclasses.replace(below, tier=tier, path=path, start=len(below.path)))

    @precondition(lambda self: self.stored)
    @rule(pick=picks, wait=waits)
    def store_what_it_stands_on(self, wait: int, pick: int) -> None:
        self.now += wait
        above = self.earlier(pick)
        if above.start:
            self.store_blocks(dataclasses.replace(above, path=above.path[: above.start], start=0))

    @precondition(lambda self: self.stored)
    @rule(pick=picks, tier=tiers, more=paths, wait=waits)
    def store_far_above(self, wait: int, pick: int, tier: int, more: Path) -> None:
        """Two levels up, so that it waits; what it waits for comes next, or never."""
        self.now += wait
        path = (self.earlier(pick).path + more)[:6]
        below = dataclasses.replace(self.earlier(pick), path=path[:-1], start=max(0, len(path) - 2))
        self.store_blocks(dataclasses.replace(below, tier=tier, path=path, start=len(path) - 1))
        self.remember(below)

    @precondition(lambda self: self.stored)
    @rule(pick=picks, spot=spots, wait=waits)
    def store_elsewhere(self, wait: int, pick: int, spot: int) -> None:
        self.now += wait
        self.store_blocks(dataclasses.replace(self.earlier(pick), spot=spot, start=0))

    @precondition(lambda self: self.stored and self.limits.ttl_ticks == 0)
    @rule(pick=picks)
    def store_under_another_name(self, pick: int) -> None:
        """One prefix by two names in one slot, as when an engine hides the salt that its hashes have in them."""
        again = dataclasses.replace(self.earlier(pick), start=0)
        self.sources[again.spot].seed ^= 1
        self.store_blocks(again)
        self.sources[again.spot].seed ^= 1

    @precondition(lambda self: self.stored and self.limits.ttl_ticks == 0)
    @rule(pick=picks, path=paths)
    def store_under_a_strange_parent(self, pick: int, path: Path) -> None:
        below = self.earlier(pick)
        parent = self.name(below.spot, below.path)
        self.store_blocks(dataclasses.replace(below, path=path, start=0), parent=parent)

    def store_blocks(self, blocks: Stored, parent: int | None = None) -> None:
        twin = self.context_of(blocks.context)
        path, start, block_size = blocks.path, blocks.start, CONTEXTS[blocks.context][2]
        if start:
            parent = self.name(blocks.spot, path[:start])
        more: dict[str, Any] = {
            "tier": blocks.tier,
            "group": blocks.group,
            "engine_hashes": self.pack_names(blocks.spot, path, start),
            "parent": parent,
            "token_ids": b"".join(block_tokens(kind, block_size) for kind in path[start:]),
            "extra_keys": block_keys(path[start:]),
            "now": self.now,
            "count_copies": self.count_copies,
        }
        source = self.sources[blocks.spot]
        assert self.native.store(
            source.native, twin.native, **more, owner=self.owner.native
        ) == self.oracle.store(source.oracle, twin.oracle, **more, owner=self.owner.oracle)
        self.remember(blocks)

    @precondition(lambda self: self.stored)
    @rule(
        pick=picks,
        spot=st.none() | spots,
        more=st.just(()) | paths,
        copies=st.none() | st.integers(1, 3),
        wait=waits,
    )
    def store_prefixes(self, wait: int, pick: int, spot: int | None, more: Path, copies: int | None) -> None:
        self.now += wait
        below = self.earlier(pick)
        path = (below.path + more)[:6]
        blocks = dataclasses.replace(below, path=path, start=0, spot=below.spot if spot is None else spot)
        twin = self.context_of(blocks.context)
        more_fields: dict[str, Any] = {
            "tier": blocks.tier,
            "group": blocks.group,
            "engine_hashes": self.pack_names(blocks.spot, path, 0),
            "prefix_hashes": self.prefix_hashes(blocks.context, path),
            "copies": struct.pack("<Q", copies) * len(path) if copies and self.count_copies else None,
            "now": self.now,
            "count_copies": self.count_copies,
        }
        source = self.sources[blocks.spot]
        self.tokens_were_hidden = True
        assert self.native.store_prefixes(
            source.native, twin.native, **more_fields, owner=self.owner.native
        ) == self.oracle.store_prefixes(source.oracle, twin.oracle, **more_fields, owner=self.owner.oracle)
        self.remember(blocks)

    @precondition(lambda self: self.stored)
    @rule(
        pick=picks,
        spot=st.none() | spots,
        more=st.just(()) | paths,
        start=st.integers(0, 4),
        known_contents=st.integers(0, 5),
        wait=waits,
    )
    def store_hashed(
        self, wait: int, pick: int, spot: int | None, more: Path, start: int, known_contents: int
    ) -> None:
        """As from a log: on a prefix that is there or not, and with the contents of some leading blocks or of none."""
        self.now += wait
        below = self.earlier(pick)
        path = (below.path + more)[:6]
        start = min(start, len(path) - 1)
        blocks = dataclasses.replace(below, path=path, start=start, spot=below.spot if spot is None else spot)
        twin = self.context_of(blocks.context)
        block_size = CONTEXTS[blocks.context][2]
        prefixes = self.prefix_hashes(blocks.context, path)
        kinds = path[start:]
        plain = next((at for at, kind in enumerate(kinds) if kind == 2), len(kinds))
        tokens = b"".join(block_tokens(kind, block_size) for kind in kinds)
        _, contents = hash_blocks(0, block_size, tokens, block_keys(kinds), 1)
        assert len(contents) == 16 * plain
        more_fields: dict[str, Any] = {
            "tier": blocks.tier,
            "group": blocks.group,
            "engine_hashes": self.pack_names(blocks.spot, path, start),
            "chain_from": struct.unpack_from("<Q", prefixes, 8 * (start - 1))[0] if start else None,
            "prefix_hashes": prefixes[8 * start :],
            "contents": contents[: 16 * known_contents],
            "now": self.now,
            "count_copies": self.count_copies,
        }
        source = self.sources[blocks.spot]
        must, _ = self.oracle.plain_prefixes(twin.oracle)
        parent = more_fields["chain_from"]
        self.tokens_were_hidden |= known_contents < plain or (parent is not None and parent not in must)
        assert self.native.store_hashed(
            source.native, twin.native, **more_fields
        ) == self.oracle.store_hashed(source.oracle, twin.oracle, **more_fields)
        self.remember(blocks)

    @precondition(lambda self: self.stored)
    @rule(pick=picks, at=st.integers(1, 6), spot=st.none() | spots, tier=st.none() | tiers, wait=waits)
    def chain_of(self, wait: int, pick: int, at: int, spot: int | None, tier: int | None) -> None:
        self.now += wait
        known = self.earlier(pick)
        twin = self.context_of(known.context)
        spot = known.spot if spot is None else spot
        asked: dict[str, Any] = {
            "tier": known.tier if tier is None else tier,
            "group": known.group,
            "parent": self.name(spot, known.path[:at]),
            "now": self.now,
        }
        source = self.sources[spot]
        assert self.native.chain_of(source.native, twin.native, **asked) == self.oracle.chain_of(
            source.oracle, twin.oracle, **asked
        )

    @precondition(lambda self: self.stored)
    @rule(pick=picks, tier=tiers, group=groups, wait=waits)
    def place(self, wait: int, pick: int, tier: int, group: int) -> None:
        self.now += wait
        known = self.earlier(pick)
        more: dict[str, Any] = {
            "tier": tier,
            "group": group,
            "engine_hashes": self.pack_names(known.spot, known.path, 0),
            "now": self.now,
            "count_copies": self.count_copies,
        }
        source = self.sources[known.spot]
        assert self.native.place(source.native, **more, owner=self.owner.native) == self.oracle.place(
            source.oracle, **more, owner=self.owner.oracle
        )
        self.remember(dataclasses.replace(known, tier=tier, group=group, start=0))

    @precondition(lambda self: self.stored)
    @rule(
        pick=picks,
        at=st.integers(0, 5),
        count=st.integers(1, 3),
        tier=st.sampled_from([None, None, 0]),
        wait=waits,
    )
    def remove(self, wait: int, pick: int, at: int, count: int, tier: int | None) -> None:
        self.now += wait
        known = self.earlier(pick)
        at %= len(known.path)
        self.remove_blocks(known, at, at + count, known.tier if tier is None else tier)

    @precondition(lambda self: self.stored)
    @rule(pick=picks)
    def remove_the_last_block(self, pick: int) -> None:
        known = self.earlier(pick)
        self.remove_blocks(known, len(known.path) - 1, len(known.path), known.tier)

    def remove_blocks(self, known: Stored, at: int, end: int, tier: int) -> None:
        more: dict[str, Any] = {
            "tier": tier,
            "group": known.group,
            "engine_hashes": self.pack_names(known.spot, known.path[:end], at),
            "now": self.now,
        }
        source = self.sources[known.spot]
        assert self.native.remove(source.native, **more) == self.oracle.remove(source.oracle, **more)

    @rule(
        spot=spots,
        tier=st.sampled_from([None, 0, 0, 1]),
        only=st.none() | contexts,
        seed=st.integers(0, 2),
        skip=st.booleans(),
    )
    def clear(self, spot: int, tier: int | None, only: int | None, seed: int, skip: bool) -> None:
        twin = None if only is None else self.known_context(only)
        if skip or (only is not None and twin is None):
            return  # not too often: a picture needs time to become one
        source = self.sources[spot]
        self.oracle.clear(source.oracle, tier=tier, context=twin.oracle if twin else None)
        self.native.clear(source.native, tier=tier, context=twin.native if twin else None)
        if only is None and tier is None:
            source.seed = seed  # the engine may have come back with other hashes

    @rule(spot=st.integers(0, 3 * SOURCES))
    def drop_and_add_a_source(self, spot: int) -> None:
        if spot < SOURCES:
            source = self.sources[spot]
            self.oracle.drop_source(source.oracle)
            self.native.drop_source(source.native)
            self.sources[spot] = Twin(self.oracle.add_source(), self.native.add_source(), source.seed)

    # -- queries

    @rule(context=contexts, path=paths, cut=st.integers(0, 2))
    def match_any_tokens(self, context: int, path: Path, cut: int) -> None:
        self.match_path(context, path, cut)

    @precondition(lambda self: self.stored)
    @rule(pick=picks, wait=waits)
    def match_tokens(self, wait: int, pick: int) -> None:
        self.now += wait
        known = self.earlier(pick)
        self.match_path(known.context, known.path, 0)

    @rule(context=contexts, wait=waits)
    def match_every_prompt(self, wait: int, context: int) -> None:
        self.now += wait
        for path in sorted({known.path for known in self.stored if known.context == context}):
            self.match_path(context, path, 0)

    def match_path(self, context: int, path: Path, cut: int) -> None:
        twin = self.known_context(context)
        if twin is not None:
            tokens = b"".join(block_tokens(kind, CONTEXTS[context][2]) for kind in path)
            tokens = tokens[: len(tokens) - 4 * cut]
            self.compare_rows(
                self.oracle.match_tokens(twin.oracle, tokens, block_keys(path), self.now),
                self.native.match_tokens(twin.native, tokens, block_keys(path), self.now),
            )

    @precondition(lambda self: self.stored)
    @rule(pick=picks, jumble=st.booleans(), wait=waits)
    def match_hashes(self, wait: int, pick: int, jumble: bool) -> None:
        self.now += wait
        known = self.earlier(pick)
        twin = self.known_context(known.context)
        if twin is not None:
            hashes = self.prefix_hashes(known.context, known.path)
            if jumble:
                hashes = hashes[8:] + hashes[:8]
            self.compare_rows(
                self.oracle.match_hashes(twin.oracle, hashes, self.now),
                self.native.match_hashes(twin.native, hashes, self.now),
            )

    @precondition(lambda self: self.stored)
    @rule(
        pick=picks,
        spot=st.none() | spots,
        more=paths,
        ttl=st.sampled_from([1, TTL - 1, TTL, TTL + 1]),
        wait=waits,
    )
    def add_speculative(self, wait: int, pick: int, spot: int | None, more: Path, ttl: int) -> None:
        self.now += wait
        if self.limits.speculative_blocks_max < UNBOUNDED:
            self.sweep_everything()  # what is over may count until then
        known = self.earlier(pick)
        known = dataclasses.replace(
            known, path=(known.path + more)[:6], spot=known.spot if spot is None else spot
        )
        twin = self.context_of(known.context)
        source = self.sources[known.spot]
        hashes = self.prefix_hashes(known.context, known.path)
        assert self.native.add_speculative(
            twin.native, source.native, hashes, ttl, self.now
        ) == self.oracle.add_speculative(twin.oracle, source.oracle, hashes, ttl, self.now)
        self.remember(known)

    @rule(names_max=st.sampled_from([1, 3, 1_000]), wait=waits)
    def list_names(self, wait: int, names_max: int) -> None:
        self.now += wait
        native = [twin.native for twin in self.sources]
        oracle = [twin.oracle for twin in self.sources]
        contexts = {key: self.known_context(number) for number, key in enumerate(CONTEXTS)}
        known = {twin.native: twin.oracle for twin in contexts.values() if twin is not None}
        assert sorted(
            (native.index(source), known[context], *rest)
            for source, context, *rest in all_names(self.native, self.now, names_max)
        ) == sorted(
            (oracle.index(source), context, *rest)
            for source, context, *rest in all_names(self.oracle, self.now, names_max)
        )

    @rule(which=st.integers(1, 2))
    def clear_owner(self, which: int) -> None:
        gone = self.owners[which]
        self.oracle.clear_owner(gone.oracle)
        self.native.clear_owner(gone.native)
        self.owners[which] = self.new_owner()

    # -- time

    @rule(visits=st.sampled_from([1, 2, 7, 40]), wait=waits)
    def sweep_a_slice(self, wait: int, visits: int) -> None:
        self.now += wait
        self.native.sweep(self.now, visits)

    @rule(wait=waits)
    def count_after_sweeping(self, wait: int) -> None:
        self.now += wait
        self.sweep_everything()
        self.oracle.sweep(self.now, 1)
        for source in self.sources:
            assert self.native.blocks_by_tier(source.native) == self.oracle.blocks_by_tier(source.oracle)
            assert self.native.orphan_blocks(source.native) == self.oracle.orphan_blocks(source.oracle)
        assert held_digests(self.native) == held_digests(self.oracle)
        claims, expected = self.native.owner_claims(), self.oracle.owner_claims()
        assert [claims[o.native] for o in self.owners[1:]] == [expected[o.oracle] for o in self.owners[1:]]
        assert len(claims) == len(expected) == 2
        assert sorted(self.native.unclaimed_owners()) == sorted(
            o for o, count in claims.items() if count == 0
        )
        self.same_contents(swept=True)
        native, oracle = self.native.stats(), self.oracle.stats()
        for name in ("contexts", "prefixes", "copies", "orphan_blocks", "speculative_blocks", "claims"):
            assert getattr(native, name) == getattr(oracle, name), name
        for name in ("contexts_evicted", "orphans_dropped", "speculative_refused"):
            assert getattr(native, name) == getattr(oracle, name), name

    @rule(context=st.integers(0, len(CONTEXTS) - 1))
    def ask_by_content(self, context: int) -> None:
        """From then on the contents of this context are in tables; before, in a list that nothing looks through."""
        twin = self.known_context(context)
        if twin is not None:
            self.contents.grid(twin.native, bytes(4 * CONTEXTS[context][2]), 0, lambda prefixes: prefixes)

    @precondition(lambda self: self.steps > 60)
    @rule()
    def drop_everything(self) -> None:
        """And nothing is left of anything."""
        for source in self.sources:
            self.oracle.drop_source(source.oracle)
            self.native.drop_source(source.native)
        self.sweep_everything()
        stats = self.native.stats()
        left = (stats.prefixes, stats.engine_keys, stats.copies, stats.holder_sets)
        assert left == (0, 0, 0, 0)
        assert (stats.orphan_blocks, stats.speculative_blocks, stats.claims) == (0, 0, 0)
        assert all(not self.contents.prefix_hashes(info.id) for info in self.native.contexts())
        self.sources = [
            Twin(self.oracle.add_source(), self.native.add_source(), s.seed) for s in self.sources
        ]

    # -- what must always hold

    @invariant()
    @precondition(lambda self: hasattr(self, "oracle"))
    def same_picture(self) -> None:
        self.steps += 1
        spots_of = {source.native: spot for spot, source in enumerate(self.sources)}
        spots_of_oracle = {source.oracle: spot for spot, source in enumerate(self.sources)}
        owner_at = {owner.native: at for at, owner in enumerate(self.owners)}
        owner_at_oracle = {owner.oracle: at for at, owner in enumerate(self.owners)}
        for context, key in enumerate(CONTEXTS):
            twin = self.known_context(context)
            if twin is None:
                continue
            self.seen.setdefault(key, set()).update(self.oracle.prefixes(twin.oracle))
            for prefix in self.seen[key]:
                here = [(spots_of[s], t, g) for s, t, g in self.native.holders(twin.native, prefix, self.now)]
                there = self.oracle.holders(twin.oracle, prefix, self.now)
                assert sorted(here) == sorted((spots_of_oracle[s], t, g) for s, t, g in there)
                asked = struct.pack("<Q", prefix)
                claimed = self.native.holdings(twin.native, asked, self.now)
                assert sorted((spots_of[h.source], owner_at[h.owner]) for h in claimed) == sorted(
                    (spots_of_oracle[h.source], owner_at_oracle[h.owner])
                    for h in self.oracle.holdings(twin.oracle, asked, self.now)
                )
        self.same_names()
        self.same_contents(swept=False)
        assert [(spots_of[s], n) for s, n in self.drops(self.native)] == [
            (spots_of_oracle[s], n) for s, n in self.drops(self.oracle)
        ]

    def same_names(self) -> None:
        """What the newest stored blocks are called, by `prefix_of`."""
        for stored in self.stored[-8:]:
            twin = self.known_context(stored.context)
            if twin is None:
                continue
            source = self.sources[stored.spot]
            said = {"tier": stored.tier, "group": stored.group, "now": self.now}
            for end in range(stored.start + 1, len(stored.path) + 1):
                name = self.name(stored.spot, stored.path[:end])
                here = self.native.prefix_of(twin.native, source.native, engine_hash=name, **said)
                assert here == self.oracle.prefix_of(twin.oracle, source.oracle, engine_hash=name, **said)

    def same_contents(self, *, swept: bool) -> None:
        assert self.contents.stats().contexts == len(self.native.contexts())
        for context in range(len(CONTEXTS)):
            twin = self.known_context(context)
            if twin is None:
                continue
            found = self.contents.prefix_hashes(twin.native)
            there = set(found)
            assert len(there) == len(found), "a block is there twice"
            must, may = self.oracle.plain_prefixes(twin.oracle)
            if not swept:
                there = {prefix for prefix in there if self.native.holders(twin.native, prefix, self.now)}
            assert must <= there <= may
            assert self.tokens_were_hidden or must == may

    def drops(self, index: PrefixIndex | ReferenceIndex) -> list[tuple[int, int]]:
        known = {source.native if index is self.native else source.oracle for source in self.sources}
        totals: dict[int, int] = {}
        for source, blocks in index.orphan_drops():
            if source in known:
                totals[source] = totals.get(source, 0) + blocks
        return sorted(totals.items())

    # -- how

    def earlier(self, pick: int) -> Stored:
        return self.stored[-1 - pick % len(self.stored)]

    def remember(self, stored: Stored) -> None:
        if stored in self.stored:
            self.stored.remove(stored)
        self.stored.append(stored)

    def name(self, spot: int, path: Path) -> int:
        """What the engine of this source calls the last block of `path`."""
        number = functools.reduce(lambda so_far, kind: 4 * so_far + kind + 1, path, 0)
        name = number ^ (0b101 * self.sources[spot].seed)
        return name % self.folded_names if self.folded_names else name

    def pack_names(self, spot: int, path: Path, start: int) -> bytes:
        names = [self.name(spot, path[: i + 1]) for i in range(start, len(path))]
        return struct.pack(f"<{len(names)}Q", *names)

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


def held_digests(index: Index) -> list[tuple[int, int, int, int]]:
    return sorted((slot.tier, slot.group, slot.blocks, slot.digest) for slot in index.slots() if slot.blocks)


def all_names(index: Index, now: int, names_max: int) -> list[tuple[int, int, int, int, int, int, int]]:
    """(source, context, tier, group, engine hash, prefix hash, copies) of every name."""
    found = []
    cursor: int | None = 0
    while cursor is not None:
        runs, cursor = index.names(cursor, names_max, now)
        for run in runs:
            columns = [
                struct.iter_unpack("<Q", c) for c in (run.engine_hashes, run.prefix_hashes, run.copies)
            ]
            for (engine_hash,), (prefix,), (copies,) in zip(*columns, strict=True):
                found.append((run.source, run.context, run.tier, run.group, engine_hash, prefix, copies))
    return found


TestSideBySide = SideBySide.TestCase
TestSideBySide.settings = settings(
    max_examples=60, stateful_step_count=80, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("seed", range(60))
def test_dense_seeded_history(seed: int) -> None:
    """Long histories in which every kind of step goes on happening: Hypothesis shrinks better, this finds more."""
    r = random.Random(seed)
    machine = SideBySide()
    machine.begin(
        ttl=r.choice([0, TTL, TTL, TTL]),
        contexts_max=r.choice([2, UNBOUNDED, UNBOUNDED]),
        orphan_blocks_max=r.choice([0, 3, UNBOUNDED, UNBOUNDED]),
        speculative_blocks_max=r.choice([2, UNBOUNDED]),
        folded_names=r.choice([0, 6, 24]),
        count_copies=r.random() < 0.8,
        seeds=[r.randrange(2) for _ in range(SOURCES)],
    )
    for _ in range(150):
        machine.now += r.choice([0] * 8 + [1, 1, 1, TTL - 1, TTL, TTL + 1])
        random_step(machine, r)
        machine.same_picture()
    machine.drop_everything()


def random_step(machine: SideBySide, r: random.Random) -> None:
    spot, context = r.choice([0, 0, 0, 1, 2]), r.choice([0, 0, 0, 1, 2, 3])
    tier, group = r.choice([0, 0, 0, 1, 3]), r.choice([0, 0, 0, 1])
    pick = min(int(r.expovariate(0.6)), 7)
    path = tuple(r.choice([0, 0, 1, 2]) for _ in range(r.randint(1, 4)))
    steps: list[tuple[int, Callable[[], None]]] = [
        (2, lambda: machine.store(0, spot, context, tier, group, path)),
        (1, lambda: machine.store_with_any_parent(0, spot, context, tier, group, path, r.randint(1, 3))),
        (1, lambda: machine.store_child_before_parent(spot, context, path, tier)),
        (2, lambda: machine.match_any_tokens(context, path, r.randrange(3))),
        (1, lambda: machine.match_every_prompt(0, context)),
        (1, lambda: machine.sweep_a_slice(0, r.choice([1, 2, 7, 40]))),
        (1, lambda: machine.count_after_sweeping(0)),
    ]
    if machine.stored:
        steps += [
            (2, lambda: machine.store_again(0, pick)),
            (2, lambda: machine.store_on_top(0, pick, path, r.choice([None, None, tier]))),
            (2, lambda: machine.store_what_it_stands_on(0, pick)),
            (2, lambda: machine.store_far_above(0, pick, tier, path)),
            (1, lambda: machine.store_elsewhere(0, pick, spot)),
            (2, lambda: machine.place(0, pick, tier, group)),
            (3, lambda: machine.remove(0, pick, r.randrange(6), r.randint(1, 3), r.choice([None, None, 0]))),
            (3, lambda: machine.remove_the_last_block(pick)),
            (3, lambda: machine.match_tokens(0, pick)),
            (1, lambda: machine.match_hashes(0, pick, r.random() < 0.5)),
            (
                3,
                lambda: machine.add_speculative(
                    0, pick, r.choice([None, spot]), path, r.choice([1, TTL, TTL + 1])
                ),
            ),
            (
                1,
                lambda: machine.clear(
                    spot, r.choice([None, 0, 0, 1]), r.choice([None, context]), r.randrange(3), False
                ),
            ),
        ]
        if machine.limits.ttl_ticks == 0:
            steps += [
                (2, lambda: machine.store_under_another_name(pick)),
                (2, lambda: machine.store_under_a_strange_parent(pick, path)),
            ]
    if r.random() < 0.02:
        return machine.drop_and_add_a_source(spot)
    r.choices([step for _, step in steps], weights=[weight for weight, _ in steps])[0]()
    return None
