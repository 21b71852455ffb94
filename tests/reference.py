"""The oracle: the contract of app/index/prefix_index.py as plain Python, to read and to trust.

Two facts are the whole picture: what each slot calls its blocks (`_names`) and when each entry was last
seen (`_Context.last_seen`). Everything else (who holds a prefix, depths, counts) is worked out from them by
looking at all of them, every time, so nothing can drift apart. What has expired is purged at the start of
each call that carries `now`, so `sweep` finds nothing to do. A call costs O(everything).
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
import xxhash

from app._native import AnswerBook, PlainBatch
from app.errors import InvalidInput
from app.index.prefix_index import (
    ContextInfo,
    Depths,
    Holding,
    IndexLimits,
    IndexStats,
    NameRun,
    RemoveResult,
    SlotInfo,
    StoreResult,
    SweepResult,
)

Slot = tuple[int, int, int, int]  # source, tier, group, context: sorts as the contract looks names up


@dataclasses.dataclass
class _Name:
    prefix: int
    copies: int = 1


@dataclasses.dataclass
class _Context:
    id: int
    model: str
    lora: str | None
    block_size: int
    last_seen: dict[int, int] = dataclasses.field(default_factory=dict)  # prefix -> tick: the entries
    plain: set[int] = dataclasses.field(default_factory=set)  # entries that a fuzzy index has
    ever_plain: set[int] = dataclasses.field(default_factory=set)  # prefixes without extra keys

    @property
    def seed(self) -> int:
        return xxhash.xxh64_intdigest(
            msgspec.msgpack.encode([self.model, self.lora, self.block_size]), seed=0
        )


@dataclasses.dataclass
class _Block:
    engine_hash: int
    content: bytes
    plain: bool  # it has no extra keys
    living: bool = True


@dataclasses.dataclass(eq=False)
class _Run:
    """Consecutive blocks on their way into a slot; an orphan is a run that waits for `parent`."""

    slot: Slot
    blocks: list[_Block]
    parent: int = 0
    came: int = 0
    owner: int = 0


class ReferenceIndex:
    def __init__(self, limits: IndexLimits, *, has_owners: bool = False) -> None:
        """`has_owners`: as an index that was made with a FuzzyIndex."""
        self._limits = limits
        self._has_owners = has_owners
        self._owner_ids = itertools.count(1)
        self._claims: dict[tuple[Slot, int], set[int]] = {}  # (slot, prefix) -> owners
        self._owners: set[int] = set()
        self._now = 0
        self._source_ids = itertools.count()
        self._context_ids = itertools.count()
        self._sources: set[int] = set()
        self._contexts: dict[int, _Context] = {}  # least recently used first
        self._names: dict[Slot, dict[int, _Name]] = {}
        self._orphans: list[_Run] = []  # oldest first
        self._marks: dict[tuple[int, int, int], int] = {}  # (source, context, prefix) -> deadline
        self._drops: Counter[int] = Counter()  # source -> orphan blocks dropped since last asked
        self._counts: Counter[str] = Counter()  # what happened since the start

    # -- contexts and sources

    def context(self, model: str, lora: str | None, block_size: int, now: int) -> int:
        if block_size < 1:
            raise InvalidInput("block_size must be at least 1", field="block_size")
        self._advance(now)
        for known in self._contexts.values():
            if (known.model, known.lora, known.block_size) == (model, lora or None, block_size):
                return self._use(known.id)
        while len(self._contexts) >= self._limits.contexts_max:
            self._drop_context(next(iter(self._contexts)))
        made = _Context(next(self._context_ids), model, lora or None, block_size)
        self._contexts[made.id] = made
        return made.id

    def find_contexts(self, model: str, lora: str | None) -> list[ContextInfo]:
        return [info for info in self.contexts() if (info.model, info.lora) == (model, lora or None)]

    def context_ids(self, model: str, lora: str | None) -> dict[int, int]:
        return {info.block_size: info.id for info in self.find_contexts(model, lora)}

    def contexts(self) -> list[ContextInfo]:
        by_age = sorted(self._contexts.values(), key=lambda context: context.id)
        return [ContextInfo(c.id, c.model, c.lora, c.block_size, len(c.last_seen)) for c in by_age]

    def add_owner(self) -> int:
        owner = next(self._owner_ids)
        self._owners.add(owner)
        return owner

    def clear_owner(self, owner: int) -> None:
        self._owners.discard(owner)
        for owners in self._claims.values():
            owners.discard(owner)

    def owner_claims(self) -> dict[int, int]:
        return {owner: sum(owner in owners for owners in self._claims.values()) for owner in self._owners}

    def unclaimed_owners(self) -> list[int]:
        return [owner for owner, claims in self.owner_claims().items() if claims == 0]

    def add_source(self) -> int:
        source = next(self._source_ids)
        self._sources.add(source)
        return source

    def drop_source(self, source: int) -> None:
        self.clear(source)
        self._sources.remove(source)

    # -- events

    def store(
        self,
        source: int,
        context: int,
        *,
        tier: int,
        group: int,
        engine_hashes: bytes,
        parent: int | None,
        token_ids: bytes,
        extra_keys: tuple[bytes, ...] | None,
        now: int,
        count_copies: bool = True,
        owner: int = 0,
    ) -> StoreResult:
        self._advance(now)
        names = _uint64s(engine_hashes, "engine_hashes")
        keys = (b"",) * len(names) if extra_keys is None else extra_keys
        tokens = _blocks(token_ids, self._contexts[context].block_size, exact=True)
        if not len(names) == len(tokens) == len(keys):
            raise InvalidInput("engine_hashes, token_ids and extra_keys differ in blocks")
        self._use(context)
        slot = self._slot(source, tier, group, context)
        blocks = [
            _Block(*parts)
            for parts in zip(
                names,
                (t + k for t, k in zip(tokens, keys, strict=True)),
                (not k for k in keys),
                strict=True,
            )
        ]
        if parent is None:
            before = self._contexts[context].seed
        else:
            name = self._find_parent(slot, parent)
            if name is None:
                return StoreResult(0, self._wait(_Run(slot, blocks, parent, now, owner)), 0)
            before = name.prefix
        return StoreResult(self._chain(_Run(slot, blocks, owner=owner), before, count_copies), 0, 0)

    def place(
        self,
        source: int,
        *,
        tier: int,
        group: int,
        engine_hashes: bytes,
        now: int,
        count_copies: bool = True,
        owner: int = 0,
    ) -> StoreResult:
        self._advance(now)
        stored = unknown = 0
        for engine_hash in _uint64s(engine_hashes, "engine_hashes"):
            known = sorted(
                (slot for slot, names in self._names.items() if slot[0] == source and engine_hash in names),
                key=lambda slot: (slot[1], slot[2], self._contexts[slot[3]].seed),
            )
            if known:
                context = known[0][3]
                prefix = self._names[known[0]][engine_hash].prefix
                self._use(context)
                self._hold(self._slot(source, tier, group, context), engine_hash, prefix, count_copies, owner)
                stored += 1
            else:
                unknown += 1
        return StoreResult(stored, 0, unknown)

    def store_prefixes(
        self,
        source: int,
        context: int,
        *,
        tier: int,
        group: int,
        engine_hashes: bytes,
        prefix_hashes: bytes,
        copies: bytes | None,
        now: int,
        count_copies: bool = True,
        owner: int = 0,
    ) -> StoreResult:
        self._advance(now)
        names, prefixes = _uint64s(engine_hashes, "block_hashes"), _uint64s(prefix_hashes, "prefix_hashes")
        counts = [1] * len(names) if copies is None else _uint64s(copies, "copies")
        if not len(names) == len(prefixes) == len(counts) or 0 in counts:
            raise InvalidInput("engine_hashes, prefix_hashes and copies do not go together")
        slot = self._slot(source, tier, group, self._use(context))
        stored = 0
        for engine_hash, prefix, count in zip(names, prefixes, counts, strict=True):
            self._hold(slot, engine_hash, prefix, count_copies=False, owner=owner)
            self._names[slot][engine_hash].copies = count
            waiting = self._take_waiting(slot, engine_hash)
            stored += 1 + sum(self._chain(orphan, prefix, count_copies) for orphan in waiting)
        return StoreResult(stored, 0, 0)

    def store_hashed(
        self,
        source: int,
        context: int,
        *,
        tier: int,
        group: int,
        engine_hashes: bytes,
        chain_from: int | None,
        prefix_hashes: bytes,
        contents: bytes,
        now: int,
        count_copies: bool = True,
        owner: int = 0,
    ) -> StoreResult:
        self._advance(now)
        names, prefixes = _uint64s(engine_hashes, "block_hashes"), _uint64s(prefix_hashes, "prefix_hashes")
        if len(names) != len(prefixes) or len(contents) > 16 * len(names):
            raise InvalidInput("engine_hashes, prefix_hashes and contents do not go together")
        slot = self._slot(source, tier, group, self._use(context))
        known = self._contexts[context]
        restating = chain_from is None and self._restates(slot, names, prefixes)
        plain_blocks = len(contents) // 16 if chain_from is None or chain_from in known.plain else 0
        if chain_from is None or chain_from in known.ever_plain:
            known.ever_plain.update(prefixes[: len(contents) // 16])
        stored = 0
        for i, (engine_hash, prefix) in enumerate(zip(names, prefixes, strict=True)):
            self._hold(slot, engine_hash, prefix, count_copies and not restating, owner)
            if i < plain_blocks:
                known.plain.add(prefix)
            waiting = self._take_waiting(slot, engine_hash)
            stored += 1 + sum(self._chain(orphan, prefix, count_copies) for orphan in waiting)
        return StoreResult(stored, 0, 0)

    def chain_of(
        self, source: int, context: int, *, tier: int, group: int, parent: int, now: int
    ) -> int | None:
        self._advance(now)
        name = self._find_parent(self._slot(source, tier, group, context), parent)
        return None if name is None else name.prefix

    def remove(self, source: int, *, tier: int, group: int, engine_hashes: bytes, now: int) -> RemoveResult:
        self._advance(now)
        removed = unknown = 0
        for engine_hash in _uint64s(engine_hashes, "engine_hashes"):
            slots = [
                slot
                for slot, names in self._names.items()
                if slot[:3] == (source, tier, group) and engine_hash in names
            ]
            waiting = [
                block
                for orphan in self._orphans
                if orphan.slot[:3] == (source, tier, group)
                for block in orphan.blocks
                if block.living and block.engine_hash == engine_hash
            ]
            for slot in slots:
                self._names[slot][engine_hash].copies -= 1
                if self._names[slot][engine_hash].copies == 0:
                    self._unname(slot, engine_hash)
            if not slots and waiting:
                waiting[0].living = False
            removed += len(slots) or bool(waiting)
            unknown += not slots and not waiting
        return RemoveResult(removed, unknown)

    def clear(self, source: int, *, tier: int | None = None, context: int | None = None) -> None:
        assert source in self._sources, "the source was never added, or was dropped"

        def fits(slot: Slot) -> bool:
            return slot[0] == source and tier in (None, slot[1]) and context in (None, slot[3])

        self._names = {slot: names for slot, names in self._names.items() if not fits(slot)}
        self._claims = {claim: owners for claim, owners in self._claims.items() if not fits(claim[0])}
        self._forget_unheld()
        self._orphans = [orphan for orphan in self._orphans if not fits(orphan.slot)]
        if tier in (None, 0):
            self._marks = {
                mark: deadline
                for mark, deadline in self._marks.items()
                if not (mark[0] == source and context in (None, mark[1]))
            }

    # -- queries

    def match_tokens(
        self, context: int, token_ids: bytes, extra_keys: tuple[bytes, ...] | None, now: int
    ) -> list[Depths]:
        c = self._contexts[context]
        return self._match(context, _hash_chain(c, token_ids, extra_keys), now)

    def match_hashes(self, context: int, prefix_hashes: bytes, now: int) -> list[Depths]:
        return self._match(context, _uint64s(prefix_hashes, "prefix_hashes"), now)

    def match_tokens_packed(
        self, context: int, token_ids: bytes, extra_keys: tuple[bytes, ...] | None, now: int
    ) -> bytes:
        return _packed(self.match_tokens(context, token_ids, extra_keys, now))

    def match_hashes_packed(self, context: int, prefix_hashes: bytes, now: int) -> bytes:
        return _packed(self.match_hashes(context, prefix_hashes, now))

    def apply_plain(
        self, batch: PlainBatch, source: int, context: int, *, now: int, count_copies: bool
    ) -> tuple[int, int, int, int]:
        stored = removed = orphans = unknown = 0
        for event in batch.events():
            tier, group, hashes = event[:3]
            if len(event) == 3:
                gone = self.remove(source, tier=tier, group=group, engine_hashes=hashes, now=now)
                removed += gone.removed_blocks
                unknown += gone.unknown_blocks
                continue
            came = self.store(
                source,
                context,
                tier=tier,
                group=group,
                engine_hashes=hashes,
                parent=event[3],
                token_ids=event[4],
                extra_keys=None,
                now=now,
                count_copies=count_copies,
            )
            stored += came.stored_blocks
            orphans += came.orphan_blocks
            unknown += came.unknown_blocks
        return stored, removed, orphans, unknown

    def answer(
        self,
        book: AnswerBook,
        context: int,
        asked: bytes,
        *,
        are_hashes: bool,
        extra_keys: tuple[bytes, ...] | None,
        now: int,
        frame: tuple[bytes, bytes],
        unit: int,
        tokens: int,
        now_s: float,
        sources: set[int] | None,
    ) -> tuple[bytes, int, int]:
        rows = (
            self.match_hashes_packed(context, asked, now)
            if are_hashes
            else self.match_tokens_packed(context, asked, extra_keys, now)
        )
        return book.render(*frame, [(unit, rows)], unit, tokens, now_s, sources)

    def _match(self, context: int, prefixes: list[int], now: int) -> list[Depths]:
        self._advance(now)
        self._use(context)
        rows = []
        for source in sorted(self._sources):
            held = [
                {
                    name.prefix
                    for slot, names in self._names.items()
                    if slot[0] == source and slot[3] == context and slot[1] <= tier
                    for name in names.values()
                }
                for tier in range(4)
            ]
            marked = {prefix for s, c, prefix in self._marks if (s, c) == (source, context)}
            tiers = [_leading(prefixes, held[tier].__contains__) for tier in range(4)]
            speculative = _leading(prefixes, (held[3] | marked).__contains__)
            if speculative:
                rows.append(Depths(source, (tiers[0], tiers[1], tiers[2], tiers[3]), speculative))
        for prefix in prefixes[: max((row.tiers[3] for row in rows), default=0)]:
            self._contexts[context].last_seen[prefix] = now
        return rows

    def prefix_hashes(
        self,
        model: str,
        lora: str | None,
        block_size: int,
        token_ids: bytes,
        extra_keys: tuple[bytes, ...] | None,
    ) -> bytes:
        if block_size < 1:
            raise InvalidInput("block_size must be at least 1", field="block_size")
        chain = _hash_chain(_Context(-1, model, lora or None, block_size), token_ids, extra_keys)
        return struct.pack(f"<{len(chain)}Q", *chain)

    def add_speculative(
        self, context: int, source: int, prefix_hashes: bytes, ttl_ticks: int, now: int
    ) -> int:
        self._advance(now)
        assert source in self._sources, "the source was never added, or was dropped"
        marked = 0
        for prefix in _uint64s(prefix_hashes, "prefix_hashes"):
            mark = (source, context, prefix)
            if any(slot[0] == source for slot in self._slots_of(context, prefix)):
                continue
            if mark not in self._marks and len(self._marks) >= self._limits.speculative_blocks_max:
                self._counts["speculative_refused"] += 1
                continue
            self._marks[mark] = max(self._marks.get(mark, 0), now + ttl_ticks)
            marked += 1
        return marked

    def list_all(self, visits_max: int, now: int) -> bool:
        return True

    def holders(self, context: int, prefix_hash: int, now: int) -> list[tuple[int, int, int]]:
        self._advance(now)
        return sorted(slot[:3] for slot in self._slots_of(context, prefix_hash))

    def holdings(self, context: int, prefix_hashes: bytes, now: int) -> list[Holding]:
        self._advance(now)
        return [
            Holding(place, slot[0], owner)
            for place, prefix in enumerate(_uint64s(prefix_hashes, "prefix_hashes"))
            for slot in self._slots_of(context, prefix)
            for owner in sorted(self._claims.get((slot, prefix), ())) or [0]
        ]

    def owners_at(
        self, source: int, context: int, *, tier: int, group: int, prefix_hashes: bytes
    ) -> list[tuple[int, int]]:
        return [
            (place, owner)
            for place, prefix in enumerate(_uint64s(prefix_hashes, "prefix_hashes"))
            for owner in sorted(self._claims.get(((source, tier, group, context), prefix), ()))
        ]

    def prefix_of(
        self, context: int, source: int, *, tier: int, group: int, engine_hash: int, now: int
    ) -> int | None:
        self._advance(now)
        name = self._names.get((source, tier, group, context), {}).get(engine_hash)
        return None if name is None else name.prefix

    def names(self, cursor: int, names_max: int, now: int) -> tuple[list[NameRun], int | None]:
        """The order is that of E itself; a slice ends behind the E with its `names_max`-th name."""
        self._advance(now)
        rows = sorted(
            (engine_hash, slot, name.prefix, name.copies)
            for slot, names in self._names.items()
            for engine_hash, name in names.items()
            if engine_hash >= cursor
        )
        end = next((i for i in range(names_max, len(rows)) if rows[i][0] != rows[i - 1][0]), None)
        by_slot: dict[Slot, list[tuple[int, int, int]]] = {}
        for engine_hash, slot, prefix, copies in rows[:end]:
            by_slot.setdefault(slot, []).append((engine_hash, prefix, copies))
        runs = [
            NameRun(
                s, c, t, g, *(struct.pack(f"<{len(column)}Q", *column) for column in zip(*named, strict=True))
            )
            for (s, t, g, c), named in by_slot.items()
        ]
        return runs, None if end is None else rows[end][0]

    def prefixes(self, context: int) -> set[int]:
        """All entries of a context; for tests."""
        return set(self._contexts[context].last_seen)

    def plain_prefixes(self, context: int) -> tuple[set[int], set[int]]:
        """What a fuzzy index must have, and what else it may have: plain prefixes that went, and came back
        without their tokens. For tests."""
        known = self._contexts[context]
        return set(known.plain), known.ever_plain & known.last_seen.keys()

    def blocks_by_tier(self, source: int) -> tuple[int, int, int, int]:
        blocks = [0, 0, 0, 0]
        for slot, names in self._names.items():
            if slot[0] == source:
                blocks[slot[1]] += len({name.prefix for name in names.values()})
        return (blocks[0], blocks[1], blocks[2], blocks[3])

    def slots(self) -> list[SlotInfo]:
        """Only those that hold something; all have the number 0."""
        found = []
        for (source, tier, group, context), names in self._names.items():
            prefixes = {name.prefix for name in names.values()}
            digest = sum(map(_mix64, prefixes)) % 2**64
            if prefixes:
                found.append(SlotInfo(context, 0, source, tier, group, len(prefixes), digest))
        return found

    def orphan_blocks(self, source: int) -> int:
        return sum(len(orphan.blocks) for orphan in self._orphans if orphan.slot[0] == source)

    def orphan_drops(self) -> list[tuple[int, int]]:
        drops = sorted(self._drops.items())
        self._drops.clear()
        return drops

    def sweep(self, now: int, visits_max: int) -> SweepResult:
        before = self._counts["expired"]
        self._advance(now)
        return SweepResult(visited=0, expired=self._counts["expired"] - before, idle=True)

    def stats(self) -> IndexStats:
        prefixes = [(c.id, prefix) for c in self._contexts.values() for prefix in c.last_seen]
        names = [name for slot in self._names.values() for name in slot.values()]
        return IndexStats(
            contexts=len(self._contexts),
            prefixes=len(prefixes),
            holder_sets=len({frozenset(slot[:3] for slot in self._slots_of(*p)) for p in prefixes}),
            engine_keys=len(names),
            copies=sum(name.copies > 1 for name in names),
            orphan_blocks=sum(len(orphan.blocks) for orphan in self._orphans),
            speculative_blocks=len(self._marks),
            bytes=0,
            expired=self._counts["expired"],
            evicted=self._counts["evicted"],
            evicted_in_all=self._counts["evicted_in_all"],
            contexts_evicted=self._counts["contexts_evicted"],
            orphans_dropped=self._counts["orphans_dropped"],
            orphans_expired=self._counts["orphans_expired"],
            speculative_refused=self._counts["speculative_refused"],
            claims=sum(map(len, self._claims.values())),
            claims_refused=0,
        )

    # -- the rules

    def _slot(self, source: int, tier: int, group: int, context: int) -> Slot:
        assert source in self._sources, "the source was never added, or was dropped"
        assert 0 <= tier < 4, "tiers are those of app.events.Tier"
        return (source, tier, group, context)

    def _slots_of(self, context: int, prefix: int) -> list[Slot]:
        return [
            slot
            for slot, names in self._names.items()
            if slot[3] == context and any(name.prefix == prefix for name in names.values())
        ]

    def _find_parent(self, slot: Slot, parent: int) -> _Name | None:
        own = self._names.get(slot, {})
        if parent in own:
            return own[parent]
        others = sorted(other for other in self._names if (other[0], other[3]) == (slot[0], slot[3]))
        return next((self._names[other][parent] for other in others if parent in self._names[other]), None)

    def _chain(self, run: _Run, before: int, count_copies: bool) -> int:
        """Depth first without recursion: a run waits on the stack while orphans of its last block go in."""
        stored = 0
        prefixes = _chained((block.content for block in run.blocks), before)
        is_root = before == self._contexts[run.slot[3]].seed
        restating = is_root and self._restates(run.slot, [b.engine_hash for b in run.blocks], prefixes)
        context = self._contexts[run.slot[3]]
        work = [(run, iter(run.blocks), before, before == context.seed or before in context.plain)]
        while work:
            run, blocks, before, plain = work.pop()
            block = next(blocks, None)
            if block is None:
                continue
            prefix = xxhash.xxh64_intdigest(block.content, seed=before)
            if block.plain and (before == context.seed or before in context.ever_plain):
                context.ever_plain.add(prefix)
            plain = plain and block.plain
            work.append((run, blocks, prefix, plain))
            if block.living:
                self._hold(run.slot, block.engine_hash, prefix, count_copies and not restating, run.owner)
                stored += 1
                if plain:
                    context.plain.add(prefix)
            waiting = self._take_waiting(run.slot, block.engine_hash)
            plain = plain or prefix in context.plain
            work += [(orphan, iter(orphan.blocks), prefix, plain) for orphan in reversed(waiting)]
        return stored

    def _restates(self, slot: Slot, names: Sequence[int], prefixes: Sequence[int]) -> bool:
        """A root event of two or more blocks tells nothing but what its slot names."""
        known = {name: named.prefix for name, named in self._names.get(slot, {}).items()}
        pairs = zip(names, prefixes, strict=True)
        return len(names) > 1 and all(known.get(name) == prefix for name, prefix in pairs)

    def _take_waiting(self, slot: Slot, engine_hash: int) -> list[_Run]:
        """The orphans that wait for this block of the source, oldest first; they do not wait any more."""
        waiting = [
            orphan
            for orphan in self._orphans
            if (orphan.slot[0], orphan.slot[3], orphan.parent) == (slot[0], slot[3], engine_hash)
        ]
        self._orphans = [orphan for orphan in self._orphans if orphan not in waiting]
        return waiting

    def _hold(self, slot: Slot, engine_hash: int, prefix: int, count_copies: bool, owner: int) -> None:
        source, _, _, context = slot
        name = self._names.setdefault(slot, {}).get(engine_hash)
        if name is not None and name.prefix != prefix:
            self._unname(slot, engine_hash)
            name = None
        if name is None:
            self._make_room(context, prefix)
            self._names[slot][engine_hash] = _Name(prefix)
        elif count_copies:
            name.copies += 1
        self._contexts[context].last_seen[prefix] = self._now
        self._marks.pop((source, context, prefix), None)
        if self._has_owners and owner in self._owners:
            self._claims.setdefault((slot, prefix), set()).add(owner)

    def _unname(self, slot: Slot, engine_hash: int) -> None:
        prefix = self._names[slot].pop(engine_hash).prefix
        if slot not in self._slots_of(slot[3], prefix):
            self._claims.pop((slot, prefix), None)
        if not self._slots_of(slot[3], prefix):
            del self._contexts[slot[3]].last_seen[prefix]
            self._contexts[slot[3]].plain.discard(prefix)

    def _wait(self, orphan: _Run) -> int:
        room = self._limits.orphan_blocks_max
        if len(orphan.blocks) > room:
            self._report_drop(orphan)
            return 0
        while sum(len(other.blocks) for other in self._orphans) + len(orphan.blocks) > room:
            self._report_drop(self._orphans.pop(0))
        if orphan.blocks:
            self._orphans.append(orphan)
        return len(orphan.blocks)

    def _report_drop(self, orphan: _Run) -> None:
        self._drops[orphan.slot[0]] += len(orphan.blocks)
        self._counts["orphans_dropped"] += len(orphan.blocks)

    # -- going away

    def _advance(self, now: int) -> None:
        assert now >= self._now, "now never goes backwards"
        self._now = now
        self._marks = {mark: deadline for mark, deadline in self._marks.items() if now < deadline}
        ttl = self._limits.ttl_ticks
        if ttl == 0:
            return
        for context in self._contexts.values():
            expired = {prefix for prefix, seen in context.last_seen.items() if now - seen >= ttl}
            self._counts["expired"] += len(expired)
            self._forget(context, expired)
        late = [orphan for orphan in self._orphans if now - orphan.came >= ttl]
        self._counts["orphans_expired"] += sum(len(orphan.blocks) for orphan in late)
        self._orphans = [orphan for orphan in self._orphans if now - orphan.came < ttl]

    def _make_room(self, context_id: int, prefix: int) -> None:
        context = self._contexts[context_id]
        entries = context.last_seen
        if prefix not in entries and len(entries) >= self._limits.prefixes_per_context_max:
            oldest_first = sorted(entries, key=lambda p: entries[p])
            evicted = set(oldest_first[: max(1, len(entries) // 16)])
            self._counts["evicted"] += len(evicted)
            self._forget(context, evicted)
        everything = [(seen, c.id, p) for c in self._contexts.values() for p, seen in c.last_seen.items()]
        if prefix not in entries and len(everything) >= self._limits.prefixes_max:
            everything.sort(key=lambda entry: entry[0])
            oldest = everything[: max(1, len(everything) // 16)]
            self._counts["evicted_in_all"] += len(oldest)
            for _, number, p in oldest:
                self._forget(self._contexts[number], {p})

    def _forget(self, context: _Context, prefixes: set[int]) -> None:
        for prefix in prefixes:
            del context.last_seen[prefix]
        context.plain -= prefixes
        self._claims = {
            (slot, prefix): owners
            for (slot, prefix), owners in self._claims.items()
            if slot[3] != context.id or prefix not in prefixes
        }
        for slot, names in self._names.items():
            if slot[3] == context.id and prefixes:
                for engine_hash in [e for e, name in names.items() if name.prefix in prefixes]:
                    del names[engine_hash]

    def _forget_unheld(self) -> None:
        for context in self._contexts.values():
            held = {
                name.prefix
                for slot, names in self._names.items()
                if slot[3] == context.id
                for name in names.values()
            }
            context.last_seen = {prefix: seen for prefix, seen in context.last_seen.items() if prefix in held}
            context.plain &= held

    def _use(self, context: int) -> int:
        self._contexts[context] = self._contexts.pop(context)
        return context

    def _drop_context(self, context: int) -> None:
        del self._contexts[context]
        self._counts["contexts_evicted"] += 1
        self._names = {slot: names for slot, names in self._names.items() if slot[3] != context}
        self._claims = {claim: owners for claim, owners in self._claims.items() if claim[0][3] != context}
        self._orphans = [orphan for orphan in self._orphans if orphan.slot[3] != context]
        self._marks = {mark: deadline for mark, deadline in self._marks.items() if mark[1] != context}


def _leading(prefixes: list[int], held: Callable[[int], bool]) -> int:
    return len(list(itertools.takewhile(held, prefixes)))


def _uint64s(buffer: bytes, field: str) -> list[int]:
    if len(buffer) % 8:
        raise InvalidInput(f"{field} must be whole uint64 values", field=field)
    return list(struct.unpack(f"<{len(buffer) // 8}Q", buffer))


def _blocks(token_ids: bytes, block_size: int, *, exact: bool) -> list[bytes]:
    """The bytes of each full block of tokens."""
    if len(token_ids) % (4 * block_size if exact else 4):
        raise InvalidInput(
            "token_ids must be whole uint32 values, and whole blocks in a store", field="token_ids"
        )
    size = 4 * block_size
    return [token_ids[at : at + size] for at in range(0, len(token_ids) - size + 1, size)]


def _hash_chain(context: _Context, token_ids: bytes, extra_keys: Iterable[bytes] | None) -> list[int]:
    tokens = _blocks(token_ids, context.block_size, exact=False)
    keys = itertools.chain(extra_keys or (), itertools.repeat(b""))
    chain = [context.seed]
    for content, key in zip(tokens, keys, strict=False):
        chain.append(xxhash.xxh64_intdigest(content + key, seed=chain[-1]))
    return chain[1:]


def _chained(contents: Iterable[bytes], seed: int) -> list[int]:
    return list(itertools.accumulate(contents, lambda h, c: xxhash.xxh64_intdigest(c, seed=h), initial=seed))[
        1:
    ]


def _mix64(key: int) -> int:
    """The finaliser of MurmurHash3 (Appleby, public domain), as in native/xxh64.hpp."""
    key = (key ^ (key >> 33)) * 0xFF51AFD7ED558CCD % 2**64
    key = (key ^ (key >> 33)) * 0xC4CEB9FE1A85EC53 % 2**64
    return key ^ (key >> 33)


def _packed(rows: list[Depths]) -> bytes:
    return b"".join(struct.pack("<6I", row.source, *row.tiers, row.speculative) for row in rows)
