"""The prefix index: which source holds which leading blocks of a prompt, on which tier.

CONTRACT (tests/reference.py is this text as plain Python; the native core must not be told apart from it)

Time. `now` is an integer count of ticks of TICK_MS since the index was made; it never goes backwards.

Hash. seed(context) = XXH64(msgpack([model, lora or nil, block_size]), seed=0);
lora "" is the same as none. h[0] = XXH64(block bytes, seed(context)), h[i] = XXH64(block bytes, seed=h[i-1]);
block bytes = token ids as uint32 LE, then the block's canonical extra keys (possibly none).

Words. A slot is (source, context, tier, group). An engine hash E *names* prefix P in a slot, with copies >= 1. A slot
holds P while at least one of its names is for P. An entry is P with the slots that hold it and `last_seen`.

Expiry. An entry is expired when ttl > 0 and now - last_seen >= ttl. An expired entry is gone, and with it every
name of it: nothing that happens later can tell it from one that never was (speculative marks have their own deadlines).
The same holds for an entry that capacity evicted. (The native core falls short of this in one case, see
native/prefix_index.hpp: a slot that names a prefix by two engine hashes, and an expiry that no sweep has met.)
Only counts may include what is not swept yet: blocks_by_tier and orphan_blocks what has expired (but nothing that was
cleared), ContextInfo.prefixes and stats also what was cleared.

store(source, context, tier, group, engine_hashes, parent, token_ids, extra_keys)
  parent None: the first block is a root. Else the parent is looked up among the source's names in this context:
  first in the same slot, then in the source's other slots by (tier, group) ascending. Unknown: the event becomes an
  orphan.
  Each block (E, P), in order: if the slot names E for another prefix P', that name is dropped with all its copies
  first (newest wins). If the slot names E for P: copies + 1 (no change when `count_copies` is off; a caller never
  mixes the two for one source). Else: name made, copies = 1.
  A root event of two or more blocks, all of which its slot names so already, restates them: no copies there (vLLM's
  `kv_cache_report_mode: full` tells the reused blocks once more, and removes each only once). With a block among them
  that is new, the others are copies: the engine computed them again.
  last_seen = now. A speculative mark of the same (source, context, P) is removed: it is confirmed now.
  After each block: all orphans that wait for (source, context, E) at that moment stop waiting and are chained to P,
  oldest first, each with whatever its own blocks release (depth first), before the next block. So no orphan ever
  waits for a hash that its source names in its context.
orphans
  An orphan keeps its slot, parent hash, engine hashes, tokens, extra keys and one living copy of each block.
  Chaining it is the store of its living blocks; dead blocks only lend their hash to the chain (and release their
  own waiters), and for that an orphan stays when all its blocks are dead. Wherever orphan blocks are counted, dead
  ones count too.
  Expired like entries, by the tick it came. Bounded by `orphan_blocks_max` blocks in all: the oldest are dropped to
  make room (one that is larger than the bound is dropped itself, alone). Only these drops are reported by
  `orphan_drops`, not expiry, clears or the eviction of a context.
place(source, tier, group, engine_hashes)  blocks known by name only (placeholders)
  Each E is looked up among all names of the source: by (tier, group, seed of the context) ascending. Found: (E, P) is
  stored as above in the slot of that context. Unknown: counted, nothing else.
store_prefixes(source, context, tier, group, engine_hashes, prefix_hashes, copies)
  Blocks whose prefix hashes are known: each (E, P) is stored as above in that slot, but there are `copies` of it
  afterwards (1 where none are given), however many there were. So the same again changes nothing.
store_hashed(source, context, tier, group, engine_hashes, chain_from, prefix_hashes, contents)
  A `store` that was hashed elsewhere, chained to the prefix `chain_from` (None: a root event) whether anybody
  holds that or not; so nothing of it ever waits. `contents` are (SimHash, content hash), uint64, of the leading
  blocks without extra keys, and stand in for their tokens.
chain_of(source, context, tier, group, parent)
  The prefix that a store into this slot would chain a child of `parent` to; None: it would wait.
names(cursor)
  Every (slot, E, P, copies) that there is, in an order of the index's own and in slices of about `names_max`:
  from cursor 0 on, the next one until that is None. What is named from the first slice to the last comes once,
  whatever else is stored and removed meanwhile. Stored with `store_prefixes` into a new index, the result makes
  the same matches and takes the same removals. Not in it: orphans, speculative marks, ages.
remove(source, tier, group, engine_hashes)
  Each E, in every context where that slot names E (each counts as one removed block): copies - 1; at 0 the name
  goes; when it was the slot's last name for P the slot no longer holds P; an entry that nobody holds is gone. Where
  no slot names E: the oldest orphan of the same source, tier and group with a living E loses that copy (the first,
  if several). Else: counted as unknown.
clear(source, tier=None, context=None)
  All slots of the source that fit hold nothing and name nothing; their orphans are dropped (not reported). With
  tier None (everything) or GPU, the source's speculative marks go too (in that context or in all).
drop_source(source): clear of everything; the id is not used again.
match(context, token_ids | prefix_hashes)
  For each source and each tier t: depth[t] = number of leading blocks each held by the source on some tier <= t.
  speculative depth = the same with any tier or a speculative mark. Rows, in no order, for sources with some
  depth > 0.
  Tokens past the last full block and extra keys past the last block are ignored; missing extra keys are none.
  Every block of the longest confirmed depth gets last_seen = now; no other.
  `prefix_hashes` here and for `add_speculative` are a chain, each of the block behind the one before it, from the first
  block of a prompt on: of others some may be missed.
add_speculative(context, source, prefix_hashes, ttl)
  Marks (source, context, P) until now + ttl (the later of old and new); a P that the source holds (in any slot of the
  context) is skipped. ttl >= 1; gone when now >= deadline. Bounded by `speculative_blocks_max` in all (marks past their
  deadline may count until swept): surplus is refused and counted.
  Returns the hashes that are now marked because of the call, new or prolonged.
capacity
  A context never has more than `prefixes_per_context_max` entries: before an insertion that would exceed it, about
  a sixteenth (at least one) of the least recently seen entries is evicted. All contexts together never have more than
  `prefixes_max` (those of dropped contexts count until swept): the same, with the least recently seen entries of all.
  More than `contexts_max` contexts: the least recently used one (asked for by `context`, stored into or matched) is
  dropped whole, with its names, orphans and marks; its id is not used again.

owners
  `add_owner` gives a number. An event that is stored with one claims each block that it stores: (slot, P, owner).
  Claims of one block by several owners are all kept, and the same claim again changes nothing. A claim ends when its
  slot holds P no more, however that comes, or with `clear_owner`; the number is not used again. Bounded by `claims_max`
  (claims that have ended may count until swept): surplus is refused and counted. Where there is no FuzzyIndex, or
  it does not take the context, nobody claims anything.
holdings(context, prefix_hashes)
  For each prefix that has an entry, by place: (source, owner) of every slot that holds it and every owner that claims
  it there, and (source, 0) of a slot where nobody does. `owner_claims`: how many each owner has, swept or not;
  `unclaimed_owners`: those that have none, at no cost where there are none.
owners_at(source, context, tier, group, prefix_hashes)
  For each prefix, by place: every owner that claims it in that slot, expired or not.

contents
  An index made with a FuzzyIndex keeps it in step: after every call it has exactly the plain prefixes that have an
  entry, in every context whose blocks can have a SimHash. A prefix is plain when its tokens came with a `store` and
  when neither it nor any block before it has extra keys, as far as is known: what stands on a prefix that is not in
  the FuzzyIndex is not plain. Entries that are expired or held by nobody any more are there until they are swept.

Memory. A call that finds none raises MemoryError. Then nothing has changed, or what some of its leading blocks change, or
what it evicts, and made again it does the rest; what the FuzzyIndex was to be told, the next call tells it. Where a block
is more than one change (its name in several contexts, a name that meant another prefix, orphans that wait for it), some
of them may be done; orphans wait on for their parent to be stored again. An export or import that raised is at its end.

Work. Clear, drop and context drop are O(1): dead slots are masked in every query and swept in slices by `sweep`.
Whatever asks for a prefix without its chain (`holders`, `holdings`, `store_prefixes`, `store_hashed`, imports) needs
every entry to be listed by its hash, and new ones from then on: `list_all` does that in slices, or they do it at once.
Ten minutes behind the last of them, sweeps begin to undo it.
"""

from __future__ import annotations

import array
import dataclasses
import struct
from collections.abc import Mapping

import msgspec

from app import hashing
from app.errors import InvalidInput, NativeCoreMissing
from app.fuzzy.fuzzy_index import FuzzyIndex

try:
    from app import _native
except ImportError as error:
    raise NativeCoreMissing from error

TICK_MS = 100
_ROW = struct.Struct("<6I")
_HOLDING = struct.Struct("<3I")
_ONE = struct.pack("<Q", 1)
_NO_CONTEXTS: Mapping[int, int] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class IndexLimits:
    """Bounds of the index; `ttl_ticks` 0 means that entries do not expire."""

    ttl_ticks: int = 12_000
    contexts_max: int = 1_000
    prefixes_per_context_max: int = 10_000_000
    prefixes_max: int = 40_000_000  # in all; below 2**28 - 2**11
    orphan_blocks_max: int = 65_536
    speculative_blocks_max: int = 262_144
    claims_max: int = 4_000_000
    lists_all: bool = False  # for whoever asks by hash alone all the time, as replicas do


class StoreResult(msgspec.Struct, frozen=True):
    stored_blocks: int  # blocks indexed by this call, chained orphans included
    orphan_blocks: int  # blocks of this call that now wait for their parent
    unknown_blocks: int  # placeholders that the source never named


@dataclasses.dataclass(frozen=True, slots=True)
class NameRun:
    """Names of one slot: `engine_hashes[i]` is `prefix_hashes[i]`, `copies[i]` times; uint64, little-endian."""

    source: int
    context: int
    tier: int
    group: int
    engine_hashes: bytes
    prefix_hashes: bytes
    copies: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class SlotInfo:
    """A slot and what it holds, swept or not; `digest` is the sum modulo 2^64 of mix64 of its prefixes."""

    context: int
    slot: int  # its number in the context
    source: int
    tier: int
    group: int
    blocks: int
    digest: int


class Holding(msgspec.Struct, frozen=True):
    """A source that holds a prefix, and an owner whom it holds it for; 0 where none was named."""

    prefix: int  # its place among those that were asked for
    source: int
    owner: int


class RemoveResult(msgspec.Struct, frozen=True):
    removed_blocks: int  # copies taken away (from slots or from orphans)
    unknown_blocks: int


class Depths(msgspec.Struct, frozen=True):
    """One row of a match: depths in blocks, `tiers[t]` cumulative over tiers 0..t (see app.events.Tier)."""

    source: int
    tiers: tuple[int, int, int, int]
    speculative: int


@dataclasses.dataclass(frozen=True, slots=True)
class ContextInfo:
    id: int
    model: str
    lora: str | None
    block_size: int
    prefixes: int


@dataclasses.dataclass(frozen=True, slots=True)
class SweepResult:
    visited: int  # table entries looked at; 0 when there was nothing to do
    expired: int  # entries that outlived the TTL
    idle: bool  # a pass over the whole index has just ended, or there was nothing to sweep


@dataclasses.dataclass(frozen=True, slots=True)
class IndexStats:
    contexts: int
    prefixes: int  # entries, swept or not
    holder_sets: int
    engine_keys: int
    copies: int  # names with more than one copy
    orphan_blocks: int
    speculative_blocks: int
    bytes: int  # held by the native tables
    expired: int  # since start
    evicted: int  # by `prefixes_per_context_max`, since start
    evicted_in_all: int  # by `prefixes_max`
    contexts_evicted: int
    orphans_dropped: int  # blocks
    orphans_expired: int  # blocks
    speculative_refused: int
    claims: int  # swept or not
    claims_refused: int


@dataclasses.dataclass(slots=True)
class _Context:
    model: str
    lora: str | None
    block_size: int


class PrefixIndex:
    """See the module's contract. A buffer whose length does not fit raises InvalidInput, and nothing has changed then.
    The id of a source or context that is gone is the caller's bug."""

    def __init__(self, limits: IndexLimits, contents: FuzzyIndex | None = None) -> None:
        self._contents = contents
        self._core = _native.PrefixIndex(
            limits.ttl_ticks,
            limits.contexts_max,
            limits.prefixes_per_context_max,
            limits.prefixes_max,
            limits.orphan_blocks_max,
            limits.speculative_blocks_max,
            limits.claims_max,
            limits.lists_all,
            None if contents is None else contents.core,
        )
        self._contexts: dict[int, _Context] = {}
        self._by_model: dict[tuple[str, str | None], dict[int, int]] = {}  # -> block size -> id

    # -- contexts and sources

    def context(self, model: str, lora: str | None, block_size: int, now: int) -> int:  # noqa: ARG002 (the oracle's)
        """Id of the context, made when new (counts as use)."""
        lora = lora or None
        sizes = self._by_model.get((model, lora), {})
        found = sizes.get(block_size)
        if found is not None:
            self._core.touch_context(found)
            return found
        if block_size < 1:
            raise InvalidInput(f"block_size must be at least 1 token, not {block_size}", field="block_size")
        context, evicted = self._core.add_context(hashing.context_seed(model, lora, block_size), block_size)
        if evicted is not None:
            gone = self._contexts.pop(evicted)
            of_model = self._by_model[gone.model, gone.lora]
            del of_model[gone.block_size]
            if not of_model:
                del self._by_model[gone.model, gone.lora]
        if self._contents is not None:
            if evicted is not None:
                self._contents.drop_context(evicted)
            self._contents.add_context(context, block_size)
        self._contexts[context] = _Context(model, lora, block_size)
        self._by_model.setdefault((model, lora), {})[block_size] = context
        return context

    def find_contexts(self, model: str, lora: str | None) -> list[ContextInfo]:
        """Existing contexts of a model and adapter, one a block size, oldest first. Does not count as use."""
        return [self._info(context) for context in self._by_model.get((model, lora or None), {}).values()]

    def context_ids(self, model: str, lora: str | None) -> Mapping[int, int]:
        """Block size -> id of the same, oldest first."""
        return self._by_model.get((model, lora or None), _NO_CONTEXTS)

    def contexts(self) -> list[ContextInfo]:
        return [self._info(context) for context in self._contexts]

    def _info(self, context: int) -> ContextInfo:
        known = self._contexts[context]
        size = self._core.context_size(context)
        return ContextInfo(context, known.model, known.lora, known.block_size, size)

    def add_owner(self) -> int:
        return self._core.add_owner()

    def clear_owner(self, owner: int) -> None:
        self._core.clear_owner(owner)

    def owner_claims(self) -> dict[int, int]:
        return dict(self._core.owner_claims())

    def unclaimed_owners(self) -> list[int]:
        return self._core.unclaimed_owners()

    def add_source(self) -> int:
        return self._core.add_source()

    def drop_source(self, source: int) -> None:
        self._require_source(source)
        self._core.drop_source(source)

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
        self._require_source(source)
        self._require_context(context)
        block_size = self._contexts[context].block_size
        if len(engine_hashes) % 8:
            raise InvalidInput("engine hashes must be 8 bytes each", field="block_hashes")
        blocks = len(engine_hashes) // 8
        if len(token_ids) != blocks * block_size * 4:
            raise InvalidInput(
                f"{blocks} blocks of {block_size} tokens need {blocks * block_size} token ids, "
                f"not {len(token_ids) / 4:g}",
                field="token_ids",
            )
        if extra_keys is not None and len(extra_keys) != blocks:
            raise InvalidInput(
                f"{blocks} blocks need {blocks} extra keys, not {len(extra_keys)}", field="extra_keys"
            )
        return StoreResult(
            *self._core.store(
                source,
                context,
                tier,
                group,
                engine_hashes,
                parent,
                token_ids,
                extra_keys,
                now,
                count_copies,
                owner,
            )
        )

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
        self._require_source(source)
        if len(engine_hashes) % 8:
            raise InvalidInput("engine hashes must be 8 bytes each", field="block_hashes")
        return StoreResult(*self._core.place(source, tier, group, engine_hashes, now, count_copies, owner))

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
        """`copies` are uint64, at least 1 each. `count_copies` is for orphans that are chained by it."""
        self._require_source(source)
        self._require_context(context)
        if len(engine_hashes) % 8:
            raise InvalidInput("engine hashes must be 8 bytes each", field="block_hashes")
        if len(prefix_hashes) != len(engine_hashes):
            raise InvalidInput("there is not one prefix hash a block", field="prefix_hashes")
        if copies is None:
            copies = _ONE * (len(engine_hashes) // 8)
        if len(copies) != len(engine_hashes):
            raise InvalidInput("there is not one number of copies a block", field="copies")
        if 0 in array.array("Q", copies):
            raise InvalidInput("a block that is stored has at least one copy", field="copies")
        return StoreResult(
            *self._core.store_prefixes(
                source,
                context,
                tier,
                group,
                engine_hashes,
                prefix_hashes,
                copies,
                now,
                count_copies,
                owner,
            )
        )

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
        self._require_source(source)
        self._require_context(context)
        size = len(engine_hashes)
        if size % 8 or len(prefix_hashes) != size or len(contents) % 16 or len(contents) > 2 * size:
            raise InvalidInput("each block needs 8 bytes of name and of prefix hash", field="prefix_hashes")
        return StoreResult(
            *self._core.store_hashed(
                source,
                context,
                tier,
                group,
                engine_hashes,
                chain_from,
                prefix_hashes,
                contents,
                now,
                count_copies,
                owner,
            )
        )

    def chain_of(
        self, source: int, context: int, *, tier: int, group: int, parent: int, now: int
    ) -> int | None:
        self._require_source(source)
        self._require_context(context)
        return self._core.chain_of(source, context, tier, group, parent, now)

    def remove(self, source: int, *, tier: int, group: int, engine_hashes: bytes, now: int) -> RemoveResult:
        self._require_source(source)
        if len(engine_hashes) % 8:
            raise InvalidInput("engine hashes must be 8 bytes each", field="block_hashes")
        return RemoveResult(*self._core.remove(source, tier, group, engine_hashes, now))

    def clear(self, source: int, *, tier: int | None = None, context: int | None = None) -> None:
        self._require_source(source)
        self._core.clear(source, tier, context)

    # -- queries

    def match_tokens(
        self, context: int, token_ids: bytes, extra_keys: tuple[bytes, ...] | None, now: int
    ) -> list[Depths]:
        return unpack_rows(self.match_tokens_packed(context, token_ids, extra_keys, now))

    def match_hashes(self, context: int, prefix_hashes: bytes, now: int) -> list[Depths]:
        return unpack_rows(self.match_hashes_packed(context, prefix_hashes, now))

    def match_tokens_packed(
        self, context: int, token_ids: bytes, extra_keys: tuple[bytes, ...] | None, now: int
    ) -> bytes:
        """The rows of a match as uint32: source, depth of each tier, speculative depth."""
        self._require_context(context)
        if len(token_ids) % 4:
            raise InvalidInput("token ids must be 4 bytes each", field="token_ids")
        return self._core.match_tokens(context, token_ids, extra_keys, now)

    def match_hashes_packed(self, context: int, prefix_hashes: bytes, now: int) -> bytes:
        self._require_context(context)
        if len(prefix_hashes) % 8:
            raise InvalidInput("prefix hashes must be 8 bytes each", field="prefix_hashes")
        return self._core.match_hashes(context, prefix_hashes, now)

    def apply_plain(
        self, batch: _native.PlainBatch, source: int, context: int, *, now: int, count_copies: bool
    ) -> tuple[int, int, int, int]:
        """`store` and `remove` of its events in their order, the stored ones in `context`, whose block size is theirs.

        Blocks stored, removed, that wait for their parent, and that are not known.
        """
        self._require_source(source)
        return batch.apply(self._core, source, context, now, count_copies)

    def answer(
        self,
        book: _native.AnswerBook,
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
        """A match of whole token ids or prefix hashes as the book writes it, between the two texts of `frame`."""
        self._require_context(context)
        head, tail = frame
        return book.match(
            self._core, context, asked, are_hashes, extra_keys, now, head, tail, unit, tokens, now_s, sources
        )

    def prefix_hashes(
        self,
        model: str,
        lora: str | None,
        block_size: int,
        token_ids: bytes,
        extra_keys: tuple[bytes, ...] | None,
    ) -> bytes:
        """uint64 LE, one a full block; makes no context."""
        return hashing.prefix_hashes(model, lora, block_size, token_ids, extra_keys)

    def add_speculative(
        self, context: int, source: int, prefix_hashes: bytes, ttl_ticks: int, now: int
    ) -> int:
        self._require_source(source)
        self._require_context(context)
        if len(prefix_hashes) % 8:
            raise InvalidInput("prefix hashes must be 8 bytes each", field="prefix_hashes")
        if ttl_ticks < 1:
            raise InvalidInput(f"a speculative entry must live at least {TICK_MS} ms", field="ttl_s")
        return self._core.add_speculative(context, source, prefix_hashes, ttl_ticks, now)

    def list_all(self, visits_max: int, now: int) -> bool:
        """Looks at about so many entries and makes them findable by their hash alone; True when all are, and new ones
        will be. `holdings`, `holders`, `store_prefixes`, `store_hashed` and imports need that, and do what is left of it
        at once: 65 ms for a million blocks. Ten minutes behind the last of them, sweeps begin to undo it."""
        return self._core.list_all(visits_max, now)

    def holdings(self, context: int, prefix_hashes: bytes, now: int) -> list[Holding]:
        packed = self._core.holdings(context, prefix_hashes, now)
        return [Holding(*row) for row in _HOLDING.iter_unpack(packed)]

    def owners_at(
        self, source: int, context: int, *, tier: int, group: int, prefix_hashes: bytes
    ) -> list[tuple[int, int]]:
        """(place in the question, owner); for dumps."""
        return self._core.owners_at(context, source, tier, group, prefix_hashes)

    def holders(self, context: int, prefix_hash: int, now: int) -> list[tuple[int, int, int]]:
        """(source, tier, group) of every slot that holds the prefix, sorted; for tests and dumps."""
        return sorted(self._core.holders(context, prefix_hash, now))

    def prefix_of(
        self, context: int, source: int, *, tier: int, group: int, engine_hash: int, now: int
    ) -> int | None:
        """The prefix hash of what the slot (source, tier, group) holds in the context by that name; None for
        nothing, a context or a source that is gone included."""
        return self._core.prefix_of(context, source, tier, group, engine_hash, now)

    def names(self, cursor: int, names_max: int, now: int) -> tuple[list[NameRun], int | None]:
        """One slice, one run a slot, and the next cursor."""
        assert names_max > 0, "a slice without names would never come to an end"
        runs, done, at, in_others = self._core.names(cursor >> 1, bool(cursor & 1), names_max, now)
        return [NameRun(*run) for run in runs], None if done else at << 1 | in_others

    def blocks_by_tier(self, source: int) -> tuple[int, int, int, int]:
        """Blocks held per tier: distinct prefixes per slot, summed over contexts and groups; expired ones count until
        swept."""
        self._require_source(source)
        return self._core.blocks_by_tier(source)

    def slots(self) -> list[SlotInfo]:
        """Every slot that was stored into and not cleared since. Entries that expired count until swept."""
        return [SlotInfo(*row) for row in self._core.slots()]

    def orphan_blocks(self, source: int) -> int:
        return self._core.orphan_blocks(source)

    def orphan_drops(self) -> list[tuple[int, int]]:
        """(source, blocks) dropped for want of room since the last call."""
        return self._core.orphan_drops()

    # -- snapshots: see native/prefix_index_snapshot.cpp

    @property
    def shingle(self) -> int | None:
        """Of the SimHashes of its FuzzyIndex; None where it has none."""
        return None if self._contents is None else self._contents.shingle

    def start_export(self) -> IndexExport:
        """One at a time: a new one ends the one before."""
        return IndexExport(self._core)

    def start_import(
        self, *, saved_at: int, elapsed: int, now: int, takes_contents: bool = True
    ) -> IndexImport:
        """`saved_at` is the tick of the snapshot, `elapsed` the ticks since, `now` this index's tick.

        `takes_contents` is for contents whose SimHashes were made with this FuzzyIndex's `shingle`.
        """
        return IndexImport(self._core, saved_at, elapsed, now, takes_contents)

    # -- time

    def sweep(self, now: int, visits_max: int) -> SweepResult:
        return SweepResult(*self._core.sweep(now, visits_max))

    def stats(self) -> IndexStats:
        return IndexStats(*self._core.statistics())

    def _require_source(self, source: int) -> None:
        assert self._core.has_source(source), f"source {source} was dropped or never added"

    def _require_context(self, context: int) -> None:
        assert context in self._contexts, f"context {context} was evicted or never made"


class IndexExport:
    """A snapshot of the index that is being written: frames, to be read by IndexImport in the same order.

    `names` until it says that it is done, then `contents` and `claims` until each is, then `changes` as often as
    wanted, until few are left; then, without anything in between, the last `changes`, the last `contents`, `claims`
    until they are done once more, PrefixIndex.slots and the owners that are not cleared: with that, the frames are the
    index of that instant, but for the ages of what is matched while they are written.
    `close` in any case. Without `contents` the fuzzy index begins empty, and without `claims` nobody claims anything.
    """

    def __init__(self, core: _native.PrefixIndex) -> None:
        self._core = core
        core.export_begin()

    def names(self, names_max: int) -> tuple[bytes, bool]:
        """A frame of about so many names; True with the last."""
        assert names_max > 0, "a slice without names would never come to an end"
        return self._core.export_names(names_max)

    def contents(self, blocks_max: int) -> tuple[bytes, bool]:
        """A frame of what the fuzzy index holds: about so many blocks more, and what changed meanwhile; True when
        from now on there is only what changed."""
        return self._core.export_contents(blocks_max)

    def claims(self, claims_max: int) -> tuple[bytes, bool]:
        """A frame of whom blocks are stored for: about so many more, and what changed meanwhile; True when that was
        all until now."""
        assert claims_max > 0, "a slice without claims would never come to an end"
        return self._core.export_claims(claims_max)

    def has_whole_contents(self) -> bool:
        """Behind the last frame. False without a fuzzy index, and where more changed at one go than is kept."""
        return self._core.has_whole_contents()

    def changes(self, keys_max: int) -> tuple[bytes, int]:
        """A frame of up to so many names that changed since they were written; how many are left."""
        return self._core.export_changes(keys_max)

    def close(self) -> None:
        self._core.export_end()


class IndexImport:
    """A snapshot that is being read into sources and contexts that hold nothing."""

    def __init__(
        self, core: _native.PrefixIndex, saved_at: int, elapsed: int, now: int, takes_contents: bool
    ) -> None:
        self._core = core
        self._slots = _native.SlotMap()
        self._takes_contents = takes_contents
        self._ticks = (saved_at, elapsed, now)

    def slot(self, saved: SlotInfo, *, context: int, source: int) -> None:
        """Where a slot of the snapshot is from now on; slots that are not told of are left out."""
        self._core.import_slot(
            self._slots, saved.context, saved.slot, context, source, saved.tier, saved.group
        )

    def owner(self, saved: int, *, owner: int) -> None:
        """What the number of an owner in the snapshot is from now on; owners that are not told of are left out."""
        self._slots.import_owner(saved, owner)

    def expect(self, *, other_names: int, entries: Mapping[int, int] | None = None) -> None:
        """How many entries are about to come by context, and how many names beyond one each: guesses that save much
        of the time of a large snapshot. Too low they save less, too high they cost 64 KiB for every 5,000, up to the
        bounds of the index."""
        names = sum(self._core.import_expect(context, count) for context, count in (entries or {}).items())
        self._core.import_expect_names(names, other_names)

    def frame(self, frame: bytes) -> bool:
        """False for bytes that no export made; what could be read of them is in the index then."""
        return self._core.import_frame(frame, self._slots, *self._ticks, self._takes_contents)

    def settle(self, blocks_max: int) -> bool:
        """Behind the last frame, until it is True: then the claims are there, and the fuzzy index is in step with
        this one."""
        return self._core.import_settle(blocks_max)


def unpack_rows(packed: bytes) -> list[Depths]:
    return [
        Depths(source, (gpu, cpu, disk, external), marked)
        for source, gpu, cpu, disk, external, marked in _ROW.iter_unpack(packed)
    ]
